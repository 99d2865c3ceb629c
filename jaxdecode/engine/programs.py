"""The engine's device side: pure functions over an immutable state of fixed shape, each compiled once.

A state has *slots*, rows of a decoder's own state that run or are free; *staged* rows, caches whose prompts are being
computed a chunk at a time; and *kept* rows, caches of prefixes that several prompts share. A row goes from kept (or
empty) to staged by ``begin``, through ``prefill``, and by ``insert`` into a slot, each time as a whole: nothing that
was there before it is left. Every product has one shape, whoever the neighbours are and whenever a row comes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import kvcache
from jaxdecode.base import (
    Cache,
    Decoder,
    Finish,
    Generated,
    Params,
    Prompt,
    Rules,
    fetch,
    put_rows,
    repeat_rows,
    take_rows,
)
from jaxdecode.transforms import chain

__all__ = ["EngineState", "Newcomer", "Plan", "begin", "collect", "init", "insert", "keep", "prefill", "step", "stop"]


class Plan(NamedTuple):
    """What is static. decoder: any whose state has rows first and whose result ``finish`` makes row by row.

    slots; prompt, new: the most tokens of a prompt and of an output; staged rows and their ``chunk`` of tokens for one
    pass; kept prefixes (one more cache, the first, stays empty).
    """

    decoder: Decoder
    slots: int
    prompt: int
    new: int
    staged: int
    chunk: int
    kept: int

    @property
    def capacity(self) -> int:
        """Tokens of a row in all."""
        return self.prompt + self.new


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """rows: the decoder's state of all slots; staged, kept: caches alone."""

    rows: Any
    staged: Cache
    kept: Cache


class Newcomer(NamedTuple):
    """One row to insert: ``tokens[1,S]``, ``length[1]``, its key, its number among the samples of a prompt (-1: the
    only one), and its rules [1]."""

    tokens: Any
    length: Any
    key: jax.Array
    sample: Any
    rules: Rules


def _rows(plan: Plan, params: Params, rules: Rules, batch: int) -> Any:
    """A decoder's state of ``batch`` rows with empty caches, all of them ended."""
    rules = dataclasses.replace(repeat_rows(rules, batch), limit=jnp.zeros((batch,), jnp.int32))
    ones = jnp.ones((batch,), jnp.int32)
    prompt = Prompt(jnp.zeros((batch, plan.prompt), jnp.int32), ones, None)
    return plan.decoder.init(params, _no_keys(batch), prompt, rules, max_new_tokens=plan.new)


def _no_keys(rows: int) -> jax.Array:
    """Keys for rows that draw nothing."""
    return jnp.broadcast_to(jax.random.key(0, impl="threefry2x32"), (rows,))


@functools.partial(jax.jit, static_argnums=0)
def init(plan: Plan, params: Params, rules: Rules) -> EngineState:
    """All slots free. ``rules`` [1]: those of any request, whose numbers do not matter."""
    staged, kept = (_rows(plan, params, rules, n).cache for n in (plan.staged, plan.kept + 1))
    rows = _rows(plan, params, rules, plan.slots)
    return EngineState(dataclasses.replace(rows, cache=kvcache.uneven(rows.cache)), staged, kept)


@functools.partial(jax.jit, donate_argnums=0)
def begin(staged: Cache, kept: Cache, row: Any, source: Any, length: Any) -> Cache:
    """The staged rows, of which ``row`` is now a copy of kept row ``source`` (0: empty), cut to ``length`` tokens.

    A cache that is not ``cuttable`` is not cut: ``length`` must be what it holds.
    """
    cache = take_rows(kept, jnp.asarray(source)[None])
    if kvcache.cuttable(cache):
        cache = kvcache.truncate(cache, jnp.asarray(length)[None])
    return put_rows(staged, jnp.asarray(row)[None], cache)


