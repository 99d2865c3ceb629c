"""The layout of the KV cache: blocks of slots, rings, shared segments, and the node that holds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxdecode import base, checks
from jaxdecode.kvcache.int4 import Int4Block, empty_int4, int4_block
from jaxdecode.meshes import DATA, TENSOR, constrained

__all__ = [
    "Block",
    "Int8Block",
    "KVCache",
    "Layer",
    "Plan",
    "Segment",
    "Window",
    "advance",
    "create",
    "encoded",
    "may_wrap",
    "numbers",
    "offsets",
    "one_layer",
    "over_slots",
    "plan",
    "slots_of",
    "stored_as",
]

BLOCK = 128  # slots of the first block of a tail


class Block(NamedTuple):
    """Keys [R,K,h,T] and values [R,K,T,h] of T slots: both products of attention read memory in order."""

    k: jax.Array
    v: jax.Array


class Int8Block(NamedTuple):
    """The same in int8, with one scale [R,K,T] per token and KV head: nothing depends on other tokens."""

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array
    v_scale: jax.Array


AnyBlock = Block | Int8Block | Int4Block
Layer = tuple[AnyBlock, ...]  # one layer's slots
_SLOT_AXES = (3, 2, 2, 2)  # where each field has its slots


def over_slots(fn: Callable[..., jax.Array], *blocks: AnyBlock) -> AnyBlock:
    """A block of ``fn(axis of the slots, field of each block)``."""
    return type(blocks[0])(*(fn(axis, *fields) for axis, *fields in zip(_SLOT_AXES, *blocks, strict=False)))


class Window(NamedTuple):
    """A layer whose queries see the last ``size`` tokens, their own included, and the first ``sinks`` ones.

    It is stored as a ring of sinks + size + slack slots, if that is less than its capacity: up to ``slack`` tokens may
    be cut from the end again.
    """

    size: int
    slack: int
    sinks: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """A part many rows share: ``layers`` of G segments, ``segment_of_row[B]``, ``visible[B]`` tokens each row sees.

    held[G]: the most tokens that each segment has held, which place a ring's. ``repeats``: row r uses segment
    r // repeats, so that attention reads a segment once for all its rows; None: rows are in any order, and each gathers
    its own copy for the time of a product.
    """

    layers: tuple[Layer, ...]
    segment_of_row: jax.Array
    visible: jax.Array
    held: jax.Array
    repeats: int | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The cache of one model: tail ``layers`` [B,...], ``length[B]`` tokens in each tail, ``shared`` segments.

    Of rows that are beams, ``beams`` stand side by side in a group, and token t of a row's tail is in slot t of the
    row of its group that ``source[B,T]`` names (0 .. beams - 1). uneven: rows are of very different lengths, and a step
    reads each only as far as it goes. Layers with a window may be rings: ``windows`` has one entry a layer (empty: none
    has one), ``max_len`` is the capacity, and ``furthest[B]`` the most tokens that the tail has held.
    """

    layers: tuple[Layer, ...]
    length: jax.Array
    shared: tuple[Segment, ...] = ()
    source: jax.Array | None = None
    furthest: jax.Array | None = None
    beams: int = dataclasses.field(default=1, metadata={"static": True})
    windows: tuple[Window | None, ...] = dataclasses.field(default=(), metadata={"static": True})
    max_len: int | None = dataclasses.field(default=None, metadata={"static": True})
    uneven: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def capacity(self) -> int:
        """Tokens that a tail may hold."""
        return slots_of(self.layers[0]) if self.max_len is None else self.max_len

    @property
    def total(self) -> jax.Array:
        """Tokens each row has seen, [B]."""
        return self.length + sum(s.visible for s in self.shared)

    def window(self, index: int) -> Window | None:
        return self.windows[index] if self.windows else None

    def _with_rows(self, fn: Callable[[Any], Any], repeats: Callable[[int | None], int | None]) -> KVCache:
        """``fn`` over everything with rows; what a segment stores stays where it is."""
        layers, length, furthest = fn((_gathered(self), self.length, self.furthest))
        shared = []
        for s in self.shared:
            rows, visible = fn((s.segment_of_row, s.visible))
            shared.append(dataclasses.replace(s, segment_of_row=rows, visible=visible, repeats=repeats(s.repeats)))
        return dataclasses.replace(
            self, layers=layers, length=length, shared=tuple(shared), source=None, furthest=furthest, beams=1
        )

    def take_rows(self, rows: jax.Array) -> KVCache:
        return self._with_rows(lambda x: base.take_rows(x, rows), lambda repeats: None)

    def repeat_rows(self, n: int) -> KVCache:
        return self._with_rows(lambda x: base.repeat_rows(x, n), lambda repeats: repeats and repeats * n)

    def put_rows(self, rows: jax.Array, new: KVCache) -> KVCache:
        if self.shared or new.shared or self.source is not None or new.source is not None:
            raise ValueError("put_rows: expected caches without shared segments and beams")
        old, put = ((x.layers, x.length, x.furthest) for x in (self, new))
        layers, length, furthest = base.put_rows(old, rows, put)
        return dataclasses.replace(self, layers=layers, length=length, furthest=furthest)


