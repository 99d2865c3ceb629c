"""Uniform quantization, S8.1 to S8.6: grids, codes, bounds and packed planes, against float64 NumPy."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdecode as jd
from jaxdecode import quant
from jaxdecode.quant import Uniform, bounds, grid_of, nearest_codes, pack, parse_scheme, quantize_matrix, unpack

TINY = float(np.finfo(np.float32).tiny)
BITS = range(1, 9)
GRIDS = ("even", "zero", "affine")
GROUPS = (32, 5, "channel", "tensor")
ALL = [Uniform(b, grid, group) for b in BITS for grid in GRIDS for group in GROUPS]  # type: ignore[arg-type]
S8_6 = np.random.default_rng(20261010).normal(0, 0.05, (64, 48))


def levels(q: jd.QTensor) -> np.ndarray:
    """The values of every code of a weight with one grid, in float64."""
    _, scale, offset = unpack(q)
    codes = np.arange(2**q.form.bits)  # type: ignore[union-attr]
    return np.float64(scale[0, 0]) * codes + np.float64(offset[0, 0])


def wide(q: jd.QTensor) -> np.ndarray:
    """What a weight stands for, by its codes, in float64."""
    codes, scale, offset = (np.asarray(x, np.float64) for x in unpack(q))
    n = q.form.group  # type: ignore[union-attr]
    scale, offset = (np.repeat(x, n, axis=1)[:, : codes.shape[1]] for x in (scale, offset))
    return scale * codes + offset


def rounded(w: np.ndarray, name: str, **how: Any) -> jd.QTensor:
    return quantize_matrix(w.astype(np.float32), parse_scheme("scheme", name, **how))  # type: ignore[arg-type]


def hard_matrix() -> np.ndarray:
    """[20,72]: ordinary rows, and zeros, constants, outliers, denormal and huge numbers, groups of all sizes."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(20, 72))
    w[1], w[2], w[3], w[4] = 0, 0.3, -7.25, rng.uniform(5, 6, 72)
    w[5, 40] = 1000
    w[6] *= 1e-41
    w[7] *= 3e37 / np.abs(w[7]).max()
    w[8] *= 1e-36
    w[9] *= np.repeat(10.0 ** np.arange(-4, 5), 8)
    w[10, :32], w[10, 64:] = 0, 1e-3
    w[11] = np.arange(72) - 36
    w[12, 1:] = 0
    w[13] = -np.abs(w[13])
    w[14] = np.sign(w[14])
    w[15] *= np.where(np.arange(72) < 32, 1e30, 1e-30)
    w[16] = 1e-3 * rng.standard_cauchy(72)
    return w.astype(np.float32)


# Grids and codes


