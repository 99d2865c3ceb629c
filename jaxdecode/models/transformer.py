"""The decoder-only transformer, as pure functions: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Params: ``{"embed": [V,D], "layers": ({"attn_norm": [D], "qkv": [(H+2K)h, D], "out": [D, Hh], "mlp_norm": [D],
"gate_up": [2F, D], "down": [D, F]}, ...), "norm": [D]}``, and ``"head": [V,D]`` unless it is tied to the embedding.
Where the config says so, a layer has ``"qkv_bias": [(H+2K)h]``, and ``"q_norm": [h]`` and ``"k_norm": [h]`` too. Query
and key rows follow the rotate-half convention. Activations are feature-major: [D, B*S], row b's tokens side by
side.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxdecode import checks, kvcache, linear
from jaxdecode.base import Model, Params

__all__ = [
    "CACHE_DTYPES",
    "Layerwise",
    "RopeScaling",
    "TransformerConfig",
    "WINDOW_SLACK",
    "frequencies",
    "init_params",
    "layerwise",
    "param_shapes",
    "transformer",
]


CACHE_DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")
WINDOW_SLACK = 64


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rotary scaling of Llama 3.1: slow frequencies divided by ``factor``, fast ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Static shape of a llama-family model; ``rope_freqs`` (h/2 divisors) as some GGUF files give them.

    sliding_window: tokens that a query sees, its own included: one number for all layers, or one a layer; None: all.
    attention_sinks: of layers with a window, the first tokens that every query sees too. qkv_bias: queries, keys and
    values have a bias. qk_norm: every head's queries and keys are normed (RMSNorm) before they are turned.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_mlp: int
    context_length: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_freqs: tuple[float, ...] | None = None
    tied: bool = True
    sliding_window: int | tuple[int | None, ...] | None = None
    attention_sinks: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "d_model",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "d_mlp",
            "context_length",
        ):
            checks.require(getattr(self, name) >= 1, name, "a positive whole number", getattr(self, name))
        checks.require(self.n_heads % self.n_kv_heads == 0, "n_heads", "a multiple of n_kv_heads", self.n_heads)
        checks.require(self.head_dim % 2 == 0, "head_dim", "an even number (rotary pairs)", self.head_dim)
        freqs = self.rope_freqs
        checks.require(freqs is None or len(freqs) == self.head_dim // 2, "rope_freqs", "head_dim / 2 numbers", freqs)
        window = self.sliding_window
        sizes = window if isinstance(window, tuple) else (window,)
        ok = not isinstance(window, tuple) or len(window) == self.n_layers
        ok = ok and all(size is None or size >= 1 for size in sizes)
        checks.require(ok, "sliding_window", "a positive whole number, or one or None a layer", window)
        checks.require(self.attention_sinks >= 0, "attention_sinks", "a whole number >= 0", self.attention_sinks)

    def windows(self, slack: int) -> tuple[kvcache.Window | None, ...]:
        """What the cache is told of each layer."""
        window, sinks = self.sliding_window, self.attention_sinks
        sizes = window if isinstance(window, tuple) else (window,) * self.n_layers
        return tuple(None if size is None else kvcache.Window(size, slack, sinks) for size in sizes)


def param_shapes(config: TransformerConfig) -> dict[str, Any]:
    """The pytree of params with a shape at each leaf."""
    d, h, f = config.d_model, config.head_dim, config.d_mlp
    rows = (config.n_heads + 2 * config.n_kv_heads) * h
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (d,),
        "qkv": (rows, d),
        "out": (d, config.n_heads * h),
        "mlp_norm": (d,),
        "gate_up": (2 * f, d),
        "down": (d, f),
    }
    if config.qkv_bias:
        layer["qkv_bias"] = (rows,)
    if config.qk_norm:
        layer |= {"q_norm": (h,), "k_norm": (h,)}
    shapes = {"embed": (config.vocab_size, d), "layers": (layer,) * config.n_layers, "norm": (d,)}
    return shapes if config.tied else {**shapes, "head": (config.vocab_size, d)}


def init_params(config: TransformerConfig, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random params: normal with variance 1 / inputs, norms 1, biases 0."""
    shapes, tree = jax.tree_util.tree_flatten_with_path(
        param_shapes(config), is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int)
    )
    keys = jax.random.split(key, len(shapes))

    def leaf(name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        if len(shape) == 1:
            return jnp.full(shape, 0 if "bias" in name else 1, dtype)
        return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[1] ** -0.5, dtype)

    leaves = [leaf(jax.tree_util.keystr(path), shape, k) for (path, shape), k in zip(shapes, keys, strict=True)]
    return jax.tree.unflatten(tree, leaves)