def _gathered(cache: KVCache) -> tuple[Layer, ...]:
    """Tails that hold each row's own tokens: a copy for rows that are beams."""
    every = cache.source
    if every is None:
        return cache.layers
    rows = jnp.arange(len(cache.length), dtype=jnp.int32)
    first = (rows // cache.beams * cache.beams)[:, None]

    def one(index: int, layer: Layer) -> Layer:
        window = cache.window(index)
        number = jnp.maximum(numbers(cache.length, slots_of(layer), window), 0)
        source = first + jnp.take_along_axis(every, number, axis=1)

        def block(offset: int, block: AnyBlock) -> AnyBlock:
            slots = block.v.shape[2]
            row, slot = source[:, offset : offset + slots], jnp.arange(slots)

            def field(axis: int, x: jax.Array) -> jax.Array:
                moved = jnp.moveaxis(x, axis, 1)  # [R,T,...]
                return jnp.moveaxis(moved[row, slot], 1, axis)

            return over_slots(field, block)

        return tuple(block(offset, b) for offset, b in offsets(layer))

    return tuple(one(i, layer) for i, layer in enumerate(cache.layers))


def create(
    n_layers: int,
    batch_size: int,
    n_kv_heads: int,
    head_dim: int,
    max_len: int,
    dtype: DTypeLike = jnp.float32,
    windows: Sequence[Window | None] = (),
) -> KVCache:
    """An empty cache for ``max_len`` tokens per row: 2 * n_layers * max_len * n_kv_heads * head_dim numbers a row.

    dtype: of keys and values; int8 adds a scale per token and KV head, int4 one for every 32 features of these.
    windows: one a layer; such a layer has no more slots than its ring. Over a mesh that is set, rows and KV heads are.
    """
    windows = tuple(windows)
    checks.require(len(windows) in (0, n_layers), "windows", f"one for each of {n_layers} layers", len(windows))
    rows = (batch_size, n_kv_heads)

    def block(size: int) -> AnyBlock:
        if jnp.dtype(dtype) == jnp.int4:
            return empty_int4(rows, head_dim, size)
        k, v = jnp.zeros((*rows, head_dim, size), dtype), jnp.zeros((*rows, size, head_dim), dtype)
        if jnp.dtype(dtype) != jnp.int8:
            return Block(k, v)
        return Int8Block(k, v, jnp.zeros((*rows, size), jnp.float32), jnp.zeros((*rows, size), jnp.float32))

    def layer(window: Window | None) -> Layer:
        slots = max_len if window is None else min(max_len, sum(window))
        return tuple(map(laid, map(block, _block_sizes(slots))))

    def laid(block: AnyBlock) -> AnyBlock:
        return over_slots(lambda axis, x: constrained(x, DATA, TENSOR), block)

    layers = tuple(layer(window) for window in windows or (None,) * n_layers)
    length = jnp.zeros((batch_size,), jnp.int32)
    if all(window is None for window in windows):
        return KVCache(layers, length)
    return KVCache(layers, length, furthest=jnp.zeros_like(length), windows=windows, max_len=max_len)


def _block_sizes(slots: int) -> list[int]:
    """128, 128, 256, 512, ..., the last one cut to what is left."""
    sizes, total = [min(BLOCK, slots)], BLOCK
    while total < slots:
        sizes.append(min(total, slots - total))
        total *= 2
    return sizes


def slots_of(layer: Layer) -> int:
    return sum(block.v.shape[2] for block in layer)


def offsets(layer: Layer) -> list[tuple[int, AnyBlock]]:
    """Every block with the number of its first slot."""
    starts = np.cumsum([0, *(block.v.shape[2] for block in layer)])
    return [(int(start), block) for start, block in zip(starts, layer, strict=False)]


def stored_as(layer: Layer) -> tuple[int, Any]:
    """Features of a head, and the dtype that `create` was given."""
    block = layer[0]
    return (2 * block.k.shape[2], jnp.int4) if isinstance(block, Int4Block) else (block.k.shape[2], block.k.dtype)


def may_wrap(layer: Layer, window: Window | None, max_len: int) -> bool:
    """Whether a layer is a ring: it has fewer slots than there may be tokens."""
    return window is not None and slots_of(layer) < max_len


def numbers(length: jax.Array, slots: int, window: Window | None) -> jax.Array:
    """Which token of a row each slot holds, [R,slots]: below 0 if none, or beyond ``length[R]`` where it is old.

    The first ``sinks`` slots keep their tokens; token t after them is in slot t modulo the rest.
    """
    slot = jnp.arange(slots, dtype=jnp.int32)[None]
    if window is None:
        return jnp.broadcast_to(slot, (len(length), slots))
    ring = slots - window.sinks
    if ring <= 0:
        return jnp.broadcast_to(slot, (len(length), slots))
    last = length[:, None] - 1 - window.sinks  # the last token's place after the sinks
    turned = last - jnp.mod(last - (slot - window.sinks), ring)
    return jnp.where(slot < window.sinks, slot, jnp.where(turned >= 0, turned + window.sinks, -1))


class Plan(NamedTuple):
    """Where one call's S tokens go: computed once, used by every layer.

    position[B,S] of each token in its row, start[B] tokens in its tail before and written[B] new ones, visible[B,S]
    tail tokens each token sees, length[B] afterwards; before[B] tokens in shared parts; reach, and one of shared_reach
    for every shared level: tokens that some row holds.
    """

    position: jax.Array
    start: jax.Array
    written: jax.Array
    visible: jax.Array
    length: jax.Array
    before: jax.Array
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
        before=cache.total - cache.length,
        reach=jnp.max(after, initial=0),
        shared_reach=tuple(jnp.max(s.visible, initial=0) for s in cache.shared),
    )


