"""The parts of a transformer's layer as pure functions of (config, params, activations [D, B*S])."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxdecode import kvcache, linear
from jaxdecode.arithmetic import PLAIN, Arithmetic
from jaxdecode.base import Params
from jaxdecode.models import experts
from jaxdecode.models.config import TransformerConfig
from jaxdecode.models.scaling import frequencies, turn_scale

__all__ = ["Angles", "angles", "layer", "norm"]

Angles = tuple[jax.Array, jax.Array]


def norm(config: TransformerConfig, params: Params, name: str, x: jax.Array, arithmetic: Arithmetic) -> jax.Array:
    """The norm ``name`` over the features of x[D,R], in float32 or wider."""
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    if config.norm == "layer":
        wide = wide - arithmetic.mean(wide, 0)
    normed = wide * arithmetic.rsqrt(arithmetic.mean(jnp.square(wide), 0) + config.norm_eps)
    scaled = normed.astype(x.dtype) * params[name][:, None]
    return arithmetic.product(scaled) + params[f"{name}_bias"][:, None] if config.norm == "layer" else scaled


def _norm_heads(x: jax.Array, scale: jax.Array, eps: float, arithmetic: Arithmetic) -> jax.Array:
    """RMSNorm over the features of every head of x[heads, h, R]."""
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    normed = wide * arithmetic.rsqrt(arithmetic.mean(jnp.square(wide), 1) + eps)
    return normed.astype(x.dtype) * scale[None, :, None]


def _norm_together(x: jax.Array, scale: jax.Array, eps: float, arithmetic: Arithmetic) -> jax.Array:
    """RMSNorm over the features of all heads of x[heads, h, R]."""
    return _norm_heads(x.reshape(1, -1, x.shape[2]), scale, eps, arithmetic).reshape(x.shape)


def angles(config: TransformerConfig, position: jax.Array, dtype: DTypeLike, local: bool = False) -> Angles:
    """cos and sin [rotary_dim/2, B*S] of position[B,S]; ``local``: for layers with a window."""
    wide = np.promote_types(dtype, np.float32)
    angle = jnp.asarray(frequencies(config, local), wide)[:, None] * position.reshape(1, -1).astype(wide)
    scale = turn_scale(config, local)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return (cos, sin) if scale == 1 else (cos * scale, sin * scale)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, arithmetic: Arithmetic) -> jax.Array:
    """Rotary positions on x[heads, h, B*S]: feature i turns with feature i + h/2."""
    halves = x.astype(cos.dtype).reshape(x.shape[0], 2, *cos.shape)
    turned = jnp.flip(halves, 1) * jnp.stack([-sin, sin])[None]
    found = arithmetic.product(halves * cos[None, None]) + arithmetic.product(turned)
    return found.reshape(x.shape).astype(x.dtype)


def _turned(
    config: TransformerConfig, scale: jax.Array | None, x: jax.Array, turn: Angles | None, arithmetic: Arithmetic
) -> jax.Array:
    """Queries or keys x[heads, h, R], normed and turned as the config says."""
    if scale is not None:
        x = (_norm_heads if config.qk_norm is True else _norm_together)(x, scale, config.norm_eps, arithmetic)
    if turn is None:
        return x
    if config.rotary == config.head_dim:
        return _rotate(x, *turn, arithmetic)
    first, rest = jnp.split(x, [config.rotary], axis=1)
    return jnp.concatenate([_rotate(first, *turn, arithmetic), rest], axis=1)


def _attention(
    config: TransformerConfig,
    params: Params,
    x: jax.Array,
    past: kvcache.KVCache,
    plan: kvcache.Plan,
    turn: Angles | None,
    arithmetic: Arithmetic,
) -> tuple[jax.Array, kvcache.Layer]:
    heads, kv, h = config.n_heads, config.n_kv_heads, config.head_dim
    batch, size = plan.position.shape
    sizes = config.fused["qkv"]
    qkv = linear.split(params["qkv"], x, sizes)
    if config.qkv_bias:
        biases = jnp.split(params["qkv_bias"][:, None], np.cumsum(sizes)[:-1])
        qkv = [arithmetic.product(y) + bias for y, bias in zip(qkv, biases, strict=True)]
    q, k, v = (y.reshape(-1, h, batch * size) for y in qkv)
    q, k = (_turned(config, params.get(f"{name}_norm"), y, turn, arithmetic) for name, y in (("q", q), ("k", k)))
    if config.attention_scale is not None:
        q = q * (config.attention_scale * h**0.5)  # the cache scales by h^-0.5
    q = q.reshape(kv, heads // kv, h, batch, size).transpose(3, 0, 1, 4, 2)
    k, v = (y.reshape(kv, h, batch, size).transpose(2, 3, 0, 1) for y in (k, v))
    out, layer = kvcache.extend(q, k, v, past, plan, softcap=config.attention_softcap, arithmetic=arithmetic)
    out = linear.matmul(params["out"], out.transpose(1, 2, 4, 0, 3).reshape(heads * h, batch * size))
    out = arithmetic.product(out)
    return (out + params["out_bias"][:, None] if config.out_bias else out), layer


def _mlp(config: TransformerConfig, params: Params, x: jax.Array, arithmetic: Arithmetic) -> jax.Array:
    gelu = functools.partial(jax.nn.gelu, approximate=False)
    known: dict[str, Callable[[jax.Array], jax.Array]]
    known = {"silu": arithmetic.silu, "gelu": gelu, "gelu_tanh": arithmetic.gelu_tanh}
    activation = known[config.activation]
    if config.n_experts:
        return experts.mix(config, params, x, activation, arithmetic)
    name = "gate_up" if config.gated else "up"
    ups = linear.split(params[name], x, config.fused[name])
    if config.mlp_bias:
        biases = jnp.split(params[f"{name}_bias"][:, None], len(ups))
        ups = [arithmetic.product(y) + bias for y, bias in zip(ups, biases, strict=True)]
    up = activation(ups[0]) if len(ups) == 1 else activation(ups[0]) * ups[1]
    down = arithmetic.product(linear.matmul(params["down"], up))
    return down + params["down_bias"][:, None] if config.mlp_bias else down


def layer(
    config: TransformerConfig,
    params: Params,
    x: jax.Array,
    past: kvcache.KVCache,
    plan: kvcache.Plan,
    turn: Angles | None,
    arithmetic: Arithmetic = PLAIN,
) -> tuple[jax.Array, kvcache.Layer]:
    """One layer over the cache of that layer."""

    def before(name: str, x: jax.Array) -> jax.Array:
        return x if config.norm_place == "after" else norm(config, params, name, x, arithmetic)

    def after(name: str, x: jax.Array) -> jax.Array:
        return x if config.norm_place == "before" else arithmetic.product(norm(config, params, name, x, arithmetic))

    def mlp(x: jax.Array) -> jax.Array:
        return _mlp(config, params, before("mlp_norm", x), arithmetic)

    out, stored = _attention(config, params, before("attn_norm", x), past, plan, turn, arithmetic)
    if config.parallel:
        return x + out + mlp(x), stored
    x = x + after("attn_post_norm", out)
    return x + after("mlp_post_norm", mlp(x)), stored
