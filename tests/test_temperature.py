"""Temperature: one number moves the law between the arg max and the uniform law, and never changes the order."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxdecode import Settings, generate, temperature
from jaxdecode.testing import markov_model

ROWS, V = 6, 8
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)
LOGITS = arrays(np.float32, (ROWS, V), elements=st.floats(-60, 60, width=32))
GRID = arrays(np.float32, (ROWS, V), elements=st.integers(-8, 8).map(lambda i: i / 4))
TAUS = arrays(np.float32, ROWS, elements=st.floats(0.0625, 64, width=32))
MASKS = arrays(bool, (ROWS, V))
TINY = float(np.finfo(np.float32).tiny)


def oracle(z: np.ndarray, tau: np.ndarray | float) -> np.ndarray:
    """softmax(z / tau) by row, float64."""
    x = np.asarray(z, np.float64) / np.asarray(tau, np.float64).reshape(-1, 1)
    w = np.exp(x - x.max(1, keepdims=True))
    return w / w.sum(1, keepdims=True)


def entropy_of(p: jax.Array) -> jax.Array:
    return -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0), axis=-1)


@jax.jit
def scaled(z: jax.Array, tau: jax.Array) -> jax.Array:
    return temperature(tau)(z)


@jax.jit
def law(z: jax.Array, tau: jax.Array) -> jax.Array:
    return jax.nn.softmax(temperature(tau)(z), axis=-1)


def masked(z: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Some ids at -inf, never all of a row."""
    mask = mask & (np.arange(z.shape[1]) != 3)
    return np.where(mask, np.float32(-np.inf), z)


# ---------------------------------------------------------------- S4.1
@given(z=LOGITS, tau=TAUS, mask=MASKS)
@EXAMPLES
def test_S4_1_is_the_softmax_of_the_logits_over_tau(z: np.ndarray, tau: np.ndarray, mask: np.ndarray) -> None:
    z = masked(z, mask)
    np.testing.assert_allclose(law(jnp.asarray(z), jnp.asarray(tau)), oracle(z, tau), atol=2e-6)
    out = np.asarray(scaled(jnp.asarray(z), jnp.asarray(tau)))
    np.testing.assert_array_equal(np.isneginf(out), np.isneginf(z))
    assert (out.max(1) == 0).all()


@given(z=LOGITS)
@EXAMPLES
def test_S4_1_one_is_the_models_own_law(z: np.ndarray) -> None:
    np.testing.assert_allclose(law(jnp.asarray(z), jnp.ones(ROWS)), oracle(z, 1.0), atol=1e-6)


@given(z=GRID, mask=MASKS)
@EXAMPLES
def test_S4_1_zero_is_greedy_and_takes_the_lowest_id_of_equals(z: np.ndarray, mask: np.ndarray) -> None:
    z = masked(z, mask)
    out = np.asarray(scaled(jnp.asarray(z), jnp.zeros(ROWS)))
    want = np.where(np.arange(V) == np.argmax(z, 1)[:, None], 0, -np.inf)
    np.testing.assert_array_equal(out, want)


def test_S4_1_zero_stands_beside_other_temperatures_in_one_batch() -> None:
    z = np.array([[1, 2, 2], [1, 2, 2], [1, 2, 2]], np.float32)
    out = np.asarray(law(jnp.asarray(z), jnp.asarray([0.0, 1.0, 0.5], jnp.float32)))
    np.testing.assert_array_equal(out[0], [0, 1, 0])
    np.testing.assert_allclose(out[1:], oracle(z[1:], np.array([1.0, 0.5])), atol=1e-6)


@pytest.mark.parametrize("tau", [TINY, 1e-30, 1e-3, 1e3, 1e30, 1e37])
def test_S4_1_no_overflow_at_either_end(tau: float) -> None:
    z = np.array([[50, 49, 50], [50, -np.inf, 3e38], [-1e38, 1e38, 1e38], [-50, -50, -50]], np.float32)
    p = np.asarray(law(jnp.asarray(z), jnp.full(4, tau, jnp.float32)))
    np.testing.assert_allclose(p, oracle(z, float(np.float32(tau))), atol=1e-6)
    assert p[0, 0] == p[0, 2]
    assert p[1, 1] == 0


