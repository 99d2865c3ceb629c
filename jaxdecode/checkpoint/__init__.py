"""From a file to a model, its params and its tokenizer."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxdecode.arithmetic import PLAIN, STEADY
from jaxdecode.base import Model, Params
from jaxdecode.checkpoint import converted
from jaxdecode.checkpoint.catalogue import CATALOGUE, TOY
from jaxdecode.checkpoint.converted import Copy, Progress
from jaxdecode.checkpoint.generation_config import settings_of
from jaxdecode.checkpoint.saving import save
from jaxdecode.checkpoint.source import AS_STORED, Checkpoint, params_from_names
from jaxdecode.checks import dtype as check_dtype
from jaxdecode.checks import require
from jaxdecode.meshes import check_mesh, place
from jaxdecode.models.sharding import shard
from jaxdecode.models.toy import ToyConfig
from jaxdecode.models.transformer import CACHE_DTYPES, TransformerConfig, transformer
from jaxdecode.quant import Scheme, parse_scheme
from jaxdecode.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxdecode.rulebook import Settings

__all__ = ["CATALOGUE", "Loaded", "Source", "find", "load", "save"]

_DTYPES = ("float32", "bfloat16", "float16")


class Loaded(NamedTuple):
    """A checkpoint that is ready: ``generate(model, params, [tokenizer.encode(text)], settings=loaded.settings())``.

    generation: what its generation_config.json says of the law of the next token, by that file's names.
    """

    model: Model
    params: Params
    tokenizer: Tokenizer
    config: TransformerConfig | ToyConfig
    generation: Mapping[str, Any] = MappingProxyType({})

    def settings(self, *, defaults: Literal["library", "model"] = "library", **overrides: Any) -> Settings:
        """``Settings(**overrides)`` that ends at the file's end ids, unless ``eos`` says otherwise.

        A ``regex``, a ``json_schema`` and ``choices`` are compiled for the tokenizer; a ``prefix`` may be a text.

        defaults: what holds for all else: the defaults of ``Settings``, or what the model's authors recommend
        (``generation``; greedy if that does not say ``do_sample``). ValueError: a recommendation without a setting.
        """
        from jaxdecode.constraints import compiled_fields
        from jaxdecode.rulebook import Settings

        require(defaults in ("library", "model"), "defaults", "'library' or 'model'", defaults)
        known = frozenset(field.name for field in dataclasses.fields(Settings))
        recommended = settings_of(self.generation, known) if defaults == "model" else {}
        chosen = compiled_fields(overrides, self.tokenizer)
        return Settings(**{"eos": self.tokenizer.eos_ids, **recommended, **chosen})


def load(
    source: str | os.PathLike[str],
    *,
    dtype: DTypeLike = "float32",
    quantize: Scheme | None = None,
    cache_dtype: DTypeLike | None = None,
    context_length: int | None = None,
    steady: bool = False,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Load a model: a catalogue name, a ``.gguf`` file, a Hugging Face directory, or a hub id "owner/name".

    dtype: of all params: float32, bfloat16 or float16. quantize: a scheme: matrices are a ``QTensor``, as from
    ``jaxdecode.quantize(params, quantize)``; "as_stored": every weight of a GGUF file as the file has it. cache_dtype:
    of keys and values in the cache: another float, int8 or int4, a quarter or a seventh (None: that of the params).
    context_length: tokens of the longest text, prompt and output (None: what the file says); models with LongRoPE or
    dynamic scaling turn short texts another way than long ones, and are loaded for the original context unless this
    says more. steady: with ``jaxdecode.arithmetic.STEADY``, by which int8 gives the same over other meshes and in
    batches of other sizes on a CPU. mesh: params lie over its devices by the rules of ``jaxdecode.meshes``, each device
    reading its part of the file; run under ``jax.set_mesh(mesh)``. The first load of a file converts it into the user's
    cache (``$JAXDECODE_CACHE``), telling ``progress(text, fraction)``; later ones map that copy into memory. What
    ``save`` wrote is mapped as it is, unless it is to be quantized. Catalogue models and hub ids are downloaded if they
    are not here, unless JAXDECODE_OFFLINE or HF_HUB_OFFLINE is set. ValueError: unknown source, dtype or scheme,
    damaged or unsupported file; FileNotFoundError: a file that is not there and cannot be fetched; ImportError: a
    package that is missing.

    >>> loaded = load("toy")
    >>> loaded.tokenizer.decode(loaded.tokenizer.encode("words"))
    'words'
    """
    kind = np.dtype(jnp.dtype(check_dtype("dtype", dtype, _DTYPES)))
    if quantize not in (None, AS_STORED):
        parse_scheme("quantize", quantize)
    if cache_dtype is not None:
        cache_dtype = check_dtype("cache_dtype", cache_dtype, CACHE_DTYPES)
    if mesh is not None:
        check_mesh(mesh)
    if source == TOY:
        require(cache_dtype is None, "cache_dtype", "None for toy (its cache is the last token)", cache_dtype)
        require(quantize is None, "quantize", "None for toy (a table, no matrix to multiply by)", quantize)
        require(context_length is None, "context_length", "None for toy", context_length)
        require(not steady, "steady", "False for toy (it computes nothing)", steady)
        return _toy(kind, mesh)
    progress = progress or (lambda text, fraction: None)
    copy = _copy(find(source, progress), kind, quantize, progress)
    config = copy.config if context_length is None else copy.config.with_context(context_length)
    model = transformer(config, cache_dtype=cache_dtype, arithmetic=STEADY if steady else PLAIN)
    params = params_from_names(config, copy.leaves)
    params = jax.device_put(params) if mesh is None else shard(config, params, mesh)
    return Loaded(model, params, copy.tokenizer, config, copy.generation)


