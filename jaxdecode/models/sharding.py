"""A transformer's params over a mesh: fused matrices taken apart, so that every device has whole heads and features."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxdecode import meshes
from jaxdecode.base import Params
from jaxdecode.models.config import TransformerConfig
from jaxdecode.quant import QRows, over_rows

__all__ = ["apart", "rules_for", "shard"]

# Heads that do not divide are whole on every device, and so are their matrices, whatever their rows divide by.
_WHOLE_HEADS: meshes.RuleTable = ((r"\.(qkv|out)$", None),)


def shard(config: TransformerConfig, params: Params, mesh: Mesh) -> Params:
    """The params of a model of ``config`` on the devices of ``mesh``, by ``meshes.RULES``.

    Fused matrices are ``apart``. Of NumPy arrays, memory maps too, each device reads only its own part. Run what uses
    them under ``jax.set_mesh(mesh)``. ValueError: a mesh with other axes.
    """
    meshes.check_mesh(mesh)
    size = meshes.size_of(meshes.TENSOR, mesh)
    return meshes.place(apart(config, params) if size > 1 else params, mesh, rules_for(config, size))


def rules_for(config: TransformerConfig, size: int) -> meshes.RuleTable:
    """The rules for the matrices of a model over ``size`` devices of the axis "tensor"."""
    return meshes.RULES if config.n_kv_heads % size == 0 else (*_WHOLE_HEADS, *meshes.RULES)


def apart(config: TransformerConfig, params: Params) -> Params:
    """Params whose matrices that are several ("qkv", "gate_up") are a ``QRows`` of these, and experts stacks [E,N,K].

    What the model computes is the same. Rows of queries, keys and values that lie below each other in one matrix would
    not fall on the devices of their heads.
    """

    def one(name: str, weight: Any) -> Any:
        if name.startswith("expert_"):
            return _stacked(weight, config.n_experts)
        return _cut(weight, config.fused[name]) if len(config.fused.get(name, ())) > 1 else weight

    layers = tuple({name: one(name, weight) for name, weight in layer.items()} for layer in params["layers"])
    return {**params, "layers": layers}


def _cut(weight: Any, sizes: Sequence[int]) -> QRows:
    """A weight as several, of so many rows each; what is several already stays so."""
    ends = list(itertools.accumulate(sizes))
    pieces, first = [], 0
    for part in weight.parts if isinstance(weight, QRows) else (weight,):
        rows = part.shape[0]
        inner = [end - first for end in ends if first < end < first + rows]
        for begin, end in itertools.pairwise([0, *inner, rows]):
            rows_of = slice(begin, end)
            pieces.append(over_rows(lambda axis, x, at=rows_of: x[at] if axis == 0 else x[..., at], part))
        first += rows
    return QRows(tuple(pieces), jnp.dtype(weight.dtype))


def _stacked(weight: Any, count: int) -> Any:
    """Matrices below each other as a stack [count,N,K]; of packed ones, whose rows are last, the stack is first too."""
    if isinstance(weight, QRows):
        return dataclasses.replace(weight, parts=tuple(_stacked(part, count) for part in weight.parts))

    def stack(axis: int, x: Any) -> Any:
        if axis == 0:
            return x.reshape(count, -1, *x.shape[1:])
        apart = x.reshape(*x.shape[:-1], count, -1)
        return apart.transpose(-2 % apart.ndim, *range(apart.ndim - 2), apart.ndim - 1)

    return over_rows(stack, weight)
