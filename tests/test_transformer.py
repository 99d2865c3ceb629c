"""The transformer against an oracle that recomputes everything: cache, chunks and padding change nothing."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdecode as jd
from jaxdecode import kvcache
from jaxdecode.models.transformer import (
    RopeScaling,
    TransformerConfig,
    frequencies,
    init_params,
    param_shapes,
    transformer,
)

V, T, CAPACITY = 37, 12, 20
BASE: dict[str, Any] = {
    "vocab_size": V,
    "d_model": 24,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "d_mlp": 40,
    "context_length": 4096,
}
CONFIGS = {
    "grouped": TransformerConfig(**BASE),
    "many": TransformerConfig(**BASE | {"n_kv_heads": 4, "head_dim": 6, "norm_eps": 1e-3}),
    "one_kv_untied": TransformerConfig(**BASE | {"n_kv_heads": 1, "tied": False, "rope_theta": 500.0}),
    "scaled": TransformerConfig(**BASE | {"n_layers": 3, "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64)}),
    "freqs": TransformerConfig(**BASE | {"rope_freqs": (1.0, 1.5, 4.0, 8.0), "tied": False}),
}
TOKENS = np.random.default_rng(0).integers(0, V, (3, T))
F32 = 3e-6  # float32 rounding through three small layers, as a part of the largest logit


@functools.cache
def weights(name: str) -> Any:
    """Random params, norm scales uneven, in float64 NumPy."""
    rng = np.random.default_rng(len(name))

    def leaf(shape: tuple[int, ...]) -> np.ndarray:
        return rng.uniform(0.5, 1.5, shape) if len(shape) == 1 else rng.normal(size=shape) * 1.5 / shape[1] ** 0.5

    return jax.tree.map(
        leaf, param_shapes(CONFIGS[name]), is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int)
    )


@functools.cache
def exact(name: str) -> list[oracle.Trace]:
    return [oracle.forward(CONFIGS[name], weights(name), row) for row in TOKENS]


def params_of(name: str, dtype: Any = jnp.float32) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), weights(name))


@functools.partial(jax.jit, static_argnums=0)
def apply(model: jd.Model, params: Any, tokens: Any, cache: Any, lengths: Any = None, logits_at: Any = None) -> Any:
    return model.apply(params, tokens, cache, lengths=lengths, logits_at=logits_at)


def fresh(name: str, params: Any, capacity: int = CAPACITY, rows: int = 3) -> kvcache.KVCache:
    return transformer(CONFIGS[name]).init_cache(params, rows, capacity)


def feed(name: str, params: Any, cache: Any, tokens: np.ndarray, width: int) -> tuple[np.ndarray, kvcache.KVCache]:
    """All of ``tokens`` in calls of ``width``; logits of every position."""
    logits = []
    for i in range(0, tokens.shape[1], width):
        out, cache = apply(transformer(CONFIGS[name]), params, tokens[:, i : i + width], cache)
        logits.append(np.asarray(out))
    return np.concatenate(logits, 1), cache


def check(logits: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max(initial=0) <= tolerance * np.abs(expected).max(initial=0)


def stored(cache: kvcache.KVCache, layer: int, row: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The first n keys and values [n,K,h] of one layer and row."""
    ((k, v),) = cache.layers[layer]
    return np.asarray(k[row, :, :, :n]).transpose(2, 0, 1), np.asarray(v[row, :, :n]).transpose(1, 0, 2)


def check_cache(cache: kvcache.KVCache, row: int, trace: oracle.Trace, n: int, tolerance: float) -> None:
    """The first n entries of every layer are the keys and values of ``trace``."""
    for layer in range(len(cache.layers)):
        k, v = stored(cache, layer, row, n)
        check(k, trace.keys[layer][:n], tolerance)
        check(v, trace.values[layer][:n], tolerance)


