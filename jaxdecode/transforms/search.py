"""Where the order of ids is cut: the shortest prefix whose amounts add up to what is needed. No sort anywhere.

Order of ids: logit descending, equal logits by ascending id. A pass over a large vocabulary costs as much as a
hundred small operations, so few are made: a cut among the blocks with the largest logits is found there alone; else a
sample says about where it is, seven passes narrow that down, and the blocks that still matter are searched alone. Only
laws with many ids of one logit, or with long tails at settings near 1, take the general search over all ids. Which way
a row goes depends on that row alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdecode.meshes import TENSOR, size_of

__all__ = ["BLOCK", "Cut", "blocks_of", "cut", "last_kept"]

BLOCK = 128  # ids per block
NEAR = 64  # blocks that are searched alone, at most
FIRST = 64  # ids of these that are put in order
SPARSE = 16  # one block of so many is in the sample
TURNS = 6  # over the sample
NARROWING = 5  # passes after the two that check what the sample says
MISSED = np.float32(1 / 16)  # of the amount between the bounds: by how much a guess aims beside the cut


class Cut(NamedTuple):
    """last[B]: the last kept logit; last_id[B]: up to which id its equals are kept; each[B]: the amount of one of them.

    mass[B]: the amount kept; removed[B]: the largest logit removed, -inf if none is; one[B]: at most one id is kept.
    """

    last: jax.Array
    last_id: jax.Array
    each: jax.Array
    mass: jax.Array
    removed: jax.Array
    one: jax.Array


def blocks_of(x: jax.Array, fill: float) -> jax.Array:
    """[B,V] as [B,n,BLOCK], filled up with ``fill``; over a mesh to as many blocks on every device."""
    rows, size = x.shape
    more = -size % (BLOCK * size_of(TENSOR))
    return jnp.pad(x, ((0, 0), (0, more)), constant_values=fill).reshape(rows, -1, BLOCK)


def _halfway(low: jax.Array, high: jax.Array) -> jax.Array:
    """The float in the middle of all floats between ``low`` and ``high``: halving it ends within 64 turns."""
    signed = {4: jnp.int32, 8: jnp.int64}[low.dtype.itemsize]
    top = jnp.asarray(jnp.iinfo(signed).min, signed)

    def swap(bits: jax.Array) -> jax.Array:  # signed integers in the order of the floats, and back
        return jnp.where(bits < 0, ~bits ^ top, bits)

    a, b = (swap(lax.bitcast_convert_type(x, signed)) for x in (low, high))
    middle = (a & b) + ((a ^ b) >> 1) + ((a ^ b) & 1)
    return lax.bitcast_convert_type(swap(middle), low.dtype)


def _amount(amount: jax.Array, where: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(where, amount, jnp.zeros((), amount.dtype)), axis=-1, dtype=amount.dtype)


def _lowest(logits: jax.Array) -> jax.Array:
    return jnp.min(jnp.where(logits > -jnp.inf, logits, jnp.inf), axis=-1)


class _Bracket(NamedTuple):
    """The last kept logit lies in [low, high], both logits of the row; what they miss and exceed steers the guess.

    above: the amount of the ids beyond ``high``.
    """

    turn: jax.Array
    low: jax.Array
    high: jax.Array
    over: jax.Array
    under: jax.Array
    side: jax.Array
    above: jax.Array


def _root(logits: jax.Array, amount: jax.Array, needed: jax.Array, skip: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The last kept logit [B] and the amount above it [B]; rows of ``skip[B]`` are not searched.

    Regula falsi with the Illinois rule on the amount above a guess, every fourth turn a halving of the bits; the ends
    always move to logits of the row, so it ends with one of them. Rows that never reach ``needed`` give their lowest.
    """
    wide = logits.dtype
    low, total = _lowest(logits), jnp.sum(amount, axis=-1, dtype=amount.dtype)
    high = jnp.where((total >= needed) & ~skip, jnp.max(logits, axis=-1), low)

    def turn(c: _Bracket) -> _Bracket:
        guess = c.high - (c.high - c.low) * (c.under / (c.under + c.over))
        guess = jnp.where(c.turn % 4 == 3, _halfway(c.low, c.high), guess)
        guess = jnp.where((guess > c.low) & (guess <= c.high), guess, c.high)
        above = logits >= guess[:, None]
        held = _amount(amount, above)
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
            jnp.where(enough, c.above, held),
        )
        busy = c.low < c.high
        return _Bracket(c.turn + 1, *(jnp.where(busy, new, old) for new, old in zip(moved[1:], c[1:], strict=True)))

    side = jnp.zeros(low.shape, jnp.int32)
    over, under = (total - needed).astype(wide), needed.astype(wide)
    first = _Bracket(jnp.int32(0), low, high, over, under, side, jnp.zeros_like(total))
    found = lax.while_loop(lambda c: jnp.any(c.low < c.high), turn, first)
    return found.low, found.above


