"""Whole trees of params: into codes, and back."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks
from jaxdecode.base import Params
from jaxdecode.quant.grids import grid_of, namespace, nearest_codes, value_of
from jaxdecode.quant.int8 import codes_and_scale
from jaxdecode.quant.packing import form_of, grouped, pack, storable, ungrouped, unpack
from jaxdecode.quant.schemes import Int8, Range, Scheme, Uniform, parse_scheme
from jaxdecode.quant.tensor import QRows, QTensor, is_quantized

__all__ = ["dequantize", "quantize", "quantize_matrix", "values_of"]


def quantize(params: Params, scheme: Scheme, *, range: Range = "max") -> Params:
    """Every matrix [N,K] of ``params`` as a ``QTensor``; vectors stay.

    range: how the ends of the grids are found, of all schemes but int8 and int8_weights: "max", "percentile" (99.9) or
    "search" (the least squared error). ValueError: an unknown scheme, or a matrix, told by its name, with NaN, inf, or
    numbers too large for its scheme.

    >>> import jax.numpy as jnp
    >>> quantize({"w": jnp.ones((4, 64))}, "int4")["w"].nbytes  # 4 bits, a float16 for 32 of them, 2 bytes a row
    152
    """
    parsed = parse_scheme("scheme", scheme)
    if isinstance(parsed, Uniform) and range != "max":
        parsed = parse_scheme("scheme", parsed, range=range)
    elif not isinstance(parsed, Uniform):
        checks.require(range == "max", "range", f"'max', as {parsed} has no other", range)

    def leaf(path: Any, w: Any) -> Any:
        apart = isinstance(w, QRows) and not any(isinstance(part, QTensor) for part in w.parts)
        checks.require(
            not apart, "params", "params that lie on no mesh yet (`load` takes quantize and mesh)", "a mesh's"
        )
        if is_quantized(w) or w.ndim != 2 or not jnp.issubdtype(w.dtype, jnp.floating):
            return w
        name = f"params{jax.tree_util.keystr(path)}"
        return quantize_matrix(w, parsed, name) if isinstance(parsed, Uniform) else _int8(w, parsed, name)

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_quantized)


def quantize_matrix(w: Any, uniform: Uniform, name: str = "w") -> QTensor:
    """One matrix [N,K], of NumPy or jax, by rounding to the nearest code. ValueError, with ``name``, as `quantize`."""
    if namespace(w) is np:
        with np.errstate(all="ignore"):  # told below
            q, finite = _rounded(w, uniform)
    else:
        q, finite = _compiled(w, uniform=uniform)
    if checks.is_concrete(finite):
        checks.require(bool(finite), name, f"finite numbers, not too large for {uniform}", "others")
    return q


def _rounded(w: Any, uniform: Uniform) -> tuple[QTensor, Any]:
    xp, form = namespace(w), form_of(w.shape, uniform, w.dtype)
    if uniform.group == "tensor":
        groups = w.reshape(1, 1, -1)
    elif form.width % form.group == 0:
        groups = w.reshape(w.shape[0], form.groups, form.group)
    else:
        return _uneven(w, uniform)
    scale, offset = storable(*grid_of(groups, uniform), uniform)
    codes = nearest_codes(groups, scale, offset, uniform.bits).reshape(w.shape)
    finite = xp.isfinite(w).all() & xp.isfinite(scale).all() & xp.isfinite(offset).all()
    return pack(codes, scale, offset, uniform, w.dtype), finite


def _uneven(w: Any, uniform: Uniform) -> tuple[QTensor, Any]:
    """The same where the last group of a row is short: the two kinds of groups by themselves."""
    xp, form = namespace(w), form_of(w.shape, uniform, w.dtype)
    whole = form.groups - 1
    first, last = w[:, : whole * form.group].reshape(-1, whole, form.group), w[:, whole * form.group :][:, None]
    grids = [grid_of(part, uniform) for part in (first, last)]
    scale, offset = (xp.concatenate(pair, axis=1) for pair in zip(*grids, strict=True))
    scale, offset = storable(scale, offset, uniform)
    codes = [
        nearest_codes(part, scale[:, at], offset[:, at], uniform.bits).reshape(w.shape[0], -1)
        for part, at in ((first, slice(0, whole)), (last, slice(whole, None)))
    ]
    finite = xp.isfinite(w).all() & xp.isfinite(scale).all() & xp.isfinite(offset).all()
    return pack(xp.concatenate(codes, axis=1), scale, offset, uniform, w.dtype), finite


_compiled = jax.jit(_rounded, static_argnames="uniform")
_compiled_int8 = jax.jit(functools.partial(codes_and_scale, xp=jnp))


def _int8(w: jax.Array, scheme: Int8, name: str) -> QTensor:
    codes, scale = _compiled_int8(w)
    q = QTensor(codes, scale, scheme)
    if checks.is_concrete(q.scale):
        checks.require(bool(jnp.all(jnp.isfinite(q.scale))), name, "finite numbers", "NaN or inf")
    return q


def dequantize(params: Params) -> Params:
    """Every quantized weight of ``params`` as the array it stands for."""
    return jax.tree.map(_values, params, is_leaf=is_quantized)


def values_of(w: QTensor) -> Any:
    """What a packed weight stands for, [...,N,K] in float32."""
    assert w.form is not None
    codes, scale, offset = unpack(w)
    values = value_of(grouped(codes, w.form), scale[..., None], offset[..., None])
    return ungrouped(values, w.form)


def _values(w: Any) -> Any:
    if isinstance(w, QRows):
        parts = [_values(part).astype(w.dtype) for part in w.parts]
        return namespace(parts[0]).concatenate(parts, axis=-2)
    if not isinstance(w, QTensor):
        return w
    if w.form is None:
        return w.codes.astype(w.scale.dtype) * w.scale[..., None]
    return values_of(w).astype(w.dtype)
