"""Regular languages over code points, as small trees: sets of characters, sequences, alternatives, repetitions."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

__all__ = [
    "ANY",
    "EMPTY",
    "LAST",
    "Alternatives",
    "Characters",
    "Language",
    "Ranges",
    "Repeat",
    "Concatenation",
    "character",
    "complement",
    "either",
    "intersection",
    "optional",
    "ranges_where",
    "separated",
    "sequence",
    "text",
    "union",
]

LAST = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]  # sorted, disjoint, both ends included


class Characters(NamedTuple):
    """One character of ``ranges``; surrogates are never written, whatever the ranges say."""

    ranges: Ranges


class Concatenation(NamedTuple):
    """One after the other; none: the empty text."""

    parts: tuple[Language, ...]


class Alternatives(NamedTuple):
    """Any one of them; none: nothing matches."""

    parts: tuple[Language, ...]


class Repeat(NamedTuple):
    """``least`` to ``most`` times; None: without end."""

    part: Language
    least: int
    most: int | None


Language = Characters | Concatenation | Alternatives | Repeat

ANY = Characters(((0, LAST),))
EMPTY = Concatenation(())


def union(*sets: Ranges) -> Ranges:
    """All characters of the sets."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(r for ranges in sets for r in ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return tuple(out)


def complement(ranges: Ranges) -> Ranges:
    """All other characters."""
    edges = [-1, *(x for r in union(ranges) for x in r), LAST + 1]
    return tuple((a + 1, b - 1) for a, b in zip(edges[::2], edges[1::2], strict=True) if a + 1 <= b - 1)


def intersection(a: Ranges, b: Ranges) -> Ranges:
    """The characters of both."""
    return complement(union(complement(a), complement(b)))


def ranges_where(members: np.ndarray) -> Ranges:
    """The code points whose entry of ``members[bool]`` is true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], members, [False]]).astype(np.int8)))
    return tuple((int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True))


@functools.lru_cache(maxsize=4096)
def character(c: str) -> Characters:
    """Exactly this character."""
    return Characters(((ord(c), ord(c)),))


def text(characters: str) -> Language:
    """Exactly this text."""
    return sequence(*map(character, characters))


def sequence(*parts: Language) -> Language:
    """The parts one after the other, flat."""
    flat = [p for part in parts for p in (part.parts if isinstance(part, Concatenation) else (part,))]
    return flat[0] if len(flat) == 1 else Concatenation(tuple(flat))


def either(parts: Iterable[Language]) -> Language:
    """Any one of the parts, each mentioned once."""
    different = tuple(dict.fromkeys(parts))
    return different[0] if len(different) == 1 else Alternatives(different)


def optional(part: Language) -> Language:
    """The part, or nothing."""
    return Repeat(part, 0, 1)


def separated(
    first: Sequence[Language], rest: Language | None, between: Language, least: int, most: int | None
) -> Language:
    """``least`` to ``most`` items with ``between`` between two: item i is ``first[i]``, and ``rest`` after these."""
    if rest is None:
        most = len(first) if most is None else min(most, len(first))
    if most is not None and most < least:
        return Alternatives(())
    fixed = list(first[:most]) or ([] if rest is None or most == 0 else [rest])
    if not fixed:
        return EMPTY
    tail: Language = EMPTY
    left = None if most is None else most - len(fixed)
    if rest is not None and left != 0:
        tail = Repeat(sequence(between, rest), max(0, least - len(fixed)), left)
    for i in reversed(range(1, len(fixed))):
        tail = sequence(between, fixed[i], tail)
        tail = tail if least > i else optional(tail)
    whole = sequence(fixed[0], tail)
    return whole if least > 0 else optional(whole)
