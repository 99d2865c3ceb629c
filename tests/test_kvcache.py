"""The KV cache against plain lists: whatever is written, cut, shared or reordered, queries see their own history."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_histories import HEAD, KV, LAYERS, WIDTH, call, draw, empty, feed
from programs import multiplications, result_shapes

from jaxdecode import base, kvcache


def test_S10_attention_is_the_softmax_formula_and_each_layer_has_its_own_keys_and_values() -> None:
    rng = np.random.default_rng(0)
    cache, history = empty(2, 9)
    for lengths in ([3, 1], [3, 3], [2, 3]):
        cache = feed(cache, history, rng, lengths)
    assert cache.length.tolist() == [8, 7]
    for row, tokens in enumerate(history):
        for layer in range(LAYERS):
            keys, values = map(np.asarray, cache.layers[layer][0])
            for t, (k, v) in enumerate(tokens):
                assert np.array_equal(keys[row, :, :, t], k[layer])
                assert np.array_equal(values[row, :, t], v[layer])
            assert not keys[row, :, :, len(tokens) :].any()


def test_S7_6_numbers_stored() -> None:
    """L=12, d=768, n=1024; grouped-query attention stores K h in place of d."""

    def stored(*shape: int, dtype: Any = jnp.float32) -> tuple[int, int]:
        layers = jax.eval_shape(lambda: kvcache.create(*shape, dtype)).layers
        leaves = jax.tree.leaves(layers)
        return sum(x.size for x in leaves), sum(x.size * x.dtype.itemsize for x in leaves)

    assert stored(12, 1, 12, 64, 1024) == (2 * 12 * 1024 * 768, 75_497_472) == (18_874_368, 75_497_472)
    assert stored(12, 1, 4, 64, 1024) == (2 * 12 * 1024 * 4 * 64, 25_165_824)
    assert stored(12, 1, 4, 64, 1024, dtype=jnp.bfloat16)[1] == 25_165_824 // 2
    assert stored(3, 5, 1, 8, 7) == (5 * 2 * 3 * 7 * 8, 4 * 5 * 2 * 3 * 7 * 8)


@pytest.mark.parametrize("levels", [0, 1, 2])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31))
def test_S7_4_any_history_of_writes_cuts_forks_and_reorderings(levels: int, seed: int) -> None:
    """Two rows, twelve random operations; before some the cache is shared; every query is checked."""
    rng = np.random.default_rng(seed)
    cache, history = empty(2, 8)
    for i in range(12):
        if i in (3, 6)[:levels]:
            cache = kvcache.share(cache, 8)
        operation = "feed" if i in (0, 2, 5, 8) else rng.choice(["feed", "cut", "take"])
        if operation == "cut":
            keep = np.maximum([len(t) - rng.integers(0, 7) for t in history], 0)
            cache = kvcache.truncate(cache, keep.astype(np.int32))
            history = [t[:n] for t, n in zip(history, keep, strict=True)]
        elif operation == "take":
            rows = rng.integers(0, 2, 2)
            cache, history = base.take_rows(cache, rows), [copy.copy(history[r]) for r in rows]
        else:
            room = cache.capacity - np.asarray(cache.length)
            cache = feed(cache, history, rng, np.minimum(rng.integers(0, WIDTH + 1, 2), room).tolist())
        assert cache.total.tolist() == [len(t) for t in history]


def test_forks_share_what_they_have_in_common() -> None:
    """share + repeat_rows: the prompt is stored once, and six rows over two levels go on by themselves."""
    rng = np.random.default_rng(1)
    cache, history = empty(2, 5)
    cache = feed(cache, history, rng, [3, 2])
    for copies, lengths in ((3, [1, 2, 3, 3, 0, 2]), (1, [2, 0, 1, 3, 3, 1])):
        cache = base.repeat_rows(kvcache.share(cache, 4, max(map(len, history)) if copies == 3 else None), copies)
        history = [copy.copy(t) for t in history for _ in range(copies)]
        cache = feed(cache, history, rng, lengths)
    prompt, first = cache.shared
    assert prompt.layers[0][0].k.shape == (2, KV, HEAD, 3), "cut to the longest prompt"
    assert prompt.segment_of_row.tolist() == [0, 0, 0, 1, 1, 1]
    assert first.layers[0][0].k.shape == (6, KV, HEAD, 4)
    assert first.segment_of_row.tolist() == [0, 1, 2, 3, 4, 5]
    assert cache.capacity == 4
    with pytest.raises(ValueError, match="share: expected at most one shared level, got two"):
        kvcache.share(cache, 4)


def test_truncate_cuts_through_levels_and_never_lengthens() -> None:
    rng = np.random.default_rng(2)
    cache, history = empty(4, 3)
    for i in range(3):
        cache = feed(cache if i == 0 else kvcache.share(cache, 4), history, rng, [3, 3, 2, 1])
    keep = np.array([1, 4, 5, 99], np.int32)
    cut = kvcache.truncate(cache, keep)
    assert [s.visible.tolist() for s in cut.shared] == [[1, 3, 2, 1], [0, 1, 2, 1]]
    assert cut.length.tolist() == [0, 0, 1, 1]
    both = kvcache.shorten({"a": cache, "b": cut}, np.array([8, 5, 1, 0], np.int32))  # what is kept differs by node
    jax.tree.map(np.testing.assert_array_equal, both["a"], cut)
    assert both["b"].total.tolist() == [0, 0, 4, 3]
    history = [t[:n] for t, n in zip(history, keep, strict=True)]
    feed(cut, history, rng, [3, 2, 3, 3])
    assert cache.total.tolist() == [9, 9, 6, 3], "the old cache is as it was"


def test_S7_4_forks_cut_at_their_own_places_inside_a_long_segment() -> None:
    """Rows of one segment see different parts of it; 150 tokens, so more than one block."""
    rng = np.random.default_rng(9)
    cache, history = empty(2, 300)
    cache = feed(cache, history, rng, [150, 40], 150)
    keep = np.array([150, 130, 3, 40, 1, 0], np.int32)
    forks = kvcache.truncate(base.repeat_rows(kvcache.share(cache, 4), 3), keep)
    assert forks.total.tolist() == keep.tolist()
    feed(forks, [history[r // 3][:n] for r, n in enumerate(keep)], rng, [3, 2, 1, 3, 3, 3])


def test_S7_2_padding_and_untouched_rows_leave_no_trace() -> None:
    rng = np.random.default_rng(3)
    cache, history = empty(3, 8)
    cache = feed(cache, history, rng, [2, 0, 3])
    q, k, v = draw(rng, 3, WIDTH)
    lengths = np.array([1, 0, 0], np.int32)
    out, after = call(cache, q, k, v, lengths)
    k[:, 0, 1:], v[:, 0, 1:], k[:, 1:], v[:, 1:] = 1e30, -1e30, 7, 9
    again, other = call(cache, q, k, v, lengths)
    assert np.array_equal(out[:, 0, :, :, 0], again[:, 0, :, :, 0])
    for a, b, c in zip(*map(jax.tree.leaves, (cache, after, other)), strict=True):
        assert np.array_equal(b, c)
        assert np.array_equal(a[1:], b[1:])


@pytest.mark.parametrize("lengths", [[3, 3], [3, 0]])
def test_a_write_past_the_capacity_is_dropped(lengths: list[int]) -> None:
    """dynamic_update_slice would clamp, and overwrite the last slots."""
    rng = np.random.default_rng(4)
    cache, history = empty(2, 4)
    cache = feed(cache, history, rng, [3, 3])
    q, k, v = draw(rng, 2, WIDTH)
    out, full = call(cache, q, k, v, np.array(lengths, np.int32))
    assert np.isfinite(out).all()
    assert full.length.tolist() == [4, 4 if lengths[1] else 3]
    for (old,), (new,) in zip(cache.layers, full.layers, strict=True):
        assert np.array_equal(old.k[..., :3], new.k[..., :3])
        assert np.array_equal(old.v[..., :3, :], new.v[..., :3, :])
    for i, (layer,) in enumerate(full.layers):  # the one token that fits is there
        assert np.array_equal(layer.k[0, :, :, 3], k[i, 0, 0])
        assert np.array_equal(layer.v[0, :, 3], v[i, 0, 0])
    _, still = call(full, *draw(rng, 2, WIDTH), np.array([2, 0], np.int32))
    for a, b in zip(jax.tree.leaves(full), jax.tree.leaves(still), strict=True):
        assert np.array_equal(a, b)


def test_a_call_may_be_wider_than_the_cache() -> None:
    rng = np.random.default_rng(8)
    cache, history = empty(3, WIDTH - 1)
    for lengths in ([1, 2, 0], [1, 0, 1], [0, 0, 1]):
        cache = feed(cache, history, rng, lengths)
    assert cache.length.tolist() == [2, 2, 2]


def test_row_operations_act_on_whole_rows() -> None:
    """take, repeat and put, as inserting a request and collecting one do; an index out of range is dropped."""
    rng = np.random.default_rng(5)
    cache, history = empty(3, 8)
    cache = feed(cache, history, rng, [3, 1, 2])
    taken = base.take_rows(cache, np.array([2, 0, 0]))
    feed(taken, [copy.copy(history[r]) for r in (2, 0, 0)], rng, [3, 1, 2])
    doubled = base.repeat_rows(cache, 2)
    assert doubled.length.tolist() == [3, 3, 1, 1, 2, 2]
    feed(doubled, [copy.copy(t) for t in history for _ in range(2)], rng, [0, 1, 2, 3, 0, 1])
    guest, news = empty(2, 8)
    guest = feed(guest, news, rng, [3, 2])
    merged = base.put_rows(cache, np.array([1, 3]), guest)
    assert merged.length.tolist() == [3, 3, 2]
    feed(merged, [history[0], news[0], history[2]], rng, [2, 2, 3])


def test_row_operations_reach_the_cache_inside_any_pytree() -> None:
    cache, _ = empty(2, 4)
    tree = {"kv": kvcache.share(cache, 2), "other": jnp.arange(2), "table": base.Shared(jnp.arange(5))}
    grown = base.repeat_rows(tree, 3)
    assert grown["kv"].shared[0].layers[0][0].k.shape[0] == 2
    assert grown["kv"].length.shape == grown["other"].shape == (6,)
    assert grown["table"].value.shape == (5,)
    with pytest.raises(ValueError, match="put_rows: expected caches without shared segments"):
        base.put_rows(tree["kv"], np.array([0]), cache)
    for operation in (lambda t: kvcache.truncate(t, np.zeros(2, np.int32)), lambda t: kvcache.share(t, 2)):
        with pytest.raises(ValueError, match="expected a cache of KV nodes only"):
            operation(tree)
    both = {"a": cache, "b": (cache,)}
    assert kvcache.share(both, 2)["b"][0].capacity == 2
    assert kvcache.truncate(both, np.zeros(2, np.int32))["a"].length.tolist() == [0, 0]


def test_positions_go_on_across_levels() -> None:
    rng = np.random.default_rng(6)
    cache, history = empty(2, 4)
    cache = kvcache.share(feed(cache, history, rng, [3, 1]), 4)
    plan = kvcache.plan(feed(cache, history, rng, [2, 3]), 2)
    assert plan.position.tolist() == [[5, 6], [4, 5]]
    assert plan.start.tolist() == [2, 3]
    assert plan.written.tolist() == [2, 1], "the last one is past the end: dropped"
    assert plan.visible.tolist() == [[3, 4], [4, 4]], "the last token is past the end: dropped"
    assert plan.length.tolist() == [4, 4]


def shared_and_forked(slots: int, size: int | None, copies: int) -> tuple[Any, ...]:
    """The arguments of a call on two prompts of at most three tokens, in segments of ``slots``, shared and forked."""
    rng = np.random.default_rng(7)
    cache, history = empty(2, slots)
    cache = base.repeat_rows(kvcache.share(feed(cache, history, rng, [3, 2]), 4, size), copies)
    return cache, *draw(rng, 2 * copies, WIDTH), np.ones((2 * copies,), np.int32)


def test_S7_7_attention_over_a_shared_segment_follows_the_size_it_was_cut_to() -> None:
    counts = [
        multiplications(jax.make_jaxpr(call)(*shared_and_forked(slots, size, 1)).jaxpr)
        for slots, size in ((5, 3), (64, 3), (3, None), (64, None))
    ]
    assert counts[0] == counts[1] == counts[2] < counts[3]


def test_a_step_never_makes_a_copy_of_a_shared_segment_for_every_row() -> None:
    program = call.lower(*shared_and_forked(256, None, 16)).compile().as_text()
    copies = sorted((32, KV, HEAD, 256))
    assert [x for x in result_shapes(program) if sorted(x) == copies] == []


def test_share_refuses_to_lose_tokens() -> None:
    cache, history = empty(2, 8)
    cache = feed(cache, history, np.random.default_rng(8), [3, 2])
    assert kvcache.share(cache, 4, 3).shared[0].visible.tolist() == [3, 2]
    with pytest.raises(ValueError, match="share: expected tails of at most size = 2 tokens, got 3"):
        kvcache.share(cache, 4, 2)


def test_how_far_another_row_is_does_not_change_a_bit() -> None:
    """Row 0 beside a neighbour in the first block, and beside one whose tokens fill two more blocks."""
    rng = np.random.default_rng(11)
    q, k, v = draw(rng, 2, 300)
    new = draw(rng, 2, 1)
    seen = []
    for other in (7, 300):
        cache, _ = empty(2, 400)
        _, cache = call(cache, q, k, v, np.array([90, other], np.int32))
        out, _ = call(cache, *new, np.array([1, 1], np.int32))
        seen.append(np.asarray(out))
    assert np.array_equal(seen[0][:, 0], seen[1][:, 0])
    assert not np.array_equal(seen[0][:, 1], seen[1][:, 1])
