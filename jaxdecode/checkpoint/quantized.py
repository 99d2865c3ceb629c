"""Quantized parameters in files: the names of their arrays, what is told of them in JSON, and the way back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode.checkpoint.safetensors_file import Entry
from jaxdecode.checkpoint.source import Param, Stored, named_shapes
from jaxdecode.checks import require
from jaxdecode.models.transformer import TransformerConfig
from jaxdecode.quant import (
    Form,
    QRows,
    QTensor,
    Scheme,
    Uniform,
    codes_and_scale,
    dequantize,
    over_rows,
    parse_scheme,
    quantize_matrix,
)
from jaxdecode.quant.tensor import plane_widths

__all__ = ["OURS", "described", "entries_of", "named_arrays", "quantized_rows", "rebuilt", "saved_params", "spec_of"]

OURS = "jaxdecode"  # quant_method in the config.json of a directory that `save` wrote

_GRIDS = ("scale", "offset", "zero", "scale_unit", "offset_unit")
_DTYPES = ("float32", "bfloat16", "float16")


def named_arrays(name: str, leaf: Any) -> dict[str, Any]:
    """The arrays of a parameter by the names they have in files; a float array is one."""
    if isinstance(leaf, QRows):
        parts = (named_arrays(f"{name}.{i}", part) for i, part in enumerate(leaf.parts))
        return functools.reduce(lambda a, b: a | b, parts)
    if not isinstance(leaf, QTensor):
        return {name: leaf}
    if leaf.form is None:
        codes = {name: leaf.codes}
    else:
        codes = {f"{name}.codes{w}": x for w, x in zip(plane_widths(leaf.form.bits), leaf.codes, strict=True)}
    return codes | {f"{name}.{key}": x for key in _GRIDS if (x := getattr(leaf, key)) is not None}


def described(leaf: Any) -> dict[str, Any] | None:
    """What JSON tells of a parameter besides its arrays; None of a float array."""
    if isinstance(leaf, QRows):
        return {"dtype": jnp.dtype(leaf.dtype).name, "parts": [described(part) for part in leaf.parts]}
    if not isinstance(leaf, QTensor):
        return None
    form = None if leaf.form is None else dataclasses.asdict(leaf.form)
    reach = leaf.scheme.range if isinstance(leaf.scheme, Uniform) else None
    return {"scheme": str(leaf.scheme), "range": reach, "form": form}


def rebuilt(name: str, about: Any, shape: tuple[int, ...], arrays: dict[str, Any]) -> Any:
    """The parameter from what `described` told, of ``shape`` if it is known; its arrays are taken out of ``arrays``.

    ValueError, KeyError or TypeError: descriptions and arrays that do not fit each other.
    """
    if about is None:
        leaf = arrays.pop(name)
        require(jnp.issubdtype(leaf.dtype, jnp.floating), name, "floating numbers", leaf.dtype)
    elif "parts" in about:
        parts, dtype = about["parts"], about["dtype"]
        require(isinstance(parts, list) and len(parts) > 0 and dtype in _DTYPES, name, "parts and a dtype", about)
        rows = [rebuilt(f"{name}.{i}", part, (-1, shape[1]), arrays) for i, part in enumerate(parts)]
        leaf = QRows(tuple(rows), jnp.dtype(dtype))
    else:
        leaf = _tensor(name, about, arrays)
    fits = len(leaf.shape) == len(shape) and all(n in (-1, m) for n, m in zip(shape, leaf.shape, strict=True))
    require(fits, name, f"shape {shape}", leaf.shape)
    return leaf


def _tensor(name: str, about: Mapping[str, Any], arrays: dict[str, Any]) -> QTensor:
    scheme, form = about["scheme"], about["form"]
    require(isinstance(scheme, str) and scheme.isidentifier(), name, "the name of a scheme", scheme)
    if form is None:
        require(scheme in ("int8", "int8_weights"), name, "int8 or int8_weights", scheme)
        codes, scale = arrays.pop(name), arrays.pop(f"{name}.scale")
        good = codes.dtype == np.int8 and codes.ndim == 2 and scale.shape == codes.shape[:1]
        require(good and jnp.issubdtype(scale.dtype, jnp.floating), name, "int8 codes, a scale a row", codes.shape)
        return QTensor(codes, scale, scheme)
    if about["range"] is not None:
        scheme = parse_scheme(name, scheme, range=about["range"])
    made = Form(**form)
    whole = all(isinstance(n, int) and n >= 1 for n in (made.bits, made.width, made.group))
    good = whole and made.bits <= 8 and made.dtype in _DTYPES and isinstance(made.zero, int | float | None)
    require(good, name, "the form of a weight", form)
    planes = tuple(arrays.pop(f"{name}.codes{w}") for w in plane_widths(made.bits))
    grids = {key: arrays.pop(f"{name}.{key}", None) for key in _GRIDS}
    rows = planes[0].shape[-1]
    for width, plane in zip(plane_widths(made.bits), planes, strict=True):
        expected = (made.groups, made.padded * width // 8, rows)
        require(plane.shape == expected and plane.dtype == np.uint8, name, f"codes {expected}", plane.shape)
    for key, x in grids.items():
        if x is not None:
            ok = x.ndim == 2 and x.shape[1] == rows and 0 < len(x) <= made.groups and made.groups % len(x) == 0
            require(ok and (key.endswith("unit") or len(x) == made.groups), name, f"a {key} a group", x.shape)
    known = made.zero is not None or made.nibbles or grids["zero"] is not None or grids["offset"] is not None
    require(grids["scale"] is not None and known, name, "scales and offsets", [*grids])
    return QTensor(planes, scheme=scheme, form=made, **grids)


def saved_params(
    about: Mapping[str, Any], arrays: dict[str, Any], config: TransformerConfig, where: str
) -> tuple[tuple[Param, ...], str]:
    """The parameters of a directory of quantized weights, over its mapped arrays, and the scheme it names.

    about: its "quantization_config". ValueError, naming ``where``: descriptions and arrays that do not fit each other.
    """
    params = []
    told, scheme = about.get("tensors"), about.get("scheme")
    require(isinstance(told, dict), f"{where}: quantization_config.tensors", "descriptions by name", told)
    require(isinstance(scheme, str), f"{where}: quantization_config.scheme", "a name", scheme)
    for name, shape in named_shapes(config).items():
        try:
            leaf = rebuilt(name, told.get(name), shape, arrays)  # type: ignore[union-attr]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: {name}: expected its arrays, and their form, got none for {error}") from None
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        params.append(Param(name, shape, functools.partial(_values, leaf), stored=functools.partial(_stored, leaf)))
    require(not arrays, f"{where}: tensors", "none beyond those of the model", sorted(arrays))
    return tuple(params), str(scheme)


def _values(leaf: Any) -> Iterator[np.ndarray]:
    yield np.asarray(dequantize(leaf))


def _stored(leaf: Any, dtype: np.dtype[Any]) -> Stored:
    made = _with_dtype(leaf, dtype)
    return Stored(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made), lambda: made)


def _with_dtype(leaf: Any, dtype: np.dtype[Any]) -> Any:
    """The parameter for activations of another dtype; codes and the scales of groups stay as they are."""
    if isinstance(leaf, QRows):
        return QRows(tuple(_with_dtype(p, dtype) if isinstance(p, QTensor) else p for p in leaf.parts), dtype)
    if not isinstance(leaf, QTensor):
        return leaf.astype(dtype, copy=False)
    if leaf.form is None:
        return dataclasses.replace(leaf, scale=leaf.scale.astype(dtype, copy=False))
    return dataclasses.replace(leaf, form=dataclasses.replace(leaf.form, dtype=dtype.name))


@functools.lru_cache(maxsize=256)
def spec_of(shape: tuple[int, ...], dtype: np.dtype[Any], scheme: Scheme) -> QTensor:
    """What a matrix becomes under a scheme, with shapes and dtypes in place of arrays."""
    return jax.eval_shape(lambda w: _one(w, scheme, ""), jax.ShapeDtypeStruct(shape, dtype))


def _one(w: Any, scheme: Scheme, name: str) -> QTensor:
    parsed = parse_scheme("quantize", scheme)
    if isinstance(parsed, Uniform):
        return quantize_matrix(w, parsed, name)
    return QTensor(*codes_and_scale(w, np if isinstance(w, np.ndarray) else jnp), parsed)


def quantized_rows(blocks: Iterator[np.ndarray], scheme: Scheme, shape: tuple[int, ...], rows: int, name: str) -> Any:
    """A matrix whose values come in blocks, quantized so many rows at a time."""
    parsed = parse_scheme("quantize", scheme)
    if isinstance(parsed, Uniform) and parsed.group == "tensor":
        return _one(np.concatenate([block.reshape(-1) for block in blocks]).reshape(shape), scheme, name)
    pieces = []
    for block in blocks:
        matrix = block.reshape(-1, shape[1])
        pieces += [_one(matrix[first : first + rows], scheme, name) for first in range(0, len(matrix), rows)]
    return over_rows(lambda axis, *parts: np.concatenate(parts, axis), *pieces)


def entries_of(name: str, spec: Any, make: Callable[[], Any], where: str) -> list[Entry]:
    """The arrays of a parameter to write, in their order; it is made when the first is asked for, and then kept."""
    kept: dict[str, Any] = {}
    names = [*named_arrays(name, spec)]

    def blocks(array: str) -> Iterator[np.ndarray]:
        if not kept:
            kept.update(named_arrays(name, make()))
        yield kept[array] if array != names[-1] else kept.pop(array)
        if array == names[-1]:
            kept.clear()

    return [
        Entry(array, np.dtype(x.dtype), tuple(x.shape), functools.partial(blocks, array), where)
        for array, x in named_arrays(name, spec).items()
    ]
