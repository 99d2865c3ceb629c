"""Products with packed codes and a grid for each group: weights are rounded, activations are not.

| activations | CPU                                                           | elsewhere                        |
|-------------|---------------------------------------------------------------|----------------------------------|
| one         | sums of groups, ``scale * sum(codes * x) + offset * sum(x)``, | values of ``W`` in the product,  |
|             | elementwise over rows that lie side by side (``_one_row``)    | which a compiler may keep or not |
| several     | 128 rows of ``W`` as floats at a time, then ``x.T @ W.T``     | the same                         |

docs/quantization.md tells how fast other ways to write them are. No float array has the size of ``W`` on a CPU: blocks
are made inside a loop, and what is made of ``W`` is tied to x, so that XLA cannot move it out of the decode loop. Such
a loop over rows that lie on several devices would gather them, so each device runs it over its own.
"""

from __future__ import annotations

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxdecode.meshes import TENSOR, size_of, specs_of
from jaxdecode.quant import QTensor, grids_of, grouped, over_rows, plane_pieces, plane_widths, values_of

__all__ = ["product"]

_CONTRACT = (((1,), (0,)), ((), ()))
_COLUMNS = (((0,), (0,)), ((), ()))
_ROWS = (((0,), (1,)), ((), ()))
_BLOCK = 128  # rows of a weight that are floats at a time
# Bytes of a row that are added up in one expression; a loop runs over the others of a group.
_TERMS = 4 if jax.__version_info__ < (0, 10, 2) else 32


def product(w: QTensor | jax.Array, x: jax.Array) -> jax.Array:
    """``W[N,K] @ x[K,R]`` -> [N,R] in the dtype of x, float32 or wider; of a float array too, of any dtype."""
    if size_of(TENSOR) > 1 and (not isinstance(w, QTensor) or w.across is not None):
        return _over_mesh(w, x) if isinstance(w, QTensor) else _whole(w, x)  # nothing tells how an array lies
    return lax.platform_dependent(w, x, cpu=_on_cpu, default=_whole)


