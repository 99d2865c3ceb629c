#!/usr/bin/env python3
"""More text to calibrate on where there is little: a model goes on from places spread over what there is.

    continue_text.py tests/texts/time_machine.txt --count 160 > more.txt

Each piece is 64 tokens of the text and 448 drawn from the model's own law, so that tuning sees what the model writes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import numpy as np

import jaxdecode as jd
from jaxdecode.cli.compilation import keep_compiled_programs

ROWS = 32  # of a batch


def pieces(loaded: jd.Loaded, ids: list[int], starts: np.ndarray, given: int, new: int, seed: int) -> list[str]:
    settings = loaded.settings(temperature=1.0, max_new_tokens=new, min_new_tokens=new)
    found = []
    for first in range(0, len(starts), ROWS):
        prompts = [ids[at : at + given] for at in starts[first : first + ROWS]]
        key = jax.random.key(seed + first)
        out = jd.generate(loaded.model, loaded.params, prompts, key=key, settings=settings)
        found += [loaded.tokenizer.decode(a + b) for a, b in zip(prompts, out.to_lists(), strict=True)]
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("text", type=Path)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--count", type=int, default=160, help="pieces")
    options.add_argument("--given", type=int, default=64, help="tokens of each that are of the text")
    options.add_argument("--new", type=int, default=448, help="tokens of each that the model writes")
    options.add_argument("--offset", type=int, default=0, help="tokens by which the places are moved on")
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    keep_compiled_programs()
    loaded = jd.load(asked.model)
    ids = loaded.tokenizer.encode(asked.text.read_text("utf-8"))
    last = len(ids) - asked.given - 1
    if last < 0:
        options.error(f"{asked.text}: expected more than {asked.given} tokens, got {len(ids)}")
    starts = np.minimum(np.linspace(0, last, asked.count).astype(int) + asked.offset, last)
    sys.stdout.write("\n\n".join(pieces(loaded, ids, starts, asked.given, asked.new, asked.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
