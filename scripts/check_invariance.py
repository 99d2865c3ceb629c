#!/usr/bin/env python3
"""Rows of the engine to the last bit, whatever stands beside them: 64 rows over 8 slots in random schedules.

    check_invariance.py [MODEL [SCHEDULES]]

MODEL: "random" (a 2-layer Llama with random weights, the default), "random-int8", or a source of ``load``. Each
schedule has its own order, times of arrival, part of the rows, and numbers of the engine that are no shapes. Greedy and
sampled rows, prefixes not shared. Exit code 1 if a bit of a token or log probability differs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA logs an error for each program it reads back

import jax
import numpy as np

import jaxdecode as jd
from jaxdecode.engine import Engine, Options, Request
from jaxdecode.keys import row_keys
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer

ROWS, SLOTS = 64, 8
SHAPES = {"slots": SLOTS, "staged": 4, "chunk": 16, "prefixes": 0}


def model_of(name: str) -> tuple[Any, Any, int]:
    if not name.startswith("random"):
        loaded = jd.load(name)
        return loaded.model, loaded.params, loaded.config.vocab_size
    config = TransformerConfig(300, 64, 2, 4, 2, 16, 160, 1024)
    params = init_params(config, jax.random.key(0))
    return transformer(config), jd.quantize(params, "int8") if name == "random-int8" else params, config.vocab_size


def requests_of(vocab_size: int) -> list[Request]:
    random, keys = np.random.default_rng(1), row_keys(jax.random.key(2), ROWS)
    warm = [jd.Settings(max_new_tokens=n, temperature=t, top_p=0.95) for n in (1, 3, 6, 12) for t in (0.0, 0.9)]
    return [
        Request(i, random.integers(0, vocab_size, random.integers(1, 60)).tolist(), warm[i % len(warm)], keys[i])
        for i in range(ROWS)
    ]


def arrivals(requests: list[Request], random: np.random.Generator) -> Iterator[Request | None]:
    """Some of the requests in a random order, with turns between them in which none is there."""
    for i in random.permutation(ROWS)[: random.integers(1, ROWS + 1)]:
        for _ in range(random.integers(0, 3) if random.random() < 0.2 else 0):
            yield None
        yield requests[i]


def schedules(engine_of: Any, requests: list[Request], count: int) -> Iterator[tuple[int, int]]:
    """For each schedule: its rows, and how many of them are not what they were the first time."""
    first = {r.request.id: r.out for r in engine_of({}).serve(requests)}
    for seed in range(count):
        random = np.random.default_rng([3, seed])
        numbers = {
            "passes": int(random.integers(1, 6)),
            "steps": int(random.choice([1, 2, 5, 16])),
            "refill": float(random.choice([0, 0.2, 1])),
            "window": int(random.choice([1, 8, 64])),
        }
        rows, unequal = 0, 0
        for result in engine_of(numbers).serve(arrivals(requests, random)):
            was, out = first[result.request.id], result.out
            rows += 1
            fields = ("tokens", "logprob", "processed_logprob", "margin")
            unequal += not all(np.array_equal(getattr(was, name), getattr(out, name)) for name in fields)
        yield rows, unequal


def engines(model: Any, params: Any) -> Any:
    """Engines that differ in numbers alone; they share the compiled programs."""
    one = Engine(model, params, options=Options(**SHAPES))

    def engine_of(numbers: dict[str, Any]) -> Engine:
        one.options = Options(**SHAPES)._replace(**numbers)
        return one

    return engine_of


def main() -> int:
    name, count = (sys.argv[1:2] or ["random"])[0], int((sys.argv[2:3] or ["100"])[0])
    model, params, vocab_size = model_of(name)
    begin = time.perf_counter()
    found = list(schedules(engines(model, params), requests_of(vocab_size), count))
    rows, unequal = (sum(x) for x in zip(*found, strict=True))
    told = {"model": name, "schedules": count, "rows": rows, "unequal": unequal}
    print(json.dumps({**told, "seconds": round(time.perf_counter() - begin, 1)}))  # noqa: T201
    return int(unequal > 0)


if __name__ == "__main__":
    sys.exit(main())
