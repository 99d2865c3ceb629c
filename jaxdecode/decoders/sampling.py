"""Greedy decoding and sampling: one token per row and step."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxdecode import keys as keys_
from jaxdecode import transforms
from jaxdecode.base import Decoder, Finish, Model, Params, StepInfo
from jaxdecode.decoders import common, records
from jaxdecode.decoders.records import SamplingState

__all__ = ["SamplingState", "greedy", "plain_step", "sample"]


def plain_step(
    model: Model, all_greedy: bool, params: Params, state: records.State
) -> tuple[records.State, records.Choice, jax.Array]:
    """Compute p(. | x_<t), choose a token, append it; rows that ended stay as they are. Also who took one, [B]."""
    running = state.finish == Finish.RUNNING
    pending = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)[:, 0]
    raw, cache = common.forward(model, params, pending, state.cache, running)
    greedy = jnp.ones_like(running) if all_greedy else state.rules.greedy
    state, law = records.law(state, raw, greedy, running)

    def draw(logits: jax.Array, weight: jax.Array) -> transforms.Drawn:
        u = keys_.uniform(state.keys, state.length, keys_.Stream.DRAW, logits.dtype)
        return transforms.draw(logits, u, weight)

    choice = records.choose(law, greedy, running, draw)
    new, took = records.append(state, law, choice, running)
    return dataclasses.replace(new, cache=cache), choice, took


def _step(model: Model, all_greedy: bool, params: Params, state: SamplingState) -> tuple[SamplingState, StepInfo]:
    new, choice, took = plain_step(model, all_greedy, params, state)
    info = StepInfo(
        tokens=jnp.where(took, choice.token, -1)[:, None],
        count=took.astype(jnp.int32),
        logprob=jnp.where(took, choice.logprob, 0)[:, None],
        margin=jnp.where(took, choice.margin, jnp.inf)[:, None],
        finish=new.finish,
    )
    return new, info


@functools.lru_cache(maxsize=256)
def _decoder(model: Model, all_greedy: bool, top_logprobs: int, log_weight: bool) -> Decoder:
    init, step = (
        functools.partial(records.begin, model, top_logprobs, log_weight),
        functools.partial(_step, model, all_greedy),
    )
    return Decoder(init, step, records.finish)


def greedy(model: Model, *, top_logprobs: int = 0) -> Decoder:
    """Every row takes the arg max of its processed logits (lowest id of equals), whatever its temperature.

    top_logprobs: how many of the likeliest ids to record at every step.
    """
    return _decoder(model, True, top_logprobs, False)


def sample(model: Model, *, top_logprobs: int = 0, log_weight: bool = False) -> Decoder:
    """Rows draw from their processed law by one uniform number each; rows of ``Rules.greedy`` take the arg max.

    top_logprobs: how many of the likeliest ids to record at every step. log_weight: sum the log of the mass that the
    masks left of each step's law (S9.3).
    """
    return _decoder(model, False, top_logprobs, log_weight)
