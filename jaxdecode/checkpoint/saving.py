"""``save``: a model as a Hugging Face directory, which `load` maps as it is and other libraries read."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode.checkpoint.converted import Progress, sync_folder, write_text
from jaxdecode.checkpoint.hf_config import config_to_json, family_of
from jaxdecode.checkpoint.hf_directory import CONFIG, GENERATION, INDEX, WEIGHTS
from jaxdecode.checkpoint.hf_families import FAMILIES
from jaxdecode.checkpoint.hf_tokenizer import tokenizer_files
from jaxdecode.checkpoint.quantized import OURS, described, entries_of
from jaxdecode.checkpoint.safetensors_file import Entry, write_safetensors
from jaxdecode.checkpoint.source import Names, Part, named_shapes
from jaxdecode.checks import require
from jaxdecode.models.transformer import TransformerConfig
from jaxdecode.quant import QTensor, is_quantized

if TYPE_CHECKING:
    from jaxdecode.checkpoint import Loaded

__all__ = ["save"]

_DTYPES = ("float32", "bfloat16", "float16")


def save(
    loaded: Loaded,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int | None = None,
    notes: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a model of any family that is known to a new or empty ``directory``, and return that.

    It loads back bit for bit, and transformers reads it; without a converted copy too, unless the family stores weights
    another way than the model uses them (Gemma, GPT-2, GPT-NeoX): config.json, generation_config.json,
    tokenizer.json, tokenizer_config.json with the chat template, and the weights in their own dtype, in one
    model.safetensors, or in several and an index if ``max_shard_bytes`` is less than they have. The directory appears
    when it is complete, or not at all. Quantized params are written as they are, with ``notes`` (JSON) of how they were
    made in config.json; only this library reads those. ValueError: another kind of model or params, what no family's
    config.json can state, notes without quantized params; FileExistsError: a directory that is not empty.
    """
    folder = Path(directory).expanduser()
    _check_free(folder)
    config = loaded.config
    if not isinstance(config, TransformerConfig):
        raise ValueError(f"save: expected a transformer, got {type(config).__name__}")
    shard = max_shard_bytes is None or (isinstance(max_shard_bytes, int) and max_shard_bytes > 0)
    require(shard, "save: max_shard_bytes", "a positive number, or None", max_shard_bytes)
    spread = any(len(x.devices()) > 1 for x in jax.tree.leaves(loaded.params) if isinstance(x, jax.Array))
    require(not spread, "save: params", "params on one device (loaded without a mesh)", "params over a mesh")
    found = _found(loaded.params, config)
    quantized = any(map(is_quantized, found.values()))
    require(quantized or notes is None, "save: notes", "none for params that are not quantized", notes)
    groups = _quantized_groups(found) if quantized else _groups(found, config)
    dtype = jnp.dtype(found["embed"].dtype).name
    ids: Any = {"bos_token_id": loaded.tokenizer.bos_id, "eos_token_id": list(loaded.tokenizer.eos_ids) or None}
    texts: dict[str, dict[str, Any]] = {
        CONFIG: config_to_json(config, dtype) | ids | (_about(found, notes) if quantized else {}),
        GENERATION: {k: v for k, v in ids.items() if v is not None} | dict(loaded.generation),
        **tokenizer_files(loaded.tokenizer),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = folder.with_name(f".{folder.name}.unfinished-{secrets.token_hex(8)}")
    made.mkdir()
    try:
        _write_weights(made, groups, max_shard_bytes, progress or (lambda text, fraction: None))
        for name, values in texts.items():
            write_text(made / name, json.dumps(values, ensure_ascii=False, indent=2) + "\n")
        sync_folder(made)
        os.replace(made, folder)  # takes the place of an empty folder, and of nothing else
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _check_free(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise FileExistsError(f"{folder}: expected a new or empty folder, got something else")
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: expected a new or empty folder, got one with files in it")


def _found(params: Any, config: TransformerConfig) -> dict[str, Any]:
    """Every parameter by its name, in the order of the file."""
    expected = named_shapes(config)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    found = {_name(path): leaf for path, leaf in leaves}
    shapes = {name: getattr(leaf, "shape", None) for name, leaf in found.items()}
    wrong = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
    require(not wrong, "save: params", "the names and shapes of the config", f"others for {wrong}")
    return {name: found[name] for name in expected}


def _quantized_groups(found: Mapping[str, Any]) -> list[list[Entry]]:
    """The arrays of every parameter, which lie side by side."""
    groups = []
    for name, leaf in found.items():
        kept = jax.tree.map(np.asarray, leaf)
        groups.append(entries_of(name, kept, lambda kept=kept: kept, "save"))  # type: ignore[misc]
    return groups


def _about(found: Mapping[str, Any], notes: Mapping[str, Any] | None) -> dict[str, Any]:
    """What config.json says of quantized parameters."""
    parts = jax.tree.leaves([*found.values()], is_leaf=lambda x: isinstance(x, QTensor))
    schemes = sorted({str(part.scheme) for part in parts if isinstance(part, QTensor)})
    tensors = {name: about for name, leaf in found.items() if (about := described(leaf)) is not None}
    told = {"quant_method": OURS, "scheme": "+".join(schemes), "notes": dict(notes or {}), "tensors": tensors}
    return {"quantization_config": told}


def _groups(found: Mapping[str, Any], config: TransformerConfig) -> list[list[Entry]]:
    """The tensors to write; those of a group are read as one parameter, so they lie side by side in one file."""
    dtypes = sorted({str(leaf.dtype) for leaf in found.values()})
    require(len(dtypes) == 1 and dtypes[0] in _DTYPES, "save: params", f"one dtype of {', '.join(_DTYPES)}", dtypes)
    names = FAMILIES[family_of(config)].names
    return [_group(name, leaf, config, names) for name, leaf in found.items()]


def _name(path: tuple[Any, ...]) -> str:
    """The name of a leaf of the params: "layers.3.qkv"."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def _group(name: str, leaf: Any, config: TransformerConfig, names: Names) -> list[Entry]:
    entries, first = [], 0
    for part in names.of(name, leaf.shape, config):
        rows = slice(first, first + part.shape[1 if part.transposed else 0])
        blocks = _values(leaf, rows, part)
        entries.append(Entry(part.name, np.dtype(leaf.dtype), part.shape, blocks, "save", follows=first > 0))
        first = rows.stop
    return entries


def _values(leaf: Any, rows: slice, part: Part) -> Callable[[], Iterator[np.ndarray]]:
    """The values of a tensor of the file, from the rows of a parameter."""

    def blocks() -> Iterator[np.ndarray]:
        values = np.asarray(leaf)[rows]
        if part.plus:
            values = values - values.dtype.type(part.plus)
        if part.order is not None:
            values = values[np.argsort(part.order())]
        yield np.ascontiguousarray(values.T) if part.transposed else values

    return blocks


def _write_weights(folder: Path, groups: list[list[Entry]], limit: int | None, progress: Progress) -> None:
    shards = _shards(groups, limit)
    sizes = [sum(entry.nbytes for entry in shard) for shard in shards]
    total, written = sum(sizes), 0
    places: dict[str, str] = {}
    for i, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
        name = WEIGHTS if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"

        def report(done: int, before: int = written) -> None:
            progress("writing the weights", min(1.0, (before + done) / total))

        write_safetensors(folder / name, shard, metadata={"format": "pt"}, written=report)
        places |= dict.fromkeys((entry.name for entry in shard), name)
        written += size
    if len(shards) > 1:
        write_text(
            folder / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"
        )


def _shards(groups: list[list[Entry]], limit: int | None) -> list[list[Entry]]:
    """The groups in order, in as few files of at most ``limit`` bytes as that allows; a larger group is a file."""
    shards: list[list[Entry]] = []
    left: float = -1
    for group in groups:
        size = sum(entry.nbytes for entry in group)
        if size > left:
            shards.append([])
            left = math.inf if limit is None else limit
        shards[-1] += group
        left -= size
    return shards
