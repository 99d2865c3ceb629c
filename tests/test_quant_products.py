"""Products with packed codes: values, rows, leaf types, and what compiled programs hold of a weight."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from programs import computations

import jaxdecode as jd
from jaxdecode import linear
from jaxdecode.base import take_rows
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.quant import QRows, parse_scheme, quantize_matrix

SCHEMES = ("int4", "int3_affine_g32", "int5_zero_g12", "int2_channel", "int8_affine_g40", "int1_tensor")
N, K = 300, 1000  # several blocks of rows, the last one reaching back; a short last group
matmul = jax.jit(linear.matmul)


def weight(name: str, n: int = N, k: int = K) -> jd.QTensor:
    w = np.random.default_rng(1).normal(size=(n, k)).astype(np.float32)
    return jax.tree.map(jnp.asarray, quantize_matrix(w, parse_scheme("s", name)))  # type: ignore[arg-type]


def values(w: Any) -> np.ndarray:
    return np.asarray(jd.dequantize({"w": w})["w"], np.float64)


def assert_product(w: Any, x: np.ndarray, got: Any) -> None:
    exact = values(w) @ x.astype(np.float64)
    room = np.abs(values(w)) @ np.abs(x.astype(np.float64))
    assert (np.abs(np.asarray(got, np.float64) - exact) <= 2e-6 * room).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_products_are_those_of_the_values_at_every_number_of_rows(name: str) -> None:
    w, x = weight(name), np.random.default_rng(2).normal(size=(K, 5)).astype(np.float32)
    for rows in (1, 5):
        assert_product(w, x[:, :rows], matmul(w, jnp.asarray(x[:, :rows])))


def test_a_weight_of_few_rows_is_one_block() -> None:
    w, x = weight("int4", 7), np.random.default_rng(2).normal(size=(K, 2)).astype(np.float32)
    assert_product(w, x, matmul(w, jnp.asarray(x)))


@pytest.mark.parametrize("rows", [1, 3])
def test_zeros_give_zero_and_a_nan_stays_in_its_row(rows: int) -> None:
    x = np.random.default_rng(2).normal(size=(K, rows)).astype(np.float32)
    for name in ("int4", "int3_affine_g32"):
        w = weight(name)
        x[:, 0] = 0
        good = np.asarray(matmul(w, jnp.asarray(x)))
        assert not good[:, 0].any()
        x[K - 1, 0] = np.nan
        got = np.asarray(matmul(w, jnp.asarray(x)))
        assert np.isnan(got[:, 0]).all()
        np.testing.assert_array_equal(got[:, 1:], good[:, 1:])


def test_rows_of_several_kinds_and_narrow_floats() -> None:
    rng = np.random.default_rng(3)
    half = jnp.asarray(rng.normal(size=(40, K)), jnp.float16)
    w = QRows((weight("int4", 30), half, weight("int2_channel", 50)), np.dtype(np.float32))
    assert (w.shape, w.ndim, w.dtype) == ((120, K), 2, np.float32)
    x = rng.normal(size=(K, 3)).astype(np.float32)
    for rows in (1, 3):
        got = matmul(w, jnp.asarray(x[:, :rows]))
        assert got.dtype == np.float32
        assert_product(w, x[:, :rows], got)
    ids = jnp.array([0, 29, 30, 69, 70, 119, 5])
    np.testing.assert_array_equal(linear.embed(w, ids), values(w)[np.asarray(ids)].T.astype(np.float32))
    np.testing.assert_array_equal(linear.embed(w, jnp.array([120, -1])), linear.embed(w, jnp.array([119, 0])))
    alone = QRows((half,), np.dtype(np.float32))
    assert_product(alone, x[:, :1], matmul(alone, jnp.asarray(x[:, :1])))


@pytest.mark.parametrize("name", ["int4", "int3_affine_g32", "int2_channel"])
def test_embed_is_columns_of_the_table(name: str) -> None:
    w = weight(name)
    ids = jnp.array([0, N - 1, 3, 3, 5])
    np.testing.assert_array_equal(linear.embed(w, ids), values(w)[np.asarray(ids)].T.astype(np.float32))
    np.testing.assert_array_equal(linear.embed(w, jnp.array([N + 2, -1])), linear.embed(w, jnp.array([N - 1, 0])))


def test_float64_activations() -> None:
    with jax.enable_x64(True):
        x = np.random.default_rng(4).normal(size=(K, 3))
        for name in ("int8_even", "int3_zero"):
            w = weight(name)
            for rows in (1, 3):
                got = matmul(w, jnp.asarray(x[:, :rows]))
                assert got.dtype == np.float64
                np.testing.assert_allclose(got, values(w) @ x[:, :rows], rtol=1e-9, atol=1e-11)


def test_dtypes_of_products() -> None:
    w = jd.quantize({"w": jnp.ones((40, 64), jnp.bfloat16)}, "int4")["w"]
    x = jnp.ones((64, 2), jnp.bfloat16)
    assert matmul(w, x).dtype == jnp.bfloat16
    assert linear.matmul(w, x, np.dtype(np.float32)).dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(matmul(w, x), np.float32), 64, rtol=2**-6)
    assert linear.embed(w, jnp.array([1])).dtype == jnp.bfloat16


def test_vmap_over_weights_and_gradients_of_activations() -> None:
    each, x = (
        [weight("int4", 40), weight("int4", 80)],
        jnp.asarray(np.random.default_rng(0).normal(size=(K, 2)), jnp.float32),
    )
    each[1] = jax.tree.map(lambda leaf: leaf[..., 40:], each[1])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    got = jax.jit(jax.vmap(linear.matmul, in_axes=(0, None)))(stacked, x)
    for w, product in zip(each, got, strict=True):
        assert_product(w, np.asarray(x), product)
    gradient = jax.grad(lambda x: linear.matmul(each[0], x).sum())(x)
    np.testing.assert_allclose(gradient, np.tile(values(each[0]).sum(0)[:, None], 2), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scheme", ["int8", "int8_weights"])
@pytest.mark.parametrize("rows", [1, 3])
def test_gradients_pass_straight_through_rounded_activations(scheme: str, rows: int) -> None:
    """Those of the dequantized product: what is computed has slopes of 0 and steps."""
    w = jd.quantize({"w": jax.random.normal(jax.random.key(0), (24, 40))}, scheme)["w"]
    x, c = (jax.random.normal(jax.random.key(i), (size, rows)) for i, size in ((1, 40), (2, 24)))
    gradient = jax.jit(jax.grad(lambda x: (linear.matmul(w, x) * c).sum()))(x)
    np.testing.assert_allclose(gradient, values(w).T @ np.asarray(c, np.float64), rtol=1e-4, atol=1e-4)
    value, slope = jax.jvp(lambda x: linear.matmul(w, x), (x,), (x,))
    assert np.asarray(value).tolist() == np.asarray(linear.matmul(w, x)).tolist()
    np.testing.assert_allclose(slope, values(w) @ np.asarray(x, np.float64), rtol=1e-4, atol=1e-4)


def test_export_for_every_platform() -> None:
    w, x = weight("int3_affine_g32"), jnp.ones((K, 1))
    leaves, tree = jax.tree.flatten(w)

    def plain(leaves: Any, x: jax.Array) -> jax.Array:
        return linear.matmul(jax.tree.unflatten(tree, leaves), x)

    exported = jax.export.export(jax.jit(plain), platforms=["cpu", "cuda", "tpu"])(leaves, x)
    if jax.default_backend() == "cpu":
        np.testing.assert_array_equal(exported.call(leaves, x), matmul(w, x))


# A model


CONFIG = TransformerConfig(
    vocab_size=8192,
    d_model=96,
    n_layers=1,
    n_heads=4,
    n_kv_heads=2,
    head_dim=24,
    d_mlp=1504,
    context_length=64,
)
MODEL = transformer(CONFIG)
PARAMS = init_params(CONFIG, jax.random.key(0))


def test_a_model_computes_with_the_values_of_its_weights() -> None:
    """A ragged prompt and a step after it, of two rows and of one."""
    params = jd.quantize(PARAMS, "int4_affine_g32", range="search")
    tokens, step = jnp.array([[5, 17, 900], [8000, 0, 0]]), jnp.array([[7], [8]])
    apply, found = jax.jit(MODEL.apply), []
    for weights in (params, jd.dequantize(params)):
        cache = MODEL.init_cache(weights, 2, 8)
        first, cache = apply(weights, tokens, cache, lengths=jnp.array([3, 1]))
        alone = apply(weights, step[:1], take_rows(cache, jnp.array([0])))[0]
        found.append([first[0], first[1, :1], apply(weights, step, cache)[0], alone])
    for got, expected in zip(*found, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def large_floats(hlo: str) -> list[str]:
    """Instructions outside of fusions that give floats or int32, as many as a weight has numbers."""
    found = computations(hlo)
    fused = set(re.findall(r"fusion\(.*calls=%?([\w.\-]+)", hlo))
    sizes = {w.size for w in jax.tree.leaves(PARAMS) if w.size > 100_000}  # smaller ones might be the cache
    array = re.compile(r"\b(?:bf16|f16|f32|f64|s32)\[([\d,]+)\]")
    return [
        line
        for name, lines in found.items()
        if name not in fused
        for line in lines
        if any(math.prod(int(n) for n in dims.split(",")) in sizes for dims in array.findall(line))
    ]


def compiled(params: Any, rows: int, prepare: Any = lambda p: p) -> Any:
    """The program that decodes greedily after prompts of 4 ids."""
    prompts = np.ones((rows, 4), np.int32)

    def run(params: Any) -> jax.Array:
        settings = jd.Settings(max_new_tokens=6, temperature=0.0)
        return jd.generate(MODEL, prepare(params), prompts, settings=settings).tokens

    return jax.jit(run).lower(params).compile()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="how an accelerator's compiler fuses is its own affair")
@pytest.mark.parametrize(("name", "rows"), [("int4", 1), ("int4", 2)])
def test_no_float_copy_of_a_weight_is_made(name: str, rows: int) -> None:
    program = compiled(jd.quantize(PARAMS, name), rows)
    assert "while(" in program.as_text()
    assert large_floats(program.as_text()) == []
    assert program.memory_analysis().temp_size_in_bytes < 3 * PARAMS["embed"].size


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="beside the test before")
def test_a_float_copy_would_be_seen() -> None:
    program = compiled(jd.quantize(PARAMS, "int4"), 1, jd.dequantize)
    assert large_floats(program.as_text())
    assert program.memory_analysis().temp_size_in_bytes > 4 * PARAMS["embed"].size


SHARDED = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxdecode as jd
from jaxdecode import linear

w = np.random.default_rng(0).normal(size=(256, 1024)).astype(np.float32)
x = jax.numpy.asarray(np.random.default_rng(1).normal(size=(1024, 2)).astype(np.float32))
mesh = jax.make_mesh((2,), ("out",), axis_types=(jax.sharding.AxisType.Auto,))
for name in ("int4", "int3_affine_g32"):
    q = jd.quantize({"w": jax.numpy.asarray(w)}, name)["w"]
    split = jax.device_put(q, jax.tree.map(lambda leaf: NamedSharding(mesh, P(*(None,) * (leaf.ndim - 1), "out")), q))
    got = jax.jit(linear.matmul)(split, x)
    np.testing.assert_allclose(got, jax.jit(linear.matmul)(q, x), rtol=1e-4, atol=1e-3)
print("same")
"""


def test_a_weight_on_two_devices() -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], cwd=root, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "same", done.stderr[-2000:]
