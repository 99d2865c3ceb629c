"""Writing new tokens into a layer of the cache, in place where the buffer may be reused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdecode.kvcache.layout import AnyBlock, Layer, Plan, Window, encoded, numbers, offsets, over_slots, slots_of
from jaxdecode.meshes import by_rows

__all__ = ["write"]


def write(layer: Layer, k: jax.Array, v: jax.Array, plan: Plan, ring: Window | None = None) -> Layer:
    """Put ``k[B,S,K,h]`` and ``v[B,S,K,h]`` into the planned slots. ``ring``: the layer's window, if it may wrap."""
    new = encoded(k, v, layer[0])
    if k.shape[1] == 1:
        slot = plan.start if ring is None else _ring_slot(plan.start, slots_of(layer), ring)
        return by_rows(_one_token, layer, new, slot, plan.written > 0)
    if ring is not None:
        return _turned(layer, new, plan, ring)
    return by_rows(_tokens, layer, new, plan.start, plan.written)


def _one_token(layer: Layer, new: AnyBlock, slot: jax.Array, real: jax.Array) -> Layer:
    """One token of every row (``new`` has one slot), if it is ``real[B]``, in ``slot[B]``."""
    return tuple(_scatter(block, new, slot - offset, real) for offset, block in offsets(layer))


def _tokens(layer: Layer, new: AnyBlock, start: jax.Array, written: jax.Array) -> Layer:
    """The first ``written[B]`` tokens of every row from slot ``start[B]`` on."""

    def row(b: jax.Array, layer: Layer) -> Layer:
        one = over_slots(lambda axis, x: lax.dynamic_slice_in_dim(x, b, 1), new)
        return tuple(_put(block, b, one, start[b] - offset, written[b]) for offset, block in offsets(layer))

    return lax.fori_loop(0, len(start), row, layer)


def _ring_slot(number: jax.Array, slots: int, ring: Window) -> jax.Array:
    """The slot of a row's token ``number``."""
    return jnp.where(number < ring.sinks, number, ring.sinks + jnp.mod(number - ring.sinks, slots - ring.sinks))


def _scatter(block: AnyBlock, new: AnyBlock, slot: jax.Array, real: jax.Array) -> AnyBlock:
    """One token of every row (``new`` has one slot), if its ``slot[B]`` is in this block and it is ``real[B]``."""
    slots, rows = block.v.shape[2], jnp.arange(len(slot), dtype=jnp.int32)
    at = jnp.where((slot >= 0) & real, slot, slots)  # outside: dropped

    def put(axis: int, buffer: jax.Array, token: jax.Array) -> jax.Array:
        index = (rows, *(slice(None),) * (axis - 1), at)
        return buffer.at[index].set(jnp.squeeze(token, axis), mode="drop", unique_indices=True)

    return over_slots(put, block, new)


def _put(block: AnyBlock, b: jax.Array, new: AnyBlock, first: jax.Array, count: jax.Array) -> AnyBlock:
    """Row b of a block with the first ``count`` tokens of ``new`` (one row) from slot ``first``, where inside.

    One contiguous window: a scatter would move one token at a time. It starts early where S slots would pass the
    block's end, and slots that get no token keep what they hold.
    """
    slots, size = block.v.shape[2], new.v.shape[2]
    width = min(size, slots)
    start = jnp.clip(first, 0, slots - width)
    source = start + jnp.arange(width, dtype=jnp.int32) - first
    fresh = (source >= 0) & (source < count)

    def put(axis: int, buffer: jax.Array, tokens: jax.Array) -> jax.Array:
        axes = range(buffer.ndim)
        at = [jnp.asarray(b, jnp.int32), *(start if i == axis else np.int32(0) for i in axes[1:])]
        shape = [1, *(width if i == axis else buffer.shape[i] for i in axes[1:])]
        tokens = jnp.take(tokens, source, axis=axis, mode="clip")
        mask = fresh.reshape([width if i == axis else 1 for i in axes])
        old = lax.dynamic_slice(buffer, at, shape)
        return lax.dynamic_update_slice(buffer, jnp.where(mask, tokens, old), at)

    return over_slots(put, block, new)


def _turned(layer: Layer, new: AnyBlock, plan: Plan, ring: Window) -> Layer:
    """A ring after many tokens: every slot takes the new token that ends there, if there is one."""
    size, slots = new.v.shape[2], slots_of(layer)
    number = numbers(plan.length, slots, ring)
    fresh = (number >= plan.start[:, None]) & (number < plan.length[:, None])
    source = jnp.clip(number - plan.start[:, None], 0, size - 1)

    def at(offset: int, block: AnyBlock) -> AnyBlock:
        inside = slice(offset, offset + block.v.shape[2])

        def put(axis: int, buffer: jax.Array, tokens: jax.Array) -> jax.Array:
            shape = [len(source), *(source[:, inside].shape[1] if i == axis else 1 for i in range(1, buffer.ndim))]
            taken = jnp.take_along_axis(tokens, source[:, inside].reshape(shape), axis=axis)
            return jnp.where(fresh[:, inside].reshape(shape), taken, buffer)

        return over_slots(put, block, new)

    return tuple(at(offset, block) for offset, block in offsets(layer))