def test_S4_1_the_textbook_overflow() -> None:
    """50 / 1e-38 is inf in float32 and inf - inf is NaN: the largest logit goes first. Tiny numbers are refused."""
    small = 1.2e-38
    with np.errstate(over="ignore"):
        assert np.isinf(np.float32(50) / np.float32(small))
    out = temperature(small)(jnp.array([[50.0, 0.0], [0.0, 50.0]]))
    np.testing.assert_array_equal(out, np.array([[0, -np.inf], [-np.inf, 0]]))
    with pytest.raises(ValueError, match="temperature: expected 0 or a finite number"):
        temperature(1e-38)
    with jax.enable_x64(True):  # in float64 the quotient is a number
        wide = temperature(small)(jnp.array([[50.0, 0.0], [0.0, 50.0]]))
        quotient = -50 / float(np.float32(small))
        np.testing.assert_allclose(wide, np.array([[0, quotient], [quotient, 0]]), rtol=1e-14)


# ---------------------------------------------------------------- S4.2
@given(z=GRID, mask=MASKS)
@EXAMPLES
def test_S4_2_cold_spreads_evenly_over_the_maxima_and_hot_over_the_support(z: np.ndarray, mask: np.ndarray) -> None:
    z = masked(z, mask)
    best, support = z == z.max(1, keepdims=True), z > -np.inf
    cold = np.asarray(law(jnp.asarray(z), jnp.full(ROWS, 1e-3, jnp.float32)))
    np.testing.assert_allclose(cold, best / best.sum(1, keepdims=True), atol=1e-6)
    hot = np.asarray(law(jnp.asarray(z), jnp.full(ROWS, 1e7, jnp.float32)))
    np.testing.assert_allclose(hot, support / support.sum(1, keepdims=True), atol=1e-6)


# ---------------------------------------------------------------- S4.3
@given(z=LOGITS, tau=TAUS)
@EXAMPLES
def test_S4_3_order_is_preserved_and_equal_stay_equal(z: np.ndarray, tau: np.ndarray) -> None:
    z[:, 1] = z[:, 0]
    out = np.asarray(scaled(jnp.asarray(z), jnp.asarray(tau)))
    p = np.asarray(law(jnp.asarray(z), jnp.asarray(tau)))
    for x in (out, p):
        rises = np.diff(np.take_along_axis(x, np.argsort(z, axis=1, kind="stable"), axis=1), axis=1)
        assert (rises >= 0).all()
        np.testing.assert_array_equal(x[:, 0], x[:, 1])


@given(z=GRID, tau=arrays(np.float32, ROWS, elements=st.floats(0.25, 8, width=32)))
@EXAMPLES
def test_S4_3_order_is_strict_where_the_gap_can_be_seen(z: np.ndarray, tau: np.ndarray) -> None:
    p = np.asarray(law(jnp.asarray(z), jnp.asarray(tau)))
    np.testing.assert_array_equal(np.sign(p[:, :, None] - p[:, None, :]), np.sign(z[:, :, None] - z[:, None, :]))


# ---------------------------------------------------------------- S4.4
@jax.jit
def entropy_slope(z: jax.Array, tau: jax.Array) -> jax.Array:
    return jax.vmap(jax.grad(lambda t, row: entropy_of(jax.nn.softmax(temperature(t)(row[None])[0]))))(tau, z)


def slope_oracle(z: np.ndarray, tau: np.ndarray) -> np.ndarray:
    """Var_{p_tau}(z) / tau^3 on the support, float64."""
    p, z = oracle(z, tau), np.where(np.isneginf(z), 0, z).astype(np.float64)
    mean = (p * z).sum(1, keepdims=True)
    return (p * (z - mean) ** 2).sum(1) / np.asarray(tau, np.float64) ** 3


@given(z=GRID, tau=arrays(np.float64, ROWS, elements=st.floats(0.125, 16)), mask=MASKS)
@EXAMPLES
def test_S4_4_entropy_grows_by_the_variance_over_tau_cubed(z: np.ndarray, tau: np.ndarray, mask: np.ndarray) -> None:
    z = masked(z, mask)
    with jax.enable_x64(True):
        slope = np.asarray(entropy_slope(jnp.asarray(z, jnp.float64), jnp.asarray(tau)))
    want = slope_oracle(z, tau)
    np.testing.assert_allclose(slope, want, rtol=1e-8, atol=1e-12)
    flat = np.array([len(set(row[row > -np.inf])) == 1 for row in z])
    assert (want[~flat] > 0).all()
    np.testing.assert_allclose(slope[flat], 0, atol=1e-14)


