"""The KV cache: an immutable pytree, and the only code that knows its layout.

A row's past has parts: up to two levels of *shared segments* (a prompt that many rows continue, stored once) and the
row's own *tail*. Row b's tail token number t is always in slot t, so padding never enters. Slots are kept in blocks of
128, 128, 256, 512, ...: attention goes block by block, merged by log-sum-exp, and skips those that no row has reached,
so its cost follows the tokens present; and since a block is never cut, it never copies (XLA:CPU copies a slice before a
product). A block that a row has not reached adds exactly nothing to it: how far other rows are cannot change a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxdecode import base, checks

__all__ = [
    "Block",
    "KVCache",
    "Layer",
    "Plan",
    "Segment",
    "advance",
    "attend",
    "create",
    "one_layer",
    "only_nodes",
    "plan",
    "share",
    "truncate",
    "write",
]

BLOCK = 128  # slots of the first block of a tail
HIDDEN = -1e30  # a finite score for entries a query may not see: a row that sees nothing stays finite


class Block(NamedTuple):
    """Keys [R,K,h,T] and values [R,K,T,h] of T slots: both products of attention read memory in order."""

    k: jax.Array
    v: jax.Array


Layer = tuple[Block, ...]  # one layer's slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """A part many rows share: ``layers`` of G segments, ``segment_of_row[B]``, ``visible[B]`` tokens each row sees.

    ``repeats``: row r uses segment r // repeats, so that attention reads a segment once for all its rows; None: rows
    are in any order, and each gathers its own copy for the time of a product.
    """

    layers: tuple[Layer, ...]
    segment_of_row: jax.Array
    visible: jax.Array
    repeats: int | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The cache of one model: tail ``layers`` [B,...], ``length[B]`` tokens in each tail, ``shared`` segments."""

    layers: tuple[Layer, ...]
    length: jax.Array
    shared: tuple[Segment, ...] = ()

    @property
    def capacity(self) -> int:
        """Tail slots per row."""
        return _slots(self.layers[0])

    @property
    def total(self) -> jax.Array:
        """Tokens each row has seen, [B]."""
        return self.length + sum(s.visible for s in self.shared)

    def take_rows(self, rows: jax.Array) -> KVCache:
        tail, length = base.take_rows((self.layers, self.length), rows)
        return KVCache(tail, length, tuple(_map_rows(s, lambda x: base.take_rows(x, rows), None) for s in self.shared))

    def repeat_rows(self, n: int) -> KVCache:
        tail, length = base.repeat_rows((self.layers, self.length), n)
        return KVCache(
            tail,
            length,
            tuple(_map_rows(s, lambda x: base.repeat_rows(x, n), s.repeats and s.repeats * n) for s in self.shared),
        )

    def put_rows(self, rows: jax.Array, new: KVCache) -> KVCache:
        if self.shared or new.shared:
            raise ValueError("put_rows: expected caches without shared segments")
        tail, length = base.put_rows((self.layers, self.length), rows, (new.layers, new.length))
        return KVCache(tail, length)


def _map_rows(segment: Segment, fn: Any, repeats: int | None) -> Segment:
    rows, visible = fn((segment.segment_of_row, segment.visible))
    return Segment(segment.layers, rows, visible, repeats)


def create(
    n_layers: int, batch_size: int, n_kv_heads: int, head_dim: int, max_len: int, dtype: DTypeLike = jnp.float32
) -> KVCache:
    """An empty cache for ``max_len`` tokens per row: 2 * n_layers * max_len * n_kv_heads * head_dim numbers a row."""
    rows = (batch_size, n_kv_heads)

    def block(size: int) -> Block:
        return Block(jnp.zeros((*rows, head_dim, size), dtype), jnp.zeros((*rows, size, head_dim), dtype))

    layers = tuple(tuple(block(size) for size in _block_sizes(max_len)) for _ in range(n_layers))
    return KVCache(layers, jnp.zeros((batch_size,), jnp.int32))


def _block_sizes(slots: int) -> list[int]:
    """128, 128, 256, 512, ..., the last one cut to what is left."""
    sizes, total = [min(BLOCK, slots)], BLOCK
    while total < slots:
        sizes.append(min(total, slots - total))
        total *= 2
    return sizes


def _slots(layer: Layer) -> int:
    return sum(block.v.shape[2] for block in layer)


def _offsets(layer: Layer) -> list[tuple[int, Block]]:
    """Every block with the number of its first slot."""
    starts = np.cumsum([0, *(block.v.shape[2] for block in layer)])
    return [(int(start), block) for start, block in zip(starts, layer, strict=False)]


class Plan(NamedTuple):
    """Where one call's S tokens go: computed once, used by every layer.

    position[B,S] of each token in its row, start[B] the first slot and written[B] how many tokens go there,
    visible[B,S] tail slots each token sees, length[B] afterwards; reach, and one of shared_reach for every shared
    level: slots that some row has filled.
    """

    position: jax.Array
    start: jax.Array
    written: jax.Array
    visible: jax.Array
    length: jax.Array
    reach: jax.Array
    shared_reach: tuple[jax.Array, ...]


