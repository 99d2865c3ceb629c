"""Kernels on arrays: masks by rank and by mass, and the inverse-CDF draw. No sort anywhere.

Order of ids: logit descending, equal logits by ascending id. Kernels find the last kept logit by bisecting the bits of
the floats (32 passes of one compare and one sum), then cut the ids that share it by a second search over ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["Drawn", "draw", "keep_first", "mask_min_p", "mask_top_k", "mask_top_p", "rescale", "weights"]

BLOCK = 128  # ids per block of the two-level CDF


def weights(logits: jax.Array) -> jax.Array:
    """``exp(logits - max)``, [B,V]: the largest is 1, masked ids are 0; all 0 if every id is masked."""
    top = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    return jnp.exp(jnp.where(jnp.isneginf(logits), logits, logits - top))


def rescale(logits: jax.Array, tau: jax.Array) -> jax.Array:
    """``(logits - max) / tau`` for ``tau[B]`` > 0; masked ids stay masked and gradients stay finite (S4.1, S4.4).

    tau = 0 keeps the arg max (lowest id of equals) and masks the rest; NaN gives a row of NaN.
    """
    top = jnp.max(logits, axis=-1, keepdims=True)
    masked = jnp.isneginf(logits)
    zero = (tau == 0)[:, None]
    shifted = jnp.where(masked, 0, logits - lax.stop_gradient(top))
    scaled = jnp.where(masked, -jnp.inf, shifted / jnp.where(zero, 1, tau[:, None]))
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    best = ids == jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    greedy = jnp.where(best & ~masked, 0, -jnp.inf).astype(logits.dtype)
    out = jnp.where(zero, lax.stop_gradient(greedy), scaled)
    return jnp.where(jnp.isnan(tau)[:, None], jnp.nan, out)


def _order(logits: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the floats (-0.0 equals 0.0)."""
    unsigned = {4: jnp.uint32, 8: jnp.uint64}[logits.dtype.itemsize]
    bits = lax.bitcast_convert_type(jnp.where(logits == 0, jnp.zeros_like(logits), logits), unsigned)
    top = jnp.asarray(1, unsigned) << (8 * logits.dtype.itemsize - 1)
    return jnp.where(bits >= top, ~bits, bits | top)


def _largest(reaches: Callable[[jax.Array], jax.Array], rows: int, bits: int, dtype: jnp.dtype) -> jax.Array:
    """Per row the largest unsigned t with ``reaches(t)`` (true at 0, monotone), found bit by bit: [B]."""

    def body(i: jax.Array, t: jax.Array) -> jax.Array:
        candidate = t | (jnp.asarray(1, dtype) << (bits - 1 - i).astype(dtype))
        return jnp.where(reaches(candidate), candidate, t)

    return lax.fori_loop(0, bits, body, jnp.zeros((rows,), dtype))


def keep_first(logits: jax.Array, amount: jax.Array, needed: jax.Array) -> jax.Array:
    """The shortest prefix of the order of ids whose ``amount[B,V]`` adds up to ``needed[B]``, as a mask [B,V].

    All ids where the total stays below ``needed``. ``amount`` must be >= 0 and equal for equal logits. Sums are taken
    in the type of ``amount``.
    """
    logits, amount = lax.stop_gradient((logits, amount))
    order = _order(logits)
    rows, size = logits.shape
    zero = jnp.zeros((), amount.dtype)

    def above(t: jax.Array, strict: bool) -> jax.Array:
        inside = order > t[:, None] if strict else order >= t[:, None]
        return jnp.sum(jnp.where(inside, amount, zero), axis=-1, dtype=zero.dtype)

    last = _largest(lambda t: above(t, False) >= needed, rows, 8 * logits.dtype.itemsize, order.dtype)
    equal = order == last[:, None]
    each = jnp.max(jnp.where(equal, amount, zero), axis=-1)
    count = jnp.sum(equal, axis=-1, dtype=jnp.int32)
    missing = needed - above(last, True)
    if jnp.issubdtype(amount.dtype, jnp.floating):
        ties = jnp.ceil(missing / jnp.where(each > 0, each, 1))
        ties = jnp.where(each > 0, jnp.clip(ties, 1, size), size).astype(jnp.int32)
    else:
        ties = jnp.where(each > 0, jnp.maximum(missing, 1), size)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)

    def cut(_: None) -> jax.Array:
        def few(t: jax.Array) -> jax.Array:  # true while the ids below t hold fewer than `ties` of the equal ones
            return jnp.sum(equal & (ids < t[:, None].astype(jnp.int32)), axis=-1, dtype=jnp.int32) < ties

        stop = _largest(few, rows, size.bit_length(), jnp.dtype(jnp.uint32))
        return ids <= stop[:, None].astype(jnp.int32)

    below = lax.cond(jnp.any(ties < count), cut, lambda _: jnp.ones_like(equal), None)
    return (order > last[:, None]) | (equal & below)


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


