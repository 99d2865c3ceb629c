"""From a ``Language`` to a deterministic automaton over the bytes of UTF-8.

First over characters: those that no set of the language tells apart are one letter, so that the subset construction
has few letters. Then every step by a character becomes steps by its bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxdecode.constraints.language import LAST, Alternatives, Characters, Concatenation, Language, Ranges, Repeat

__all__ = ["ByteAutomaton", "byte_automaton"]

MOST_PARTS = 400_000  # states of the automaton before it is made deterministic
MOST_STATES = 30_000


class ByteAutomaton(NamedTuple):
    """step[S,256]: the next state, 0 where no match is left; accept[S]: whether the text so far matches; start."""

    step: np.ndarray
    accept: np.ndarray
    start: int


class _Letters(NamedTuple):
    """of[0x110000]: the letter of each code point, -1 for surrogates; members: the letters of each set; how many."""

    of: np.ndarray
    members: dict[Ranges, tuple[int, ...]]
    size: int


def _sets(language: Language) -> set[Ranges]:
    found, todo = set(), [language]
    while todo:
        node = todo.pop()
        if isinstance(node, Characters):
            found.add(node.ranges)
        elif isinstance(node, Repeat):
            todo.append(node.part)
        else:
            todo += node.parts
    return found


def _letters(sets: Iterable[Ranges]) -> _Letters:
    """Group the code points by the sets that hold them."""
    ordered = sorted(sets)
    edges = np.unique([0, 0xD800, 0xE000, LAST + 1, *(x for s in ordered for lo, hi in s for x in (lo, hi + 1))])
    holds = np.zeros((len(edges) - 1, len(ordered)), bool)
    for i, ranges in enumerate(ordered):
        for lo, hi in ranges:
            holds[np.searchsorted(edges, lo) : np.searchsorted(edges, hi + 1), i] = True
    kinds, kind = np.unique(holds, axis=0, return_inverse=True)
    of = np.repeat(kind.reshape(-1).astype(np.int32), np.diff(edges))
    of[0xD800:0xE000] = -1
    used = np.unique(of[of >= 0])
    members = {
        ranges: tuple(int(k) for k in np.flatnonzero(kinds[:, i]) if k in used) for i, ranges in enumerate(ordered)
    }
    return _Letters(of, members, len(kinds))


class _Parts:
    """A nondeterministic automaton, built from its end to its start."""

    def __init__(self, letters: _Letters) -> None:
        self.letters = letters
        self.moves: list[tuple[tuple[int, ...], int] | None] = [None]  # state 0: a match is complete
        self.free: list[tuple[int, ...]] = [()]
        self.built: dict[tuple[int, int], int] = {}

    def state(self, move: tuple[tuple[int, ...], int] | None, free: tuple[int, ...]) -> int:
        if len(self.moves) >= MOST_PARTS:
            raise ValueError(f"grammar: expected at most {MOST_PARTS} parts, its repetitions written out; got more")
        self.moves.append(move)
        self.free.append(free)
        return len(self.moves) - 1

    def before(self, node: Language, then: int) -> int:
        """The state from which ``node`` leads to the state ``then``; the same for the same object and state."""
        key = (id(node), then)
        if key not in self.built:
            self.built[key] = self._before(node, then)
        return self.built[key]

    def _before(self, node: Language, then: int) -> int:
        if isinstance(node, Characters):
            return self.state((self.letters.members[node.ranges], then), ())
        if isinstance(node, Concatenation):
            for part in reversed(node.parts):
                then = self.before(part, then)
            return then
        if isinstance(node, Alternatives):
            return self.state(None, tuple(self.before(part, then) for part in node.parts))
        if node.most is None:
            loop = self.state(None, ())
            self.free[loop] = (self.before(node.part, loop), then)
            then = loop
        else:
            end = then
            for _ in range(node.most - node.least):
                then = self.state(None, (self.before(node.part, then), end))
        for _ in range(node.least):
            then = self.before(node.part, then)
        return then

    def closure(self, states: Iterable[int]) -> frozenset[int]:
        """The states that are reached for free and either read a character or end the match."""
        seen, todo = set(), list(states)
        while todo:
            state = todo.pop()
            if state not in seen:
                seen.add(state)
                todo += self.free[state]
        return frozenset(s for s in seen if s == 0 or self.moves[s] is not None)


def _deterministic(parts: _Parts, start: int) -> tuple[np.ndarray, np.ndarray]:
    """The subset construction: step[S,letters] with state 0 dead and 1 the start, and accept[S]."""
    closure = functools.lru_cache(maxsize=None)(parts.closure)
    numbers = {frozenset[int](): 0, closure(frozenset([start])): 1}
    subsets, rows = list(numbers), list[np.ndarray]()
    for subset in subsets:  # grows while it runs
        targets: dict[int, list[int]] = {}
        for state in sorted(subset):
            move = parts.moves[state]
            if move is not None:
                for letter in move[0]:
                    targets.setdefault(letter, []).append(move[1])
        row = np.zeros(parts.letters.size, np.int32)
        for letter, reached in targets.items():
            new = closure(frozenset(reached))
            if new not in numbers:
                if len(numbers) >= MOST_STATES:
                    raise ValueError(f"grammar: expected at most {MOST_STATES} states, got more")
                numbers[new] = len(numbers)
                subsets.append(new)
            row[letter] = numbers[new]
        rows.append(row)
    return np.stack(rows), np.array([0 in subset for subset in subsets])


def _minimal(step: np.ndarray, accept: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Moore's refinement; states are told apart by a 64-bit hash of where their letters lead. Dead stays 0."""
    weights = np.random.default_rng(0).integers(1, 2**63, size=step.shape[1] + 1, dtype=np.uint64)
    numbers = np.random.default_rng(1).integers(1, 2**63, size=len(step) + 1, dtype=np.uint64)
    block, count = accept.astype(np.int64), 0
    while True:
        signature = (numbers[block][step] * weights[1:]).sum(axis=1, dtype=np.uint64) + numbers[block] * weights[0]
        _, first, block = np.unique(signature, return_index=True, return_inverse=True)
        block = block.reshape(-1)
        if len(first) == count:
            break
        count = len(first)
    order = np.concatenate([[block[0]], np.delete(np.arange(count), block[0])])  # the dead state's block comes first
    place = np.argsort(order)
    heads = first[order]
    return place[block[step[heads]]].astype(np.int32), accept[heads], int(place[block[1]])


