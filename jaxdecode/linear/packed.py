"""Products with packed codes and a grid for each group: weights are rounded, activations are not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdecode.quant import QTensor, dequantize, grids_of, grouped, grouped_codes, over_rows, plane_pieces, plane_widths

__all__ = ["product"]

_CONTRACT = (((1,), (0,)), ((), ()))
_COLUMNS = (((0,), (0,)), ((), ()))
_BLOCK = 1 << 17  # weights that are floats at a time: 512 KiB
_TERMS = 16  # bytes of a row that are added up in one expression


def product(w: QTensor | jax.Array, x: jax.Array) -> jax.Array:
    """``W[N,K] @ x[K,R]`` -> [N,R] in the dtype of x, float32 or wider; of a float array too, of any dtype."""
    return lax.platform_dependent(w, x, cpu=_on_cpu, default=_whole)


def _whole(w: QTensor | jax.Array, x: jax.Array) -> jax.Array:
    return lax.dot_general(dequantize(w).astype(x.dtype), x, _CONTRACT, preferred_element_type=x.dtype)


def _on_cpu(w: QTensor | jax.Array, x: jax.Array) -> jax.Array:
    w, x = lax.optimization_barrier((w, x))  # what is made of w stays in the loop, with x
    if isinstance(w, QTensor) and x.shape[1] == 1 and all(_run(plane.shape[1]) >= 4 for plane in w.codes):
        return _one_row(w, x)
    return _blocks(w, x)


def _run(size: int) -> int:
    """The largest divisor of ``size`` up to ``_TERMS``."""
    return max(n for n in range(1, _TERMS + 1) if size % n == 0)


def _one_row(w: QTensor, x: jax.Array) -> jax.Array:
    """Many rows of W side by side in a vector register, each adding up its group in the same order.

    Nothing but elementwise operations on [G,N], which XLA:CPU makes one loop of; the scale of a group is multiplied to
    its sum.
    """
    assert w.form is not None
    form, grown, total, shift = w.form, grouped(x.T, w.form)[0], None, 0  # [G,padded group]
    for plane, width in zip(w.codes, plane_widths(form.bits), strict=True):
        size = plane.shape[1]
        run = _run(size)
        bytes_ = plane.reshape(-1, run, plane.shape[-1])
        parts = grown.reshape(form.groups, 8 // width, size // run, run).swapaxes(1, 2)
        parts = parts.reshape(-1, 8 // width, run) * np.float32(2**shift)
        found = None
        for j in range(run):
            for i, piece in enumerate(plane_pieces(bytes_[:, j], width)):
                term = piece.astype(x.dtype) * parts[:, i, j, None]
                found = term if found is None else found + term
        found = found.reshape(form.groups, -1, found.shape[-1])
        found = found[:, 0] if size == run else found.sum(1)
        total = found if total is None else total + found
        shift += width
    scale, offset = grids_of(w)
    out = total * scale.astype(x.dtype) + offset.astype(x.dtype) * grown.sum(1, keepdims=True)
    return out.sum(0)[:, None]


def _blocks(w: QTensor | jax.Array, x: jax.Array) -> jax.Array:
    """A few rows of W at a time, at most half of them; the last block reaches back where they do not come out even."""
    n, k = w.shape
    size = min(n, max(8, min(-(-n // 2), _BLOCK // k)))
    if isinstance(w, QTensor):
        x = jnp.moveaxis(grouped(x.T, w.form), 0, -1)
        x = x.reshape(-1, x.shape[-1])
    if size == n:
        return _block(w, x)

    def block(i: jax.Array, out: jax.Array) -> jax.Array:
        at = jnp.minimum(i * size, n - size)
        rows = over_rows(lambda axis, part: lax.dynamic_slice_in_dim(part, at, size, axis), w)
        return lax.dynamic_update_slice_in_dim(out, _block(rows, x), at, 0)

    return lax.fori_loop(0, -(-n // size), block, jnp.zeros((n, x.shape[1]), x.dtype))


def _block(w: QTensor | jax.Array, x: jax.Array) -> jax.Array:
    if not isinstance(w, QTensor):
        return lax.dot_general(w.astype(x.dtype), x, _CONTRACT, preferred_element_type=x.dtype)
    codes = grouped_codes(w).astype(np.float32)
    scale, offset = grids_of(w)
    values = codes * scale[:, None] + offset[:, None]
    values = values.reshape(-1, values.shape[-1]).astype(x.dtype)
    return lax.dot_general(values, x, _COLUMNS, preferred_element_type=x.dtype)
