"""Meshes: which side of which weight, cache and row lies across which axis of the devices, in one table.

A mesh has an axis "data", over which rows are spread, or "tensor", over which heads, MLP features and the vocabulary
are, or both: ``mesh_of("data=2,tensor=4")``. Inside ``jax.set_mesh(mesh)`` everything runs as it does elsewhere, and
XLA puts in what has to be exchanged. A dimension that does not divide is whole on every device.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxdecode import checks
from jaxdecode.base import RowNode
from jaxdecode.quant import QRows, QTensor, Side, is_quantized

__all__ = [
    "AXES",
    "DATA",
    "RULES",
    "TENSOR",
    "RuleTable",
    "by_rows",
    "check_mesh",
    "constrained",
    "mesh_of",
    "over_data",
    "place",
    "side_of",
    "size_of",
    "specs_of",
]

DATA, TENSOR = "data", "tensor"
AXES = (DATA, TENSOR)

RuleTable = Sequence[tuple[str, Side | None]]
# Of a weight [rows, inputs] the side that lies across the axis "tensor", by the first pattern that its name has: rows
# are what it puts out. All else is whole on every device. Of caches it is the KV heads, and of everything with rows
# these lie across "data".
RULES: RuleTable = (
    (r"(^|\.)(embed|head)$", "rows"),  # vocabulary
    (r"\.qkv$", "rows"),  # heads
    (r"\.out$", "inputs"),
    (r"\.(gate_up|up|expert_gate|expert_up)$", "rows"),  # features of the MLP
    (r"\.(down|expert_down)$", "inputs"),
)


def mesh_of(text: str, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh that "data=2,tensor=4" describes, over as many of the devices (default: ``jax.devices()``).

    ValueError: other names, numbers that are not whole, or more devices than there are.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (x.strip() for x in part.partition("="))
        ok = name in AXES and name not in sizes and size.isdecimal() and int(size) >= 1
        checks.require(ok, "mesh", "data=N, tensor=N, or both with a comma between", text)
        sizes[name] = int(size)
    found = list(jax.devices() if devices is None else devices)
    count = math.prod(sizes.values())
    if count > len(found):
        hint = " (XLA_FLAGS=--xla_force_host_platform_device_count=N makes N of a CPU)"
        hint = hint if found[0].platform == "cpu" else ""
        raise ValueError(f"mesh: expected at most the {len(found)} devices that there are{hint}, got {text} = {count}")
    return Mesh(np.array(found[:count]).reshape([sizes.get(name, 1) for name in AXES]), AXES)


def check_mesh(mesh: Mesh) -> Mesh:
    """ValueError unless ``mesh`` has axes of these names, all of them ``Auto``: XLA says what is exchanged."""
    known = isinstance(mesh, Mesh) and len(mesh.axis_names) > 0 and set(mesh.axis_names) <= set(AXES)
    got = mesh.axis_names if isinstance(mesh, Mesh) else type(mesh).__name__
    checks.require(known, "mesh", "a jax.sharding.Mesh with axes of 'data' and 'tensor'", got)
    auto = all(kind == AxisType.Auto for kind in mesh.axis_types)
    checks.require(auto, "mesh", "axes of type jax.sharding.AxisType.Auto (as of jax.sharding.Mesh)", mesh.axis_types)
    return mesh


def size_of(axis: str, mesh: Mesh | None = None) -> int:
    """Devices along an axis of ``mesh``; by default of the one that is set (``jax.set_mesh``), as far as XLA's own.

    1 where there is no such axis, or where a ``shard_map`` around the call has it.
    """
    if mesh is not None:
        return int(dict(mesh.shape).get(axis, 1))
    here = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(here.axis_names, here.axis_types, strict=True))
    return int(here.shape[axis]) if kinds.get(axis) == AxisType.Auto else 1


def side_of(name: str, rules: RuleTable = RULES) -> Side | None:
    """Which side of the weight ``name`` lies across the axis "tensor"; None: it is whole on every device."""
    return next((side for pattern, side in rules if re.search(pattern, name)), None)


def place(params: Any, mesh: Mesh, rules: RuleTable = RULES) -> Any:
    """``params`` on the devices of ``mesh``, each array where the rules have it.

    Of NumPy arrays, memory maps too, each device reads its own part, and processes need not hold more than that of
    their own devices.
    """
    check_mesh(mesh)

    def put(path: Any, weight: Any) -> Any:
        side = side_of(jax.tree_util.keystr(path, simple=True, separator="."), rules)
        if isinstance(weight, QRows):
            return dataclasses.replace(weight, parts=tuple(_placed(part, mesh, side) for part in weight.parts))
        return _placed(weight, mesh, side)

    return jax.tree_util.tree_map_with_path(put, params, is_leaf=is_quantized)


def _placed(weight: Any, mesh: Mesh, side: Side | None) -> Any:
    size = size_of(TENSOR, mesh)
    side = side if side is not None and size > 1 and _divides(weight, side, size) else None
    if isinstance(weight, QTensor):
        weight = dataclasses.replace(weight, across=side)

    def lay(array: Any, spec: PartitionSpec) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        if isinstance(array, np.ndarray):
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
        return jax.device_put(array, sharding)

    return jax.tree.map(lay, weight, specs_of(weight, side, size))


def _divides(weight: Any, side: Side, size: int) -> bool:
    if weight.ndim < 2 or weight.shape[-2 if side == "rows" else -1] % size:
        return False
    if side == "rows" or not isinstance(weight, QTensor) or weight.form is None:
        return True
    form, units = weight.form, (weight.scale_unit, weight.offset_unit)
    fits = all(unit is None or unit.shape[-2] == 1 or unit.shape[-2] % size == 0 for unit in units)
    return fits and form.groups % size == 0 and form.width == form.groups * form.group


def specs_of(weight: Any, side: Side | None, size: int) -> Any:
    """Of every array of a weight how it lies where ``side`` of it is across ``size`` devices."""

    def spec(array: Any, axis: int | None) -> PartitionSpec:
        if side is None or axis is None or array.shape[axis] % size:
            return PartitionSpec()
        return PartitionSpec(*(TENSOR if i == axis % array.ndim else None for i in range(array.ndim)))

    if not isinstance(weight, QTensor):
        return spec(weight, -2 if side == "rows" else -1)
    fields = ("codes", "scale", "offset", "zero", "scale_unit", "offset_unit")
    axes = {field: None if side is None else weight.axis_of(field, side) for field in fields}
    found = {field: jax.tree.map(lambda x, axis=axes[field]: spec(x, axis), getattr(weight, field)) for field in fields}
    return dataclasses.replace(weight, **found)


def constrained(x: jax.Array, *axes: str | None) -> jax.Array:
    """``x`` with its axes across these of the mesh that is set (``jax.set_mesh``); without a mesh, ``x`` itself.

    Axes that are not named, or do not divide, are whole on every device.
    """
    if size_of(DATA) == 1 and size_of(TENSOR) == 1:
        return x
    sizes = (1 if axis is None else size_of(axis) for axis in axes)
    spec = (axis if size > 1 and n % size == 0 else None for n, axis, size in zip(x.shape, axes, sizes, strict=False))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def over_data(tree: Any) -> Any:
    """``tree`` with the rows of every array, which are its first axis, across the axis "data"."""
    if size_of(DATA) == 1:
        return tree
    return jax.tree.map(lambda x: x if isinstance(x, RowNode) else constrained(x, DATA), tree, is_leaf=_is_node)


def _is_node(x: Any) -> bool:
    return isinstance(x, RowNode)


def by_rows(fn: Callable[..., Any], *trees: Any) -> Any:
    """``fn(*trees)``, which all have rows first and give a tree that has: each device computes those that it holds.

    For loops over rows, which otherwise would be the same loop over all of them on every device.
    """
    size = size_of(DATA)
    if size == 1 or any(x.shape[0] % size for x in jax.tree.leaves(trees)):
        return fn(*trees)
    spec = PartitionSpec(DATA)
    return jax.shard_map(fn, in_specs=spec, out_specs=spec, axis_names={DATA}, check_vma=False)(*trees)
