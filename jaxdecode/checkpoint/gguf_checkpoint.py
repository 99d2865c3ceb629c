"""GGUF files: fields to a config, tensors to parameters, by the names of the architecture that the file says.

The file's tensors are named as llama.cpp names them. A llama's query and key rows are permuted for interleaved rotary
positions (feature 2i turns with 2i+1); ours follow the rotate-half convention (i with i + h/2), so the rows go back.
Those of its relatives are as they were.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxdecode.checkpoint.fields import Fields
from jaxdecode.checkpoint.gguf_families import FAMILIES, GgufFamily
from jaxdecode.checkpoint.gguf_file import GgufFile, GgufTensor, dequantized_rows, read_gguf
from jaxdecode.checkpoint.gguf_stored import StoredPart, stored_tensors
from jaxdecode.checkpoint.source import Checkpoint, Names, Param, named_shapes
from jaxdecode.checks import require
from jaxdecode.models.transformer import LongRope, RopeScaling, TransformerConfig, YarnScaling, frequencies
from jaxdecode.text.gguf_vocab import gguf_vocabulary

__all__ = ["part_paths", "read_gguf_checkpoint"]

_ROPE_FREQS = "rope_freqs.weight"
_LONG_ROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
_LLAMA_3_1 = (
    1.0,
    4.0,
    8192,
)  # low_freq_factor, high_freq_factor, original context of every published model of its kind

# Fields under "llama.", or another architecture, that are used below, or say nothing that changes the model. Any other
# one is refused.
_KNOWN = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.causal",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "attention.scale",
    "expert_count",
    "expert_used_count",
    "tensor_data_layout",
}
_BY_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")  # one number, or one a layer
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def part_paths(path: Path) -> list[Path]:
    """The files of a checkpoint that is split over several, by its first one's name; else just ``path``.

    ValueError for another part than the first.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    first = path.with_name(f"{match['stem']}-00001-of-{match['count']}.gguf")
    require(match["number"] == "00001", str(path), f"the first part, {first.name}", path.name)
    return [
        path.with_name(f"{match['stem']}-{i:05d}-of-{match['count']}.gguf") for i in range(1, int(match["count"]) + 1)
    ]