def test_names_of_schemes() -> None:
    assert parse_scheme("s", "int4") == parse_scheme("s", "int4_even_g32") == Uniform(4, "even", 32)
    assert parse_scheme("s", "int3_affine_g64", range="search") == Uniform(3, "affine", 64, "search")
    assert parse_scheme("s", "int8_even") == Uniform(8, "even", 32)
    assert parse_scheme("s", "int8") == "int8"
    for uniform in ALL:
        assert parse_scheme("s", str(uniform)) == parse_scheme("s", uniform) == uniform
    for wrong in ({"bits": 9}, {"grid": "odd"}, {"group": 0}, {"group": "row"}, {"range": "min"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
            Uniform(**{"bits": 4, **wrong})  # type: ignore[arg-type]


def test_S8_1_S8_5_levels_of_the_even_grid() -> None:
    w = np.array([[1, -1, 0.2, 0.5, 0, 0.1]])
    expected = {8: 0.00784, 4: 0.1333, 2: 2 / 3}
    for b in BITS:
        q = rounded(w, f"int{b}_even_tensor")
        step = 2 / (2**b - 1)
        np.testing.assert_allclose(levels(q), -1 + step * np.arange(2**b), atol=2.0**-15)
        np.testing.assert_array_equal(levels(q), -levels(q)[::-1])
        assert np.abs(levels(q)).min() > 0.49 * step, "0 is no level"
        assert np.abs(levels(q)).max() >= 1
        if b in expected:
            assert float(q.scale[0, 0]) == pytest.approx(expected[b], rel=6e-4)
    np.testing.assert_allclose(wide(rounded(w, "int3_tensor"))[0, :4], [1, -1, 1 / 7, 3 / 7], atol=2.0**-15)
    assert abs(wide(rounded(w, "int3_tensor"))[0, 4]) == pytest.approx(1 / 7, rel=1e-4)  # the largest error, attained


def test_S8_3_a_bit_more_than_halves_the_step() -> None:
    steps = [float(rounded(S8_6, f"int{b}_tensor").scale[0, 0]) for b in BITS]
    for b, (wider, step) in enumerate(itertools.pairwise(steps), 1):
        assert step / wider == pytest.approx((2**b - 1) / (2 ** (b + 1) - 1), rel=1e-4)
        assert step / wider < 0.5


@pytest.mark.parametrize("uniform", [u for u in ALL if u.group != "tensor"], ids=str)
def test_S8_2_errors_are_within_the_bounds(uniform: Uniform) -> None:
    w = hard_matrix()
    q = quantize_matrix(w, uniform)
    found, exact = bounds(q), w.astype(np.float64)
    error, n = exact - wide(q), q.form.group  # type: ignore[union-attr]
    entry = np.repeat(np.asarray(found.entry, np.float64).T, n, axis=1)[:, :72]
    assert (np.abs(error) <= entry).all()
    assert np.linalg.norm(error) <= float(found.frobenius) * (1 + 1e-5)
    x = np.random.default_rng(1).normal(size=72)
    assert np.linalg.norm(error @ x) <= float(found.frobenius) * np.linalg.norm(x) * (1 + 1e-5)
    assert not wide(q)[1].any(), "a group of zeros is stored as zeros"
    assert not wide(q)[6].any(), "numbers that XLA does not have are zeros"
    step = np.abs(exact).max() * 2 / (2**uniform.bits - 1) * (1 + 2.0**-9)
    assert float(found.entry.max()) <= step / 2 + TINY, "the grid is no wider than the largest range"
    if uniform.grid == "zero":
        assert not wide(q)[exact == 0].any()
    np.testing.assert_array_equal(jd.dequantize({"w": q})["w"], wide(q).astype(np.float32))


@pytest.mark.parametrize("name", ["int4", "int1_affine_g5", "int3_affine_channel", "int6_zero_g32", "int8_even_tensor"])
def test_numpy_and_jax_give_the_same_bits(name: str) -> None:
    w = hard_matrix()[[*range(7), *range(8, 17)]]
    ours, theirs = rounded(w, name), quantize_matrix(jnp.asarray(w), parse_scheme("s", name))  # type: ignore[arg-type]
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(jd.dequantize({"w": theirs})["w"], wide(ours).astype(np.float32))


def test_codes_are_the_nearest_and_affine_grids_hold_both_ends() -> None:
    w = hard_matrix()
    for b in (2, 3, 8):
        scale, offset = grid_of(w, Uniform(b, "affine", "channel"))
        codes = nearest_codes(w, scale, offset, b)
        at = scale.astype(np.float64)[:, None] * np.arange(2**b) + offset[:, None]
        distance = np.abs(w[:, :, None].astype(np.float64) - at[:, None]).min(-1)
        got = np.abs(w - np.take_along_axis(at, codes.astype(np.int64), axis=1))
        assert (got <= distance + 2.0**-22 * np.abs(at).max(1)[:, None] + TINY).all()
        assert (at[:, 0] <= w.min(1) + TINY).all()
        assert (at[:, -1] >= w.max(1) - 2.0**-23 * np.abs(w).max(1) - TINY).all()


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_an_affine_grid_of_halves_is_found_again_to_the_last_bit(bits: int, seed: int) -> None:
    """As the blocks of a Q4_1 file: float16 scale and least value, of any size beside each other."""
    rng = np.random.default_rng(seed)
    scale = np.float16(rng.uniform(0.5, 1, (40, 3)) * 2.0 ** rng.integers(-6, 2, (40, 3)))
    offset = np.float16(rng.uniform(-1, 1, (40, 3)) * 2.0 ** rng.integers(-8, 4, (40, 3)))
    codes = rng.integers(0, 2**bits, (40, 3, 32)).astype(np.uint8)
    codes[..., 4], codes[..., 7] = 0, 2**bits - 1
    w = codes * scale.astype(np.float32)[..., None] + offset.astype(np.float32)[..., None]
    q = quantize_matrix(w.reshape(40, 96), Uniform(bits, "affine", 32))
    np.testing.assert_array_equal(jd.dequantize({"w": q})["w"], w.reshape(40, 96))
    for got, expected in zip(unpack(q), (codes.reshape(40, 96), scale, offset), strict=True):
        np.testing.assert_array_equal(got, expected)


# The numbers of S8.6


def test_S8_4_S8_6_errors_bounds_and_model() -> None:
    expected = {8: (0.02211, 0.03810, 0.02200), 4: (0.37493, 0.64773, 0.37397), 2: (1.90140, 3.23866, 1.86984)}
    for b, (error, bound, model) in expected.items():
        q = rounded(S8_6, f"int{b}_tensor")
        found = bounds(q)
        assert float(levels(q)[-1]) == pytest.approx(0.1753, abs=5e-5)
        assert np.linalg.norm(S8_6 - wide(q)) == pytest.approx(error, rel=5e-4)
        assert float(found.frobenius) == pytest.approx(bound, rel=5e-4)
        assert float(found.model) == pytest.approx(model, rel=5e-4)
        assert float(found.model / found.frobenius) == pytest.approx(0.577, abs=1e-3)
        x = np.random.default_rng(2).normal(size=(48, 100))
        ratio = float(found.frobenius) * np.linalg.norm(x, axis=0) / np.linalg.norm((S8_6 - wide(q)) @ x, axis=0)
        assert 6 < np.median(ratio) < 16  # about 10 times loose


def test_S8_6_an_outlier_makes_the_range_a_choice() -> None:
    w = S8_6.copy()
    w[7, 7] = 1.0
    whole = rounded(w, "int4_tensor")
    assert np.linalg.norm(w - wide(whole)) == pytest.approx(2.215, abs=2e-3)
    assert len(np.unique(unpack(whole)[0])) == 5
    scale = np.full((1, 1), 2 * 0.1753 / 15, np.float32)
    codes = nearest_codes(w.astype(np.float32).reshape(1, 1, -1), scale, -7.5 * scale, 4).reshape(w.shape)
    clipped = pack(codes, scale, -7.5 * scale, Uniform(4, "even", "tensor"))
    assert np.linalg.norm(w - wide(clipped)) == pytest.approx(0.906, abs=2e-3)
    assert len(np.unique(codes)) == 16
    assert w[7, 7] - wide(clipped)[7, 7] == pytest.approx(0.825, abs=1e-3)
    errors = {how: np.linalg.norm(w - wide(rounded(w, "int4_tensor", range=how))) for how in ("percentile", "search")}
    assert errors["search"] < 0.93
    assert errors["percentile"] < 1.0
    jitted = quantize_matrix(jnp.asarray(w, jnp.float32), Uniform(4, "even", "tensor", "search"))
    assert np.linalg.norm(w - wide(jitted)) == pytest.approx(errors["search"], rel=1e-4)


@pytest.mark.parametrize("grid", GRIDS)
def test_the_search_is_never_worse_than_the_largest_magnitude(grid: Any) -> None:
    w = hard_matrix()[[0, 4, 5, 9, 10, 13, 16]]
    better = 0
    for b in (2, 4):
        plain, found = (quantize_matrix(w, Uniform(b, grid, 24, how)) for how in ("max", "search"))
        loss = [np.square(w - wide(q)).reshape(7, 3, 24).sum(-1) for q in (plain, found)]
        assert (loss[1] <= loss[0] * (1 + 1e-6) + 1e-30).all()
        better += int((loss[1] < 0.9 * loss[0]).sum())
    assert better > 10


# Storage


def test_bytes_of_a_weight() -> None:
    w = np.random.default_rng(0).normal(size=(64, 1024)).astype(np.float32)
    for b in BITS:
        assert 8 * quantize_matrix(w, Uniform(b)).nbytes / w.size == pytest.approx(b + 0.5, abs=0.02)
        assert 8 * quantize_matrix(w, Uniform(b, "zero")).nbytes / w.size == pytest.approx(b + 0.75, abs=0.02)
        assert 8 * quantize_matrix(w, Uniform(b, "affine")).nbytes / w.size == pytest.approx(b + 1, abs=0.04)
        assert 8 * quantize_matrix(w, Uniform(b, "even", "channel")).nbytes / w.size == pytest.approx(b, abs=0.04)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.sampled_from(ALL), st.integers(1, 80), st.integers(0, 2**32 - 1))
def test_any_codes_and_grids_come_back_out_of_the_planes(uniform: Uniform, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**uniform.bits, (3, width)).astype(np.uint8)
    groups = -(-width // uniform.group) if isinstance(uniform.group, int) else 1
    scale = np.float16(rng.uniform(1, 2, (3, groups)) * 2.0 ** rng.integers(-9, 9, (3, groups))).astype(np.float32)
    offset = {"even": -scale * (2**uniform.bits - 1) / 2, "zero": -scale * rng.integers(0, 2**uniform.bits)}
    offset = np.asarray(offset.get(uniform.grid, np.float16(rng.normal(size=(3, groups)))), np.float32)
    q = pack(codes, scale, offset, uniform)
    assert q.shape == (3, width)
    for got, expected in zip(unpack(q), (codes, scale, offset), strict=True):
        np.testing.assert_array_equal(got, expected)
    if seed % 16 == 0:  # the same by jax, which compiles for every width
        again = jax.jit(pack, static_argnums=3)(codes, scale, offset, uniform)
        for got, expected in zip(jax.tree.leaves(again), jax.tree.leaves(q), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_pack_refuses_other_shapes() -> None:
    codes, grid = np.zeros((4, 64), np.uint8), np.ones((4, 1), np.float32)
    with pytest.raises(ValueError, match=r"scale: expected shape \(4, 2\), got \(4, 1\)"):
        pack(codes, grid, grid, Uniform(4))


def test_scales_that_are_nothing_beside_others_of_their_row_are_widened() -> None:
    w = np.zeros((2, 96), np.float32)
    w[:, 0], w[:, 40], w[:, 80] = 1e20, 1e-20, np.float32(1e14)
    for grid in GRIDS:
        q = quantize_matrix(w, Uniform(4, grid))  # type: ignore[arg-type]
        assert (np.abs(w - wide(q)) <= np.repeat(np.asarray(bounds(q).entry, np.float64).T, 32, axis=1)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_a_tensor_that_has_no_grid_is_named(bad: float) -> None:
    w = np.ones((2, 40), np.float32)
    w[1, 3], w[1, 35] = -3.4e38, bad
    for matrix in (w, jnp.asarray(w)):
        with pytest.raises(
            ValueError, match=r"params\['layers'\]\[1\]\['out'\]: expected finite numbers, not too large"
        ):
            jd.quantize({"layers": ({"out": w[:, 4:30]}, {"out": matrix})}, "int1_zero_channel")


def test_whole_trees() -> None:
    w = jnp.asarray(hard_matrix())
    params = {"a": w, "b": (w[0], jnp.arange(6).reshape(2, 3)), "c": w.reshape(2, 10, 72)}
    got = jd.quantize(params, "int4_affine_g32", range="search")
    assert (got["a"].scheme, got["a"].shape, got["a"].dtype) == (Uniform(4, "affine", 32, "search"), (20, 72), w.dtype)
    assert got["b"][0] is params["b"][0]
    assert got["c"] is params["c"]
    again = jd.quantize(got, "int8")
    assert again["a"] is got["a"], "what is quantized stays"
    with pytest.raises(ValueError, match="range: expected 'max'"):
        jd.quantize(params, "int8", range="search")
    half = jd.quantize({"a": w[:5].astype(jnp.bfloat16)}, "int4")["a"]
    assert half.dtype == jnp.bfloat16
    assert jd.dequantize({"a": half})["a"].dtype == jnp.bfloat16


def test_bounds_are_of_uniform_schemes() -> None:
    with pytest.raises(ValueError, match="q: expected a QTensor of a uniform scheme, got int8"):
        bounds(jd.quantize({"w": jnp.ones((2, 4))}, "int8")["w"])


def test_vmap_over_stacked_weights() -> None:
    w = jnp.asarray(np.stack([hard_matrix()[:4], hard_matrix()[10:14]]))
    uniform = Uniform(3, "zero", 32)
    stacked = jax.jit(jax.vmap(lambda w: quantize_matrix(w, uniform)))(w)
    each = [quantize_matrix(x, uniform) for x in w]
    for got, *expected in zip(*map(jax.tree.leaves, (stacked, *each)), strict=True):
        np.testing.assert_array_equal(got, jnp.stack(expected))
    assert stacked.shape == (2, 4, 72)
    np.testing.assert_array_equal(jd.dequantize(stacked), jnp.stack([jd.dequantize(q) for q in each]))
    assert quant.is_quantized(dataclasses.replace(stacked, scheme="Q4_0"))
