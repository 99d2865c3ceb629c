"""Kernels on arrays: masks by rank and by mass, and the inverse-CDF draw. No sort anywhere.

Order of ids: logit descending, equal logits by ascending id. Kernels find the last kept logit by a root search over
the amount above a guess (some ten turns of two plain passes), then cut the ids that share it by a search over ids.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

__all__ = [
    "Drawn",
    "draw",
    "first_max",
    "keep_first",
    "last_kept",
    "mask_min_p",
    "mask_top_k",
    "mask_top_p",
    "rescale",
    "weights",
]

BLOCK = 128  # ids per block of the two-level CDF

Pair = tuple[jax.Array, jax.Array]  # a sum in two floats, high + low, good to about 2^-46


def weights(logits: jax.Array) -> jax.Array:
    """``exp(logits - max)``, [B,V]: the largest is 1, masked ids are 0; all 0 if every id is masked."""
    top = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    return jnp.exp(jnp.where(jnp.isneginf(logits), logits, logits - top))


def rescale(logits: jax.Array, tau: jax.Array) -> jax.Array:
    """``(logits - max) / tau`` for ``tau[B]`` > 0; masked ids stay masked and gradients stay finite (S4.1, S4.4).

    tau = 0 keeps the arg max (lowest id of equals) and masks the rest; NaN gives a row of NaN.
    """
    top, winner = first_max(logits)
    masked = jnp.isneginf(logits)
    zero = (tau == 0)[:, None]
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


def _halfway(low: jax.Array, high: jax.Array) -> jax.Array:
    """The float in the middle of all floats between ``low`` and ``high``: halving it ends within 64 turns."""
    signed = {4: jnp.int32, 8: jnp.int64}[low.dtype.itemsize]
    top = jnp.asarray(jnp.iinfo(signed).min, signed)

    def swap(bits: jax.Array) -> jax.Array:  # signed integers in the order of the floats, and back
        return jnp.where(bits < 0, ~bits ^ top, bits)

    a, b = (swap(lax.bitcast_convert_type(x, signed)) for x in (low, high))
    middle = (a & b) + ((a ^ b) >> 1) + ((a ^ b) & 1)
    return lax.bitcast_convert_type(swap(middle), low.dtype)


class _Bracket(NamedTuple):
    """The last kept logit lies in [low, high], both logits of the row; what they miss and exceed steers the guess."""

    turn: jax.Array
    low: jax.Array
    high: jax.Array
    over: jax.Array
    under: jax.Array
    side: jax.Array


def last_kept(logits: jax.Array, amount: jax.Array, needed: jax.Array) -> jax.Array:
    """The largest logit [B] such that the ids from it upwards hold ``needed[B]`` of ``amount[B,V]`` (>= 0).

    Regula falsi with the Illinois rule on the amount above a guess, every fourth turn a halving of the bits; the ends
    always move to logits of the row, so it ends with one of them. Rows that never reach ``needed`` give their lowest.
    """
    wide = logits.dtype
    low = jnp.min(jnp.where(logits > -jnp.inf, logits, jnp.inf), axis=-1)
    high, total = jnp.max(logits, axis=-1), jnp.sum(amount, axis=-1, dtype=amount.dtype)
    high = jnp.where(total >= needed, high, low)

    def turn(c: _Bracket) -> _Bracket:
        guess = c.high - (c.high - c.low) * (c.under / (c.under + c.over))
        guess = jnp.where(c.turn % 4 == 3, _halfway(c.low, c.high), guess)
        guess = jnp.where((guess > c.low) & (guess <= c.high), guess, c.high)
        above = logits >= guess[:, None]
        held = jnp.sum(jnp.where(above, amount, jnp.zeros((), amount.dtype)), axis=-1, dtype=amount.dtype)
        enough = held >= needed
        sign = jnp.where(enough, -1, 1).astype(wide)  # the nearest logit on the side that is left
        nearest = sign * jnp.max(jnp.where(above == enough[:, None], sign[:, None] * logits, -jnp.inf), axis=-1)
        gap = (held - needed).astype(wide)
        moved = _Bracket(
            c.turn,
            jnp.where(enough, nearest, c.low),
            jnp.where(enough, c.high, nearest),
            jnp.where(enough, gap, jnp.where(c.side < 0, c.over / 2, c.over)),
            jnp.where(enough, jnp.where(c.side > 0, c.under / 2, c.under), -gap),
            jnp.where(enough, 1, -1),
        )
        busy = c.low < c.high
        return _Bracket(c.turn + 1, *(jnp.where(busy, new, old) for new, old in zip(moved[1:], c[1:], strict=True)))

    side = jnp.zeros(low.shape, jnp.int32)
    first = _Bracket(jnp.int32(0), low, high, (total - needed).astype(wide), needed.astype(wide), side)
    return lax.while_loop(lambda c: jnp.any(c.low < c.high), turn, first).low


def keep_first(logits: jax.Array, amount: jax.Array, needed: jax.Array) -> jax.Array:
    """The shortest prefix of the order of ids whose ``amount[B,V]`` adds up to ``needed[B]``, as a mask [B,V].

    All ids where the total stays below ``needed``. ``amount`` must be >= 0 and equal for equal logits. Sums are taken
    in the type of ``amount``.
    """
    logits, amount, needed = lax.stop_gradient((logits, amount, needed))
    rows, size = logits.shape
    zero = jnp.zeros((), amount.dtype)
    last = last_kept(logits, amount, needed)[:, None]
    above, equal = logits > last, logits == last
    each = jnp.max(jnp.where(equal, amount, zero), axis=-1)
    count = jnp.sum(equal, axis=-1, dtype=jnp.int32)
    missing = needed - jnp.sum(jnp.where(above, amount, zero), axis=-1, dtype=amount.dtype)
    if jnp.issubdtype(amount.dtype, jnp.floating):
        ties = jnp.ceil(missing / jnp.where(each > 0, each, 1))
        ties = jnp.where(each > 0, jnp.clip(ties, 1, size), size).astype(jnp.int32)
    else:
        ties = jnp.where(each > 0, jnp.maximum(missing, 1), size)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)

    def cut(_: None) -> jax.Array:
        """Ids up to the one that completes ``ties``: the largest t with fewer equal ids below it, bit by bit."""
        bits = size.bit_length()

        def body(i: jax.Array, t: jax.Array) -> jax.Array:
            candidate = t | (jnp.int32(1) << (bits - 1 - i))
            few = jnp.sum(equal & (ids < candidate[:, None]), axis=-1, dtype=jnp.int32) < ties
            return jnp.where(few, candidate, t)

        return ids <= lax.fori_loop(0, bits, body, jnp.zeros((rows,), jnp.int32))[:, None]

    below = lax.cond(jnp.any(ties < count), cut, lambda _: jnp.ones_like(equal), None)
    return above | (equal & below)


def mask_top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    """Keep the first ``k[B]`` ids of each row (0: all; negative: a row of NaN); S5.1."""
    unmasked = (logits > -jnp.inf).astype(jnp.int32)
    keep = keep_first(logits, unmasked, k) | (k == 0)[:, None]
    return jnp.where((k < 0)[:, None], jnp.nan, jnp.where(keep, logits, -jnp.inf))


def mask_top_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Keep the smallest prefix whose mass is >= ``p[B]`` (1: all; NaN: a row of NaN); S5.2."""
    w = lax.stop_gradient(weights(logits))
    keep = keep_first(logits, w, p * jnp.sum(w, axis=-1)) | (p >= 1)[:, None]
    return jnp.where(jnp.isnan(p)[:, None], jnp.nan, jnp.where(keep, logits, -jnp.inf))


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


