"""`jaxdecode inspect`: what a model is made of, what its cache costs, and how much of it fits into memory."""

from __future__ import annotations

import dataclasses
import json as json_text
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from jaxdecode.cli.terminal import Progress, bad_input, styled, table, visible

if TYPE_CHECKING:
    from jaxdecode.cli.batch_memory import Run
    from jaxdecode.models.transformer import TransformerConfig
    from jaxdecode.quant import Scheme

__all__ = ["describe", "free_bytes", "run"]

POSITIONS = (1, 128, 1024, 8192)  # where multiplications are counted, as far as the context goes
LOGITS_COPIES = 8  # arrays [V] in float32 that a step holds per row; compiled steps were measured at 6.3 to 7.3


def run(
    model: str,
    *,
    dtype: str,
    quantize: Scheme | None,
    cache_dtype: str | None,
    context_length: int | None,
    batch: Run | None,
    json: bool,
) -> int:
    """Describe ``model``; only the head of its files is read, no weight. Returns the exit code."""
    progress = Progress()
    try:
        progress("reading")
        with bad_input():
            found = describe(model, dtype, quantize, cache_dtype or dtype, context_length, progress)
            if batch is not None:
                progress("running the toy")
                found["batch"] = _batch(found, batch)
    finally:
        progress.stop()
    if json:
        typer.echo(json_text.dumps(found, ensure_ascii=False))
    else:
        typer.echo(as_text(found), nl=False)
    return 0


def describe(
    source: str,
    dtype: str,
    scheme: Scheme | None,
    cache_dtype: str,
    context_length: int | None,
    progress: Callable[..., None],
) -> dict[str, Any]:
    """Everything the command tells, as JSON. ValueError, OSError, ImportError: no such model, or a damaged one."""
    import jax.numpy as jnp

    from jaxdecode.checkpoint import find
    from jaxdecode.checkpoint.catalogue import TOY
    from jaxdecode.checkpoint.converted import kept_scheme, stored_leaf

    if source == TOY:
        return _describe_toy(dtype, scheme, context_length)
    place = find(source, progress)
    checkpoint = place.read(place.path)
    config = checkpoint.config if context_length is None else checkpoint.config.with_context(context_length)
    kept, kind = kept_scheme(checkpoint, scheme), jnp.dtype(dtype)
    params = [_param(p.name, stored_leaf(p, kind, kept, checkpoint.where).spec) for p in checkpoint.params]
    files = [{"file": path.name, "bytes": path.stat().st_size} for path in place.files]
    return {
        "model": source,
        "files": files,
        "config": dataclasses.asdict(config),
        **_totals(params, dtype, checkpoint.scheme or scheme),
        "cache_bytes_per_token": _cache_bytes(config, 1, cache_dtype),
        "multiplications_per_token": _multiplications(config),
        "memory": _memory(config, sum(p["bytes"] for p in params), cache_dtype),
        "parameter_table": params,
    }


def _describe_toy(dtype: str, scheme: Scheme | None, context_length: int | None) -> dict[str, Any]:
    import jaxdecode

    loaded = jaxdecode.load("toy", dtype=dtype, quantize=scheme, context_length=context_length)
    table_of_logits = _param("table", loaded.params)
    return {
        "model": "toy",
        "files": [],
        "config": dataclasses.asdict(loaded.config),
        **_totals([table_of_logits], dtype, None),
        "cache_bytes_per_token": 0,  # its cache is the last token
        "multiplications_per_token": [],
        "memory": None,
        "parameter_table": [table_of_logits],
    }


def _batch(found: dict[str, Any], run: Run) -> dict[str, Any]:
    """The memory of `jaxdecode batch`. ValueError: its rows are longer than the context."""
    from jaxdecode.cli.batch_memory import base_bytes, predicted

    config = found["config"]
    layers = config["n_layers"] if found["cache_bytes_per_token"] else 0  # the toy has none
    sizes = {"context": config["context_length"], "vocab_size": config["vocab_size"], "layers": layers}
    return predicted(run, base_bytes(), found["parameter_bytes"], found["cache_bytes_per_token"], **sizes)


def _param(name: str, leaf: Any) -> dict[str, Any]:
    """One parameter, by the arrays it is kept in: of one that is quantized, its schemes stand for a dtype."""
    import jax

    from jaxdecode.quant import QTensor

    parts = jax.tree.leaves(leaf, is_leaf=lambda x: isinstance(x, QTensor))
    kinds = [str(part.scheme) if isinstance(part, QTensor) else part.dtype.name for part in parts]
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(leaf))
    return {"name": name, "shape": list(leaf.shape), "dtype": "+".join(kinds), "bytes": size}


def _totals(params: list[dict[str, Any]], dtype: str, scheme: Scheme | None) -> dict[str, Any]:
    count = sum(math.prod(p["shape"]) for p in params)
    about = {"dtype": dtype, "quantize": scheme}
    return {**about, "parameters": count, "parameter_bytes": sum(p["bytes"] for p in params)}


