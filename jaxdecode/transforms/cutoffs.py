"""Filters that compare each id with a threshold of the law: epsilon, eta, top-n-sigma, p-less; and typical.

Margins (S6.5). Let all logits move by at most e after temperature; ``tanh(e / 2)`` bounds what any probability moves.
So where the test of an id holds until its measure has moved by x, and it moves by at most k e, its margin is
``tanh(x / (2 k))``. k is 2 for log odds of an id, 4 for p-less, 2 + n for top-n-sigma. The entropy of n ids moves with
the spread of their surprise, whose variance is at most ``log(n)^2 / 4 + 1`` (Reeb and Wolf 2015, 1404.2224); so
surprise minus entropy moves by at most ``k e`` with ``k = 1 + sqrt(2 + log(n)^2 / 4)``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdecode import checks
from jaxdecode.transforms import search, select
from jaxdecode.transforms.core import Context, LogitsTransform, State, per_row

__all__ = ["Law", "epsilon", "eta", "law_of", "log_odds", "nearest", "p_less", "reach", "top_n_sigma", "typical_p"]


class Law(NamedTuple):
    """weight[B,V] (largest 1), total[B,1] of it, surprise[B,V] = -log p (inf if masked), entropy[B,1] in nats,
    best[B,V]: the first of the largest logits, support[B,1]: unmasked ids."""

    weight: jax.Array
    total: jax.Array
    surprise: jax.Array
    entropy: jax.Array
    best: jax.Array
    support: jax.Array


def law_of(logits: jax.Array) -> Law:
    """What the filters ask of a law; no gradients, all in O(V)."""
    logits = lax.stop_gradient(logits)
    weight = select.weights(logits)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    top, winner = select.first_max(logits)
    masked = jnp.isneginf(logits)
    below = jnp.where(masked, 0, top[:, None] - logits)
    log_total = jnp.log(jnp.where(total == 0, 1, total))
    entropy = log_total + jnp.sum(weight * below, axis=-1, keepdims=True) / jnp.where(total == 0, 1, total)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    count = jnp.sum(~masked, axis=-1, keepdims=True, dtype=jnp.int32)
    return Law(weight, total, jnp.where(masked, jnp.inf, log_total + below), entropy, ids == winner[:, None], count)


def log_odds(law: Law) -> jax.Array:
    """log(p / (1 - p)) [B,V]; it moves by at most 2 e."""
    rest = jnp.maximum(law.total - law.weight, jnp.finfo(law.weight.dtype).tiny)
    return jnp.log(law.total) - law.surprise - jnp.log(rest)


def reach(law: Law) -> jax.Array:
    """k [B,1] of surprise minus entropy."""
    return 1 + jnp.sqrt(2 + jnp.log(jnp.maximum(law.support, 1).astype(law.total.dtype)) ** 2 / 4)


def nearest(margin: jax.Array, passes: jax.Array, before: jax.Array, law: Law) -> jax.Array:
    """The margin [B] of a threshold that keeps the ids of ``passes[B,V]``, or the best id where none passes.

    ``margin[B,V]``: of each id's own test. The best id counts only where it is alone: else another that passes is
    nearer to the threshold. Alone, it stays until it fails its test and another has overtaken it.
    """
    low = jnp.isneginf(before)
    others = jnp.min(jnp.where(low | law.best, jnp.inf, margin), axis=-1)
    second = jnp.max(jnp.where(law.best, -jnp.inf, before), axis=-1)
    gap = jnp.tanh((jnp.max(before, axis=-1) - second) / 4)
    own = jnp.max(jnp.where(law.best & passes, margin, 0), axis=-1)
    alone = jnp.sum(passes & ~law.best, axis=-1, dtype=jnp.int32) == 0
    least = jnp.where(alone, jnp.minimum(others, jnp.maximum(own, gap)), others)
    return jnp.where(law.support[:, 0] <= 1, jnp.inf, least)


def _column(value: jax.Array, logits: jax.Array) -> jax.Array:
    return per_row(value, logits.shape[0], logits.dtype)[:, None]


def _cut(logits: jax.Array, keep: jax.Array, number: jax.Array) -> jax.Array:
    """Kept logits, -inf for the others; a row of NaN where the number is poisoned."""
    return jnp.where(jnp.isnan(number), jnp.nan, jnp.where(keep, logits, -jnp.inf))


# ---------------------------------------------------------------- epsilon
def _epsilon(e: jax.Array, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    e, law = _column(e, logits), law_of(logits)
    return _cut(logits, (law.weight >= e * law.total) | law.best | (e == 0), e)


def _epsilon_margin(
    e: jax.Array, before: jax.Array, after: jax.Array, ctx: Context, state: State
) -> tuple[jax.Array, jax.Array]:
    e, law = _column(e, before), law_of(before)
    distance = jnp.tanh(jnp.abs(log_odds(law) - _logit(e)) / 4)
    margin = nearest(distance, law.weight >= e * law.total, before, law)
    margin = jnp.where(e[:, 0] == 0, jnp.inf, margin)
    return margin, margin


def _logit(p: jax.Array) -> jax.Array:
    return jnp.log(p) - jnp.log1p(-p)


def epsilon(e: Any) -> LogitsTransform:
    """Keep ids of probability at least ``e`` (equality kept), or the most probable one if there is none. 0 is off.

    Hewitt et al. 2022 (2210.15191). ValueError unless 0 <= e < 1.

    >>> epsilon(0.2)(jnp.log(jnp.array([[0.5, 0.4, 0.1], [0.1, 0.1, 0.8]]))).argmin(axis=1).tolist()
    [2, 0]
    """
    e = checks.real(e, lambda x: (x >= 0) & (x < 1), "epsilon", "a number in [0, 1)")
    return LogitsTransform(e, "filter", _epsilon, margin_fn=_epsilon_margin)


# ---------------------------------------------------------------- eta
def _eta_tests(e: jax.Array, law: Law) -> tuple[jax.Array, jax.Array]:
    """Whether p >= e, and whether p >= sqrt(e) exp(-entropy): an id stays if either holds."""
    return law.weight >= e * law.total, law.surprise - law.entropy <= -jnp.log(e) / 2


def _eta(e: jax.Array, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    e, law = _column(e, logits), law_of(logits)
    one, two = _eta_tests(e, law)
    return _cut(logits, one | two | law.best | (e == 0), e)


def _eta_margin(
    e: jax.Array, before: jax.Array, after: jax.Array, ctx: Context, state: State
) -> tuple[jax.Array, jax.Array]:
    e, law = _column(e, before), law_of(before)
    one, two = _eta_tests(e, law)
    first = jnp.tanh(jnp.abs(log_odds(law) - _logit(e)) / 4)
    second = jnp.tanh(jnp.abs(law.surprise - law.entropy + jnp.log(e) / 2) / (2 * reach(law)))
    kept = jnp.maximum(jnp.where(one, first, 0), jnp.where(two, second, 0))  # leaves when both tests fail
    distance = jnp.where(one | two, kept, jnp.minimum(first, second))
    margin = jnp.where(e[:, 0] == 0, jnp.inf, nearest(distance, one | two, before, law))
    return margin, margin


def eta(e: Any) -> LogitsTransform:
    """Keep ids of probability at least ``min(e, sqrt(e) exp(-entropy))``, or the most probable one. 0 is off.

    Hewitt et al. 2022 (2210.15191). ValueError unless 0 <= e < 1.

    >>> jnp.isneginf(eta(0.3)(jnp.log(jnp.array([[0.5, 0.4, 0.1], [0.1, 0.1, 0.8]])))).tolist()
    [[False, False, True], [True, True, False]]
    """
    e = checks.real(e, lambda x: (x >= 0) & (x < 1), "eta", "a number in [0, 1)")
    return LogitsTransform(e, "filter", _eta, margin_fn=_eta_margin)


# ---------------------------------------------------------------- top-n-sigma
def _above(n: jax.Array, logits: jax.Array) -> jax.Array:
    """How far each logit lies above max - n sigma, [B,V]."""
    logits = lax.stop_gradient(logits)
    masked = jnp.isneginf(logits)
    count = jnp.maximum(jnp.sum(~masked, axis=-1, keepdims=True, dtype=jnp.int32), 1).astype(logits.dtype)
    below = jnp.where(masked, 0, logits - jnp.max(logits, axis=-1, keepdims=True))
    centre = jnp.sum(below, axis=-1, keepdims=True) / count
    variance = jnp.sum(jnp.where(masked, 0, (below - centre) ** 2), axis=-1, keepdims=True) / count
    return jnp.where(masked, -jnp.inf, below + n * jnp.sqrt(variance))


def _sigma(n: jax.Array, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    n = _column(n, logits)
    return _cut(logits, (_above(n, logits) >= 0) | (n == 0) | law_of(logits).best, n)


def _sigma_margin(
    n: jax.Array, before: jax.Array, after: jax.Array, ctx: Context, state: State
) -> tuple[jax.Array, jax.Array]:
    # The maximum moves by at most e, and so does the standard deviation, a seminorm with sigma(d) <= max |d|.
    n, law = _column(n, before), law_of(before)
    above = _above(n, before)
    distance = jnp.tanh(jnp.abs(above) / (2 * (2 + n)))
    margin = jnp.min(jnp.where(jnp.isneginf(before) | law.best, jnp.inf, distance), axis=-1)
    margin = jnp.where(n[:, 0] == 0, jnp.inf, margin)
    return margin, margin


def top_n_sigma(n: Any) -> LogitsTransform:
    """Keep logits of at least ``max - n sigma``, sigma the standard deviation of the unmasked ones. 0 is off.

    The set does not depend on the temperature. Tang et al. 2024 (2411.07641). ValueError unless 0 <= n < inf.

    >>> top_n_sigma(1.0)(jnp.array([[4.0, 3.0, -1.0], [0.0, 0.0, 0.0]])).tolist()
    [[4.0, 3.0, -inf], [0.0, 0.0, 0.0]]
    """
    n = checks.real(n, lambda x: (x >= 0) & (x < np.inf), "top_n_sigma", "a finite number >= 0")
    return LogitsTransform(n, "filter", _sigma, margin_fn=_sigma_margin)


# ---------------------------------------------------------------- p-less
def _p_less(on: jax.Array, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    on, law = per_row(on, logits.shape[0], jnp.int32)[:, None], law_of(logits)
    squares = jnp.sum(law.weight**2, axis=-1, keepdims=True)
    keep = (law.weight * law.total >= squares) | law.best | (on == 0)  # exact for a flat law: its weights are 1
    return jnp.where(on < 0, jnp.nan, jnp.where(keep, logits, -jnp.inf))


def _p_less_margin(
    on: jax.Array, before: jax.Array, after: jax.Array, ctx: Context, state: State
) -> tuple[jax.Array, jax.Array]:
    law = law_of(before)
    squares = jnp.sum(law.weight**2, axis=-1, keepdims=True)
    distance = jnp.abs(jnp.log(law.total) - law.surprise + jnp.log(law.total) - jnp.log(squares))
    margin = jnp.min(jnp.where(jnp.isneginf(before) | law.best, jnp.inf, jnp.tanh(distance / 8)), axis=-1)
    margin = jnp.where(per_row(on, before.shape[0], jnp.int32) == 0, jnp.inf, margin)
    return margin, margin


def p_less(on: Any = 1) -> LogitsTransform:
    """Keep ids whose probability is at least ``sum p^2``, the chance that two draws agree. 1 is on, 0 off.

    Tan et al. 2025 (2509.23234). ValueError for any other number.

    >>> p_less()(jnp.log(jnp.array([[0.4, 0.4, 0.2], [0.7, 0.2, 0.1]]))).argmin(axis=1).tolist()
    [2, 1]
    """
    if isinstance(on, (bool, np.bool_)):
        on = int(on)
    on = checks.whole(on, lambda x: (x == 0) | (x == 1), "p_less", "0 or 1")
    return LogitsTransform(on, "filter", _p_less, margin_fn=_p_less_margin)


# ---------------------------------------------------------------- typical
def _deviation(law: Law) -> jax.Array:
    return jnp.abs(law.surprise - law.entropy)


def _typical(p: jax.Array, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    p, law = per_row(p, logits.shape[0], logits.dtype), law_of(logits)
    needed = p * law.total[:, 0]
    order = -_deviation(law)
    last = search.last_kept(order, law.weight, needed)[:, None]
    near, tied = order > last, order == last
    # Ids that tie may lie on both sides of the entropy, with unequal masses: among them the order of ids decides.
    missing = needed - jnp.sum(jnp.where(near, law.weight, 0), axis=-1)
    tied &= select.keep_first(jnp.where(tied, logits, -jnp.inf), jnp.where(tied, law.weight, 0), missing)
    return _cut(logits, near | tied | (p >= 1)[:, None], p[:, None])


def _typical_margin(
    p: jax.Array, before: jax.Array, after: jax.Array, ctx: Context, state: State
) -> tuple[jax.Array, jax.Array]:
    p, law = per_row(p, before.shape[0], before.dtype), law_of(before)
    kept, deviation = after > -jnp.inf, _deviation(law)
    removed = (before > -jnp.inf) & ~kept
    share = law.weight / law.total
    mass = jnp.sum(jnp.where(kept, share, 0), axis=-1, keepdims=True)
    far = jnp.max(jnp.where(kept, deviation, -jnp.inf), axis=-1, keepdims=True)
    k = 4 * reach(law)  # two ids change places when both have moved
    # The kept ids without their last one must stay below p, whichever may have become the last.
    last = jnp.maximum(p[:, None] - (mass - share), jnp.tanh((far - deviation) / k))
    inner = jnp.min(jnp.where(kept, last, jnp.inf), axis=-1)
    gap = jnp.min(jnp.where(removed, deviation, jnp.inf), axis=-1) - far[:, 0]
    outer = jnp.minimum(mass[:, 0] - p, jnp.tanh(gap / k[:, 0]))
    margin = jnp.maximum(jnp.where(jnp.any(removed, axis=-1), jnp.minimum(inner, outer), inner), 0)
    margin = jnp.where((p >= 1) | (law.support[:, 0] <= 1), jnp.inf, margin)
    return margin, margin


def typical_p(p: Any) -> LogitsTransform:
    """Keep the fewest ids of mass >= ``p``, those whose surprise is nearest to the entropy first. 1 is off.

    Of ids equally near the more probable comes first, then the lower id. The most probable id may go. In float32 the
    order is that of surprises and entropies as rounded. Meister et al. 2022 (2202.00666). ValueError unless 0 < p <= 1.

    >>> typical_p(0.3)(jnp.log(jnp.array([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]))).argmax(axis=1).tolist()
    [1, 1]
    """
    p = checks.real(p, lambda x: (x > 0) & (x <= 1), "typical_p", "a number in (0, 1]")
    return LogitsTransform(p, "filter", _typical, margin_fn=_typical_margin)