def _exact_weights(logits: jax.Array) -> jax.Array:
    """``weights``, corrected for the rounding of ``logits - max``: at -12 that is up to 2^-21 of a weight."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    masked = jnp.isneginf(logits)
    z = jnp.where(masked, top, logits)
    shifted = z - top
    part = shifted - z
    error = (z - (shifted - part)) - (top + part)
    w = jnp.exp(shifted)
    return jnp.where(masked | (w == 0), 0, w + w * error)


def draw(logits: jax.Array, u: jax.Array) -> Drawn:
    """Inverse CDF in id order with one uniform ``u[B]`` in [0, 1) per row; S6.1, S6.5.

    The CDF has two levels, blocks of ids and ids in the block. Its sums are pairs of floats and nothing is normalised,
    so that no id collects the rounding of others. In float32 ``|P(token) - p(token)| <= 2^-22`` for every token (2^-23
    of it is the grid of ``u``). A token of weight 0 is never drawn. Rows without any token give id 0.
    """
    w = _exact_weights(lax.stop_gradient(logits))
    rows, size = w.shape
    w = jnp.pad(w, ((0, 0), (0, -size % BLOCK))).reshape(rows, -1, BLOCK)
    coarse = jnp.round(w * 2.0**16) / 2.0**16  # sums of up to 2^8 of these multiples of 2^-16 are exact
    sums = [(jnp.sum(x, axis=-1), jnp.zeros(w.shape[:2], w.dtype)) for x in (coarse, w - coarse)]
    blocks = lax.associative_scan(_add, _add(*sums), axis=-1)
    total = (blocks[0][:, -1:], blocks[1][:, -1:])
    high, low = _product(u[:, None], total[0])
    goal = (high, low + u[:, None] * total[1])
    block, last = _first(blocks, jnp.any(w > 0, axis=-1), goal)
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
    return Drawn(jnp.minimum(block * BLOCK + place, size - 1), margin)


def _first(edges: Pair, positive: jax.Array, goal: Pair) -> tuple[jax.Array, jax.Array]:
    """The first positive entry whose upper edge exceeds ``goal``, else the last positive; whether it is the last."""
    ids = lax.broadcasted_iota(jnp.int32, positive.shape, 1)
    final = jnp.max(jnp.where(positive, ids, 0), axis=-1)
    over = positive & ((edges[0] - goal[0]) + (edges[1] - goal[1]) > 0)
    first = jnp.min(jnp.where(over, ids, positive.shape[1]), axis=-1)
    return jnp.minimum(first, final), first >= final