@pytest.mark.parametrize(("name", "width"), [*product(CONFIGS, (T, 1)), ("grouped", 4), ("one_kv_untied", 4)])
def test_S7_3_cached_logits_equal_recomputed_ones(name: str, width: int) -> None:
    params = params_of(name)
    logits, cache = feed(name, params, fresh(name, params), TOKENS, width)
    assert logits.dtype == np.float32
    for row, trace in enumerate(exact(name)):
        check(logits[row], trace.logits, F32)
        check_cache(cache, row, trace, T, F32)


@pytest.mark.parametrize(("name", "width"), [*product(CONFIGS, (1,)), ("scaled", T), ("grouped", 4)])
def test_S7_3_float64_params_stay_float64_and_agree_to_1e_14(name: str, width: int) -> None:
    with jax.enable_x64(True):
        params = params_of(name, jnp.float64)
        logits, cache = feed(name, params, fresh(name, params), TOKENS, width)
        assert logits.dtype == np.float64
        assert {x.dtype for x in cache.layers[0][0]} == {np.dtype(np.float64)}
    for row, trace in enumerate(exact(name)):
        check(logits[row], trace.logits, 1e-14)
        check_cache(cache, row, trace, T, 1e-14)


def test_x64_did_not_leak() -> None:
    assert jnp.zeros(1).dtype == np.float32


def test_S7_1_the_cache_holds_every_processed_position_and_a_new_token_adds_one() -> None:
    params = params_of("grouped")
    _, cache = feed("grouped", params, fresh("grouped", params), TOKENS[:, :4], 4)
    _, after = apply(transformer(CONFIGS["grouped"]), params, TOKENS[:, 4:5], cache)
    assert after.length.tolist() == [5, 5, 5]
    for (before,), (now,) in zip(cache.layers, after.layers, strict=True):
        changed = np.asarray(before.k != now.k).any((0, 1, 2)) | np.asarray(before.v != now.v).any((0, 1, 3))
        assert np.flatnonzero(changed).tolist() == [4]


def test_S7_8_decode_needs_the_next_token_and_the_stored_keys_and_values_only() -> None:
    params = params_of("grouped")
    prompt, _ = feed("grouped", params, fresh("grouped", params), TOKENS[:, :4], 4)
    first = prompt[:, -1].argmax(-1)
    _, cache = apply(transformer(CONFIGS["grouped"]), params, TOKENS[:, :4], fresh("grouped", params))
    rebuilt = fresh("grouped", params)  # another cache, into which only k, v and the lengths are put
    layers = tuple(
        (kvcache.Block(a.k.at[..., :4].set(b.k[..., :4]), a.v.at[..., :4, :].set(b.v[..., :4, :])),)
        for (a,), (b,) in zip(rebuilt.layers, cache.layers, strict=True)
    )
    rebuilt = kvcache.KVCache(layers, jnp.full((3,), 4, jnp.int32))
    assert jax.tree.structure(rebuilt) == jax.tree.structure(cache)
    logits, _ = apply(transformer(CONFIGS["grouped"]), params, first[:, None], rebuilt)
    for row in range(3):
        trace = oracle.forward(CONFIGS["grouped"], weights("grouped"), [*TOKENS[row, :4], first[row]])
        assert first[row] == trace.logits[3].argmax()
        check(np.asarray(logits[row, 0]), trace.logits[4], F32)


WIDTH = 4


@settings(max_examples=40, deadline=None, derandomize=True)
@given(calls=st.lists(st.tuples(*[st.integers(0, WIDTH)] * 3), min_size=1, max_size=8), padding=st.integers(0, V - 1))
def test_S7_2_any_ragged_schedule_of_chunks_gives_the_same_logits(calls: list[tuple[int, ...]], padding: int) -> None:
    """Rows advance by their own numbers, 0 included; padding holds any id; rows at 0 stay as they are, bit for bit."""
    name = "one_kv_untied"
    params, at = params_of(name), np.zeros(3, np.int32)
    cache = fresh(name, params)
    for call in calls:
        lengths = np.minimum(call, T - at).astype(np.int32)
        tokens = np.full((3, WIDTH), padding)
        for row, n in enumerate(lengths):
            tokens[row, :n] = TOKENS[row, at[row] : at[row] + n]
        logits, new = apply(transformer(CONFIGS[name]), params, tokens, cache, lengths)
        assert np.isfinite(logits).all()
        for row, n in enumerate(lengths):
            expected = exact(name)[row].logits
            assert (
                np.abs(logits[row, :n] - expected[at[row] : at[row] + n]).max(initial=0) <= F32 * np.abs(expected).max()
            )
            if n == 0:
                for old, now in zip(jax.tree.leaves(cache), jax.tree.leaves(new), strict=True):
                    assert np.array_equal(old[row], now[row])
        at, cache = at + lengths, new
    assert cache.length.tolist() == at.tolist()


