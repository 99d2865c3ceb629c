"""A text that grows turn by turn: each reply continues from the part of the KV cache that is still true (S7.4)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks, keys, kvcache
from jaxdecode.base import Cache, Decoder, Finish, Generated, Model, Params, Prompt, StepInfo
from jaxdecode.decoders import common
from jaxdecode.generation import decoder_of
from jaxdecode.rulebook import Settings

__all__ = ["Session", "Steps", "capacity_class", "common_prefix", "rolled_back"]

WIDTHS = (32, 256)  # new prompt tokens per pass: a short message costs little, a long one few passes
LEAST = 512  # slots of the smallest cache
_FAULTS = (Finish.NO_TOKEN, Finish.NAN, Finish.INVALID)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first ids ``a`` and ``b`` share.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def capacity_class(need: int, most: int, least: int = LEAST) -> int:
    """``least`` doubled until it holds ``need``, or ``most`` if that is less: few sizes, so few compilations.

    >>> [capacity_class(n, 3000) for n in (5, 512, 513, 2100)]
    [512, 512, 1024, 3000]
    """
    size = least
    while size < need:
        size *= 2
    return min(size, most)


def rolled_back(cache: Cache, held: int, keep: int) -> Cache | None:
    """``cache``, which holds one row of ``held`` tokens, cut to its first ``keep``.

    None for a cache that cannot be cut (anything but KV nodes, or a ring's too far end): it must be filled anew.
    """
    length = jnp.array([keep], jnp.int32)
    if kvcache.only_nodes(cache) and bool(kvcache.reaches_back(cache, length)[0]):
        return kvcache.truncate(cache, length)
    return cache if keep == held else None


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _step(decoder: Decoder, params: Params, state: Any) -> tuple[Any, StepInfo]:
    return decoder.step(params, state)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _extend(model: Model, params: Params, cache: Cache, tokens: jax.Array, lengths: jax.Array) -> Cache:
    nowhere = jnp.zeros((tokens.shape[0], 0), jnp.int32)
    return model.apply(params, tokens, cache, lengths=lengths, logits_at=nowhere)[1]


class Steps:
    """An iterator over a decoder's steps that may be left at any time: ``state`` is what the next step would need.

    Takes ``state`` over: its buffers are used up. After an exception in the middle of a step ``state`` is None.
    """

    def __init__(self, decoder: Decoder, params: Params, state: Any) -> None:
        # What init returns may name one buffer twice, which cannot be given away twice. The cache is too big to copy.
        small = jax.tree.map(jnp.copy, dataclasses.replace(state, cache=()))
        self.decoder, self.params = decoder, params
        self.state: Any = dataclasses.replace(small, cache=state.cache)

    def __iter__(self) -> Iterator[StepInfo]:
        return self

    def __next__(self) -> StepInfo:
        state = self.state
        if state is None or not bool(jnp.any(state.finish == Finish.RUNNING)):
            raise StopIteration
        self.state = None
        self.state, info = _step(self.decoder, self.params, state)
        return info

    def result(self) -> Generated:
        """What has been generated so far; rows that could go on have finish RUNNING. ValueError after an exception."""
        checks.require(self.state is not None, "result", "a state", "none: an exception ended a step")
        return self.decoder.finish(self.state)


class Session:
    """One conversation: the model, its params, and the cache of the text it saw last.

    ``context``: the most tokens of a text. A reply is the same, token for token, as ``generate`` gives from scratch
    for the same prompt, key and settings (S7.2, up to S6.3).

    >>> from jaxdecode.testing import markov_model
    >>> session = Session(markov_model(), jnp.eye(3), context=64)
    >>> settings = Settings(max_new_tokens=2, temperature=0)
    >>> [info.tokens.tolist() for info in session.reply([0, 1], settings=settings)]
    [[[1]], [[1]]]
    >>> session.tokens, session.reused
    ([0, 1, 1], 0)
    """

    def __init__(self, model: Model, params: Params, *, context: int) -> None:
        self.model, self.params, self.context = model, params, context
        self.reused = 0
        self.capacity = 0
        self._cache: Cache | None = None
        self._tokens: list[int] = []
        self._steps: Steps | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens the cache holds: of the last prompt and its reply all but the last."""
        self._collect()
        return self._tokens

    def reset(self) -> None:
        """Forget everything."""
        self._steps, self._cache, self._tokens = None, None, []

    def reply(self, prompt: Sequence[int], *, key: jax.Array | None = None, settings: Settings) -> Steps:
        """The steps that continue ``prompt`` (ids), to be taken one by one and left at any time.

        key: one ``jax.random.key``; None only if the temperature is 0. The most new tokens are ``max_new_tokens``, or
        what the context has room for. ``reused`` tells how many prompt tokens were in the cache. ValueError for a
        prompt that leaves no room, or settings that are not those of one row.
        """
        expected = f"1 to {self.context - 1} tokens (the context holds {self.context})"
        checks.require(1 <= len(prompt) < self.context, "prompt", expected, len(prompt))
        checks.require(settings.num_samples == 1, "num_samples", "1 in a session", settings.num_samples)
        checks.require(settings.width is None, "beams, without_replacement", "neither in a session", settings.width)
        n = capacity_class(settings.size, self.context, 64)
        capacity = capacity_class(len(prompt) + n, self.context)
        ids = np.asarray(prompt)
        checks.token_ids(ids, self.vocab_size, "prompt")
        decoder = decoder_of(self.model, settings)
        rules = settings.rules(1, self.vocab_size)
        rules = dataclasses.replace(rules, limit=jnp.minimum(rules.limit, n))
        if key is None:
            checks.require(bool(np.all(rules.greedy)), "key", "a jax.random.key, since the temperature is not 0", None)
            key = jax.random.key(0)
        row_keys = keys.row_keys(key, 1)
        self._fill(ids.astype(np.int32), capacity)
        cache, self._cache = self._cache, None
        padded = np.pad(ids, (0, self.capacity - len(ids))).astype(np.int32)[None]
        arrays = Prompt(*(jnp.asarray(x, jnp.int32) for x in (padded, [len(ids)], [len(ids) - 1])))
        state = decoder.init(self.params, row_keys, arrays, rules, max_new_tokens=n, cache=cache)
        self._steps = Steps(decoder, self.params, state)
        return self._steps

    @functools.cached_property
    def vocab_size(self) -> int:
        """Number of ids, as the shape of the model's logits says."""
        cache = common.cache_spec(self.model, self.params, 1, 1)
        return common.logits_spec(self.model, self.params, cache).shape[-1]

    def _collect(self) -> None:
        """Take the cache back from the last reply, however far it got."""
        if self._steps is None:
            return
        state, self._steps = self._steps.state, None
        self.reset()
        if state is not None and int(state.finish[0]) not in _FAULTS:  # a faulty step leaves no state to go on from
            self._cache = state.cache
            self._tokens = np.asarray(state.tokens)[0, : int(state.length[0]) - 1].tolist()

    def _fill(self, ids: np.ndarray, capacity: int) -> None:
        """Make the cache hold all of ``ids`` but the last, from the prefix of them that it holds already."""
        self._collect()
        keep = min(common_prefix(self._tokens, ids.tolist()), len(ids) - 1)
        cache = None
        if self._cache is not None and capacity <= self.capacity:
            cache = rolled_back(self._cache, len(self._tokens), keep)
        self.reset()
        if cache is None:
            cache, keep = self.model.init_cache(self.params, 1, capacity), 0
            self.capacity = capacity
        self.reused = keep
        left = ids[keep:-1]
        width = WIDTHS[len(left) > 4 * WIDTHS[0]]
        for at in range(0, len(left), width):
            part = left[at : at + width]
            tokens = np.pad(part, (0, width - len(part)))[None]
            cache = _extend(self.model, self.params, cache, tokens, np.array([len(part)], np.int32))
        self._cache, self._tokens = cache, ids[:-1].tolist()