def _over_mesh(w: QTensor, x: jax.Array) -> jax.Array:
    """Every device multiplies by its own rows; or by its own inputs, and all add up what they get."""
    assert w.form is not None
    assert w.across is not None
    size, inputs = size_of(TENSOR), w.across == "inputs"
    form = dataclasses.replace(w.form, width=w.form.width // size) if inputs else w.form

    def own(w: QTensor, x: jax.Array) -> jax.Array:
        out = product(dataclasses.replace(w, form=form, across=None), x)
        return lax.psum(out, TENSOR) if inputs else out

    specs = (specs_of(w, w.across, size), PartitionSpec(TENSOR if inputs else None))
    out = PartitionSpec(None if inputs else TENSOR)
    return jax.shard_map(own, in_specs=specs, out_specs=out, axis_names={TENSOR}, check_vma=False)(w, x)


def _whole(w: QTensor | jax.Array, x: jax.Array) -> jax.Array:
    values = values_of(w) if isinstance(w, QTensor) else w
    return lax.dot_general(values.astype(x.dtype), x, _CONTRACT, preferred_element_type=x.dtype)


def _on_cpu(w: QTensor | jax.Array, x: jax.Array) -> jax.Array:
    w, x = lax.optimization_barrier((w, x))  # what is made of w stays in the loop, with x
    if isinstance(w, QTensor) and x.shape[1] == 1 and all(_run(n) >= min(4, n) for n in (p.shape[1] for p in w.codes)):
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
    grown, shift = grouped(x.T, w.form)[0], 0  # [G,padded group]
    sums = []
    for plane, width in zip(w.codes, plane_widths(w.form.bits), strict=True):
        sums.append(_sums(plane, width, grown * 2**shift))
        shift += width
    scale, offset = _grids(w, grown.dtype)
    groups = scale * functools.reduce(operator.add, sums) + offset * grown.sum(1, keepdims=True)
    return lax.optimization_barrier(groups).sum(0)[:, None]


def _grids(w: QTensor, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """``scale`` and ``offset`` [G,N], the offset for numbers as `_numbers` makes them."""
    scale, offset = (x.astype(dtype) for x in grids_of(w))
    assert w.form is not None
    return scale, offset + scale * 128 if w.form.bits == 8 else offset


def _numbers(codes: jax.Array, width: int, dtype: jnp.dtype) -> jax.Array:
    """Codes as floats; those of bytes less 128, so that sums of them do not lose digits to their middle."""
    return codes.astype(dtype) - 128 if width == 8 else codes.astype(dtype)


def _sums(plane: jax.Array, width: int, x: jax.Array) -> jax.Array:
    """The codes of a plane [G,m,N] times x[G,padded group], summed in every group: [G,N]."""
    groups, size, rows = plane.shape
    run = _run(size)
    plane = plane.reshape(-1, run, rows)
    parts = x.reshape(groups, 8 // width, size // run, run).swapaxes(1, 2).reshape(-1, 8 // width, run)
    terms = (
        _numbers(piece, width, x.dtype) * parts[:, i, j, None]
        for j in range(run)
        for i, piece in enumerate(plane_pieces(plane[:, j], width))
    )
    found = functools.reduce(operator.add, terms).reshape(groups, -1, rows)
    return found[:, 0] if size == run else lax.optimization_barrier(found.sum(1))


def _blocks(w: QTensor | jax.Array, x: jax.Array) -> jax.Array:
    """A few rows of W at a time, at most half of them; the last block reaches back where they do not come out even."""
    n = w.shape[0]
    if 0 in x.shape:
        return jnp.zeros((n, x.shape[1]), x.dtype)
    size = min(n, max(8, min(-(-n // 2), _BLOCK)))
    parts = [x] if not isinstance(w, QTensor) else _pieces_of(w, x)
    if size == n:
        return _block(w, parts).T

    def block(i: jax.Array, out: jax.Array) -> jax.Array:
        at = jnp.minimum(i * size, n - size)
        rows = over_rows(lambda axis, part: lax.dynamic_slice_in_dim(part, at, size, axis), w)
        return lax.dynamic_update_slice_in_dim(out, _block(rows, parts), at, 1)

    return lax.fori_loop(0, -(-n // size), block, jnp.zeros((x.shape[1], n), x.dtype)).T


def _pieces_of(w: QTensor, x: jax.Array) -> list[jax.Array]:
    """What of x[K,R] meets the runs of codes of the planes, [G*m,R] each, and at last the sums of groups [G,R]."""
    assert w.form is not None
    grown, found = jnp.moveaxis(grouped(x.T, w.form), 0, -1), []  # [G,padded group,R]
    for width in plane_widths(w.form.bits):
        found += [part.reshape(-1, x.shape[1]) for part in jnp.split(grown, 8 // width, axis=1)]
    return [*found, grown.sum(1)]


def _block(w: QTensor | jax.Array, parts: list[jax.Array]) -> jax.Array:
    """``(W @ x).T`` [R,N]: this way round XLA:CPU calls its library for any number of rows."""
    if not isinstance(w, QTensor):
        return lax.dot_general(parts[0], w.astype(parts[0].dtype), _ROWS)
    assert w.form is not None
    dtype, runs, shift = parts[-1].dtype, [], 0
    scale, offset = _grids(w, dtype)
    for plane, width in zip(w.codes, plane_widths(w.form.bits), strict=True):
        step = (scale * 2**shift)[:, None]
        pieces = (_numbers(piece, width, dtype) * step for piece in plane_pieces(plane, width))
        runs += [piece.reshape(-1, plane.shape[-1]) for piece in pieces]
        shift += width
    products = (lax.dot_general(x, run, _COLUMNS) for x, run in zip(parts, [*runs, offset], strict=True))
    return functools.reduce(operator.add, products)