def encoded(k: jax.Array, v: jax.Array, like: AnyBlock) -> AnyBlock:
    """``k[B,S,K,h]`` and ``v[B,S,K,h]`` as a block of S slots of the kind of ``like``."""
    if isinstance(like, Int4Block):
        return int4_block(k, v)
    k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    if isinstance(like, Block):
        return Block(k.astype(like.k.dtype), v.astype(like.v.dtype))

    def rounded(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
        wide = x.astype(jnp.float32)
        scale = jnp.max(jnp.abs(wide), axis=axis) * np.float32(1 / 127)
        inverse = 1 / jnp.where(scale >= jnp.finfo(jnp.float32).tiny, scale, 1)  # not `wide / scale`: see arithmetic.py
        steps = wide * jnp.expand_dims(inverse, axis)
        return jnp.clip(jnp.round(steps), -127, 127).astype(jnp.int8), scale

    (k, k_scale), (v, v_scale) = rounded(k, 2), rounded(v, 3)
    return Int8Block(k, v, k_scale, v_scale)


def advance(cache: KVCache, layers: Sequence[Layer], plan: Plan) -> KVCache:
    """The cache after a call: new tails, new lengths."""
    furthest = None if cache.furthest is None else jnp.maximum(cache.furthest, plan.length)
    return dataclasses.replace(cache, layers=tuple(layers), length=plan.length, furthest=furthest)


def one_layer(cache: KVCache, index: int) -> KVCache:
    """Layer ``index`` of a cache alone, shared parts included."""
    pick = slice(index, index + 1)
    shared = tuple(dataclasses.replace(s, layers=s.layers[pick]) for s in cache.shared)
    return dataclasses.replace(cache, layers=cache.layers[pick], windows=cache.windows[pick], shared=shared)
