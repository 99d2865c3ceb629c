"""Weights in few bits that keep what a model does on a text: better than rounding each to the nearest.

Each matrix is rounded so that its products with the inputs it meets on the text change least (``rounding.py``); the
inputs are seen by a gradient of the model itself (``jaxdecode.observed``), stage by stage (``stages.py``), each on
what the rounded stages before it give. Finished stages are kept (``steps.py``). Where activations are rounded too,
matrices that suffer most from it are let off (``activations.py``). ``tuning.py`` goes on from there by gradient.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks
from jaxdecode.base import Model, Params
from jaxdecode.caches import params_digest
from jaxdecode.calibration.activations import costs_of_rounding, unrounded
from jaxdecode.calibration.channels import divided, factors
from jaxdecode.calibration.rounding import DAMPING, ROUNDS, Rounded, aim, damped, round_matrix, round_to_bytes
from jaxdecode.calibration.stages import Stage, Stages, name_of, one_stage, transformer_stages
from jaxdecode.calibration.steps import Steps
from jaxdecode.generation import vocab_size_of
from jaxdecode.models.transformer import TransformerConfig, transformer
from jaxdecode.observed import second_moments
from jaxdecode.quant import QTensor, Scheme, Uniform, dequantize, is_quantized, pack, parse_scheme, quantize
from jaxdecode.quant.schemes import Range

__all__ = ["Calibrated", "MatrixCost", "Stage", "Stages", "calibrate", "one_stage", "transformer_stages", "windows_of"]

OTHERS = "int8_zero_g32"  # scheme of matrices that no text can be seen to meet, such as an embedding
TOGETHER = 2048  # tokens in a pass
UNROUNDED_ABOVE = 2e-4  # nats of KL divergence a token
CORRECTION = 0.0  # aiming at the model's own outputs: worse on SmolLM2 with few tokens

Progress = Callable[[str, float], None]


class MatrixCost(NamedTuple):
    """Of one matrix, over the text: the mean squared error of its product relative to the mean square of that.

    rounding: the same by plain rounding, on the same inputs.
    """

    calibrated: float
    rounding: float


class Calibrated(NamedTuple):
    """``params`` with quantized matrices, and what the calibrated ones cost by name ("layers.0.qkv").

    exact: the float params that they stand for: those given, or the same model with other channel scales. places: how
    far from each code the number lies that would be best given all others, in steps of its grid, for `tuning.tune`.
    activations: what rounding those of a matrix is expected to cost, nats of KL divergence a token, by name: of the
    matrices that "int8", as scheme or as others, was asked for.
    """

    params: Params
    costs: Mapping[str, MatrixCost]
    exact: Params
    places: Mapping[str, np.ndarray]
    activations: Mapping[str, float] = MappingProxyType({})


def windows_of(ids: Sequence[int], count: int, width: int, key: jax.Array) -> np.ndarray:
    """``count`` windows [count,width] of a text, drawn with ``key`` from those side by side in it.

    ValueError: the text has fewer.
    """
    there = len(ids) // width
    checks.require(there >= count, "text", f"at least {count} windows of {width} tokens", f"{len(ids)} tokens")
    chosen = np.sort(np.asarray(jax.random.permutation(key, there))[:count])
    return np.asarray(ids, np.int32)[: there * width].reshape(there, width)[chosen]


def calibrate(
    model: Model | TransformerConfig,
    params: Params,
    tokens: Any,
    scheme: Scheme,
    *,
    others: Scheme = OTHERS,
    range: Range = "max",  # as in `quantize`
    balance: bool | None = None,
    unrounded_above: float = UNROUNDED_ABOVE,
    rounds: int = ROUNDS,
    correction: float = CORRECTION,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Calibrated:
    """``params`` quantized by ``scheme`` for what the model computes on ``tokens`` [B,S], rows of equal length.

    model: a config, whose transformer is calibrated layer by layer, each on what the rounded layers before it give; or
    any model whose products are ``linear.matmul``'s, seen at once as it is. others: the scheme of matrices that are not
    calibrated: embedding and output head of a config, all that multiplies nothing of a model. range: of plain rounding,
    which no row of a matrix may cost more than. correction: how far each matrix makes good for what the rounded stages
    before it have changed, 0 (keep what its own weights do) to 1. balance: move what is uneven in the inputs of a
    layer's matrices to their weights (``channels.py``); None: if activations are rounded too, as by "int8".
    unrounded_above: of "int8", matrices for which rounding activations is expected to cost more nats of KL divergence
    than this are "int8_weights": the same codes, other products. rounds: see ``rounding.py``. folder: where finished
    stages are kept: the same call goes on there, to the same bits. ValueError:
    a scheme with one grid for a whole tensor, ids out of range, other work in the folder.

    >>> from jaxdecode.models.transformer import TransformerConfig, init_params
    >>> config = TransformerConfig(16, 8, 1, 2, 1, 4, 12, context_length=32)
    >>> tokens = np.arange(32).reshape(2, 16) % 16
    >>> found = calibrate(config, init_params(config, jax.random.key(0)), tokens, "int3_affine_g8")
    >>> all(cost.calibrated <= cost.rounding for cost in found.costs.values())
    True
    """
    uniform, rest = parse_scheme("scheme", scheme, range=range), parse_scheme("others", others)
    if isinstance(uniform, Uniform) and uniform.group == "tensor":
        raise ValueError(f"scheme: expected one with a grid for each group or channel, got {scheme}")
    stages = transformer_stages(model) if isinstance(model, TransformerConfig) else one_stage(model)
    tokens = np.asarray(tokens)
    ok = isinstance(unrounded_above, (int, float)) and unrounded_above >= 0
    checks.require(ok, "unrounded_above", "a number >= 0", unrounded_above)
    ok = isinstance(correction, (int, float)) and 0 <= correction <= 1
    checks.require(ok, "correction", "a number in [0, 1]", correction)
    checks.require(tokens.ndim == 2 and tokens.size > 0, "tokens", "an array [B,S]", f"shape {tokens.shape}")
    size = model.vocab_size if isinstance(model, TransformerConfig) else vocab_size_of(model, params)
    checks.token_ids(tokens, size, "tokens")
    if isinstance(model, TransformerConfig):
        limit = model.context_length
        checks.require(tokens.shape[1] <= limit, "tokens", f"at most {limit} in a row, the context", tokens.shape[1])
    codes = any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized)))
    checks.require(not codes, "params", "arrays", "quantized ones")
    digest = hashlib.sha256(tokens.astype(np.int32).tobytes()).hexdigest()
    balanced = uniform == "int8" if balance is None else balance
    about: dict[str, Any] = {
        "scheme": str(uniform),
        "range": range,
        "others": str(rest),
        "rounds": rounds,
        "tokens": digest,
    }
    about |= {"shape": list(tokens.shape), "damping": DAMPING, "correction": correction}
    about |= {"balance": True} if balanced else {}
    if folder is not None:
        about["params"] = params_digest(params)
    steps = Steps(folder, about)
    how = _How(uniform, rest, rounds, correction, balanced, _dtype(params))
    found = _through(stages, params, tokens.astype(np.int32), how, steps, progress)
    if "int8" not in (uniform, rest):
        return found
    if progress is not None:
        progress("measuring what rounded activations cost", 1.0)
    whole = transformer(model) if isinstance(model, TransformerConfig) else model
    costs = costs_of_rounding(whole, jax.tree.map(_wide, found.exact), tokens.astype(np.int32), jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(found.params, is_leaf=is_quantized)
    rounds_activations = {name_of(path) for path, w in leaves if isinstance(w, QTensor) and w.scheme == "int8"}
    costs = {name: cost for name, cost in costs.items() if name in rounds_activations}
    return found._replace(params=unrounded(found.params, costs, unrounded_above), activations=costs)


def _dtype(params: Params) -> Any:
    return next(w.dtype for w in jax.tree.leaves(params) if jnp.issubdtype(w.dtype, jnp.floating))


class _How(NamedTuple):
    uniform: Any
    others: Any
    rounds: int
    correction: float
    balance: bool
    dtype: Any


def _through(
    stages: Stages, params: Params, tokens: np.ndarray, how: _How, steps: Steps, progress: Progress | None
) -> Calibrated:
    wide = jax.tree.map(_wide, params)
    staged = {id(leaf) for stage in stages.stages for leaf in jax.tree.leaves(stage.get(params))}
    outside = jax.tree.map(lambda w: w if id(w) in staged else quantize(w, how.others), params)
    new, same, costs, places, count = outside, params, {}, {}, len(stages.stages)
    streams: Any = None  # activations of the model, if they are aimed at, and of the rounded one
    for i, stage in enumerate(stages.stages):
        if progress is not None:
            progress(f"calibrating {how.uniform}: stage {i + 1} of {count}", i / count)
        part = stage.get(params)
        if (held := steps.read(i)) is None:
            if streams is None:
                models = (wide, _values(outside)) if how.correction else (_values(outside),)
                streams = [_over(_call, stages.start, p, tokens) for p in models]
            exact, last = stage.get(wide), i + 1 == count
            arrays, after = _solve(stage, exact, streams, tokens.shape[1], how, last)
            part = _divided(stage, part, arrays)
            quantized = _built(part, arrays, how)
            if not last:
                own = _over(_call, stage.apply, _values(quantized), streams[-1])
                streams = [np.concatenate(after), own] if how.correction else [own]
            steps.write(i, arrays, np.stack(streams))
        else:
            arrays, streams = held
            part = _divided(stage, part, arrays)
            quantized = _built(part, arrays, how)
        new, same = stage.put(new, quantized), stage.put(same, part)
        prefix = "".join(f"{key}." for key in stage.path)
        for name in sorted({key.rpartition("/")[0] for key in arrays}):
            costs[prefix + name] = MatrixCost(*(float(arrays[f"{name}/{kind}"]) for kind in ("cost", "rounding_cost")))
            places[prefix + name] = arrays[f"{name}/place"]
    return Calibrated(new, costs, same, places)


def _wide(w: jax.Array) -> jax.Array:
    return w.astype(jnp.float32) if jnp.issubdtype(w.dtype, jnp.floating) else w


def _values(params: Params) -> Params:
    return jax.tree.map(_wide, dequantize(params))


@functools.partial(jax.jit, static_argnums=0)
def _call(fn: Callable[[Params, Any], Any], part: Params, x: Any) -> Any:
    return fn(part, x)


@functools.partial(jax.jit, static_argnums=0)
def _see(fn: Callable[[Params, Any], Any], part: Params, streams: tuple[Any, ...]) -> Any:
    """What the first of two streams becomes, and the moments: of pairs, if there are two."""
    out, moments = second_moments(fn, part, jnp.concatenate(streams), pairs=len(streams) == 2)
    return out[: len(streams[0])] if len(streams) == 2 else None, moments


def _batches(x: np.ndarray, width: int) -> list[np.ndarray]:
    rows = max(1, TOGETHER // width)
    return [x[i : i + rows] for i in builtins.range(0, len(x), rows)]


def _over(call: Any, fn: Any, part: Params, x: np.ndarray) -> np.ndarray:
    """``fn(part, x)`` over batches of rows."""
    return np.concatenate([np.asarray(call(fn, part, rows)) for rows in _batches(x, x.shape[-1])])


def _solve(
    stage: Stage, part: Params, streams: Any, width: int, how: _How, last: bool
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Codes and grids of every matrix of a stage that meets something, by name; what the model's own stage gives.

    That is read only of a pair of streams, and not after the ``last`` stage.
    """
    total: dict[str, np.ndarray] = {}
    after: list[np.ndarray] = []
    for rows in zip(*(_batches(x, width) for x in streams), strict=True):
        out, seen = _see(stage.apply, part, rows)
        after += [] if last or len(rows) == 1 else [np.asarray(out)]
        for path, moment in jax.tree_util.tree_leaves_with_path(seen):
            name = name_of(path)
            total[name] = total.get(name, np.float64(0)) + np.asarray(moment, np.float64)
    arrays: dict[str, np.ndarray] = {}
    if how.balance and stage.config is not None:
        by = factors(stage.config, part, {name: m[0] if m.ndim == 3 else m for name, m in total.items()})
        part = divided(stage.config, part, by)
        total |= {name: total[name] / np.outer(s, s) for name, s in by.items()}
        arrays |= {f"{name}/divided": s for name, s in by.items()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(part):
        name = name_of(path)
        if (moments := total.get(name)) is None or not moments.any():
            continue
        checks.require(bool(np.isfinite(moments).all()), name, "finite inputs", "NaN or inf")
        w, number = np.asarray(leaf, np.float32), len(streams[0]) * width
        h = damped(moments[0] if how.correction else moments, number)
        wanted = aim(w, h, moments / number, how.correction) if how.correction else w
        if isinstance(how.uniform, Uniform):
            found = round_matrix(w, h, how.uniform, aim=wanted, rounds=how.rounds)
        else:
            found = round_to_bytes(w, h, how.dtype, aim=wanted)
        arrays |= {f"{name}/{kind}": value for kind, value in _described(found, wanted, h).items()}
    return arrays, after


def _described(found: Rounded, w: np.ndarray, h: np.ndarray) -> dict[str, Any]:
    power = float(np.einsum("nk,nk->", w @ h.astype(np.float32), w)) or 1.0
    totals = {"cost": found.cost.sum() / power, "rounding_cost": found.rounding_cost.sum() / power}
    return {"codes": found.codes, "scale": found.scale, "offset": found.offset, "place": found.place, **totals}


def _divided(stage: Stage, part: Params, arrays: Mapping[str, np.ndarray]) -> Params:
    """The part with the channel scales that were found for it."""
    by = {key.rpartition("/")[0]: s for key, s in arrays.items() if key.endswith("/divided")}
    return divided(stage.config, part, by) if by and stage.config is not None else part


def _built(part: Params, arrays: Mapping[str, np.ndarray], how: _How) -> Params:
    """The part with the matrices that were calibrated as they were found, and plain rounding for any other."""

    def leaf(path: tuple[Any, ...], w: Any) -> Any:
        name = name_of(path)
        if f"{name}/codes" not in arrays:
            return quantize(w, how.others) if not is_quantized(w) else w
        codes, scale, offset = (jnp.asarray(arrays[f"{name}/{kind}"]) for kind in ("codes", "scale", "offset"))
        if isinstance(how.uniform, Uniform):
            return pack(codes, scale, offset, how.uniform, w.dtype)
        return QTensor((codes.astype(jnp.int16) - 128).astype(jnp.int8), scale[:, 0].astype(w.dtype), how.uniform)

    return jax.tree_util.tree_map_with_path(leaf, part, is_leaf=is_quantized)
