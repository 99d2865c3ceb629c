"""Top-k and top-p: exactly which ids stay, and what that does to the law.

Oracles sort in float64; the library never sorts. Its float32 promise for top-p: the kept set is the exact set of some
``rho'`` with ``|rho' - rho| <= T``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxdecode import Settings, chain, generate, min_p, sample, temperature, top_k, top_p
from jaxdecode import keys as keys_
from jaxdecode.testing import markov_model
from jaxdecode.transforms import draw

T = 2.0**-16
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)
ROWS, V = 16, 8
GRID = st.one_of(
    st.integers(-6, 6).map(lambda i: i / 4), st.sampled_from([-0.0, -np.inf, -(2.0**-30), 2.0**-30, -30.0])
)
LOGITS = arrays(np.float32, (ROWS, V), elements=GRID)
FLOORS = arrays(np.float32, ROWS, elements=st.floats(2**-7, 1, width=32))
RHOS = arrays(np.float32, ROWS, elements=st.floats(2**-10, 1, width=32))
INF = np.float32(np.inf)

by_k = jax.jit(lambda z, k: top_k(k)(z))
by_p = jax.jit(lambda z, p: top_p(p)(z))
by_min_p = jax.jit(lambda z, p: min_p(p)(z))
chained = jax.jit(lambda z, k, p, floor: chain(temperature(0.75), top_k(k), top_p(p), min_p(floor))(z))


def kept(f: Callable[..., jax.Array], z: np.ndarray, number: Any) -> np.ndarray:
    """Mask of the ids ``f`` keeps; the logits of kept ids must come through untouched."""
    out = np.asarray(f(jnp.asarray(z), jnp.asarray(number)))
    mask = out > -np.inf
    np.testing.assert_array_equal(out[mask], z[mask])
    return mask


def order(z: np.ndarray) -> np.ndarray:
    """pi: logit descending, equal logits (-0.0 equals 0.0) by ascending id."""
    return np.argsort(-z.astype(np.float64), axis=-1, kind="stable")


def law(z: np.ndarray) -> np.ndarray:
    w = np.exp(z.astype(np.float64) - z.max(-1, keepdims=True))
    return w / w.sum(-1, keepdims=True)


def masses(z: np.ndarray) -> np.ndarray:
    """c_1 .. c_V by row."""
    return np.cumsum(np.take_along_axis(law(z), order(z), -1), -1)


def first(z: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Mask of the first ``count[row]`` ids of pi, -inf never counted."""
    rank = np.argsort(order(z), axis=-1, kind="stable")
    return (rank < count[:, None]) & (z > -np.inf)


def exact_count(z: np.ndarray, rho: np.ndarray) -> np.ndarray:
    """k(rho) = min{ j : c_j >= rho }."""
    return np.minimum((masses(z) < rho[:, None]).sum(1) + 1, (z > -np.inf).sum(1))


def some_unmasked(z: np.ndarray) -> np.ndarray:
    z[np.isneginf(z).all(1), 2] = 0
    return z


