"""Kernels on arrays: masks by rank and by mass, and the inverse-CDF draw. No sort anywhere.

Order of ids: logit descending, equal logits by ascending id.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdecode.meshes import DATA, constrained
from jaxdecode.transforms import search

__all__ = [
    "Drawn",
    "cut_top_k",
    "cut_top_p",
    "draw",
    "first_max",
    "keep_first",
    "kept_by",
    "mask_min_p",
    "rescale",
    "weights",
]

Pair = tuple[jax.Array, jax.Array]  # a sum in two floats, high + low, good to about 2^-46


def weights(logits: jax.Array) -> jax.Array:
    """``exp(logits - max)``, [B,V]: the largest is 1, masked ids are 0; all 0 if every id is masked."""
    top = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    return jnp.exp(jnp.where(jnp.isneginf(logits), logits, logits - top))


def rescale(logits: jax.Array, tau: jax.Array) -> jax.Array:
    """``(logits - max) / tau`` for ``tau[B]`` > 0; masked ids stay masked and gradients stay finite (S4.1, S4.4).

    tau = 0 keeps the arg max (lowest id of equals) and masks the rest; NaN gives a row of NaN.
    """
    top = jnp.max(logits, axis=-1)
    masked = jnp.isneginf(logits)
    zero = (tau == 0)[:, None]
    nobody = jnp.zeros(top.shape, jnp.int32)
    winner = lax.cond(jnp.any(zero), lambda z: first_max(z)[1], lambda _: nobody, lax.stop_gradient(logits))
    shifted = jnp.where(masked, 0, logits - lax.stop_gradient(top)[:, None])
    scaled = jnp.where(masked, -jnp.inf, shifted / jnp.where(zero, 1, tau[:, None]))
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    best = ids == winner[:, None]
    greedy = jnp.where(best & ~masked, 0, -jnp.inf).astype(logits.dtype)
    out = jnp.where(zero, lax.stop_gradient(greedy), scaled)
    return jnp.where(jnp.isnan(tau)[:, None], jnp.nan, out)


def first_max(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logit [B] and the lowest id that has it [B]; two plain passes, where ``argmax`` is five times slower.

    Rows that hold NaN give no promise: a vectorized maximum may lose it.
    """
    top = jnp.max(logits, axis=-1)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    size = logits.shape[1]
    return top, jnp.min(jnp.where(logits == top[:, None], ids, size - 1), axis=-1)


def kept_by(logits: jax.Array, cut: search.Cut) -> jax.Array:
    """The ids that a cut keeps, as a mask [B,V]."""
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    last = cut.last[:, None]
    return (logits > last) | ((logits == last) & (ids <= cut.last_id[:, None]))


def keep_first(logits: jax.Array, amount: jax.Array, needed: jax.Array) -> jax.Array:
    """The shortest prefix of the order of ids whose ``amount[B,V]`` adds up to ``needed[B]``, as a mask [B,V]."""
    return kept_by(logits, search.cut(logits, amount, needed))


def cut_top_k(logits: jax.Array, k: jax.Array) -> tuple[jax.Array, search.Cut]:
    """Keep the first ``k[B]`` ids of each row (0: all; negative: a row of NaN), and where it was cut; S5.1."""
    cut = search.cut(logits, (logits > -jnp.inf).astype(jnp.int32), k)
    keep = kept_by(logits, cut) | (k == 0)[:, None]
    return jnp.where((k < 0)[:, None], jnp.nan, jnp.where(keep, logits, -jnp.inf)), cut


def cut_top_p(logits: jax.Array, p: jax.Array) -> tuple[jax.Array, search.Cut, jax.Array]:
    """Keep the smallest prefix whose mass is >= ``p[B]`` (1: all; NaN: a row of NaN); S5.2.

    Also where it was cut (no meaning where p is 1: such a row is not searched), and the total of ``weights``.
    """
    w = lax.stop_gradient(weights(logits))
    total = jnp.sum(w, axis=-1)
    cut = search.cut(logits, w, jnp.where(p >= 1, 0, p * total), key=w)
    keep = kept_by(logits, cut) | (p >= 1)[:, None]
    return jnp.where(jnp.isnan(p)[:, None], jnp.nan, jnp.where(keep, logits, -jnp.inf)), cut, total


