"""Sliding windows as rings, attention sinks, int8 keys and values, and caches that change their size."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kv_histories import HEAD, KV, LAYERS, draw, empty, feed

from jaxdecode import base, kvcache
from jaxdecode.kvcache import Window
from jaxdecode.kvcache.int4 import int4_block, int4_values

KINDS: dict[str, tuple[Any, ...]] = {
    "window": (jnp.float32, (Window(3, 2), None)),
    "slack 0": (jnp.float32, (Window(4, 0), Window(1, 0))),
    "sinks": (jnp.float32, (Window(3, 2, 2), Window(5, 1, 1))),
    "int8": (jnp.int8,),
    "int8 window": (jnp.int8, (Window(3, 2, 1), None)),
    "int4 window": (jnp.int4, (Window(3, 2, 1), None)),
}
CAPACITY = 24


def slack(cache: kvcache.KVCache) -> int:
    return min((w.slack for w in cache.windows if w is not None), default=CAPACITY)


@pytest.mark.parametrize(
    ("kind", "levels"),
    [("slack 0", 0), ("sinks", 0), ("window", 1), ("int8 window", 1), ("int8", 0), ("int4 window", 1)],
)
def test_any_history_equals_full_attention_with_a_band_mask(kind: str, levels: int) -> None:
    """Two rows, random calls of 1, 3 and 7 tokens, cuts, forks and exchanges, far beyond the window."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        cache, history = empty(2, CAPACITY, *KINDS[kind])
        for i in range(14):
            if i == 4 and levels:
                cache, history = kvcache.fork(cache, 2, CAPACITY), [copy.copy(t) for t in history for _ in (0, 1)]
            operation = rng.choice(["feed", "feed", "cut", "take"]) if i > 1 else "feed"
            if operation == "cut":
                most = np.minimum(slack(cache), [len(t) for t in history])
                keep = np.array([len(t) - rng.integers(0, m + 1) for t, m in zip(history, most, strict=True)])
                ok = kvcache.reaches_back(cache, keep.astype(np.int32))
                keep = np.where(ok, keep, [len(t) for t in history])  # an earlier cut has used the slack up
                cache = kvcache.truncate(cache, keep.astype(np.int32))
                history = [t[:n] for t, n in zip(history, keep, strict=True)]
            elif operation == "take":
                rows = rng.permutation(len(history))
                cache, history = base.take_rows(cache, rows), [copy.copy(history[r]) for r in rows]
            else:
                width = int(rng.choice([1, 3, 7]))
                room = cache.capacity - np.asarray(cache.length)
                wanted = rng.integers(0, width + 1, len(history))
                cache = feed(cache, history, rng, np.minimum(wanted, room).tolist(), width)
            assert cache.total.tolist() == [len(t) for t in history]


def test_every_length_around_the_window_and_twice_the_window() -> None:
    """One token at a time and all at once, W = 5 with slack 1: lengths 1 to 12 in every row."""
    window = (jnp.float32, (Window(5, 1), Window(5, 1, 1)))
    rng = np.random.default_rng(0)
    at_once, history = empty(12, 13, *window)
    at_once = feed(at_once, history, rng, list(range(1, 13)), 12)
    feed(at_once, history, rng, [1] * 12, 1)
    steps, history = empty(2, 13, *window)
    for _ in range(13):
        steps = feed(steps, history, rng, [1, 1], 1)
    assert [sum(b.v.shape[2] for b in layer) for layer in steps.layers] == [6, 7]
    assert steps.capacity == 13


def test_a_ring_stores_its_window_however_long_the_row_may_be() -> None:
    window = Window(100, 20, 4)
    cache = jax.eval_shape(lambda: kvcache.create(2, 1, KV, HEAD, 5000, jnp.float32, (window, None)))
    sizes = [sum(x.size for x in jax.tree.leaves(layer)) for layer in cache.layers]
    assert sizes == [2 * 124 * KV * HEAD, 2 * 5000 * KV * HEAD]
    with pytest.raises(ValueError, match="windows: expected one for each of 2 layers, got 1"):
        kvcache.create(2, 1, KV, HEAD, 5000, jnp.float32, (window,))


def test_int8_takes_about_a_quarter_of_the_memory() -> None:
    def stored(dtype: Any) -> int:
        cache = jax.eval_shape(lambda: kvcache.create(3, 2, 4, 64, 300, dtype))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))

    assert stored(jnp.int8) * 4 == stored(jnp.float32) * (64 + 4) / 64
    assert stored(jnp.int8) < 0.27 * stored(jnp.float32)
    assert stored(jnp.int4) * 32 == stored(jnp.float32) * (16 + 2) / 4  # 32 features: 16 bytes and a scale


