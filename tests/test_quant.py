"""Quantized weights: codes and scales, products by both schemes, and what compiled programs hold of them."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from programs import computations

import jaxdecode as jd
from jaxdecode import linear
from jaxdecode.models.counts import param_bytes, param_count
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.quant import codes_and_scale

SCHEMES: list[Any] = ["int8", "int8_weights"]
ROWS = (1, 2, 3, 8, 17)
TINY = np.finfo(np.float32).tiny
matmul = jax.jit(linear.matmul)


def wide(q: jd.QTensor) -> np.ndarray:
    return np.asarray(q.codes, np.float64) * np.asarray(q.scale, np.float64)[:, None]


def hard_matrix() -> np.ndarray:
    """[10,33]: ordinary rows, and zeros, denormal numbers, huge and tiny ones, one entry alone, ties."""
    w = np.random.default_rng(0).normal(size=(10, 33))
    w[1] = 0
    w[2] *= 1e-42
    w[3] *= 1e37 / np.abs(w[3]).max() * 33
    w[4] *= 1e-35
    w[5, 1:] = 0
    w[6] = np.arange(33) - 16.5  # halves of a step, once 127 is the largest
    w[6, 0] = 127
    w[7] = -w[7, 0]
    return w.astype(np.float32)


# The weights


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_every_entry_is_the_nearest_code(dtype: Any) -> None:
    w = hard_matrix()
    w = (np.clip(w, -6e4, 6e4) if dtype == np.float16 else w).astype(dtype)
    q = jd.quantize({"w": jnp.asarray(w)}, "int8")["w"]
    assert (q.codes.dtype, q.scale.dtype, q.dtype, q.shape) == (jnp.int8, w.dtype, w.dtype, w.shape)
    codes, scale = np.asarray(q.codes, np.int64), np.asarray(q.scale, np.float64)
    exact = w.astype(np.float64)
    assert np.abs(codes).max() == 127
    unit = float(jnp.finfo(dtype).eps)
    largest = np.abs(exact).max(axis=1)
    normal = largest / 127 >= float(jnp.finfo(dtype).tiny)  # else the scale itself lost digits, or is zero
    np.testing.assert_allclose(scale[normal], largest[normal] / 127, rtol=2 * unit)
    error, bound = np.abs(exact - codes * scale[:, None]), scale * (0.5 + 1e-4) * (1 + unit)
    assert (error[normal] <= bound[normal, None]).all()
    assert (error[~normal] <= np.maximum(largest, 127 * TINY)[~normal, None]).all()
    assert not codes[1].any()
    assert scale[1] == 0
    assert not wide(q)[1].any()


def test_numpy_and_jax_quantize_alike() -> None:
    w = np.concatenate([np.delete(hard_matrix(), 2, axis=0), np.random.default_rng(3).normal(size=(500, 33))])
    halves = np.arange(33) - 16.5  # between two codes, at any scale
    halves[0] = 127
    w = np.concatenate([w, halves * np.random.default_rng(4).uniform(0.01, 1, (200, 1))]).astype(np.float32)
    for dtype in (np.float32, jnp.bfloat16):
        codes, scale = codes_and_scale(w.astype(dtype), np)
        q = jd.quantize({"w": jnp.asarray(w, dtype)}, "int8")["w"]
        np.testing.assert_array_equal(q.codes, codes)
        np.testing.assert_array_equal(q.scale, scale)


def test_only_float_matrices_are_quantized_and_dequantize_gives_them_back() -> None:
    w = jnp.asarray(hard_matrix())
    params = {"a": w, "b": (w[0], jnp.arange(6).reshape(2, 3)), "c": w.reshape(2, 5, 33)}
    got = jd.quantize(params, "int8_weights")
    assert isinstance(got["a"], jd.QTensor)
    assert got["a"].scheme == "int8_weights"
    assert got["b"][0] is params["b"][0]
    assert got["b"][1] is params["b"][1]
    assert got["c"] is params["c"]
    assert param_count(got) == param_count(params)
    assert param_bytes(got["a"]) == 10 * 33 + 10 * 4
    back = jd.dequantize(got)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    np.testing.assert_allclose(back["a"], wide(got["a"]), rtol=1e-6, atol=TINY)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_tensor_that_is_not_finite_is_named(bad: float) -> None:
    w = jnp.ones((2, 4)).at[1, 2].set(bad)
    with pytest.raises(ValueError, match=r"params\['layers'\]\[1\]\['out'\]: expected finite numbers, got NaN or inf"):
        jd.quantize({"layers": ({"out": jnp.ones((2, 4))}, {"out": w})}, "int8")


@pytest.mark.parametrize("scheme", ["int9", "int4_g0", "int4_even_", "int0", "as_stored", "", None, 8])
def test_unknown_schemes(scheme: Any) -> None:
    with pytest.raises(ValueError, match=r"scheme: expected int8, int8_weights, or int\{1 to 8\} with .* got"):
        jd.quantize({"w": jnp.ones((2, 2))}, scheme)


# Products


def activations(k: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x[K,R], the level in [-127, 127] nearest to each entry, and the step of each column: no entry is near a tie."""
    rng = np.random.default_rng(k)
    levels = rng.integers(-126, 127, (k, rows))
    levels[rng.integers(0, k, rows), np.arange(rows)] = 127
    off = np.where(np.abs(levels) == 127, 0, rng.uniform(-0.45, 0.45, (k, rows)))
    step = 2.0 ** rng.integers(-20, 20, rows) * rng.uniform(1, 2, rows)
    return ((levels + off) * step).astype(np.float32), levels, step


