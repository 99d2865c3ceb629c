"""From samples of a constrained law, drawn step by step, to samples of the model's own law given validity (S9.3)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxdecode import checks
from jaxdecode.base import Generated

__all__ = ["resample"]


def resample(key: jax.Array, generated: Generated) -> Generated:
    """K samples of each prompt, drawn again with replacement in proportion to ``exp(log_weight)``.

    ``generated`` is the result of a constraint with ``num_samples=K``; as K grows the law of each sample tends to the
    model's law conditioned on validity. Weights are used up: those of the result are their mean's logarithm, equal
    within a prompt, an estimate of the log probability that the model alone writes something valid. ValueError without
    weights, or where one is NaN (a greedy row, or a filter cut something).
    """
    weight = generated.log_weight
    if weight is None or weight.ndim != 2:
        raise ValueError(
            "resample: expected the result of a constraint with num_samples, got one without log_weight[B,K]"
        )
    if checks.is_concrete(weight):
        bad = bool(jnp.any(jnp.isnan(weight)))
        checks.require(not bad, "resample: log_weight", "weights of sampled rows, with no filter on", "NaN")
    batch, samples = weight.shape
    picked = jax.random.categorical(key, weight[:, None, :], axis=-1, shape=(batch, samples))
    rows = jnp.arange(batch)[:, None]
    again = jax.tree.map(lambda x: x[rows, picked], generated)
    mean = jax.nn.logsumexp(weight, axis=1, keepdims=True) - jnp.log(jnp.asarray(samples, weight.dtype))
    return dataclasses.replace(again, log_weight=jnp.broadcast_to(mean, weight.shape))
