"""Temperature and the truncation filters, as transforms.

Numbers are scalars or one per row [B], concrete or traced. A concrete number out of range raises; a traced one ends its
row as ``invalid``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks
from jaxdecode.transforms import select
from jaxdecode.transforms.core import Context, LogitsTransform, State, per_row

__all__ = ["min_p", "temperature", "top_k", "top_p"]

TINY = float(np.finfo(np.float32).tiny)


def _setting(value: jax.Array, logits: jax.Array) -> jax.Array:
    return per_row(value, logits.shape[0], logits.dtype)


def _temperature(tau: jax.Array, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    return select.rescale(logits, _setting(tau, logits))


def _temperature_margin(
    tau: jax.Array, before: jax.Array, after: jax.Array, ctx: Context, state: State
) -> tuple[jax.Array, jax.Array]:
    """Scaling decides nothing; the mask of temperature 0 does, by a gap that nobody has measured here: unknown."""
    margin = jnp.where(_setting(tau, before) == 0, jnp.nan, jnp.inf).astype(before.dtype)
    return margin, margin


def temperature(tau: Any) -> LogitsTransform:
    """Divide by ``tau`` > 0, as ``(z - max z) / tau``; ``tau = 0`` masks all but the arg max (lowest id of equals).

    ValueError if negative, not finite, or positive but below float32's normal range.

    >>> import jax.numpy as jnp
    >>> temperature(2.0)(jnp.array([[1.0, 3.0], [0.0, 0.0]])).tolist()
    [[-1.0, 0.0], [0.0, 0.0]]
    """
    tau = checks.real(
        tau,
        lambda t: (t == 0) | ((t >= TINY) & (t < np.inf)),
        "temperature",
        "0 or a finite number in float32's normal range",
    )
    return LogitsTransform(tau, "scale", _temperature, margin_fn=_temperature_margin)


def _cut_top_k(
    k: jax.Array, logits: jax.Array, ctx: Context, state: State
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    k = per_row(k, logits.shape[0], jnp.int32)
    after, cut = select.cut_top_k(logits, k)
    top, total = jnp.max(logits, axis=-1), jnp.sum(select.weights(logits), axis=-1)
    nothing = jnp.isneginf(cut.removed) | (k == 0)
    token = (jnp.exp(cut.last - top) - jnp.exp(cut.removed - top)) / (2 * total)
    gap = jnp.tanh((cut.last - cut.removed) / 4)
    return after, (jnp.where(nothing, jnp.inf, token), jnp.where(nothing, jnp.inf, gap))


def _top_k(k: jax.Array, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    return _cut_top_k(k, logits, ctx, state)[0]


def top_k(k: Any) -> LogitsTransform:
    """Keep the first ``k`` ids: exactly min(k, unmasked ids); of equal logits the lower ids stay. 0 is off.

    ValueError if negative. (Hugging Face keeps every id that ties with the k-th.)

    >>> import jax.numpy as jnp
    >>> top_k(1)(jnp.array([[1.0, 1.0], [0.0, 2.0]])).tolist()
    [[1.0, -inf], [-inf, 2.0]]
    """
    k = checks.whole(k, lambda n: n >= 0, "top_k", "a whole number >= 0")
    return LogitsTransform(k, "filter", _top_k, cut_fn=_cut_top_k)


def _cut_top_p(
    p: jax.Array, logits: jax.Array, ctx: Context, state: State
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    p = _setting(p, logits)
    after, cut, total = select.cut_top_p(logits, p)
    last, mass = cut.each / total, cut.mass / total
    # c_{k-1} counts even where nothing was removed: a little more mass there and the last id goes.
    margin = p - (mass - last)
    half = (last - jnp.exp(cut.removed - jnp.max(logits, axis=-1)) / total) / 2
    least = jnp.minimum(margin, jnp.minimum(mass - p, half))
    nothing = jnp.isneginf(cut.removed)
    margin = jnp.maximum(jnp.where(nothing, margin, least), 0)
    margin = jnp.where((p >= 1) | (nothing & cut.one), jnp.inf, margin)
    return after, (margin, margin)


def _top_p(p: jax.Array, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    return _cut_top_p(p, logits, ctx, state)[0]


def top_p(p: Any) -> LogitsTransform:
    """Keep the smallest prefix of the order of ids whose mass is >= ``p``; the crossing id is kept. 1 is off.

    Holtzman et al. 2020 (1904.09751). In float32 the kept set is that of an exact ``p'`` with ``|p' - p| <= 2^-16``.
    ValueError unless 0 < p <= 1.

    >>> import jax.numpy as jnp
    >>> jnp.isfinite(top_p(0.6)(jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.2, 0.1, 0.7]])))).tolist()
    [[True, True, False], [False, False, True]]
    """
    p = checks.real(p, lambda x: (x > 0) & (x <= 1), "top_p", "a number in (0, 1]")
    return LogitsTransform(p, "filter", _top_p, cut_fn=_cut_top_p)


def _min_p(p: jax.Array, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    return select.mask_min_p(logits, _setting(p, logits))


def _min_p_margin(
    p: jax.Array, before: jax.Array, after: jax.Array, ctx: Context, state: State
) -> tuple[jax.Array, jax.Array]:
    # A ratio moves by at most exp(2 eps / tau), a probability by tanh(eps / (2 tau)): tanh(x / 4) puts a log ratio x
    # on the scale of probabilities. Kept ids count too: the least likely of them may fall below the line.
    p = _setting(p, before)
    shifted = before - jnp.max(before, axis=-1, keepdims=True)
    distance = jnp.abs(shifted - jnp.log(p)[:, None])
    ids = jax.lax.broadcasted_iota(jnp.int32, before.shape, 1)
    always = ids == select.first_max(before)[1][:, None]  # the largest passes its own test
    nearest = jnp.min(jnp.where(jnp.isneginf(before) | always, jnp.inf, distance), axis=-1)
    margin = jnp.where((p == 0) | jnp.isinf(nearest), jnp.inf, jnp.tanh(nearest / 4))
    return margin, margin


def min_p(p: Any) -> LogitsTransform:
    """Keep ids whose probability is at least ``p`` times the largest (equality kept); 0 is off; 2407.01082.

    ValueError unless 0 <= p <= 1.

    >>> import jax.numpy as jnp
    >>> min_p(0.5)(jnp.array([[0.0, 0.0, -1.0], [-9.0, 0.0, -0.5]])).tolist()
    [[0.0, 0.0, -inf], [-inf, 0.0, -0.5]]
    """
    p = checks.real(p, lambda x: (x >= 0) & (x <= 1), "min_p", "a number in [0, 1]")
    return LogitsTransform(p, "filter", _min_p, margin_fn=_min_p_margin)
