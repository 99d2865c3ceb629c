#!/usr/bin/env python3
"""Rows of the engine on a real model beside the same rows elsewhere, for 64 mixed prompts, greedy and sampled.

    check_rows.py [MODEL [PROMPTS]]

In slots of one shape a row must be the same to the last bit in any order, and alone. ``generate`` of one row has other
shapes, so it rounds differently: the share of equal rows is told, and a row that differs must do so first at a token
whose margin is within rounding. Exit code 1 if not.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA logs an error for each program it reads back

import jax
import numpy as np

import jaxdecode as jd
from jaxdecode.cli.compilation import keep_compiled_programs
from jaxdecode.engine import Engine, Options, Request
from jaxdecode.keys import row_keys

LONGEST, NEW, ALONE = 97, 16, 12
ROUNDING = 1e-3  # of logits for greedy rows, of probability for others; float32 differs by some 1e-5
TEXT = """The old lighthouse keeper wrote in his book every evening, about the ships that had passed, the weather, and
what he had eaten. One night a storm came from the north, and he saw a small boat without a sail near the rocks. In 1969
the first people walked on the Moon; the journey took three days. To bake bread you need flour, water, salt and yeast:
mix them, wait for two hours, and bake the loaf until it sounds hollow. def add(a, b): return a + b"""


def prompts_of(loaded: Any, count: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    texts, words = [], TEXT.split()
    for _ in range(count):
        begin, size = random.integers(0, len(words) - 2), int(np.exp(random.uniform(0, np.log(60))))
        texts.append(" ".join(words[begin : begin + size]))
    return [loaded.tokenizer.encode(text)[:LONGEST] for text in texts]


def main() -> int:
    keep_compiled_programs()
    loaded = jd.load((sys.argv[1:2] or ["smollm2-135m"])[0])
    prompts = prompts_of(loaded, int((sys.argv[2:3] or ["64"])[0]))
    keys = row_keys(jax.random.key(2), len(prompts))
    lengths = np.random.default_rng(4).integers(1, NEW + 1, len(prompts))

    def settings(row: int, new: int) -> Any:
        return jd.Settings(max_new_tokens=new, temperature=[0.0, 0.8][row % 2], top_p=0.95)

    requests = [
        Request(i, p, settings(i, int(n)), keys[i]) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    engine = Engine(loaded.model, loaded.params, options=Options(slots=16))

    def served(asked: list[Request]) -> dict[int, Any]:
        return {r.request.id: r.out for r in engine.serve(asked)}

    first, again = served(requests), served(requests[::-1])
    alone = {i: served([requests[i]])[i] for i in range(0, len(requests), max(1, len(requests) // ALONE))}
    exact = all(
        np.array_equal(one.tokens, first[i].tokens) and np.array_equal(one.logprob, first[i].logprob)
        for others in (again, alone)
        for i, one in others.items()
    )
    differ = []
    for i, prompt in enumerate(prompts):
        tokens = np.zeros((1, LONGEST), np.int32)  # one width, so one program
        tokens[0, : len(prompt)] = prompt
        more = {"lengths": np.array([len(prompt)]), "key": keys[i : i + 1], "settings": settings(i, NEW)}
        out = jd.generate(loaded.model, loaded.params, tokens, **more)
        n = int(lengths[i])
        unequal = np.flatnonzero(np.asarray(out.tokens)[0, :n] != first[i].tokens[0, :n])
        if len(unequal):
            at = int(unequal[0])
            margin = min(float(getattr(first[i], name)[0, at]) for name in ("margin", "set_margin"))
            differ.append({"row": i, "token": at, "margin": margin})
    rows = {"rows": len(prompts), "tokens": int(lengths.sum()), "alone": len(alone), "same_bits_in_slots": exact}
    print(json.dumps({**rows, "same_as_one_row": 1 - len(differ) / len(prompts), "differ": differ}))  # noqa: T201
    return int(not exact or any(row["margin"] > ROUNDING for row in differ))


if __name__ == "__main__":
    sys.exit(main())
