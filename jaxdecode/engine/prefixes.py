"""Prefixes that several prompts share: which are worth computing once, and which are kept."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

__all__ = ["LEAST", "Prefixes", "common"]

LEAST = 32  # tokens that sharing must save, else it is not worth a row's copy


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many first ids two arrays share."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    at = int(np.argmax(differ)) if n else 0
    return at if n and differ[at] else n


class Prefixes:
    """The host's side of the kept rows: row 0 is empty, rows 1 .. ``places`` hold one prefix each, or nothing yet.

    cuttable: whether a kept row may be cut to a shorter prefix, as KV caches can.
    """

    def __init__(self, places: int, cuttable: bool) -> None:
        self.places, self._cuttable = places, cuttable
        self._kept: dict[int, np.ndarray] = {}
        self._used: dict[int, int] = {}
        self._clock = 0

    def match(self, prompt: np.ndarray) -> tuple[int, int]:
        """The kept row that saves most of ``prompt`` (without its last token) and how many tokens; (0, 0): none."""
        place, best = 0, LEAST - 1
        for at, tokens in self._kept.items():
            n = common(tokens, prompt[:-1])
            if n > best and (self._cuttable or n == len(tokens)):
                place, best = at, n
        if place == 0:
            return 0, 0
        self._touch(place)
        return place, best

    def worth(self, prompt: np.ndarray, others: Iterable[np.ndarray]) -> int:
        """Length of the prefix of ``prompt`` that saves most over these other prompts; 0: none."""
        if self.places == 0 or len(prompt) <= LEAST:
            return 0
        shared = np.sort([common(prompt[:-1], other[:-1]) for other in others if other[0] == prompt[0]])[::-1]
        shared = shared[shared >= LEAST]
        if not len(shared):
            return 0
        return int(shared[np.argmax(shared * np.arange(1, len(shared) + 1))])

    def store(self, tokens: np.ndarray) -> int:
        """The row for a new prefix: a free one, or that of the prefix longest unused."""
        free = [at for at in range(1, self.places + 1) if at not in self._kept]
        place = free[0] if free else min(self._used, key=self._used.__getitem__)
        self._kept[place] = tokens
        self._touch(place)
        return place

    def _touch(self, place: int) -> None:
        self._clock += 1
        self._used[place] = self._clock
