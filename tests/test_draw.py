"""The draw: its law to the last grid point, what it never does, and what the order of a sum can do to it.

``draw`` is monotone in its uniform number, so the exact probability of an id, as computed, is found by bisecting the
grid of 2^23 numbers that ``jax.random.uniform`` returns in float32.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxdecode import Settings, generate
from jaxdecode import keys as keys_
from jaxdecode.testing import markov_model
from jaxdecode.transforms import draw

GRID = 2**23
BOUND = 2.0**-22
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)
INF = np.float32(np.inf)

drawn = jax.jit(lambda z, u: draw(z, u).token)


def law(z: np.ndarray) -> np.ndarray:
    w = np.exp(z.astype(np.float64) - z.max(-1, keepdims=True))
    return w / w.sum(-1, keepdims=True)


@jax.jit
def at_most(z: jax.Array, ids: jax.Array) -> jax.Array:
    """How many of the grid's numbers draw an id <= ``ids[B]`` from ``z[B,V]``."""

    def halve(i: jax.Array, low: jax.Array) -> jax.Array:
        more = low + (jnp.int32(GRID) >> i)
        u = (jnp.minimum(more, GRID) - 1).astype(jnp.float32) / jnp.float32(GRID)
        return jnp.where((more <= GRID) & (draw(z, u).token <= ids), more, low)

    return jax.lax.fori_loop(0, 24, halve, jnp.zeros(ids.shape, jnp.int32))


def every_error(z: np.ndarray) -> np.ndarray:
    """|P(x) - p(x)| of every id of every row of ``z[R,V]``, as computed."""
    rows, size = z.shape
    below = at_most(jnp.asarray(np.repeat(z, size, 0)), jnp.tile(jnp.arange(size), rows))
    below = np.asarray(below).reshape(rows, size)
    assert (below[:, -1] == GRID).all()
    return np.abs(np.diff(below, axis=1, prepend=0) / GRID - law(z))