def weights(k: int, scheme: Any) -> jd.QTensor:
    """[24,K]; the first rows have the largest codes there are, one sign or that of x all along."""
    codes = np.random.default_rng(1).integers(-127, 128, (24, k)).astype(np.int8)
    codes[0], codes[1] = 127, -127
    codes[2] = np.where(activations(k, 17)[1][:, 4] < 0, -127, 127)
    scale = np.random.default_rng(2).uniform(0.5, 2, 24).astype(np.float32)
    scale[3] = 0
    return jd.QTensor(jnp.asarray(codes), jnp.asarray(scale), scheme)


@pytest.mark.parametrize("k", [7, 1040, 1041])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_are_the_scheme_and_the_same_at_every_number_of_rows(scheme: Any, k: int) -> None:
    w, (x, levels, step) = weights(k, scheme), activations(k, max(ROWS))
    alone = np.concatenate([matmul(w, jnp.asarray(x[:, i : i + 1])) for i in range(max(ROWS))], axis=1)
    for rows in ROWS[1:]:
        np.testing.assert_array_equal(matmul(w, jnp.asarray(x[:, :rows])), alone[:, :rows])
    if scheme == "int8":
        expected = np.asarray(w.scale, np.float64)[:, None] * (np.asarray(w.codes, np.int64) @ levels) * step
        np.testing.assert_allclose(alone, expected, rtol=1e-6)
    else:
        bound = np.abs(wide(w)).sum(axis=1)[:, None] * np.abs(x).max(axis=0) * 2.0**-22
        assert (np.abs(alone - wide(w) @ x.astype(np.float64)) <= bound).all()


def test_a_tie_between_levels_falls_the_same_way_at_every_number_of_rows() -> None:
    """Every entry is half-way between two levels, as nearly as float32 can tell: one rounding more would show."""
    rng = np.random.default_rng(5)
    x = rng.integers(-126, 126, (200, max(ROWS))) + 0.5
    x[0] = 127
    x = jnp.asarray((x * rng.uniform(0.01, 1, max(ROWS))).astype(np.float32))
    w = jd.QTensor(jnp.asarray(rng.integers(-127, 128, (24, 200)), jnp.int8), jnp.ones(24), "int8")
    alone = np.concatenate([matmul(w, x[:, i : i + 1]) for i in range(max(ROWS))], axis=1)
    for rows in ROWS[1:]:
        np.testing.assert_array_equal(matmul(w, x[:, :rows]), alone[:, :rows])


