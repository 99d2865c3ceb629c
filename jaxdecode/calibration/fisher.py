"""How much the laws of a model change with the outputs of each of its products: their Fisher information.

Where g is the gradient of the log probability of tokens that the model itself draws to one column of a product, the
mean of g g^T [N,N] tells what an error there costs: of errors d the KL divergence is d (mean of g g^T) d / 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode.base import Model, Params
from jaxdecode.observed import output_moments

__all__ = ["output_information"]

LARGEST = 1024  # rows of a matrix; those of more are hidden units, which hang together little


def output_information(
    model: Model,
    params: Params,
    tokens: np.ndarray,
    key: jax.Array,
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, np.ndarray]:
    """The mean of g g^T [N,N] over all tokens [B,S] for every matrix of at most 1,024 rows, by name ("layers.0.out").

    progress: called before every window, with a text and the fraction that is done.
    """
    total: dict[str, np.ndarray] = {}
    for i, row in enumerate(tokens):
        if progress is not None:
            progress(f"weighing outputs: window {i + 1} of {len(tokens)}", i / len(tokens))
        seen = _seen(model, params, row[None], jax.random.fold_in(key, i))
        for path, moment in jax.tree_util.tree_leaves_with_path(seen):
            name = ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
            total[name] = total.get(name, np.float32(0)) + np.asarray(moment) / np.float32(tokens.size)
    return {name: moment for name, moment in total.items() if moment.any()}


@functools.partial(jax.jit, static_argnums=0)
def _seen(model: Model, params: Params, row: jax.Array, key: jax.Array) -> Params:
    def surprise(params: Params) -> jax.Array:
        logits = model.apply(params, row, model.init_cache(params, *row.shape))[0]
        law = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        drawn = jax.random.categorical(key, jax.lax.stop_gradient(law), axis=-1)
        return -jnp.sum(jnp.take_along_axis(law, drawn[..., None], axis=-1))

    return output_moments(surprise, params, largest=LARGEST)
