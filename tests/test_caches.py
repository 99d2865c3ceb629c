"""Caches as values: refilled from a change on, saved and loaded, with windows and in int8, under every strategy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxdecode as jd
from jaxdecode import kvcache
from jaxdecode.engine import Engine, Options, Request
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.testing import markov_model

CONFIG = TransformerConfig(23, 16, 2, 4, 2, 4, 24, 256)
BAND = dataclasses.replace(CONFIG, sliding_window=(6, None), attention_sinks=2)
PARAMS = init_params(CONFIG, jax.random.key(0))
RING = transformer(BAND, window_slack=5)
WIDE = transformer(BAND, window_slack=200)  # never a ring: attention with a band mask
MODELS = {"plain": transformer(CONFIG), "ring": RING, "int8": transformer(CONFIG, cache_dtype="int8")}
MODELS["int4"] = transformer(CONFIG, cache_dtype="int4")
PROMPTS = [[5, 7, 11, 2, 3, 19, 4, 8, 22, 1, 0, 6, 13], [9, 14, 3]]
OLD = [[*PROMPTS[0][:10], 9, 9], [9, 14, 3, 1, 2, 2, 2, 2]]


def test_a_ring_is_the_band_mask_through_the_whole_model() -> None:
    """Prefill in one pass and step by step, far beyond the window, against a float64 model that masks a band."""
    tokens = np.random.default_rng(0).integers(0, 23, (2, 24)).astype(np.int32)
    apply = jax.jit(RING.apply)
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), PARAMS)
    wanted = [oracle.forward(BAND, weights, row).logits for row in tokens]
    for width in (24, 9, 1):
        cache, out = RING.init_cache(PARAMS, 2, 40), []
        for i in range(0, 24, width):
            logits, cache = apply(PARAMS, tokens[:, i : i + width], cache)
            out.append(logits)
        np.testing.assert_allclose(np.concatenate(out, 1), wanted, rtol=0, atol=2e-5)
    assert [sum(b.v.shape[2] for b in layer) for layer in cache.layers] == [13, 40]
    assert np.abs(np.array(wanted) - [oracle.forward(CONFIG, weights, row).logits for row in tokens]).max() > 0.1


STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"settings": jd.Settings(max_new_tokens=20, temperature=0)},
    "samples": {"settings": jd.Settings(max_new_tokens=20, num_samples=3), "key": jax.random.key(1)},
    "beams": {"settings": jd.Settings(max_new_tokens=20, beams=3, eos=[4])},
    "prompt lookup": {"settings": jd.Settings(max_new_tokens=20, temperature=0, prompt_lookup=4)},
    "longer drafts than slack": {"settings": jd.Settings(max_new_tokens=20, temperature=0, prompt_lookup=7)},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_goes_on_in_a_ring(strategy: str) -> None:
    """The tokens are those of a cache that keeps everything and masks a band."""
    ring, wide = (jd.generate(model, PARAMS, PROMPTS, **STRATEGIES[strategy]) for model in (RING, WIDE))
    assert ring.to_lists() == wide.to_lists()
    np.testing.assert_allclose(ring.logprob, wide.logprob, atol=1e-5)


@pytest.mark.parametrize("model", [RING, MODELS["int4"]], ids=["ring", "int4"])
def test_a_model_drafts_for_itself(model: jd.Model) -> None:
    """All that it drafts is right, with the draft's own cache cut back each time."""
    settings = jd.Settings(max_new_tokens=16, temperature=0, draft_length=3)
    result = jd.generate(model, PARAMS, PROMPTS, settings=settings, draft=(model, PARAMS))
    plain = jd.generate(model, PARAMS, PROMPTS, settings=jd.Settings(max_new_tokens=16, temperature=0))
    assert result.to_lists() == plain.to_lists()
    assert result.acceptance is not None
    assert result.acceptance.accepted.tolist() == result.acceptance.drafted.tolist()
    assert np.all(result.acceptance.drafted >= 3)


@pytest.mark.parametrize("name", ["ring", "int8"])
def test_engine_rows_are_those_of_generate(name: str) -> None:
    """More rows than slots, with a prefix in common, which a ring does not share and int8 does."""
    model, settings = MODELS[name], jd.Settings(max_new_tokens=12, temperature=0)
    head = list(range(20)) + list(range(20))
    prompts = [[*head, i] for i in range(4)] + [[i, 3] for i in range(3)]
    rows = Engine(model, PARAMS, options=Options(slots=2, chunk=16))
    found = {r.request.id: r.out for r in rows.serve(Request(i, p, settings) for i, p in enumerate(prompts))}
    for i, prompt in enumerate(prompts):
        alone = jd.generate(model, PARAMS, [prompt], settings=settings)
        assert found[i].to_lists() == alone.to_lists(), f"prompt {i}"


