"""Attention over every part of a row's past, merged by log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdecode import base
from jaxdecode.kvcache.layout import Block, KVCache, Layer, Plan, Segment, offsets

__all__ = ["attend"]

HIDDEN = -1e30  # a finite score for entries a query may not see: a row that sees nothing stays finite


class _Part(NamedTuple):
    """Attention over one part, unnormalised: out[B,K,M,h], the largest score and the sum of weights [B,K,M]."""

    out: jax.Array
    top: jax.Array
    total: jax.Array


def _attend_block(q: jax.Array, block: Block, seen: jax.Array) -> _Part:
    """q[B,K,M,h] over a block's slots; ``seen[B,M,T]``."""
    wide = np.promote_types(q.dtype, np.float32)
    k, v = block.k.astype(q.dtype), block.v.astype(q.dtype)
    scores = jnp.einsum("bkmh,bkht->bkmt", q, k, preferred_element_type=wide)
    scores = jnp.where(seen[:, None], scores * (q.shape[-1] ** -0.5), HIDDEN)
    top = jnp.max(scores, axis=-1)
    weight = jnp.exp(scores - lax.stop_gradient(top)[..., None])
    total = jnp.sum(weight, axis=-1)
    out = jnp.einsum("bkmt,bkth->bkmh", weight.astype(q.dtype), v, preferred_element_type=wide)
    return _Part(out, top, total)


def _merge(a: _Part, b: _Part) -> _Part:
    """Attention over the union of two parts, by log-sum-exp."""
    top = jnp.maximum(a.top, b.top)
    wa, wb = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return _Part(a.out * wa[..., None] + b.out * wb[..., None], top, a.total * wa + b.total * wb)


def _merge_rows(part: _Part, q: jax.Array, block: Block, seen: jax.Array, needed: jax.Array) -> _Part:
    """``part`` merged with attention over one more block, of the ``needed[R]`` rows alone, each by itself."""

    def row(part: _Part, b: jax.Array) -> tuple[_Part, None]:
        def one(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, b, 1)

        def more(part: _Part) -> _Part:
            new = _attend_block(one(q), type(block)(*map(one, block)), one(seen))
            merged = _merge(_Part(*map(one, part)), new)
            rows = zip(part, merged, strict=True)
            return _Part(*(lax.dynamic_update_slice_in_dim(x, y, b, 0) for x, y in rows))

        return lax.cond(needed[b], more, lambda part: part, part), None

    return lax.scan(row, part, jnp.arange(len(q), dtype=jnp.int32))[0]


def _attend_layer(
    q: jax.Array,
    layer: Layer,
    seen: Callable[[int, int], jax.Array],
    reach: jax.Array,
    filled: jax.Array | None = None,
) -> _Part:
    """Attention of q[R,K,M,h] over the slots it sees, of which ``reach`` are filled in some row.

    ``seen(offset, size)`` [R,M,T] says which of ``size`` slots from ``offset`` on a query sees. filled[R]: those of
    each row; the blocks after the first are then read row by row, by the rows that have got there.
    """

    def over(block: Block, offset: int) -> _Part:
        return _attend_block(q, block, seen(offset, block.v.shape[2]))

    part = over(layer[0], 0)
    for offset, block in offsets(layer)[1:]:

        def more(part: _Part, block: Block = block, offset: int = offset) -> _Part:
            if filled is None:
                return _merge(part, over(block, offset))
            return _merge_rows(part, q, block, seen(offset, block.v.shape[2]), filled > offset)

        part = lax.cond(reach > offset, more, lambda part: part, part)
    return part


def _up_to(visible: jax.Array) -> Callable[[int, int], jax.Array]:
    """Every query sees the first ``visible[R,M]`` slots."""

    def seen(offset: int, size: int) -> jax.Array:
        return offset + jnp.arange(size, dtype=jnp.int32)[None, None, :] < visible[:, :, None]

    return seen


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


def _attend_shared(q: jax.Array, segment: Segment, index: int, reach: jax.Array) -> _Part:
    """Attention of q[B,K,M,h] over a shared level."""
    batch, _, size, _ = q.shape
    layer = segment.layers[index]
    if segment.repeats is None:
        layer = base.take_rows(layer, segment.segment_of_row)
        visible = jnp.broadcast_to(segment.visible[:, None], (batch, size))
        return _attend_layer(q, layer, _up_to(visible), reach)
    n = segment.repeats  # a segment is read once for all rows that use it
    visible = jnp.repeat(segment.visible.reshape(batch // n, n), size, axis=1)
    return _apart(_attend_layer(_together(q, n), layer, _up_to(visible), reach), n)


def _attend_beams(
    q: jax.Array, layer: Layer, source: jax.Array, beams: int, visible: jax.Array, reach: jax.Array
) -> _Part:
    """Attention of q[B,K,M,h] over the tails of its group: each is read once for the queries of all beams."""
    batch, _, size, _ = q.shape
    groups = batch // beams
    every = jnp.repeat(_together(q, beams), beams, axis=0)  # row b: all queries of its group, for the tail of b
    own = jnp.arange(batch, dtype=jnp.int32) % beams
    inside = jnp.repeat(visible.reshape(groups, beams * size), beams, axis=0)

    def seen(offset: int, slots: int) -> jax.Array:
        there = source[:, offset : offset + slots].reshape(groups, beams, slots)
        there = jnp.repeat(jnp.repeat(there, size, axis=1), beams, axis=0)
        return _up_to(inside)(offset, slots) & (there == own[:, None, None])

    part = _attend_layer(every, layer, seen, reach)
    out, top, total = (x.reshape(groups, beams, *x.shape[1:]) for x in part)
    most = jnp.max(top, axis=1)
    weight = jnp.exp(top - most[:, None])
    return _apart(_Part(jnp.sum(out * weight[..., None], 1), most, jnp.sum(total * weight, 1)), beams)


def attend(q: jax.Array, layer: Layer, cache: KVCache, index: int, plan: Plan) -> jax.Array:
    """Causal attention of ``q[B,K,G,S,h]`` (G query heads per KV head) over every part, scaled by h^-1/2.

    ``layer`` is layer ``index`` after this call's ``write``; shared parts come from ``cache``. Returns [B,K,G,S,h].
    """
    batch, kv, groups, size, head = q.shape
    flat = q.reshape(batch, kv, groups * size, head)
    visible = jnp.tile(plan.visible, (1, groups))
    if cache.source is None:
        filled = plan.length if cache.uneven and size == 1 else None
        part = _attend_layer(flat, layer, _up_to(visible), plan.reach, filled)
    else:
        part = _attend_beams(flat, layer, cache.source, cache.beams, visible, plan.reach)
    for segment, reach in zip(cache.shared, plan.shared_reach, strict=True):
        part = _merge(part, _attend_shared(flat, segment, index, reach))
    out = part.out / part.total[..., None]
    return out.astype(q.dtype).reshape(q.shape)
