"""Mixtures of experts: exactly the chosen ones, weighted, at a cost that follows their number."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import multiplications

import jaxdecode as jd
from jaxdecode.models import experts
from jaxdecode.models.config import TransformerConfig, init_params

D, F, E = 12, 20, 6
SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "d_model": D,
    "n_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 1,
    "head_dim": 6,
    "d_mlp": F,
    "context_length": 64,
    "n_experts": E,
}


def config_of(k: int, *, normed: bool = True) -> TransformerConfig:
    return TransformerConfig(**SIZES, experts_per_token=k, norm_expert_weights=normed)


@functools.cache
def weights() -> dict[str, jax.Array]:
    layer = init_params(config_of(2), jax.random.key(0))["layers"][0]
    return {name: values for name, values in layer.items() if name.startswith(("router", "expert"))}


@functools.partial(jax.jit, static_argnums=0)
def mix(config: TransformerConfig, params: Any, x: Any) -> jax.Array:
    return experts.mix(config, params, x, jax.nn.silu)


def oracle(config: TransformerConfig, x: np.ndarray) -> np.ndarray:
    """Every token by itself through the experts it prefers, in float64."""
    p = {name: np.asarray(values, np.float64) for name, values in weights().items()}
    gates, ups, downs = p["expert_gate"].reshape(E, F, D), p["expert_up"].reshape(E, F, D), p["expert_down"]
    columns = []
    for token in x.T.astype(np.float64):
        scores = p["router"] @ token
        law = np.exp(scores) / np.exp(scores).sum()
        best = sorted(range(E), key=lambda e: (-law[e], e))[: config.experts_per_token]
        total = law[best].sum() if config.norm_expert_weights else 1.0
        out = np.zeros(D)
        for e in best:
            gate = gates[e] @ token
            out += law[e] / total * (downs.reshape(E, D, F)[e] @ (gate / (1 + np.exp(-gate)) * (ups[e] @ token)))
        columns.append(out)
    return np.stack(columns, 1)


@pytest.mark.parametrize(("k", "normed"), [(1, True), (2, True), (2, False), (E, False)])
def test_each_token_is_the_sum_of_its_own_experts(k: int, normed: bool) -> None:
    config = config_of(k, normed=normed)
    for rows in (1, 3, 45):
        x = np.random.default_rng(rows).normal(size=(D, rows)).astype(np.float32)
        np.testing.assert_allclose(mix(config, weights(), x), oracle(config, x), atol=2e-6)


def test_all_tokens_to_one_expert_and_tokens_that_are_alike() -> None:
    x = np.repeat(np.random.default_rng(1).normal(size=(D, 1)), 45, axis=1).astype(np.float32)
    for k in (1, 2):
        np.testing.assert_allclose(mix(config_of(k), weights(), x), oracle(config_of(k), x), atol=2e-6)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit at one shape: in other places, and beside tokens that are not numbers."""
    x = np.random.default_rng(2).normal(size=(D, 45)).astype(np.float32)
    order = np.random.default_rng(3).permutation(45)
    plain, moved = mix(config_of(2), weights(), x), mix(config_of(2), weights(), x[:, order])
    np.testing.assert_array_equal(plain[:, order], moved)
    broken = x.copy()
    broken[:, ::7] = np.nan
    out = np.asarray(mix(config_of(2), weights(), broken))
    sound = np.arange(45) % 7 != 0
    np.testing.assert_array_equal(out[:, sound], plain[:, sound])
    assert np.isnan(out[:, ~sound]).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 300])
def test_the_work_follows_the_experts_that_are_chosen(rows: int) -> None:
    k, each = 2, 3 * D * F
    x = jax.ShapeDtypeStruct((D, rows), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda p, x: experts.mix(config_of(k), p, x, jax.nn.silu))(weights(), x).jaxpr
    routing, work = rows * E * D, multiplications(jaxpr)
    if rows * k <= E:
        assert work == routing + rows * k * each
    else:
        assert routing + rows * k * each <= work <= routing + 2 * rows * k * each + E * each


@pytest.mark.parametrize("scheme", ["int8", "int8_weights"])
def test_quantized_experts_are_nearly_the_same(scheme: Any) -> None:
    x = np.random.default_rng(4).normal(size=(D, 3)).astype(np.float32)
    kept = {"router": weights()["router"]}  # another expert is another output
    quantized = {**jd.quantize(weights(), scheme), **kept}
    exact = np.asarray(mix(config_of(2), weights(), x))
    got = np.asarray(mix(config_of(2), quantized, x))
    assert 0 < np.abs(got - exact).max() < 0.03 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts_per_token": 0}, "experts_per_token: expected from 1 to the 6 experts, got 0"),
        ({"experts_per_token": 7}, "experts_per_token"),
        ({"experts_per_token": 2, "gated": False}, "n_experts"),
        ({"n_experts": 0, "experts_per_token": 2}, "experts_per_token"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**SIZES | fields)