def _blocks(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different rows, and which of them each row is."""
    numbers: dict[bytes, int] = {}
    which = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows])
    return np.stack([np.frombuffer(row, rows.dtype) for row in numbers]), which


def _to_bytes(step: np.ndarray, accept: np.ndarray, start: int, letters: _Letters) -> ByteAutomaton:
    """Steps by letters as steps by bytes; what is left of a character half read is a state of its own."""
    step = np.concatenate([step, np.zeros((len(step), 1), np.int32)], axis=1)  # letter -1: no character
    six, last_of = _blocks(letters.of[0x80:].reshape(-1, 64))  # the last byte of a character gives six bits
    short = np.concatenate([[-1, -1], last_of[:30]])  # two bytes never say what one can, nor three what two can
    twelve, middle_of = _blocks(np.concatenate([np.full(32, -1), last_of[30:]]).reshape(-1, 64))
    planes = np.concatenate([np.full(16, -1), middle_of[16:], np.full(5 * 64 - len(middle_of), -1)]).reshape(5, 64)
    rows: list[np.ndarray] = [np.zeros(256, np.int32) for _ in range(len(step))]
    known: dict[bytes, int] = {bytes(256): 0}

    def continued(targets: np.ndarray) -> int:
        """The state in which byte 0x80 + i leads to ``targets[i]``."""
        key = targets.astype(np.int32).tobytes()
        if key not in known:
            known[key] = len(rows)
            row = np.zeros(256, np.int32)
            row[0x80:0xC0] = targets
            rows.append(row)
        return known[key]

    def states(targets: np.ndarray) -> np.ndarray:
        """``continued`` of every row, and dead for row -1."""
        return np.array([*(continued(t) if t.any() else 0 for t in targets), 0], np.int32)

    for state in range(1, len(step)):
        row = rows[state]
        row[:0x80] = step[state][letters.of[:0x80]]
        last = states(step[state][six])
        row[0xC0:0xE0] = last[short]
        middle = states(last[twelve])
        row[0xE0:0xF0] = middle[middle_of[:16]]
        row[0xF0:0xF5] = states(middle[planes])[:-1]
        if len(rows) > 4 * MOST_STATES:
            raise ValueError(f"grammar: expected at most {4 * MOST_STATES} states over bytes, got more")
    accepts = np.zeros(len(rows), bool)
    accepts[: len(accept)] = accept
    return ByteAutomaton(np.stack(rows), accepts, start)


def byte_automaton(language: Language) -> ByteAutomaton:
    """The automaton that accepts the UTF-8 of exactly the texts of ``language``.

    ValueError for a language that nothing matches, or that needs too many states.
    """
    letters = _letters(_sets(language))
    parts = _Parts(letters)
    step, accept, start = _minimal(*_deterministic(parts, parts.before(language, 0)))
    if start == 0:
        raise ValueError("grammar: expected a grammar that some text matches, got one that none does")
    return _to_bytes(step, accept, start, letters)
