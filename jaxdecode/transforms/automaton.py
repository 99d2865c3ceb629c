"""Constraints inside the loop: a token automaton stepped by table lookup, and tokens that come first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks
from jaxdecode.base import Shared
from jaxdecode.transforms.core import Context, LogitsTransform, State, per_row

__all__ = ["automaton", "prefix"]


def _allowed(params: dict[str, Any], ctx: Context, state: jax.Array) -> jax.Array:
    """bool[B,V]: the tokens after which a match, and its end id, still fit into what is left of the limit."""
    step, class_of_token, distance = params["tables"].value
    rows = jnp.arange(state.shape[0])
    group = per_row(params["group"], rows.size, jnp.int32)
    written = ctx.length - ctx.start
    left = ctx.limit - written
    owed = jnp.clip(per_row(params["least"], rows.size, jnp.int32) - written, 0, distance.shape[1] - 1)
    next_state = jnp.take(step, state, axis=0)  # [B,C]
    distance = jnp.asarray(distance)
    needed = distance[group[:, None], jnp.maximum(owed - 1, 0)[:, None], next_state]
    by_class = needed < left[:, None]
    if len(class_of_token) == 1:  # as most often; then no classes [B,V] are made
        allowed = jnp.take(by_class, class_of_token[0], axis=1)
    else:
        allowed = jnp.take_along_axis(by_class, jnp.asarray(class_of_token)[group], axis=1)
    ends = (distance[group, owed, state] == 1) & (left > 0)
    ids = jnp.where(params["eos"] < 0, allowed.shape[1], params["eos"])
    return allowed.at[rows[:, None], ids].set(ends[:, None], mode="drop")


def _apply(params: dict[str, Any], logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    return jnp.where(_allowed(params, ctx, state), logits, -jnp.inf)


def _init(params: dict[str, Any], ctx: Context) -> State:
    """The first state; in the stateless shorthand, moved on by the output so far."""
    start = per_row(params["start"], ctx.length.shape[0], jnp.int32)
    size = ctx.tokens.shape[1]

    def move(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, state = carry
        at = ctx.start + i
        token = jnp.take_along_axis(ctx.tokens, jnp.clip(at, 0, size - 1)[:, None], axis=1)[:, 0]
        return i + 1, jnp.where(at < ctx.length, _advance(params, state, token, token), state)

    begin = (jnp.int32(0), start)
    return jax.lax.while_loop(lambda c: jnp.any(ctx.start + c[0] < ctx.length), move, begin)[1] if size else start


def _advance(params: dict[str, Any], state: State, token: jax.Array, logprob: jax.Array) -> State:
    step, class_of_token, _ = params["tables"].value
    group = per_row(params["group"], state.shape[0], jnp.int32)
    return jnp.asarray(step)[state, jnp.asarray(class_of_token)[group, token]]


def automaton(
    step: np.ndarray,
    class_of_token: np.ndarray,
    distance: np.ndarray,
    *,
    start: Any,
    eos: Any,
    least: Any = 0,
    group: Any = 0,
) -> LogitsTransform:
    """Only tokens from which the automaton reaches the end within the row's limit, and end ids only there.

    step[S,C] (state 0 is dead); class_of_token[G,V] and distance[G,K+1,S], one for each group of rows: fewest tokens to
    the end, end id included, if k more must stand before it. start: the first state, scalar or [B]. eos: end ids [B,E]
    padded with -1. least: tokens before an end id is allowed, scalar or [B], at most K. group: of each row, scalar or
    [B]. The tables are arguments of the program, not part of it.
    """
    for name, table, ndim in (("step", step, 2), ("class_of_token", class_of_token, 2), ("distance", distance, 3)):
        checks.require(np.ndim(table) == ndim, f"automaton: {name}", f"{ndim} axes", np.shape(table))
    groups, most = len(class_of_token), distance.shape[1] - 1
    same = distance.shape[0] == groups and distance.shape[2] == len(step)
    checks.require(same, "automaton: distance", f"[{groups}, K, {len(step)}]", distance.shape)
    least = checks.whole(least, lambda n: (n >= 0) & (n <= most), "least", f"in [0, {most}]")
    group = checks.whole(group, lambda g: (g >= 0) & (g < groups), "group", f"in [0, {groups - 1}]")
    tables = Shared((step, class_of_token, distance))
    params = {"tables": tables, "start": start, "eos": eos, "least": least, "group": group}
    return LogitsTransform(params, "mask", _apply, _init, _advance)


def _first(ids: jax.Array, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    place = ctx.length - ctx.start
    at = jnp.clip(place, 0, ids.shape[1] - 1)[:, None]
    token = jnp.where((place < ids.shape[1])[:, None], jnp.take_along_axis(ids, at, axis=1), -1)
    every = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.where((token < 0) | (every == token), logits, -jnp.inf)


def prefix(ids: Any) -> LogitsTransform:
    """The output begins with ``ids[B,L]``, int padded with -1 on the right; what follows is free.

    >>> t = prefix(np.array([[1], [-1]]))
    >>> t(jnp.zeros((2, 3)), start=0, length=jnp.array([0, 0])).tolist()
    [[-inf, 0.0, -inf], [0.0, 0.0, 0.0]]
    """
    shape = np.shape(ids)
    checks.require(len(shape) == 2 and shape[1] > 0, "prefix", "ids [B, L], L > 0", f"shape {shape}")
    return LogitsTransform(np.asarray(ids, np.int32) if checks.is_concrete(ids) else ids, "mask", _first)
