"""Logits transforms: the type, the chain, and the one function that processes logits for every strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxdecode import base

__all__ = ["Context", "LogitsTransform", "Processed", "advance", "chain", "flatten", "init", "per_row", "process"]

State = Any
_Carry = tuple[jax.Array, jax.Array, jax.Array]  # logits, token margin, set margin


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What a transform may look at.

    tokens[B,T] (prompt and output), start[B] (prompt length), length[B] (tokens so far), limit[B] (output limit),
    key[B] (the row keys).
    """

    tokens: jax.Array
    start: jax.Array
    length: jax.Array
    limit: jax.Array
    key: jax.Array


def _no_state(params: Any, ctx: Context) -> State:
    return ()


def _same_state(params: Any, state: State, token: jax.Array, logprob: jax.Array) -> State:
    return state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitsTransform:
    """A change of the next-token logits: numbers in ``params`` (rows first), behaviour in module-level functions.

    kind: 'score' changes values, 'scale' multiplies all of them (temperature; skipped by greedy rows, whose margins are
    in logits before it), 'mask' only sets -inf (constraints, bans), 'filter' cuts the law and is skipped by
    greedy rows. ``apply_fn(params, logits[B,V], ctx, state) -> logits``; ``init_fn(params, ctx) -> state``;
    ``advance_fn(params, state, token[B], logprob[B]) -> state``; ``margin_fn(params, before, after, ctx, state) ->
    (token[B], set[B])`` says how far a filter is from deciding otherwise; without one a filter's margins are NaN
    (unknown), those of scores and masks +inf. ``cut_fn(params, logits, ctx, state) -> (logits, (token[B], set[B]))``
    gives logits and margins at once, where they share their work. Functions are compared by identity: use module-level
    ones, or every call compiles anew. Calling a transform on logits is the stateless shorthand.
    """

    params: Any
    kind: Literal["score", "scale", "mask", "filter", "chain"] = dataclasses.field(metadata={"static": True})
    apply_fn: Callable[..., jax.Array] = dataclasses.field(metadata={"static": True})
    init_fn: Callable[..., State] = dataclasses.field(default=_no_state, metadata={"static": True})
    advance_fn: Callable[..., State] = dataclasses.field(default=_same_state, metadata={"static": True})
    margin_fn: Callable[..., tuple[jax.Array, jax.Array]] | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    cut_fn: Callable[..., tuple[jax.Array, tuple[jax.Array, jax.Array]]] | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    def init(self, ctx: Context) -> State:
        """The state before the first token."""
        return self.init_fn(self.params, ctx)

    def apply(self, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
        """Logits [B,V] to logits [B,V]; masked entries are -inf."""
        return self.apply_fn(self.params, logits, ctx, state)

    def advance(self, state: State, token: jax.Array, logprob: jax.Array) -> State:
        """The state after each row took ``token[B]``, whose processed log probability is ``logprob[B]``."""
        return self.advance_fn(self.params, state, token, logprob)

    def margin(self, before: jax.Array, after: jax.Array, ctx: Context, state: State) -> tuple[jax.Array, jax.Array]:
        """(token[B], set[B]) of S6.5."""
        if self.margin_fn is not None:
            return self.margin_fn(self.params, before, after, ctx, state)
        if self.cut_fn is not None:
            return self.cut_fn(self.params, before, ctx, state)[1]
        value = jnp.full(before.shape[:1], jnp.nan if self.kind == "filter" else jnp.inf, before.dtype)
        return value, value

    def __call__(
        self,
        logits: jax.Array,
        tokens: jax.Array | None = None,
        length: jax.Array | None = None,
        *,
        start: Any = 0,
        limit: Any = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Stateless shorthand: ``t(logits[B,V], tokens[B,T], length[B])``; tokens default to an empty history."""
        batch = logits.shape[0]
        if tokens is None:
            tokens = jnp.zeros((batch, 0), jnp.int32)
        if length is None:
            length = jnp.full((batch,), tokens.shape[1], jnp.int32)
        if key is None:
            key = jax.random.key(0)
        ctx = Context(
            tokens=tokens,
            start=per_row(start, batch, jnp.int32),
            length=length,
            limit=per_row(2**31 - 1 if limit is None else limit, batch, jnp.int32),
            key=jnp.broadcast_to(key, (batch,)),
        )
        logits = _wide(logits)
        return self.apply(logits, ctx, self.init(ctx))


def per_row(value: Any, batch: int, dtype: Any) -> jax.Array:
    """A scalar or [B] setting as [B]."""
    return jnp.broadcast_to(jnp.asarray(value, dtype), (batch,))


def _wide(logits: jax.Array) -> jax.Array:
    return logits if logits.dtype.itemsize >= 4 else logits.astype(jnp.float32)


def _chain_init(params: tuple[LogitsTransform, ...], ctx: Context) -> State:
    return tuple(t.init(ctx) for t in params)


def _chain_apply(params: tuple[LogitsTransform, ...], logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    for t, s in zip(params, state, strict=True):
        logits = t.apply(logits, ctx, s)
    return logits


def _chain_advance(params: tuple[LogitsTransform, ...], state: State, token: jax.Array, logprob: jax.Array) -> State:
    return tuple(t.advance(s, token, logprob) for t, s in zip(params, state, strict=True))


def chain(*transforms: LogitsTransform) -> LogitsTransform:
    """Transforms applied left to right, each to the law the ones before it left; ``chain()`` is the identity.

    >>> from jaxdecode import temperature, top_k
    >>> chain(temperature(0.5), top_k(1))(jnp.array([[0.0, 1.0], [3.0, 2.0]])).tolist()
    [[-inf, 0.0], [0.0, -inf]]
    """
    for t in transforms:
        if not isinstance(t, LogitsTransform):
            raise TypeError(f"chain: expected LogitsTransform, got {type(t).__name__}")
    parts = tuple(part for t in transforms for part in flatten(t))
    return LogitsTransform(parts, "chain", _chain_apply, _chain_init, _chain_advance)


def flatten(transform: LogitsTransform) -> tuple[LogitsTransform, ...]:
    """The transforms of a chain, or the transform alone."""
    return transform.params if transform.kind == "chain" else (transform,)


class Processed(NamedTuple):
    """logits[B,V] of the law drawn from; unmasked[B,V]: scores only (no mask, no filter); the margins [B].

    unfiltered[B,V]: scores and masks, no filter.
    """

    logits: jax.Array
    unmasked: jax.Array
    unfiltered: jax.Array
    token_margin: jax.Array
    set_margin: jax.Array


def init(transform: LogitsTransform, ctx: Context) -> tuple[State, ...]:
    """States of the parts of ``transform``, for ``process`` and ``advance``."""
    return tuple(t.init(ctx) for t in flatten(transform))


def advance(
    transform: LogitsTransform, states: tuple[State, ...], token: jax.Array, logprob: jax.Array, took: jax.Array
) -> tuple[State, ...]:
    """States after each row took ``token[B]``; rows where ``took[B]`` is false keep theirs."""

    def select(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(took.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

    moved = tuple(t.advance(s, token, logprob) for t, s in zip(flatten(transform), states, strict=True))
    return jax.tree.map(
        lambda new, old: old if isinstance(new, base.Shared) else select(new, old),
        moved,
        states,
        is_leaf=lambda x: isinstance(x, base.Shared),
    )


def process(
    transform: LogitsTransform, logits: jax.Array, ctx: Context, states: tuple[State, ...], greedy: jax.Array
) -> Processed:
    """Apply ``transform`` to ``logits[B,V]``: the only code that does, whatever the strategy.

    Rows of ``greedy[B]`` skip filters (their filter margins are +inf). When every row is greedy the filters are not
    computed at all.
    """
    logits = _wide(logits)
    parts = flatten(transform)
    infinite = jnp.full(logits.shape[:1], jnp.inf, logits.dtype)
    carry: _Carry = (logits, infinite, infinite)
    for t, s in zip(parts, states, strict=True):
        if t.kind == "filter":

            def cut(c: _Carry, t: LogitsTransform = t, s: State = s) -> _Carry:
                return _cut(t, s, c, ctx, greedy)

            carry = jax.lax.cond(jnp.all(greedy), lambda c: c, cut, carry)
        else:
            token, held = t.margin(carry[0], carry[0], ctx, s)
            after = t.apply(carry[0], ctx, s)
            if t.kind == "scale":  # greedy rows skip it, and what it does not know
                after = jnp.where(greedy[:, None], carry[0], after)
                token, held = (jnp.where(greedy, jnp.inf, x) for x in (token, held))
            carry = (after, jnp.minimum(carry[1], token), jnp.minimum(carry[2], held))
    scores, unfiltered = logits, logits  # computed only where a strategy reads them: XLA drops an unused result
    for t, s in zip(parts, states, strict=True):
        scores = t.apply(scores, ctx, s) if t.kind in ("score", "scale") else scores
        unfiltered = unfiltered if t.kind == "filter" else t.apply(unfiltered, ctx, s)
    return Processed(carry[0], scores, unfiltered, carry[1], carry[2])


def _cut(t: LogitsTransform, state: State, carry: _Carry, ctx: Context, greedy: jax.Array) -> _Carry:
    before, token_margin, set_margin = carry
    if t.cut_fn is None:
        after = t.apply(before, ctx, state)
        token, held = t.margin(before, after, ctx, state)
    else:
        after, (token, held) = t.cut_fn(t.params, before, ctx, state)
    return (
        jnp.where(greedy[:, None], before, after),
        jnp.where(greedy, token_margin, jnp.minimum(token_margin, token)),
        jnp.where(greedy, set_margin, jnp.minimum(set_margin, held)),
    )