class _Near(NamedTuple):
    """Ids worth searching: logits[B,C] (others -inf), amount[B,C] (others 0), ids[B,C] ascending; above[B]: the amount
    beyond all of them."""

    logits: jax.Array
    amount: jax.Array
    ids: jax.Array
    above: jax.Array


def _solve(near: _Near, needed: jax.Array, skip: jax.Array, size: int) -> Cut:
    """The cut among the ids of ``near``; rows of ``skip[B]`` get an answer without meaning."""
    logits, amount, ids, above = near
    lacking = needed - above
    total = jnp.sum(amount, axis=-1, dtype=amount.dtype)
    short = total < lacking  # all ids are kept
    last, more = _root(logits, amount, lacking, skip)
    zero = jnp.zeros((), amount.dtype)
    equal = logits == last[:, None]
    each = jnp.max(jnp.where(equal, amount, zero), axis=-1)
    count = jnp.sum(equal, axis=-1, dtype=jnp.int32)
    missing = lacking - more
    if jnp.issubdtype(amount.dtype, jnp.floating):
        ties = jnp.ceil(missing / jnp.where(each > 0, each, 1))
        ties = jnp.clip(ties, 1, size).astype(jnp.int32)
    else:
        ties = jnp.maximum(missing, 1)
    ties = jnp.minimum(jnp.where(short | (each <= 0), size, ties), count)

    def search(_: None) -> jax.Array:
        """The id that completes ``ties``: the largest t with fewer equal ids below it, bit by bit."""
        bits = size.bit_length()

        def body(i: jax.Array, t: jax.Array) -> jax.Array:
            candidate = t | (jnp.int32(1) << (bits - 1 - i))
            few = jnp.sum(equal & (ids < candidate[:, None]), axis=-1, dtype=jnp.int32) < ties
            return jnp.where(few, candidate, t)

        return lax.fori_loop(0, bits, body, jnp.zeros_like(ties))

    everything = jnp.full_like(ties, jnp.iinfo(jnp.int32).max)
    last_id = lax.cond(jnp.any(ties < count), search, lambda _: everything, None)
    last_id = jnp.where(ties < count, last_id, everything)
    mass = above + jnp.where(short, total, more + ties.astype(amount.dtype) * each)
    below = jnp.max(jnp.where(logits < last[:, None], logits, -jnp.inf), axis=-1)
    removed = jnp.where(ties < count, last, below)
    top = jnp.max(logits, axis=-1)
    return Cut(last, last_id, each, mass, removed, (above == 0) & (ties <= 1) & (last >= top))


def _first_few(near: _Near, needed: jax.Array) -> tuple[Cut, jax.Array]:
    """The cut among the ``FIRST`` ids of ``near`` in their order, and the rows [B] in which it is there."""
    logits, amount, ids, above = near
    count = jnp.sum(logits > -jnp.inf, axis=-1, dtype=jnp.int32)
    order = lax.top_k(logits, min(FIRST + 1, logits.shape[1]))[1]  # of equals the lower comes first
    logits, amount, ids = (jnp.take_along_axis(x, order, axis=1) for x in (logits, amount, ids))
    held = jnp.cumsum(amount, axis=-1, dtype=amount.dtype)
    end = jnp.minimum(count, FIRST)
    before = jnp.sum(held < (needed - above)[:, None], axis=-1, dtype=jnp.int32)
    at = jnp.maximum(jnp.minimum(before, end - 1), 0)[:, None]
    last, last_id, each, mass = (jnp.take_along_axis(x, at, axis=1)[:, 0] for x in (logits, ids, amount, held))
    removed = jnp.take_along_axis(jnp.pad(logits, ((0, 0), (0, 1)), constant_values=-jnp.inf), at + 1, axis=1)[:, 0]
    one = (above == 0) & (at[:, 0] == 0)
    return Cut(last, last_id, each, above + mass, removed, one), (before < end) | (count <= FIRST)


class _Blocks(NamedTuple):
    """Logits, amounts and keys in blocks [B,n,BLOCK]. Keys never fall as logits rise: thresholds are in keys."""

    logits: jax.Array
    amount: jax.Array
    key: jax.Array


