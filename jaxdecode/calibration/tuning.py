"""A learned correction: codes, grids and norms of a quantized model moved, by gradient, towards the model's own laws.

Every grid gets a factor and, of an affine grid, a shift of its middle; every vector gets a factor for each entry. Codes
are learned as real numbers that are rounded where they are used, while the gradient passes as if they were not (a
straight-through estimator, Bengio et al. 2013): one that begins near a boundary costs little when it crosses it.

What is minimized is the mean KL divergence from the laws of the unquantized model on a text, by Adam with rates that
rise quickly and fall to 0 along a half cosine; of the squared gradients of codes the means of rows and columns are kept
alone (Adafactor, Shazeer and Stern 2018), which is half of the memory.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks
from jaxdecode.base import Model, Params
from jaxdecode.caches import params_digest
from jaxdecode.calibration.grids import stored
from jaxdecode.calibration.stages import name_of
from jaxdecode.calibration.steps import Steps
from jaxdecode.quant import QTensor, Uniform, dequantize, is_quantized, pack, unpack
from jaxdecode.quant.packing import storable

__all__ = ["CODE_RATE", "RATE", "tune"]

RATE = 1e-3
CODE_RATE = 0.0  # codes stay: that moving them too helps was not shown in the few steps that were tried
KEPT = 16  # steps between two times that the state is kept
FAST, SLOW = np.float32(0.9), np.float32(0.95)  # what the running means keep; few steps need short memories
BITS = 8  # codes of so many need no correction
TINY = np.float32(1e-12)
INSIDE = 0.49  # how far from a code the number may begin that is rounded to it

Progress = Callable[[str, float], None]


def tune(
    model: Model,
    params: Params,
    quantized: Params,
    tokens: Any,
    *,
    steps: int,
    places: Mapping[str, np.ndarray] | None = None,
    rate: float = RATE,
    code_rate: float = CODE_RATE,
    key: jax.Array,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Params:
    """``quantized`` with the codes, grids and vectors that ``steps`` steps find, a row of ``tokens`` [B,S] each.

    params: the model that it stands for. places: where the codes begin, as `calibrate` tells; of matrices without,
    where their weights lie, as far as that rounds to the code which is there. key: the order of the rows. rate: about
    the largest relative change of grids and vectors in a step, code_rate: of codes, in steps of their grids; 0: they
    stay. folder: where the state is kept every few steps, and when ``progress`` raises: the same call goes on there, to
    the same bits. ValueError: other work in the folder, tokens that are no [B,S].
    """
    tokens = np.asarray(tokens, np.int32)
    checks.require(tokens.ndim == 2 and tokens.size > 0, "tokens", "an array [B,S]", f"shape {tokens.shape}")
    checks.require(type(steps) is int and steps >= 1, "steps", "a whole number >= 1", steps)
    digest = hashlib.sha256(tokens.tobytes() + np.asarray(jax.random.key_data(key)).tobytes()).hexdigest()
    about: dict[str, Any] = {"steps": steps, "rates": [rate, code_rate], "tokens": digest, "shape": list(tokens.shape)}
    if folder is not None:
        about["params"] = [params_digest(params), params_digest(quantized)]
        leaves = jax.tree.leaves(quantized, is_leaf=is_quantized)
        about["schemes"] = [str(leaf.scheme) for leaf in leaves if isinstance(leaf, QTensor)]
    kept = Steps(folder, about)
    parts = jax.tree.map(_part, quantized, is_leaf=is_quantized)
    state = _start(parts, params, _by_name(parts, places or {}), code_rate > 0)
    first, state = _resumed(kept, steps, state)
    done = "tuning"
    for step in range(first, steps):
        try:
            if progress is not None:
                progress(f"{done}: step {step + 1} of {steps}", step / steps)
        except BaseException:
            _keep(kept, step, state)
            raise
        row = tokens[_row(key, step, len(tokens))][None]
        part = _part_of_rate(step, steps)
        rates = np.float32(part * rate), np.float32(part * code_rate)
        state, loss = _step(model, params, parts, state, row, np.float32(step + 1), rates)
        if (step + 1) % KEPT == 0:
            _keep(kept, step + 1, state)
        if progress is not None:
            done = f"tuning, KL {float(loss):.4f}"
    return jax.tree.map(_moved, parts, state[0], quantized, is_leaf=_is_part)


def _row(key: jax.Array, step: int, count: int) -> int:
    """Every row once, in an order of its own each time through."""
    order = jax.random.permutation(jax.random.fold_in(key, step // count), count)
    return int(order[step % count])


def _part_of_rate(step: int, steps: int) -> float:
    """Rising over the first tenth, as the first gradients tell nothing of their sizes, then falling to 0."""
    return float(min(1.0, (step + 1) / max(1, steps // 10)) * (1 + np.cos(np.pi * step / steps)) / 2)


def _resumed(kept: Steps, steps: int, state: Any) -> tuple[int, Any]:
    """The state that was kept last, and how many steps it has behind it."""
    for done in range(steps, 0, -1):
        if (held := kept.read(done)) is not None:
            leaves = [held[0][f"{i:06d}"] for i in range(len(jax.tree.leaves(state)))]
            return done, jax.tree.unflatten(jax.tree.structure(state), leaves)
    return 0, state


def _keep(kept: Steps, done: int, state: Any) -> None:
    if kept.folder is None or done == 0:
        return
    arrays = {f"{i:06d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    kept.write(done, arrays, np.zeros(0))
    for before in range(max(0, done - KEPT), done):
        kept.forget(before)


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
    stays = isinstance(leaf, QTensor) and leaf.form is None  # bytes: their products may round activations
    return _Part(None, None, dequantize(leaf) if fixed and not stays else leaf, "fixed" if fixed else "vector")


def _by_name(parts: Any, places: Mapping[str, np.ndarray]) -> Any:
    """A tree with the place of every weight that has one, else None."""

    def one(path: tuple[Any, ...], part: _Part) -> Any:
        return places.get(name_of(path)) if part.codes is not None else None

    return jax.tree_util.tree_map_with_path(one, parts, is_leaf=_is_part)


class _Moves(NamedTuple):
    """What is learned of a leaf, or something of the same shapes: real-valued codes, a factor and a shift of grids."""

    codes: Any = None
    factor: Any = None
    shift: Any = None


def _is_moves(x: Any) -> bool:
    return isinstance(x, _Moves)


@functools.partial(jax.jit, static_argnums=3)
def _start(parts: Any, params: Params, places: Any, with_codes: bool) -> Any:
    """What is learned, before the first step, and the running means of its gradient and of the square of that."""
    theta = jax.tree.map(_blank, parts, params, places, is_leaf=_is_part)
    if not with_codes:
        theta = jax.tree.map(lambda moves: moves._replace(codes=None), theta, is_leaf=_is_moves)
    mean = jax.tree.map(jnp.zeros_like, theta)
    return theta, mean, jax.tree.map(_blank_square, mean, is_leaf=_is_moves)


def _blank(part: _Part, w: Any, place: Any) -> _Moves:
    """Factors and shifts, all 0; of a weight the numbers that are rounded to its codes."""
    if part.about == "fixed":
        return _Moves()
    if part.about == "vector":
        return _Moves(factor=jnp.zeros(part.offset.shape, jnp.float32))
    codes, (scale, offset) = part.codes.astype(jnp.float32), _by_columns(part, part.scale, part.offset)
    if place is None:
        place = (w.astype(jnp.float32) - offset) / jnp.where(scale == 0, 1, scale) - codes
    none = jnp.zeros(part.scale.shape, jnp.float32)
    near = codes + jnp.clip(place.astype(jnp.float32), -INSIDE, INSIDE)
    return _Moves(near, none, none if part.about.grid == "affine" else None)


def _blank_square(zero: _Moves) -> _Moves:
    """Of codes the means of rows and columns."""
    return zero if zero.codes is None else zero._replace(codes=(zero.codes[:, 0], zero.codes[0]))


def _by_columns(part: _Part, *grids: Any) -> list[Any]:
    """Grids [N,G] as [N,K]."""
    width, group = part.codes.shape[1], part.about.group
    size = group if isinstance(group, int) else width
    return [jnp.repeat(g, size, axis=1)[:, :width] for g in grids]


def _grids(part: _Part, moves: _Moves) -> tuple[Any, Any]:
    """The corrected scale and offset: of an affine grid about its middle, of all others about 0."""
    scale = part.scale * (1 + moves.factor)
    if part.about.grid != "affine":
        return scale, part.offset * (1 + moves.factor)
    middle = np.float32(part.about.last_code / 2)
    return scale, part.offset + middle * (part.scale - scale) + part.scale * moves.shift


def _codes(part: _Part, moves: _Moves) -> Any:
    if moves.codes is None:
        return part.codes.astype(jnp.float32)
    return jnp.clip(jnp.round(moves.codes), 0, part.about.last_code)


def _value(part: _Part, moves: _Moves) -> Any:
    if part.about == "fixed":
        return part.offset
    if part.about == "vector":
        return part.offset * (1 + moves.factor).astype(part.offset.dtype)
    codes = _codes(part, moves)
    if moves.codes is not None:
        codes = moves.codes + jax.lax.stop_gradient(codes - moves.codes)
    scale, offset = _by_columns(part, *_grids(part, moves))
    return codes * scale + offset


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _step(model: Model, params: Params, parts: Any, state: Any, row: Any, number: Any, rates: Any) -> Any:
    """One step of Adam, and the divergence before it."""
    theta, mean, square = state

    def laws(params: Params) -> jax.Array:
        return jax.nn.log_softmax(model.apply(params, row, model.init_cache(params, *row.shape))[0], axis=-1)

    wanted = laws(params)

    def loss(theta: Any) -> jax.Array:
        found = laws(jax.tree.map(_value, parts, theta, is_leaf=_is_part))
        return jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1))

    value, slope = jax.value_and_grad(loss)(theta)
    mean = jax.tree.map(lambda m, g: FAST * m + (1 - FAST) * g, mean, slope)
    square = jax.tree.map(_squares, square, slope, is_leaf=_is_moves)
    fair = (1 - FAST**number), (1 - SLOW**number)
    walked = functools.partial(_walked, rates=rates, fair=fair)
    theta = jax.tree.map(walked, theta, mean, square, is_leaf=_is_moves)
    theta = jax.tree.map(_inside, parts, theta, is_leaf=_is_part)
    return (theta, mean, square), value


def _running(old: Any, new: Any) -> Any:
    return SLOW * old + (1 - SLOW) * new


def _squares(square: _Moves, slope: _Moves) -> _Moves:
    def one(old: Any, g: Any) -> Any:
        if isinstance(old, tuple):
            return _running(old[0], jnp.mean(g * g, axis=1)), _running(old[1], jnp.mean(g * g, axis=0))
        return None if old is None else _running(old, g * g)

    return _Moves(*map(one, square, slope))


def _walked(theta: _Moves, mean: _Moves, square: _Moves, rates: Any, fair: Any) -> _Moves:
    """Each number moved by its rate times mean gradient / root of the mean square."""

    def one(x: Any, m: Any, v: Any, rate: Any) -> Any:
        if x is None:
            return None
        if isinstance(v, tuple):
            rows, columns = (jnp.sqrt(part / fair[1]) for part in v)
            middle = jnp.sqrt(jnp.mean(v[0]) / fair[1]) + TINY
            size = rows[:, None] * (columns / middle)[None]
        else:
            size = jnp.sqrt(v / fair[1])
        return x - rate * (m / fair[0]) / (size + TINY)

    return _Moves(*map(one, theta, mean, square, (rates[1], rates[0], rates[0])))


def _inside(part: _Part, moves: _Moves) -> _Moves:
    """Codes no further beyond the ends of the grid than one half."""
    if moves.codes is None:
        return moves
    return moves._replace(codes=jnp.clip(moves.codes, -0.5, part.about.last_code + 0.5))


def _moved(part: _Part, moves: _Moves, leaf: Any) -> Any:
    """The leaf with what was learned, as it is stored."""
    if part.about == "fixed":
        return leaf
    if part.about == "vector":
        return _value(part, moves)
    codes = jax.jit(_codes)(part, moves).astype(jnp.uint8)
    scale, offset = (np.asarray(g, np.float32) for g in _grids(part, moves))
    empty = np.asarray(part.scale) == 0
    kept = stored(np.where(empty, 1, scale).astype(np.float32), offset, part.about)
    scale, offset = storable(np.where(empty, 0, kept[0]), np.where(empty, part.offset, kept[1]), part.about)
    return pack(codes, jnp.asarray(scale), jnp.asarray(offset), part.about, leaf.dtype)
