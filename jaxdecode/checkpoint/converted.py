"""Converted copies: a checkpoint in our layout and a dtype, made once, kept where loading it again costs nothing.

A copy is a folder in the user's cache: ``model.safetensors`` (aligned, so that jax uses the memory map itself),
``config.json`` and ``tokenizer.json``. It is made under a temporary name, flushed, and renamed when complete: a kill
leaves nothing half written under the real name. The name holds the source's path, the size and modification time of
each of its files, the dtype, the scheme if the weights are quantized, and the version of this module's layout, so a
copy is never stale. A checkpoint that lies on disk like a copy already needs none: its own files are mapped. The arrays
of a quantized matrix stand beside each other in the file, and the config tells how they belong together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import numpy as np

from jaxdecode.checkpoint.quantized import described, entries_of, quantized_rows, rebuilt, spec_of
from jaxdecode.checkpoint.safetensors_file import ALIGNMENT, Entry, cast_blocks, read_safetensors, write_safetensors
from jaxdecode.checkpoint.source import AS_STORED, Checkpoint, Param, Stored, named_shapes
from jaxdecode.checks import require
from jaxdecode.models.transformer import Scaling, TransformerConfig
from jaxdecode.quant import Scheme, Uniform, parse_scheme
from jaxdecode.text.backend import Vocabulary, open_tokenizer
from jaxdecode.text.tokenizer import Tokenizer

__all__ = [
    "Copy",
    "Progress",
    "cache_folder",
    "copy_folder",
    "in_memory",
    "kept_scheme",
    "mapped",
    "read_copy",
    "stored_leaf",
    "stored_params",
    "sync_folder",
    "write_copy",
    "write_text",
]

_VERSION = 4  # of the layout of a copy and of the conversion: raised whenever either changes
_WEIGHTS, _CONFIG, _TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
_UNFINISHED = ".unfinished-"
_ABANDONED_SECONDS = 3600
_PIECE = 1 << 19  # values quantized at a time: their intermediate results stay in the processor's cache

Progress = Callable[[str, float], None]


class Copy(NamedTuple):
    """What loading needs: config, tokenizer, parameters by name in NumPy arrays, a ``generation_config.json``'s law."""

    config: TransformerConfig
    tokenizer: Tokenizer
    leaves: Mapping[str, Any]
    generation: Mapping[str, Any]


