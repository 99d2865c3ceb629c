"""The KV cache as a value: share a past, fork it, branch it into beams, reorder them, cut it (S7.4), resize it.

These walk any pytree and act on its KV nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import base, checks
from jaxdecode.kvcache.layout import (
    AnyBlock,
    KVCache,
    Layer,
    Segment,
    Window,
    create,
    may_wrap,
    offsets,
    over_slots,
    slots_of,
    stored_as,
)

__all__ = [
    "branch",
    "cuttable",
    "fork",
    "only_nodes",
    "reaches_back",
    "reorder",
    "resize",
    "share",
    "shorten",
    "truncate",
    "uneven",
]


def _is_cache(x: Any) -> bool:
    return isinstance(x, KVCache)


def _nodes(cache: Any) -> list[Any]:
    return jax.tree.leaves(cache, is_leaf=_is_cache)


def only_nodes(cache: Any) -> bool:
    """Whether the pytree holds KV nodes and nothing else, so that it can be shared."""
    nodes = _nodes(cache)
    return bool(nodes) and all(_is_cache(node) for node in nodes)


def cuttable(cache: Any, by: int | None = None) -> bool:
    """Whether ``truncate`` may take ``by`` tokens off the end of every row (None: as many as there are).

    Not where the pytree holds anything but KV nodes; rings give back no more than their slack. Static.
    """
    if not only_nodes(cache):
        return False
    slacks = [window.slack for node in _nodes(cache) for _, window in _rings(node)]
    return not slacks or (by is not None and by <= min(slacks))


def _rings(node: KVCache) -> Iterator[tuple[int, Window]]:
    """Slots and window of every layer of the tail that may wrap, and of every windowed layer of a shared part."""
    for index, layer in enumerate(node.layers):
        window = node.window(index)
        if window is None:
            continue
        for other in (layer, *(segment.layers[index] for segment in node.shared)):
            if other is not layer or may_wrap(layer, window, node.capacity):
                yield slots_of(other), window


def _only_caches(cache: Any, what: str) -> None:
    if not only_nodes(cache):
        raise ValueError(f"{what}: expected a cache of KV nodes only; other state is rolled back by applying again")


def _empty_like(node: KVCache, rows: int, max_len: int) -> KVCache:
    """An empty cache of the kind of ``node``."""
    head, dtype = stored_as(node.layers[0])
    return create(len(node.layers), rows, node.layers[0][0].k.shape[1], head, max_len, dtype, node.windows)


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
        empty = _empty_like(node, len(node.length), max_len)
        rows = jnp.arange(len(node.length), dtype=jnp.int32)
        longest = int(np.max(node.length)) if checks.is_concrete(node.length) else 0
        checks.require(size is None or longest <= size, "share", f"tails of at most size = {size} tokens", longest)
        kept = tuple(
            layer if may_wrap(layer, node.window(i), node.capacity) else _first_slots(layer, size)
            for i, layer in enumerate(node.layers)
        )
        held = node.length if node.furthest is None else node.furthest
        return dataclasses.replace(empty, shared=(*node.shared, Segment(kept, rows, node.length, held, 1)))

    return jax.tree.map(one, cache, is_leaf=_is_cache)


def fork(cache: Any, n: int, max_len: int, size: int | None = None) -> Any:
    """Every row ``n`` times side by side, each with ``max_len`` slots of its own, and what it has seen stored once.

    As ``share`` and ``repeat_rows``; a pytree that holds anything but KV nodes is repeated as it is.

    >>> from jaxdecode import kvcache
    >>> many = kvcache.fork(kvcache.create(2, 1, 2, 4, max_len=64), 3, max_len=8)
    >>> many.length.shape, many.shared[0].layers[0][0].k.shape
    ((3,), (1, 2, 4, 64))
    """
    checks.require(isinstance(n, int) and n >= 1, "n", "a positive whole number", n)
    return base.repeat_rows(share(cache, max_len, size) if only_nodes(cache) else cache, n)


def branch(cache: Any, n: int, max_len: int, size: int | None = None) -> Any:
    """``fork``, into rows that are beams, which ``reorder`` moves about."""
    forked = fork(cache, n, max_len, size)
    if not only_nodes(cache):
        return forked

    def beams(node: KVCache) -> KVCache:
        own = jnp.arange(len(node.length), dtype=jnp.int32) % n
        source = jnp.broadcast_to(own[:, None], (len(own), node.capacity))
        return dataclasses.replace(node, source=source, beams=n)

    return jax.tree.map(beams, forked, is_leaf=_is_cache)


def reorder(cache: Any, rows: jax.Array) -> Any:
    """Row b follows row ``rows[B]``, which is of its group where rows are beams: those move no key and no value."""

    def one(x: Any) -> Any:
        if not _is_cache(x) or x.source is None:
            return base.take_rows(x, rows)
        length = jnp.take(x.length, rows)
        own = (jnp.arange(len(length), dtype=jnp.int32) % x.beams)[:, None]
        held = jnp.arange(x.capacity, dtype=jnp.int32)[None] < length[:, None]
        source = jnp.where(held, jnp.take(x.source, rows, axis=0), own)
        furthest = None if x.furthest is None else jnp.take(x.furthest, rows)
        return dataclasses.replace(x, length=length, source=source, furthest=furthest)

    return jax.tree.map(one, cache, is_leaf=lambda x: isinstance(x, base.RowNode))


def uneven(cache: Any) -> Any:
    """The cache of rows whose lengths will differ a lot: a step then reads each only as far as it goes.

    Row by row, so rows that are all long take longer than without it.
    """
    return jax.tree.map(lambda x: dataclasses.replace(x, uneven=True) if _is_cache(x) else x, cache, is_leaf=_is_cache)


def _first_slots(layer: Layer, size: int | None) -> Layer:
    """The blocks that hold the first ``size`` slots (None: all), the last one cut."""
    if size is None:
        return layer
    kept = [(block, size - offset) for offset, block in offsets(layer) if offset < max(size, 1)]

    def cut(block: AnyBlock, left: int) -> AnyBlock:
        return over_slots(lambda axis, x: x[(slice(None),) * axis + (slice(left),)], block)

    return tuple(cut(block, left) for block, left in kept)


def truncate(cache: Any, length: Any) -> Any:
    """Every KV node cut to the first ``length[B]`` tokens of each row (longer than it holds: unchanged); S7.4.

    Nothing is erased: later writes reuse the slots. ValueError where the pytree holds anything but KV nodes, and where
    a ring would have to go back further than its slack (if that can be known: with traced lengths ask ``cuttable``).
    """
    _only_caches(cache, "truncate")
    kept = reaches_back(cache, length)
    if checks.is_concrete(kept) and not np.all(kept):
        slack = min(window.slack for node in _nodes(cache) for _, window in _rings(node))
        expected = f"lengths no more than {slack} tokens (the slack of a sliding window) below the most held, or 0"
        raise ValueError(f"truncate: expected {expected}; else fill again (refill), got {np.asarray(length)}")

    return jax.tree.map(lambda node: _cut(node, length), cache, is_leaf=_is_cache)


def shorten(cache: Any, count: jax.Array) -> Any:
    """Every KV node without the last ``count[B]`` tokens of each row, however many each node holds.

    For nodes of unequal lengths, as those of two models with a prompt each, where the cache is ``cuttable`` by that
    many. ValueError where the pytree holds anything but KV nodes.
    """
    _only_caches(cache, "shorten")
    return jax.tree.map(lambda node: _cut(node, jnp.maximum(node.total - count, 0)), cache, is_leaf=_is_cache)


def _cut(node: KVCache, length: Any) -> KVCache:
    shared, tail = _cut_lengths(node, length)
    furthest = node.furthest
    if furthest is not None:
        furthest = jnp.where(tail > 0, furthest, 0)
    parts = tuple(dataclasses.replace(s, visible=visible) for s, visible in zip(node.shared, shared, strict=True))
    return dataclasses.replace(node, length=tail, shared=parts, furthest=furthest)


def _cut_lengths(node: KVCache, length: Any) -> tuple[list[jax.Array], jax.Array]:
    """Tokens that stay of every shared level and of the tail, [B] each."""
    left, shared = length, []
    for segment in node.shared:
        shared.append(jnp.minimum(segment.visible, left))
        left = left - shared[-1]
    return shared, jnp.minimum(node.length, left)


def reaches_back(cache: Any, length: Any) -> jax.Array:
    """Whether each row's KV nodes still hold all that queries after a cut to ``length[B]`` tokens would see: bool [B].

    False for rows that are further back in a ring than its slack. ValueError as ``truncate``.
    """
    _only_caches(cache, "reaches_back")
    ok = jnp.ones((len(_nodes(cache)[0].length),), bool)
    for node in _nodes(cache):
        shared, tail = _cut_lengths(node, length)
        parts = [(x, jnp.take(s.held, s.segment_of_row)) for x, s in zip(shared, node.shared, strict=True)]
        for index, layer in enumerate(node.layers):
            window = node.window(index)
            if window is None:
                continue
            furthest = node.length if node.furthest is None else node.furthest
            slots = [*(slots_of(s.layers[index]) for s in node.shared), slots_of(layer)]
            for (kept, held), size in zip([*parts, (tail, furthest)], slots, strict=True):
                ok &= (kept == 0) | (held <= size) | (kept >= held - window.slack)
    return ok


def resize(cache: Any, max_len: int) -> Any:
    """Every KV node with room for ``max_len`` tokens a row, more or fewer than before; what it holds is copied.

    ValueError for less than it holds, for rows that share a past, and where the pytree holds anything but KV nodes.
    """
    _only_caches(cache, "resize")

    def one(node: KVCache) -> KVCache:
        checks.require(not node.shared and node.source is None, "resize", "rows with a past of their own", "shared")
        longest = node.length if node.furthest is None else node.furthest
        held = int(np.max(longest, initial=0)) if checks.is_concrete(longest) else 0
        checks.require(max_len >= held, "max_len", f"at least the {held} tokens that are held", max_len)
        empty = _empty_like(node, len(node.length), max_len)
        layers = tuple(_copied(new, old) for new, old in zip(empty.layers, node.layers, strict=True))
        return dataclasses.replace(empty, layers=layers, length=node.length, furthest=node.furthest)

    return jax.tree.map(one, cache, is_leaf=_is_cache)


def _copied(new: Layer, old: Layer) -> Layer:
    """The slots of ``old``, as far as there are as many, in the blocks of ``new``."""
    slots = min(slots_of(new), slots_of(old))

    def whole(axis: int, *blocks: jax.Array) -> jax.Array:
        return jnp.concatenate(blocks, axis)[(slice(None),) * axis + (slice(slots),)]

    everything = over_slots(whole, *old)

    def block(offset: int, block: AnyBlock) -> AnyBlock:
        def field(axis: int, zeros: jax.Array, x: jax.Array) -> jax.Array:
            part = x[(slice(None),) * axis + (slice(offset, offset + zeros.shape[axis]),)]
            return zeros.at[(slice(None),) * axis + (slice(part.shape[axis]),)].set(part)

        return over_slots(field, block, everything)

    return tuple(block(offset, b) for offset, b in offsets(new))