def plan(cache: KVCache, size: int, lengths: jax.Array | None = None) -> Plan:
    """Plan the next ``size`` tokens of each row, of which ``lengths[B]`` are real (None: all)."""
    steps = jnp.arange(size, dtype=jnp.int32)[None, :]
    if lengths is None:
        lengths = jnp.full_like(cache.length, size)
    place = cache.length[:, None] + steps
    after = jnp.minimum(cache.length + lengths, cache.capacity)
    return Plan(
        position=(cache.total[:, None] + steps),
        start=cache.length,
        written=after - cache.length,
        visible=jnp.minimum(place + 1, after[:, None]),
        length=after,
        reach=jnp.max(after, initial=0),
        shared_reach=tuple(jnp.max(s.visible, initial=0) for s in cache.shared),
    )


def write(layer: Layer, k: jax.Array, v: jax.Array, plan: Plan) -> Layer:
    """Put ``k[B,S,K,h]`` and ``v[B,S,K,h]`` into the planned slots, in place where the buffer may be reused."""
    if k.shape[1] == 1:
        return tuple(_scatter(block, offset, k[:, 0], v[:, 0], plan) for offset, block in _offsets(layer))
    new = Block(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))

    def row(b: jax.Array, layer: Layer) -> Layer:
        one = Block(*(lax.dynamic_slice_in_dim(x, b, 1) for x in new))
        first, count = plan.start[b], plan.written[b]
        return tuple(_put(block, b, one, first - offset, count) for offset, block in _offsets(layer))

    return lax.fori_loop(0, len(k), row, layer)


def _scatter(block: Block, offset: int, k: jax.Array, v: jax.Array, plan: Plan) -> Block:
    """One token ``k[B,K,h]``, ``v[B,K,h]`` of every row, if its slot is in this block."""
    slots, rows = block.v.shape[2], jnp.arange(len(k), dtype=jnp.int32)
    slot = plan.start - offset
    slot = jnp.where((slot >= 0) & (plan.written > 0), slot, slots)  # outside: dropped
    return Block(
        block.k.at[rows, :, :, slot].set(k.astype(block.k.dtype), mode="drop", unique_indices=True),
        block.v.at[rows, :, slot].set(v.astype(block.v.dtype), mode="drop", unique_indices=True),
    )


def _put(block: Block, b: jax.Array, new: Block, first: jax.Array, count: jax.Array) -> Block:
    """Row b of a block with the first ``count`` tokens of ``new`` (one row) from slot ``first``, where inside.

    One contiguous window: a scatter would move one token at a time. It starts early where S slots would pass the
    block's end, and slots that get no token keep what they hold.
    """
    slots, size = block.v.shape[2], new.v.shape[2]
    width = min(size, slots)
    start = jnp.clip(first, 0, slots - width)
    source = start + jnp.arange(width, dtype=jnp.int32) - first
    fresh = (source >= 0) & (source < count)

    def put(buffer: jax.Array, tokens: jax.Array, axis: int) -> jax.Array:
        at = [jnp.asarray(b, jnp.int32), *(start if i == axis else np.int32(0) for i in (1, 2, 3))]
        shape = [1, *(width if i == axis else buffer.shape[i] for i in (1, 2, 3))]
        if size > 1:
            tokens = jnp.take(tokens, jnp.clip(source, 0, size - 1), axis=axis)
        mask = fresh.reshape([width if i == axis else 1 for i in range(4)])
        old = lax.dynamic_slice(buffer, at, shape)
        return lax.dynamic_update_slice(buffer, jnp.where(mask, tokens.astype(buffer.dtype), old), at)

    return Block(put(block.k, new.k, 3), put(block.v, new.v, 2))


def advance(cache: KVCache, layers: Sequence[Layer], plan: Plan) -> KVCache:
    """The cache after a call: new tails, new lengths."""
    return KVCache(tuple(layers), plan.length, cache.shared)


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


def _attend_layer(q: jax.Array, layer: Layer, visible: jax.Array, reach: jax.Array) -> _Part:
    """Attention of q[R,K,M,h] over the first ``visible[R,M]`` slots, of which ``reach`` are filled in some row."""

    def over(block: Block, offset: int) -> _Part:
        slots = offset + jnp.arange(block.v.shape[2], dtype=jnp.int32)
        return _attend_block(q, block, slots[None, None, :] < visible[:, :, None])

    part = over(layer[0], 0)
    for offset, block in _offsets(layer)[1:]:

        def more(part: _Part, block: Block = block, offset: int = offset) -> _Part:
            return _merge(part, over(block, offset))

        part = lax.cond(reach > offset, more, lambda part: part, part)
    return part