@pytest.mark.parametrize("name", MODELS)
def test_S7_4_refill_computes_what_follows_the_first_change(name: str) -> None:
    """Row 0 changes at token 10, row 1 loses its end; a ring that is too far is filled from the start."""
    model = MODELS[name]
    cache = jd.prefill(model, PARAMS, OLD, max_len=40)
    refilled = jd.refill(model, PARAMS, cache, OLD, PROMPTS)
    anew = jd.prefill(model, PARAMS, PROMPTS, max_len=40)
    assert refilled.total.tolist() == [13, 3]
    settings = jd.Settings(max_new_tokens=8, temperature=0)
    longer = [[*p, 1] for p in PROMPTS]
    one, other = (jd.generate(model, PARAMS, longer, settings=settings, cache=c) for c in (refilled, anew))
    assert one.to_lists() == other.to_lists()
    np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-5)
    same = jd.refill(model, PARAMS, refilled, PROMPTS, PROMPTS)
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (same, refilled)), strict=True))


def test_refill_of_a_cache_that_cannot_be_cut_begins_anew() -> None:
    model, table = markov_model(), jnp.log(jnp.eye(23) + 0.1)
    cache = jd.prefill(model, table, OLD, max_len=40)
    refilled = jd.refill(model, table, cache, OLD, [PROMPTS[0], [*OLD[1], 5]])
    assert refilled["length"].tolist() == [13, 9]
    assert refilled["last"][:, -1].tolist() == [13, 5]


def test_refill_refuses_what_does_not_fit() -> None:
    model = MODELS["plain"]
    cache = jd.prefill(model, PARAMS, OLD, max_len=14)
    for held, prompts, message in (
        (PROMPTS, PROMPTS, r"held: expected the tokens of the cache, \[12, 8\] of them, got \[13, 3\]"),
        (OLD, OLD[:1], "prompts: expected 2 of them, one a row, got 1"),
        (OLD, [OLD[0], list(range(15))], "prompts: expected at most 14 tokens a row"),
        (OLD, [OLD[0], [23]], r"prompts\[1\]: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            jd.refill(model, PARAMS, cache, held, prompts)


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_cache_is_the_same_bits_in_any_size(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    cache = jd.prefill(model, PARAMS, PROMPTS, max_len=200)
    path = jd.save_cache(tmp_path / "prefix.safetensors", model, PARAMS, cache, PROMPTS)
    assert path.stat().st_size < 16_000, "200 slots a row would be more"
    settings = jd.Settings(max_new_tokens=8, temperature=0)
    longer = [[*p, 1] for p in PROMPTS]
    expected = jd.generate(model, PARAMS, longer, settings=settings, cache=cache)
    for size in (100, 250):
        loaded, held = jd.load_cache(path, model, PARAMS, max_len=size)
        assert held == PROMPTS
        assert loaded.capacity == size
        result = jd.generate(model, PARAMS, longer, settings=settings, cache=loaded)
        assert result.to_lists() == expected.to_lists()
    tight, _ = jd.load_cache(path, model, PARAMS)
    small = jax.tree.leaves(kvcache.resize(cache, tight.capacity))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(tight), small, strict=True))


def test_a_cache_of_another_kind_is_saved_too(tmp_path: Path) -> None:
    model, table = markov_model(), jnp.eye(23)
    cache = jd.prefill(model, table, PROMPTS, max_len=40)
    path = jd.save_cache(tmp_path / "state", model, table, cache, PROMPTS)
    loaded, held = jd.load_cache(path, model, table)
    assert held == PROMPTS
    assert jax.tree.map(np.ndarray.tolist, jax.device_get(loaded)) == jax.tree.map(
        np.ndarray.tolist, jax.device_get(cache)
    )


def test_load_cache_names_what_is_wrong(tmp_path: Path) -> None:
    model = MODELS["plain"]
    cache = jd.prefill(model, PARAMS, PROMPTS, max_len=20)
    path = jd.save_cache(tmp_path / "prefix", model, PARAMS, cache, PROMPTS)
    others = init_params(CONFIG, jax.random.key(1))
    with pytest.raises(ValueError, match="params: expected the params that the cache was made with"):
        jd.load_cache(path, model, others)
    with pytest.raises(ValueError, match="expected a cache of this model, of the same type, got others for"):
        jd.load_cache(path, MODELS["int8"], PARAMS)
    with pytest.raises(ValueError, match="max_len: expected at least the 13 tokens that are held, got 12"):
        jd.load_cache(path, model, PARAMS, max_len=12)
    with pytest.raises(ValueError, match="held: expected the tokens of the cache"):
        jd.save_cache(path, model, PARAMS, cache, OLD)
    text = path.read_bytes()
    for damaged, message in (
        (text[:-1], "data: expected"),
        (text.replace(b"jaxdecode-cache", b"jaxdecode-other"), "expected a cache written by save_cache"),
        (text.replace(b"max_len", b"min_len"), "cache: expected rows, max_len and the prompts in it"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            jd.load_cache(path, model, PARAMS)


def test_cache_dtype_is_checked() -> None:
    with pytest.raises(
        ValueError, match="cache_dtype: expected one of float32, bfloat16, float16, int8, int4, got int2"
    ):
        transformer(CONFIG, cache_dtype="int2")
    with pytest.raises(ValueError, match="window_slack: expected a whole number >= 0, got -1"):
        transformer(CONFIG, window_slack=-1)
    with pytest.raises(ValueError, match="sliding_window: expected a positive whole number, or one or None a layer"):
        dataclasses.replace(CONFIG, sliding_window=(3,))
    assert transformer(CONFIG, cache_dtype="float16").init_cache(PARAMS, 1, 8).layers[0][0].k.dtype == np.float16
