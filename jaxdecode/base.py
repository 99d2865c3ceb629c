"""The contract every part meets at: models, decoders, rules, results, and operations on rows.

A *model* is two pure functions, a *decoder* is three, and everything that may differ from row to row
travels in pytrees whose leaves have the row first. Decoders never import models, models never import
decoders: they meet here.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from jaxdecode.transforms.core import LogitsTransform

__all__ = [
    "Acceptance",
    "Bounded",
    "Cache",
    "Decoder",
    "Finish",
    "Generated",
    "Grouped",
    "Model",
    "Params",
    "Prompt",
    "RowNode",
    "Rules",
    "Shared",
    "StepInfo",
    "fetch",
    "put_rows",
    "repeat_rows",
    "take_rows",
]

Params = Any
Cache = Any


class Model(NamedTuple):
    """Any model, as two pure functions.

    ``init_cache(params, batch_size, max_len) -> cache``: an empty cache; ValueError if ``max_len`` exceeds the
    model's context.

    ``apply(params, tokens[B,S], cache, *, lengths[B]=None, logits_at[B,K]=None) -> (logits, cache)``: process S
    more tokens of each row. ``lengths`` counts a row's real tokens, the rest of the row is padding on the right (0
    leaves the row untouched, None means S). ``logits_at`` names the positions of this call whose logits are wanted:
    [B,K,V]; K=0 runs no output head, None wants all S. Logits are float32, or float64 when the params are.
    """

    init_cache: Callable[..., Cache]
    apply: Callable[..., tuple[jax.Array, Cache]]


class Prompt(NamedTuple):
    """Right-padded prompts: ``tokens[B,S]``, ``length[B]`` >= 1, ``cached[B]`` = leading tokens the cache holds.

    ``cached=None``: all but the last token of each row, so that nothing of the prompt is left to compute.
    """

    tokens: jax.Array
    length: jax.Array
    cached: Any  # an array, or None


class Decoder(NamedTuple):
    """A decoding strategy, as three pure functions.

    ``init(params, keys[B], Prompt, rules, *, max_new_tokens, cache=None) -> state`` checks and prefills,
    ``step(params, state) -> (state, StepInfo)`` is the body of the loop, ``finish(state) -> Generated``.
    """

    init: Callable[..., Any]
    step: Callable[[Params, Any], tuple[Any, StepInfo]]
    finish: Callable[[Any], Generated]


class Finish(enum.IntEnum):
    """Why a row ended."""

    RUNNING = 0
    EOS = 1  # an end id was chosen
    STOP = 2  # a stop sequence was completed
    LENGTH = 3  # the row's own limit, or a full cache
    NO_TOKEN = 4  # nothing was left to choose from
    NAN = 5  # the model's logits held NaN or +inf
    INVALID = 6  # a traced setting was out of range


class StepInfo(NamedTuple):
    """What one step did: ``tokens[B,M]``, of which ``count[B]`` are real, their raw log probabilities and margins."""

    tokens: jax.Array
    count: jax.Array  # type: ignore[assignment]  # the field's name; tuple.count is not used
    logprob: jax.Array
    margin: jax.Array
    finish: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rules:
    """Everything that may differ by row.

    transform: the processing chain. greedy[B]: the row takes the arg max and skips filters. eos[B,E]: end ids, padded
    with -1. limit[B]: most new tokens; a negative limit marks a row whose traced settings were out of range.
    stop[B,n,L]: stop sequences, aligned right and padded with -1 on the left (all -1: unused). length_power[B,N+1]: for
    beams, what the log probability of each output length is divided by (None: 1).
    """

    transform: LogitsTransform
    greedy: jax.Array
    eos: jax.Array
    limit: jax.Array
    stop: jax.Array
    length_power: jax.Array | None = None


class Acceptance(NamedTuple):
    """Of speculative decoding: tokens drafted and, of these, accepted, [B] each."""

    drafted: jax.Array
    accepted: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generated:
    """The result of decoding; output only, never the prompt.

    tokens[B,N] (-1 past ``length``), length[B], logprob[B,N] under the raw model law (temperature 1),
    processed_logprob[B,N] under the law really drawn from (0 for greedy rows), margin[B,N] and set_margin[B,N] (how
    far the choice was from another one; logits for greedy rows, probability otherwise), finish[B] (``Finish``).
    Past ``length`` log probabilities are 0 and margins +inf. top_ids[B,N,n], top_logprobs[B,N,n]: the n likeliest ids
    of the raw law at every step, if asked for. log_weight[B]: under a constraint, the log of a sampled row's importance
    weight. acceptance: what became of drafts. With several samples per prompt every field has an axis K after B.

    Beams are several too, best first: score[B,K], of which the first ``count[B]`` exist. certified[B]: the first is
    proven to be a best sequence there is, and certificate_gap[B] by how much (S2.8; NaN: nothing is known).
    gumbel[B,K]: of samples without replacement, the perturbed log probability they are in the order of.
    """

    tokens: jax.Array
    length: jax.Array
    logprob: jax.Array
    processed_logprob: jax.Array
    margin: jax.Array
    set_margin: jax.Array
    finish: jax.Array
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None
    log_weight: jax.Array | None = None
    score: jax.Array | None = None
    count: jax.Array | None = None
    certified: jax.Array | None = None
    certificate_gap: jax.Array | None = None
    gumbel: jax.Array | None = None
    acceptance: Acceptance | None = None

    def to_lists(self) -> list[Any]:
        """Output ids of every row, the end token included; a list of such lists per prompt if there is an axis K.

        Beams that do not exist are left out.
        """
        tokens, length, count = fetch((self.tokens, self.length, self.count))
        rows = [
            row[:n].tolist()
            for row, n in zip(tokens.reshape(length.size, tokens.shape[-1]), length.reshape(-1), strict=True)
        ]
        if tokens.ndim == 2:
            return rows
        k = tokens.shape[1]
        count = np.full(len(tokens), k) if count is None else count
        return [rows[i * k : i * k + n] for i, n in enumerate(count.tolist())]


def fetch(tree: Any) -> Any:
    """``tree`` with NumPy arrays in place of jax's. Where some lie on devices of other processes, all must call it."""

    def whole(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return x
        assert isinstance(x.sharding, NamedSharding)
        return jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))

    return jax.device_get(jax.tree.map(whole, tree))