def _inside(x: jax.Array, w: jax.Array, key: jax.Array, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits and amounts of the ids with keys in (low, high], -inf and 0 for the others."""
    low, high = (bound.reshape((-1,) + (1,) * (x.ndim - 1)) for bound in (low, high))
    inside = (key > low) & (key <= high)
    return jnp.where(inside, x, -jnp.inf), jnp.where(inside, w, jnp.zeros((), w.dtype))


def _gather(blocks: _Blocks, wanted: jax.Array, low: jax.Array, high: jax.Array, above: jax.Array) -> _Near:
    """The ids with keys in (low, high] of the blocks ``wanted[B,n]``, of which there are at most as many as fit."""
    few = min(NEAR, wanted.shape[1] // 8)
    order = lax.top_k(wanted.astype(jnp.float32), few)[1]  # of equals the lower comes first: ids stay in order
    x, w, key = (jax.vmap(lambda rows, i: rows[i])(part, order) for part in blocks)
    x, w = _inside(x, w, key, low, high)
    ids = order[:, :, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)[None, None, :]
    rows = len(order)
    return _Near(x.reshape(rows, -1), w.reshape(rows, -1), ids.reshape(rows, -1), above)


class _Bounds(NamedTuple):
    """The key of the last kept id lies in (low, high]; held, above [B]: the amounts of keys beyond each of them."""

    low: jax.Array
    high: jax.Array
    held: jax.Array
    above: jax.Array


def _closer(c: _Bounds, key: jax.Array, amount: jax.Array, needed: jax.Array, guess: jax.Array | None) -> _Bounds:
    """Bounds after one pass over all ids.

    Without a ``guess`` it tries where a straight line has the cut, but a little to the side of the bound that is
    further away: so that both bounds come near, where regula falsi moves one of them.
    """
    wide = key.dtype
    under, over = (needed - c.above).astype(wide), (c.held - needed).astype(wide)
    step = MISSED * (under + over)
    aim = jnp.where(over > under, under + step, under - step) / (under + over)
    guess = c.high - (c.high - c.low) * aim if guess is None else guess
    guess = jnp.where((guess > c.low) & (guess < c.high), guess, _halfway(c.low, c.high))
    held = _amount(amount, key > guess[:, None])
    enough = held >= needed
    return _Bounds(
        jnp.where(enough, guess, c.low),
        jnp.where(enough, c.high, guess),
        jnp.where(enough, held, c.held),
        jnp.where(enough, c.above, held),
    )


def _sampled(
    key: jax.Array, amount: jax.Array, needed: jax.Array, total: jax.Array, high: jax.Array, above: jax.Array
) -> jax.Array:
    """Two guesses [2,B], above and below the cut, from a sample of the blocks.

    What lies beyond ``high`` is known, and of amounts so large that chance would spoil the sample.
    """
    wide, rows = key.dtype, key.shape[0]
    few, part = (blocks_of(x, fill)[:, ::SPARSE].reshape(rows, -1) for x, fill in ((key, -jnp.inf), (amount, 0)))
    rest = few <= high[:, None]
    few, part = jnp.where(rest, few, -jnp.inf), jnp.where(rest, part.astype(wide), 0)
    sampled = jnp.sum(part, axis=-1)
    share = jnp.clip((needed - above).astype(wide) / (total - above).astype(wide), 0, 1)
    # by how much the mass of a prefix of the sample may miss: 2 deviations
    spread = 2 * jnp.sqrt(share * (1 - share) * jnp.sum(part**2, axis=-1)) / sampled
    aims = jnp.concatenate([jnp.maximum(share - spread, share / 2), jnp.minimum(share + spread, (1 + share) / 2)])
    few, part, sampled, high = (jnp.concatenate([x, x]) for x in (few, part, sampled, high))
    first = _Bounds(_lowest(few), high, sampled, jnp.zeros_like(sampled))
    found = lax.fori_loop(0, TURNS, lambda _, c: _closer(c, few, part, aims * sampled, None), first)
    return jnp.where(jnp.arange(2)[:, None] == 0, found.high.reshape(2, rows), found.low.reshape(2, rows))


def _narrow(
    key: jax.Array, amount: jax.Array, needed: jax.Array, total: jax.Array, high: jax.Array, above: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """low, high, above [B]: the key of the last kept id lies in (low, high]; above: the amount of larger keys."""
    bounds = _Bounds(jnp.full_like(high, -jnp.inf), high, total, above)
    for guess in _sampled(key, amount, needed, total, high, above):
        bounds = _closer(bounds, key, amount, needed, guess)
    bounds = lax.fori_loop(0, NARROWING, lambda _, c: _closer(c, key, amount, needed, None), bounds)
    return bounds.low, bounds.high, bounds.above


class _Found(NamedTuple):
    """Few ids among which the cut is in the rows ``done[B]``; in the others the bounds that ``_narrow`` gives."""

    near: _Near
    done: jax.Array
    low: jax.Array
    high: jax.Array
    above: jax.Array


def _candidates(blocks: _Blocks, key: jax.Array, amount: jax.Array, needed: jax.Array) -> _Found:
    few = min(NEAR, blocks.key.shape[1] // 8)
    tops = jnp.max(blocks.key, axis=-1)
    below = jnp.min(lax.top_k(tops, few + 1)[0], axis=-1)  # no key outside the wanted blocks is larger
    none, end = jnp.zeros(below.shape, amount.dtype), jnp.full_like(below, jnp.inf)
    hot = _gather(blocks, tops > below[:, None], below, end, none)
    held = jnp.sum(hot.amount, axis=-1, dtype=amount.dtype)
    enough = (held >= needed) | jnp.isneginf(below)  # or there is nothing else

    def seek(_: None) -> _Found:
        total = jnp.sum(amount, axis=-1, dtype=amount.dtype)
        low, high, above = _narrow(key, amount, needed, total, below, held)
        wanted = jnp.any((blocks.key > low[:, None, None]) & (blocks.key <= high[:, None, None]), axis=-1)
        short = ~(total >= needed)  # all ids are kept, the lowest too
        fits = (jnp.sum(wanted, axis=-1, dtype=jnp.int32) <= few) & ~short
        other = _gather(blocks, wanted, low, high, above)
        near = jax.tree.map(lambda a, b: jnp.where(enough.reshape((-1,) + (1,) * (a.ndim - 1)), a, b), hot, other)
        low, high, above = jnp.where(short, -jnp.inf, low), jnp.where(short, end, high), jnp.where(short, none, above)
        return _Found(near, enough | fits, low, high, above)

    return lax.cond(jnp.all(enough), lambda _: _Found(hot, enough, below, end, none), seek, None)


def _where(rows: jax.Array, a: Cut, b: Cut) -> Cut:
    return Cut(*(jnp.where(rows, x, y) for x, y in zip(a, b, strict=True)))


def cut(logits: jax.Array, amount: jax.Array, needed: jax.Array, key: jax.Array | None = None) -> Cut:
    """The shortest prefix of the order of ids whose ``amount[B,V]`` adds up to ``needed[B]``.

    All ids where the total stays below ``needed``. ``amount`` must be >= 0 and equal for equal logits. Sums are taken
    in the type of ``amount``. key[B,V]: what to compare while the search is still coarse, if it is not the logits; it
    must never fall as logits rise. With the amounts themselves a pass reads one array instead of two.
    """
    key = logits if key is None else key
    logits, amount, needed, key = lax.stop_gradient((logits, amount, needed, key))
    rows, size = logits.shape
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    if size < 64 * BLOCK:
        nothing = jnp.zeros((rows,), amount.dtype)
        return _solve(_Near(logits, amount, ids, nothing), needed, jnp.zeros((rows,), bool), size)
    blocks = _Blocks(blocks_of(logits, -jnp.inf), blocks_of(amount, 0), blocks_of(key, -jnp.inf))
    near, done, low, high, above = _candidates(blocks, key, amount, needed)
    found, few = _first_few(near, needed)

    def several(found: Cut) -> Cut:
        return _where(few, found, _solve(near, needed, few | ~done, size))

    def general(found: Cut) -> Cut:
        every = _Near(*_inside(logits, amount, key, low, high), ids, above)
        return _where(done, found, _solve(every, needed, done, size))

    found = lax.cond(jnp.all(few | ~done), lambda c: c, several, found)
    found = lax.cond(jnp.all(done), lambda c: c, general, found)
    unknown = jnp.isneginf(found.removed)  # it may lie outside what was searched

    def outer(_: None) -> jax.Array:
        under = jnp.max(jnp.where(logits < found.last[:, None], logits, -jnp.inf), axis=-1)
        return jnp.where(unknown, under, found.removed)

    removed = lax.cond(jnp.any(unknown), outer, lambda _: found.removed, None)
    return found._replace(removed=removed)


def last_kept(logits: jax.Array, amount: jax.Array, needed: jax.Array) -> jax.Array:
    """The largest logit [B] such that the ids from it upwards hold ``needed[B]`` of ``amount[B,V]`` (>= 0)."""
    return cut(logits, amount, needed).last
