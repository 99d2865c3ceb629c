"""Margins: how far a decision was from another one, and that the promise made with them holds.

The promise (S6.5): if all logits move by at most eps, a greedy token stays while its margin > 2 eps, and a sampled one
while its margin > tanh(eps / (2 tau)) plus rounding. The set margin promises the same for the set of ids that is kept.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdecode import Context, LogitsTransform, Settings, chain, generate, greedy, min_p, temperature, top_k, top_p
from jaxdecode import keys as keys_
from jaxdecode.testing import markov_model
from jaxdecode.transforms import draw, init, process

ROWS, V = 128, 8
INF = np.inf
KINDS = ["nothing", "top_k", "top_p", "min_p", "all"]


class Decision(NamedTuple):
    token: np.ndarray
    kept: np.ndarray
    margin: np.ndarray
    set_margin: np.ndarray


@jax.jit
def _decide(transform: LogitsTransform, logits: jax.Array, u: jax.Array, greedy: jax.Array) -> tuple[jax.Array, ...]:
    rows = len(u)
    none = jnp.zeros(rows, jnp.int32)
    ctx = Context(jnp.zeros((rows, 1), jnp.int32), none, none, none, jax.vmap(jax.random.key)(none))
    done = process(transform, logits, ctx, init(transform, ctx), greedy)
    drawn = draw(done.logits, u)
    return drawn.token, done.logits > -jnp.inf, jnp.minimum(drawn.margin, done.token_margin), done.set_margin


def decide(transform: LogitsTransform, logits: np.ndarray, u: Any, greedy: Any = False) -> Decision:
    """What the sampling step decides for ``logits[B,V]`` with the uniform numbers ``u[B]``."""
    u, greedy = (np.broadcast_to(np.asarray(x, t), logits.shape[:1]) for x, t in ((u, logits.dtype), (greedy, bool)))
    return Decision(*map(np.asarray, _decide(transform, *map(jnp.asarray, (logits, u, greedy)))))


def logits_of(*laws: list[float]) -> np.ndarray:
    return np.log(np.array(laws, np.float64))


def cuts(k: Any = 0, p: Any = 1.0, floor: Any = 0.0, *, tau: Any = 1.0, dtype: str = "float32") -> LogitsTransform:
    """The chain of all filters, each off unless asked for: one program for every case."""
    return chain(
        temperature(jnp.asarray(tau, dtype)), top_k(k), top_p(jnp.asarray(p, dtype)), min_p(jnp.asarray(floor, dtype))
    )


class Rows(NamedTuple):
    logits: np.ndarray
    u: np.ndarray
    tau: np.ndarray
    transform: LogitsTransform


def random_rows(kind: str, dtype: str, seed: int, rows: int = ROWS, size: int = V) -> Rows:
    """Laws with ties, masked ids and peaks; settings that differ by row, off values among them."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(rows, size)) * rng.choice([0.3, 1, 3], (rows, 1))
    z[rows // 2 :] = np.round(z[rows // 2 :] * 4) / 4
    z[(rng.random(z.shape) < 0.2) & (rng.random((rows, 1)) < 0.3)] = -INF
    z[:, 0] = np.where(np.isneginf(z).all(1), 0, z[:, 0])
    tau = rng.choice([0.5, 1.0, 2.0], rows)
    off = rng.random((3, rows)) < (0.2 if kind == "all" else 0)
    k = np.where(off[0], 0, rng.integers(1, size + 1, rows))
    p = np.where(off[1], 1, rng.uniform(0.05, 1, rows))
    floor = np.where(off[2], 0, rng.uniform(0.02, 0.9, rows))
    on = {name: kind in (name, "all") for name in KINDS}
    transform = cuts(
        k * on["top_k"], np.where(on["top_p"], p, 1), floor * on["min_p"], tau=jnp.asarray(tau, dtype), dtype=dtype
    )
    return Rows(z.astype(dtype), rng.random(rows).astype(dtype), tau, transform)


def guaranteed(margin: np.ndarray, tau: np.ndarray, slack: float) -> np.ndarray:
    """The largest eps with margin > tanh(eps / (2 tau)) + slack, kept finite."""
    return 2 * tau * np.arctanh(np.clip(margin - slack, 0, 0.9999))


def slack(kind: str, dtype: str) -> float:
    """Rounding: of the CDF, and in float32 of the top-p threshold (T = 2^-16) and its distances."""
    if dtype == "float64":
        return 1e-13
    return 2.0**-21 if kind == "nothing" else 2.0**-15


def pushes(z: np.ndarray, token: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Directions [B,V] of -1 and 1 that hurt most: against edges in id order and in rank order, and at random."""
    rank = np.argsort(np.argsort(-z, axis=1, kind="stable"), axis=1, kind="stable")
    ids = np.broadcast_to(np.arange(z.shape[1]), z.shape)
    out = [np.where(ids <= token[:, None], 1.0, -1.0), np.where(ids < token[:, None], 1.0, -1.0)]
    out += [np.where(rank <= j, 1.0, -1.0) for j in range(z.shape[1] - 1)]
    out += [np.where(ids == token[:, None], 1.0, -1.0), np.where(rank == rng.integers(1, 4, (len(z), 1)), 1.0, -1.0)]
    out = [sign * x for x in out for sign in (1, -1)]
    return [
        *out,
        *(rng.choice([-1.0, 1.0], z.shape) for _ in range(6)),
        *(rng.uniform(-1, 1, z.shape) for _ in range(2)),
    ]


# ---------------------------------------------------------------- the promise
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**31 - 1))
@settings(max_examples=4, deadline=None, derandomize=True)
def test_S6_5_nothing_changes_below_the_margins(kind: str, dtype: str, seed: int) -> None:
    """At 0.999 of the largest eps the margin allows, in every bad direction: same token, and same set of ids."""
    with jax.enable_x64(dtype == "float64"):
        z, u, tau, transform = random_rows(kind, dtype, seed)
        was = decide(transform, z, u)
        assert (was.margin >= 0).all()
        assert (was.set_margin >= 0).all()
        for push in pushes(z, was.token, np.random.default_rng(seed)):
            for name in ("token", "kept"):
                margin = was.margin if name == "token" else was.set_margin
                eps = guaranteed(margin, tau, slack(kind, dtype)) * 0.999
                now = decide(transform, (z + push * eps[:, None]).astype(dtype), u)
                np.testing.assert_array_equal(getattr(now, name)[eps > 0], getattr(was, name)[eps > 0])


@given(seed=st.integers(0, 2**31 - 1))
@settings(max_examples=8, deadline=None, derandomize=True)
def test_S6_5_greedy_is_unchanged_while_the_margin_exceeds_two_eps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    z = np.round(rng.normal(size=(V, V)) * 8).astype(np.float32) / 4
    options = Settings(max_new_tokens=1, temperature=0, top_k=2, top_p=0.5)
    starts = np.arange(V)[:, None]
    out = generate(markov_model(), jnp.asarray(z), starts, settings=options)
    token, margin = np.asarray(out.tokens)[:, 0], np.asarray(out.margin)[:, 0]
    top = np.sort(z, axis=1)
    np.testing.assert_array_equal(margin, top[:, -1] - top[:, -2])  # in logits; filters are skipped
    np.testing.assert_array_equal(out.set_margin, np.full((V, 1), INF))
    worst = np.where(np.arange(V) == token[:, None], -1, 1)
    for factor, same in ((0.499, True), (0.501, False)):
        moved = (z + worst * margin[:, None] * factor).astype(np.float32)
        now = np.asarray(generate(markov_model(), jnp.asarray(moved), starts, settings=options).tokens)[:, 0]
        np.testing.assert_array_equal((now == token)[margin > 0], same)


@pytest.mark.parametrize("tau", [0.25, 1.0, 4.0])
def test_S6_5_greedy_margin_is_that_of_the_logits_before_temperature(tau: float) -> None:
    """The greedy decoder takes the arg max whatever the temperature, so temperature must not stretch its margin."""
    table = jnp.array([[0.0, 0.5, 2.0], [1.0, 0.0, -3.0], [0.0, 0.0, 0.0]])
    options = Settings(max_new_tokens=1, temperature=tau)
    decoder = greedy(markov_model())
    out = generate(markov_model(), table, [[0], [1], [2]], key=jax.random.key(0), settings=options, decoder=decoder)
    np.testing.assert_allclose(out.margin[:, 0], [1.5, 1.0, 0.0], rtol=1e-6)


# ---------------------------------------------------------------- the numbers of each cut
def test_S6_5_sampled_margin_is_the_distance_to_the_inner_edges() -> None:
    z = logits_of([0.2, 0.3, 0.5], [0.2, 0.3, 0.5], [0.2, 0.3, 0.5], [0.2, 0.3, 0.5], [0.2, 0.3, 0.5])
    out = decide(chain(), z.astype(np.float32), np.array([0.01, 0.25, 0.45, 0.6, 0.97]))
    assert out.token.tolist() == [0, 1, 1, 2, 2]
    np.testing.assert_allclose(out.margin, [0.19, 0.05, 0.05, 0.1, 0.47], atol=1e-6)
    assert (out.set_margin == INF).all()


@pytest.mark.parametrize("size", [8, 300])
def test_S6_5_sampled_margin_is_right_to_the_rounding_of_the_edges(size: int) -> None:
    z, u, tau, transform = random_rows("nothing", "float32", 4, size=size)
    w = np.exp((z.astype(np.float64) - z.max(1, keepdims=True)) / tau[:, None])
    edges = np.pad(np.cumsum(w, 1) / w.sum(1, keepdims=True), ((0, 0), (1, 0)))
    inner = (edges > 1e-12) & (edges < 1 - 1e-12)
    distance = np.where(inner, np.abs(edges - u[:, None].astype(np.float64)), INF)
    np.testing.assert_allclose(decide(transform, z, u).margin, distance.min(1), atol=2.0**-22)


def test_S6_5_distances_of_the_cuts() -> None:
    z = np.repeat(logits_of([0.4, 0.3, 0.2, 0.1]), 2, 0).astype(np.float32)
    far = 1e-3  # u so near 0 that only the cuts count: token 0's edge is .4 and more away

    def margins(f: LogitsTransform) -> tuple[float, float]:
        out = decide(f, z, far)
        return float(out.margin[0]), float(out.set_margin[0])

    cut = min(0.75 - 0.7, 0.9 - 0.75, (0.2 - 0.1) / 2)
    np.testing.assert_allclose(margins(cuts(p=0.75)), [cut, cut], atol=1e-6)
    np.testing.assert_allclose(margins(cuts(p=0.89)), [0.01, 0.01], atol=1e-6)
    np.testing.assert_allclose(margins(cuts(p=0.71)), [0.01, 0.01], atol=1e-6)
    np.testing.assert_allclose(margins(cuts(2)), [0.05, np.tanh(np.log(3 / 2) / 4)], atol=1e-6)
    ratio = np.tanh(min(np.log(0.5 / 0.4), np.log(0.75 / 0.5)) / 4)
    np.testing.assert_allclose(margins(cuts(floor=0.4)), [ratio, ratio], atol=1e-6)
    for off in (cuts(), cuts(4), cuts(9)):
        np.testing.assert_allclose(margins(off), [0.4 - far, INF], atol=1e-6)


def test_S6_5_the_distance_below_counts_even_where_nothing_was_removed() -> None:
    """p = (.6, .4), rho = .61: both ids stay, yet moving .011 of mass to id 0 removes id 1, and u = .7 draws another.

    Margins that counted only cuts that removed something would be .1 here and promise the token.
    """
    with jax.enable_x64(True):
        f, z = cuts(p=0.61, dtype="float64"), logits_of([0.6, 0.4], [0.6, 0.4])
        was = decide(f, z, 0.7)
        assert was.kept.all()
        assert (was.token == 1).all()
        eps = (np.log(0.611 / 0.389) - np.log(0.6 / 0.4)) / 2
        now = decide(f, z + np.array([eps, -eps]), 0.7)
        assert (now.token == 0).all()
        assert np.tanh(eps / 2) < 0.1  # the promise made from the edges of the CDF alone would have been broken
        assert (was.margin <= np.tanh(eps / 2)).all()
        np.testing.assert_allclose(was.margin, 0.01, atol=1e-12)
        np.testing.assert_allclose(was.set_margin, 0.01, atol=1e-12)


def test_S6_5_the_least_likely_kept_id_counts_in_min_p() -> None:
    """p = (.6, .4), min_p = .65: nothing is removed, and a ratio of .667 is near its line."""
    with jax.enable_x64(True):
        f, z = cuts(floor=0.65, dtype="float64"), logits_of([0.6, 0.4], [0.6, 0.4])
        was = decide(f, z, 0.9)
        eps = np.log((0.4 / 0.6) / 0.65) / 2 * 1.001
        assert was.kept.all()
        assert (decide(f, z + np.array([eps, -eps]), 0.9).token == 0).all()
        np.testing.assert_allclose(was.margin, np.tanh(np.log((0.4 / 0.6) / 0.65) / 4), rtol=1e-9)


def test_S6_5_a_hair_around_a_threshold_changes_the_law() -> None:
    """p = (.5, .2, .2, .1): 1e-7 around rho = .7 turns (.714, .286) into (.556, .222, .222); the set margin tells."""
    with jax.enable_x64(True):
        z = np.repeat(logits_of([0.5, 0.2, 0.2, 0.1]), 3, 0)
        out = decide(cuts(p=[0.7 - 1e-7, 0.7 + 1e-7, 0.6], dtype="float64"), z, 0.1)
        p = np.where(out.kept, np.exp(z), 0)
        p /= p.sum(1, keepdims=True)
        np.testing.assert_allclose(p[0], [0.714, 0.286, 0, 0], atol=5e-4)
        np.testing.assert_allclose(p[1], [0.556, 0.222, 0.222, 0], atol=5e-4)
        assert (out.set_margin[:2] <= 1.001e-7).all()
        assert (out.token == 0).all()


# ---------------------------------------------------------------- ends: one id left, unknown, past the end
@pytest.mark.parametrize("kind", KINDS)
def test_S6_5_one_id_left_gives_infinity(kind: str) -> None:
    """A mask left one id: no movement of logits can change anything."""
    z = np.array([[-INF, 3, -INF], [0, -INF, -INF]], np.float32)
    numbers: dict[str, Any] = {"top_k": {"k": 2}, "top_p": {"p": 0.5}, "min_p": {"floor": 0.3}, "nothing": {}}
    numbers["all"] = {name: x for one in numbers.values() for name, x in one.items()}
    out = decide(cuts(**numbers[kind]), z, 0.4)
    assert out.token.tolist() == [1, 0]
    np.testing.assert_array_equal(out.margin, [INF, INF])
    np.testing.assert_array_equal(out.set_margin, [INF, INF])


def test_S6_5_where_a_cut_left_one_id_only_the_cut_counts() -> None:
    z = np.repeat(logits_of([0.7, 0.2, 0.1]), 2, 0).astype(np.float32)
    np.testing.assert_allclose(decide(cuts(1), z, 0.5).margin, 0.25, atol=1e-6)
    np.testing.assert_allclose(decide(cuts(p=0.4), z, 0.5).margin, 0.25, atol=1e-6)
    np.testing.assert_allclose(decide(cuts(p=0.65), z, 0.5).margin, 0.05, atol=1e-6)


def test_S6_5_temperature_zero_as_a_transform_does_not_promise_everything() -> None:
    """It masks all but the arg max; a second id .002 below would be chosen after a move of .001."""
    z = np.array([[1.0, 0.998, -3.0], [0.998, 1.0, 1.0]], np.float32)
    out = decide(temperature(0.0), z, 0.5)
    assert out.token.tolist() == [0, 1]
    assert not (out.margin > 0.0021).any()  # NaN, unknown, would do as well
    assert not (out.set_margin > 0.0021).any()


def test_S6_5_greedy_rows_skip_temperature_zero_and_keep_their_margin() -> None:
    table = jnp.array([[0.0, 0.5, 2.0], [1.0, 0.0, -3.0]])
    options = Settings(max_new_tokens=1, temperature=0)
    out = generate(markov_model(), table, [[0], [1]], settings=options, transform=temperature(0.0))
    np.testing.assert_allclose(out.margin[:, 0], [1.5, 1.0], rtol=1e-6)
    assert (np.asarray(out.set_margin) == INF).all()


def _drop_last(params: Any, logits: jax.Array, ctx: Context, state: Any) -> jax.Array:
    return logits.at[:, -1].set(-jnp.inf)


def _claims(params: Any, before: jax.Array, after: jax.Array, ctx: Context, state: Any) -> tuple[jax.Array, jax.Array]:
    return jnp.full(before.shape[:1], 0.0625), jnp.full(before.shape[:1], 0.03125)


def test_S6_5_a_users_filter_without_margins_gives_nan_and_a_score_or_mask_infinity() -> None:
    z = np.repeat(logits_of([0.3, 0.3, 0.4]), 2, 0).astype(np.float32)
    unknown = LogitsTransform((), "filter", _drop_last)
    out = decide(chain(top_k(2), unknown, top_p(0.9)), z, 0.1, [False, True])  # greedy rows skip filters
    for margin in (out.margin, out.set_margin):
        assert np.isnan(margin).tolist() == [True, False]
    stated = decide(dataclasses.replace(unknown, margin_fn=_claims), z, 0.1)
    np.testing.assert_array_equal(stated.margin, 0.0625)
    np.testing.assert_array_equal(stated.set_margin, 0.03125)
    for kind in ("score", "mask"):
        out = decide(dataclasses.replace(unknown, kind=kind), z, 0.1)
        np.testing.assert_allclose(out.margin, 0.4, atol=1e-6)
        np.testing.assert_array_equal(out.set_margin, INF)


# ---------------------------------------------------------------- not vacuous
def test_S6_5_margins_are_mostly_positive() -> None:
    for kind in KINDS:
        z, u, _, transform = random_rows(kind, "float32", 1)
        untied = slice(0, ROWS // 2)  # a tie at a cut has margin 0, and rightly so
        was = decide(transform, z, u)
        assert (was.margin[untied] > 1e-3).mean() > 0.8
        assert (was.set_margin[untied] > 1e-3).mean() > 0.8


def smallest_flip(rows: Rows, name: str) -> np.ndarray:
    """The least eps on a fine grid that changes ``token`` or ``kept`` in some of all 2^V directions, inf if none."""
    z, u, _, transform = rows
    signs = np.array(list(itertools.product([-1.0, 1.0], repeat=z.shape[1])))
    grid = np.geomspace(1e-3, 4, 100)
    was = getattr(decide(transform, z, u), name)
    flipped = np.full(len(z), INF)
    for eps in grid[::-1]:
        for sign in signs:
            now = getattr(decide(transform, z + sign * eps, u), name)
            changed = (now != was).reshape(len(z), -1).any(1)
            flipped[changed] = eps
    return flipped


@pytest.mark.parametrize(
    ("kind", "name"), [("nothing", "token"), ("top_k", "kept"), ("top_p", "kept"), ("min_p", "kept")]
)
def test_S6_5_margins_are_near_the_smallest_change_that_flips(kind: str, name: str) -> None:
    """A search over all directions never beats the promise, and finds a flip within a small factor of it."""
    with jax.enable_x64(True):
        rows = random_rows(kind, "float64", 2, rows=64, size=3)
        was = decide(rows.transform, rows.logits, rows.u)
        promised = guaranteed(was.margin if name == "token" else was.set_margin, rows.tau, 0)
        found = smallest_flip(rows, name)
    seen = np.isfinite(found) & (promised > 2e-3)
    assert (promised[seen] <= found[seen]).all()
    assert seen.sum() > 20
    ratio = found[seen] / promised[seen]
    assert np.median(ratio) < 2
    assert np.quantile(ratio, 0.9) < 6
    if kind in ("top_k", "min_p"):  # these two are exact, up to the step of the grid
        assert ratio.max() < 1.1


def test_S6_5_two_ids_against_the_closed_form() -> None:
    """V = 2: the token flips exactly at eps = tau |logit(u) - logit(p_0)| / 2."""
    rng = np.random.default_rng(3)
    p, u, tau = rng.uniform(0.15, 0.85, 200), rng.uniform(0.15, 0.85, 200), rng.choice([0.5, 1.0, 2.0], 200)
    with jax.enable_x64(True):
        z = np.stack([tau * np.log(p / (1 - p)), np.zeros(200)], 1)
        was = decide(temperature(jnp.asarray(tau)), z, u)
    flip = tau * np.abs(np.log(u / (1 - u)) - np.log(p / (1 - p))) / 2
    ratio = flip / guaranteed(was.margin, tau, 0)
    assert ratio.min() >= 1 - 1e-9
    assert ratio.max() < 2


# ---------------------------------------------------------------- in the loop
def test_S6_5_generate_reports_these_margins() -> None:
    z, _, tau, _ = random_rows("all", "float32", 5, rows=V)
    limits = np.resize([1, 1, 2], V)
    options = Settings(max_new_tokens=limits, temperature=tau, top_k=np.resize([3, 0], V), top_p=0.83, min_p=0.1)
    key = jax.random.key(6)
    out = generate(markov_model(), jnp.asarray(z), np.arange(V)[:, None], key=key, settings=options)
    u = keys_.uniform(keys_.row_keys(key, V), jnp.ones(V, jnp.int32), keys_.Stream.DRAW, jnp.float32)
    want = decide(options.rules(V, V).transform, z, np.asarray(u))
    np.testing.assert_array_equal(out.tokens[:, 0], want.token)
    np.testing.assert_allclose(out.margin[:, 0], want.margin, atol=1e-6)
    np.testing.assert_allclose(out.set_margin[:, 0], want.set_margin, atol=1e-6)
    assert (np.asarray(out.margin)[limits == 1, 1] == INF).all()  # past the end
    assert (np.asarray(out.set_margin)[limits == 1, 1] == INF).all()
