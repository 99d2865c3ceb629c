"""The tensors of a GGUF file as they are stored there: each in its own block type, without a float copy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode.checkpoint.gguf_blocks import BLOCK_TYPES, rearranged
from jaxdecode.checkpoint.gguf_file import GgufFile, GgufTensor, raw_rows
from jaxdecode.checkpoint.source import Stored
from jaxdecode.quant import QRows, over_rows

__all__ = ["stored_tensors"]

_Part = tuple[GgufFile, GgufTensor, np.ndarray | None]
_FLOATS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(jnp.bfloat16)}


def stored_tensors(parts: Sequence[_Part], dtype: np.dtype[Any]) -> Stored:
    """A parameter whose rows are those of some tensors; neighbours of one type become one.

    F16 and BF16 stay as they are, F32 becomes ``dtype``. ValueError: a block type that is not known.
    """
    for file, tensor, _ in parts:
        if tensor.type.name not in _FLOATS.keys() | BLOCK_TYPES.keys():
            expected = ", ".join([*_FLOATS, *BLOCK_TYPES])
            raise ValueError(f"{file.path}: {tensor.name}: expected one of {expected}, got {tensor.type.name}")
    runs = [[*run] for _, run in itertools.groupby(parts, lambda part: part[1].type.name)]
    specs = [_spec(run, dtype) for run in runs]
    if len(runs) == 1 and getattr(specs[0], "dtype", None) == dtype:
        return Stored(specs[0], lambda: _made(runs[0], dtype))
    return Stored(QRows(tuple(specs), dtype), lambda: QRows(tuple(_made(run, dtype) for run in runs), dtype))


def _spec(run: Sequence[_Part], dtype: np.dtype[Any]) -> Any:
    """The shapes and dtypes of a run of tensors, from what one row of it becomes."""
    tensor = run[0][1]
    rows, width = sum(part[1].shape[0] for part in run), tensor.shape[-1]
    raw = np.zeros((1, tensor.nbytes // math.prod(tensor.shape[:-1])), np.uint8)
    one = _converted(tensor.type.name, raw, width, dtype)

    def many(axis: int, x: Any) -> Any:
        shape = [*x.shape]
        shape[axis] = rows
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    return over_rows(many, one)


def _made(run: Sequence[_Part], dtype: np.dtype[Any]) -> Any:
    def pieces() -> Iterator[Any]:
        for file, tensor, order in run:
            for raw in raw_rows(file, tensor, order):
                yield _converted(tensor.type.name, raw, tensor.shape[-1], dtype)

    return over_rows(lambda axis, *rows: np.concatenate(rows, axis), *pieces())


def _converted(kind: str, raw: np.ndarray, width: int, dtype: np.dtype[Any]) -> Any:
    if kind in BLOCK_TYPES:
        return rearranged(kind, raw, width, dtype)
    values = raw.view(_FLOATS[kind])
    return values.astype(dtype) if kind == "F32" else values
