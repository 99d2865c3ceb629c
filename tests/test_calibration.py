"""Calibrated rounding: never dearer than plain rounding, optimal where that is known, resumable to the same bits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdecode as jd
from jaxdecode import calibration, kvcache, linear
from jaxdecode.calibration import rounding
from jaxdecode.calibration.grids import expand, refit, rounded, search
from jaxdecode.calibration.stages import transformer_stages
from jaxdecode.models.transformer import TransformerConfig, init_params, layerwise, transformer
from jaxdecode.observed import second_moments
from jaxdecode.quant import parse_scheme, unpack, value_of

SCHEMES = ["int4", "int3_affine_g16", "int2_zero_g32", "int3_channel", "int1_affine_g7"]
CONFIG = TransformerConfig(61, 24, 3, 4, 2, 6, 40, context_length=64, sliding_window=(8, None, None))
PARAMS = init_params(CONFIG, jax.random.key(1))
TOKENS = np.random.default_rng(0).integers(0, 61, (6, 32))


def uniform(name: str) -> Any:
    return parse_scheme("scheme", name)


def problem(n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Weights w[N,K] and H of inputs that hang together, some much larger than others, one always zero."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(k, k)) @ rng.normal(size=(k, 4 * k)) * np.exp(rng.normal(size=(k, 1)))
    x[k // 2] = 0
    return rng.normal(size=(n, k)).astype(np.float32), rounding.damped(x @ x.T, 4 * k)


def exact_cost(w: np.ndarray, h: np.ndarray, found: Any, scheme: Any) -> np.ndarray:
    codes, scale, offset = found[:3]
    size = w.shape[1] if scheme.group == "channel" else scheme.group
    error = w.astype(np.float64) - value_of(codes, *(expand(g, w.shape[1], size) for g in (scale, offset)))
    return np.einsum("nk,kl,nl->n", error, h, error)


# One matrix


@pytest.mark.parametrize("name", SCHEMES)
def test_no_row_costs_more_than_plain_rounding_and_all_together_much_less(name: str) -> None:
    scheme, (w, h) = uniform(name), problem(13, 70)
    w[3] = 0
    w[4] = 0.25
    found = rounding.round_matrix(w, h, scheme)
    assert found.codes.dtype == np.uint8
    assert found.codes.max() <= scheme.last_code
    ours, plain = exact_cost(w, h, found, scheme), exact_cost(w, h, rounded(w, scheme), scheme)
    np.testing.assert_allclose(found.cost, ours, rtol=1e-3, atol=1e-4 * plain.max())
    np.testing.assert_allclose(found.rounding_cost, plain, rtol=1e-3, atol=1e-4 * plain.max())
    assert (ours <= plain * (1 + 1e-5) + 1e-5 * plain.max()).all()
    assert ours.sum() < 0.6 * plain.sum()
    assert not value_of(found.codes, *(expand(g, 70, 70 if scheme.group == "channel" else scheme.group)
                                       for g in (found.scale, found.offset)))[3].any()  # fmt: skip
    q = jd.quant.pack(*(jnp.asarray(x) for x in found[:3]), scheme)
    for kept, given in zip(unpack(q), found[:3], strict=True):
        np.testing.assert_array_equal(kept, given)  # the grids are such that storing them loses nothing


def test_feedback_is_rounding_column_by_column_with_the_rest_solved_again() -> None:
    """The oracle minimizes e H e over all columns that are still free, by a solver, after each column is rounded."""
    scheme, (w, h) = uniform("int3_affine_g8"), problem(5, 20, seed=1)
    scale, offset = search(w, np.diag(h).astype(np.float32), scheme)
    s, o = (expand(g, 20, 8).astype(np.float64) for g in (scale, offset))
    expected = np.zeros((5, 20), np.int64)
    for row in range(5):
        error, order = np.zeros(20), np.argsort(-np.diag(h), kind="stable")
        for step, k in enumerate(order):
            free = order[step:]
            done = order[:step]
            # what the free columns would be if they were real numbers
            best = np.linalg.solve(h[np.ix_(free, free)], -h[np.ix_(free, done)] @ error[done])
            target = w[row, k] - best[0]
            expected[row, k] = np.clip(np.rint((target - o[row, k]) / s[row, k]), 0, 7)
            error[k] = w[row, k] - (s[row, k] * expected[row, k] + o[row, k])
    np.testing.assert_array_equal(rounding.feedback(w, h, scale, offset, scheme), expected)


def test_tiny_cases_against_every_choice_of_codes() -> None:
    """4 columns of 2 bits: 256 choices. Ours is the best of all in most rows, and close in the others."""
    scheme, (w, h) = uniform("int2_affine_g4"), problem(60, 4, seed=2)
    grids = rounded(w, scheme)[1:]
    every = np.array(list(itertools.product(range(4), repeat=4)), np.float32)
    values = every[None] * grids[0][:, :, None] + grids[1][:, :, None]
    error = w[:, None] - values
    best = np.einsum("nck,kl,ncl->nc", error, h, error).min(axis=1)
    codes = rounding.descend(w, h, rounding.feedback(w, h, *grids, scheme), *grids, scheme)
    ours = exact_cost(w, h, (codes, *grids), scheme)
    assert (ours >= best * (1 - 1e-5)).all()
    assert (ours <= best * (1 + 1e-4)).mean() > 0.8
    assert ours.sum() < 1.1 * best.sum()
    alone = np.diag(np.diag(h))  # inputs that do not hang together: the nearest code is the best
    np.testing.assert_array_equal(rounding.feedback(w, alone, *grids, scheme), rounded(w, scheme)[0])


@pytest.mark.parametrize("name", SCHEMES)
def test_each_step_lowers_the_cost(name: str) -> None:
    scheme, (w, h) = uniform(name), problem(9, 70, seed=3)
    start = rounded(w, scheme)
    moved = rounding.descend(w, h, *start, scheme)
    before, after = exact_cost(w, h, start, scheme), exact_cost(w, h, (moved, *start[1:]), scheme)
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < 0.9 * before.sum()
    fitted = (moved, *refit(w, h.astype(np.float32), moved, *start[1:], scheme))
    last = exact_cost(w, h, fitted, scheme)
    assert (last <= after * 1.01).all()  # the grids are kept in few bits
    assert last.sum() < after.sum()


def test_refit_is_the_least_squares_solution() -> None:
    scheme, (w, h) = uniform("int4_affine_g8"), problem(4, 20, seed=4)
    codes, scale, offset = rounded(w, scheme)
    got = refit(w, h.astype(np.float32), codes, scale, offset, scheme)
    root = np.linalg.cholesky(h).T  # |root e|^2 = e H e
    group = np.arange(20) // 8
    for row in range(4):
        basis = np.zeros((20, 6))
        basis[np.arange(20), group] = codes[row]
        basis[np.arange(20), 3 + group] = 1
        expected = np.linalg.lstsq(root @ basis, root @ w[row], rcond=None)[0]
        np.testing.assert_allclose(np.concatenate([got[0][row], got[1][row]]), expected, rtol=5e-3, atol=5e-3)


def test_search_weighs_columns() -> None:
    """A column that matters keeps its value; with equal weights the range shrinks around the many."""
    scheme = uniform("int2_g16")
    w = np.random.default_rng(5).normal(size=(2, 16)).astype(np.float32)
    w[:, 0] = 9
    heavy = np.ones(16, np.float32)
    heavy[0] = 1e4
    for weight, largest in ((heavy, 0.05), (np.ones(16, np.float32), 9)):
        scale, offset = search(w, weight, scheme)
        assert (np.abs(scale * 3 + offset - 9) < largest).all()
    error = [np.abs(w - np.clip(w, o, 3 * s + o)).sum() for s, o in (search(w, np.ones(16, np.float32), scheme),)]
    assert error[0] > 0


# The inputs


def test_second_moments_of_every_product_of_a_model() -> None:
    """By a gradient, through jit and a tied head, equal to those of a forward pass written out in NumPy."""
    model = transformer(CONFIG)
    rows = TOKENS[:2, :7]

    def logits(params: Any) -> jax.Array:
        return model.apply(params, rows, model.init_cache(params, *rows.shape))[0]

    out, moments = jax.jit(lambda params: second_moments(logits, params))(PARAMS)
    np.testing.assert_allclose(out, jax.jit(logits)(PARAMS), rtol=1e-5, atol=1e-5)
    x = np.asarray(PARAMS["embed"], np.float64)[rows.reshape(-1)].T
    normed = x / np.sqrt((x**2).mean(0) + CONFIG.norm_eps)
    np.testing.assert_allclose(moments["layers"][0]["qkv"], normed @ normed.T, rtol=1e-4, atol=1e-4)
    assert moments["norm"] is None
    assert moments["embed"].shape == (24, 24)  # what the tied head multiplies
    for layer in moments["layers"]:
        for name in ("qkv", "out", "gate_up", "down"):
            h = np.asarray(layer[name])
            assert np.linalg.eigvalsh(h).min() > -1e-3
            assert np.trace(h) > 0


def test_second_moments_in_a_scan_add_up() -> None:
    w = jax.random.normal(jax.random.key(0), (4, 3))
    xs = jax.random.normal(jax.random.key(1), (5, 3, 2))

    def fn(params: Any) -> jax.Array:
        return jax.lax.scan(lambda c, x: (c + linear.matmul(params["w"], x), None), jnp.zeros((4, 2)), xs)[0]

    moment = second_moments(fn, {"w": w, "n": jnp.arange(3)})[1]["w"]
    np.testing.assert_allclose(moment, np.einsum("tkr,tlr->kl", xs, xs), rtol=1e-5)


def test_second_moments_of_pairs() -> None:
    """And what to aim at: the weights that map y to where the model maps x, by least squares."""
    rng = np.random.default_rng(6)
    w, x = rng.normal(size=(4, 3)), rng.normal(size=(3, 50))
    y = x + 0.1 * rng.normal(size=x.shape)
    both, params = jnp.asarray(np.concatenate([x, y], axis=1), jnp.float32), {"w": jnp.asarray(w, jnp.float32)}
    out, moments = second_moments(lambda p: linear.matmul(p["w"], both), params, pairs=True)
    np.testing.assert_allclose(out, w @ np.concatenate([x, y], axis=1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(moments["w"], [y @ y.T, x @ y.T], rtol=1e-4, atol=1e-4)
    means = np.array([y @ y.T, x @ y.T]) / 50
    found = rounding.aim(w, rounding.damped(y @ y.T, 50, 0.0), means)
    expected = np.linalg.lstsq(y.T, (w @ x).T, rcond=None)[0].T
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(rounding.aim(w, rounding.damped(y @ y.T, 50), means, 0.0), w, rtol=1e-6)


def test_layers_one_by_one_are_the_model() -> None:
    model, parts, rows = transformer(CONFIG), layerwise(CONFIG), TOKENS[:2, :24]
    x = parts.embed(PARAMS, rows)
    for i, layer in enumerate(PARAMS["layers"]):
        x = parts.layer(i, layer, x, 2)
    logits = model.apply(PARAMS, rows, model.init_cache(PARAMS, *rows.shape))[0]
    np.testing.assert_allclose(parts.head(PARAMS, x, 2), logits, rtol=1e-4, atol=1e-4)
    assert isinstance(model.init_cache(PARAMS, 1, 4), kvcache.KVCache)
    stages = transformer_stages(CONFIG).stages
    assert len({stage.apply for stage in stages}) == 2  # a layer with a window, and two alike without


# A model


def outputs(params: Any, rows: np.ndarray = TOKENS) -> np.ndarray:
    model = transformer(CONFIG)
    return np.asarray(model.apply(jd.dequantize(params), rows, model.init_cache(PARAMS, *rows.shape))[0])


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_calibrated_model_is_nearer_to_the_model_than_a_rounded_one() -> None:
    name = "int3_affine_g8"
    found = calibration.calibrate(CONFIG, PARAMS, TOKENS, name, others="int8_zero_g8")
    plain = {k: jd.quantize(v, "int8_zero_g8" if k == "embed" else name) for k, v in PARAMS.items()}
    exact = outputs(PARAMS)
    ours, theirs = (np.square(outputs(params) - exact).mean() for params in (found.params, plain))
    assert ours < 0.7 * theirs
    other = np.random.default_rng(9).integers(0, 61, TOKENS.shape)  # a text it was not calibrated on
    exact = outputs(PARAMS, other)
    ours, theirs = (np.square(outputs(params, other) - exact).mean() for params in (found.params, plain))
    assert ours < 0.9 * theirs
    assert set(found.costs) == {f"layers.{i}.{m}" for i in range(3) for m in ("qkv", "out", "gate_up", "down")}
    assert all(cost.calibrated <= cost.rounding for cost in found.costs.values())
    assert str(found.params["embed"].scheme) == "int8_zero_g8"
    assert found.params["layers"][0]["attn_norm"] is PARAMS["layers"][0]["attn_norm"]


def test_any_model_that_is_a_function_is_calibrated_as_one_stage() -> None:
    found = calibration.calibrate(transformer(CONFIG), PARAMS, TOKENS, "int3_affine_g8")
    assert found.params["embed"].shape == (61, 24)
    assert "embed" in found.costs  # the tied head, whose inputs are seen
    exact = outputs(PARAMS)
    plain = jd.quantize(PARAMS, "int3_affine_g8")
    ours, theirs = (np.square(outputs(params) - exact).mean() for params in (found.params, plain))
    assert ours < theirs


def test_a_kill_loses_one_stage_and_the_rest_is_the_same_bits(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill_at(stage: int) -> Any:
        def progress(text: str, fraction: float) -> None:
            if f"stage {stage} of" in text:
                raise Killed

        return progress

    how: Any = {"others": "int8_zero_g8", "correction": 0.5, "folder": tmp_path / "work"}
    whole = calibration.calibrate(CONFIG, PARAMS, TOKENS, "int3_affine_g8", **{**how, "folder": None})
    for stage in (2, 3):
        with pytest.raises(Killed):
            calibration.calibrate(CONFIG, PARAMS, TOKENS, "int3_affine_g8", **how, progress=kill_at(stage))
        assert len(list((tmp_path / "work").glob("0*.npz"))) == stage - 1
        assert len(list((tmp_path / "work").glob("after-*.npy"))) == 1
    (tmp_path / "work" / ".left").write_bytes(b"of a write that was cut off")
    resumed = calibration.calibrate(CONFIG, PARAMS, TOKENS, "int3_affine_g8", **how)
    same(resumed.params, whole.params)
    assert resumed.costs == whole.costs
    same(calibration.calibrate(CONFIG, PARAMS, TOKENS, "int3_affine_g8", **how).params, whole.params)
    with pytest.raises(ValueError, match="same work"):
        calibration.calibrate(CONFIG, PARAMS, TOKENS[:3], "int3_affine_g8", **how)


def test_windows_are_drawn_by_a_key() -> None:
    ids = list(range(100))
    first = calibration.windows_of(ids, 3, 8, jax.random.key(0))
    assert first.shape == (3, 8)
    np.testing.assert_array_equal(first, calibration.windows_of(ids, 3, 8, jax.random.key(0)))
    assert any((calibration.windows_of(ids, 3, 8, jax.random.key(s)) != first).any() for s in range(1, 4))
    np.testing.assert_array_equal(calibration.windows_of(ids, 12, 8, jax.random.key(5)).reshape(-1), ids[:96])
    with pytest.raises(ValueError, match="text: expected at least 13 windows of 8 tokens, got 100 tokens"):
        calibration.windows_of(ids, 13, 8, jax.random.key(0))


@pytest.mark.parametrize("bad", ["int4_tensor", "int9", "q4"])
def test_other_schemes_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="scheme"):
        calibration.calibrate(CONFIG, PARAMS, TOKENS, bad)


def test_bad_tokens_and_params_are_refused() -> None:
    with pytest.raises(ValueError, match="params: expected arrays"):
        calibration.calibrate(CONFIG, jd.quantize(PARAMS, "int4"), TOKENS, "int4")
    with pytest.raises(ValueError, match="correction: expected a number in"):
        calibration.calibrate(CONFIG, PARAMS, TOKENS, "int4", correction=2)
    for bad in (TOKENS[0], TOKENS + 61, TOKENS[:0], TOKENS * 1.0):
        with pytest.raises(ValueError, match="tokens"):
            calibration.calibrate(CONFIG, PARAMS, bad, "int4")