def frequencies(config: TransformerConfig) -> np.ndarray:
    """Rotary angles per position, [h/2], float64."""
    inverse = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    if config.rope_freqs is not None:
        inverse = inverse / np.asarray(config.rope_freqs, np.float64)
    if (scaling := config.rope_scaling) is not None:
        turns = scaling.original_context * inverse / (2 * math.pi)  # full turns within the original context
        ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        ramp = np.clip(ramp, 0, 1)
        inverse = inverse * ramp + inverse / scaling.factor * (1 - ramp)
    return inverse


def _norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the features of x[D,R], in float32 or wider."""
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=0, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale[:, None]


def _norm_heads(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the features of every head of x[heads, h, R]."""
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale[None, :, None]


def _angles(config: TransformerConfig, position: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """cos and sin [h/2, B*S] of position[B,S]."""
    wide = np.promote_types(dtype, np.float32)
    angle = jnp.asarray(frequencies(config), wide)[:, None] * position.reshape(1, -1).astype(wide)
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary positions on x[heads, h, B*S]: feature i turns with feature i + h/2."""
    halves = x.astype(cos.dtype).reshape(x.shape[0], 2, *cos.shape)
    turned = jnp.flip(halves, 1) * jnp.stack([-sin, sin])[None]
    return (halves * cos[None, None] + turned).reshape(x.shape).astype(x.dtype)


def _attention(
    config: TransformerConfig,
    params: Params,
    x: jax.Array,
    past: kvcache.KVCache,
    plan: kvcache.Plan,
    angles: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, kvcache.Layer]:
    heads, kv, h = config.n_heads, config.n_kv_heads, config.head_dim
    batch, size = plan.position.shape
    qkv = linear.matmul(params["qkv"], x)
    if config.qkv_bias:
        qkv = qkv + params["qkv_bias"][:, None]
    qkv = qkv.reshape(heads + 2 * kv, h, batch * size)
    qk = qkv[: heads + kv]
    if config.qk_norm:
        parts = ((qk[:heads], params["q_norm"]), (qk[heads:], params["k_norm"]))
        qk = jnp.concatenate([_norm_heads(x, scale, config.norm_eps) for x, scale in parts])
    qk = _rotate(qk, *angles)
    q = qk[:heads].reshape(kv, heads // kv, h, batch, size).transpose(3, 0, 1, 4, 2)
    new = jnp.stack([qk[heads:], qkv[heads + kv :]]).reshape(2, kv, h, batch, size).transpose(0, 3, 4, 1, 2)
    out, layer = kvcache.extend(q, new[0], new[1], past, plan)
    out = out.transpose(1, 2, 4, 0, 3).reshape(heads * h, batch * size)
    return linear.matmul(params["out"], out), layer


def _mlp(params: Params, x: jax.Array) -> jax.Array:
    gate, up = jnp.split(linear.matmul(params["gate_up"], x), 2, axis=0)
    return linear.matmul(params["down"], jax.nn.silu(gate) * up)


def _layer(
    config: TransformerConfig,
    params: Params,
    x: jax.Array,
    past: kvcache.KVCache,
    plan: kvcache.Plan,
    angles: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, kvcache.Layer]:
    """One layer over the cache of that layer."""
    out, layer = _attention(config, params, _norm(x, params["attn_norm"], config.norm_eps), past, plan, angles)
    x = x + out
    return x + _mlp(params, _norm(x, params["mlp_norm"], config.norm_eps)), layer


# Traced once for all layers, and lowered once where the program may call it: XLA:CPU of jax 0.10.1 has no product of
# narrow floats in a called function.
_one_of_many = jax.jit(_layer, static_argnums=0)
_one_inlined = jax.jit(_layer, static_argnums=0, inline=True)


def _head(config: TransformerConfig, params: Params, x: jax.Array, at: jax.Array | None, batch: int) -> jax.Array:
    """Logits [B,K,V] of the positions ``at[B,K]`` of x[D, B*S]."""
    size = x.shape[1] // batch
    if at is None:
        picked, count = x, size
    else:
        count = at.shape[1]
        flat = at + jnp.arange(batch, dtype=at.dtype)[:, None] * size
        picked = jnp.take(x, flat.reshape(-1), axis=1) if (size, count) != (1, 1) else x
    normed = _norm(picked, params["norm"], config.norm_eps)
    wide = np.promote_types(x.dtype, np.float32)
    logits = linear.matmul(params["embed"] if config.tied else params["head"], normed, wide)
    # XLA:CPU would draw the transposition into the product, which is then 10 times slower for 2 to 7 columns.
    logits = jax.lax.optimization_barrier(logits)
    return logits.T.reshape(batch, count, config.vocab_size)


def transformer(
    config: TransformerConfig, *, cache_dtype: DTypeLike | None = None, window_slack: int = WINDOW_SLACK
) -> Model:
    """The model of ``config``; equal arguments give the same object.

    cache_dtype: of the KV cache: that of the params, or any float, or int8, with a scale for each token and KV head, or
    int4, with one for every 32 features of these. window_slack: most tokens that may be cut off a sliding window's end
    again, as speculation does: it costs as many slots a layer. ValueError: another type.
    """
    kind = None if cache_dtype is None else checks.dtype("cache_dtype", cache_dtype, CACHE_DTYPES)
    ok = isinstance(window_slack, int) and window_slack >= 0
    checks.require(ok, "window_slack", "a whole number >= 0", window_slack)
    return _transformer(config, kind, window_slack)


@functools.lru_cache(maxsize=256)
def _transformer(config: TransformerConfig, cache_dtype: str | None, window_slack: int) -> Model:
    windows = config.windows(window_slack)

    def init_cache(params: Params, batch_size: int, max_len: int) -> kvcache.KVCache:
        expected = f"at most the context of {config.context_length} tokens"
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
        x = linear.embed(params["embed"], tokens.reshape(-1))
        angles = _angles(config, plan.position, x.dtype)
        layers, one = [], _one_inlined if x.dtype.itemsize < 4 else _one_of_many
        for i, layer in enumerate(params["layers"]):
            x, new = one(config, layer, x, kvcache.one_layer(cache, i), plan, angles)
            layers.append(new)
        logits = _head(config, params, x, logits_at, batch)
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
        return linear.embed(params["embed"], tokens.reshape(-1))

    def layer(i: int, params: Params, x: jax.Array, batch: int) -> jax.Array:
        size = x.shape[1] // batch
        shape = (1, batch, config.n_kv_heads, config.head_dim, size)
        cache = kvcache.create(*shape, x.dtype, windows[i : i + 1])
        plan = kvcache.plan(cache, size)
        angles = _angles(config, plan.position, x.dtype)
        return _layer(config, params, x, kvcache.one_layer(cache, 0), plan, angles)[0]

    def head(params: Params, x: jax.Array, batch: int) -> jax.Array:
        return _head(config, params, x, None, batch)

    return Layerwise(embed, layer, head)
