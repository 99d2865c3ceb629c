"""From a file to a model, its params and its tokenizer."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxdecode.base import Model, Params
from jaxdecode.checkpoint import converted
from jaxdecode.checkpoint.catalogue import CATALOGUE, TOY
from jaxdecode.checkpoint.converted import Copy, Progress
from jaxdecode.models.toy import ToyConfig
from jaxdecode.models.transformer import TransformerConfig
from jaxdecode.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxdecode.generation import Settings

__all__ = ["CATALOGUE", "Loaded", "load"]

_DTYPES = ("float32", "bfloat16", "float16")


class Loaded(NamedTuple):
    """A checkpoint that is ready: ``generate(model, params, [tokenizer.encode(text)], settings=loaded.settings())``."""

    model: Model
    params: Params
    tokenizer: Tokenizer
    config: TransformerConfig | ToyConfig

    def settings(self, **overrides: Any) -> Settings:
        """``Settings(**overrides)`` that ends at the file's end ids, unless ``eos`` says otherwise."""
        from jaxdecode.generation import Settings

        return Settings(**{"eos": self.tokenizer.eos_ids, **overrides})


def load(source: str | os.PathLike[str], *, dtype: DTypeLike = "float32", progress: Progress | None = None) -> Loaded:
    """Load a model by its catalogue name, or from a ``.gguf`` file of the llama family.

    dtype: of all params: float32, bfloat16 or float16. The first load of a file converts it into the user's cache
    (``$JAXDECODE_CACHE``), telling ``progress(text, fraction)``; later ones map that copy into memory. ValueError:
    unknown source or dtype, damaged or unsupported file; FileNotFoundError: no such file, or a catalogue model that is
    not installed; ImportError: a package that is missing.

    >>> loaded = load("toy")
    >>> loaded.tokenizer.decode(loaded.tokenizer.encode("words"))
    'words'
    """
    kind = _dtype(dtype)
    if source == TOY:
        return _toy(kind)
    return _transformer(_gguf_path(source), kind, progress or (lambda text, fraction: None))


def _dtype(dtype: DTypeLike) -> np.dtype[Any]:
    try:
        kind = np.dtype(jnp.dtype(dtype))
    except TypeError:
        kind = None
    if kind is None or kind.name not in _DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(_DTYPES)}, got {kind or dtype}")
    return kind


def _gguf_path(source: str | os.PathLike[str]) -> Path:
    if isinstance(source, str) and source in CATALOGUE:
        return CATALOGUE[source].path()
    path = Path(source).expanduser()
    if path.suffix.lower() != ".gguf":
        names = ", ".join([*CATALOGUE, TOY])
        raise ValueError(f"model: expected a catalogue name ({names}) or the path of a .gguf file, got {source!r}")
    if not path.is_file():
        got = "a folder" if path.is_dir() else "nothing there"
        raise FileNotFoundError(f"{path}: expected a .gguf file, got {got}")
    return path


def _transformer(path: Path, dtype: np.dtype[Any], progress: Progress) -> Loaded:
    from jaxdecode.models.transformer import transformer

    copy = _copy(path, dtype, progress)
    return Loaded(transformer(copy.config), copy.params, copy.tokenizer, copy.config)


def _copy(path: Path, dtype: np.dtype[Any], progress: Progress) -> Copy:
    """The converted copy, made first if it is not there; in memory alone if the cache cannot be written."""
    from jaxdecode.checkpoint.gguf_llama import read_llama_gguf

    folder = converted.copy_folder(path, dtype)
    if (copy := converted.read_copy(folder)) is not None:
        return copy
    checkpoint = read_llama_gguf(path)
    try:
        converted.write_copy(folder, checkpoint, dtype, progress)
        if (copy := converted.read_copy(folder)) is not None:
            return copy
        reason = "the copy cannot be read back"
    except OSError as error:
        reason = str(error)
    warnings.warn(f"{folder.parent}: no converted copy kept, the next load converts again: {reason}", stacklevel=4)
    return converted.in_memory(checkpoint, dtype, progress)


def _toy(dtype: np.dtype[Any]) -> Loaded:
    from jaxdecode.models import toy
    from jaxdecode.testing import markov_model
    from jaxdecode.text.bytes_tokenizer import bytes_tokenizer

    config = toy.ToyConfig()
    params = jax.device_put(toy.logits().astype(dtype))
    return Loaded(markov_model(context=config.context_length), params, bytes_tokenizer(), config)
