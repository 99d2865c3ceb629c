"""The search for a cut over a large vocabulary: every way it can go, its numbers, and how often it reads all ids."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from jaxdecode import Settings
from jaxdecode.generation import start
from jaxdecode.testing import markov_model
from jaxdecode.transforms import draw, search, select
from jaxdecode.transforms.search import BLOCK, Cut, cut

V = 64 * BLOCK + 37  # the last block is not full
NAMES = ["peaked", "smooth", "ties", "tail", "few", "masked", "sorted", "one"]
by_mass = jax.jit(lambda z, p: cut(z, select.weights(z), p * jnp.sum(select.weights(z), -1), key=select.weights(z)))
by_count = jax.jit(lambda z, k: cut(z, (z > -jnp.inf).astype(jnp.int32), k))


def laws(size: int = V) -> np.ndarray:
    """A row for every way: found among the largest, narrowed down, all ids of one logit, a long tail, few or one id."""
    rng = np.random.default_rng(0)
    z = rng.normal(0, 0.1, (len(NAMES), size))
    z[0] = -2 * np.log(1 + rng.permutation(size))
    z[2] = -1.5
    z[3], z[3, size // 3] = -np.log(size) + 0.3 * z[3], 0
    z[4, 5:] = -np.inf
    z[5, rng.random(size) < 0.4] = -np.inf
    z[6] = np.sort(z[6])
    z[7], z[7, 77] = -np.inf, 2
    return z.astype(np.float32)


def expected(z: np.ndarray, amount: np.ndarray, needed: np.ndarray) -> list[dict[str, Any]]:
    """What a sort says, row by row."""
    out = []
    for row, w, need in zip(z, amount, needed, strict=True):
        order = np.argsort(-row.astype(np.float64), kind="stable")[: (row > -np.inf).sum()]
        mass = np.cumsum(w[order].astype(np.float64))
        count = min(int((mass < need).sum()) + 1, len(order))
        removed = row[order[count]] if count < len(order) else -np.inf
        out.append({"kept": set(order[:count].tolist()), "mass": mass[count - 1], "removed": removed, "count": count})
    return out


def check(found: Cut, z: np.ndarray, amount: np.ndarray, needed: np.ndarray) -> None:
    kept = np.asarray(select.kept_by(jnp.asarray(z), found))
    for i, want in enumerate(expected(z, amount, needed)):
        assert set(np.flatnonzero(kept[i]).tolist()) == want["kept"], NAMES[i]
        np.testing.assert_allclose(found.mass[i], want["mass"], rtol=1e-5, err_msg=NAMES[i])
        assert found.removed[i] == want["removed"], NAMES[i]
        assert bool(found.one[i]) == (want["count"] == 1), NAMES[i]
        last = min(z[i, list(want["kept"])])
        assert found.last[i] == last, NAMES[i]
        np.testing.assert_allclose(found.each[i], amount[i, z[i] == last][0], err_msg=NAMES[i])


@pytest.mark.parametrize("share", [0.2, 0.9, 0.999])
def test_S5_2_every_way_gives_the_cut_of_a_sort(share: float) -> None:
    z = laws()
    w = np.asarray(select.weights(jnp.asarray(z)))
    exact = w.astype(np.float64)
    order = np.take_along_axis(exact, np.argsort(-z.astype(np.float64), 1, kind="stable"), 1)
    c = np.cumsum(order, 1) / exact.sum(1, keepdims=True)
    j = (c < share).sum(1)
    middle = (c[np.arange(len(z)), j] + np.where(j > 0, c[np.arange(len(z)), np.maximum(j - 1, 0)], 0)) / 2
    p = np.where(np.isclose(middle, 1), 0.5, middle).astype(np.float32)  # as far from an edge as can be
    check(by_mass(z, p), z, w, p * exact.sum(1))


@pytest.mark.parametrize("k", [1, 60, 500, V - 40, 2 * V])
def test_S5_1_every_way_gives_the_first_k(k: int) -> None:
    z = laws()
    check(by_count(z, np.full(len(z), k, np.int32)), z, (z > -np.inf).astype(np.int32), np.full(len(z), k))


def test_a_row_goes_its_way_whatever_its_neighbours_need() -> None:
    """Bit by bit: the search that another row needs changes nothing of a row that does not need it."""
    z = laws()
    together = by_mass(z, np.full(len(z), 0.9, np.float32))
    turned = by_mass(z[::-1], np.full(len(z), 0.9, np.float32))
    for i in range(len(z)):
        alone = by_mass(np.tile(z[i], (len(z), 1)), np.full(len(z), 0.9, np.float32))
        for name, a, b, c in zip(Cut._fields, together, alone, turned, strict=True):
            np.testing.assert_array_equal(a[i], b[0], err_msg=f"{NAMES[i]} {name}")
            np.testing.assert_array_equal(a[i], c[len(z) - 1 - i], err_msg=f"{NAMES[i]} {name}")


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_laws_with_thousands_of_kept_ids_are_narrowed_down_to_few_blocks(share: float) -> None:
    """The search over all ids costs several times as much: it is for ties and long tails, not for every flat law."""
    rng = np.random.default_rng(2)
    z = jnp.asarray(
        np.outer([1, 1.5, 2, 2.5] * 8, np.ones(384 * BLOCK)) * rng.normal(size=(32, 384 * BLOCK)), "float32"
    )
    w = select.weights(z)
    blocks = search._Blocks(*(search.blocks_of(x, fill) for x, fill in ((z, -jnp.inf), (w, 0), (w, -jnp.inf))))
    found = jax.jit(search._candidates)(blocks, w, w, share * jnp.sum(w, axis=-1))
    kept = select.kept_by(z, by_mass(z, jnp.full((32,), share, jnp.float32)))
    assert np.median(kept.sum(-1)) > 1000
    assert found.done.mean() > 0.9  # a sample may mislead


# ---------------------------------------------------------------- how often all ids are read
READS = {"reduce_max", "reduce_min", "reduce_sum", "reduce_or", "reduce_and", "argmax", "argmin"}
SLOW = {"sort", "cumsum", "cumlogsumexp", "scatter", "scatter-add"}


def reads(jaxpr: core.Jaxpr, size: int, best: bool) -> int:
    """Reductions over ``size`` numbers or more; of a cond its cheapest or its dearest branch, of a while one turn."""
    total = 0
    for eqn in jaxpr.eqns:
        large = any(getattr(x.aval, "size", 0) >= size for x in eqn.invars)
        total += eqn.primitive.name in READS and large
        assert not (large and eqn.primitive.name in SLOW), eqn.primitive.name
        inner = [x for v in eqn.params.values() for x in (v if isinstance(v, (tuple, list)) else [v])]
        bodies = [x.jaxpr if isinstance(x, core.ClosedJaxpr) else x for x in inner]  # of newer jax both at once
        found = [reads(x, size, best) for x in bodies if isinstance(x, core.Jaxpr)]
        if eqn.primitive.name == "cond":
            total += min(found) if best else max(found)
        else:
            total += sum(found) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
    return total


def test_a_peaked_law_is_cut_by_three_readings_of_all_ids() -> None:
    """The weights' maximum and sum, and the blocks' maxima; more only where the largest blocks do not hold p."""
    rows, size = 2, 2048 * BLOCK
    z, p = jax.ShapeDtypeStruct((rows, size), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.float32)
    jaxpr = jax.make_jaxpr(select.cut_top_p)(z, p).jaxpr
    assert reads(jaxpr, rows * size, best=True) == 3
    narrowing, others, ties = 8, 12, size.bit_length()  # a turn of the search over all ids is among the others
    assert reads(jaxpr, rows * size, best=False) <= 3 + narrowing + others + ties
    assert reads(jaxpr, rows * size // 8, best=True) == 3  # nothing of an eighth is searched either


def test_a_draw_reads_all_ids_thrice() -> None:
    rows, size = 2, 2048 * BLOCK
    z, u = jax.ShapeDtypeStruct((rows, size), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.float32)
    assert reads(jax.make_jaxpr(draw)(z, u, z).jaxpr, rows * size, best=True) == 3


def test_a_sampling_step_reads_all_ids_seldom() -> None:
    """Raw law 2 (its maximum is that of the temperature too), top-p 4, processed law 2; a draw has 3 more."""
    size = 128 * BLOCK
    model, table = markov_model(), jax.ShapeDtypeStruct((4, size), jnp.float32)
    options = Settings(max_new_tokens=2, temperature=1.0, top_p=0.9)
    decoder, state = start(model, jnp.zeros((4, size)), [[1], [2]], key=jax.random.key(0), settings=options)
    assert reads(jax.make_jaxpr(decoder.step)(table, state).jaxpr, 2 * size, best=True) <= 12