def _cache_bytes(config: TransformerConfig, tokens: int, dtype: str) -> int:
    import jax.numpy as jnp

    from jaxdecode.models.counts import cache_bytes
    from jaxdecode.models.transformer import WINDOW_SLACK

    return cache_bytes(config, tokens, jnp.dtype(dtype), WINDOW_SLACK)


def _multiplications(config: TransformerConfig) -> list[dict[str, int]]:
    """Of one token at a position: all layers by S7.5, and the output head."""
    from jaxdecode.models.counts import layer_multiplications

    rows = []
    for t in (*(t for t in POSITIONS if t < config.context_length), config.context_length):
        layers = config.n_layers * layer_multiplications(config, t)
        head = config.d_model * config.vocab_size
        attention = config.n_layers * 2 * t * config.n_heads * config.head_dim
        rows.append({"position": t, "attention": attention, "layers": layers, "head": head, "all": layers + head})
    return rows


def _memory(config: TransformerConfig, weights: int, dtype: str) -> dict[str, Any] | None:
    """How many rows of a length fit beside the weights, for halvings of the context; None if memory is not known."""
    free = free_bytes()
    if free is None:
        return None
    left = max(0, free - weights)
    fits: list[dict[str, int]] = []
    n = config.context_length
    while n >= 128 and len(fits) < 6:
        row = _cache_bytes(config, n, dtype) + LOGITS_COPIES * 4 * config.vocab_size
        fits.append({"context": n, "bytes_per_row": row, "largest_batch": left // row})
        n //= 2
    return {"free_bytes": free, "weight_bytes": weights, "left_bytes": left, "fits": fits}


def free_bytes() -> int | None:
    """Memory that jax's default device could still use: the accelerator's own, else this machine's; None: unknown."""
    import jax

    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    if device.platform != "cpu":
        return None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def as_text(found: dict[str, Any]) -> str:
    """The same for a reader."""
    parts = [f"{styled(found['model'], 'bold')}\n"]
    parts += [f"  {visible(f['file'])}  {in_bytes(f['bytes'])}\n" for f in found["files"]]
    rows = [(name, _value(value)) for name, value in found["config"].items() if value is not None]
    parts += ["\n", table(("config", "value"), rows, left=(0, 1))]
    shapes = [(p["name"], str(p["shape"]), p["dtype"], in_bytes(p["bytes"])) for p in _folded(found["parameter_table"])]
    parts += ["\n", table(("parameter", "shape", "dtype", "bytes"), shapes, left=(0, 1, 2))]
    kind = found["quantize"] or found["dtype"]
    total = f"{found['parameters']:,} parameters, {in_bytes(found['parameter_bytes'])} in {kind}"
    parts += [f"{total}\n\n", f"cache: {found['cache_bytes_per_token']:,} bytes per token\n"]
    if found["multiplications_per_token"]:
        counts = [[f"{n:,}" for n in row.values()] for row in found["multiplications_per_token"]]
        header = ("multiplications at position", "attention", "layers with it", "output head", "all")
        parts += ["\n", table(header, counts, left=())]
    if memory := found["memory"]:
        fits = [(f"{f['context']:,}", in_bytes(f["bytes_per_row"]), f"{f['largest_batch']:,}") for f in memory["fits"]]
        free, weights = in_bytes(memory["free_bytes"]), in_bytes(memory["weight_bytes"])
        parts += ["\n", f"free memory {free}, of which the weights take {weights}; beside them fit\n"]
        parts += [table(("context", "cache and logits of a row", "rows at most"), fits, left=())]
    if "batch" in found:
        parts += ["\n", batch_as_text(found["batch"])]
    return "".join(parts)


def batch_as_text(batch: dict[str, Any]) -> str:
    """The memory of a batch run, part by part."""
    names = ("weight", "cache", "work", "program", "base")
    told = [(name, in_bytes(batch[f"{name}_bytes"])) for name in names if batch[f"{name}_bytes"] is not None]
    told += [("all", "unknown" if batch["bytes"] is None else in_bytes(batch["bytes"]))]
    head = f"batch with {batch['slots']} slots: {batch['rows']} rows of {batch['tokens_per_row']} tokens\n"
    return head + table(("memory", "bytes"), told, left=(0,))


def _folded(params: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Equal parameters of all layers as one line: "layers.0-29.qkv"."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for p in params:
        head, dot, rest = p["name"].partition("layers.")
        number, _, kind = rest.partition(".")
        key = (head, dot, kind, tuple(p["shape"]), p["dtype"]) if dot else (p["name"],)
        groups.setdefault(key, []).append({**p, "number": number})
    return [g[0] if len(g) == 1 else _merged(g) for g in groups.values()]


def _merged(group: list[dict[str, Any]]) -> dict[str, Any]:
    first, last = group[0], group[-1]
    kind = first["name"].rpartition(".")[2]
    name = f"layers.{first['number']}-{last['number']}.{kind}"
    shape = f"{len(group)} x {first['shape']}"
    return {**first, "name": name, "shape": shape, "bytes": sum(p["bytes"] for p in group)}


def in_bytes(n: int) -> str:
    """A number of bytes for a reader: 538.0 MB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n >= size:
            return f"{n / size:,.1f} {unit}"
    return f"{n} B"


def _value(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