def _cumulative(x: jax.Array) -> jax.Array:
    """Running sums of ``x[B,n]`` to within about one rounding: pairs (high, low) added without error (Knuth)."""

    def add(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        high = a[0] + b[0]
        part = high - a[0]
        error = (a[0] - (high - part)) + (b[0] - part)
        return high, a[1] + b[1] + error

    high, low = lax.associative_scan(add, (x, jnp.zeros_like(x)), axis=-1)
    return high + low


def draw(logits: jax.Array, u: jax.Array) -> Drawn:
    """Inverse CDF in id order with one uniform ``u[B]`` in [0, 1) per row; S6.1, S6.5.

    The CDF has two levels, blocks of ids and ids in the block. Sums of small and of large weights are kept apart, so
    that a peak does not swallow the tail. In float32 ``|P(token) - p(token)| <= 2^-22`` for every token (2^-23 of it is
    the grid of ``u``). A token of weight 0 is never drawn. Rows without any token give id 0.
    """
    w = lax.stop_gradient(weights(logits))
    rows, size = w.shape
    w = jnp.pad(w, ((0, 0), (0, -size % BLOCK))).reshape(rows, -1, BLOCK)
    large = w >= 2.0**-7
    mass = jnp.sum(jnp.where(large, 0, w), axis=-1) + jnp.sum(jnp.where(large, w, 0), axis=-1)
    total = _cumulative(mass)[:, -1:]
    total = jnp.where(total > 0, total, 1)
    block, start, _, _ = _find(mass / total, mass > 0, u, jnp.zeros_like(u))
    inside = jnp.take_along_axis(w, block[:, None, None], axis=1)[:, 0]
    place, low, high, last = _find(inside / total, inside > 0, u, start)
    token = jnp.minimum(block * BLOCK + place, size - 1)
    ids = lax.broadcasted_iota(jnp.int32, mass.shape, 1)
    last &= ~jnp.any((mass > 0) & (ids > block[:, None]), axis=-1)
    infinite = jnp.full_like(u, jnp.inf)
    below = jnp.where(low > 0, jnp.abs(u - low), infinite)
    return Drawn(token, jnp.minimum(below, jnp.where(last, infinite, jnp.abs(high - u))))


def _find(
    q: jax.Array, positive: jax.Array, u: jax.Array, start: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """First positive i with start + q_0 + .. + q_i > u, else the last positive one.

    Returns i[B], the edges below and above it, and whether no positive entry follows it.
    """
    edges = start[:, None] + _cumulative(q)
    ids = lax.broadcasted_iota(jnp.int32, q.shape, 1)
    final = jnp.max(jnp.where(positive, ids, 0), axis=-1)
    first = jnp.min(jnp.where(positive & (edges > u[:, None]), ids, q.shape[1]), axis=-1)
    index = jnp.minimum(first, final)
    padded = jnp.concatenate([start[:, None], edges], axis=-1)
    low = jnp.take_along_axis(padded, index[:, None], axis=-1)[:, 0]
    high = jnp.take_along_axis(edges, index[:, None], axis=-1)[:, 0]
    return index, low, high, index == final
