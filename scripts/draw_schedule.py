#!/usr/bin/env python3
"""Draw a real run of the engine as text: a line for each slot, a column for each step, a letter for each request."""

from __future__ import annotations

import string

import numpy as np

from jaxdecode import Settings
from jaxdecode.engine import Engine, Options, Request, Turn
from jaxdecode.testing import markov_model

SLOTS, REQUESTS = 4, 12


def main() -> None:
    random = np.random.default_rng(4)
    lengths = np.clip(random.geometric(0.12, REQUESTS), 1, 24)
    columns: list[tuple[str, ...]] = []

    def note(turn: Turn) -> None:
        column = tuple("." if taken is None else taken[0] for taken in turn.slots)
        columns.extend([column] * turn.steps)

    options = Options(slots=SLOTS, staged=2, chunk=16, steps=1, refill=0.0)
    engine = Engine(markov_model(), np.zeros((5, 5), np.float32), options=options, on_turn=note)
    requests = [
        Request(name, [1] * 9, Settings(max_new_tokens=int(n), temperature=0))
        for name, n in zip(string.ascii_uppercase, lengths, strict=False)
    ]
    for _ in engine.serve(requests):
        pass
    for slot in range(SLOTS):
        print(f"slot {slot + 1}  {''.join(column[slot] for column in columns)}")  # noqa: T201


if __name__ == "__main__":
    main()