def read_gguf_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a GGUF file; its weights are read when their blocks are asked for.

    ValueError, naming file and field or tensor: damaged header, another architecture, a missing, surplus or misshapen
    tensor, a feature that the model does not have.
    """
    try:
        import gguf  # noqa: F401 - asked for here, so that its absence is told before anything else
    except ImportError as error:
        raise ImportError(".gguf files need the gguf package: pip install 'jaxdecode[text]'") from error
    file, owners = _parts(path)
    architecture = file.fields.get("general.architecture")
    known = isinstance(architecture, str) and architecture in FAMILIES
    expected = f"one of {', '.join(FAMILIES)}"
    require(known, f"{path}: general.architecture", expected, repr(architecture))
    family = FAMILIES[str(architecture)]
    config = _config(file, owners, str(architecture), family)
    vocabulary = gguf_vocabulary(file.fields, str(path))
    require(vocabulary.size == config.vocab_size, f"{path}: tokens", f"{config.vocab_size} of them", vocabulary.size)
    return Checkpoint(str(path), config, vocabulary, _params(owners, config, path, family.names))


_Owners = dict[str, GgufFile]  # tensor name -> the file that has it


def _parts(path: Path) -> tuple[GgufFile, _Owners]:
    """The first file, and all tensors of all parts."""
    first = read_gguf(path)
    count = first.fields.get("split.count", 0)
    paths = part_paths(path) if count else [path]
    require(count in (0, len(paths)), f"{path}: split.count", f"{len(paths)} parts, by the file's name", count)
    owners: _Owners = {}
    for i, part in enumerate(paths):
        if not part.is_file():
            raise FileNotFoundError(f"{part}: expected part {i + 1} of {count}, got nothing there")
        file = read_gguf(part) if i else first
        numbered = not count or (file.fields.get("split.no"), file.fields.get("split.count")) == (i, count)
        require(numbered, f"{part}: split.no", f"part {i} of {count}", file.fields.get("split.no"))
        again = sorted(owners.keys() & file.tensors.keys())
        require(not again, f"{part}: tensors", "each tensor once", again)
        owners |= dict.fromkeys(file.tensors, file)
    return first, owners


def _config(file: GgufFile, owners: _Owners, architecture: str, family: GgufFamily) -> TransformerConfig:
    prefix = f"{architecture}."
    values = {k.removeprefix(prefix): v for k, v in file.fields.items() if k.startswith(prefix)}
    for key in _BY_LAYER:
        if isinstance(values.get(key), np.ndarray) and len(set(values[key].tolist())) == 1:
            values[key] = int(values[key][0])
    read = Fields(values, f"{file.path}: {prefix}")
    for key, value in values.items():
        require(key in _KNOWN | family.known, read.name(key), "only fields that are supported", repr(value))
    d_model, n_heads = read.size("embedding_length"), read.size("attention.head_count")
    head_dim = read.size("attention.key_length", max(1, d_model // n_heads), most=1 << 16)
    read.only("attention.value_length", read.size("attention.value_length", head_dim), head_dim)
    read.only("attention.scale", read.get("attention.scale", float, 0.0), 0.0)
    read.only("attention.causal", read.get("attention.causal", bool, True), True)
    turning = read.size("rope.dimension_count", head_dim)
    if not family.partial:
        read.only("rope.dimension_count", turning, head_dim)
    n_layers = read.size("block_count")
    require(n_layers <= len(owners), read.name("block_count"), "layers that are in the file", n_layers)
    fields: dict[str, Any] = {
        "vocab_size": read.size("vocab_size", _tensor(owners, "token_embd.weight", 2, file.path).shape[0]),
        "d_model": d_model,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": read.size("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "d_mlp": read.size("feed_forward_length"),
        "context_length": read.size("context_length"),
        "norm_eps": read.real(family.eps),
        "rope_theta": read.real("rope.freq_base", 10000.0),
        "rotary_dim": None if turning == head_dim else turning,
        "tied": "output.weight" not in owners,
        **family.fields,
    }
    fields |= family.read(read, fields)
    if not fields.get("n_experts"):
        read.only("expert_count", read.get("expert_count", int, 0), 0)
    try:
        return _with_rope_scaling(TransformerConfig(**fields), read, owners, file.path)
    except ValueError as error:
        if str(error).startswith(str(file.path)):
            raise
        raise ValueError(f"{file.path}: {error}") from None  # numbers that do not fit each other


def _with_rope_scaling(config: TransformerConfig, read: Fields, owners: _Owners, path: Path) -> TransformerConfig:
    """The config with its rotary scaling: a rule, or divisors of the frequencies from tensors."""
    kind = read.get("rope.scaling.type", str, "linear")  # what a file means that gives a factor alone
    read.only("rope.scaling.type", kind, "none", "linear", "yarn", "longrope")
    scale = read.real("rope.scaling.attn_factor", 1.0)
    long = [name for name in _LONG_ROPE if name in owners]
    require(not long or config.positions == "rotary", f"{path}: tensors", "none beyond those of the model", long)
    if kind == "longrope" or long:
        return _long_rope(config, read, owners, path, scale)
    if kind == "yarn":
        return _yarn(config, read, scale)
    read.only("rope.scaling.attn_factor", scale, 1.0)
    old = read.get("rope.scale_linear", float, 0.0)
    factor = read.get("rope.scaling.factor", float, old) if kind == "linear" else 0.0
    require(0 <= factor < np.inf, read.name("rope.scaling.factor"), "a positive number, or 0 for none", factor)
    factor = float(factor) or 1.0
    half = config.rotary // 2
    if _ROPE_FREQS not in owners:
        return config if factor == 1.0 else dataclasses.replace(config, rope_freqs=(factor,) * half)
    require(factor == 1.0, f"{path}: {_ROPE_FREQS}", "no other rope scaling beside it", factor)
    values = _divisors(owners, _ROPE_FREQS, half, path)
    return _named_scaling(config, values) or dataclasses.replace(config, rope_freqs=tuple(values.tolist()))


def _divisors(owners: _Owners, name: str, count: int, path: Path) -> np.ndarray:
    """A tensor of divisors of the rotary frequencies."""
    tensor = _tensor(owners, name, 1, path)
    require(tensor.shape == (count,), f"{path}: {name}", f"shape ({count},)", tensor.shape)
    values = np.concatenate([block.reshape(-1) for block in dequantized_rows(owners[name], tensor)])
    require(bool(np.all(np.isfinite(values) & (values > 0))), f"{path}: {name}", "positive numbers", values)
    return values


def _long_rope(config: TransformerConfig, read: Fields, owners: _Owners, path: Path, scale: float) -> TransformerConfig:
    """Scaled for short texts, with the context of these, until ``with_context`` says otherwise."""
    context = config.context_length
    original = read.size("rope.scaling.original_context_length", context)
    short, long = (tuple(_divisors(owners, name, config.rotary // 2, path).tolist()) for name in _LONG_ROPE)
    scaling = LongRope(short, long, original, context, scale)
    return dataclasses.replace(config, rope_scaling=scaling, context_length=min(context, original))


def _yarn(config: TransformerConfig, read: Fields, scale: float) -> TransformerConfig:
    factor = read.real("rope.scaling.factor")
    original = read.size("rope.scaling.original_context_length", config.context_length)
    fast, slow = read.real("rope.scaling.yarn_beta_fast", 32.0), read.real("rope.scaling.yarn_beta_slow", 1.0)
    scale = scale * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return dataclasses.replace(config, rope_scaling=YarnScaling(factor, original, scale, fast, slow))


def _named_scaling(config: TransformerConfig, divisors: np.ndarray) -> TransformerConfig | None:
    """The config with the rule of Llama 3.1, whose result the file holds, if these divisors are that result.

    With the rule instead of its rounded result a file computes what the original checkpoint computes.
    """
    factor = float(divisors.max())
    scaled = dataclasses.replace(config, rope_scaling=RopeScaling(factor, *_LLAMA_3_1))
    made = frequencies(config) / frequencies(scaled)
    return scaled if np.allclose(made, divisors, rtol=1e-6, atol=0) else None


def _tensor(owners: _Owners, name: str, n_dims: int, path: Path) -> GgufTensor:
    if name not in owners:
        raise ValueError(f"{path}: {name}: expected this tensor, got a file without it")
    tensor = owners[name].tensors[name]
    require(len(tensor.shape) == n_dims, f"{owners[name].path}: {name}", f"{n_dims} dimensions", tensor.shape)
    return tensor


def _params(owners: _Owners, config: TransformerConfig, path: Path, names: Names) -> tuple[Param, ...]:
    """Every parameter, from tensors whose presence and shape are checked; every tensor must be used."""
    used = {_ROPE_FREQS} | (set(_LONG_ROPE) if isinstance(config.rope_scaling, LongRope) else set())
    params = []
    for name, shape in named_shapes(config).items():
        pieces: list[StoredPart] = []
        for part in names.of(name, shape, config):
            tensor = _tensor(owners, part.name, len(part.shape), path)
            where = f"{owners[part.name].path}: {part.name}"
            require(tensor.shape == part.shape, where, f"shape {part.shape}", tensor.shape)
            used.add(part.name)
            pieces.append((owners[part.name], tensor, part.order))
        stored = functools.partial(stored_tensors, pieces) if len(shape) == 2 else None
        params.append(Param(name, shape, functools.partial(_blocks, pieces), stored=stored))
    surplus = sorted(owners.keys() - used)
    require(not surplus, f"{path}: tensors", "none beyond those of the model", surplus)
    return tuple(params)


def _blocks(pieces: list[StoredPart]) -> Iterator[np.ndarray]:
    def rows(file: GgufFile, tensor: GgufTensor, order: Callable[[], np.ndarray] | None) -> Iterator[np.ndarray]:
        return dequantized_rows(file, tensor, None if order is None else order())

    return itertools.chain.from_iterable(rows(*piece) for piece in pieces)