@pytest.mark.parametrize("name", ["grouped", "one_kv_untied"])
def test_S7_2_later_tokens_and_total_length_do_not_reach_back(name: str) -> None:
    """Bit for bit at one shape; to rounding in a shorter pass or a larger allocation."""
    params, other = params_of(name), TOKENS.copy()
    other[:, 4:] = (other[:, 4:] + 1) % V
    logits, cache = feed(name, params, fresh(name, params), TOKENS, T)
    changed, cache2 = feed(name, params, fresh(name, params), other, T)
    assert np.array_equal(logits[:, :4], changed[:, :4])
    assert not np.allclose(logits[:, 4:], changed[:, 4:])
    for (a,), (b,) in zip(cache.layers, cache2.layers, strict=True):
        assert np.array_equal(a.k[..., :4], b.k[..., :4])
        assert np.array_equal(a.v[..., :4, :], b.v[..., :4, :])
    check(feed(name, params, fresh(name, params), TOKENS[:, :4], 4)[0], logits[:, :4], F32)
    for capacity in (T, 300):
        check(feed(name, params, fresh(name, params, capacity), TOKENS, T)[0], logits, F32)


def test_S7_2_the_oracle_is_causal_too() -> None:
    short = oracle.forward(CONFIGS["grouped"], weights("grouped"), TOKENS[0, :6]).logits
    assert np.abs(short - exact("grouped")[0].logits[:6]).max() < 1e-13


def test_S7_2_attention_over_several_blocks() -> None:
    """300 tokens in passes of 100: sizes 128, 256 and 300 of a cache of 300 slots, against the oracle."""
    tokens = np.random.default_rng(1).integers(0, V, (2, 300))
    params = params_of("grouped")
    logits, cache = feed("grouped", params, fresh("grouped", params, 300, 2), tokens, 100)
    assert cache.length.tolist() == [300, 300]
    for row in range(2):
        check(logits[row], oracle.forward(CONFIGS["grouped"], weights("grouped"), tokens[row]).logits, 2 * F32)


def test_logits_at_picks_positions_of_this_call() -> None:
    params, at = params_of("freqs"), np.array([[0, 11, 3], [5, 5, 0], [11, 10, 9]], np.int32)
    model, cache = transformer(CONFIGS["freqs"]), fresh("freqs", params)
    picked, after = apply(model, params, TOKENS, cache, None, at)
    every, same = apply(model, params, TOKENS, cache)
    expected = np.stack([exact("freqs")[row].logits[at[row]] for row in range(3)])
    check(np.asarray(picked), expected, F32)
    check(np.asarray(picked), np.take_along_axis(np.asarray(every), at[:, :, None], 1), F32)
    none, third = apply(model, params, TOKENS, cache, None, np.zeros((3, 0), np.int32))
    assert none.shape == (3, 0, V)
    for a, b, c in zip(*map(jax.tree.leaves, (after, same, third)), strict=True):
        assert np.allclose(a, b, atol=1e-6)
        assert np.allclose(a, c, atol=1e-6)