class Source(NamedTuple):
    """A checkpoint on disk: where, the files whose change changes it, and how to read it."""

    path: Path
    files: Sequence[Path]
    read: Callable[[Path], Checkpoint]


def find(source: str | os.PathLike[str], progress: Progress) -> Source:
    """Where a source of ``load`` (but "toy") lies, downloaded if it is not here; the errors are those of ``load``."""
    from jaxdecode.checkpoint.gguf_checkpoint import part_paths, read_gguf_checkpoint

    if isinstance(source, str) and source in CATALOGUE:
        path = CATALOGUE[source].fetch(progress)
        return Source(path, [path], read_gguf_checkpoint)
    path = Path(source).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            got = "a folder" if path.is_dir() else "nothing there"
            raise FileNotFoundError(f"{path}: expected a .gguf file, got {got}")
        return Source(path, [part for part in part_paths(path) if part.is_file()], read_gguf_checkpoint)
    if path.is_dir():
        return _directory(path)
    if isinstance(source, str):
        from jaxdecode.checkpoint.hub import hub_folder, is_hub_id

        if is_hub_id(source):
            return _directory(hub_folder(source, progress))
    names = ", ".join([*CATALOGUE, TOY])
    expected = f"a catalogue name ({names}), a .gguf file, a folder with a config.json, or a hub id (owner/name)"
    raise ValueError(f"model: expected {expected}, got {str(source)!r}")


def _directory(folder: Path) -> Source:
    from jaxdecode.checkpoint.hf_directory import read_hf_directory, source_files

    return Source(folder, source_files(folder), read_hf_directory)


def _copy(source: Source, dtype: np.dtype[Any], scheme: Scheme | None, progress: Progress) -> Copy:
    """The converted copy, made first if it is not there; in memory alone if the cache cannot be written."""
    folder = converted.copy_folder(source.path, source.files, dtype, scheme)
    if (copy := converted.read_copy(folder)) is not None:
        return copy
    checkpoint = source.read(source.path)
    converted.kept_scheme(checkpoint, scheme)
    if checkpoint.scheme is not None:
        return converted.stored_params(checkpoint, dtype)
    if scheme is None and (copy := converted.mapped(checkpoint, dtype)) is not None:
        return copy
    try:
        converted.write_copy(folder, checkpoint, dtype, scheme, progress)
        if (copy := converted.read_copy(folder)) is not None:
            return copy
        reason = "the copy cannot be read back"
    except OSError as error:
        reason = str(error)
    warnings.warn(f"{folder.parent}: no converted copy kept, the next load converts again: {reason}", stacklevel=3)
    return converted.in_memory(checkpoint, dtype, scheme, progress)


def _toy(dtype: np.dtype[Any], mesh: Mesh | None) -> Loaded:
    from jaxdecode.models import toy
    from jaxdecode.testing import markov_model
    from jaxdecode.text.bytes_tokenizer import bytes_tokenizer

    config = toy.ToyConfig()
    table = toy.logits().astype(dtype)
    params = jax.device_put(table) if mesh is None else place(table, mesh)
    return Loaded(markov_model(context=config.context_length), params, bytes_tokenizer(), config)
