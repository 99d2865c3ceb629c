"""The decoder-only transformer, as pure functions: one model for every family, whose switches are static.

Params: ``{"embed": [V,D], "layers": ({"attn_norm": [D], "qkv": [(H+2K)h, D], "out": [D, Hh], "mlp_norm": [D],
"gate_up": [2F, D], "down": [D, F]}, ...), "norm": [D]}``, and ``"head": [V,D]`` unless it is tied to the embedding.
Where the config says so, a layer has ``"qkv_bias": [(H+2K)h]``, ``"q_norm": [h]``, ``"k_norm": [h]`` and others:
``param_shapes`` lists them. Query and key rows follow the rotate-half convention. Activations are feature-major:
[D, B*S], row b's tokens side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxdecode import checks, kvcache, linear
from jaxdecode.arithmetic import PLAIN, Arithmetic
from jaxdecode.base import Model, Params
from jaxdecode.models.config import TransformerConfig, init_params, param_shapes
from jaxdecode.models.layers import Angles, angles, layer, norm
from jaxdecode.models.scaling import DynamicScaling, LongRope, RopeScaling, Scaling, YarnScaling, frequencies

__all__ = [
    "CACHE_DTYPES",
    "DynamicScaling",
    "Layerwise",
    "LongRope",
    "RopeScaling",
    "Scaling",
    "TransformerConfig",
    "WINDOW_SLACK",
    "YarnScaling",
    "frequencies",
    "init_params",
    "layerwise",
    "param_shapes",
    "transformer",
]


CACHE_DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")
WINDOW_SLACK = 64

# Traced once for all layers, and lowered once where the program may call it: XLA:CPU of jax 0.10.1 has no product of
# narrow floats in a called function.
_one_of_many = jax.jit(layer, static_argnums=(0, 6))
_one_inlined = jax.jit(layer, static_argnums=(0, 6), inline=True)


def _embedded(
    config: TransformerConfig, params: Params, tokens: jax.Array, position: jax.Array, arithmetic: Arithmetic = PLAIN
) -> jax.Array:
    """Embeddings [D, B*S] of tokens[B,S] at ``position[B,S]``."""
    x = linear.embed(params["embed"], tokens.reshape(-1))
    if config.embed_scale is not None:
        x = x * config.embed_scale
    x = arithmetic.product(x)
    return x + linear.embed(params["positions"], position.reshape(-1)) if config.positions == "learned" else x


def _turns(config: TransformerConfig, position: jax.Array, dtype: DTypeLike) -> tuple[Angles | None, Angles | None]:
    """The rotary angles of layers without a window, and of those with one."""
    if config.positions == "learned":
        return None, None
    plain = angles(config, position, dtype)
    return plain, plain if config.local_rope_theta is None else angles(config, position, dtype, local=True)


def _head(
    config: TransformerConfig,
    params: Params,
    x: jax.Array,
    at: jax.Array | None,
    batch: int,
    arithmetic: Arithmetic = PLAIN,
) -> jax.Array:
    """Logits [B,K,V] of the positions ``at[B,K]`` of x[D, B*S]."""
    size = x.shape[1] // batch
    if at is None:
        picked, count = x, size
    else:
        count = at.shape[1]
        flat = at + jnp.arange(batch, dtype=at.dtype)[:, None] * size
        picked = jnp.take(x, flat.reshape(-1), axis=1) if (size, count) != (1, 1) else x
    normed = norm(config, params, "norm", picked, arithmetic)
    wide = np.promote_types(x.dtype, np.float32)
    logits = linear.matmul(params["embed"] if config.tied else params["head"], normed, wide)
    # XLA:CPU would draw the transposition into the product, which is then 10 times slower for 2 to 7 columns.
    logits = arithmetic.capped(jax.lax.optimization_barrier(logits), config.logit_softcap)
    return logits.T.reshape(batch, count, config.vocab_size)


def transformer(
    config: TransformerConfig,
    *,
    cache_dtype: DTypeLike | None = None,
    window_slack: int = WINDOW_SLACK,
    arithmetic: Arithmetic = PLAIN,
) -> Model:
    """The model of ``config``; equal arguments give the same object.

    cache_dtype: of the KV cache: that of the params, or any float, or int8, with a scale for each token and KV head, or
    int4, with one for every 32 features of these. window_slack: most tokens that may be cut off a sliding window's end
    again, as speculation does: it costs as many slots a layer. arithmetic: ``jaxdecode.arithmetic.STEADY`` keeps
    last bits of float sums and products from hanging on shapes, for models that round activations. ValueError:
    another type.
    """
    kind = None if cache_dtype is None else checks.dtype("cache_dtype", cache_dtype, CACHE_DTYPES)
    ok = isinstance(window_slack, int) and window_slack >= 0
    checks.require(ok, "window_slack", "a whole number >= 0", window_slack)
    known = isinstance(arithmetic, Arithmetic)
    checks.require(known, "arithmetic", "PLAIN or STEADY of jaxdecode.arithmetic", arithmetic)
    return _transformer(config, kind, window_slack, arithmetic)


@functools.lru_cache(maxsize=256)
def _transformer(
    config: TransformerConfig, cache_dtype: str | None, window_slack: int, arithmetic: Arithmetic
) -> Model:
    windows = config.windows(window_slack)

    def init_cache(params: Params, batch_size: int, max_len: int) -> kvcache.KVCache:
        expected = f"at most the context of {config.context_length} tokens"
        if isinstance(config.rope_scaling, LongRope | DynamicScaling):
            expected += " (for more, load it with context_length=)"
        checks.require(max_len <= config.context_length, "max_len", expected, max_len)
        dtype = params["embed"].dtype
        shape = (config.n_layers, batch_size, config.n_kv_heads, config.head_dim, max_len)
        return kvcache.create(*shape, dtype if cache_dtype is None else jnp.dtype(cache_dtype), windows)

    def apply(
        params: Params,
        tokens: jax.Array,
        cache: kvcache.KVCache,
        *,
        lengths: jax.Array | None = None,
        logits_at: jax.Array | None = None,
    ) -> tuple[jax.Array, kvcache.KVCache]:
        batch, size = tokens.shape
        plan = kvcache.plan(cache, size, lengths)
        x = _embedded(config, params, tokens, plan.position, arithmetic)
        plain, local = _turns(config, plan.position, x.dtype)
        layers, one = [], _one_inlined if x.dtype.itemsize < 4 else _one_of_many
        for i, weights in enumerate(params["layers"]):
            turn = plain if windows[i] is None else local
            x, new = one(config, weights, x, kvcache.one_layer(cache, i), plan, turn, arithmetic)
            layers.append(new)
        logits = _head(config, params, x, logits_at, batch, arithmetic)
        return logits, kvcache.advance(cache, layers, plan)

    return Model(init_cache, apply)


class Layerwise(NamedTuple):
    """A transformer over whole texts, a layer at a time: ``embed(params, tokens[B,S]) -> x[D, B*S]``, then
    ``layer(i, params["layers"][i], x, batch) -> x`` for every i, then ``head(params, x, batch) -> logits[B,S,V]``.
    """

    embed: Callable[[Params, jax.Array], jax.Array]
    layer: Callable[[int, Params, jax.Array, int], jax.Array]
    head: Callable[[Params, jax.Array, int], jax.Array]


@functools.lru_cache(maxsize=256)
def layerwise(config: TransformerConfig) -> Layerwise:
    """The model of ``config`` in parts, for who must see or change what passes between layers."""
    windows = config.windows(0)

    def embed(params: Params, tokens: jax.Array) -> jax.Array:
        position = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        return _embedded(config, params, tokens, position)

    def one(i: int, params: Params, x: jax.Array, batch: int) -> jax.Array:
        size = x.shape[1] // batch
        shape = (1, batch, config.n_kv_heads, config.head_dim, size)
        cache = kvcache.create(*shape, x.dtype, windows[i : i + 1])
        plan = kvcache.plan(cache, size)
        turn = _turns(config, plan.position, x.dtype)[0 if windows[i] is None else 1]
        return layer(config, params, x, kvcache.one_layer(cache, 0), plan, turn)[0]

    def head(params: Params, x: jax.Array, batch: int) -> jax.Array:
        return _head(config, params, x, None, batch)

    return Layerwise(embed, one, head)
