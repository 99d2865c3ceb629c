"""Families in quantized weights: experts, fused rows and stored block types give what their values in float give."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
import tiny_families
import tiny_families_gguf
import tiny_gguf
import tiny_hf
from tiny_families import PROMPTS

import jaxdecode as jd
from jaxdecode.quant import is_quantized

KINDS = gguf.GGMLQuantizationType
TOKENS = np.array([prompt[:20] for prompt in PROMPTS], np.int32)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))


def logits(loaded: jd.Loaded, params: Any) -> Any:
    empty = loaded.model.init_cache(params, *TOKENS.shape)
    return jax.jit(loaded.model.apply)(params, TOKENS, empty)[0]


def check(loaded: jd.Loaded) -> None:
    """In one pass of two rows, and the next tokens by `generate`, one by one."""
    floats = jd.dequantize(loaded.params)
    assert not any(map(is_quantized, jax.tree.leaves(floats, is_leaf=is_quantized)))
    np.testing.assert_allclose(logits(loaded, loaded.params), logits(loaded, floats), atol=2e-4)
    settings = jd.Settings(max_new_tokens=4, temperature=0)
    mine, theirs = (
        jd.generate(loaded.model, params, TOKENS[:1], settings=settings) for params in (loaded.params, floats)
    )
    near = np.cumprod(np.asarray(theirs.margin[0]) > 1e-3).astype(bool)
    assert near.any()
    np.testing.assert_array_equal(mine.tokens[0][near], theirs.tokens[0][near])


@pytest.mark.parametrize("name", ["mixtral", "gemma3"])
def test_a_directory_quantized_while_it_is_read(tmp_path: Path, name: str) -> None:
    folder = tiny_hf.write(tmp_path / "model", tiny_families.tiny(name))
    check(jd.load(folder, quantize="int4_affine_g16"))


@pytest.mark.parametrize("name", ["qwen3 moe", "gpt2"])
def test_a_file_as_it_is_stored(tmp_path: Path, name: str) -> None:
    """Rows of 32 and 64 in blocks, others as half floats."""
    model = tiny_families_gguf.tiny(name)
    kinds = {
        tensor: (KINDS.Q8_0 if values.shape[-1] % 32 == 0 else KINDS.F16) if values.ndim > 1 else KINDS.F32
        for tensor, values in model.tensors.items()
    }
    path = tiny_gguf.write(tmp_path / "tiny.gguf", dataclasses.replace(model, kinds=kinds))
    loaded, floats = jd.load(path, quantize="as_stored"), jd.load(path)
    assert any(map(is_quantized, jax.tree.leaves(loaded.params, is_leaf=is_quantized)))
    stored = jax.tree.leaves(jd.dequantize(loaded.params))
    for mine, theirs in zip(stored, jax.tree.leaves(floats.params), strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), theirs)
    check(loaded)
