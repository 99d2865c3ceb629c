"""Beam search as semantics.md defines it, for one row of a table model, in float64 and plain Python; and exhaustion."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

__all__ = ["Found", "exhaustive", "log_law", "search"]

Sequence = tuple[int, ...]


class Found(NamedTuple):
    """Hypotheses best first with their scores; the certificate's bound; the smallest gap any decision hung on."""

    tokens: list[Sequence]
    scores: list[float]
    bound: float
    closest: float


def log_law(logits: np.ndarray) -> np.ndarray:
    """Log-softmax over the last axis, float64."""
    wide = np.asarray(logits, np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def search(law: np.ndarray, start: int, width: int, n: int, alpha: float, ends: frozenset[int]) -> Found:
    """``law[N,V,V]``: log probabilities of the next token at each place, by the last one; ``ends``: end ids."""
    live: list[tuple[float, Sequence]] = [(0.0, ())]
    done: list[tuple[float, Sequence]] = []
    bound, closest = -np.inf, np.inf

    def note(kept: list[float], dropped: list[float]) -> None:
        nonlocal closest
        if kept and dropped:
            closest = min(closest, kept[-1] - dropped[0])

    for t in range(1, n + 1):
        found = []
        for beam, (total, seq) in enumerate(live):
            row = law[t - 1, seq[-1] if seq else start]
            found += [(total + row[v], beam, row[v], v) for v in range(len(row)) if row[v] > -np.inf]
        found.sort(key=lambda c: (-c[0], c[1], -c[2], c[3]))
        scores = [c[0] for c in found]
        closest = min([closest, *(a - b for a, b in itertools.pairwise(scores))])
        ended = [(c[0] / t**alpha, (*live[c[1]][1], c[3])) for c in found[:width] if c[3] in ends]
        refused = [c[0] / t**alpha for c in found[width:] if c[3] in ends]
        others = [c for c in found if c[3] not in ends]
        bound = max([bound, *refused, *(c[0] / n**alpha for c in others[width:])])
        live = [(c[0], (*live[c[1]][1], c[3])) for c in others[:width]]
        done += ended
        if t == n:
            done += [(total / t**alpha, seq) for total, seq in live]
        done.sort(key=lambda h: -h[0])
        note([h[0] for h in done[:width]], [h[0] for h in done[width:]])
        bound = max([bound, *(h[0] for h in done[width:])])
        done = done[:width]
        if t < n and live and len(done) == width:
            reach = live[0][0] / n**alpha
            closest = min(closest, abs(reach - done[-1][0]))
            if reach <= done[-1][0]:
                bound = max(bound, reach)
                break
        if not live:
            break
    closest = min([closest, *(a[0] - b[0] for a, b in itertools.pairwise(done))])
    return Found([h[1] for h in done], [h[0] for h in done], bound, closest)


def exhaustive(law: np.ndarray, start: int, n: int, alpha: float, ends: frozenset[int]) -> float:
    """The best score of all sequences that end at their first end id within n tokens, or are cut at n."""
    best = -np.inf
    live = {start: 0.0}  # the best total of a prefix that ends in this token is all that matters
    for t in range(1, n + 1):
        new: dict[int, float] = {}
        for last, total in live.items():
            for v, logprob in enumerate(law[t - 1, last]):
                score = total + logprob
                if v in ends or t == n:
                    best = max(best, score / t**alpha)
                else:
                    new[v] = max(new.get(v, -np.inf), score)
        live = new
    return best