def test_S7_4_a_changed_token_invalidates_from_there_on_and_nothing_before() -> None:
    """Truncate each row at its own place, refill with another text: the same as that text from scratch."""
    name, cut = "one_kv_untied", np.array([0, 5, 9], np.int32)
    params, at = params_of(name), cut.copy()
    other = np.where(np.arange(T)[None] < cut[:, None], TOKENS, (TOKENS + 5) % V)
    traces = [oracle.forward(CONFIGS[name], weights(name), row) for row in other]
    _, cache = feed(name, params, fresh(name, params), TOKENS, T)
    refilled = kvcache.truncate(cache, cut)
    assert refilled.length.tolist() == cut.tolist()
    while (at < T).any():
        n = np.minimum(T - at, WIDTH).astype(np.int32)
        tokens = np.take_along_axis(other, np.minimum(at[:, None] + np.arange(WIDTH), T - 1), 1)
        logits, refilled = apply(transformer(CONFIGS[name]), params, tokens, refilled, n)
        for row, trace in enumerate(traces):
            check(np.asarray(logits[row, : n[row]]), trace.logits[at[row] : at[row] + n[row]], F32)
        at += n
    for row, trace in enumerate(traces):
        check_cache(refilled, row, trace, T, F32)
        for layer in range(2):
            for before, now in zip(
                stored(cache, layer, row, cut[row]), stored(refilled, layer, row, cut[row]), strict=True
            ):
                assert np.array_equal(before, now)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_params_work_and_laws_are_float32(dtype: Any) -> None:
    params = params_of("grouped", dtype)
    logits, cache = feed("grouped", params, fresh("grouped", params), TOKENS, 4)
    assert logits.dtype == np.float32
    assert cache.layers[0][0].k.dtype == cache.layers[1][0].v.dtype == dtype
    for row in range(3):
        expected = oracle.forward(CONFIGS["grouped"], params, TOKENS[row]).logits
        check(logits[row], expected, 8 * float(jnp.finfo(dtype).eps))


