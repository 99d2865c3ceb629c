"""The leaf types that stand where a weight stands: codes, scales, and what a product with them rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode.quant.schemes import Int8, Uniform

__all__ = ["Form", "QRows", "QTensor", "Side", "is_quantized", "over_rows", "plane_widths"]

Side = Literal["rows", "inputs"]  # of a weight [rows, inputs]


def plane_widths(bits: int) -> tuple[int, ...]:
    """The bits that each plane of a code holds, lowest bits first: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1."""
    return (8,) if bits == 8 else tuple(width for width in (4, 2, 1) if bits & width)


@dataclasses.dataclass(frozen=True)
class Form:
    """How the codes of a weight [..., width] lie in memory and what they stand for; what can be read off no array.

    group: values of a row that share a scale, the last ones of a row being fewer. zero: the code that stands for 0, or
    the half-way one of an even grid; None if arrays tell the offset. nibbles: a byte of ``scale`` holds the scale in
    its low 4 bits and the offset in its high ones. dtype: of the activations that the weight meets.
    """

    bits: int
    width: int
    group: int
    zero: float | None = None
    nibbles: bool = False
    dtype: str = "float32"

    @property
    def groups(self) -> int:
        return -(-self.width // self.group)

    @property
    def padded(self) -> int:
        """Codes that a group has room for: whole bytes in every plane."""
        return -(-self.group // 8) * 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A weight [N,K] as codes and scales; ``scheme`` says what a product with it rounds.

    Of "int8" and "int8_weights": ``codes`` int8 [N,K] times ``scale`` [N]. Of all others ``form`` is set, rows come
    last, ``codes`` is one uint8 array [G,bytes,N] per plane of bits, and code j of group g of row n stands for
    ``scale * j + offset`` with scale = ``scale[g,n] * scale_unit[s,n]``, s = g * S // G, and offset = ``offset[g,n] *
    offset_unit[s,n]``, or -scale * ``zero[g,n]``, or -scale * ``form.zero``. A unit that is None is 1. across: which
    side lies across the axis "tensor" of a mesh (`jaxdecode.meshes`).
    """

    codes: Any
    scale: Any
    scheme: Int8 | Uniform | str = dataclasses.field(metadata={"static": True})
    offset: Any = None
    zero: Any = None
    scale_unit: Any = None
    offset_unit: Any = None
    form: Form | None = dataclasses.field(default=None, metadata={"static": True})
    across: Side | None = dataclasses.field(default=None, metadata={"static": True})

    def axis_of(self, field: str, side: Side) -> int | None:
        """The axis of the arrays of a field that this side of the weight is; None: it has none."""
        if self.form is not None:
            return -1 if side == "rows" else -3 if field == "codes" else -2
        if field == "codes":
            return -2 if side == "rows" else -1
        return -1 if side == "rows" else None

    @property
    def shape(self) -> tuple[int, ...]:
        return (
            self.codes.shape if self.form is None else (*self.scale.shape[:-2], self.scale.shape[-1], self.form.width)
        )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the activations it meets."""
        return self.scale.dtype if self.form is None else jnp.dtype(self.form.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(self))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QRows:
    """A weight [N,K] whose rows are those of several, one below the other, each stored in its own way.

    A part may be a float array too, of another dtype than ``dtype``, which is that of the activations.
    """

    parts: tuple[QTensor | jax.Array, ...]
    dtype: Any = dataclasses.field(default=np.dtype(np.float32), metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, _, width = self.parts[0].shape
        return (*lead, sum(part.shape[-2] for part in self.parts), width)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(self))


def over_rows(fn: Callable[..., Any], *weights: Any) -> Any:
    """``fn(axis of the rows, array of each weight)`` for all arrays of weights: arrays, or ``QTensor`` of one form."""
    axis = -1 if isinstance(weights[0], QTensor) and weights[0].form is not None else 0
    return jax.tree.map(lambda *arrays: fn(axis, *arrays), *weights)


def is_quantized(leaf: Any) -> bool:
    """Whether a node of params is a weight in codes; an ``is_leaf`` for ``jax.tree.map``."""
    return isinstance(leaf, QTensor | QRows)
