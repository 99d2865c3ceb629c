"""Typical, epsilon, eta, top-n-sigma, p-less, XTC, mirostat and the dynamic temperature against float64 oracles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from test_margins import Rows, decide, guaranteed, pushes, smallest_flip
from test_sequence_law import Law, outputs, p_value, softmax

import jaxdecode as jd
from jaxdecode import Context, LogitsTransform, Settings, generate
from jaxdecode import keys as keys_
from jaxdecode.testing import markov_model

ROWS, V = 400, 9
INF = np.inf
TOLERANCE = 1e-5  # an id whose measure lies nearer to its threshold may fall on either side in float32


def laws(seed: int, rows: int = ROWS, size: int = V) -> np.ndarray:
    """Flat, peaked and tied logits, some masked; never a row of nothing."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(rows, size)) * rng.choice([0.1, 1, 4], (rows, 1))
    z[rows // 2 :] = np.round(z[rows // 2 :] * 2) / 2
    z[::7] = 0.25
    z[(rng.random(z.shape) < 0.3) & (rng.random((rows, 1)) < 0.4)] = -INF
    z[:, 0] = np.where(np.isneginf(z).all(1), 0, z[:, 0])
    return z.astype(np.float32)


def law_of(z: np.ndarray) -> np.ndarray:
    return softmax(z.astype(np.float64))


def best(z: np.ndarray) -> np.ndarray:
    return np.arange(len(z)) == int(np.argmax(z))


def entropy(p: np.ndarray) -> float:
    return -float(np.sum(p[p > 0] * np.log(p[p > 0])))


# Each oracle: (z, numbers) -> the ids kept, and the distance of the nearest id from its threshold.
Oracle = Callable[..., tuple[np.ndarray, float]]


def epsilon(z: np.ndarray, e: float) -> tuple[np.ndarray, float]:
    p = law_of(z)
    return (p >= e) | best(z), float(np.abs(p[p > 0] / e - 1).min())


def eta(z: np.ndarray, e: float) -> tuple[np.ndarray, float]:
    p = law_of(z)
    line = min(e, np.sqrt(e) * np.exp(-entropy(p)))
    return ((p >= line) & (p > 0)) | best(z), float(np.abs(p[p > 0] / line - 1).min())


def top_n_sigma(z: np.ndarray, n: float) -> tuple[np.ndarray, float]:
    x = z.astype(np.float64)
    line = x.max() - n * x[x > -INF].std()
    near = np.abs(x[(x > -INF) & ~best(z)] - line)
    return (x >= line) | best(z), float(near.min(initial=INF))


def p_less(z: np.ndarray, on: float) -> tuple[np.ndarray, float]:
    p = law_of(z)
    line = float(np.sum(p * p))
    flat = np.ptp(p[p > 0]) == 0  # then float32 must be exact
    return ((p >= line * (1 - 1e-12)) & (p > 0)) | best(z), 1.0 if flat else float(np.abs(p[p > 0] / line - 1).min())


def typical(z: np.ndarray, mass: float) -> tuple[np.ndarray, float]:
    """By the definition: ids sorted by |surprise - entropy|, then the more probable, then the lower id."""
    p = law_of(z)
    with np.errstate(divide="ignore"):
        deviation = np.abs(-np.log(p) - entropy(p))
    order = np.lexsort((np.arange(len(z)), -z, deviation.round(12)))
    order = order[p[order] > 0]
    c = np.cumsum(p[order])
    count = min(int(np.sum(c < mass)) + 1, len(order))
    gaps = np.diff(np.sort(deviation[p > 0]))
    between = np.abs(np.diff(deviation[order]))[count - 1 : count]
    same = z[order[count - 1]] == z[order[min(count, len(order) - 1)]]  # equal logits tie exactly, in float32 too
    near = INF if same else float(between.min(initial=INF))
    assert len(gaps) == len(order) - 1
    return np.isin(np.arange(len(z)), order[:count]), min(near, float(np.abs(c - mass).min()))


def xtc(z: np.ndarray, threshold: float) -> tuple[np.ndarray, float]:
    """With the coin fallen."""
    p = law_of(z)
    order = np.argsort(-z, kind="stable")
    top = [i for i in order if p[i] >= threshold]
    return ~np.isin(np.arange(len(z)), top[:-1]) & (z > -INF), float(np.abs(p[p > 0] / threshold - 1).min())


def mirostat(z: np.ndarray, tau: float) -> tuple[np.ndarray, float]:
    """At the start, where mu = 2 tau."""
    p = law_of(z)
    with np.errstate(divide="ignore"):
        surprise = -np.log2(p)
    return (surprise <= 2 * tau) | best(z), float(np.abs(surprise[p > 0] - 2 * tau).min())


CASES: dict[str, tuple[Callable[[Any], LogitsTransform], Oracle, list[float], float]] = {
    # name -> factory of its number, oracle, numbers, off value
    "epsilon": (jd.epsilon, epsilon, [0.003, 0.05, 0.3, 0.9], 0.0),
    "eta": (jd.eta, eta, [0.003, 0.05, 0.3, 0.9], 0.0),
    "top_n_sigma": (jd.top_n_sigma, top_n_sigma, [0.3, 1.0, 1.7, 3.0], 0.0),
    "p_less": (jd.p_less, p_less, [1], 0),
    "typical_p": (jd.typical_p, typical, [0.1, 0.33, 0.7, 0.95], 1.0),
    "xtc": (lambda x: jd.xtc(1.0, x), xtc, [0.03, 0.1, 0.2, 0.4], 1.0),
    "mirostat": (lambda tau: jd.mirostat(tau, 0.1), mirostat, [0.2, 0.7, 1.3, 2.5], 0.0),
}
every = pytest.mark.parametrize("name", CASES)
apply = jax.jit(lambda t, z: t(z))


@every
def test_against_the_definition(name: str) -> None:
    factory, oracle, values, _ = CASES[name]
    z, numbers = laws(1), np.resize(values, ROWS)
    out = np.asarray(apply(factory(numbers), z))
    clear = 0
    for b in range(ROWS):
        kept, near = oracle(z[b], float(np.asarray(numbers[b], np.float32)))
        np.testing.assert_array_equal(out[b][out[b] > -INF], z[b][out[b] > -INF])
        assert (out[b] > -INF).any()
        if near > TOLERANCE:
            clear += 1
            np.testing.assert_array_equal(out[b] > -INF, kept & (z[b] > -INF), f"row {b}: {z[b]} {numbers[b]}")
    assert clear > 0.7 * ROWS  # flat laws lie on the threshold of top-n-sigma
    assert ((out > -INF).sum(1) < (z > -INF).sum(1)).mean() > 0.15  # something was cut


@every
def test_the_off_value_keeps_all(name: str) -> None:
    factory, _, values, off = CASES[name]
    z = laws(2)
    numbers = np.where(np.arange(ROWS) % 2, off, values[0])
    out = np.asarray(apply(factory(numbers.astype(np.int32) if name == "p_less" else numbers), z))
    alone = out[1::2] if name != "xtc" else out[1::2][(law_of_rows(z[1::2]).max(1) < 1)]
    np.testing.assert_array_equal(alone, z[1::2] if name != "xtc" else z[1::2][law_of_rows(z[1::2]).max(1) < 1])


def law_of_rows(z: np.ndarray) -> np.ndarray:
    return np.stack([law_of(row) for row in z])


@every
def test_at_a_large_vocabulary(name: str) -> None:
    """A peaked and a flat law over 50,000 ids."""
    factory, oracle, values, _ = CASES[name]
    rng = np.random.default_rng(5)
    z = np.stack([rng.normal(size=50_000) * 3, rng.normal(size=50_000) * 0.01]).astype(np.float32)
    value = {"epsilon": 3e-4, "eta": 3e-4, "xtc": 1e-3, "mirostat": 5.0, "p_less": 1}.get(name, values[-2:][0])
    out = np.asarray(apply(factory(np.array([value, value])), z))
    for b in range(2):
        kept, _ = oracle(z[b], float(np.float32(value)))
        p = law_of(z[b])
        differ = (out[b] > -INF) != kept
        assert p[differ].sum() < 1e-4  # ids nearer to the threshold than the sums are exact
        assert np.isfinite(out[b]).any()


def test_ties_of_typical_on_both_sides_of_the_entropy() -> None:
    """p = (1/2, 1/4, 1/8, 1/8): entropy 1.75 bits; 1/4 is .25 away, 1/2 is .75, the others 1.25."""
    z = np.log2([[0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]]).astype(np.float32) * np.float32(np.log(2))
    for mass, kept in (
        (0.2, [[1], [2]]),
        (0.5, [[0, 1], [1, 2]]),
        (0.8, [[0, 1, 2], [0, 1, 2]]),
        (0.9, [[0, 1, 2, 3]] * 2),
    ):
        out = np.asarray(jd.typical_p(mass)(jnp.asarray(z)))
        assert [np.flatnonzero(row > -INF).tolist() for row in out] == kept


@given(seed=st.integers(0, 2**31 - 1))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_sets_grow_with_their_number_and_restriction_is_conditioning(seed: int) -> None:
    z = laws(seed, rows=64)
    for name, rising in (("epsilon", False), ("eta", False), ("top_n_sigma", True), ("typical_p", True)):
        factory, _, values, _ = CASES[name]
        small, large = (np.asarray(apply(factory(np.full(64, v)), z)) > -INF for v in (values[1], values[2]))
        smaller, larger = (small, large) if rising else (large, small)
        assert (larger | ~smaller).all(), name
        out = np.asarray(apply(factory(np.full(64, values[1])), z))
        np.testing.assert_array_equal(out[small], z[small])  # S5.3: ratios inside are unchanged


def test_idempotent_where_the_threshold_does_not_move() -> None:
    """Top-n-sigma measures anew, and mirostat and p-less see another law; epsilon only ever removes more."""
    z = laws(4)
    once = apply(jd.epsilon(np.full(ROWS, 0.1)), z)
    twice = np.asarray(apply(jd.epsilon(np.full(ROWS, 0.1)), once))
    np.testing.assert_array_equal(twice, np.asarray(once))


def test_top_n_sigma_does_not_depend_on_the_temperature() -> None:
    z = laws(6)
    sets = []
    for tau in (0.5, 1.0, 2.0):
        sets.append(
            np.asarray(apply(jd.chain(jd.temperature(np.full(ROWS, tau)), jd.top_n_sigma(np.full(ROWS, 1.0))), z))
            > -INF
        )
    np.testing.assert_array_equal(sets[0], sets[1])
    np.testing.assert_array_equal(sets[2], sets[1])


# ---------------------------------------------------------------- dynamic temperature
def dynamic(z: np.ndarray, tau: float, spread: float, exponent: float) -> np.ndarray:
    p = law_of(z)
    n = int((z > -INF).sum())
    share = entropy(p) / np.log(n) if n > 1 else 0
    t = max(tau - spread, 0) + (tau + spread - max(tau - spread, 0)) * share**exponent
    return softmax((z.astype(np.float64) - z.max()) / t) if t > 1e-30 else best(z).astype(float)


def test_dynamic_temperature() -> None:
    z = laws(7)
    tau, spread, exponent = (
        np.resize([0.7, 1.0, 2.0], ROWS),
        np.resize([0.0, 0.5, 3.0, 0.2], ROWS),
        np.resize([1, 0.5, 2, 1, 3], ROWS),
    )
    out = np.asarray(apply(jd.dynamic_temperature(tau, spread, exponent), z))
    for b in range(ROWS):
        np.testing.assert_allclose(
            softmax(out[b].astype(np.float64)), dynamic(z[b], tau[b], spread[b], exponent[b]), atol=2e-5
        )
    np.testing.assert_array_equal(out[::4], np.asarray(apply(jd.temperature(tau), z))[::4])  # spread 0


def test_dynamic_temperature_has_finite_gradients() -> None:
    z = jnp.array([[1.0, 0.0, -INF, 2.0], [5.0, -80.0, -90.0, -INF], [0.0, 0.0, 0.0, 0.0]])

    def first(z: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.log_softmax(jd.dynamic_temperature(1.0, 0.5, 0.7)(z), axis=-1)[:, 0])

    assert np.isfinite(jax.grad(first)(z)).all()


# ---------------------------------------------------------------- the law of what is drawn
def test_xtc_coin_is_stream_four_of_the_key_at_the_position() -> None:
    n = 500
    keys = jax.random.split(jax.random.key(3), n)
    length = np.arange(n).astype(np.int32)
    z = np.tile(np.log([0.5, 0.4, 0.1]), (n, 1)).astype(np.float32)
    tokens = jnp.zeros((n, n), jnp.int32)
    out = np.asarray(jd.xtc(0.3, 0.2)(jnp.asarray(z), tokens, jnp.asarray(length), key=keys))
    coin = np.asarray(keys_.uniform(keys, jnp.asarray(length), 4, jnp.float32)) < 0.3
    np.testing.assert_array_equal(np.isneginf(out), coin[:, None] & np.array([True, False, False]))
    assert abs(coin.mean() - 0.3) < norm.isf(1e-6) * np.sqrt(0.21 / n)


TABLE = np.log(np.array([[0.45, 0.35, 0.2], [0.6, 0.25, 0.15], [0.2, 0.3, 0.5]])).astype(np.float32)
DRAWS = 40_000


def drawn(n: int, **fields: Any) -> list[tuple[int, ...]]:
    prompts: Any = np.zeros((DRAWS, 1), np.int32)
    chosen = Settings(max_new_tokens=n, **fields)
    return outputs(generate(markov_model(), TABLE, prompts, key=jax.random.key(9), settings=chosen), np.arange(DRAWS))


def test_xtc_sequence_law() -> None:
    probability, threshold, law = 0.4, 0.22, {(): 1.0}
    for _ in range(3):
        longer: Law = {}
        for s, mass in law.items():
            z = TABLE[s[-1] if s else 0].astype(np.float64)
            cut = softmax(np.where(xtc(z, threshold)[0], z, -INF))
            for v, q in enumerate(probability * cut + (1 - probability) * softmax(z)):
                longer[(*s, v)] = mass * q
        law = longer
    assert p_value(drawn(3, xtc=(probability, threshold)), {s: p for s, p in law.items() if p > 0}) > 1e-4


def test_mirostat_sequence_law() -> None:
    """mu follows each row's own surprises: the law of a token depends on all before it."""
    tau, rate = 0.65, 0.9
    law: dict[tuple[int, ...], tuple[float, float]] = {(): (1.0, 2 * tau)}
    cut = 0
    for _ in range(4):
        longer = {}
        for s, (mass, mu) in law.items():
            p = softmax(TABLE[s[-1] if s else 0].astype(np.float64))
            kept = (-np.log2(p) <= mu) | best(p)
            assert np.abs(-np.log2(p) - mu).min() > 1e-4
            cut += int((~kept).sum())
            q = np.where(kept, p, 0) / p[kept].sum()
            for v in np.flatnonzero(q):
                longer[(*s, int(v))] = (mass * q[v], mu - rate * (-np.log2(q[v]) - tau))
        law = longer
    assert cut > 5
    assert p_value(drawn(4, mirostat=(tau, rate)), {s: mass for s, (mass, _) in law.items()}) > 1e-4


# ---------------------------------------------------------------- margins
SOFT: dict[str, Callable[[Any], LogitsTransform]] = {
    **{name: case[0] for name, case in CASES.items()},
    "several": lambda x: jd.chain(jd.typical_p(np.clip(x, 0.3, 1)), jd.epsilon(x / 8), jd.xtc(1.0, 0.2)),
}


def soft_rows(name: str, dtype: str, seed: int, rows: int = 128, size: int = 6) -> Rows:
    z = laws(seed, rows, size).astype(dtype)
    rng = np.random.default_rng(seed)
    values = CASES[name][2] if name in CASES else [0.2, 0.4, 0.8]
    numbers = rng.choice(np.array(values), rows)
    tau = rng.choice([0.5, 1.0, 2.0], rows)
    value: Any = numbers.astype(np.int32) if name == "p_less" else jnp.asarray(numbers, dtype)
    transform = jd.chain(jd.temperature(jnp.asarray(tau, dtype)), SOFT[name](value))
    return Rows(z, rng.random(rows).astype(dtype), tau, transform)


@pytest.mark.parametrize("name", SOFT)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_S6_5_nothing_changes_below_the_margins(name: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        for seed in (1, 2):
            z, u, tau, transform = soft_rows(name, dtype, seed)
            was = decide(transform, z, u)
            assert (was.margin >= 0).all()
            assert (was.set_margin >= 0).all()
            for push in pushes(z, was.token, np.random.default_rng(seed)):
                for field in ("token", "kept"):
                    margin = was.margin if field == "token" else was.set_margin
                    eps = guaranteed(margin, tau, 1e-12 if dtype == "float64" else 2.0**-15) * 0.999
                    now = decide(transform, (z + push * eps[:, None]).astype(dtype), u)
                    np.testing.assert_array_equal(getattr(now, field)[eps > 0], getattr(was, field)[eps > 0])


@pytest.mark.parametrize(
    ("name", "within"),
    [("epsilon", 1.1), ("xtc", 1.1), ("top_n_sigma", 4), ("p_less", 4), ("eta", 6), ("typical_p", 8), ("mirostat", 3)],
)
def test_S6_5_margins_are_near_the_smallest_change_that_flips(name: str, within: float) -> None:
    """No direction beats the promise; the median flip lies within a small factor of it."""
    with jax.enable_x64(True):
        rows = soft_rows(name, "float64", 3, rows=64, size=3)
        was = decide(rows.transform, rows.logits, rows.u)
        promised = guaranteed(was.set_margin, rows.tau, 0)
        found = smallest_flip(rows, "kept")
    seen = np.isfinite(found) & (promised > 2e-3)
    assert seen.sum() > 15
    assert (promised[seen] <= found[seen]).all()
    assert np.median(found[seen] / promised[seen]) < within


@every
def test_S6_5_one_id_left_and_off_values_give_infinity(name: str) -> None:
    factory, _, values, off = CASES[name]
    z = np.array([[-INF, 3, -INF], [0.1, 1, 0.3]], np.float32)
    numbers = np.array([values[0], off], np.int32 if name == "p_less" else np.float32)
    t = factory(numbers) if name != "xtc" else jd.xtc(np.array([1.0, 0.0]), 0.1)
    out = decide(t, z, 0.0)
    assert (out.set_margin == INF).all()
    assert out.margin[0] == INF


def test_S6_5_mirostat_remembers_how_many_log_probabilities_moved_mu() -> None:
    """After n tokens mu has moved too: the margin shrinks by 1 + rate * n."""
    t, z = jd.mirostat(np.array([1.0, 1.0]), np.array([0.5, 0.5])), jnp.log(jnp.array([[0.6, 0.3, 0.1]] * 2))
    none: Any = np.zeros(2, np.int32)
    ctx = Context(jnp.zeros((2, 1), jnp.int32), none, none, none, jax.random.split(jax.random.key(0), 2))
    state = t.init(ctx)
    at_once = t.margin(z, z, ctx, state)[0]
    later = t.advance(state, none, jnp.full(2, -np.log(2.0), jnp.float32))  # one bit: mu stays 2 tau
    np.testing.assert_allclose(later[0], 2.0, rtol=1e-6)
    after = t.margin(z, z, ctx, later)[0]
    np.testing.assert_allclose(np.arctanh(after) * 1.5, np.arctanh(at_once), rtol=1e-5)
    assert dataclasses.is_dataclass(t)
