"""Token automata: which tokens may come next, as plain NumPy tables.

Tokens that lead from every state to the same state form a class, so the table is [states, classes] and a second one
says the class of each token.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxdecode.checks import require, token_ids
from jaxdecode.constraints.automaton import ByteAutomaton

if TYPE_CHECKING:
    from jaxdecode.text.tokenizer import Tokenizer

__all__ = ["NEVER", "Grammar", "Vocabulary", "grammar_of_bytes", "grammar_of_ids", "vocabulary_of"]

NEVER = 2**30  # the distance of a state from which no match is left
MOST_ENTRIES = 2**25  # of a table: 128 MiB


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """What the output may be: the tokens of exactly one of its matches, then an end id.

    step[S,C]: the next state after a token of a class; state 0 is dead. class_of_token[V]; class 0 is dead everywhere.
    accept[S]: the output so far is a match, so that an end id may follow. start: the first state. name: for errors.
    """

    step: np.ndarray
    class_of_token: np.ndarray
    accept: np.ndarray
    start: int
    name: str

    @property
    def vocab_size(self) -> int:
        """Number of ids it knows."""
        return len(self.class_of_token)

    @property
    def shortest(self) -> int:
        """Fewest tokens of a finished output, its end id included."""
        return int(self.distances()[0, self.start])

    @functools.cached_property
    def _arrows(self) -> tuple[np.ndarray, np.ndarray]:
        """(from, to) of every pair of living states that some token joins."""
        size = len(self.step)
        used = np.zeros(self.step.shape[1], bool)
        used[np.unique(self.class_of_token)] = True
        pairs = [np.unique(row[used]) for row in self.step]
        source = np.repeat(np.arange(size), [len(p) for p in pairs])
        target = np.concatenate(pairs)
        alive = (target != 0) & (source != 0)
        return source[alive], target[alive]

    def distances(self, least: int = 0) -> np.ndarray:
        """[least+1, S]: fewest tokens from a state to the end, end id included, if k or more stand before that.

        ``NEVER`` where there is no such way.
        """
        source, target = self._arrows
        now = np.where(self.accept, 1, NEVER).astype(np.int32)
        now[0] = NEVER
        while True:
            better = now.copy()
            np.minimum.at(better, source, now[target] + 1)
            if np.array_equal(better, now):
                break
            now = better
        out = [now]
        for _ in range(least):
            now = np.full_like(now, NEVER)
            np.minimum.at(now, source, np.minimum(out[-1][target] + 1, NEVER))
            out.append(now)
        return np.minimum(np.stack(out), NEVER)

    def without(self, banned: np.ndarray) -> Grammar:
        """The same with the tokens of ``banned`` (bool[V]) never allowed: no way through them counts."""
        require(banned.shape == (self.vocab_size,), "banned", f"bool[{self.vocab_size}]", banned.shape)
        if not banned.any():
            return self
        return dataclasses.replace(self, class_of_token=np.where(banned, 0, self.class_of_token).astype(np.int32))

    def after(self, tokens: Iterable[int]) -> int:
        """The state after the tokens; 0 if no match begins like that."""
        state = self.start
        for token in tokens:
            state = int(self.step[state, self.class_of_token[token]])
        return state

    def matches(self, tokens: Iterable[int]) -> bool:
        """Whether the tokens, without an end id, are a match."""
        return bool(self.accept[self.after(tokens)])


class Vocabulary:
    """The bytes of each id; b"" for ids that stand for no text, which no grammar allows. Equal by content."""

    def __init__(self, table: Sequence[bytes]) -> None:
        self.table = tuple(bytes(b) for b in table)
        lengths = np.array([len(b) for b in self.table], np.int32)
        self.digest = hashlib.sha256(lengths.tobytes() + b"".join(self.table)).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@functools.lru_cache(maxsize=8)
def _of_tokenizer(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary([tokenizer.id_to_bytes(i) for i in range(tokenizer.vocab_size)])


def vocabulary_of(source: Tokenizer | Vocabulary | Sequence[bytes]) -> Vocabulary:
    """The vocabulary of a tokenizer, whose control tokens stand for no text, or of a list of bytes."""
    if isinstance(source, Vocabulary):
        return source
    if hasattr(source, "id_to_bytes"):
        return _of_tokenizer(source)
    require(
        all(isinstance(b, bytes) for b in source),
        "vocabulary",
        "a tokenizer, or the bytes of each id",
        type(source).__name__,
    )
    return Vocabulary(source)


def grammar_of_bytes(automaton: ByteAutomaton, vocabulary: Vocabulary, name: str) -> Grammar:
    """The tokens of ``vocabulary`` whose bytes, joined, ``automaton`` accepts.

    All tokens walk at once, a byte at a time. Those whose bytes so far lead every state to the same state walk as one:
    their common column is stepped, and equal columns are merged.
    """
    lengths = np.array([len(b) for b in vocabulary.table])
    longest = int(lengths.max(initial=0))
    padded = np.frombuffer(b"".join(b.ljust(longest, b"\0") for b in vocabulary.table), np.uint8)
    padded = padded.reshape(len(lengths), longest)
    size = len(automaton.step)
    columns = [np.zeros(size, np.int32), np.arange(size, dtype=np.int32)]  # class 0 is dead, class 1 is no byte yet
    known = {column.tobytes(): i for i, column in enumerate(columns)}
    of_token = np.where(lengths > 0, 1, 0)
    by_byte = np.ascontiguousarray(automaton.step.T)
    for at in range(longest):
        walking = np.flatnonzero((lengths > at) & (of_token > 0))
        keys, which = np.unique(of_token[walking] * 256 + padded[walking, at], return_inverse=True)
        new = np.zeros(len(keys), np.int64)
        for i, key in enumerate(keys.tolist()):
            column = by_byte[key % 256][columns[key // 256]]
            new[i] = known.setdefault(column.tobytes(), len(columns))
            if new[i] == len(columns):
                columns.append(column)
            require(len(columns) * size <= 4 * MOST_ENTRIES, name, "a grammar with fewer states", size)
        of_token[walking] = new[which.reshape(-1)]
    used, of_token = np.unique(np.concatenate([[0], of_token]), return_inverse=True)
    step = np.stack([columns[i] for i in used], axis=1)
    return _trimmed(step, of_token.reshape(-1)[1:], automaton.accept, automaton.start, name)


def grammar_of_ids(options: Sequence[Sequence[int]], vocab_size: int, name: str) -> Grammar:
    """One of the given sequences of ids."""
    require(len(options) > 0, name, "at least one", "none")
    nodes: list[dict[int, int]] = [{}, {}]
    ends = set()
    for option in options:
        token_ids(np.asarray(option, np.int64) if len(option) == 0 else np.asarray(option), vocab_size, name)
        node = 1
        for token in map(int, option):
            if token not in nodes[node]:
                nodes[node][token] = len(nodes)
                nodes.append({})
            node = nodes[node][token]
        ends.add(node)
    tokens = sorted({t for node in nodes for t in node})
    place = {token: i + 1 for i, token in enumerate(tokens)}
    require(len(nodes) * (len(tokens) + 1) <= MOST_ENTRIES, name, "fewer or shorter ones", len(options))
    step = np.zeros((len(nodes), len(tokens) + 1), np.int32)
    for i, arrows in enumerate(nodes):
        for token, target in arrows.items():
            step[i, place[token]] = target
    of_token = np.zeros(vocab_size, np.int64)
    of_token[tokens] = np.arange(1, len(tokens) + 1)
    return _trimmed(step, of_token, np.array([i in ends for i in range(len(nodes))]), 1, name)


def _trimmed(step: np.ndarray, of_token: np.ndarray, accept: np.ndarray, start: int, name: str) -> Grammar:
    """A grammar without the states that no output reaches or that reach no match, equal classes merged."""
    reached = np.zeros(len(step), bool)
    front = np.array([start])
    while front.size:
        reached[front] = True
        front = np.unique(step[front])
        front = front[~reached[front]]
    whole = Grammar(step, of_token, accept & reached, start, name)
    keep = reached & (whole.distances()[0] < NEVER)
    keep[0] = False
    require(bool(keep[start]), name, "a grammar that some text of this vocabulary matches", "one that none does")
    old = np.concatenate([[0], np.flatnonzero(keep)])
    place = np.zeros(len(step), np.int32)
    place[old] = np.arange(len(old))
    columns: dict[bytes, int] = {}
    moved = np.ascontiguousarray(place[step[old]].T)
    moved[:, 0] = 0
    merged = np.array([columns.setdefault(column.tobytes(), len(columns)) for column in moved])
    step = np.stack([np.frombuffer(c, moved.dtype) for c in columns], axis=1)
    require(step.size <= MOST_ENTRIES, name, f"a grammar of at most {MOST_ENTRIES} states x classes", step.shape)
    accept = accept[old]
    accept[0] = False
    return Grammar(step, merged[of_token].astype(np.int32), accept, int(place[start]), name)
