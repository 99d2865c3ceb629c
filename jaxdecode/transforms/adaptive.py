"""Filters and scales with more than one number: dynamic temperature, XTC (a coin per token), mirostat (a state)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks, keys
from jaxdecode.transforms import select
from jaxdecode.transforms.core import Context, LogitsTransform, State, per_row
from jaxdecode.transforms.cutoffs import law_of, log_odds, nearest

__all__ = ["dynamic_temperature", "mirostat", "xtc"]

TINY = float(np.finfo(np.float32).tiny)


def _row(value: Any, logits: jax.Array) -> jax.Array:
    return per_row(value, logits.shape[0], logits.dtype)


# ---------------------------------------------------------------- dynamic temperature
def _dynamic(params: tuple[Any, ...], logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    tau, spread, exponent = (_row(x, logits) for x in params)
    masked = jnp.isneginf(logits)
    top = jnp.where(masked.all(axis=-1), 0, jax.lax.stop_gradient(jnp.max(logits, axis=-1)))[:, None]
    below = jnp.where(masked, 0, top - logits)
    weight = jnp.where(masked, 0, jnp.exp(-below))
    total = jnp.maximum(jnp.sum(weight, axis=-1), 1)
    entropy = jnp.log(total) + jnp.sum(weight * below, axis=-1) / total
    count = jnp.sum(~masked, axis=-1, dtype=jnp.int32)
    most = jnp.log(jnp.maximum(count, 2).astype(logits.dtype))
    share = jnp.clip(entropy / most, TINY, 1)  # of the largest entropy there could be
    low, high = jnp.maximum(tau - spread, 0), tau + spread
    scaled = low + (high - low) * share**exponent
    scaled = jnp.where(scaled < TINY, 0, scaled)  # the arg max
    scaled = jnp.where((spread == 0) | (tau == 0), tau, scaled)
    return select.rescale(logits, jnp.where(jnp.isnan(spread + exponent), jnp.nan, scaled))


def _dynamic_margin(
    params: tuple[Any, ...], before: jax.Array, after: jax.Array, ctx: Context, state: State
) -> tuple[jax.Array, jax.Array]:
    """The temperature moves with the logits, and no margin in probability says by how much: unknown where it is on."""
    tau, spread, _ = (_row(x, before) for x in params)
    margin = jnp.where((spread == 0) & (tau != 0), jnp.inf, jnp.nan).astype(before.dtype)
    return margin, margin


def dynamic_temperature(tau: Any, spread: Any, exponent: Any = 1.0) -> LogitsTransform:
    """Divide by a temperature between ``max(tau - spread, 0)`` and ``tau + spread`` that grows with the entropy.

    It is ``low + (high - low) * (entropy / log n) ** exponent``, the entropy that of the law at temperature 1 over its
    n unmasked ids. spread 0 is ``temperature(tau)``; so is tau 0. As in llama.cpp (pull request 4972) and
    text-generation-webui (5010). Margins are unknown (NaN) where it is on. ValueError unless spread >= 0, exponent > 0.

    >>> dynamic_temperature(1.0, 0.5)(jnp.array([[0.0, 0.0], [0.0, -1e9]])).tolist()
    [[0.0, 0.0], [0.0, -2000000000.0]]
    """
    tau = checks.real(
        tau,
        lambda t: (t == 0) | ((t >= TINY) & (t < np.inf)),
        "temperature",
        "0 or a finite number in float32's normal range",
    )
    what = "dynamic_temperature"
    spread = checks.real(spread, lambda x: (x >= 0) & (x < np.inf), f"{what} spread", "a finite number >= 0")
    exponent = checks.real(exponent, lambda x: (x > 0) & (x < np.inf), f"{what} exponent", "a finite number > 0")
    return LogitsTransform((tau, spread, exponent), "scale", _dynamic, margin_fn=_dynamic_margin)


# ---------------------------------------------------------------- XTC
def _excluded(params: tuple[Any, Any], logits: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
    """top[B,V]: ids of at least the threshold; least[B,V]: the last of them; coin[B]: whether it falls."""
    probability, threshold = (_row(x, logits) for x in params)
    law = law_of(logits)
    top = (law.weight >= threshold[:, None] * law.total) & (logits > -jnp.inf)
    lowest = jnp.min(jnp.where(top, logits, jnp.inf), axis=-1, keepdims=True)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    last = jnp.max(jnp.where(top & (logits == lowest), ids, -1), axis=-1, keepdims=True)
    coin = keys.uniform(ctx.key, ctx.length, keys.Stream.XTC, logits.dtype) < probability
    return top, ids == last, coin


def _xtc(params: tuple[Any, Any], logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    top, least, coin = _excluded(params, logits, ctx)
    bad = jnp.isnan(_row(params[0], logits) + _row(params[1], logits))
    out = jnp.where(coin[:, None] & top & ~least, -jnp.inf, logits)
    return jnp.where(bad[:, None], jnp.nan, out)


def _xtc_margin(
    params: tuple[Any, Any], before: jax.Array, after: jax.Array, ctx: Context, state: State
) -> tuple[jax.Array, jax.Array]:
    """Distances of all ids to the threshold, and of the one that stays to the next above it; the coin is no logit."""
    top, least, coin = _excluded(params, before, ctx)
    threshold, law = _row(params[1], before)[:, None], law_of(before)
    distance = jnp.abs(log_odds(law) - jnp.log(threshold) + jnp.log1p(-threshold))
    near = jnp.min(jnp.where(jnp.isneginf(before), jnp.inf, distance), axis=-1)
    lowest = jnp.min(jnp.where(top, before, jnp.inf), axis=-1)
    gap = jnp.min(jnp.where(top & ~least, before, jnp.inf), axis=-1) - lowest
    gap = jnp.where(jnp.any(top & ~least, axis=-1), gap, jnp.inf)
    margin = jnp.tanh(jnp.minimum(near, gap) / 4)
    margin = jnp.where(coin & (law.support[:, 0] > 1), margin, jnp.inf)
    return margin, margin


def xtc(probability: Any, threshold: Any) -> LogitsTransform:
    """With this probability, at each token, remove all but the last of the ids with probability >= ``threshold``.

    The last: the least probable, of equals the highest id. Where fewer than two reach the threshold nothing happens.
    The coin is stream 4 of the row's key at this position. probability 0 is off. "Exclude top choices",
    text-generation-webui pull request 6335. ValueError unless 0 <= probability <= 1 and 0 < threshold <= 1.

    >>> xtc(1.0, 0.2)(jnp.log(jnp.array([[0.5, 0.4, 0.1], [0.1, 0.1, 0.8]]))).argmax(axis=1).tolist()
    [1, 2]
    """
    probability = checks.real(probability, lambda x: (x >= 0) & (x <= 1), "xtc probability", "a number in [0, 1]")
    threshold = checks.real(threshold, lambda x: (x > 0) & (x <= 1), "xtc threshold", "a number in (0, 1]")
    return LogitsTransform((probability, threshold), "filter", _xtc, margin_fn=_xtc_margin)


# ---------------------------------------------------------------- mirostat
def _mirostat_init(params: tuple[Any, Any], ctx: Context) -> tuple[jax.Array, jax.Array]:
    """mu[B] in bits, and how many tokens have moved it."""
    rows, wide = ctx.length.shape[0], jnp.result_type(float)
    return 2 * per_row(params[0], rows, wide), jnp.zeros((rows,), jnp.int32)


def _mirostat(params: tuple[Any, Any], logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    tau, law = _row(params[0], logits)[:, None], law_of(logits)
    mu = state[0].astype(logits.dtype)[:, None] * math.log(2)
    keep = (law.surprise <= mu) | law.best | (tau == 0)
    bad = jnp.isnan(tau + _row(params[1], logits)[:, None])
    return jnp.where(bad, jnp.nan, jnp.where(keep, logits, -jnp.inf))


def _mirostat_advance(params: tuple[Any, Any], state: State, token: jax.Array, logprob: jax.Array) -> State:
    mu, count = state
    tau, rate = (per_row(x, mu.shape[0], mu.dtype) for x in params)
    surprise = jax.lax.stop_gradient(-logprob).astype(mu.dtype) / math.log(2)
    return mu - rate * (surprise - tau), count + 1


def _mirostat_margin(
    params: tuple[Any, Any], before: jax.Array, after: jax.Array, ctx: Context, state: State
) -> tuple[jax.Array, jax.Array]:
    # mu has taken rate times a log probability of every token so far, each of which moves by at most 2 e as well.
    law = law_of(before)
    mu, rate = state[0].astype(before.dtype)[:, None] * math.log(2), _row(params[1], before)
    moved = 2 * (1 + rate * state[1].astype(before.dtype))
    distance = jnp.tanh(jnp.abs(law.surprise - mu) / (2 * moved[:, None]))
    margin = nearest(distance, law.surprise <= mu, before, law)
    margin = jnp.where(_row(params[0], before) == 0, jnp.inf, margin)
    return margin, margin


def mirostat(tau: Any, rate: Any) -> LogitsTransform:
    """Mirostat 2: keep ids whose surprise ``-log2 p`` is at most mu, or the most probable one; mu follows the text.

    mu starts at ``2 tau`` and after each token moves by ``-rate * (surprise - tau)``, the surprise that of the token
    under the law it was drawn from: bits. tau 0 is off. It replaces the other filters. Basu et al. 2020 (2007.14966)
    and its authors' second version. ValueError unless tau >= 0 and 0 <= rate <= 1.

    >>> mirostat(1.0, 0.1)(jnp.log(jnp.array([[0.5, 0.3, 0.2], [0.2, 0.7, 0.1]]))).argmin(axis=1).tolist()
    [2, 0]
    """
    tau = checks.real(tau, lambda x: (x >= 0) & (x < np.inf), "mirostat tau", "a finite number >= 0")
    rate = checks.real(rate, lambda x: (x >= 0) & (x <= 1), "mirostat rate", "a number in [0, 1]")
    return LogitsTransform((tau, rate), "filter", _mirostat, _mirostat_init, _mirostat_advance, _mirostat_margin)