def test_int4_has_16_levels_for_every_32_features() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2, 3, 2, 64)).astype(np.float32)
    x[0, 1, 1, 40] = 1e5  # an outlier spoils the 32 features beside it, and no others
    x[1, 2] = 0
    for dtype in (jnp.float32, jnp.bfloat16):
        k, v = (np.asarray(y, np.float32) for y in int4_values(int4_block(*(jnp.asarray(x, dtype),) * 2), jnp.float32))
        np.testing.assert_array_equal(v.transpose(0, 2, 1, 3), k.transpose(0, 3, 1, 2))
        wide = np.asarray(jnp.asarray(x, dtype), np.float64).reshape(2, 3, 2, 2, 32)
        step = np.abs(wide).max(-1, keepdims=True) * 2 / 15
        got = v.transpose(0, 2, 1, 3).reshape(wide.shape)
        assert (np.abs(got - wide) <= step * 0.505).all()
        assert not got[1, 2].any()


def test_int8_keys_of_a_token_hang_on_nothing_else() -> None:
    """Neither on later tokens nor on how they are chunked; zeros stay zeros, and padding is not stored."""
    for dtype, kind in ((jnp.int8, kvcache.Int8Block), (jnp.int4, kvcache.Int4Block)):
        keys_alone(dtype, kind)


def keys_alone(dtype: Any, kind: type) -> None:
    rng = np.random.default_rng(1)
    _, k, v = draw(rng, 2, 5)
    k[:, 0, 3] *= 1e6
    v[:, 1, 2] = 0
    plans = []
    for chunks in ((5,), (1, 1, 1, 2)):
        cache, _ = empty(2, 6, dtype)
        at = 0
        for n in chunks:
            plan = kvcache.plan(cache, n, jnp.array([n, n]))
            layers = []
            for i in range(LAYERS):
                q = jnp.zeros((2, KV, 1, n, HEAD))
                past = kvcache.one_layer(cache, i)
                layers.append(kvcache.extend(q, k[i][:, at : at + n], v[i][:, at : at + n], past, plan)[1])
            cache, at = kvcache.advance(cache, layers, plan), at + n
        plans.append(cache)
    for a, b in zip(*map(jax.tree.leaves, plans), strict=True):
        assert np.array_equal(a, b)
    block = plans[0].layers[0][0]
    assert isinstance(block, kind)
    assert not np.any(block.v_scale[1, :, 2])
    assert not np.any(block.k_scale[:, :, 5])


def test_truncate_refuses_to_go_back_further_than_the_slack() -> None:
    rng = np.random.default_rng(2)
    cache, history = empty(2, CAPACITY, *KINDS["window"])
    cache = feed(cache, history, rng, [7, 4], 7)
    assert kvcache.reaches_back(cache, jnp.array([5, 0])).tolist() == [True, True]
    assert kvcache.reaches_back(cache, jnp.array([4, 1])).tolist() == [False, True]
    assert [kvcache.cuttable(cache, by) for by in (None, 3, 2)] == [False, False, True]
    with pytest.raises(ValueError, match=r"truncate: expected lengths no more than 2 tokens .*refill"):
        kvcache.truncate(cache, jnp.array([4, 4]))
    cut = kvcache.truncate(cache, jnp.array([0, 2]))
    feed(cut, [[], history[1][:2]], rng, [7, 7], 7)
    plain, _ = empty(2, CAPACITY)
    assert kvcache.cuttable(plain)
    assert not kvcache.cuttable({"kv": plain, "other": jnp.zeros(2)})


@pytest.mark.parametrize("kind", ["sinks", "int8 window"])
def test_resize_copies_what_is_held(kind: str) -> None:
    rng = np.random.default_rng(3)
    cache, history = empty(2, 9, *KINDS[kind])
    cache = feed(cache, history, rng, [7, 4], 7)
    for size in (CAPACITY, 150, 8):
        cache = kvcache.resize(cache, size)
        assert cache.capacity == size
        feed(cache, [copy.copy(t) for t in history], rng, [1, 1], 1)
    with pytest.raises(ValueError, match="max_len: expected at least the 7 tokens that are held, got 6"):
        kvcache.resize(cache, 6)
    with pytest.raises(ValueError, match="resize: expected rows with a past of their own, got shared"):
        kvcache.resize(kvcache.fork(cache, 2, 4), 6)


def test_fork_stores_the_past_once_and_repeats_other_state() -> None:
    rng = np.random.default_rng(4)
    cache, history = empty(2, 9)
    cache = feed(cache, history, rng, [3, 2])
    many = kvcache.fork(cache, 3, 5)
    assert many.shared[0].layers[0][0].k.shape[0] == 2
    feed(many, [copy.copy(t) for t in history for _ in range(3)], rng, [1, 2, 3, 0, 1, 2])
    assert kvcache.fork({"last": jnp.arange(2)}, 2, 5)["last"].tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="n: expected a positive whole number, got 0"):
        kvcache.fork(cache, 0, 5)