def error_at(z: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """|P(x) - p(x)| of the ids ``ids[R]``, one of each row of ``z[R,V]``."""
    upper, lower = (np.asarray(at_most(jnp.asarray(z), jnp.asarray(ids - i, jnp.int32))) for i in (0, 1))
    return np.abs((upper - lower) / GRID - law(z)[np.arange(len(z)), ids])


# ---------------------------------------------------------------- S6.1: the law
def peaks(size: int, rows: int, rng: np.random.Generator) -> np.ndarray:
    """A peak anywhere beside tails of every depth: equal, noisy, or equal up to a second level."""
    z = -rng.uniform(2, 9, (rows, 1)) + rng.choice([0, 0, 0.2], (rows, 1)) * rng.normal(size=(rows, size))
    z[rows // 2 :, : size // 2] = -rng.uniform(2, 5, (rows - rows // 2, 1))
    z[np.arange(rows), rng.choice([0, 1, size // 2, size - 2, size - 1], rows)] = rng.uniform(0, 2, rows)
    return z.astype(np.float32)


@pytest.mark.parametrize("size", [2, 5, 128, 129, 300])
def test_S6_1_every_probability_is_right_to_2_pow_minus_22(size: int) -> None:
    rng = np.random.default_rng(size)
    rows = {2: 256, 5: 256, 300: 6}.get(size, 10)
    smooth = (rng.normal(size=(rows, size)) * rng.choice([0.1, 1, 3], (rows, 1))).astype(np.float32)
    spiky = np.log(np.maximum(rng.dirichlet(np.full(size, 0.3), rows), 1e-30)).astype(np.float32)
    spiky[:, 0] = np.where(rng.random(rows) < 0.3, -INF, spiky[:, 0])
    for z in (smooth, spiky, peaks(size, rows, rng)):
        assert every_error(z).max() <= BOUND


@pytest.mark.parametrize("at", [0, 1, 64, 126, 127])
def test_S6_1_the_last_id_does_not_collect_the_rounding_of_all_others(at: int) -> None:
    """A peak and 127 equal weights, which round alike: what they lose or gain together must not go to the last id."""
    rng = np.random.default_rng(at)
    z = np.repeat(rng.uniform(-7, -2, (1500, 1)), 128, axis=1).astype(np.float32)
    z[:, at] = rng.uniform(0, 2, len(z))
    known = [(-2.7333081, 1.6310918), (-3.1938446, 1.0966064), (-4.1303573, 0.7121746), (-4.0849962, 0.27144304)]
    for row, (tail, peak) in enumerate(known):
        z[row], z[row, at] = tail, peak
    assert error_at(z, np.full(len(z), 127)).max() <= BOUND
    assert error_at(z, np.full(len(z), at)).max() <= BOUND


@pytest.mark.parametrize("size", [49_152, 262_144])
def test_S6_1_probabilities_of_large_vocabularies(size: int) -> None:
    rng = np.random.default_rng(size)
    z = np.empty((16, size), np.float32)
    z[0], z[1], z[2] = -3.3, rng.normal(size=size) * 2, -np.log(rng.permutation(size) + 1.0)
    tail = -math.log(size)
    for row in range(3, 16):  # peaks beside tails of about their mass, equal or noisy
        z[row] = tail + rng.uniform(-1, 1) + (row % 2) * 0.3 * rng.normal(size=size)
    z[np.arange(3, 16), np.resize([0, size // 2, size - 1, 12_345], 13)] = rng.random(13)
    assert error_at(z, z.argmax(1)).max() <= BOUND
    for ids in ([0, size - 1, size // 2, 127], rng.integers(1, size, 16).tolist()):
        assert error_at(z, np.resize(ids, 16)).max() <= BOUND


def test_S6_1_no_id_of_a_flat_law_is_left_without_width() -> None:
    """A running float32 sum gave 387 of 49,152 ids no width at all; here all 1,024 sampled ones have their p."""
    z = np.zeros((64, 49_152), np.float32)
    for first in range(0, 49_152, 49_152 // 16):
        ids = first + np.arange(64) * 3
        width = at_most(jnp.asarray(z), jnp.asarray(ids)) - at_most(jnp.asarray(z), jnp.asarray(ids - 1))
        assert set(np.asarray(width).tolist()) <= {170, 171}  # 2^23 / 49,152 = 170.67


def test_S6_1_uniform_numbers_lie_on_the_grid() -> None:
    keys = keys_.row_keys(jax.random.key(2), 20_000)
    u = np.asarray(keys_.uniform(keys, jnp.zeros(20_000, jnp.int32), keys_.Stream.DRAW, jnp.float32), np.float64)
    np.testing.assert_array_equal(u * GRID, np.round(u * GRID))
    assert u.min() >= 0
    assert u.max() < 1


CASES = arrays(np.float32, (16, 8), elements=st.sampled_from([0.0, -1.0, 1.0, -3.0, -200.0, -np.inf, 0.5]))


@given(z=CASES, u=arrays(np.float32, 16, elements=st.floats(0, 1, width=32, exclude_max=True)))
@EXAMPLES
def test_S6_1_is_the_inverse_cdf_in_id_order(z: np.ndarray, u: np.ndarray) -> None:
    z[np.isneginf(z).all(1), 4] = 0
    cdf = np.cumsum(law(z), 1)
    token = np.asarray(drawn(jnp.asarray(z), jnp.asarray(u)))
    clear = np.abs(cdf - u[:, None]).min(1) > 1e-6
    np.testing.assert_array_equal(token[clear], (cdf <= u[:, None]).sum(1)[clear])


@given(z=CASES, k=st.integers(0, GRID - 2))
@EXAMPLES
def test_S6_1_grows_with_the_uniform_number(z: np.ndarray, k: int) -> None:
    z[np.isneginf(z).all(1), 4] = 0
    low, high = (drawn(jnp.asarray(z), jnp.full(16, i / GRID, jnp.float32)) for i in (k, k + 1))
    assert (np.asarray(low) <= np.asarray(high)).all()


# ---------------------------------------------------------------- S6.1: what never happens
ENDS = np.array([0, 2.0**-23, 2.0**-24, 2.0**-126, 0.5, 1 - 2.0**-22, 1 - 2.0**-23, 1 - 2.0**-24], np.float32)


@pytest.mark.parametrize("size", [2, 127, 128, 129, 1000, 49_152])
def test_S6_1_a_token_of_probability_zero_is_never_drawn(size: int) -> None:
    rng = np.random.default_rng(size)
    for share in (0.05, 0.5, 0.99):
        z = rng.normal(size=(len(ENDS) * 2, size)).astype(np.float32) * 4
        dead = rng.random(z.shape) < share
        dead[:, : size // 4] |= rng.random((len(z), 1)) < 0.5
        dead[:, -(size // 3) :] |= rng.random((len(z), 1)) < 0.5
        dead[np.arange(len(z)), rng.integers(size, size=len(z))] = False
        z[dead] = np.where(rng.random(int(dead.sum())) < 0.5, -INF, np.float32(-200))
        z[~dead] += 20
        token = np.asarray(drawn(jnp.asarray(z), jnp.asarray(np.resize(ENDS, len(z)))))
        assert not dead[np.arange(len(z)), token].any()
        weight = law(z)
        alive = [np.flatnonzero(~row) for row in dead]
        for row, at in enumerate(alive):
            if ENDS[row % len(ENDS)] == 0 and weight[row, at[0]] > BOUND:
                assert token[row] == at[0]
            if ENDS[row % len(ENDS)] >= 1 - 2.0**-23 and weight[row, at[-1]] > BOUND:
                assert token[row] == at[-1]


def test_S6_1_above_the_last_edge_comes_the_last_id_of_positive_probability() -> None:
    """Logits whose float32 sums fall short of 1, with nothing but zeros after the last live id."""
    rng = np.random.default_rng(9)
    z = np.full((64, 300), -INF)
    z[:, 10:200] = np.log(rng.dirichlet(np.ones(190), 64))
    u = np.full(64, 1 - 2.0**-24, np.float32)
    token = np.asarray(drawn(jnp.asarray(z), jnp.asarray(u)))
    assert (token[law(z)[:, 199] > BOUND] == 199).all()
    assert (token < 200).all()
    assert (np.asarray(drawn(jnp.asarray(z), jnp.zeros(64))) >= 10).all()


def test_S6_1_zero_probability_in_the_loop() -> None:
    """End to end: of 4,000 rows none ever leaves the live ids {1, 3}."""
    table = jnp.asarray(np.tile([-np.inf, 0.0, -500.0, 1.0, -np.inf], (5, 1)), jnp.float32)
    out = generate(
        markov_model(), table, np.ones((4000, 1), int), key=jax.random.key(0), settings=Settings(max_new_tokens=5)
    )
    assert set(np.unique(out.tokens)) == {1, 3}


def test_S6_1_takes_a_number_of_additions_proportional_to_the_vocabulary() -> None:
    def operations(size: int) -> float:
        compiled = jax.jit(draw).lower(jnp.zeros((2, size)), jnp.zeros(2)).compile()
        cost: Any = compiled.cost_analysis()
        return float(cost["flops"])

    small, large = operations(2**12), operations(2**16)
    assert large < 1.1 * 16 * small
    assert large < 128 * 2 * 2**16


# ---------------------------------------------------------------- S6.2
def test_S6_2_everything_fixed_gives_one_fixed_sequence() -> None:
    table = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.float32)
    prompts = np.arange(8)[:, None]
    options = Settings(max_new_tokens=12, temperature=np.resize([0.0, 1.0, 2.0, 0.7], 8).astype(np.float32), top_p=0.9)

    def once(key: jax.Array) -> Any:
        return generate(markov_model(), table, prompts, key=key, settings=options)

    first, again = once(jax.random.key(7)), once(jax.random.key(7))
    compiled_anew = jax.jit(lambda p: generate(markov_model(), table, p, key=jax.random.key(7), settings=options))(
        prompts
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    np.testing.assert_array_equal(first.tokens, compiled_anew.tokens)
    changed = np.asarray(once(jax.random.key(8)).tokens) != np.asarray(first.tokens)
    np.testing.assert_array_equal(changed.any(1), options.temperature != 0)


# ---------------------------------------------------------------- S6.3, S6.4
def gamma(k: int, u: float) -> float:
    return k * u / (1 - k * u)


def greedy_pick(first: float, second: float) -> tuple[int, float]:
    """Token and margin of a greedy step over two float64 logits."""
    with jax.enable_x64(True):
        table = jnp.tile(jnp.array([[first, second]], jnp.float64), (2, 1))
        options = Settings(max_new_tokens=1, temperature=0)
        out = generate(markov_model(), table, [[0], [1]], settings=options)
        assert out.margin.dtype == jnp.float64
        return int(out.tokens[0, 0]), float(out.margin[0, 0])


def test_S6_3_another_order_of_summation_changes_a_logit_and_the_token() -> None:
    one, other = (0.1 + 0.2) + 0.3, 0.1 + (0.2 + 0.3)
    assert one != other
    assert one == 0.6000000000000001
    with jax.enable_x64(True):
        x = jnp.array([0.1, 0.2, 0.3])
        assert float((x[0] + x[1]) + x[2]) != float(x[0] + (x[1] + x[2]))
    assert greedy_pick(0.6, one)[0] == 1  # B = .6 has the lower id
    assert greedy_pick(0.6, other)[0] == 0  # a tie: the lower id


def test_S6_4_the_example_lies_inside_the_bound() -> None:
    _, margin = greedy_pick(0.6, (0.1 + 0.2) + 0.3)
    assert abs(margin - 1.1e-16) < 1e-17
    bound = 2 * gamma(2, 2.0**-53) * (0.1 + 0.2 + 0.3)
    assert abs(bound - 2.7e-16) < 1e-17
    assert margin < bound


def orders(x: np.ndarray) -> np.ndarray:
    """Sums of ``x`` in its own type: every order of left-to-right addition, and pairwise ones."""
    chosen = np.array(list(itertools.permutations(range(len(x)))))
    running = np.add.accumulate(x[chosen], axis=1, dtype=x.dtype)[:, -1]
    a = x[chosen]
    pairwise = (a[:, 0] + a[:, 1]) + (a[:, 2] + a[:, 3]) + a[:, 4]
    return np.concatenate([running, pairwise])


TERMS = st.floats(-4, 4, width=32).filter(lambda v: v == 0 or abs(v) > 2**-20)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(data=st.data())
@EXAMPLES
def test_S6_4_no_order_swaps_two_logits_whose_gap_exceeds_the_bound(dtype: type, data: st.DataObject) -> None:
    x, y = (data.draw(arrays(dtype, 5, elements=TERMS)) for _ in range(2))
    u = float(np.finfo(dtype).eps) / 2
    sums, others = orders(x), orders(y)
    exact = sum(map(Fraction, x.tolist()))
    size, size_y = float(np.abs(x).sum(dtype=np.float64)), float(np.abs(y).sum(dtype=np.float64))
    bound = gamma(4, u)
    assert max(abs(Fraction(float(s)) - exact) for s in set(sums)) <= Fraction(bound * size * (1 + 1e-9))
    for gap in np.unique(sums).astype(np.float64) - float(others[0]):  # y fixed, x in any order
        if abs(gap) > 2 * bound * size:
            assert (np.sign(sums.astype(np.float64) - float(others[0])) == np.sign(gap)).all()
    spread = np.unique(sums)[:, None].astype(np.float64) - np.unique(others)[None].astype(np.float64)
    if np.abs(spread).max() > 2 * bound * (size + size_y):  # both in any order
        assert len(np.unique(np.sign(spread))) == 1


def test_S6_4_reordered_logits_keep_the_token_wherever_the_margin_exceeds_the_bound() -> None:
    """Logits of 24 terms near one another, summed in 20 orders: greedy's margin says which rows are safe."""
    rng = np.random.default_rng(4)
    terms = rng.normal(size=(200, 200, 24)).astype(np.float32)
    terms[:, :, -1] -= terms.sum(2) - rng.normal(size=(200, 200)) * 1e-5  # all logits within about 1e-5
    options = Settings(max_new_tokens=1, temperature=0)
    runs = []
    for _ in range(20):
        shuffled = terms[:, :, rng.permutation(24)]
        table = np.add.accumulate(shuffled, axis=2, dtype=np.float32)[:, :, -1]
        runs.append(generate(markov_model(), jnp.asarray(table), np.arange(200)[:, None], settings=options))
    bound = 2 * gamma(23, 2.0**-24) * 2 * np.abs(terms).sum(2, dtype=np.float64).max(1)
    safe = np.asarray(runs[0].margin)[:, 0] > bound
    tokens = np.concatenate([np.asarray(r.tokens) for r in runs], axis=1)
    swapped = (tokens != tokens[:, :1]).any(1)
    assert not (safe & swapped).any()
    assert swapped.any()
