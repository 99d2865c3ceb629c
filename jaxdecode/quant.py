"""Quantized weights: a leaf type that stands where an array stands.

Scheme names say what is rounded, at every number of rows and on every platform: ``int8`` rounds weights (one scale per
output channel) and activations (one scale per row, to the nearest of 255 levels), ``int8_weights`` rounds weights only.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks
from jaxdecode.base import Params

__all__ = ["QTensor", "Scheme", "check_scheme", "codes_and_scale", "dequantize", "quantize"]

Scheme = Literal["int8", "int8_weights"]


def check_scheme(name: str, scheme: Any) -> None:
    """ValueError unless the argument ``name`` is one of the schemes."""
    checks.require(scheme in get_args(Scheme), name, f"one of {', '.join(get_args(Scheme))}", scheme)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A weight [N,K] as ``codes`` int8 [N,K] times ``scale`` [N]; ``scheme`` says what a product with it rounds."""

    codes: jax.Array
    scale: jax.Array
    scheme: Scheme = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the activations it meets, which is that of the scale."""
        return self.scale.dtype


def codes_and_scale(w: Any, xp: Any = jnp) -> tuple[Any, Any]:
    """``codes`` and ``scale`` of w[N,K], by NumPy (``xp=np``) or jax: the same bits.

    The scale is rounded to the dtype of w first, so that the codes are the nearest for the scale that is kept. Divided
    is by reciprocals, as XLA would do it by itself, and a row is zero whose scale is no normal float32: XLA has no
    others.
    """
    wide = w.astype(np.float32)
    scale = (xp.max(xp.abs(wide), axis=1) * np.float32(1 / 127)).astype(w.dtype)
    step = scale.astype(np.float32)
    zero = step < np.finfo(np.float32).tiny
    codes = xp.round(wide * (1 / xp.where(zero, np.float32(1), step))[:, None])
    return xp.clip(codes, -127, 127).astype(np.int8), xp.where(zero, scale.dtype.type(0), scale)


_compiled = jax.jit(codes_and_scale, static_argnames="xp")


def quantize(params: Params, scheme: Scheme) -> Params:
    """Every matrix [N,K] of ``params`` as a ``QTensor``; vectors stay. ValueError for an unknown scheme or NaN, inf."""
    check_scheme("scheme", scheme)

    def leaf(path: Any, w: jax.Array) -> Any:
        if w.ndim != 2 or not jnp.issubdtype(w.dtype, jnp.floating):
            return w
        codes, scale = _compiled(w)
        q = QTensor(codes, scale, scheme)
        if checks.is_concrete(q.scale):
            name = jax.tree_util.keystr(path)
            checks.require(bool(jnp.all(jnp.isfinite(q.scale))), f"params{name}", "finite numbers", "NaN or inf")
        return q

    return jax.tree_util.tree_map_with_path(leaf, params)


def dequantize(params: Params) -> Params:
    """Every ``QTensor`` of ``params`` as the array it stands for."""

    def leaf(w: Any) -> Any:
        return w.codes.astype(w.scale.dtype) * w.scale[:, None] if isinstance(w, QTensor) else w

    return jax.tree.map(leaf, params, is_leaf=lambda x: isinstance(x, QTensor))