def check_promise(z: np.ndarray, rho: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Both sides of the promise; returns the rows with a c_j within T, where another set than the exact is allowed."""
    count, c = mask.sum(1), masses(z)
    np.testing.assert_array_equal(mask, first(z, count))  # always a prefix of pi
    padded = np.pad(c, ((0, 0), (1, 0)))
    below, reached = (np.take_along_axis(padded, (count - i)[:, None], 1)[:, 0] for i in (1, 0))
    assert (below < rho + T).all()  # some rho' in (c_{k-1}, c_k] lies within T
    assert ((reached > rho - T) | (count == (z > -np.inf).sum(1))).all()
    close = (np.abs(c - rho[:, None]) <= T).any(1)
    np.testing.assert_array_equal(count[~close], exact_count(z, rho)[~close])
    return close


# ---------------------------------------------------------------- S5.1
@pytest.mark.parametrize("size", [2, 3, 64, 1000, 49_152, 262_144])
def test_S5_1_exactly_k_under_ties(size: int) -> None:
    rng = np.random.default_rng(size)
    z = rng.integers(-2, 3, (8, size)).astype(np.float32)  # five values only: ties everywhere
    z[1], z[2] = 0, np.where(rng.random(size) < 0.5, -0.0, 0.0)
    z[3, rng.random(size) < 0.7] = -np.inf
    z[4] = rng.normal(size=size)
    z[5] = np.repeat(rng.normal(size=size // 2 + 1), 2)[:size]
    z[6], z[6, -1] = -1e-9, 0
    for k in (1, 2, size // 2, size - 1, size, size + 5):
        number = np.full(8, k, np.int32)
        number[[0, 5]] = max(k // 3, 1)
        mask = kept(by_k, z, number)
        np.testing.assert_array_equal(mask, first(z, number))
        np.testing.assert_array_equal(mask.sum(1), np.minimum(number, (z > -np.inf).sum(1)))


@given(z=LOGITS, k=arrays(np.int32, ROWS, elements=st.integers(0, 10)))
@EXAMPLES
def test_S5_1_top_k_is_the_first_k(z: np.ndarray, k: np.ndarray) -> None:
    np.testing.assert_array_equal(kept(by_k, z, k), first(z, np.where(k == 0, V, k)))


WIDE = st.floats(width=32, allow_nan=False, allow_subnormal=False, max_value=float(np.finfo(np.float32).max))


@given(z=arrays(np.float32, (ROWS, V), elements=WIDE), k=arrays(np.int32, ROWS, elements=st.integers(1, V)), rho=RHOS)
@EXAMPLES
def test_S5_1_over_the_whole_range_of_floats(z: np.ndarray, k: np.ndarray, rho: np.ndarray) -> None:
    z = some_unmasked(z)
    np.testing.assert_array_equal(kept(by_k, z, k), first(z, k))
    check_promise(z, rho, kept(by_p, z, rho))


def test_S5_1_order_is_that_of_logits_not_of_rounded_probabilities() -> None:
    z = np.array([[-1e-9, 0], [0, -1e-9], [-0.0, 0.0], [0.0, -0.0]], np.float32)
    np.testing.assert_array_equal(jax.nn.softmax(jnp.asarray(z)), np.full((4, 2), 0.5, np.float32))
    want = np.array([[False, True], [True, False], [True, False], [True, False]])
    np.testing.assert_array_equal(kept(by_k, z, np.ones(4, np.int32)), want)
    np.testing.assert_array_equal(kept(by_p, z, np.full(4, 0.4, np.float32)), want)


# ---------------------------------------------------------------- S5.2
@given(z=LOGITS, rho=RHOS)
@EXAMPLES
def test_S5_2_top_p_is_the_shortest_prefix_that_reaches_rho(z: np.ndarray, rho: np.ndarray) -> None:
    z = some_unmasked(z)
    check_promise(z, rho, kept(by_p, z, rho))


@pytest.mark.parametrize("size", [2, 64, 1000, 262_144])
def test_S5_2_a_mass_equal_to_rho_stops_there(size: int) -> None:
    """Flat laws: c_j = j/n exactly, and rho * n has few bits, so float32 must be exact however many ids tie."""
    rng = np.random.default_rng(size)
    z = np.where(rng.random((8, size)) < 0.8, np.float32(-3.3), -INF)
    z[:, rng.integers(size)] = -3.3
    z[4:] = 0
    for _ in range(3):
        rho = (rng.integers(1, 65, 8) / 64).astype(np.float32)
        n = (z > -np.inf).sum(1)
        want = np.array([math.ceil(r * m) for r, m in zip(rho.tolist(), n.tolist(), strict=True)])
        np.testing.assert_array_equal(kept(by_p, z, rho), first(z, want))


# ---------------------------------------------------------------- S5.3
@given(z=LOGITS, rho=RHOS, k=arrays(np.int32, ROWS, elements=st.integers(1, 9)), floor=FLOORS)
@EXAMPLES
def test_S5_3_restriction_is_conditioning(z: np.ndarray, rho: np.ndarray, k: np.ndarray, floor: np.ndarray) -> None:
    z = some_unmasked(z)
    p = law(z)
    for f, number in ((by_k, k), (by_p, rho), (by_min_p, floor)):
        inside = kept(f, z, number)
        total = np.where(inside, p, 0).sum(1)
        out = np.where(inside, z, -np.inf)  # bit for bit what f returns, see `kept`: ratios inside are unchanged
        np.testing.assert_allclose(law(out), np.where(inside, p, 0) / total[:, None], atol=1e-15)
        distance = np.abs(law(out) - p).sum(1) / 2
        np.testing.assert_allclose(distance, 1 - total, atol=1e-15)
        if f is by_p:
            assert (distance <= 1 - rho + T).all()


def test_S5_3_top_k_has_no_such_bound() -> None:
    z = np.zeros((2, 64), np.float32)
    distance = np.abs(law(np.asarray(top_k(4)(jnp.asarray(z)))) - 1 / 64).sum(1) / 2
    np.testing.assert_allclose(distance, 1 - 4 / 64, atol=1e-12)


@given(z=LOGITS, rho=RHOS, k=arrays(np.int32, ROWS, elements=st.integers(1, 9)), floor=FLOORS)
@EXAMPLES
def test_S5_3_each_filter_sees_the_law_the_ones_before_it_left(
    z: np.ndarray, rho: np.ndarray, k: np.ndarray, floor: np.ndarray
) -> None:
    z = some_unmasked(z)
    warm = (z - z.max(1, keepdims=True)) / np.float32(0.75)
    one = np.where(first(warm, k), warm, -INF)
    out = np.asarray(chained(jnp.asarray(z), jnp.asarray(k), jnp.asarray(rho), jnp.asarray(floor)))
    ratio = law(one) / law(one).max(1, keepdims=True)
    clear = (np.abs(ratio - floor[:, None]).min(1) > 1e-6) & (np.abs(masses(one) - rho[:, None]).min(1) > T)
    want = first(one, exact_count(one, rho)) & (ratio >= floor[:, None])
    np.testing.assert_array_equal((out > -np.inf)[clear], want[clear])
    np.testing.assert_allclose(law(out)[clear], law(np.where(want, one, -INF))[clear], atol=1e-6)


# ---------------------------------------------------------------- S5.4, S5.5: against every subset
SUBSETS = np.array(list(itertools.product([False, True], repeat=V)))
DISTINCT = arrays(np.float32, (ROWS, V), elements=st.integers(-40, 40).map(lambda i: i / 16))


@given(z=DISTINCT)
@EXAMPLES
def test_S5_4_the_first_j_have_the_largest_mass_of_all_sets_of_size_j(z: np.ndarray) -> None:
    mass = law(z) @ SUBSETS.T
    for j in range(1, V + 1):
        same = SUBSETS.sum(1) == j
        mask = kept(by_k, z, np.full(ROWS, j, np.int32))
        np.testing.assert_allclose((law(z) * mask).sum(1), mass[:, same].max(1), atol=1e-12)
        for row in range(ROWS):
            if len(set(z[row])) == V:
                (only,) = SUBSETS[same][mass[row, same] > mass[row, same].max() - 1e-9]
                np.testing.assert_array_equal(only, mask[row])


@given(z=LOGITS, rho=RHOS, other=RHOS)
@EXAMPLES
def test_S5_5_least_size_largest_mass_nested_and_its_ends(z: np.ndarray, rho: np.ndarray, other: np.ndarray) -> None:
    z = some_unmasked(z)
    mask, p, c = kept(by_p, z, rho), law(z), masses(z)
    clear = np.abs(c - rho[:, None]).min(1) > T
    mass = p @ SUBSETS.T
    for row in np.flatnonzero(clear):
        reaching = mass[row] >= rho[row]
        least = SUBSETS[reaching].sum(1).min()
        assert mask[row].sum() == least
        best = mass[row, reaching & (SUBSETS.sum(1) == least)].max()
        assert abs(p[row][mask[row]].sum() - best) < 1e-12
    both = kept(by_p, z, np.maximum(rho, other))
    assert (both | ~mask).all()  # rho <= rho' => subset, as computed
    small = np.minimum(rho, (p.max(1) - T).astype(np.float32))
    np.testing.assert_array_equal(kept(by_p, z, small), np.arange(V) == np.argmax(z, 1)[:, None])
    np.testing.assert_array_equal(kept(by_p, z, np.ones(ROWS, np.float32)), z > -np.inf)


def test_S5_5_the_minimal_set_alone_is_not_unique() -> None:
    z = np.log(np.array([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], np.float32))
    assert law(z)[0, [0, 1]].sum() >= 0.6
    assert law(z)[0, [0, 2]].sum() >= 0.6
    np.testing.assert_array_equal(kept(by_p, z, np.full(2, 0.6, np.float32)), np.array([[1, 1, 0], [0, 1, 1]], bool))


# ---------------------------------------------------------------- S5.6: numbers, and the promise for thresholds
def sizes(p: list[float], rhos: list[float]) -> list[int]:
    z = np.tile(np.log(np.array(p, np.float32)), (len(rhos), 1))
    return kept(by_p, z, np.array(rhos, np.float32)).sum(1).tolist()


def test_S5_6_numbers() -> None:
    p = [0.5, 0.2, 0.2, 0.1]
    assert sizes(p, [0.3, 0.6, 1.0]) == [1, 2, 4]
    np.testing.assert_allclose(law(np.log(np.array(p[:2]))), [0.714, 0.286], atol=5e-4)
    naive = np.cumsum(p)[2], np.cumsum(np.array(p, np.float32))[2]
    assert naive[0] == 0.8999999999999999 < 0.9  # so a sum in float64 would keep 4
    assert naive[1] >= np.float32(0.9)  # and one in float32 keeps 3
    assert sizes(p, [0.9 - 1.01 * T, 0.9 + 1.01 * T]) == [3, 4]  # outside T the set is the exact one
    assert sizes(p, [0.9])[0] in (3, 4)
    with jax.enable_x64(True):
        z = jnp.log(jnp.array([p, p]))
        assert z.dtype == jnp.float64
        exact = (top_p(jnp.array([0.9 - 1e-12, 0.9 + 1e-12]))(z) > -jnp.inf).sum(1)
    assert exact.tolist() == [3, 4]


FAMILIES = ["normal", "flat", "zipf", "peak first", "peak last", "peak deep", "peak noisy", "masked"]


def families(size: int, rng: np.random.Generator) -> np.ndarray:
    """One law a row: flat, smooth, and a peak beside a long tail of about its mass."""
    tail = -math.log(size)
    z = np.empty((len(FAMILIES), size), np.float32)
    z[0], z[1] = 2 * rng.normal(size=size), -3.3
    z[2] = -np.log(rng.permutation(size) + 1.0)
    z[3], z[3, 0] = tail, 0
    z[4], z[4, -1] = tail + 0.1, 0.1234
    z[5], z[5, size // 3] = tail - 5, 0
    z[6], z[6, size // 2] = tail + 0.3 * rng.normal(size=size), 0.3
    z[7] = np.where(rng.random(size) < 0.3, -INF, z[0])
    return z


@pytest.mark.parametrize("size", [64, 49_152, 262_144])
def test_S5_6_promise_on_both_sides_for_peaks_long_tails_and_flat_laws(size: int) -> None:
    rng = np.random.default_rng(size)
    z = families(size, rng)
    c, rows, allowed = masses(z), np.arange(len(z)), 0
    for offset in (0.0, 1e-8, -1e-8, 1.01 * T, -1.01 * T, None):
        j = (rng.random(len(z)) * (z > -np.inf).sum(1)).astype(int)
        rho = rng.random(len(z)) if offset is None else c[rows, j] + offset
        rho = np.clip(rho, 1e-6, 1).astype(np.float32)
        allowed += int(check_promise(z, rho, kept(by_p, z, rho)).sum())
    assert allowed > 0  # the first three offsets aim at the threshold


def test_S5_6_promise_inside_the_whole_program() -> None:
    """The same bound where temperature, top-k and top-p are fused into the sampling step."""
    size, rng = 1024, np.random.default_rng(0)
    z = families(size, rng)
    rho = rng.uniform(0.2, 0.99, len(z)).astype(np.float32)
    table = jnp.zeros((size, size)).at[: len(z)].set(jnp.asarray(z))
    options = Settings(max_new_tokens=1, temperature=1.0, top_k=size // 2, top_p=rho)
    out = generate(markov_model(), table, np.arange(len(z))[:, None], key=jax.random.key(0), settings=options)
    cut = np.where(first(z, np.full(len(z), size // 2)), z, -np.inf)
    rows, token = np.arange(len(z)), np.asarray(out.tokens)[:, 0]
    total = law(cut)[rows, token] / np.exp(np.asarray(out.processed_logprob)[:, 0])  # = c_k of the kept set
    c = masses(cut)
    above = np.array([row[row >= r - T][0] for row, r in zip(c, rho, strict=True)])
    np.testing.assert_allclose(total, above, atol=2 * T)


# ---------------------------------------------------------------- S5.7, S5.8: numbers
def test_S5_7_numbers() -> None:
    p = [0.4, 0.3, 0.15, 0.1, 0.05]
    assert sizes(p, [0.5, 0.8, 0.95 - 2 * T]) == [2, 3, 4]
    q = law(np.asarray(top_p(0.8)(jnp.log(jnp.array([p, p])))))
    np.testing.assert_allclose(q[0, :3], [0.471, 0.353, 0.176], atol=5.1e-4)
    assert abs(np.abs(q[0] - p).sum() / 2 - 0.15) < 1e-6
    assert sizes([0.97, 0.01, 0.01, 0.01], [0.9]) == [1]
    assert sizes([0.25] * 4, [0.9]) == [4]


def test_S5_8_numbers_and_draws() -> None:
    z = jnp.array([[3, 2.5, 1, 0.2, -1, -2]])
    warm = temperature(0.8)(z)
    p = law(np.asarray(warm))[0]
    np.testing.assert_allclose(p, [0.6038, 0.3232, 0.0496, 0.0182, 0.0041, 0.0012], atol=5.1e-5)
    q = law(np.asarray(top_p(0.95)(warm)))[0]
    np.testing.assert_allclose(q, [0.6183, 0.3310, 0.0508, 0, 0, 0], atol=5.1e-5)
    assert abs(p[:3].sum() - 0.9765) < 5.1e-5
    assert abs(np.abs(p - q).sum() / 2 - 0.0235) < 5.1e-5
    keys = keys_.row_keys(jax.random.key(8), 200_000)
    u = keys_.uniform(keys, jnp.zeros(200_000, jnp.int32), keys_.Stream.DRAW, jnp.float32)
    batch = jnp.broadcast_to(chain(temperature(0.8), top_p(0.95))(z), (200_000, 6))
    token = np.asarray(jax.jit(draw)(batch, u).token)
    assert np.abs(np.bincount(token, minlength=6) / 200_000 - q).max() < 0.002
    assert set(token) == {0, 1, 2}


# ---------------------------------------------------------------- no sort anywhere
SORTS = re.compile(r"\bsort\b|\bargsort\b|top_k\[|approx_top_k|TopK|stablehlo\.sort|chlo\.top_k|mhlo\.topk")


def program(f: Callable[..., Any], *args: Any) -> str:
    """The traced and the compiled program of ``f``, without the names of Python functions in it."""
    lowered = jax.jit(f).lower(*args)
    compiled = re.sub(r"metadata=\{[^}]*\}|^HloModule.*$", "", lowered.compile().as_text() or "", flags=re.MULTILINE)
    instructions = re.findall(r"(?:=|\]|\}) (sort|topk)\(|custom_call_target=\"(TopK|[^\"]*Sort)\"", compiled)
    return f"{jax.make_jaxpr(f)(*args)} {lowered.as_text()} {''.join('TopK ' for _ in instructions)}"


def test_S5_1_the_search_for_sorts_finds_them() -> None:
    z = jnp.zeros((2, 1000))
    for f in (jnp.sort, jnp.argsort, lambda x: jax.lax.top_k(x, 3), lambda x: jax.lax.approx_max_k(x, 3)):
        assert SORTS.search(program(f, z))


@pytest.mark.parametrize("name", ["top_k", "top_p", "draw", "sample step"])
def test_S5_1_nothing_sorts_the_vocabulary(name: str) -> None:
    z, number = jnp.zeros((2, 1000)), jnp.full(2, 0.5)
    if name == "sample step":
        start = jax.eval_shape(lambda: _state())
        text = program(sample(markov_model()).step, jax.ShapeDtypeStruct((50, 50), jnp.float32), start)
    else:
        f: Callable[..., Any] = {"top_k": lambda x, u: top_k(3)(x), "top_p": lambda x, u: top_p(u)(x), "draw": draw}[
            name
        ]
        text = program(f, z, number)
    assert len(text) > 1000
    assert not SORTS.search(text)


def _state() -> Any:
    from jaxdecode.generation import start

    cuts = {"typical_p": 0.9, "epsilon": 0.1, "eta": 0.1, "top_n_sigma": 1, "p_less": 1, "xtc": (0.5, 0.1)}
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "dry": (1, 2, 1), "no_repeat_ngram": 2}
    lists = {"logit_bias": {3: 1.0}, "banned_ids": [4], "bad_words": [[1, 2]], "forced": {0: 5}, "mirostat": (0, 0.1)}
    options = Settings(max_new_tokens=2, top_k=3, top_p=0.9, min_p=0.1, **cuts, **penalties, **lists)
    return start(markov_model(), jnp.zeros((50, 50)), [[0], [1]], key=jax.random.key(0), settings=options)[1]
