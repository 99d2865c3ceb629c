"""Quantized weights: a leaf type that stands where an array stands.

Scheme names say what is rounded, at every number of rows and on every platform: ``int8`` rounds weights (one scale per
output channel) and activations (one scale per row, to the nearest of 255 levels), ``int8_weights`` rounds weights only.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jaxdecode import checks
from jaxdecode.base import Params

__all__ = ["QTensor", "Scheme", "dequantize", "quantize"]

Scheme = Literal["int8", "int8_weights"]


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


def _quantize(w: jax.Array, scheme: Scheme) -> QTensor:
    wide = w.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=1) / 127
    codes = jnp.round(wide / jnp.where(scale > 0, scale, 1)[:, None]).astype(jnp.int8)
    return QTensor(codes, scale.astype(w.dtype), scheme)


_compiled = jax.jit(_quantize, static_argnums=1)


def quantize(params: Params, scheme: Scheme) -> Params:
    """Every matrix [N,K] of ``params`` as a ``QTensor``; vectors stay. ValueError for an unknown scheme or NaN, inf."""
    checks.require(scheme in get_args(Scheme), "scheme", f"one of {', '.join(get_args(Scheme))}", scheme)

    def leaf(path: Any, w: jax.Array) -> Any:
        if w.ndim != 2 or not jnp.issubdtype(w.dtype, jnp.floating):
            return w
        q = _compiled(w, scheme)
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