@given(z=GRID, mask=MASKS, low=TAUS, factor=st.floats(1.01, 4))
@EXAMPLES
def test_S4_4_entropy_never_falls(z: np.ndarray, mask: np.ndarray, low: np.ndarray, factor: float) -> None:
    z, high = masked(z, mask), (low * np.float32(factor)).astype(np.float32)
    cold, hot = (np.asarray(entropy_of(law(jnp.asarray(z), jnp.asarray(t)))) for t in (low, high))
    assert (hot >= cold - 2e-6).all()


@given(z=GRID, mask=MASKS, tau=TAUS)
@EXAMPLES
def test_S4_4_gradients_are_finite_beside_masked_ids(z: np.ndarray, mask: np.ndarray, tau: np.ndarray) -> None:
    z = masked(z, mask)
    slope = np.asarray(entropy_slope(jnp.asarray(z), jnp.asarray(tau)))
    np.testing.assert_allclose(slope, slope_oracle(z, tau), rtol=1e-2, atol=1e-4 / float(tau.min()) ** 2)
    by_logit = np.asarray(logit_gradient(jnp.asarray(z), jnp.asarray(tau)))
    assert np.isfinite(by_logit).all()
    assert (by_logit[np.isneginf(z)] == 0).all()
    np.testing.assert_allclose(by_logit, logit_oracle(z, tau), atol=1e-5 / float(tau.min()))


@jax.jit
def logit_gradient(z: jax.Array, tau: jax.Array) -> jax.Array:
    """d p_3 / d z_j: softmax does not see the shift by the largest logit, so neither may its gradient."""
    return jax.grad(lambda x: jnp.sum(jax.nn.softmax(temperature(tau)(x), axis=-1)[:, 3]))(z)


def logit_oracle(z: np.ndarray, tau: np.ndarray) -> np.ndarray:
    p = oracle(z, tau)
    return p[:, 3:4] * ((np.arange(V) == 3) - p) / np.asarray(tau, np.float64)[:, None]


# ---------------------------------------------------------------- S4.5, S4.6: the numbers
S4_5 = [
    (0.1, (1.0000, 0, 0), 0.0005),
    (0.5, (0.8668, 0.1173, 0.0159), 0.4411),
    (1.0, (0.6652, 0.2447, 0.0900), 0.8324),
    (2.0, (0.5065, 0.3072, 0.1863), 1.0202),
    (100.0, (0.3367, 0.3333, 0.3300), 1.0986),
]


def test_S4_5_numbers() -> None:
    tau = jnp.asarray([t for t, _, _ in S4_5], jnp.float32)
    p = law(jnp.tile(jnp.array([[2.0, 1.0, 0.0]]), (len(S4_5), 1)), tau)
    np.testing.assert_allclose(p, [row for _, row, _ in S4_5], atol=5.1e-5)
    np.testing.assert_allclose(entropy_of(p), [h for _, _, h in S4_5], atol=5.1e-5)
    assert abs(float(entropy_of(p)[-1]) - math.log(3)) < 5e-5


def test_S4_6_numbers() -> None:
    p = law(jnp.array([[1.0, 0.0], [1.0, 0.0]]), jnp.asarray([1 / math.log(9), 1.0], jnp.float32))
    assert round(1 / math.log(9), 3) == 0.455
    np.testing.assert_allclose(p[:, 0], [0.9, 0.731], atol=5e-4)
    assert abs(float(p[0, 0]) - 0.9) < 1e-6
    np.testing.assert_allclose(entropy_of(p), [0.325, 0.582], atol=5.1e-4)


# ---------------------------------------------------------------- in the loop
def test_S4_1_settings_and_log_probabilities_in_the_loop() -> None:
    """Per-row temperatures: the processed log probability is that of softmax(z / tau), the raw one that of tau = 1."""
    table = np.random.default_rng(5).normal(size=(4, 4)).astype(np.float32) * 3
    tau = np.array([0.0, 0.3, 1.0, 5.0], np.float32)
    options = Settings(max_new_tokens=1, temperature=tau)
    out = generate(markov_model(), jnp.asarray(table), np.arange(4)[:, None], key=jax.random.key(1), settings=options)
    rows, token = np.arange(4), np.asarray(out.tokens)[:, 0]
    assert token[0] == np.argmax(table[0])
    np.testing.assert_allclose(out.logprob[:, 0], np.log(oracle(table, 1.0)[rows, token]), atol=2e-6)
    want = np.log(oracle(table[1:], tau[1:])[rows[1:] - 1, token[1:]])
    np.testing.assert_allclose(out.processed_logprob[:, 0], [0, *want], atol=2e-6)