def test_rope_frequencies_against_their_formulas() -> None:
    """Llama 3.1's own numbers: 64 pairs, of which some are kept, some divided by 8, some on the ramp."""
    big = TransformerConfig(
        **BASE | {"head_dim": 128, "rope_theta": 500000.0, "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 8192)}
    )
    speeds, plain = frequencies(big), 500000.0 ** -(np.arange(64) / 64)
    np.testing.assert_allclose(speeds, oracle.rope_speeds(big), rtol=1e-13)
    kept, divided = np.isclose(speeds, plain), np.isclose(speeds, plain / 8)
    assert kept.sum() + divided.sum() < 64
    assert kept[:20].all()
    assert divided[-20:].all()
    for name in ("freqs", "grouped", "scaled"):
        np.testing.assert_allclose(frequencies(CONFIGS[name]), oracle.rope_speeds(CONFIGS[name]), rtol=1e-13)
    np.testing.assert_allclose(frequencies(CONFIGS["freqs"]) * [1, 1.5, 4, 8], frequencies(CONFIGS["grouped"]))


def decode(name: str, params: Any, prompts: Any, n: int, **options: Any) -> jd.Generated:
    chosen = jd.Settings(max_new_tokens=n, temperature=options.pop("temperature", 0.0))
    return jd.generate(transformer(CONFIGS[name]), params, prompts, settings=chosen, **options)


PROMPTS = [TOKENS[0, :7].tolist(), TOKENS[1, :2].tolist(), TOKENS[2, :5].tolist()]


def test_S7_3_greedy_tokens_equal_those_of_recomputation() -> None:
    """In a ragged batch, and left-padded with another padding id."""
    params = params_of("scaled")
    wanted = [oracle.greedy(CONFIGS["scaled"], weights("scaled"), p, 6) for p in PROMPTS]
    assert min(min(w.gaps) for w in wanted) > 1e-4, "the test needs clear choices"
    padded = np.array([[V - 1] * (7 - len(p)) + p for p in PROMPTS])
    lengths = np.array([len(p) for p in PROMPTS])
    for out in (
        decode("scaled", params, PROMPTS, 6),
        decode("scaled", params, padded, 6, lengths=lengths, padding="left"),
    ):
        assert out.to_lists() == [w.tokens for w in wanted]
        np.testing.assert_allclose(out.logprob, [w.logprobs for w in wanted], atol=1e-5)
        np.testing.assert_allclose(out.margin, [w.gaps for w in wanted], atol=1e-4)


def test_S7_3_generation_in_float64() -> None:
    """A full cache: the row that fills it gets every token that fits."""
    wanted = [oracle.greedy(CONFIGS["grouped"], weights("grouped"), p, 6) for p in PROMPTS]
    with jax.enable_x64(True):
        out = decode("grouped", params_of("grouped", jnp.float64), PROMPTS, 6, cache_len=13)
        assert out.logprob.dtype == out.margin.dtype == np.float64
    assert out.to_lists() == [w.tokens for w in wanted]
    np.testing.assert_allclose(out.logprob, [w.logprobs for w in wanted], rtol=1e-12)


def test_forks_of_shared_segments_equal_separate_recomputation() -> None:
    """Two prompts shared, forked in three, fed, shared again, forked in two, fed: like twelve texts from scratch."""
    config, params = CONFIGS["grouped"], params_of("grouped")
    rng, model = np.random.default_rng(5), transformer(CONFIGS["grouped"])
    lengths = np.array([7, 4], np.int32)
    _, cache = apply(model, params, TOKENS[:2, :8], fresh("grouped", params, 9, 2), lengths)
    text = [TOKENS[row, :n].tolist() for row, n in enumerate(lengths)]
    for copies in (3, 2):
        cache = jd.repeat_rows(kvcache.share(cache, 6), copies)
        text = [list(t) for t in text for _ in range(copies)]
        more, n = rng.integers(0, V, (len(text), 4)), rng.integers(1, 5, len(text)).astype(np.int32)
        logits, cache = apply(model, params, more, cache, n)
        for row, new in enumerate(text):
            new += more[row, : n[row]].tolist()
            expected = oracle.forward(config, weights("grouped"), new).logits[-n[row] :]
            check(np.asarray(logits[row, : n[row]]), expected, F32)
    assert len(cache.shared) == 2
    assert cache.total.tolist() == [len(t) for t in text]

    cut = np.array([len(t) - i for i, t in enumerate(text)], np.int32).clip(2)  # some rows lose a level, or part of one
    short = jd.take_rows(kvcache.truncate(cache, cut), np.arange(12)[::-1].copy())
    more = rng.integers(0, V, (12, 4))
    logits, after = apply(model, params, more, short)
    for row in range(12):
        old = text[11 - row][: cut[11 - row]]
        expected = oracle.forward(config, weights("grouped"), old + more[row].tolist()).logits[-4:]
        check(np.asarray(logits[row]), expected, F32)
        assert after.total[row] == len(old) + 4


def test_params_have_the_documented_shapes_and_variances() -> None:
    for config in CONFIGS.values():
        params = jax.eval_shape(functools.partial(init_params, config, dtype=jnp.bfloat16), jax.random.key(0))
        assert jax.tree.map(lambda x: x.shape, params) == param_shapes(config)
        assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(jnp.bfloat16)}
        assert ("head" in params) is not config.tied
    big = init_params(TransformerConfig(**BASE | {"d_model": 256, "n_layers": 1}), jax.random.key(0))
    assert float(jnp.var(big["layers"][0]["qkv"])) == pytest.approx(1 / 256, rel=0.05)
    assert transformer(TransformerConfig(**BASE)) is transformer(TransformerConfig(**BASE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_kv_heads": 3}, "n_heads: expected a multiple of n_kv_heads, got 4"),
        ({"head_dim": 7}, "head_dim: expected an even number"),
        ({"d_mlp": 0}, "d_mlp: expected a positive whole number, got 0"),
        ({"rope_freqs": (1.0,)}, "rope_freqs: expected head_dim / 2 numbers"),
    ],
)
def test_a_config_that_cannot_work_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**BASE | change)


def test_a_cache_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="max_len: expected at most the context of 4096 tokens, got 4097"):
        fresh("grouped", params_of("grouped"), 4097)
