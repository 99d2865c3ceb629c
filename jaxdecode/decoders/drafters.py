"""Where drafts come from: the row's own history, or another model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdecode import keys as keys_
from jaxdecode import kvcache, transforms
from jaxdecode.base import Cache, Finish, Model, Params
from jaxdecode.decoders import records
from jaxdecode.decoders.pace import Pace
from jaxdecode.decoders.records import SamplingState
from jaxdecode.transforms import recurrence

__all__ = ["Drafter", "Drafts", "SpeculativeState", "from_history", "from_model"]

LEAST_NGRAM = 2  # tokens that must repeat where drafts are right; elsewhere the longest n-gram must
CHUNK = 8  # tokens at once where a draft model lags behind; XLA:CPU needs as long for fewer (more than one) or longer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeculativeState(SamplingState):
    """The record of ``sample``, and what drafting needs; with a draft model ``cache`` holds (its own, the draft's).

    held[B]: tokens in the draft's cache; drafted, accepted [B]: tokens so far; pace: how they fared.
    """

    held: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    pace: Pace


class Drafts(NamedTuple):
    """tokens[B,D], of which length[B] are drafts; logits[B,D,V] of the laws they were drawn from, the margins [B,D].

    logits None: the tokens are certain, whatever the key; their margins +inf.
    """

    tokens: jax.Array
    length: jax.Array
    logits: jax.Array | None
    margin: jax.Array


class Drafter(NamedTuple):
    """A source of drafts, as pure functions; ``cache`` and ``held[B]`` (tokens in it) are those of the draft model.

    ``find(state, wanted[B]) -> (count[B], hint)`` is cheap and runs at every step; ``draft(params, cache, held, state,
    count, hint) -> (Drafts, cache, held)`` where some row drafts; ``cost(params, draft_params)``, from shapes alone, is
    that of drafting a token, in steps of the model.
    """

    find: Callable[[SpeculativeState, jax.Array], tuple[jax.Array, Any]]
    draft: Callable[..., tuple[Drafts, Cache, jax.Array]]
    cost: Callable[[Params, Params], float]


# ---------------------------------------------------------------- the row's own history
def _find(max_ngram: int, state: SpeculativeState, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the longest end of the text (up to ``max_ngram`` tokens) stood before, of equals the last place."""
    most = jnp.where(wanted > 0, max_ngram, 0)
    length = recurrence.repeats(state.tokens, state.length, most)
    places = lax.broadcasted_iota(jnp.int32, length.shape, 1)
    longest = jnp.max(length, axis=1)
    place = jnp.max(jnp.where(length == longest[:, None], places, 0), axis=1)
    least = jnp.where(state.pace.retry == 0, min(LEAST_NGRAM, max_ngram), max_ngram)
    return jnp.where(longest >= least, wanted, 0), place


def _copy(
    size: int,
    params: Params,
    cache: Cache,
    held: jax.Array,
    state: SpeculativeState,
    count: jax.Array,
    place: jax.Array,
) -> tuple[Drafts, Cache, jax.Array]:
    """The tokens that followed there; where they reach the end of the text it goes on in circles."""
    steps = jnp.arange(size, dtype=jnp.int32)[None, :]
    at = place[:, None] + steps % jnp.maximum(state.length - place, 1)[:, None]
    at = jnp.minimum(at, state.tokens.shape[1] - 1)
    tokens = jnp.take_along_axis(state.tokens, at, axis=1)
    return Drafts(tokens, count, None, jnp.full(tokens.shape, jnp.inf, state.margin.dtype)), cache, held


def _free(params: Params, draft_params: Params) -> float:
    return 0.0


def from_history(draft_length: int, max_ngram: int) -> Drafter:
    """Prompt lookup: what followed where the last n-gram of prompt and output stood before."""
    return Drafter(functools.partial(_find, max_ngram), functools.partial(_copy, draft_length), _free)


# ---------------------------------------------------------------- another model
def _as_wanted(state: SpeculativeState, wanted: jax.Array) -> tuple[jax.Array, Any]:
    return wanted, ()


def _feed(
    model: Model, params: Params, cache: Cache, tokens: jax.Array, held: jax.Array, count: jax.Array, size: int
) -> tuple[jax.Array, Cache]:
    """The ``count[B]`` <= size tokens after the ``held[B]`` ones into the cache; logits [B,1,V] if it is one."""
    at = jnp.minimum(held[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :], tokens.shape[1] - 1)
    logits_at = jnp.zeros((tokens.shape[0], int(size == 1)), jnp.int32)
    return model.apply(params, jnp.take_along_axis(tokens, at, axis=1), cache, lengths=count, logits_at=logits_at)


def _catch_up(
    model: Model, params: Params, cache: Cache, held: jax.Array, state: SpeculativeState, active: jax.Array
) -> tuple[Cache, jax.Array]:
    """All but the last token of ``active[B]`` rows in the cache: it lags after a draft without an error, and a rest."""

    def lags(held: jax.Array) -> jax.Array:
        return active & (state.length - held > 1)

    def chunk(carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        cache, held = carry
        count = jnp.where(lags(held), jnp.minimum(state.length - 1 - held, CHUNK), 0)
        return _feed(model, params, cache, state.tokens, held, count, CHUNK)[1], held + count

    return lax.while_loop(lambda c: jnp.any(lags(c[1])), chunk, (cache, held))


def _write(
    model: Model,
    size: int,
    params: Params,
    cache: Cache,
    held: jax.Array,
    state: SpeculativeState,
    count: jax.Array,
    hint: Any,
) -> tuple[Drafts, Cache, jax.Array]:
    """Decode ``count[B]`` tokens of each row with the draft model, on a copy of the record, as ``sample`` would.

    Its law is processed like the model's, so a constraint or a filter is no reason to disagree. A row stops early at an
    end, or where the draft model's logits are of no use.
    """
    params, cache, state = lax.stop_gradient((params, cache, state))
    before = caught_up = _catch_up(model, params, cache, held, state, count > 0)
    batch, vocab_size = state.length.shape[0], _vocab_size(model, params, caught_up[0], state)
    copy = dataclasses.replace(state, cache=(), top_ids=None, top_logprobs=None, log_weight=None)
    laws = jnp.zeros((batch, size, vocab_size), state.logprob.dtype)

    def active(j: jax.Array, copy: SpeculativeState) -> jax.Array:
        return (copy.finish == Finish.RUNNING) & (j < count)

    def one(carry: Any) -> Any:
        j, copy, (cache, held), laws = carry
        busy, greedy = active(j, copy), copy.rules.greedy
        lag = busy.astype(jnp.int32)
        logits, cache = _feed(model, params, cache, copy.tokens, held, lag, 1)
        copy, law = records.law(copy, logits[:, 0].astype(laws.dtype), greedy, busy)

        def draw(logits: jax.Array, weight: jax.Array) -> transforms.Drawn:
            u = keys_.uniform(copy.keys, copy.length, keys_.Stream.DRAFT, logits.dtype)
            return transforms.draw(logits, u, weight)

        choice = records.choose(law, greedy, busy, draw)
        copy, _ = records.append(copy, law, choice, busy)
        laws = lax.dynamic_update_index_in_dim(laws, law.processed.logits, j, 1)
        return j + 1, copy, (cache, held + lag), laws

    carry = (jnp.int32(0), copy, caught_up, laws)
    _, copy, after, laws = lax.while_loop(lambda c: jnp.any(active(c[0], c[1])), one, carry)
    steps = jnp.arange(size, dtype=jnp.int32)[None, :]
    at = jnp.minimum(state.length[:, None] + steps, copy.tokens.shape[1] - 1)
    place = jnp.minimum(at - state.start[:, None], copy.margin.shape[1] - 1)
    tokens, margin = (jnp.take_along_axis(x, i, axis=1) for x, i in ((copy.tokens, at), (copy.margin, place)))
    kept = after if kvcache.cuttable(cache, size + 1) else before  # what cannot be cut is read again
    return Drafts(tokens, copy.length - state.length, laws, margin), *kept


def _vocab_size(model: Model, params: Params, cache: Cache, state: SpeculativeState) -> int:
    held = jnp.zeros_like(state.length)
    return jax.eval_shape(lambda: _feed(model, params, cache, state.tokens, held, held, 1)[0]).shape[-1]


def _share(params: Params, draft_params: Params) -> float:
    """A step costs what it reads: the weights. At most half, so that a large draft model is used where it is right."""
    own, draft = (
        sum(np.size(x) * jnp.result_type(x).itemsize for x in jax.tree.leaves(p))  # a leaf may be a Python number
        for p in (params, draft_params)
    )
    return min(draft / max(own, 1), 0.5)


def from_model(model: Model, draft_length: int) -> Drafter:
    """Drafts of another model over the same ids, drawn with the DRAFT stream of the row's key."""
    return Drafter(_as_wanted, functools.partial(_write, model, draft_length), _share)
