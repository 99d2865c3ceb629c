"""Loops over a decoder: a scan, a while loop, and a host generator, all over the same step."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxdecode import checks
from jaxdecode.base import Decoder, Finish, Params, StepInfo

__all__ = ["run", "run_until_done", "stream"]


def run(decoder: Decoder, params: Params, state: Any, n: int) -> tuple[Any, StepInfo]:
    """``n`` steps under ``lax.scan``; differentiable. Infos are stacked on a new first axis.

    ``run(a)`` then ``run(b)`` equals ``run(a + b)``.
    """
    return jax.lax.scan(lambda s, _: decoder.step(params, s), state, None, length=n)


def run_until_done(decoder: Decoder, params: Params, state: Any) -> Any:
    """Steps under ``lax.while_loop`` until no row is running; always ends, since every row has a limit."""

    def running(s: Any) -> jax.Array:
        return jnp.any(s.finish == Finish.RUNNING)

    return jax.lax.while_loop(running, lambda s: decoder.step(params, s)[0], state)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _step(decoder: Decoder, params: Params, state: Any) -> tuple[Any, StepInfo]:
    return decoder.step(params, state)


def stream(decoder: Decoder, params: Params, state: Any) -> Iterator[StepInfo]:
    """Yield each step's info on the host until no row is running; the generator's return value is the last state.

    The step is compiled once per decoder and shape, and updates its own copy of the state in place.
    """
    checks.require(checks.is_concrete(state.finish), "stream", "a concrete state, outside jit", type(state.finish))
    info = _step.eval_shape(decoder, params, state)[1]
    checks.require(info.tokens.shape[1] > 0, "stream", "a decoder whose steps yield tokens", "beams")
    state = jax.tree.map(jnp.copy, state)
    while bool(jnp.any(state.finish == Finish.RUNNING)):
        state, info = _step(decoder, params, state)
        yield info
    return state
