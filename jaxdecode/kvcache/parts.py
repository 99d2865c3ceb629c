"""The KV cache as a value: share a past, branch it into beams, reorder them, cut it (S7.4).

These walk any pytree and act on its KV nodes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import base, checks
from jaxdecode.kvcache.layout import Block, KVCache, Layer, Segment, create, offsets

__all__ = ["branch", "only_nodes", "reorder", "share", "shorten", "truncate"]


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
        if len(node.shared) == 2 or node.source is not None:
            got = "two" if node.source is None else "beams"
            raise ValueError(f"share: expected at most one shared level, got {got}")
        k = node.layers[0][0].k
        empty = create(len(node.layers), k.shape[0], k.shape[1], k.shape[2], max_len, k.dtype)
        rows = jnp.arange(k.shape[0], dtype=jnp.int32)
        held = int(np.max(node.length)) if checks.is_concrete(node.length) else 0
        checks.require(size is None or held <= size, "share", f"tails of at most size = {size} tokens", held)
        kept = tuple(_first_slots(layer, size) for layer in node.layers)
        return KVCache(empty.layers, empty.length, (*node.shared, Segment(kept, rows, node.length, 1)))

    return jax.tree.map(one, cache, is_leaf=_is_cache)


def branch(cache: Any, n: int, max_len: int, size: int | None = None) -> Any:
    """``share``, then every row ``n`` times side by side as beams, which ``reorder`` moves about.

    A pytree that holds anything but KV nodes is repeated as it is.
    """
    if not only_nodes(cache):
        return base.repeat_rows(cache, n)

    def beams(node: KVCache) -> KVCache:
        own = jnp.arange(len(node.length), dtype=jnp.int32) % n
        source = jnp.broadcast_to(own[:, None], (len(own), node.capacity))
        return dataclasses.replace(node, source=source, beams=n)

    return jax.tree.map(beams, base.repeat_rows(share(cache, max_len, size), n), is_leaf=_is_cache)


def reorder(cache: Any, rows: jax.Array) -> Any:
    """Row b follows row ``rows[B]``, which is of its group where rows are beams: those move no key and no value."""

    def one(x: Any) -> Any:
        if not _is_cache(x) or x.source is None:
            return base.take_rows(x, rows)
        length = jnp.take(x.length, rows)
        own = (jnp.arange(len(length), dtype=jnp.int32) % x.beams)[:, None]
        held = jnp.arange(x.capacity, dtype=jnp.int32)[None] < length[:, None]
        return dataclasses.replace(x, length=length, source=jnp.where(held, jnp.take(x.source, rows, axis=0), own))

    return jax.tree.map(one, cache, is_leaf=lambda x: isinstance(x, base.RowNode))


def _first_slots(layer: Layer, size: int | None) -> Layer:
    """The blocks that hold the first ``size`` slots (None: all), the last one cut."""
    if size is None:
        return layer
    kept = [(block, size - offset) for offset, block in offsets(layer) if offset < max(size, 1)]
    return tuple(Block(block.k[..., :left], block.v[..., :left, :]) for block, left in kept)


def truncate(cache: Any, length: jax.Array) -> Any:
    """Every KV node cut to the first ``length[B]`` tokens of each row (longer than it holds: unchanged); S7.4.

    Nothing is erased: later writes reuse the slots. ValueError where the pytree holds anything but KV nodes.
    """
    _only_caches(cache, "truncate")
    return jax.tree.map(lambda node: _cut(node, length), cache, is_leaf=_is_cache)


def shorten(cache: Any, count: jax.Array) -> Any:
    """Every KV node without the last ``count[B]`` tokens of each row, however many each node holds.

    For nodes of unequal lengths, as those of two models with a prompt each; otherwise as ``truncate``.
    """
    _only_caches(cache, "shorten")
    return jax.tree.map(lambda node: _cut(node, jnp.maximum(node.total - count, 0)), cache, is_leaf=_is_cache)


def _cut(node: KVCache, length: jax.Array) -> KVCache:
    """The first ``length[B]`` tokens: of the shared parts what is left of it, then of the tail."""
    left, shared = length, []
    for segment in node.shared:
        visible = jnp.minimum(segment.visible, left)
        shared.append(dataclasses.replace(segment, visible=visible))
        left = left - visible
    return dataclasses.replace(node, length=jnp.minimum(node.length, left), shared=tuple(shared))
