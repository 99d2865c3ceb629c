"""Float arithmetic in one order: right, and the same whatever stands around it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdecode as jd
from jaxdecode.arithmetic import PLAIN, STEADY
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer

ULP = 2.0**-23


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-87.3, 87.3, 200_001), np.random.default_rng(0).normal(0, 3, 200_000)])
    x = x.astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    found = np.asarray(jax.jit(STEADY.exp)(x), np.float64)
    assert np.abs(found / exact - 1).max() < 2 * ULP
    assert float(STEADY.exp(jnp.float32(0))) == 1


def test_exp_at_the_ends() -> None:
    x = jnp.asarray([-jnp.inf, -1e30, -200, 200, jnp.inf, jnp.nan], jnp.float32)
    found = np.asarray(STEADY.exp(x))
    assert found[:3].tolist() == [0, 0, 0]  # what a query may not see weighs nothing at all
    assert (found[3:5] > 8e37).all()
    assert np.isnan(found[5])


def test_exp_of_other_types_is_that_of_jax() -> None:
    x = jnp.asarray([0.5, -3.0], jnp.bfloat16)
    assert STEADY.exp(x).tolist() == jnp.exp(x).tolist()
    with jax.enable_x64(True):
        wide = jnp.asarray([0.5, -3.0], jnp.float64)
        assert STEADY.exp(wide).tolist() == jnp.exp(wide).tolist()


def test_gradients_are_those_of_the_functions() -> None:
    x = jnp.linspace(-4, 4, 33, dtype=jnp.float32)
    for name in ("silu", "exp"):
        own, plain = (jax.vmap(jax.grad(getattr(a, name)))(x) for a in (STEADY, PLAIN))
        np.testing.assert_allclose(own, plain, rtol=3e-6, atol=3e-6)
    own, plain = (jax.grad(lambda x, a=a: a.softmax(a.product(x) * x, 0)[3])(x) for a in (STEADY, PLAIN))
    np.testing.assert_allclose(own, plain, rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 72, 576])
def test_sums(size: int) -> None:
    x = np.random.default_rng(size).normal(size=(2, size, 3)).astype(np.float32)
    exact = x.astype(np.float64).sum(1, keepdims=True)
    for arithmetic in (PLAIN, STEADY):
        found = np.asarray(jax.jit(lambda x, a=arithmetic: a.sum(x, 1))(x))
        assert found.shape == (2, 1, 3)
        np.testing.assert_allclose(found, exact, atol=size * ULP * 4)


def test_a_sum_is_that_of_halves_to_the_last_bit() -> None:
    x = np.random.default_rng(1).normal(size=(9, 40)).astype(np.float32)
    halves = x[:4] + x[4:8]
    halves = halves[:2] + halves[2:]
    expected = halves[0] + halves[1] + x[8]
    for columns in (1, 3, 40):  # however many stand beside it
        found = jax.jit(lambda x: STEADY.sum(x, 0))(x[:, :columns])
        assert np.asarray(found)[0].tolist() == expected[:columns].tolist()


def test_a_product_is_rounded_before_it_is_added_to() -> None:
    a, b, c = np.random.default_rng(2).normal(size=(3, 4096)).astype(np.float32)
    found = jax.jit(lambda a, b, c: STEADY.product(a * b) + c)(a, b, c)
    assert np.asarray(found).tolist() == (a * b + c).tolist()
    squares = jax.jit(lambda a: STEADY.sum(a * a, 0))(np.stack([a, b]))
    assert np.asarray(squares)[0].tolist() == (a * a + b * b).tolist()


def test_rsqrt_is_that_of_numpy_to_the_last_bit() -> None:
    x = np.random.default_rng(4).lognormal(0, 4, 1000).astype(np.float32)
    for count in (1, 5, 1000):
        found = np.asarray(jax.jit(STEADY.rsqrt)(x[:count]))
        assert found.tolist() == (np.float32(1) / np.sqrt(x[:count])).tolist()


def test_tanh_is_within_two_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-12, 12, 200_001), np.random.default_rng(5).normal(0, 0.3, 100_000)]).astype(
        np.float32
    )
    exact = np.tanh(x.astype(np.float64))
    found = np.asarray(jax.jit(STEADY.tanh)(x), np.float64)
    assert np.abs(found - exact).max() < 2.0**-24 * 1.5
    assert np.abs(found / np.where(exact == 0, 1, exact) - (exact != 0)).max() < 2 * ULP
    assert np.asarray(STEADY.tanh(jnp.array([0.0, -0.0, np.inf, -np.inf]))).tolist() == [0, 0, 1, -1]
    assert np.isnan(STEADY.tanh(jnp.float32(np.nan)))
    slopes = jax.vmap(jax.grad(STEADY.tanh))(jnp.asarray(x[:1000]))
    np.testing.assert_allclose(slopes, 1 - np.tanh(x[:1000].astype(np.float64)) ** 2, atol=3e-7)


def test_gelu_and_caps_are_the_usual_ones() -> None:
    x = jnp.asarray(5 * np.random.default_rng(6).normal(size=(6, 50)).astype(np.float32))
    np.testing.assert_allclose(STEADY.gelu_tanh(x), jax.nn.gelu(x, approximate=True), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(STEADY.capped(x, 3.0), 3 * np.tanh(np.asarray(x) / 3), rtol=1e-6)
    assert STEADY.capped(x, None) is x


def test_softmax_and_silu_are_the_usual_ones() -> None:
    x = 5 * np.random.default_rng(3).normal(size=(6, 50)).astype(np.float32)
    np.testing.assert_allclose(STEADY.softmax(jnp.asarray(x), 1), jax.nn.softmax(x, 1), rtol=2e-6, atol=1e-9)
    np.testing.assert_allclose(STEADY.silu(jnp.asarray(x)), jax.nn.silu(x), rtol=2e-6, atol=1e-9)


OTHERS: list[dict[str, Any]] = [
    {},
    {"norm": "layer", "qkv_bias": True, "out_bias": True, "mlp_bias": True, "gated": False, "activation": "gelu"},
    {
        "activation": "gelu_tanh",
        "qk_norm": True,
        "norm_place": "both",
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
    },
    {"n_experts": 4, "experts_per_token": 2},
]


@pytest.mark.parametrize("more", OTHERS)
def test_a_row_of_int8_has_the_same_bits_in_every_batch(more: dict[str, Any]) -> None:
    config = TransformerConfig(512, 192, 1, 6, 2, 32, 384, 64, **more)
    params = jd.quantize(init_params(config, jax.random.key(0)), "int8")
    tokens = jax.random.randint(jax.random.key(1), (9, 12), 0, 512)

    model = transformer(config, arithmetic=STEADY)

    def logits(batch: int) -> np.ndarray:
        def run(params: Any, tokens: jax.Array) -> jax.Array:
            def step(cache: Any, token: jax.Array) -> Any:
                logits, cache = model.apply(params, token[:, None], cache)
                return cache, logits[:, -1]

            first, cache = model.apply(params, tokens[:, :6], model.init_cache(params, batch, 12))
            return jnp.concatenate([first.swapaxes(0, 1), jax.lax.scan(step, cache, tokens[:, 6:].T)[1]])

        return np.asarray(jax.jit(run)(params, tokens[:batch]))

    whole = logits(9)
    for batch in (1, 3):
        assert (logits(batch) == whole[:, :batch]).all(), batch
