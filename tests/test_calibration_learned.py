"""What follows and precedes calibrated rounding: channel scales and learned corrections."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdecode as jd
from jaxdecode import calibration, linear
from jaxdecode.calibration.channels import divided, links
from jaxdecode.calibration.tuning import tune
from jaxdecode.evaluation import evaluate
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.observed import rounding_costs
from jaxdecode.quant import unpack

CONFIG = TransformerConfig(61, 24, 3, 4, 2, 6, 40, context_length=64, sliding_window=(8, None, None))
PARAMS = init_params(CONFIG, jax.random.key(1))
TOKENS = np.random.default_rng(0).integers(0, 61, (6, 32))


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


# Channels


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ({"qkv_bias": True}, ("qkv", "gate_up", "out", "down")),
        ({"norm": "layer", "gated": False, "mlp_bias": True, "parallel": True}, ("qkv", "up", "out")),
        ({"norm_place": "after", "qk_norm": True, "mlp_bias": True}, ("out", "down")),
        ({"n_experts": 2, "experts_per_token": 1}, ("qkv", "out")),
    ],
)
def test_channels_divided_by_powers_of_2_are_the_same_model_to_the_last_bit(kind: Any, expected: Any) -> None:
    config = dataclasses.replace(CONFIG, n_layers=1, sliding_window=None, **kind)
    params, rng = init_params(config, jax.random.key(7)), np.random.default_rng(8)
    params = jax.tree.map(lambda x: x + 0.1 if x.ndim == 1 else x, params)  # biases that are not 0
    assert links(config) == expected
    layer = params["layers"][0]
    by = {name: 2.0 ** rng.integers(-3, 4, layer[name].shape[1]) for name in expected}
    by["out"] = by["out"].reshape(2, 2, 6)[:, :1].repeat(2, 1).reshape(-1)
    other = divided(config, layer, by)
    assert all((other[name] != layer[name]).any() for name in expected)
    model = transformer(config)

    @jax.jit
    def logits(params: Any) -> jax.Array:
        return model.apply(params, TOKENS[:2], model.init_cache(params, 2, 32))[0]

    np.testing.assert_array_equal(logits({**params, "layers": (other,)}), logits(params))


# What is learned


def test_a_learned_correction_brings_the_laws_nearer_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(text: str, fraction: float) -> None:
        if "step 11 of" in text:
            raise Killed

    model, key = transformer(CONFIG), jax.random.key(4)
    quantized = {k: jd.quantize(v, "int8_zero_g8" if k == "embed" else "int2_affine_g8") for k, v in PARAMS.items()}
    how: Any = {"steps": 14, "rate": 5e-3, "code_rate": 0.01, "key": key}
    with pytest.raises(Killed):
        tune(model, PARAMS, quantized, TOKENS, **how, folder=tmp_path / "work", progress=kill)
    assert len(list((tmp_path / "work").glob("0*.npz"))) == 1
    tuned = tune(model, PARAMS, quantized, TOKENS, **how, folder=tmp_path / "work")
    same(tune(model, PARAMS, quantized, TOKENS, **how), tuned)
    ids = TOKENS.reshape(-1).tolist()
    before, after = evaluate([(model, p) for p in (PARAMS, quantized, tuned)], ids, window=32)[1:]
    assert after.kl is not None
    assert before.kl is not None
    assert after.kl < 0.95 * before.kl
    same(tuned["embed"], quantized["embed"])
    kept = tune(model, PARAMS, quantized, TOKENS, steps=2, key=key)
    for a, b, c in zip(tuned["layers"], kept["layers"], quantized["layers"], strict=True):
        codes = [unpack(layer["qkv"])[0] for layer in (a, b, c)]
        assert 0.001 < (codes[0] != codes[2]).mean() < 0.2
        np.testing.assert_array_equal(codes[1], codes[2])
        assert (a["attn_norm"] != c["attn_norm"]).any()
        assert (b["attn_norm"] != c["attn_norm"]).any()


def test_codes_that_are_learned_begin_where_calibration_found_them_best() -> None:
    found = calibration.calibrate(CONFIG, PARAMS, TOKENS, "int3_affine_g8")
    assert set(found.places) == set(found.costs)
    for name, place in found.places.items():
        assert place.dtype == np.float16
        assert (np.abs(place) <= 0.5).all()
        assert (np.abs(place) < 0.49).mean() > 0.8, name
    assert found.exact is not None
    same(found.exact, PARAMS)
    how: Any = {"steps": 1, "rate": 0, "key": jax.random.key(0)}
    moved = []
    for places in ({}, found.places):  # by the first step, of at most half of a step of the grid
        tuned = tune(transformer(CONFIG), PARAMS, found.params, TOKENS, **how, code_rate=0.05, places=places)
        pairs = [
            (unpack(x["down"])[0], unpack(y["down"])[0])
            for x, y in zip(tuned["layers"], found.params["layers"], strict=True)
        ]
        moved.append(np.mean([(a != b).mean() for a, b in pairs]))
    assert 0 < moved[1] < moved[0]


def test_int8_is_calibrated_with_channels_balanced() -> None:
    """One channel of every norm is large, as the real model has them: it no longer takes the levels of the others."""
    layers = tuple({**layer, "attn_norm": layer["attn_norm"].at[3].set(60.0)} for layer in PARAMS["layers"])
    params, model = {**PARAMS, "layers": layers}, transformer(CONFIG)
    found = calibration.calibrate(CONFIG, params, TOKENS, "int8", others="int8", unrounded_above=np.inf)
    assert all(cost.calibrated <= cost.rounding for cost in found.costs.values())
    assert {str(layer["down"].scheme) for layer in found.params["layers"]} == {"int8"}
    assert all(layer["qkv"].codes.min() >= -127 for layer in found.params["layers"])
    ids = np.random.default_rng(10).integers(0, 61, 256).tolist()
    runs = [(model, p) for p in (params, found.exact, jd.quantize(params, "int8"), found.params)]
    _, exact, rounded, ours = evaluate(runs, ids, window=32)
    assert exact.kl == 0
    assert ours.kl is not None
    assert rounded.kl is not None
    assert ours.kl < 0.7 * rounded.kl


def test_what_rounding_activations_costs_is_foretold() -> None:
    """Half of the mean square of what it changes, of one product and of one that follows it."""
    first, second = (0.2 * jax.random.normal(jax.random.key(i), (40, 40)) for i in range(2))
    x, toward = jax.random.normal(jax.random.key(2), (40, 512)), jax.random.normal(jax.random.key(3), (40, 512))

    def loss(params: Any, rounds: Any = None) -> jax.Array:
        y = x
        for name in ("first", "second"):
            if rounds == name:
                step = jnp.abs(y).max(0, keepdims=True) / 127
                y = jnp.round(y / step) * step
            y = jnp.tanh(linear.matmul(params[name], y))
        return (toward * y).sum(0)

    params = {"first": first, "second": second, "scale": jnp.ones(3)}
    costs = jax.jit(functools.partial(rounding_costs, lambda params: loss(params).sum()))(params)
    assert costs["scale"] is None
    for name in ("first", "second"):
        measured = float(jnp.square(loss(params, name) - loss(params)).sum() / 2)
        assert abs(costs[name] / measured - 1) < 0.15, name


def test_matrices_that_suffer_most_get_activations_that_are_not_rounded() -> None:
    def schemes(found: calibration.Calibrated) -> dict[str, str]:
        named = {"embed": found.params["embed"]}
        for i, layer in enumerate(found.params["layers"]):
            named |= {f"layers.{i}.{name}": w for name, w in layer.items() if isinstance(w, jd.QTensor)}
        return {name: str(w.scheme) for name, w in named.items()}

    model, ids = transformer(CONFIG), np.random.default_rng(10).integers(0, 61, 256).tolist()
    how: Any = {"others": "int8", "rounds": 1}
    none = calibration.calibrate(CONFIG, PARAMS, TOKENS, "int8", **how, unrounded_above=np.inf)
    assert set(schemes(none).values()) == {"int8"}
    assert none.activations.keys() == schemes(none).keys()
    median = float(np.median(list(none.activations.values())))
    some, every = (calibration.calibrate(CONFIG, PARAMS, TOKENS, "int8", **how, unrounded_above=x) for x in (median, 0))
    assert set(schemes(every).values()) == {"int8_weights"}
    assert {k for k, v in schemes(some).items() if v == "int8"} == {
        k for k, v in none.activations.items() if v <= median
    }
    one, other = (x.params["layers"][0]["down"].codes for x in (none, every))
    assert (one == other).all()
    runs = [(model, PARAMS), *((model, found.params) for found in (none, some, every))]
    kl = [found.kl for found in evaluate(runs, ids, window=32)[1:]]
    assert kl[0] > kl[1] > kl[2]
    with pytest.raises(ValueError, match=r"unrounded_above: expected a number >= 0, got -1"):
        calibration.calibrate(CONFIG, PARAMS, TOKENS, "int8", unrounded_above=-1)


def test_the_head_may_be_let_off_alone_and_tuning_keeps_what_bytes_round() -> None:
    """Layers that are packed, and tuned beside a head that rounds activations or not: another loss."""
    how: Any = {"others": "int8", "rounds": 1}
    found, other = (
        calibration.calibrate(CONFIG, PARAMS, TOKENS, "int4_even_g8", **how, unrounded_above=x) for x in (np.inf, 0)
    )
    assert list(found.activations) == ["embed"]
    assert [str(x.params["embed"].scheme) for x in (found, other)] == ["int8", "int8_weights"]
    model, key = transformer(CONFIG), jax.random.key(3)
    tuned = [tune(model, PARAMS, x.params, TOKENS, steps=2, key=key)["norm"] for x in (found, other)]
    assert (tuned[0] != tuned[1]).any()
    with pytest.raises(ValueError, match=r"tokens: expected at most 64 in a row, the context, got 65"):
        calibration.calibrate(CONFIG, PARAMS, np.zeros((2, 65), np.int32), "int8")
