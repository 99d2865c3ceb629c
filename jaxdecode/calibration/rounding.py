"""One matrix: codes and grids for which the products with the inputs seen change little.

The cost of a row's error e is ``e H e``, H = the mean of x x^T over inputs x (plus ``DAMPING`` of its mean diagonal):
the mean squared error of the row's product. Rows do not hang together. Four steps, none of which raises the cost of any
row above that of plain rounding:

1. grids by a search under the diagonal of H;
2. GPTQ (Frantar et al. 2022): column by column, heaviest first, each rounded and its error taken up by the columns that
   are left, in the way that costs least;
3. a row that plain rounding served better goes back to that;
4. in turn: the grids that fit the codes best (closed form), and every code moved to the best one given all others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdecode.calibration.grids import expand, group_size, refit, rounded, search
from jaxdecode.quant import Uniform, codes_and_scale, value_of

__all__ = ["Rounded", "aim", "cost", "damped", "descend", "feedback", "round_matrix", "round_to_bytes"]

DAMPING = 0.01
BLOCK = 64  # columns whose errors reach the others in one product
ROUNDS = 2  # of step 4


_Found = tuple[np.ndarray, np.ndarray, np.ndarray]


class Rounded(NamedTuple):
    """codes uint8 [N,K], scale and offset [N,G], each row's cost, and its cost by plain rounding.

    place: how far from each code [N,K], float16, the number lies that would be best given all others, in steps.
    """

    codes: np.ndarray
    scale: np.ndarray
    offset: np.ndarray
    cost: np.ndarray
    rounding_cost: np.ndarray
    place: np.ndarray


def damped(moment: np.ndarray, count: int, damping: float = DAMPING) -> np.ndarray:
    """H [K,K] float64 from the sum of x x^T over ``count`` inputs: inputs that are always 0 cost as little as most."""
    h = np.asarray(moment, np.float64) / count
    middle = float(np.mean(np.diag(h))) or 1.0
    return h + damping * middle * np.eye(len(h))


def cost(
    w: np.ndarray, h: np.ndarray, codes: np.ndarray, scale: np.ndarray, offset: np.ndarray, uniform: Uniform
) -> np.ndarray:
    """e H e of every row."""
    size = group_size(w.shape[1], uniform)
    error = w - value_of(codes, *(expand(g, w.shape[1], size) for g in (scale, offset)))
    return np.einsum("nk,nk->n", error @ h, error)


class _Columns(NamedTuple):
    """Grids of every column, transposed so that a column of all rows is one piece of memory: [K,N]."""

    scale: np.ndarray
    offset: np.ndarray
    inverse: np.ndarray
    last: float

    @staticmethod
    def of(scale: np.ndarray, offset: np.ndarray, k: int, size: int, last: int) -> _Columns:
        s, o = (np.ascontiguousarray(expand(g, k, size).T) for g in (scale, offset))
        return _Columns(s, o, (1 / np.where(s == 0, np.inf, s)).astype(np.float32), float(last))

    def take(self, order: np.ndarray) -> _Columns:
        return _Columns(self.scale[order], self.offset[order], self.inverse[order], self.last)

    def code(self, k: int, x: np.ndarray) -> np.ndarray:
        return np.clip(np.rint((x - self.offset[k]) * self.inverse[k]), 0, self.last)

    def value(self, k: int | slice, code: np.ndarray) -> np.ndarray:
        return self.scale[k] * code + self.offset[k]


def feedback(w: np.ndarray, h: np.ndarray, scale: np.ndarray, offset: np.ndarray, uniform: Uniform) -> np.ndarray:
    """The codes [N,K] of GPTQ on grids that are given."""
    n, k = w.shape
    order = np.argsort(-np.diag(h), kind="stable")
    inverse = np.linalg.inv(h[np.ix_(order, order)])
    upper = np.linalg.cholesky((inverse + inverse.T) / 2).T.astype(np.float32)
    columns = _Columns.of(scale, offset, k, group_size(k, uniform), uniform.last_code).take(order)
    rest, codes = np.ascontiguousarray(w.T[order]), np.empty((k, n), np.uint8)
    for first in range(0, k, BLOCK):
        end = min(first + BLOCK, k)
        errors = np.empty((end - first, n), np.float32)
        for j in range(first, end):
            code = columns.code(j, rest[j])
            codes[j] = code
            errors[j - first] = (rest[j] - columns.value(j, code)) / upper[j, j]
            rest[j + 1 : end] -= upper[j, j + 1 : end, None] * errors[j - first]
        rest[end:] -= upper[first:end, end:].T @ errors
    out = np.empty_like(codes)
    out[order] = codes
    return out.T


def descend(
    w: np.ndarray, h: np.ndarray, codes: np.ndarray, scale: np.ndarray, offset: np.ndarray, uniform: Uniform
) -> np.ndarray:
    """Codes after each, in turn, went to its best level given all others: no row costs more than before."""
    k = w.shape[1]
    columns = _Columns.of(scale, offset, k, group_size(k, uniform), uniform.last_code)
    now = np.ascontiguousarray(codes.T).astype(np.float32)
    h = h.astype(np.float32)
    pull = h @ (w.T - columns.value(slice(None), now))  # [K,N]: half of what the cost falls by, a unit of each value
    for first in range(0, k, BLOCK):
        block = slice(first, min(first + BLOCK, k))
        near, moved = pull[block], np.empty_like(pull[block])
        for j in range(block.stop - first):
            at = first + j
            value = columns.value(at, now[at])
            now[at] = columns.code(at, value + near[j] / h[at, at])
            moved[j] = columns.value(at, now[at]) - value
            near[j + 1 :] -= h[at, at + 1 : block.stop, None] * moved[j]
        pull[block.stop :] -= h[block.stop :, block] @ moved
    return now.T.astype(np.uint8)


def aim(w: np.ndarray, h: np.ndarray, moments: np.ndarray, correction: float = 1.0) -> np.ndarray:
    """The real-valued weights that serve best where the inputs y differ from the x that the model would give.

    moments: the means of y y^T and of x y^T; h: the first of them, damped. With A these weights, the mean square of
    W x - Q y is e H e of e = A - Q and what no Q changes. correction: how far to go from W to A, 0 to 1.
    """
    moved = np.linalg.solve(h, (moments[1] - moments[0]).T).T  # W x = W y + W (x - y)
    return (w + correction * (w.astype(np.float64) @ moved)).astype(np.float32)


def round_matrix(
    w: np.ndarray,
    h: np.ndarray,
    uniform: Uniform,
    *,
    aim: np.ndarray | None = None,
    rounds: int = ROUNDS,
) -> Rounded:
    """w[N,K] on grids of ``uniform`` under H [K,K] float64, as `damped` gives it.

    aim: what to come near to, if that is not w, whose plain rounding stays the measure.
    """
    w = np.ascontiguousarray(w, np.float32)
    small = h.astype(np.float32)
    plain = rounded(w, uniform)
    w = w if aim is None else np.ascontiguousarray(aim, np.float32)
    plain_cost = cost(w, small, *plain, uniform)
    scale, offset = search(w, np.diag(small), uniform)
    found = (feedback(w, h, scale, offset, uniform), scale, offset)
    best, least = _better(plain, plain_cost, found, cost(w, small, *found, uniform))
    for _ in range(rounds):
        grids = refit(w, small, *best, uniform)
        found = (best[0], *grids)
        best, least = _better(best, least, found, cost(w, small, *found, uniform))
        found = (descend(w, h, *best, uniform), *best[1:])
        best, least = _better(best, least, found, cost(w, small, *found, uniform))
    return Rounded(*best, least, plain_cost, _place(w, small, *best, uniform))


def round_to_bytes(w: np.ndarray, h: np.ndarray, dtype: np.dtype, *, aim: np.ndarray | None = None) -> Rounded:
    """The same with the scales of "int8" for weights of ``dtype``, which stay; code c stands for scale * (c - 128)."""
    small, grid = h.astype(np.float32), Uniform(8, "zero", "channel")
    codes, scale = codes_and_scale(w.astype(dtype), np)
    wide = scale.astype(np.float32)[:, None]
    plain = ((codes.astype(np.int16) + 128).astype(np.uint8), wide, wide * np.float32(-128))
    wanted = np.ascontiguousarray(w if aim is None else aim, np.float32)
    plain_cost = cost(wanted, small, *plain, grid)
    codes = np.maximum(feedback(wanted, h, *plain[1:], grid), 1)
    best, least = _better(plain, plain_cost, (codes, *plain[1:]), cost(wanted, small, codes, *plain[1:], grid))
    codes = np.maximum(descend(wanted, h, *best, grid), 1)
    best, least = _better(best, least, (codes, *plain[1:]), cost(wanted, small, codes, *plain[1:], grid))
    return Rounded(*best, least, plain_cost, _place(wanted, small, *best, grid))


def _place(
    w: np.ndarray,
    h: np.ndarray,
    codes: np.ndarray,
    scale: np.ndarray,
    offset: np.ndarray,
    uniform: Uniform,
) -> np.ndarray:
    k = w.shape[1]
    s, o = (expand(g, k, group_size(k, uniform)) for g in (scale, offset))
    pull = (w - value_of(codes, s, o)) @ h
    return np.clip(pull / (np.diag(h) * np.where(s == 0, np.float32(1), s)), -0.5, 0.5).astype(np.float16)


def _better(old: _Found, old_cost: np.ndarray, new: _Found, new_cost: np.ndarray) -> tuple[_Found, np.ndarray]:
    """Row by row, whichever costs less."""
    wins = new_cost < old_cost
    codes, scale, offset = (np.where(wins[:, None], b, a) for a, b in zip(old, new, strict=True))
    return (codes, scale, offset), np.where(wins, new_cost, old_cost)
