"""The block types of GGUF files, rearranged into the arrays of a ``QTensor``: bit for bit the same values.

A block is the codes of 32 or 256 values of a row and their scales, side by side; a ``QTensor`` keeps all codes of a row
together, in planes of bits, and the scales as they are: float16 for 32 values, or for 256 values with a small whole
number for every 16 or 32 of them. The layout of blocks is that of the ggml project.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxdecode.quant import Form, QTensor
from jaxdecode.quant.packing import packed_planes

__all__ = ["BLOCK_TYPES", "rearranged"]

_Found = tuple[np.ndarray, dict[str, np.ndarray]]  # codes [n, blocks, ...], and the other arrays of a QTensor


class _Type(NamedTuple):
    bits: int
    group: int
    zero: int | None
    read: Callable[[np.ndarray], _Found]
    nibbles: bool = False


def rearranged(kind: str, raw: np.ndarray, width: int, dtype: np.dtype[Any]) -> QTensor:
    """The rows raw[n, bytes] of a tensor of a block type, each of ``width`` values, for activations of ``dtype``."""
    about = BLOCK_TYPES[kind]
    form = Form(about.bits, width, about.group, about.zero, about.nibbles, jnp.dtype(dtype).name)
    blocks = width // (256 if kind.endswith("_K") else 32)
    codes, arrays = about.read(raw.reshape(len(raw), blocks, raw.shape[1] // blocks))
    planes = packed_planes(codes.reshape(len(raw), width), form)
    grids: dict[str, Any] = {key: np.ascontiguousarray(x.reshape(len(raw), -1).T) for key, x in arrays.items()}
    return QTensor(planes, scheme=kind, form=form, **grids)


def _half(raw: np.ndarray, at: int) -> np.ndarray:
    """The float16 number at a byte of each block."""
    return np.ascontiguousarray(raw[..., at : at + 2]).view("<f2")


def _bits(x: np.ndarray, width: int, run: int) -> np.ndarray:
    """Numbers of ``width`` bits: of every ``run`` bytes first the lowest ones of all, then the next ones."""
    runs = x.reshape(*x.shape[:-1], -1, 1, run)
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return ((runs >> shifts) & np.uint8(2**width - 1)).reshape(*x.shape[:-1], -1)


def _q4_0(raw: np.ndarray) -> _Found:
    return _bits(raw[..., 2:], 4, 16), {"scale": _half(raw, 0)}


def _q4_1(raw: np.ndarray) -> _Found:
    return _bits(raw[..., 4:], 4, 16), {"scale": _half(raw, 0), "offset": _half(raw, 2)}


def _fifth(raw: np.ndarray) -> np.ndarray:
    """32 codes of 5 bits: 4 bytes of highest bits, 16 of the others."""
    return _bits(raw[..., 4:], 4, 16) | (np.unpackbits(raw[..., :4], axis=-1, bitorder="little") << np.uint8(4))


def _q5_0(raw: np.ndarray) -> _Found:
    return _fifth(raw[..., 2:]), {"scale": _half(raw, 0)}


def _q5_1(raw: np.ndarray) -> _Found:
    return _fifth(raw[..., 4:]), {"scale": _half(raw, 0), "offset": _half(raw, 2)}


def _q8_0(raw: np.ndarray) -> _Found:
    return raw[..., 2:] ^ np.uint8(128), {"scale": _half(raw, 0)}


def _q2_k(raw: np.ndarray) -> _Found:
    units = {"scale_unit": _half(raw, 80), "offset_unit": -_half(raw, 82)}
    return _bits(raw[..., 16:80], 2, 32), {"scale": raw[..., :16], **units}


def _q3_k(raw: np.ndarray) -> _Found:
    low, high = _bits(raw[..., 96:104], 4, 8), _bits(raw[..., 104:108], 2, 4)
    scale = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    codes = _bits(raw[..., 32:96], 2, 32) | (_bits(raw[..., :32], 1, 32) << np.uint8(2))
    return codes, {"scale": scale, "scale_unit": _half(raw, 108)}


def _small_scales(raw: np.ndarray) -> dict[str, np.ndarray]:
    """Of Q4_K and Q5_K: 8 scales and offsets of 6 bits in 12 bytes, after the float16 that they are counted in."""
    low, middle, high = np.split(raw[..., 4:16], 3, axis=-1)
    six, four, two = np.uint8(63), np.uint8(15), np.uint8(48)
    scale = [low & six, (high & four) | ((low >> np.uint8(2)) & two)]
    offset = [middle & six, (high >> np.uint8(4)) | ((middle >> np.uint8(2)) & two)]
    units = {"scale_unit": _half(raw, 0), "offset_unit": -_half(raw, 2)}
    return {"scale": np.concatenate(scale, axis=-1), "offset": np.concatenate(offset, axis=-1), **units}


def _q4_k(raw: np.ndarray) -> _Found:
    return _bits(raw[..., 16:], 4, 32), _small_scales(raw)


def _q5_k(raw: np.ndarray) -> _Found:
    codes = _bits(raw[..., 48:], 4, 32) | (_bits(raw[..., 16:48], 1, 32) << np.uint8(4))
    return codes, _small_scales(raw)


def _q6_k(raw: np.ndarray) -> _Found:
    codes = _bits(raw[..., :128], 4, 64) | (_bits(raw[..., 128:192], 2, 32) << np.uint8(4))
    return codes, {"scale": raw[..., 192:208].view(np.int8), "scale_unit": _half(raw, 208)}


BLOCK_TYPES = {
    "Q4_0": _Type(4, 32, 8, _q4_0),
    "Q4_1": _Type(4, 32, None, _q4_1),
    "Q5_0": _Type(5, 32, 16, _q5_0),
    "Q5_1": _Type(5, 32, None, _q5_1),
    "Q8_0": _Type(8, 32, 128, _q8_0),
    "Q2_K": _Type(2, 16, None, _q2_k, nibbles=True),
    "Q3_K": _Type(3, 16, 4, _q3_k),
    "Q4_K": _Type(4, 32, None, _q4_k),
    "Q5_K": _Type(5, 32, None, _q5_k),
    "Q6_K": _Type(6, 16, 32, _q6_k),
}