def _attend_shared(q: jax.Array, segment: Segment, index: int, reach: jax.Array) -> _Part:
    """Attention of q[B,K,M,h] over a shared level."""
    batch, kv, size, head = q.shape
    layer = segment.layers[index]
    if segment.repeats is None:
        layer = base.take_rows(layer, segment.segment_of_row)
        return _attend_layer(q, layer, jnp.broadcast_to(segment.visible[:, None], (batch, size)), reach)
    n = segment.repeats  # the rows of one segment stand side by side: their queries become one block
    block = q.reshape(batch // n, n, kv, size, head).swapaxes(1, 2).reshape(batch // n, kv, n * size, head)
    visible = jnp.repeat(segment.visible.reshape(batch // n, n), size, axis=1)
    part = _attend_layer(block, layer, visible, reach)

    def rows(x: jax.Array) -> jax.Array:
        return x.reshape(batch // n, kv, n, size, *x.shape[3:]).swapaxes(1, 2).reshape(batch, kv, size, *x.shape[3:])

    return _Part(*(rows(x) for x in part))


def attend(q: jax.Array, layer: Layer, cache: KVCache, index: int, plan: Plan) -> jax.Array:
    """Causal attention of ``q[B,K,G,S,h]`` (G query heads per KV head) over every part, scaled by h^-1/2.

    ``layer`` is layer ``index`` after this call's ``write``; shared parts come from ``cache``. Returns [B,K,G,S,h].
    """
    batch, kv, groups, size, head = q.shape
    flat = q.reshape(batch, kv, groups * size, head)
    part = _attend_layer(flat, layer, jnp.tile(plan.visible, (1, groups)), plan.reach)
    for segment, reach in zip(cache.shared, plan.shared_reach, strict=True):
        part = _merge(part, _attend_shared(flat, segment, index, reach))
    out = part.out / part.total[..., None]
    return out.astype(q.dtype).reshape(q.shape)


def one_layer(cache: KVCache, index: int) -> KVCache:
    """Layer ``index`` of a cache alone, shared parts included."""
    shared = (dataclasses.replace(s, layers=s.layers[index : index + 1]) for s in cache.shared)
    return KVCache(cache.layers[index : index + 1], cache.length, tuple(shared))


def _is_cache(x: Any) -> bool:
    return isinstance(x, KVCache)


def only_nodes(cache: Any) -> bool:
    """Whether the pytree holds KV nodes and nothing else, so that it can be shared and truncated."""
    leaves = jax.tree.leaves(cache, is_leaf=_is_cache)
    return bool(leaves) and all(_is_cache(leaf) for leaf in leaves)


def _only_caches(cache: Any, what: str) -> None:
    if not only_nodes(cache):
        raise ValueError(f"{what}: expected a cache of KV nodes only; other state is rolled back by applying again")


def share(cache: Any, max_len: int, size: int | None = None) -> Any:
    """Every KV node's tail becomes a shared segment, followed by an empty tail of ``max_len`` slots.

    ``repeat_rows`` then forks each row without copying what it has seen. ``size`` keeps the first slots only (they must
    hold every row). ValueError if they don't, beyond two levels, or where the pytree holds anything but KV nodes.
    """
    _only_caches(cache, "share")

    def one(node: KVCache) -> KVCache:
        if len(node.shared) == 2:
            raise ValueError("share: expected at most one shared level, got two")
        k = node.layers[0][0].k
        empty = create(len(node.layers), k.shape[0], k.shape[1], k.shape[2], max_len, k.dtype)
        rows = jnp.arange(k.shape[0], dtype=jnp.int32)
        held = int(np.max(node.length)) if checks.is_concrete(node.length) else 0
        checks.require(size is None or held <= size, "share", f"tails of at most size = {size} tokens", held)
        kept = tuple(_first_slots(layer, size) for layer in node.layers)
        return KVCache(empty.layers, empty.length, (*node.shared, Segment(kept, rows, node.length, 1)))

    return jax.tree.map(one, cache, is_leaf=_is_cache)


def _first_slots(layer: Layer, size: int | None) -> Layer:
    """The blocks that hold the first ``size`` slots (None: all), the last one cut."""
    if size is None:
        return layer
    kept = [(block, size - offset) for offset, block in _offsets(layer) if offset < max(size, 1)]
    return tuple(Block(block.k[..., :left], block.v[..., :left, :]) for block, left in kept)


def truncate(cache: Any, length: jax.Array) -> Any:
    """Every KV node cut to the first ``length[B]`` tokens of each row (longer than it holds: unchanged); S7.4.

    Nothing is erased: later writes reuse the slots. ValueError where the pytree holds anything but KV nodes.
    """
    _only_caches(cache, "truncate")

    def one(node: KVCache) -> KVCache:
        left, shared = length, []
        for segment in node.shared:
            visible = jnp.minimum(segment.visible, left)
            shared.append(dataclasses.replace(segment, visible=visible))
            left = left - visible
        return KVCache(node.layers, jnp.minimum(node.length, left), tuple(shared))

    return jax.tree.map(one, cache, is_leaf=_is_cache)
