#!/usr/bin/env python3
"""What a model can do at best on many devices: bytes a device, time of a decode step, tokens per second.

    scale.py [MODEL ...] [--machine h100] [--devices 8,64,512] [--context 4096] [--dtype bfloat16] [--rows N]

MODEL: a name below, or the config.json of a Hugging Face folder. A device's share of a model is a model with fewer
heads, MLP features and ids, so that `jaxdecode.models.counts` counts it. docs/scale.md names the assumptions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode.checkpoint.hf_config import config_from_json
from jaxdecode.models.config import TransformerConfig, param_shapes
from jaxdecode.models.counts import cache_bytes, param_bytes, step_counts

MEMORY_USED = 0.9  # of a device's memory; the rest is for programs and what a step holds
LOGITS_COPIES = 6  # arrays [rows, ids] in float32 that a step holds
REDUCTIONS = 11  # over the vocabulary, of a number a row: maxima, sums, a cut, the draw, margins
BLOCK = 128  # ids: every device gets the sum of each block, twice, and the numbers of the one that is drawn from

MODELS = {
    "smollm2-135m": TransformerConfig(49152, 576, 30, 9, 3, 64, 1536, 8192),
    "llama-3-8b": TransformerConfig(128256, 4096, 32, 32, 8, 128, 14336, 8192, tied=False),
    "llama-3-70b": TransformerConfig(128256, 8192, 80, 64, 8, 128, 28672, 8192, tied=False),
}


class Machine(NamedTuple):
    """Public figures of a device. multiply: multiplications (with their additions) a second in bfloat16. link: bytes a
    second that a device sends in a ring. hop: seconds of a step of it. joined: devices that such links join. switched:
    any two of them directly, so that a sum is two steps, however many take part."""

    multiply: float
    memory: float
    bandwidth: float
    link: float
    hop: float
    joined: int
    switched: bool


MACHINES = {
    "h100": Machine(989e12 / 2, 80e9, 3.35e12, 450e9, 3e-6, 8, True),
    "v5e": Machine(197e12 / 2, 16e9, 819e9, 100e9, 1e-6, 16, False),
    "v5p": Machine(459e12 / 2, 95e9, 2765e9, 200e9, 1e-6, 16, False),
}


class Plan(NamedTuple):
    """One way to run: the axes, the rows in all, bytes a device, and the seconds of a step."""

    data: int
    tensor: int
    rows: int
    weights: int
    cache: int
    read: float
    multiply: float
    links: float

    @property
    def step(self) -> float:
        """Multiplying overlaps with reading, sums over the links with nothing."""
        return max(self.read, self.multiply) + self.links


def share(config: TransformerConfig, tensor: int) -> TransformerConfig:
    """What one of ``tensor`` devices has of each layer; a dimension that does not divide is replicated."""

    def part(*sizes: int) -> tuple[int, ...]:
        return tuple(n // tensor for n in sizes) if all(n % tensor == 0 for n in sizes) else sizes

    heads, kv_heads = part(config.n_heads, config.n_kv_heads)
    (mlp,), (ids,) = part(config.d_mlp), part(config.vocab_size)
    return dataclasses.replace(config, n_heads=heads, n_kv_heads=kv_heads, d_mlp=mlp, vocab_size=ids)


def sums(config: TransformerConfig, tensor: int, rows: int) -> list[int]:
    """Bytes of every sum over devices in a step of ``rows``: of layers that are split, of embeddings, and of laws.

    A gather sends half of what a sum of as many bytes does, so it counts as one of half of them.
    """
    own = share(config, tensor)
    split, ids = (own.n_heads < config.n_heads) + (own.d_mlp < config.d_mlp), own.vocab_size < config.vocab_size
    wide = [2 * rows * config.d_model] * (config.n_layers * split + ids)
    law = [4 * rows] * REDUCTIONS + [4 * rows * BLOCK] + [4 * rows * config.vocab_size // BLOCK // 2] * 2
    return wide + law * ids


def all_reduce_seconds(machine: Machine, devices: int, size: int) -> float:
    """Each device sends 2 (n-1)/n of the bytes; a ring goes round once in each direction, half the way out and back."""
    steps = 2 if machine.switched else devices
    return 2 * (devices - 1) / devices * size / machine.link + steps * machine.hop


def shapes(config: TransformerConfig, dtype: Any) -> Any:
    """Params of these shapes that take no memory."""
    found, is_leaf = param_shapes(config), lambda x: isinstance(x, tuple) and isinstance(x[0], int)
    return jax.tree.map(lambda s: np.broadcast_to(np.zeros((), dtype), s), found, is_leaf=is_leaf)


def planned(
    config: TransformerConfig, machine: Machine, data: int, tensor: int, rows: int, context: int, dtype: Any
) -> Plan:
    """``rows`` over the data axis, each of which attends to ``context`` tokens."""
    own, here = share(config, tensor), math.ceil(rows / data)
    params = shapes(own, dtype)
    counts = step_counts(own, params, here, context, dtype)
    links = sum(all_reduce_seconds(machine, tensor, size) for size in sums(config, tensor, here)) if tensor > 1 else 0.0
    read = (counts.weight_bytes + counts.cache_bytes) / machine.bandwidth
    multiply = counts.multiplications / machine.multiply
    return Plan(data, tensor, rows, param_bytes(params), counts.cache_bytes, read, multiply, links)


def most_rows(config: TransformerConfig, machine: Machine, tensor: int, context: int, dtype: Any) -> int:
    """Rows whose caches and logits fit beside a device's weights."""
    own = share(config, tensor)
    left = MEMORY_USED * machine.memory - param_bytes(shapes(own, dtype))
    return max(0, int(left // (cache_bytes(own, context, dtype) + LOGITS_COPIES * 4 * own.vocab_size)))


def plans(
    config: TransformerConfig, machine: Machine, devices: int, rows: int | None, context: int, dtype: Any
) -> Iterator[tuple[str, Plan]]:
    """The plan with the shortest step of one text, and the one with the most tokens a second of all devices."""
    fits = {t: most_rows(config, machine, t, context, dtype) for t in range(1, machine.joined + 1) if devices % t == 0}
    fits = {t: n for t, n in fits.items() if n}
    alone = [planned(config, machine, 1, t, 1, context, dtype) for t in fits]
    if alone:
        yield "one text", min(alone, key=lambda p: p.step)
    full = [
        planned(config, machine, devices // t, t, min(n * (devices // t), rows or n * devices), context, dtype)
        for t, n in fits.items()
    ]
    if full:
        yield "many texts", max(full, key=lambda p: p.rows / p.step)


def line(name: str, devices: int, what: str, plan: Plan) -> str:
    cells = (
        f"{name:<13}{devices:>7}  {what:<11}{f'{plan.data} x {plan.tensor}':>8}{plan.rows:>9,}",
        f"{plan.weights / 1e9:>9.2f}{plan.cache / 1e9:>9.2f}",
        f"{plan.read * 1e3:>9.3f}{plan.multiply * 1e3:>9.3f}{plan.links * 1e3:>9.3f}{plan.step * 1e3:>9.3f}",
        f"{1 / plan.step:>9,.0f}{plan.rows / plan.step:>13,.0f}",
    )
    return "".join(cells)


HEADER = (
    f"{'model':<13}{'devices':>7}  {'for':<11}{'D x T':>8}{'rows':>9}{'weights':>9}{'cache':>9}"
    f"{'read':>9}{'multiply':>9}{'links':>9}{'step':>9}{'a row':>9}{'all rows':>13}"
)


def table(
    models: list[str], machine: str, devices: list[int], context: int, dtype: str, rows: int | None = None
) -> str:
    """A line for each model and number of devices, and what it is for: GB a device, milliseconds, tokens a second."""
    lines = [f"{machine}, {dtype}, {context} tokens a row", HEADER]
    for name in models:
        config = MODELS[name] if name in MODELS else config_from_json(json.loads(Path(name).read_text()), name)
        for n in devices:
            found = list(plans(config, MACHINES[machine], n, rows, context, jnp.dtype(dtype)))
            lines += [line(Path(name).parent.name or name, n, what, plan) for what, plan in found]
            lines += [] if found else [f"{name:<13}{n:>7}  does not fit"]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--machine", choices=list(MACHINES), default="h100")
    parser.add_argument("--devices", default="8,64,512")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int)
    given = parser.parse_args(arguments)
    devices = [int(n) for n in given.devices.split(",")]
    print(table(given.models, given.machine, devices, given.context, given.dtype, given.rows), end="")  # noqa: T201


if __name__ == "__main__":
    main()