@runtime_checkable
class RowNode(Protocol):
    """A pytree node that owns its row operations, because its leaves do not simply have the row first."""

    def take_rows(self, rows: jax.Array) -> Any: ...

    def repeat_rows(self, n: int) -> Any: ...

    def put_rows(self, rows: jax.Array, new: Any) -> Any: ...


@runtime_checkable
class Bounded(Protocol):
    """A cache node with room for ``capacity`` tokens a row, ``length[B]`` of them taken: a full one ends its row."""

    @property
    def capacity(self) -> int: ...

    @property
    def length(self) -> jax.Array: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
    """One table for all rows: row operations leave it alone."""

    value: Any

    def take_rows(self, rows: jax.Array) -> Shared:
        return self

    def repeat_rows(self, n: int) -> Shared:
        return self

    def put_rows(self, rows: jax.Array, new: Shared) -> Shared:
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouped:
    """A pytree with ``size`` rows, side by side, for every row: row operations move them together."""

    value: Any
    size: int = dataclasses.field(metadata={"static": True})

    def _members(self, rows: jax.Array) -> jax.Array:
        return (rows[:, None] * self.size + jnp.arange(self.size, dtype=rows.dtype)[None]).reshape(-1)

    def take_rows(self, rows: jax.Array) -> Grouped:
        return Grouped(take_rows(self.value, self._members(jnp.asarray(rows))), self.size)

    def repeat_rows(self, n: int) -> Grouped:
        raise ValueError("repeat_rows: expected rows that are not beams, got a group of them")

    def put_rows(self, rows: jax.Array, new: Grouped) -> Grouped:
        return Grouped(put_rows(self.value, self._members(jnp.asarray(rows)), new.value), self.size)


def _is_node(x: Any) -> bool:
    return isinstance(x, RowNode)


def take_rows(tree: Any, rows: jax.Array) -> Any:
    """Rows ``rows[R]`` (int, in range) of every leaf of ``tree``, in that order."""

    def take(x: Any) -> Any:
        return x.take_rows(rows) if _is_node(x) else jnp.take(x, rows, axis=0)

    return jax.tree.map(take, tree, is_leaf=_is_node)


def repeat_rows(tree: Any, n: int) -> Any:
    """Every row ``n`` times, copies side by side: row r becomes rows r*n .. r*n + n-1."""

    def repeat(x: Any) -> Any:
        return x.repeat_rows(n) if _is_node(x) else jnp.repeat(x, n, axis=0)

    return jax.tree.map(repeat, tree, is_leaf=_is_node)


def put_rows(tree: Any, rows: jax.Array, new: Any) -> Any:
    """``tree`` with row ``rows[i]`` replaced by row i of ``new``; an index out of range is dropped."""

    def put(x: Any, y: Any) -> Any:
        return x.put_rows(rows, y) if _is_node(x) else x.at[rows].set(y, mode="drop")

    return jax.tree.map(put, tree, new, is_leaf=_is_node)