def cache_folder() -> Path:
    """Where this library keeps files: $JAXDECODE_CACHE, else ``jaxdecode`` in $XDG_CACHE_HOME or ~/.cache."""
    own, shared = os.environ.get("JAXDECODE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "jaxdecode"


def copy_folder(source: Path, files: Sequence[Path], dtype: np.dtype[Any], scheme: Scheme | None = None) -> Path:
    """The folder of the copy of ``source``, made of ``files``, as they are now. OSError if one cannot be read."""
    place = hashlib.sha256(os.fsencode(source.resolve(strict=True))).hexdigest()[:12]
    state = hashlib.sha256(str(_VERSION).encode())
    for file in files:
        stat = file.stat()
        state.update(os.fsencode(file.name) + f" {stat.st_size} {stat.st_mtime_ns}\n".encode())
    reach = f"_{scheme.range}" if isinstance(scheme, Uniform) else ""
    kind = dtype.name if scheme is None else f"{dtype.name}+{scheme}{reach}"
    return cache_folder() / "checkpoints" / f"{place}-{kind}-{state.hexdigest()[:12]}"


def read_copy(folder: Path) -> Copy | None:
    """The copy in ``folder``, over its memory map, which a CPU computes with as it is; None if none is sound."""
    try:
        told = json.loads((folder / _CONFIG).read_text("utf-8"))
        config, generation = _config(told["config"]), dict(told["generation"])
        text = told["vocabulary"]
        text["eos_ids"] = tuple(text["eos_ids"])
        vocabulary = Vocabulary(json=(folder / _TOKENIZER).read_text("utf-8"), **text)
        tokenizer = open_tokenizer(vocabulary, str(folder / _TOKENIZER))
        arrays, _ = read_safetensors(folder / _WEIGHTS)
        leaves = {k: rebuilt(k, told["quantized"].get(k), shape, arrays) for k, shape in named_shapes(config).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if arrays:  # more than belongs to the model
        return None
    return Copy(config, tokenizer, leaves, generation)


def mapped(checkpoint: Checkpoint, dtype: np.dtype[Any]) -> Copy | None:
    """The checkpoint over its own mapped files, if all of it lies there in our layout and in ``dtype``."""
    arrays = {}
    for param in checkpoint.params:
        if param.mapped is None or param.mapped.dtype != dtype:
            return None
        arrays[param.name] = param.mapped
    return _copy(checkpoint, arrays)


def stored_params(checkpoint: Checkpoint, dtype: np.dtype[Any]) -> Copy:
    """The checkpoint over its own mapped files, for one whose weights `save` wrote as they are."""
    leaves = {p.name: stored_leaf(p, dtype, AS_STORED, checkpoint.where).make() for p in checkpoint.params}
    return _copy(checkpoint, leaves)


def write_copy(
    folder: Path, checkpoint: Checkpoint, dtype: np.dtype[Any], scheme: Scheme | None, progress: Progress
) -> None:
    """Convert ``checkpoint`` into ``folder``. OSError if the cache cannot be written; it then is as it was."""
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(root)
    made = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=root))
    try:
        entries = _entries(checkpoint, dtype, scheme)
        write_safetensors(made / _WEIGHTS, entries, written=_reporter(entries, str(scheme or dtype.name), progress))
        text = checkpoint.vocabulary._asdict()
        write_text(made / _TOKENIZER, text.pop("json"))
        config = _described(checkpoint.config)
        about = {"quantized": _descriptions(checkpoint, dtype, scheme), "generation": dict(checkpoint.generation)}
        write_text(made / _CONFIG, json.dumps({"config": config, "vocabulary": text, **about}, indent=1))
        sync_folder(made)
        _put_in_place(made, folder)
        sync_folder(root)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    place_and_kind = folder.name.rpartition("-")[0]
    for old in root.glob(f"{place_and_kind}-*"):  # of an earlier state of the same file: nothing can ask for it again
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)


def in_memory(checkpoint: Checkpoint, dtype: np.dtype[Any], scheme: Scheme | None, progress: Progress) -> Copy:
    """The same without a folder: converted into the memory that jax then uses."""
    entries = _entries(checkpoint, dtype, scheme)
    report = _reporter(entries, str(scheme or dtype.name), progress)
    arrays, done = {}, 0
    for entry in entries:
        room = np.empty(entry.nbytes + ALIGNMENT, np.uint8)
        first = -room.ctypes.data % ALIGNMENT
        flat, at = room[first : first + entry.nbytes].view(entry.dtype), 0
        for block in cast_blocks(entry):
            flat[at : at + block.size] = block.reshape(-1)
            at += block.size
            report(done + at * entry.dtype.itemsize)
        done += entry.nbytes
        arrays[entry.name] = flat.reshape(entry.shape)
    told = _descriptions(checkpoint, dtype, scheme)
    leaves = {p.name: rebuilt(p.name, told.get(p.name), p.shape, arrays) for p in checkpoint.params}
    return _copy(checkpoint, leaves)


def _copy(checkpoint: Checkpoint, leaves: Mapping[str, Any]) -> Copy:
    tokenizer = open_tokenizer(checkpoint.vocabulary, checkpoint.where)
    return Copy(checkpoint.config, tokenizer, leaves, checkpoint.generation)


def _described(config: TransformerConfig) -> dict[str, Any]:
    """The config for a JSON file: of a scaling its name too."""
    fields = dataclasses.asdict(config)
    if config.rope_scaling is not None:
        fields["rope_scaling"]["kind"] = type(config.rope_scaling).__name__
    return fields


