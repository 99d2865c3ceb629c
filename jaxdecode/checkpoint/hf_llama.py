"""Hugging Face directories of llama-family models: tensors to parameters.

A parameter here is made of one tensor, or of several whose rows stand below each other. Where these lie so already (our
own ``save`` writes them like this) the parameter is the memory map itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxdecode.checkpoint.fields import read_json
from jaxdecode.checkpoint.generation_config import law_of
from jaxdecode.checkpoint.hf_config import config_from_json
from jaxdecode.checkpoint.hf_tokenizer import hf_vocabulary
from jaxdecode.checkpoint.quantized import OURS, saved_params
from jaxdecode.checkpoint.safetensors_file import ALIGNMENT, read_safetensors
from jaxdecode.checkpoint.source import Checkpoint, Names, Param, named_shapes
from jaxdecode.checks import require
from jaxdecode.models.transformer import TransformerConfig

__all__ = ["CONFIG", "GENERATION", "INDEX", "NAMES", "WEIGHTS", "read_llama_directory", "source_files", "weight_files"]

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMES = Names(
    whole={"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"},
    layer="model.layers.{}.",
    parts={
        "attn_norm": ("input_layernorm.weight",),
        "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        "q_norm": ("self_attn.q_norm.weight",),
        "k_norm": ("self_attn.k_norm.weight",),
        "out": ("self_attn.o_proj.weight",),
        "mlp_norm": ("post_attention_layernorm.weight",),
        "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "down": ("mlp.down_proj.weight",),
    },
)
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # in files of before 2024; never used
_FLOATS = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), np.dtype(jnp.bfloat16))
_SHARD = re.compile(r"[\w.-]+\.safetensors")
_BLOCK_VALUES = 1 << 21  # values converted at a time
_TEXTS = ("*.json", "*.jinja", "*.safetensors")


class _Tensor(NamedTuple):
    file: Path
    values: np.ndarray


def source_files(folder: Path) -> list[Path]:
    """The files that a checkpoint in ``folder`` is made of: if one changes, so does the checkpoint."""
    return sorted(path for pattern in _TEXTS for path in folder.glob(pattern) if path.is_file())


def read_llama_directory(folder: Path) -> Checkpoint:
    """The checkpoint in a Hugging Face directory; its weights are read when their blocks are asked for.

    ValueError, naming file and field or tensor: damaged file, another architecture, a missing, surplus or misshapen
    tensor, a feature that the model does not have. FileNotFoundError: a file that must be there.
    """
    values = read_json(folder / CONFIG)
    quantized: Any = values.get("quantization_config")
    ours = isinstance(quantized, dict) and quantized.get("quant_method") == OURS
    config = config_from_json(values | ({"quantization_config": None} if ours else {}), str(folder / CONFIG))
    path = folder / GENERATION
    generation = read_json(path) if path.exists() else {}
    vocabulary = hf_vocabulary(folder, values, generation, config.vocab_size)
    tensors = _tensors(folder)
    n_layers = config.n_layers
    require(n_layers <= len(tensors), f"{folder / CONFIG}: num_hidden_layers", "layers that are in the file", n_layers)
    law = law_of(generation, str(path))
    if ours:
        arrays = {name: tensor.values for name, tensor in tensors.items()}
        params, scheme = saved_params(quantized, arrays, config, str(folder))
        return Checkpoint(str(folder), config, vocabulary, params, law, scheme)
    return Checkpoint(str(folder), config, vocabulary, _params(tensors, config, folder), law)


def weight_files(folder: Path) -> dict[str, list[str]]:
    """File name -> the tensors that an index expects in it; none are named for a checkpoint in one file.

    ValueError: an index that is damaged, or names a file elsewhere; FileNotFoundError: no weights.
    """
    if (folder / WEIGHTS).exists():
        return {WEIGHTS: []}
    path = folder / INDEX
    if not path.exists():
        pickled = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        got = f"{pickled[0]} (pickled weights are never opened)" if pickled else "neither"
        raise FileNotFoundError(f"{folder}: expected {WEIGHTS} or {INDEX}, got {got}")
    placed = read_json(path).get("weight_map")
    require(isinstance(placed, dict) and bool(placed), f"{path}: weight_map", "file names by tensor", placed)
    files: dict[str, list[str]] = {}
    for tensor, name in (placed or {}).items():
        good = isinstance(name, str) and _SHARD.fullmatch(name) is not None
        require(good, f"{path}: {tensor[:80]!r}", "the name of a .safetensors file beside it", name)
        files.setdefault(name, []).append(tensor)
    return files


def _tensors(folder: Path) -> dict[str, _Tensor]:
    """Every tensor of all files; those of each are the ones that the index says."""
    found: dict[str, _Tensor] = {}
    for name, expected in weight_files(folder).items():
        path = folder / name
        arrays, _ = read_safetensors(path)
        if expected:
            missing, surplus = sorted(set(expected) - arrays.keys()), sorted(arrays.keys() - set(expected))
            require(not missing, f"{path}: tensors", f"all that {INDEX} places here", f"a file without {missing}")
            require(not surplus, f"{path}: tensors", f"none beyond {INDEX}", surplus)
        found |= {tensor: _Tensor(path, values) for tensor, values in arrays.items()}
    return found


def _params(tensors: dict[str, _Tensor], config: TransformerConfig, folder: Path) -> tuple[Param, ...]:
    """Every parameter, from tensors whose presence, shape and type are checked; every tensor must be used."""
    used = {name for name in tensors if _DERIVED.fullmatch(name)}
    params = []
    for name, shape in named_shapes(config).items():
        parts = []
        for source, part_shape in NAMES.of(name, shape, config):
            parts.append(_checked(tensors, source, part_shape, folder))
            used.add(source)
        params.append(Param(name, shape, lambda parts=parts: _blocks(parts), _mapped(parts, shape)))  # type: ignore[misc]
    head = NAMES.whole["head"]
    if config.tied and head in tensors:
        params[0] = _tied(params[0], _checked(tensors, head, params[0].shape, folder))
        used.add(head)
    surplus = sorted(tensors.keys() - used)
    require(not surplus, f"{folder}: tensors", "none beyond those of the model", surplus)
    return tuple(params)


def _checked(tensors: dict[str, _Tensor], name: str, shape: tuple[int, ...], folder: Path) -> _Tensor:
    if name not in tensors:
        raise ValueError(f"{folder}: {name}: expected this tensor, got files without it")
    tensor = tensors[name]
    where = f"{tensor.file}: {name}"
    require(tensor.values.shape == shape, where, f"shape {shape}", tensor.values.shape)
    require(tensor.values.dtype in _FLOATS, where, "a floating type", tensor.values.dtype)
    return tensor


def _tied(embed: Param, head: _Tensor) -> Param:
    """The embedding of a file that says it is the head as well, and holds that too: they must be equal."""

    def blocks() -> Iterator[np.ndarray]:
        for block, same in zip(embed.blocks(), _rows(head.values), strict=True):
            equal = bool(np.array_equal(block, same))
            require(
                equal, f"{head.file}: {NAMES.whole['head']}", "the embedding's values (tie_word_embeddings)", "others"
            )
            yield block

    return embed._replace(blocks=blocks, mapped=None)


def _rows(values: np.ndarray) -> Iterator[np.ndarray]:
    step = max(1, _BLOCK_VALUES // max(1, math.prod(values.shape[1:])))
    for first in range(0, len(values), step):
        yield values[first : first + step]


def _blocks(parts: list[_Tensor]) -> Iterator[np.ndarray]:
    for part in parts:
        yield from _rows(part.values)


def _mapped(parts: list[_Tensor], shape: tuple[int, ...]) -> np.ndarray | None:
    """The tensors as one array over the mapped file, if they lie in it one behind the other, aligned for jax."""
    first = parts[0].values
    at: Any = first.ctypes.data
    if at % ALIGNMENT:
        return None
    for file, values in parts:
        if file != parts[0].file or values.dtype != first.dtype or values.ctypes.data != at:
            return None
        at += values.nbytes
    strides = tuple(first.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return np.lib.stride_tricks.as_strided(first, shape, strides, writeable=False)