def mask_min_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Keep ids with probability >= ``p[B]`` times the largest (0: all; NaN: a row of NaN)."""
    keep = (lax.stop_gradient(weights(logits)) >= p[:, None]) | (p == 0)[:, None]
    return jnp.where(jnp.isnan(p)[:, None], jnp.nan, jnp.where(keep, logits, -jnp.inf))


class Drawn(NamedTuple):
    """token[B]; margin[B]: distance of the uniform number from the nearest inner edge of the CDF."""

    token: jax.Array
    margin: jax.Array


def _add(a: Pair, b: Pair) -> Pair:
    """Sum of two pairs; the rounding of the high part goes to the low one (Knuth's two-sum)."""
    high = a[0] + b[0]
    part = high - a[0]
    error = (a[0] - (high - part)) + (b[0] - part)
    return high, a[1] + b[1] + error


def _product(a: jax.Array, b: jax.Array) -> Pair:
    """a * b with its rounding (Dekker)."""
    info = jnp.finfo(a.dtype)
    a1, b1 = (lax.reduce_precision(x, info.nexp, info.nmant // 2) for x in (a, b))
    a2, b2 = a - a1, b - b1
    return a * b, ((a1 * b1 - a * b) + a1 * b2 + a2 * b1) + a2 * b2


def _exact_weights(logits: jax.Array, w: jax.Array) -> jax.Array:
    """``weights``, corrected for the rounding of ``logits - max``: at -12 that is up to 2^-21 of a weight."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    shifted = logits - top
    part = shifted - logits
    error = (logits - (shifted - part)) - (top + part)
    return jnp.where(w > 0, w + w * error, 0)


def draw(logits: jax.Array, u: jax.Array, w: jax.Array | None = None) -> Drawn:
    """Inverse CDF in id order with one uniform ``u[B]`` in [0, 1) per row; S6.1, S6.5. w: ``weights``, where known.

    The CDF has two levels, blocks of ids and ids in the block. Its sums are pairs of floats and nothing is normalised,
    so that no id collects the rounding of others. In float32 ``|P(token) - p(token)| <= 2^-22`` for every token (2^-23
    of it is the grid of ``u``). A token of weight 0 is never drawn. Rows without any token give id 0.
    """
    logits, w = lax.stop_gradient((logits, weights(logits) if w is None else w))
    size = logits.shape[1]
    w = search.blocks_of(_exact_weights(logits, w), 0)
    coarse = jnp.round(w * 2.0**16) / 2.0**16  # sums of up to 2^8 of these multiples of 2^-16 are exact
    # XLA:CPU sums arrays several times faster than results of a fusion. Over a mesh every device gets the sums of all
    # blocks, a number for 128 ids: a scan over devices would exchange as much in many steps.
    sums = [
        (constrained(jnp.sum(lax.optimization_barrier(x), axis=-1), DATA), jnp.zeros(w.shape[:2], w.dtype))
        for x in (coarse, w - coarse)
    ]
    some = (sums[0][0] > 0) | (sums[1][0] > 0)  # without coarse weights the others are >= 0, and no sum of them is lost
    blocks = lax.associative_scan(_add, _add(*sums), axis=-1)
    total = (blocks[0][:, -1:], blocks[1][:, -1:])
    high, low = _product(u[:, None], total[0])
    goal = (high, low + u[:, None] * total[1])
    block, last = _first(blocks, some, goal)
    before = [jnp.take_along_axis(jnp.pad(x, ((0, 0), (1, 0))), block[:, None], axis=1) for x in blocks]
    inside = jnp.take_along_axis(w, block[:, None, None], axis=1)[:, 0]
    ids = lax.associative_scan(_add, (inside, jnp.zeros_like(inside)), axis=-1)
    ids = _add((before[0], before[1]), ids)
    place, ends = _first(ids, inside > 0, goal)
    edges = jnp.concatenate([before[0], ids[0]], axis=1) / jnp.where(total[0] > 0, total[0], 1)
    below, above = (jnp.take_along_axis(edges, place[:, None] + i, axis=1)[:, 0] for i in (0, 1))
    margin = jnp.minimum(
        jnp.where(below > 0, jnp.abs(u - below), jnp.inf), jnp.where(last & ends, jnp.inf, jnp.abs(above - u))
    )
    return Drawn(jnp.minimum(block * search.BLOCK + place, size - 1), margin)


def _first(edges: Pair, positive: jax.Array, goal: Pair) -> tuple[jax.Array, jax.Array]:
    """The first positive entry whose upper edge exceeds ``goal``, else the last positive; whether it is the last."""
    ids = lax.broadcasted_iota(jnp.int32, positive.shape, 1)
    final = jnp.max(jnp.where(positive, ids, 0), axis=-1)
    over = positive & ((edges[0] - goal[0]) + (edges[1] - goal[1]) > 0)
    first = jnp.min(jnp.where(over, ids, positive.shape[1]), axis=-1)
    return jnp.minimum(first, final), first >= final
