"""Attention over every part of a row's past, merged by log-sum-exp."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdecode import base
from jaxdecode.arithmetic import PLAIN, Arithmetic
from jaxdecode.kvcache.int4 import Int4Block, int4_values
from jaxdecode.kvcache.layout import (
    AnyBlock,
    Int8Block,
    KVCache,
    Layer,
    Plan,
    Segment,
    Window,
    encoded,
    may_wrap,
    numbers,
    offsets,
    over_slots,
    slots_of,
)
from jaxdecode.kvcache.writing import write
from jaxdecode.meshes import by_rows

__all__ = ["extend"]

HIDDEN = -1e30  # a finite score for entries a query may not see: a row that sees nothing stays finite


class _How(NamedTuple):
    """softcap c: c tanh(x / c) of the scores."""

    softcap: float | None = None
    arithmetic: Arithmetic = PLAIN


class _Part(NamedTuple):
    """Attention over one part, unnormalised: out[B,K,M,h], the largest score and the sum of weights [B,K,M]."""

    out: jax.Array
    top: jax.Array
    total: jax.Array


class _Sight(NamedTuple):
    """Which tokens of a part the queries [R,M] see: the first ``visible``.

    With a window: of these the ones from ``oldest[R,M]`` on, and the first ``sinks[R,M]``. ``held[R]``: tokens that
    the part has, which say what each slot holds.
    """

    visible: jax.Array
    oldest: jax.Array | None = None
    sinks: jax.Array | None = None
    held: jax.Array | None = None

    def sees(self, token: jax.Array) -> jax.Array:
        """Whether a query sees ``token[R,T]`` of the part (below 0: none): [R,M,T]."""
        token = token[:, None]
        seen = token < self.visible[:, :, None]
        if self.oldest is None or self.sinks is None:
            return seen
        return seen & (token >= 0) & ((token >= self.oldest[:, :, None]) | (token < self.sinks[:, :, None]))

    def rows(self, fn: Callable[[jax.Array], jax.Array]) -> _Sight:
        parts: Any = (None if x is None else fn(x) for x in self)
        return _Sight(*parts)


def _sight(visible: jax.Array, before: jax.Array, total: jax.Array, held: jax.Array, window: Window | None) -> _Sight:
    """The sight of queries that see ``visible[R,M]`` tokens of a part, which comes after ``before[R]`` others.

    total[R,M]: tokens of the row up to the query.
    """
    if window is None:
        return _Sight(visible)
    first = jnp.broadcast_to(before[:, None], visible.shape)
    return _Sight(visible, total - window.size - first, window.sinks - first, held)


def _masks(sight: _Sight, layer: Layer, window: Window | None) -> Callable[[int, int], jax.Array]:
    """``seen(offset, size)`` [R,M,T]: which of ``size`` slots of a layer from ``offset`` on a query sees."""
    held = None if sight.held is None else numbers(sight.held, slots_of(layer), window)

    def seen(offset: int, size: int) -> jax.Array:
        if held is None:
            return sight.sees(offset + jnp.arange(size, dtype=jnp.int32)[None])
        return sight.sees(held[:, offset : offset + size])

    return seen


def _attend_block(q: jax.Array, block: AnyBlock, seen: jax.Array, how: _How) -> _Part:
    """q[B,K,M,h] over a block's slots; ``seen[B,M,T]``."""
    wide = np.promote_types(q.dtype, np.float32)
    if isinstance(block, Int4Block):
        k, v = int4_values(block, q.dtype)
    else:
        k, v = block.k.astype(q.dtype), block.v.astype(q.dtype)
    scores = jnp.einsum("bkmh,bkht->bkmt", q, k, preferred_element_type=wide)
    if isinstance(block, Int8Block):
        scores = scores * block.k_scale[:, :, None].astype(wide)
    scores = how.arithmetic.product(scores * (q.shape[-1] ** -0.5))
    scores = how.arithmetic.capped(scores, how.softcap)
    scores = jnp.where(seen[:, None], scores, HIDDEN)
    top = jnp.max(scores, axis=-1)
    weight = how.arithmetic.exp(scores - lax.stop_gradient(top)[..., None])
    total = how.arithmetic.sum(weight, -1)[..., 0]
    if isinstance(block, Int8Block):
        weight = weight * block.v_scale[:, :, None].astype(wide)
    out = jnp.einsum("bkmt,bkth->bkmh", weight.astype(q.dtype), v, preferred_element_type=wide)
    return _Part(out, top, total)