@pytest.mark.parametrize("k", [1040, 1041])
def test_one_row_is_exact_at_the_largest_sums(k: int) -> None:
    """1040 * 127 * 127 < 2^24 <= 1041 * 127 * 127: below, float32 holds every sum; a scale of 1 shows the integer."""
    codes = np.full((3, k), 127, np.int8)
    codes[1], codes[2, ::2] = -127, 126
    x = np.full((k, 1), 127, np.float32)
    x[0] = 126
    w = jd.QTensor(jnp.asarray(codes), jnp.ones(3), "int8")
    expected = (codes.astype(np.int64) @ x.astype(np.int64)).astype(np.float32)
    np.testing.assert_array_equal(matmul(w, jnp.asarray(x)), expected)
    np.testing.assert_array_equal(matmul(w, jnp.asarray(np.tile(x, (1, 3)))), np.tile(expected, (1, 3)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zero_rows_give_zero_and_a_nan_stays_in_its_row(scheme: Any) -> None:
    w, (x, _, _) = weights(40, scheme), activations(40, 4)
    good = np.asarray(matmul(w, jnp.asarray(x)))
    x[:, 0], x[3, 1], x[5, 2] = 0, np.nan, -np.inf
    got = np.asarray(matmul(w, jnp.asarray(x)))
    assert not got[:, 0].any()
    assert np.isnan(got[:, 1]).all()
    assert not np.isfinite(np.delete(got[:, 2], 3)).any()
    np.testing.assert_array_equal(got[:, 3], good[:, 3])
    for i in range(3):
        one = np.asarray(matmul(w, jnp.asarray(x[:, i : i + 1])))[:, 0]
        assert not one.any() if i == 0 else not np.isfinite(np.delete(one, 3)).any()


def test_dtypes_of_products() -> None:
    for scheme in SCHEMES:
        w = jd.quantize({"w": jnp.ones((4, 8), jnp.bfloat16)}, scheme)["w"]
        x = jnp.ones((8, 2), jnp.bfloat16)
        assert matmul(w, x).dtype == jnp.bfloat16
        assert linear.matmul(w, x, np.float32).dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(matmul(w, x), np.float32), 8, rtol=2**-7)


def test_embed_is_columns_of_the_table() -> None:
    q = jd.quantize({"w": jnp.asarray(hard_matrix())}, "int8")["w"]
    ids = np.array([0, 9, 3, 3, 5], np.int32)
    np.testing.assert_array_equal(linear.embed(q, jnp.asarray(ids)), np.asarray(jd.dequantize({"w": q})["w"])[ids].T)
    np.testing.assert_array_equal(linear.embed(q, jnp.array([12, -1])), linear.embed(q, jnp.array([9, 0])))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_vmap_over_weights(scheme: Any) -> None:
    each = [weights(40, scheme), jd.QTensor(weights(40, scheme).codes[::-1], jnp.ones(24), scheme)]
    x = jnp.asarray(activations(40, 3)[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    got = jax.jit(jax.vmap(linear.matmul, in_axes=(0, None)))(stacked, x)
    np.testing.assert_array_equal(got, [matmul(w, x) for w in each])


# Programs for other platforms


@pytest.mark.parametrize("scheme", SCHEMES)
def test_export_holds_each_platform_s_form(scheme: Any) -> None:
    w, x = weights(40, scheme), jnp.asarray(activations(40, 1)[0])

    def plain(codes: jax.Array, scale: jax.Array, x: jax.Array) -> jax.Array:
        return linear.matmul(jd.QTensor(codes, scale, scheme), x)

    def text(*platforms: str) -> str:
        return str(jax.export.export(jax.jit(plain), platforms=platforms)(w.codes, w.scale, x).mlir_module())

    integer = r"dot_general .*tensor<24x40xi8>, tensor<40x1xi8>\) -> tensor<24x1xi32>"
    for platform in ("cuda", "tpu"):
        alone = text(platform)
        assert bool(re.search(integer, alone)) == (scheme == "int8")
        assert "optimization_barrier" not in alone
    if scheme == "int8":
        assert not re.search(integer, text("cpu")), "a padded row, or one that is converted inside the product"
    exported = jax.export.export(jax.jit(plain), platforms=["cpu", "cuda", "tpu"])(w.codes, w.scale, x)
    if jax.default_backend() == "cpu":
        np.testing.assert_array_equal(exported.call(w.codes, w.scale, x), matmul(w, x))


# A model


CONFIG = TransformerConfig(
    vocab_size=8192,
    d_model=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    d_mlp=1056,  # above and below 1040 inputs
    context_length=64,
)
MODEL = transformer(CONFIG)
PARAMS = init_params(CONFIG, jax.random.key(0))
PROMPTS = [[5, 17, 900], [8000], [3, 1, 4, 1, 5, 9, 2]]


def decode(params: Any, prompts: list[list[int]]) -> jd.Generated:
    return jd.generate(MODEL, params, prompts, settings=jd.Settings(max_new_tokens=6, temperature=0.0))


def step_by_step(params: Any, prompt: list[int], n: int) -> list[int]:
    """One token at a time, the prompt's too."""
    step = jax.jit(MODEL.apply)
    cache, ids = MODEL.init_cache(params, 1, 32), list(prompt)
    for at in range(len(prompt) + n - 1):
        logits, cache = step(params, jnp.array([[ids[at]]]), cache)
        if at == len(ids) - 1:
            ids.append(int(jnp.argmax(logits[0, -1])))
    return ids[len(prompt) :]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prefill_steps_and_ragged_batches_write_the_same_tokens(scheme: Any) -> None:
    params = jd.quantize(PARAMS, scheme)
    together = decode(params, PROMPTS).to_lists()
    assert together == [decode(params, [p]).to_lists()[0] for p in PROMPTS]
    assert together == [step_by_step(params, p, 6) for p in PROMPTS]


def float_weights(hlo: str) -> list[str]:
    """Instructions outside of fusions that name a float or int32 array of the shape of a weight or its transpose."""
    found = computations(hlo)
    fused = set(re.findall(r"fusion\(.*calls=%?([\w.\-]+)", hlo))
    shapes = {w.shape for w in jax.tree.leaves(PARAMS) if w.ndim == 2}
    dims = "|".join(f"{a},{b}" for n, k in sorted(shapes) for a, b in ((n, k), (k, n)))
    copy = re.compile(rf"\b(?:bf16|f16|f32|f64|s32)\[(?:{dims})\]")
    return [line for name, lines in found.items() if name not in fused for line in lines if copy.search(line)]


def compiled(params: Any, rows: int, prepare: Any = lambda p: p) -> Any:
    """The program that decodes greedily after prompts of 4 ids."""
    prompts = np.ones((rows, 4), np.int32)

    def run(params: Any) -> jax.Array:
        settings = jd.Settings(max_new_tokens=6, temperature=0.0)
        return jd.generate(MODEL, prepare(params), prompts, settings=settings).tokens

    return jax.jit(run).lower(params).compile()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="how an accelerator's compiler fuses is its own affair")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_float_copy_of_a_weight_is_made(scheme: Any, rows: int) -> None:
    program = compiled(jd.quantize(PARAMS, scheme), rows)
    assert "while(" in program.as_text()
    assert float_weights(program.as_text()) == []
    assert program.memory_analysis().temp_size_in_bytes < 4 * PARAMS["embed"].size


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="beside the test before")
def test_a_float_copy_would_be_seen() -> None:
    program = compiled(jd.quantize(PARAMS, "int8"), 3, jd.dequantize)
    assert float_weights(program.as_text())
    assert program.memory_analysis().temp_size_in_bytes > 4 * PARAMS["embed"].size


def test_a_last_bit_of_an_activation_may_move_its_code() -> None:
    """Why S6.5 bounds no token of int8 by the last bits that another batch or device changes: rounding is a step."""
    w = jd.quantize(jnp.asarray([[0.0, 1.0], [1.0, -1.0]]), "int8")
    below = np.float32(2.5)
    above = np.nextafter(below, np.float32(3))
    x = jnp.asarray([[127, 127], [below, above]], jnp.float32)  # one row each, their scales are 1
    y = np.asarray(linear.matmul(w, x))
    np.testing.assert_allclose(y[:, 1] - y[:, 0], [1, -1], atol=1e-5)
