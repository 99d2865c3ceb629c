"""Codes of 1 to 8 bits as planes of 4, 2 and 1 bits, and the arrays that their grids are stored in.

A plane of w bits holds 8/w codes in a byte: byte j of a group holds the codes j, j + m, j + 2m, ... where a group has m
bytes, the first in its lowest bits, so that a shift and a mask give runs of codes. Bytes of different rows lie side by
side: a product adds up many rows at once, each in the same order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks
from jaxdecode.quant.grids import namespace, round_bits
from jaxdecode.quant.schemes import Uniform
from jaxdecode.quant.tensor import Form, QTensor, plane_widths

__all__ = [
    "codes_of",
    "form_of",
    "grids_of",
    "grouped",
    "grouped_codes",
    "pack",
    "packed_planes",
    "plane_pieces",
    "storable",
    "ungrouped",
    "unpack",
]


def form_of(shape: tuple[int, ...], uniform: Uniform, dtype: Any = np.float32) -> Form:
    """The form of a weight [N,K] under a scheme."""
    width = shape[1]
    group = uniform.group if isinstance(uniform.group, int) else width
    zero = uniform.last_code / 2 if uniform.grid == "even" else None
    return Form(uniform.bits, width, min(group, width), zero, dtype=jnp.dtype(dtype).name)


def grouped(codes: Any, form: Form) -> Any:
    """[...,K] -> [...,G,padded group]: rows in groups, filled up with 0."""
    xp = namespace(codes)
    lead = codes.shape[:-1]
    none = [(0, 0)] * len(lead)
    whole = xp.pad(codes, [*none, (0, form.groups * form.group - form.width)])
    whole = whole.reshape(*lead, form.groups, form.group)
    return xp.pad(whole, [*none, (0, 0), (0, form.padded - form.group)])


def ungrouped(x: Any, form: Form) -> Any:
    """The other way: [...,G,padded group] -> [...,K]."""
    whole = x[..., : form.group]
    return whole.reshape(*x.shape[:-2], form.groups * form.group)[..., : form.width]


def packed_planes(codes: Any, form: Form) -> tuple[Any, ...]:
    """The planes [...,G,bytes,N] of codes [...,N,K], uint8."""
    xp, x = namespace(codes), grouped(codes, form)
    planes, shift = [], 0
    for width in plane_widths(form.bits):
        pieces = (x >> np.uint8(shift)) & np.uint8(2**width - 1)
        pieces = pieces.reshape(*x.shape[:-1], 8 // width, form.padded * width // 8)
        shifts = (xp.arange(8 // width, dtype=np.uint8) * np.uint8(width))[:, None]
        shifts = xp.broadcast_to(shifts, pieces.shape)
        planes.append(_rows_last(xp.sum(pieces << shifts, axis=-2, dtype=np.uint8)))
        shift += width
    return tuple(planes)


def _rows_last(x: Any) -> Any:
    """[...,N,G,m] -> [...,G,m,N], in memory too."""
    turned = namespace(x).moveaxis(x, -3, -1)
    return np.ascontiguousarray(turned) if isinstance(x, np.ndarray) else turned


def _turned(x: Any) -> Any:
    """[...,N,G] -> [...,G,N] and back."""
    turned = namespace(x).swapaxes(x, -1, -2)
    return np.ascontiguousarray(turned) if isinstance(x, np.ndarray) else turned


def plane_pieces(plane: Any, width: int) -> list[Any]:
    """The runs of codes that a plane of ``width`` bits holds, in order, each of its shape."""
    mask = np.uint8(2**width - 1)
    shifted = [plane >> np.uint8(at) if at else plane for at in range(0, 8, width)]
    return [piece if at + width == 8 else piece & mask for at, piece in zip(range(0, 8, width), shifted, strict=True)]


def grouped_codes(q: QTensor) -> Any:
    """The codes [...,G,padded group,N], uint8."""
    assert q.form is not None
    xp = namespace(q.codes[0])
    total, shift = None, 0
    for plane, width in zip(q.codes, plane_widths(q.form.bits), strict=True):
        part = xp.concatenate(plane_pieces(plane, width), axis=-2) << np.uint8(shift)
        total = part if total is None else total | part
        shift += width
    return total


def codes_of(q: QTensor) -> Any:
    """The codes [...,N,K], uint8."""
    assert q.form is not None
    total = grouped_codes(q)
    return ungrouped(namespace(total).moveaxis(total, -1, -3), q.form)


def grids_of(q: QTensor) -> tuple[Any, Any]:
    """``scale`` and ``offset`` [G,N] of every group, float32."""
    assert q.form is not None
    if q.form.nibbles:
        scale = _times(q.scale & np.uint8(15), q.scale_unit)
        return scale, _times(q.scale >> np.uint8(4), q.offset_unit)
    scale = _times(q.scale, q.scale_unit)
    if q.form.zero is not None:
        return scale, scale * np.float32(-q.form.zero)
    if q.zero is not None:
        return scale, -(scale * q.zero.astype(np.float32))
    return scale, _times(q.offset, q.offset_unit)


def unpack(q: QTensor) -> tuple[Any, Any, Any]:
    """Codes uint8 [N,K], and scale and offset [N,G] in float32, of a weight of any scheme but int8 and int8_weights."""
    scale, offset = grids_of(q)
    return codes_of(q), _turned(scale), _turned(offset)


def pack(codes: Any, scale: Any, offset: Any, uniform: Uniform, dtype: Any = np.float32) -> QTensor:
    """A weight from any codes uint8 [N,K], with scale and offset [N,G] of each group as ``grid_of`` gives them.

    Of an even grid the scale alone counts, of a grid with a zero the offset is a whole number of scales. Scales of
    groups are float16 numbers times a power of 2 for each row: one that is 2^-29 of the largest of its row, or smaller,
    is rounded up to such a number. dtype: of the activations that the weight meets. ValueError: shapes that do not fit.
    """
    form = form_of(codes.shape, uniform, dtype)
    xp, groups = namespace(codes), (codes.shape[0], form.groups)
    for name, x in (("scale", scale), ("offset", offset)):
        one = uniform.group == "tensor" and x.shape == (1, 1)
        checks.require(one or x.shape == groups, name, f"shape {groups}", x.shape)
    scale, offset = xp.broadcast_to(scale, groups), xp.broadcast_to(offset, groups)
    zero = None
    if uniform.grid == "zero":
        zero = xp.round(-offset / xp.where(scale == 0, np.float32(1), scale)).astype(np.uint8)
    planes = packed_planes(codes, form)
    kept = offset if uniform.grid == "affine" else None
    if not isinstance(uniform.group, int):
        arrays = (scale, kept, zero, None, None)
    else:
        offsets = (None, None) if kept is None else _halves(kept, False)
        scale, unit = _halves(scale, True)
        arrays = (scale, offsets[0], zero, unit, offsets[1])
    scale, kept, zero, unit, offset_unit = (None if x is None else _turned(x) for x in arrays)
    return QTensor(planes, scale, uniform, kept, zero, unit, offset_unit, form)


def storable(scale: Any, offset: Any, uniform: Uniform) -> tuple[Any, Any]:
    """Grids [N,G] as `pack` will keep them: those that are too small beside the others of their row are widened."""
    if not isinstance(uniform.group, int):
        return scale, offset
    if uniform.grid != "affine":
        kept = _kept(scale, True)
        xp = namespace(scale)
        zero = offset / xp.where(scale == 0, np.float32(1), scale)
        return kept, (zero if uniform.grid == "even" else xp.round(zero)) * kept
    kept, xp = _kept(offset, False), namespace(scale)
    room = round_bits((offset - kept) * np.float32(1 / uniform.last_code), 11, "up")
    wider = round_bits(scale + room, 11, "up")
    return _kept(xp.where(kept == offset, scale, wider), True), kept


def _kept(x: Any, is_scale: bool) -> Any:
    half, unit = _halves(x, is_scale)
    return half.astype(np.float32) * unit.astype(np.float32)


def _times(x: Any, unit: Any) -> Any:
    """x[...,G,N] times unit[...,S,N], one for G / S neighbours, in float32."""
    wide = x.astype(np.float32)
    if unit is None:
        return wide
    return wide * namespace(x).repeat(unit.astype(np.float32), x.shape[-2] // unit.shape[-2], axis=-2)


def _halves(x: Any, is_scale: bool) -> tuple[Any, Any]:
    """float32 x[N,G] of 11 significant bits as float16 [N,G], the largest of a row from 2^14, times powers of 2 [N,1].

    What would be no normal float16 is rounded: a scale up, an offset down.
    """
    xp = namespace(x)
    exponent = (_bits(xp.max(abs(x), axis=-1, keepdims=True)) >> np.int32(23)) - np.int32(127 + 14)
    exponent = xp.clip(exponent, -126, 112).astype(np.int32)
    half, least = x * _power_of_2(xp, -exponent), np.float32(2.0**-14)
    if is_scale:
        half = xp.where(x == 0, np.float32(0), xp.maximum(half, least))
    else:
        half = xp.where(abs(half) >= least, half, xp.where(x < 0, -least, np.float32(0)))
    return half.astype(np.float16), _power_of_2(xp, exponent).astype(jnp.bfloat16)


def _bits(x: Any) -> Any:
    return x.view(np.int32) if namespace(x) is np else jax.lax.bitcast_convert_type(x, jnp.int32)


def _power_of_2(xp: Any, exponent: Any) -> Any:
    bits = (exponent + np.int32(127)) << np.int32(23)
    return bits.view(np.float32) if xp is np else jax.lax.bitcast_convert_type(bits, jnp.float32)