def _merge(a: _Part, b: _Part, arithmetic: Arithmetic) -> _Part:
    """Attention over the union of two parts, by log-sum-exp."""
    top = jnp.maximum(a.top, b.top)
    weights = [arithmetic.exp(part.top - top) for part in (a, b)]

    def both(x: jax.Array, y: jax.Array) -> jax.Array:
        wx, wy = (w.reshape(w.shape + (1,) * (x.ndim - w.ndim)) for w in weights)
        return arithmetic.product(x * wx) + arithmetic.product(y * wy)

    return _Part(both(a.out, b.out), top, both(a.total, b.total))


def _merge_rows(part: _Part, q: jax.Array, block: AnyBlock, seen: jax.Array, needed: jax.Array, how: _How) -> _Part:
    """``part`` merged with attention over one more block, of the ``needed[R]`` rows alone, each by itself."""
    return by_rows(functools.partial(_merge_each, how), part, q, block, seen, needed)


def _merge_each(how: _How, part: _Part, q: jax.Array, block: AnyBlock, seen: jax.Array, needed: jax.Array) -> _Part:
    def row(part: _Part, b: jax.Array) -> tuple[_Part, None]:
        def one(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, b, 1)

        def more(part: _Part) -> _Part:
            new = _attend_block(one(q), over_slots(lambda axis, x: one(x), block), one(seen), how)
            merged = _merge(_Part(*map(one, part)), new, how.arithmetic)
            rows = zip(part, merged, strict=True)
            return _Part(*(lax.dynamic_update_slice_in_dim(x, y, b, 0) for x, y in rows))

        return lax.cond(needed[b], more, lambda part: part, part), None

    return lax.scan(row, part, jnp.arange(len(q), dtype=jnp.int32))[0]


def _attend_layer(
    q: jax.Array,
    layer: Layer,
    seen: Callable[[int, int], jax.Array],
    reach: jax.Array,
    how: _How,
    filled: jax.Array | None = None,
) -> _Part:
    """Attention of q[R,K,M,h] over the slots it sees, of which ``reach`` are filled in some row.

    ``seen(offset, size)`` [R,M,T] says which of ``size`` slots from ``offset`` on a query sees. filled[R]: those of
    each row; the blocks after the first are then read row by row, by the rows that have got there.
    """

    def over(block: AnyBlock, offset: int) -> _Part:
        return _attend_block(q, block, seen(offset, block.v.shape[2]), how)

    part = over(layer[0], 0)
    for offset, block in offsets(layer)[1:]:

        def more(part: _Part, block: AnyBlock = block, offset: int = offset) -> _Part:
            if filled is None:
                return _merge(part, over(block, offset), how.arithmetic)
            return _merge_rows(part, q, block, seen(offset, block.v.shape[2]), filled > offset, how)

        part = lax.cond(reach > offset, more, lambda part: part, part)
    return part