def _config(fields: dict[str, Any]) -> TransformerConfig:
    scaling = fields.pop("rope_scaling")
    if scaling is not None:
        kinds = {kind.__name__: kind for kind in get_args(Scaling)}
        scaling = kinds[scaling.pop("kind")](**{name: _hashable(value) for name, value in scaling.items()})
    return TransformerConfig(**{name: _hashable(value) for name, value in fields.items()}, rope_scaling=scaling)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def kept_scheme(checkpoint: Checkpoint, scheme: Scheme | None) -> Scheme | None:
    """The scheme of what a load of ``checkpoint`` by ``scheme`` gives. ValueError: one that it cannot give."""
    where = f"{checkpoint.where}: quantize"
    if checkpoint.scheme is not None:
        expected = f"None, or {AS_STORED!r}: its weights are quantized by {checkpoint.scheme}"
        require(scheme in (None, AS_STORED), where, expected, scheme)
        return AS_STORED
    if scheme == AS_STORED:
        stored = any(param.stored for param in checkpoint.params)
        require(stored, where, "a scheme: only GGUF files, and quantized folders of `save`, are kept as stored", scheme)
    elif scheme is not None:
        parse_scheme("quantize", scheme)
    return scheme


def stored_leaf(param: Param, dtype: np.dtype[Any], scheme: Scheme | None, where: str) -> Stored:
    """What is kept of a parameter under a scheme, "as_stored" or None: vectors, and all of it under None, as floats."""
    entry = Entry(param.name, dtype, param.shape, param.blocks, where)
    if scheme == AS_STORED and param.stored is not None:
        return param.stored(dtype)
    if scheme is None or scheme == AS_STORED or len(param.shape) != 2:
        plain = jax.ShapeDtypeStruct(param.shape, dtype)
        return Stored(plain, lambda: np.concatenate([x.reshape(-1) for x in cast_blocks(entry)]).reshape(param.shape))
    rows = max(1, _PIECE // param.shape[1])
    name = f"{where}: {param.name}"
    spec = spec_of(param.shape, dtype, scheme)
    return Stored(spec, lambda: quantized_rows(iter(cast_blocks(entry)), scheme, param.shape, rows, name))


def _descriptions(checkpoint: Checkpoint, dtype: np.dtype[Any], scheme: Scheme | None) -> dict[str, Any]:
    told = {p.name: described(stored_leaf(p, dtype, scheme, checkpoint.where).spec) for p in checkpoint.params}
    return {name: about for name, about in told.items() if about is not None}


def _entries(checkpoint: Checkpoint, dtype: np.dtype[Any], scheme: Scheme | None) -> list[Entry]:
    entries: list[Entry] = []
    for param in checkpoint.params:
        leaf = stored_leaf(param, dtype, scheme, checkpoint.where)
        if isinstance(leaf.spec, jax.ShapeDtypeStruct):  # a float: block by block
            entries.append(Entry(param.name, dtype, param.shape, param.blocks, checkpoint.where))
        else:
            entries += entries_of(param.name, leaf.spec, leaf.make, checkpoint.where)
    return entries


def _reporter(entries: list[Entry], kind: str, progress: Progress) -> Callable[[int], None]:
    total = sum(entry.nbytes for entry in entries)
    text = f"converting the weights to {kind}"
    return lambda done: progress(text, min(1.0, done / total))


def _put_in_place(made: Path, folder: Path) -> None:
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise
        if read_copy(folder) is None:  # damaged: another name for it, then this one is free
            aside = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder.parent))
            os.rename(folder, aside / "damaged")
            os.rename(made, folder)
            shutil.rmtree(aside, ignore_errors=True)
        # otherwise another process was faster, and its copy is as good


def _remove_abandoned(root: Path) -> None:
    """Unfinished folders that nobody has written to for an hour: their process was killed."""
    for folder in root.glob(f"{_UNFINISHED}*"):
        try:
            newest = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
        except OSError:
            continue
        if time.time() - newest > _ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a file, and flush it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
