"""The layout of the KV cache: blocks of slots, shared segments, the node that holds them, and writing into it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxdecode import base

__all__ = [
    "Block",
    "KVCache",
    "Layer",
    "Plan",
    "Segment",
    "advance",
    "create",
    "offsets",
    "one_layer",
    "plan",
    "write",
]

BLOCK = 128  # slots of the first block of a tail


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
    """The cache of one model: tail ``layers`` [B,...], ``length[B]`` tokens in each tail, ``shared`` segments.

    Of rows that are beams, ``beams`` stand side by side in a group, and token t of a row's tail is in slot t of the
    row of its group that ``source[B,T]`` names (0 .. beams - 1). uneven: rows are of very different lengths, and a step
    reads each only as far as it goes.
    """

    layers: tuple[Layer, ...]
    length: jax.Array
    shared: tuple[Segment, ...] = ()
    source: jax.Array | None = None
    beams: int = dataclasses.field(default=1, metadata={"static": True})
    uneven: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def capacity(self) -> int:
        """Tail slots per row."""
        return _slots(self.layers[0])

    @property
    def total(self) -> jax.Array:
        """Tokens each row has seen, [B]."""
        return self.length + sum(s.visible for s in self.shared)

    def take_rows(self, rows: jax.Array) -> KVCache:
        tail, length = base.take_rows((_gathered(self), self.length), rows)
        return KVCache(tail, length, tuple(_map_rows(s, lambda x: base.take_rows(x, rows), None) for s in self.shared))

    def repeat_rows(self, n: int) -> KVCache:
        tail, length = base.repeat_rows((_gathered(self), self.length), n)
        return KVCache(
            tail,
            length,
            tuple(_map_rows(s, lambda x: base.repeat_rows(x, n), s.repeats and s.repeats * n) for s in self.shared),
        )

    def put_rows(self, rows: jax.Array, new: KVCache) -> KVCache:
        if self.shared or new.shared or self.source is not None or new.source is not None:
            raise ValueError("put_rows: expected caches without shared segments and beams")
        tail, length = base.put_rows((self.layers, self.length), rows, (new.layers, new.length))
        return dataclasses.replace(self, layers=tail, length=length)


def _map_rows(segment: Segment, fn: Any, repeats: int | None) -> Segment:
    rows, visible = fn((segment.segment_of_row, segment.visible))
    return Segment(segment.layers, rows, visible, repeats)


def _gathered(cache: KVCache) -> tuple[Layer, ...]:
    """Tails that hold each row's own tokens: a copy for rows that are beams."""
    if cache.source is None:
        return cache.layers
    rows = jnp.arange(len(cache.length), dtype=jnp.int32)
    source = (rows // cache.beams * cache.beams)[:, None] + cache.source
    _, kv, head, _ = cache.layers[0][0].k.shape
    heads, features = jnp.arange(kv), jnp.arange(head)

    def one(block: Block, offset: int) -> Block:
        slots = block.v.shape[2]
        row, slot = source[:, offset : offset + slots], jnp.arange(slots)
        k = block.k[row[:, None, None, :], heads[None, :, None, None], features[None, None, :, None], slot]
        return Block(k, block.v[row[:, None, :], heads[None, :, None], slot])

    return tuple(tuple(one(block, offset) for offset, block in offsets(layer)) for layer in cache.layers)


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


def offsets(layer: Layer) -> list[tuple[int, Block]]:
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
        return tuple(_scatter(block, offset, k[:, 0], v[:, 0], plan) for offset, block in offsets(layer))
    new = Block(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))

    def row(b: jax.Array, layer: Layer) -> Layer:
        one = Block(*(lax.dynamic_slice_in_dim(x, b, 1) for x in new))
        first, count = plan.start[b], plan.written[b]
        return tuple(_put(block, b, one, first - offset, count) for offset, block in offsets(layer))

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
    return dataclasses.replace(cache, layers=tuple(layers), length=plan.length)


def one_layer(cache: KVCache, index: int) -> KVCache:
    """Layer ``index`` of a cache alone, shared parts included."""
    shared = (dataclasses.replace(s, layers=s.layers[index : index + 1]) for s in cache.shared)
    return dataclasses.replace(cache, layers=cache.layers[index : index + 1], shared=tuple(shared))
