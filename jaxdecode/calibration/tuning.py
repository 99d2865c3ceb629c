"""A short learned correction: grids and norms of a quantized model moved, by gradient, towards the model's own laws.

Codes stay. Every grid gets a factor and, of an affine grid, a shift of its middle; every vector gets a factor for each
entry. What is minimized is the mean KL divergence from the laws of the unquantized model on a text, by Adam with a rate
that falls to 0 along a half cosine.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks
from jaxdecode.base import Model, Params
from jaxdecode.caches import params_digest
from jaxdecode.calibration.grids import stored
from jaxdecode.calibration.steps import Steps
from jaxdecode.quant import QTensor, Uniform, dequantize, is_quantized, pack, unpack
from jaxdecode.quant.packing import storable

__all__ = ["RATE", "tune"]

RATE = 1e-3
KEPT = 4  # steps between two times that the state is kept
FAST, SLOW = np.float32(0.9), np.float32(0.95)  # what the running means keep; few steps need short memories
BITS = 8  # codes of so many need no correction

Progress = Callable[[str, float], None]


def tune(
    model: Model,
    params: Params,
    quantized: Params,
    tokens: Any,
    *,
    steps: int,
    rate: float = RATE,
    key: jax.Array,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Params:
    """``quantized`` with the grids and vectors that ``steps`` steps of Adam find, a row of ``tokens`` [B,S] each.

    params: the model that it stands for. key: the order of the rows. rate: about the largest relative change of a step.
    folder: where the state is kept every few steps: the same call goes on there, to the same bits. ValueError: other
    work in the folder, tokens that are no [B,S].
    """
    tokens = np.asarray(tokens, np.int32)
    checks.require(tokens.ndim == 2 and tokens.size > 0, "tokens", "an array [B,S]", f"shape {tokens.shape}")
    checks.require(type(steps) is int and steps >= 1, "steps", "a whole number >= 1", steps)
    digest = hashlib.sha256(tokens.tobytes() + np.asarray(jax.random.key_data(key)).tobytes()).hexdigest()
    about: dict[str, Any] = {"steps": steps, "rate": rate, "tokens": digest, "shape": list(tokens.shape)}
    if folder is not None:
        about["params"] = [params_digest(params), params_digest(quantized)]
    kept = Steps(folder, about)
    order = np.asarray(jax.random.permutation(key, len(tokens)))
    parts = jax.tree.map(_part, quantized, is_leaf=is_quantized)
    theta = jax.tree.map(_blank, parts, is_leaf=_is_part)
    state: Any = (theta, *(jax.tree.map(jnp.zeros_like, theta) for _ in range(2)))
    first = 0
    for done in range(steps // KEPT, 0, -1):
        if (held := kept.read(done)) is not None:
            leaves = [held[0][f"{i:06d}"] for i in range(len(jax.tree.leaves(state)))]
            state, first = jax.tree.unflatten(jax.tree.structure(state), leaves), done * KEPT
            break
    for step in range(first, steps):
        if progress is not None:
            progress(f"tuning: step {step + 1} of {steps}", step / steps)
        row = tokens[order[step % len(tokens)]][None]
        now = np.float32(step + 1), np.float32(rate * (1 + np.cos(np.pi * step / steps)) / 2)
        state = _step(model, params, parts, state, row, *now)
        if (step + 1) % KEPT == 0:
            number = (step + 1) // KEPT
            arrays = {f"{i:06d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
            kept.write(number, arrays, np.zeros(0))
            kept.forget(number - 1)
    return jax.tree.map(_moved, parts, state[0], quantized, is_leaf=_is_part)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Part:
    """A weight as ``codes`` [N,K] and grids [N,G], or any other leaf as its ``offset``; what the correction moves.

    about: the scheme of a weight, "vector", or "fixed" for what stays.
    """

    codes: Any
    scale: Any
    offset: Any
    about: Any = dataclasses.field(metadata={"static": True})


def _is_part(x: Any) -> bool:
    return isinstance(x, _Part)


def _part(leaf: Any) -> _Part:
    if isinstance(leaf, QTensor) and isinstance(leaf.scheme, Uniform) and leaf.scheme.bits < BITS:
        return _Part(*unpack(leaf), leaf.scheme)
    fixed = is_quantized(leaf) or leaf.ndim != 1 or not jnp.issubdtype(leaf.dtype, jnp.floating)
    return _Part(None, None, dequantize(leaf) if fixed else leaf, "fixed" if fixed else "vector")


def _blank(part: _Part) -> Any:
    """The correction before the first step: factors and shifts, all 0."""
    if part.about == "fixed":
        return ()
    if part.about == "vector":
        return (jnp.zeros(part.offset.shape, jnp.float32),)
    none = jnp.zeros(part.scale.shape, jnp.float32)
    return (none, none) if part.about.grid == "affine" else (none,)


def _grids(part: _Part, theta: Any) -> tuple[Any, Any]:
    """The corrected scale and offset: of an affine grid about its middle, of all others about 0."""
    scale = part.scale * (1 + theta[0])
    if part.about.grid != "affine":
        return scale, part.offset * (1 + theta[0])
    middle = np.float32(part.about.last_code / 2)
    return scale, part.offset + middle * (part.scale - scale) + part.scale * theta[1]


def _value(part: _Part, theta: Any) -> Any:
    if part.about == "fixed":
        return part.offset
    if part.about == "vector":
        return part.offset * (1 + theta[0]).astype(part.offset.dtype)
    width = part.codes.shape[1]
    size = width if part.about.group == "channel" else part.about.group
    scale, offset = (jnp.repeat(g, size, axis=1)[:, :width] for g in _grids(part, theta))
    return part.codes.astype(jnp.float32) * scale + offset


@functools.partial(jax.jit, static_argnums=0)
def _step(model: Model, params: Params, parts: Any, state: Any, row: Any, number: Any, rate: Any) -> Any:
    """One step of Adam: the correction, and the running means of its gradient and of the square of that."""
    theta, mean, square = state

    def laws(params: Params) -> jax.Array:
        return jax.nn.log_softmax(model.apply(params, row, model.init_cache(params, *row.shape))[0], axis=-1)

    wanted = laws(params)

    def loss(theta: Any) -> jax.Array:
        found = laws(jax.tree.map(_value, parts, theta, is_leaf=_is_part))
        return jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1))

    slope = jax.grad(loss)(theta)
    mean = jax.tree.map(lambda m, g: FAST * m + (1 - FAST) * g, mean, slope)
    square = jax.tree.map(lambda v, g: SLOW * v + (1 - SLOW) * g * g, square, slope)
    large = jax.tree.map(lambda v: jnp.sqrt(v / (1 - SLOW**number)) + np.float32(1e-8), square)
    fair = rate / (1 - FAST**number)
    return jax.tree.map(lambda t, m, size: t - fair * m / size, theta, mean, large), mean, square


def _moved(part: _Part, theta: Any, leaf: Any) -> Any:
    """The leaf with what was learned, as it is stored."""
    if part.about == "fixed":
        return leaf
    if part.about == "vector":
        return _value(part, theta)
    scale, offset = (np.asarray(g, np.float32) for g in _grids(part, theta))
    empty = np.asarray(part.scale) == 0
    kept = stored(np.where(empty, 1, scale).astype(np.float32), offset, part.about)
    scale, offset = storable(np.where(empty, 0, kept[0]), np.where(empty, part.offset, kept[1]), part.about)
    return pack(part.codes, jnp.asarray(scale), jnp.asarray(offset), part.about, leaf.dtype)
