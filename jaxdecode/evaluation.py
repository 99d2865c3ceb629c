"""What a model says of a long text, alone and beside another model: perplexity, KL divergence, agreement.

The text is read in windows: window i holds the tokens from i * stride on, and of these the ones count that no window
before it counted, each given what the window holds before it. With stride = window nothing is read twice, and the first
token of each window, which has nothing before it, does not count; a smaller stride gives every later token at least
window - stride tokens of context, at the price of reading the rest again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks, transforms
from jaxdecode.base import Cache, Model, Params
from jaxdecode.decoders import common
from jaxdecode.generation import vocab_size_of
from jaxdecode.scoring import LOGITS, Plan, Text, logprob_of, over_text

__all__ = ["Evaluation", "Tokens", "Windows", "evaluate", "windows_of_text"]

TOGETHER = 2048  # tokens that are read in one pass, in as many windows as that takes


class Tokens(NamedTuple):
    """Of every token that counts: its place in the text, its log probability, and beside the first model: the
    divergence of the two laws, and whether their most probable tokens are the same.
    """

    place: np.ndarray
    logprob: np.ndarray
    kl: np.ndarray | None = None
    agrees: np.ndarray | None = None


class Evaluation(NamedTuple):
    """The means over the tokens that count.

    perplexity: exp of the mean negative log probability. kl: mean of sum p log(p / q), in nats, p the law of the first
    model and q this one's. agreement: how often the two have the same most probable token.
    """

    counted: int
    perplexity: float
    kl: float | None
    agreement: float | None
    tokens: Tokens


class Windows(NamedTuple):
    """Where each window begins, how long it is, and from which of its places on tokens count."""

    first: np.ndarray
    length: np.ndarray
    start: np.ndarray


def windows_of_text(count: int, window: int, stride: int) -> Windows:
    """The windows over ``count`` tokens; the last one may be short."""
    first = np.arange(0, max(1, count - window + stride), stride)
    length = np.minimum(window, count - first)
    seen = np.concatenate([[0], (first + length)[:-1]])  # what windows before have counted
    keep = length > np.maximum(1, seen - first)
    return Windows(first[keep], length[keep], np.maximum(1, seen - first)[keep].astype(np.int32))


def evaluate(
    models: Sequence[tuple[Model, Params]],
    ids: Sequence[int],
    *,
    window: int = 1024,
    stride: int | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> list[Evaluation]:
    """What each of some models says of a text, and how far it is from the first of them.

    models: of one vocabulary, with their params. ids: the text's tokens. window: tokens that are read together, stride:
    from one window to the next (None: window). Memory is that of a few windows, however long the text. ValueError:
    fewer than 2 tokens, ids out of range, models of different vocabularies.

    >>> from jaxdecode.testing import markov_model
    >>> sure = jnp.log(jnp.array([[0.5, 0.5], [0.25, 0.75]]))
    >>> fair, other = evaluate([(markov_model(), jnp.zeros((2, 2))), (markov_model(), sure)], [0, 1, 1, 0, 1], window=4)
    >>> fair.counted, round(fair.perplexity, 3), round(other.agreement, 3)
    (3, 2.0, 0.333)
    """
    checks.require(len(models) > 0, "models", "at least one", "none")
    sizes = [vocab_size_of(model, params) for model, params in models]
    checks.require(len(set(sizes)) == 1, "models", "models of one vocabulary", f"{sizes} ids")
    text = np.asarray(ids)
    checks.require(text.ndim == 1 and text.size >= 2, "ids", "the ids of at least 2 tokens", f"shape {text.shape}")
    checks.token_ids(text, sizes[0], "ids")
    checks.require(type(window) is int and window >= 2, "window", "a whole number >= 2", window)
    stride = window if stride is None else stride
    ok = type(stride) is int and 1 <= stride <= window
    checks.require(ok, "stride", f"a whole number in [1, {window}]", stride)
    window = min(window, text.size)
    windows = windows_of_text(text.size, window, min(stride, window))
    plan = Plan(
        _beside(tuple(model for model, _ in models)),
        max(1, min(common.CHUNK, window - 1, LOGITS // (sizes[0] * len(models)))),
    )
    params, found, places = tuple(params for _, params in models), [], []
    rows = max(1, min(len(windows.first), TOGETHER // window, LOGITS // sizes[0]))
    for at in range(0, len(windows.first), rows):
        batch, place = _batch(text.astype(np.int32), windows, slice(at, at + rows), rows, window)
        counts = (np.arange(window) >= batch.start[:, None]) & (np.arange(window) < batch.length[:, None])
        got = jax.tree.map(np.asarray, _measure(plan, params, batch))
        found.append([jax.tree.map(lambda x, kept=counts: x[kept], one) for one in got])
        places.append(place[counts])
        if progress is not None:
            progress("reading the text", min(1.0, (at + rows) / len(windows.first)))
    place = np.concatenate(places)
    return [_summed(place, [part[i] for part in found]) for i in range(len(models))]


def _batch(text: np.ndarray, windows: Windows, part: slice, rows: int, window: int) -> tuple[Text, np.ndarray]:
    """Windows as right-padded rows, and the places of their tokens; rows beyond the last one count nothing."""
    first: Any
    length: Any
    start: Any
    first, length, start = (np.asarray(x[part], np.int32) for x in windows)
    missing = rows - len(first)
    first, start = np.pad(first, (0, missing)), np.pad(start, (0, missing), constant_values=1)
    length = np.pad(length, (0, missing), constant_values=1)
    place = first[:, None] + np.arange(window, dtype=np.int32)
    tokens: Any = text[np.minimum(place, len(text) - 1)]
    return Text(tokens, length, start), place


class _Said(NamedTuple):
    """Of every place of a window [B,T]."""

    logprob: Any
    kl: Any = None
    agrees: Any = None


@functools.partial(jax.jit, static_argnums=0)
def _measure(plan: Plan, params: tuple[Params, ...], text: Text) -> list[_Said]:
    def body(carry: None, logits: tuple[jax.Array, ...], place: jax.Array) -> Any:
        ids = jnp.take(text.tokens, place, axis=1, mode="clip")
        said = [_Said(logprob_of(logits[0], ids))]
        if len(logits) == 1:
            return carry, said
        law = jax.nn.log_softmax(logits[0], axis=-1)
        best = _best(logits[0])
        for other in logits[1:]:
            said.append(_Said(logprob_of(other, ids), _divergence(law, other), best == _best(other)))
        return carry, said

    return over_text(plan, params, text, body, None)


def _best(logits: jax.Array) -> jax.Array:
    flat = logits.reshape(-1, logits.shape[-1])
    return transforms.first_max(flat)[1].reshape(logits.shape[:-1])


def _divergence(law: jax.Array, logits: jax.Array) -> jax.Array:
    """sum p (log p - log q), of log p [...,V] and the logits of q."""
    gap = law - jax.nn.log_softmax(logits, axis=-1)
    return jnp.sum(jnp.where(jnp.isneginf(law), 0, jnp.exp(law) * gap), axis=-1)


def _summed(place: np.ndarray, parts: list[_Said]) -> Evaluation:
    logprob = np.concatenate([part.logprob for part in parts])
    mean = logprob.mean(dtype=np.float64)
    alone = Evaluation(len(place), float(np.exp(-mean)), None, None, Tokens(place, logprob))
    if parts[0].kl is None:
        return alone
    kl, agrees = (np.concatenate([getattr(part, name) for part in parts]) for name in ("kl", "agrees"))
    mean_kl, agreement = float(kl.mean(dtype=np.float64)), float(agrees.mean(dtype=np.float64))
    return alone._replace(kl=mean_kl, agreement=agreement, tokens=Tokens(place, logprob, kl, agrees))


@functools.lru_cache(maxsize=64)
def _beside(models: tuple[Model, ...]) -> Model:
    """Several models as one that gives a tuple of logits."""

    def init_cache(params: Params, batch_size: int, max_len: int) -> Cache:
        return tuple(model.init_cache(p, batch_size, max_len) for model, p in zip(models, params, strict=True))

    def apply(params: Params, tokens: jax.Array, cache: Cache, *, lengths: jax.Array | None = None) -> Any:
        each = zip(models, params, cache, strict=True)
        both = [model.apply(p, tokens, kept, lengths=lengths) for model, p, kept in each]
        return tuple(logits for logits, _ in both), tuple(kept for _, kept in both)

    return Model(init_cache, apply)
