#!/usr/bin/env python3
"""Rows of the engine to the last bit, whatever stands beside them: 64 rows over 8 slots in random schedules.

    check_invariance.py [MODEL [SCHEDULES]] [--notes FILE] [--seconds N]
    check_invariance.py [MODEL] --cost

MODEL: "random" (a 2-layer Llama with random weights, the default), "random-int8", or a source of ``load``. Each
schedule has its own order, times of arrival, and numbers of the engine that are no shapes. Greedy and sampled rows,
prefixes not shared. Exit code 1 if a bit of a token or log probability differs. --notes: what is done, a
line a schedule; the same command goes on after it, after a kill and after --seconds too (exit code 3: not all done).
--cost: the time of all rows with and without the sharing of prefixes, which is all that `batch --invariant` turns off.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
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
FIELDS = ("tokens", "logprob", "processed_logprob", "margin")
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
    """The requests in a random order, with turns between them in which none is there."""
    for i in random.permutation(ROWS):
        for _ in range(random.integers(0, 3) if random.random() < 0.2 else 0):
            yield None
        yield requests[i]


def answers(engine: Engine, requests: list[Request]) -> dict[Any, Any]:
    return {r.request.id: r.out for r in engine.serve(requests)}


def digest(first: dict[Any, Any]) -> str:
    """Of all bits that are compared: a later run must begin with the same."""
    data = hashlib.sha256()
    for i in sorted(first):
        for name in FIELDS:
            data.update(np.asarray(getattr(first[i], name)).tobytes())
    return data.hexdigest()


def schedule(engine_of: Any, requests: list[Request], first: dict[Any, Any], seed: int) -> tuple[int, int]:
    """Its rows, and how many of them are not what they were the first time."""
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
        unequal += not all(np.array_equal(getattr(was, name), getattr(out, name)) for name in FIELDS)
    return rows, unequal


def schedules(engine_of: Any, requests: list[Request], count: int) -> Iterator[tuple[int, int]]:
    """For each schedule: its rows, and how many of them are not what they were the first time."""
    first = answers(engine_of({}), requests)
    for seed in range(count):
        yield schedule(engine_of, requests, first, seed)


def engines(model: Any, params: Any) -> Any:
    """Engines that differ in numbers alone; they share the compiled programs."""
    one = Engine(model, params, options=Options(**SHAPES))

    def engine_of(numbers: dict[str, Any]) -> Engine:
        one.options = Options(**SHAPES)._replace(**numbers)
        return one

    return engine_of


class Notes:
    """A file with a line for each schedule that is done; none without a path."""

    def __init__(self, path: str | None, about: dict[str, Any]) -> None:
        self.done: dict[int, tuple[int, int]] = {}
        self._path = None if path is None else Path(path)
        if self._path is None:
            return
        if not self._path.exists():
            self._path.write_text(json.dumps(about) + "\n")
        data = self._path.read_bytes()
        head, *lines = data[: data.rfind(b"\n") + 1].splitlines()
        self._path.write_bytes(b"".join(line + b"\n" for line in (head, *lines)))  # without what a kill has torn
        if json.loads(head) != about:
            sys.exit(f"{path}: expected {json.dumps(about)}, got {head.decode()}")
        self.done = {seed: (rows, unequal) for seed, rows, unequal in map(json.loads, lines)}

    def add(self, seed: int, rows: int, unequal: int) -> None:
        self.done[seed] = rows, unequal
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([seed, rows, unequal]) + "\n")


def check(name: str, count: int, notes_path: str | None, seconds: float) -> int:
    begin = time.monotonic()
    model, params, vocab_size = model_of(name)
    requests, engine_of = requests_of(vocab_size), engines(model, params)
    first = answers(engine_of({}), requests)
    notes = Notes(notes_path, {"model": name, "jax": jax.__version__, "answers": digest(first)})
    for seed in range(count):
        if seed not in notes.done and time.monotonic() - begin < seconds:
            notes.add(seed, *schedule(engine_of, requests, first, seed))
    found = [notes.done[seed] for seed in range(count) if seed in notes.done]
    rows, unequal = (sum(x) for x in zip(*found, strict=True)) if found else (0, 0)
    told = {"model": name, "schedules": len(found), "of": count, "rows": rows, "unequal": unequal}
    print(json.dumps({**told, "seconds": round(time.monotonic() - begin, 1)}))  # noqa: T201
    return 1 if unequal else 3 if len(found) < count else 0


def cost(name: str, rounds: int = 3) -> int:
    """Both ways in turn, after one round of each that compiles."""
    model, params, vocab_size = model_of(name)
    requests = requests_of(vocab_size)
    ways = {"free": 2, "invariant": 0}
    made = {
        way: Engine(model, params, options=Options(**{**SHAPES, "prefixes": prefixes}))
        for way, prefixes in ways.items()
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, engine in made.items():
            begin = time.perf_counter()
            answers(engine, requests)
            if turn:
                seconds[way].append(time.perf_counter() - begin)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    ratio = round(medians["invariant"] / medians["free"], 4)
    print(json.dumps({"model": name, "jax": jax.__version__, "seconds": medians, "cost": ratio}))  # noqa: T201
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random")
    parser.add_argument("schedules", nargs="?", type=int, default=100)
    parser.add_argument("--notes")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--cost", action="store_true")
    given = parser.parse_args()
    if given.cost:
        return cost(given.model)
    return check(given.model, given.schedules, given.notes, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
