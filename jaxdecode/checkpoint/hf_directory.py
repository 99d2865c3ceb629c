"""Hugging Face directories: tensors to parameters, by the names of the family that ``config.json`` says.

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
from jaxdecode.checkpoint.hf_families import FAMILIES, Family
from jaxdecode.checkpoint.hf_tokenizer import hf_vocabulary
from jaxdecode.checkpoint.quantized import OURS, saved_params
from jaxdecode.checkpoint.safetensors_file import ALIGNMENT, read_safetensors
from jaxdecode.checkpoint.source import Checkpoint, Param, Part, named_shapes
from jaxdecode.checks import require
from jaxdecode.models.transformer import TransformerConfig

__all__ = ["CONFIG", "GENERATION", "INDEX", "WEIGHTS", "read_hf_directory", "source_files", "weight_files"]

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), np.dtype(jnp.bfloat16))
_SHARD = re.compile(r"[\w.-]+\.safetensors")
_BLOCK_VALUES = 1 << 21  # values converted at a time
_TEXTS = ("*.json", "*.jinja", "*.safetensors")


class _Tensor(NamedTuple):
    file: Path
    values: np.ndarray


class _Piece(NamedTuple):
    tensor: _Tensor
    part: Part


def source_files(folder: Path) -> list[Path]:
    """The files that a checkpoint in ``folder`` is made of: if one changes, so does the checkpoint."""
    return sorted(path for pattern in _TEXTS for path in folder.glob(pattern) if path.is_file())


def read_hf_directory(folder: Path) -> Checkpoint:
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
    where, n_layers, n_experts = f"{folder / CONFIG}: ", config.n_layers, config.n_experts
    require(n_layers <= len(tensors), f"{where}num_hidden_layers", "layers that are in the file", n_layers)
    require(n_experts <= len(tensors), f"{where}number of experts", "experts that are in the file", n_experts)
    law = law_of(generation, str(path))
    if ours:
        arrays = {name: tensor.values for name, tensor in tensors.items()}
        params, scheme = saved_params(quantized, arrays, config, str(folder))
        return Checkpoint(str(folder), config, vocabulary, params, law, scheme)
    params = _params(tensors, config, FAMILIES[values["architectures"][0]], folder)
    return Checkpoint(str(folder), config, vocabulary, params, law)


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


def _params(tensors: dict[str, _Tensor], config: TransformerConfig, family: Family, folder: Path) -> tuple[Param, ...]:
    """Every parameter, from tensors whose presence, shape and type are checked; every tensor must be used."""
    names, prefix = family.names, family.prefix
    if not any(name.startswith(prefix) for name in tensors):  # saved as the model without its head
        tensors = {name if name == names.whole["head"] else prefix + name: t for name, t in tensors.items()}
    used = {name for name in tensors if family.derived.fullmatch(name)}
    params = []
    for name, shape in named_shapes(config).items():
        pieces = []
        for part in names.of(name, shape, config):
            pieces.append(_Piece(_checked(tensors, part.name, part.shape, folder), part))
            used.add(part.name)
        params.append(Param(name, shape, lambda pieces=pieces: _blocks(pieces), _mapped(pieces, shape)))  # type: ignore[misc]
    head = names.whole["head"]
    if config.tied and head in tensors:
        params[0] = _tied(params[0], _checked(tensors, head, params[0].shape, folder), head)
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


def _tied(embed: Param, head: _Tensor, name: str) -> Param:
    """The embedding of a file that says it is the head as well, and holds that too: they must be equal."""

    def blocks() -> Iterator[np.ndarray]:
        for block, same in zip(embed.blocks(), _rows(head.values, Part(name, embed.shape)), strict=True):
            equal = bool(np.array_equal(block, same))
            require(equal, f"{head.file}: {name}", "the embedding's values (tie_word_embeddings)", "others")
            yield block

    return embed._replace(blocks=blocks, mapped=None)


def _rows(values: np.ndarray, part: Part) -> Iterator[np.ndarray]:
    """The rows of a parameter that a tensor is, a few at a time."""
    matrix = values.T if part.transposed else values
    order = None if part.order is None else part.order()
    step = max(1, _BLOCK_VALUES // max(1, math.prod(matrix.shape[1:])))
    for first in range(0, len(matrix), step):
        rows = slice(first, first + step)
        block = matrix[rows] if order is None else matrix[order[rows]]
        yield block + np.float32(part.plus) if part.plus else block


def _blocks(pieces: list[_Piece]) -> Iterator[np.ndarray]:
    for tensor, part in pieces:
        yield from _rows(tensor.values, part)


def _mapped(pieces: list[_Piece], shape: tuple[int, ...]) -> np.ndarray | None:
    """The tensors as one array over the mapped file, if they lie in it one behind the other, aligned for jax."""
    file, first = pieces[0].tensor
    at: Any = first.ctypes.data
    if at % ALIGNMENT:
        return None
    for tensor, part in pieces:
        values = tensor.values
        if not part.is_plain or tensor.file != file or values.dtype != first.dtype or values.ctypes.data != at:
            return None
        at += values.nbytes
    strides = tuple(first.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return np.lib.stride_tricks.as_strided(first, shape, strides, writeable=False)