@functools.partial(jax.jit, donate_argnums=0)
def keep(kept: Cache, staged: Cache, row: Any, place: Any) -> Cache:
    """The kept rows, of which ``place`` is now a copy of staged row ``row``."""
    return put_rows(kept, jnp.asarray(place)[None], take_rows(staged, jnp.asarray(row)[None]))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(decoder: Decoder, params: Params, staged: Cache, tokens: Any, count: Any) -> Cache:
    """The next ``count[R]`` of ``tokens[R,chunk]`` of every staged row, 0 for rows that have nothing to do.

    The decoder's own ``init`` does it, for a prompt of this chunk and one token that it leaves alone, and under rules
    that say nothing, so that all groups of requests share this program.
    """
    rows = len(count)
    none = jnp.zeros((rows, 0), jnp.int32)
    rules = Rules(chain(), jnp.ones((rows,), bool), none, jnp.minimum(count, 1), none[..., None])
    prompt = Prompt(jnp.pad(tokens, ((0, 0), (0, 1))), count + 1, jnp.zeros_like(count))
    return decoder.init(params, _no_keys(rows), prompt, rules, max_new_tokens=1, cache=staged).cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def insert(decoder: Decoder, params: Params, rows: Any, staged: Cache, row: Any, slot: Any, new: Newcomer) -> Any:
    """The rows, with staged row ``row`` in ``slot`` as ``new``. It must hold all but the last token of its prompt."""
    key = jnp.where(new.sample < 0, new.key, jax.random.fold_in(new.key, jnp.maximum(new.sample, 0)))
    cache = take_rows(staged, jnp.asarray(row)[None])
    prompt = Prompt(new.tokens, new.length, None)
    size = rows.tokens.shape[1] - new.tokens.shape[1]
    made = decoder.init(params, key[None], prompt, new.rules, max_new_tokens=size, cache=cache)
    return put_rows(rows, jnp.asarray(slot)[None], made)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def step(decoder: Decoder, params: Params, rows: Any, n: Any, enough: Any) -> tuple[Any, tuple[jax.Array, jax.Array]]:
    """The rows after at most ``n`` steps, fewer once ``enough`` of them have ended or none runs.

    Beside them: how many steps, and the tokens that were written.
    """
    at_first = jnp.sum(rows.finish == Finish.RUNNING)

    def more(carry: tuple[jax.Array, jax.Array, Any]) -> jax.Array:
        i, _, rows = carry
        running = jnp.sum(rows.finish == Finish.RUNNING)
        return (i < n) & (running > 0) & (at_first - running < enough)

    def one(carry: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, jax.Array, Any]:
        i, written, rows = carry
        rows, info = decoder.step(params, rows)
        return i + 1, written + jnp.sum(info.count), rows

    zero = jnp.zeros((), jnp.int32)
    steps, written, rows = jax.lax.while_loop(more, one, (zero, jnp.zeros_like(at_first), rows))
    return rows, (steps, written)


@jax.jit
def _stopped(finish: jax.Array, rows: Any) -> jax.Array:
    return jnp.where(rows & (finish == Finish.RUNNING), jnp.asarray(Finish.STOP, finish.dtype), finish)


def stop(state: EngineState, rows: np.ndarray) -> EngineState:
    """End the running ones of ``rows[B]`` (bool) as if by a stop sequence."""
    finish = _stopped(state.rows.finish, rows)
    return dataclasses.replace(state, rows=dataclasses.replace(state.rows, finish=finish))


@functools.partial(jax.jit, static_argnums=0)
def _finished(decoder: Decoder, rows: Any, slot: Any) -> Generated:
    return decoder.finish(take_rows(rows, jnp.asarray(slot)[None]))


def collect(decoder: Decoder, state: EngineState, slot: int) -> Generated:
    """What the row in ``slot`` has written, as NumPy arrays with one row. The slot is free to be taken."""
    rows = dataclasses.replace(state.rows, cache=())
    return jax.tree.map(np.array, fetch(_finished(decoder, rows, np.int32(slot))))
