"""Reading programs: matrix products of a traced function, and what the loop of a compiled one does."""

from __future__ import annotations

import math
import re
from typing import Any

from jax.extend import core

__all__ = ["computations", "large_instructions", "loop_instructions", "multiplications", "result_shapes"]


def multiplications(jaxpr: core.Jaxpr, reach: int | None = None) -> int:
    """Multiplications of every matrix product in ``jaxpr``; of a cond, those of its last branch.

    ``reach``: blocks of the cache that begin beyond so many slots are skipped, as they are when no row is longer. A
    whole block of T slots begins at slot T, and only products under a cond are asked.
    """
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
        elif eqn.primitive.name == "cond":
            inner = eqn.params["branches"][-1].jaxpr
            slots = [e.outvars[0].aval.shape[-1] for e in inner.eqns if e.primitive.name == "dot_general"]
            if reach is None or not slots or slots[0] < reach:
                total += multiplications(inner, reach)
        else:
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            total += times * sum(multiplications(sub, reach) for sub in _inner(eqn))
    return total


def _inner(eqn: Any) -> list[core.Jaxpr]:
    assert eqn.primitive.name != "while", "a loop whose length is not known cannot be counted"
    found = [x for value in eqn.params.values() for x in (value if isinstance(value, (tuple, list)) else [value])]
    return [
        x.jaxpr if isinstance(x, core.ClosedJaxpr) else x
        for x in found
        if isinstance(x, (core.Jaxpr, core.ClosedJaxpr))
    ]


def computations(hlo: str) -> dict[str, list[str]]:
    """The instructions of every computation of a compiled program, by name."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in hlo.splitlines():
        if head := re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            current = found.setdefault(head[1], [])
        elif " = " in line:
            current.append(line.split(", metadata=")[0])
    return found


CALLS = re.compile(r"(?:calls|to_apply|body|condition|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)")


def loop_instructions(hlo: str) -> list[str]:
    """Every instruction of the while bodies and of the computations they call, fused ones included."""
    found, seen = computations(hlo), set()
    todo = re.findall(r"body=%?([\w.\-]+)", hlo)
    assert todo, "expected a loop"
    while todo:
        name = todo.pop()
        if name in found and name not in seen:
            seen.add(name)
            todo += [x for part in CALLS.findall(" ".join(found[name])) for x in re.findall(r"[\w.\-]+", part)]
    return [line for name in sorted(seen) for line in found[name]]


# What may yield an array as large as the whole cache of one layer inside the loop: passing it on, or writing in place.
WRITES = {"scatter", "dynamic-update-slice"}
PASSES_ON = WRITES | {"parameter", "get-tuple-element", "tuple", "while", "conditional", "bitcast"}


def large_instructions(hlo: str, numbers: int) -> list[str]:
    """Instructions of the loop whose result has at least ``numbers`` elements and that compute or copy it.

    A fusion counts as what its root does. Whether a write is in place shows in the memory the program asks for.
    """
    found, out = computations(hlo), []
    for line in loop_instructions(hlo):
        parts = re.match(r"\s*(?:ROOT )?%?[\w.\-]+ = \w+\[([\d,]*)\]\S* ([\w\-]+)\(", line)
        if not parts or math.prod(int(x) for x in parts[1].split(",") if x) < numbers:
            continue
        kind = parts[2]
        if kind == "fusion" and (called := re.search(r"calls=%?([\w.\-]+)", line)):
            root = next(x for x in found[called[1]] if x.lstrip().startswith("ROOT"))
            kind = next((w for w in WRITES if f" {w}(" in root), kind)
        out += [] if kind in PASSES_ON else [line]
    return out


def result_shapes(hlo: str) -> set[tuple[int, ...]]:
    """The shapes of all arrays a compiled program computes."""
    found = re.findall(r" = \w+\[([\d,]+)\]", hlo)
    return {tuple(int(x) for x in dims.split(",")) for dims in found}