def _together(q: jax.Array, n: int) -> jax.Array:
    """Queries of each n rows that stand side by side as one block: [B,K,M,h] -> [B/n, K, n*M, h]."""
    batch, kv, size, head = q.shape
    return q.reshape(batch // n, n, kv, size, head).swapaxes(1, 2).reshape(batch // n, kv, n * size, head)


def _apart(part: _Part, n: int) -> _Part:
    """What ``_together`` did, undone: [B/n, K, n*M, ...] -> [B,K,M,...]."""

    def rows(x: jax.Array) -> jax.Array:
        groups, kv, size = x.shape[0], x.shape[1], x.shape[2] // n
        return x.reshape(groups, kv, n, size, *x.shape[3:]).swapaxes(1, 2).reshape(groups * n, kv, size, *x.shape[3:])

    return _Part(*(rows(x) for x in part))


def _of_groups(sight: _Sight, n: int) -> _Sight:
    """What ``_together`` does to queries, done to what they see."""
    return sight.rows(lambda x: x[::n] if x.ndim == 1 else x.reshape(len(x) // n, -1))


def _attend_shared(
    q: jax.Array,
    layer: Layer,
    segment: Segment,
    sight: _Sight,
    window: Window | None,
    reach: jax.Array,
    how: _How,
) -> _Part:
    """Attention of q[B,K,M,h] over one layer of a shared level."""
    if segment.repeats is None:
        layer = base.take_rows(layer, segment.segment_of_row)
        return _attend_layer(q, layer, _masks(sight, layer, window), reach, how)
    n = segment.repeats  # a segment is read once for all rows that use it
    seen = _masks(_of_groups(sight, n), layer, window)
    return _apart(_attend_layer(_together(q, n), layer, seen, reach, how), n)


def _attend_beams(
    q: jax.Array,
    layer: Layer,
    cache: KVCache,
    sight: _Sight,
    window: Window | None,
    reach: jax.Array,
    how: _How,
) -> _Part:
    """Attention of q[B,K,M,h] over the tails of its group: each is read once for the queries of all beams."""
    batch, _, size, _ = q.shape
    beams, source = cache.beams, cache.source
    assert source is not None
    groups = batch // beams
    every = jnp.repeat(_together(q, beams), beams, axis=0)  # row b: all queries of its group, for the tail of b
    own = jnp.arange(batch, dtype=jnp.int32) % beams
    inside = _masks(_of_groups(sight, beams).rows(lambda x: jnp.repeat(x, beams, axis=0)), layer, window)
    if sight.held is not None:  # from tokens to slots, which hold the same tokens in all tails of a group
        number = numbers(sight.held, slots_of(layer), window)
        source = jnp.take_along_axis(source, jnp.maximum(number, 0), axis=1)

    def seen(offset: int, slots: int) -> jax.Array:
        there = source[:, offset : offset + slots].reshape(groups, beams, slots)
        there = jnp.repeat(jnp.repeat(there, size, axis=1), beams, axis=0)
        return inside(offset, slots) & (there == own[:, None, None])

    part = _attend_layer(every, layer, seen, reach, how)
    out, top, total = (x.reshape(groups, beams, *x.shape[1:]) for x in part)
    most = jnp.max(top, axis=1)
    weight = how.arithmetic.exp(top - most[:, None])

    def every_beam(x: jax.Array) -> jax.Array:
        return how.arithmetic.sum(how.arithmetic.product(x), 1)[:, 0]

    return _apart(_Part(every_beam(out * weight[..., None]), most, every_beam(total * weight)), beams)


def _attend(
    q: jax.Array, layer: Layer, cache: KVCache, plan: Plan, how: _How, new: AnyBlock | None = None
) -> jax.Array:
    """Attention of ``q[B,K,G,S,h]`` over every part.

    ``layer`` is the tail after this call's ``write``, or before it, and then ``new`` is what will be written. Shared
    parts come from ``cache``.
    """
    batch, kv, groups, size, head = q.shape
    flat = q.reshape(batch, kv, groups * size, head)
    visible, window = jnp.tile(plan.visible, (1, groups)), cache.window(0)
    total = visible + plan.before[:, None]
    tail = _sight(visible, plan.before, total, plan.length if new is None else plan.start, window)
    if new is not None:
        tail = tail._replace(visible=jnp.minimum(visible, plan.start[:, None]))
    if cache.source is None:
        filled = plan.length if cache.uneven and size == 1 else None
        part = _attend_layer(flat, layer, _masks(tail, layer, window), plan.reach, how, filled)
    else:
        part = _attend_beams(flat, layer, cache, tail, window, plan.reach, how)
    if new is not None:
        token = plan.start[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        part = _merge(part, _attend_block(flat, new, tail._replace(visible=visible).sees(token), how), how.arithmetic)
    before = jnp.zeros_like(plan.before)
    for segment, reach in zip(cache.shared, plan.shared_reach, strict=True):
        held = jnp.take(segment.held, segment.segment_of_row)
        sight = _sight(jnp.broadcast_to(segment.visible[:, None], visible.shape), before, total, held, window)
        part = _merge(part, _attend_shared(flat, segment.layers[0], segment, sight, window, reach, how), how.arithmetic)
        before = before + segment.visible
    out = part.out * (1 / part.total)[..., None]
    return out.astype(q.dtype).reshape(q.shape)


def extend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    past: KVCache,
    plan: Plan,
    *,
    softcap: float | None = None,
    arithmetic: Arithmetic = PLAIN,
) -> tuple[jax.Array, Layer]:
    """Write ``k[B,S,K,h]`` and ``v[B,S,K,h]`` into the only layer of ``past``, and attend to all that is there.

    Causal attention of ``q[B,K,G,S,h]`` (G query heads per KV head), scaled by h^-1/2; returns [B,K,G,S,h], and the
    layer. softcap c: scores are c tanh(score / c). arithmetic: that of the model (``jaxdecode.arithmetic``). A ring is
    read before more is written than its slack allows.
    """
    (layer,), window = past.layers, past.window(0)
    how = _How(softcap, arithmetic)
    ring = window if may_wrap(layer, window, past.capacity) else None
    if ring is not None and k.shape[1] > ring.slack + 1:
        return _attend(q, layer, past, plan, how, encoded(k, v, layer[0])), write(layer, k, v, plan, ring)
    layer = write(layer, k, v, plan, ring)
    return _attend(q, layer, past, plan, how), layer
