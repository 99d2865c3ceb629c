"""What a transformer is made of: the static config, the shapes of its params, and random ones."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxdecode import checks, kvcache
from jaxdecode.base import Params
from jaxdecode.models.scaling import DynamicScaling, LongRope, Scaling, YarnScaling

__all__ = ["TransformerConfig", "init_params", "param_shapes"]

_SIZES = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_mlp", "context_length")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "norm": ("rms", "layer"),
    "norm_place": ("before", "after", "both"),
    "qk_norm": (False, True, "projection"),
    "positions": ("rotary", "learned"),
    "activation": ("silu", "gelu", "gelu_tanh"),
}
_POSITIVE = ("norm_eps", "rope_theta", "local_rope_theta", "attention_scale", "attention_softcap", "logit_softcap")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Static shape of a model: the defaults are llama's, every other field is a switch that some family has.

    rope_freqs: rotary_dim/2 divisors of the rotary frequencies. rope_scaling: a rule for them; longrope and dynamic
    scaling hold for texts of ``context_length``. local_rope_theta: base of layers with a window, which then are not
    scaled. rotary_dim: features of a head that turn, from the first on (None: all). positions: "learned" ones are
    added to the embeddings instead. sliding_window: tokens that a query sees, its own included: one number for all
    layers, or one a layer; None: all. attention_sinks: of layers with a window, the first tokens that every query sees
    too. norm: "layer" subtracts the mean and has a bias. norm_place: of the input of attention and MLP ("before"), of
    their output ("after"), or of both. parallel: attention and MLP see the same input, and both are added. qkv_bias,
    out_bias, mlp_bias: those products have a bias. qk_norm: every head's queries and keys are normed before they are
    turned, or ("projection") all heads' together. attention_scale: of the scores (None: head_dim^-0.5).
    attention_softcap, logit_softcap: c tanh(x / c) of scores and logits. embed_scale: of embeddings. gated: the MLP
    multiplies by a second projection. n_experts: MLPs of ``d_mlp`` features a layer, of which each token is sent to the
    ``experts_per_token`` that a router prefers; norm_expert_weights: their weights add up to 1.
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
    rope_scaling: Scaling | None = None
    rope_freqs: tuple[float, ...] | None = None
    tied: bool = True
    sliding_window: int | tuple[int | None, ...] | None = None
    attention_sinks: int = 0
    qkv_bias: bool = False
    qk_norm: bool | str = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm: str = "rms"
    norm_place: str = "before"
    parallel: bool = False
    positions: str = "rotary"
    rotary_dim: int | None = None
    local_rope_theta: float | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float | None = None
    activation: str = "silu"
    gated: bool = True
    n_experts: int = 0
    experts_per_token: int = 0
    norm_expert_weights: bool = True

    def __post_init__(self) -> None:
        for name in _SIZES:
            checks.require(getattr(self, name) >= 1, name, "a positive whole number", getattr(self, name))
        for name, choices in _CHOICES.items():
            expected = f"one of {', '.join(map(repr, choices))}"
            checks.require(getattr(self, name) in choices, name, expected, getattr(self, name))
        for name in _POSITIVE:
            value = getattr(self, name)
            checks.require(value is None or value > 0, name, "a positive number", value)
        checks.require(self.n_heads % self.n_kv_heads == 0, "n_heads", "a multiple of n_kv_heads", self.n_heads)
        self._check_rotary()
        window = self.sliding_window
        sizes = window if isinstance(window, tuple) else (window,)
        ok = not isinstance(window, tuple) or len(window) == self.n_layers
        ok = ok and all(size is None or size >= 1 for size in sizes)
        checks.require(ok, "sliding_window", "a positive whole number, or one or None a layer", window)
        checks.require(self.attention_sinks >= 0, "attention_sinks", "a whole number >= 0", self.attention_sinks)
        ok = not self.parallel or self.norm_place == "before"
        checks.require(ok, "parallel", "False where norms come after", self.parallel)
        least = int(self.n_experts > 0)
        expected = f"from {least} to the {self.n_experts} experts"
        ok = least <= self.experts_per_token <= self.n_experts
        checks.require(ok, "experts_per_token", expected, self.experts_per_token)
        ok = not self.n_experts or (self.gated and not self.mlp_bias)
        checks.require(ok, "n_experts", "0 unless the MLP is gated and without biases", self.n_experts)

    def _check_rotary(self) -> None:
        rotary, freqs, scaling = self.rotary, self.rope_freqs, self.rope_scaling
        checks.require(self.head_dim % 2 == 0, "head_dim", "an even number (rotary pairs)", self.head_dim)
        ok = rotary % 2 == 0 and 2 <= rotary <= self.head_dim
        checks.require(ok, "rotary_dim", f"an even number up to head_dim = {self.head_dim}", rotary)
        checks.require(freqs is None or len(freqs) == rotary // 2, "rope_freqs", "head_dim / 2 numbers", freqs)
        expected = "one of the scalings of jaxdecode.models.scaling"
        checks.require(scaling is None or isinstance(scaling, get_args(Scaling)), "rope_scaling", expected, scaling)
        ok = not isinstance(scaling, YarnScaling) or self.rope_theta > 1
        checks.require(ok, "rope_theta", "more than 1 with YaRN", self.rope_theta)
        ok = not isinstance(scaling, DynamicScaling) or rotary > 2
        checks.require(ok, "rotary_dim", "more than 2 with dynamic scaling", rotary)
        if isinstance(scaling, LongRope):
            sizes = (len(scaling.short), len(scaling.long))
            checks.require(sizes == (rotary // 2,) * 2, "rope_scaling", f"{rotary // 2} factors each", sizes)

    @property
    def rotary(self) -> int:
        """Features of a head that turn."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def fused(self) -> dict[str, tuple[int, ...]]:
        """Of each matrix of a layer that is several, one below the other, the rows of each."""
        keys = self.n_kv_heads * self.head_dim
        ups = {"gate_up": (self.d_mlp, self.d_mlp)} if self.gated else {"up": (self.d_mlp,)}
        return {"qkv": (self.n_heads * self.head_dim, keys, keys), **ups}

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        window = self.sliding_window
        return window if isinstance(window, tuple) else (window,) * self.n_layers

    def windows(self, slack: int) -> tuple[kvcache.Window | None, ...]:
        """What the cache is told of each layer."""
        sinks = self.attention_sinks
        return tuple(None if size is None else kvcache.Window(size, slack, sinks) for size in self.layer_windows)

    def with_context(self, length: int) -> TransformerConfig:
        """The config for texts of up to ``length`` tokens. ValueError: more than the model is made for.

        Short texts of a longrope model have other rotary factors than long ones, and dynamic scaling depends on the
        length: this says which. Every other model has the context it was read with, or less.
        """
        most: int | None = self.context_length
        if isinstance(self.rope_scaling, LongRope):
            most = self.rope_scaling.longest
        elif isinstance(self.rope_scaling, DynamicScaling):
            most = None
        least = self.context_length if self.positions == "learned" else 1
        ok = isinstance(length, int) and length >= least and (most is None or length <= most)
        expected = f"a whole number from {least}" + ("" if most is None else f" to {most}")
        if self.positions == "learned":
            expected = f"{least}, since positions are learned"
        checks.require(ok, "context_length", expected, length)
        return dataclasses.replace(self, context_length=length)


def _layer_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    d, h, f, experts = config.d_model, config.head_dim, config.d_mlp, config.n_experts
    queries, keys = config.n_heads * h, config.n_kv_heads * h
    before, after = config.norm_place != "after", config.norm_place != "before"
    up = 2 * f if config.gated else f
    shapes: dict[str, tuple[int, ...] | None] = {
        "attn_norm": (d,) if before else None,
        "qkv": (queries + 2 * keys, d),
        "out": (d, queries),
        "mlp_norm": (d,) if before else None,
        "gate_up": (up, d) if config.gated and not experts else None,
        "up": None if config.gated else (up, d),
        "down": None if experts else (d, f),
        "qkv_bias": (queries + 2 * keys,) if config.qkv_bias else None,
        "q_norm": ((h,) if config.qk_norm is True else (queries,)) if config.qk_norm else None,
        "k_norm": ((h,) if config.qk_norm is True else (keys,)) if config.qk_norm else None,
        "out_bias": (d,) if config.out_bias else None,
        "gate_up_bias": (up,) if config.mlp_bias and config.gated else None,
        "up_bias": (up,) if config.mlp_bias and not config.gated else None,
        "down_bias": (d,) if config.mlp_bias else None,
        "attn_post_norm": (d,) if after else None,
        "mlp_post_norm": (d,) if after else None,
        "router": (experts, d) if experts else None,
        "expert_gate": (experts * f, d) if experts else None,
        "expert_up": (experts * f, d) if experts else None,
        "expert_down": (experts * d, f) if experts else None,
    }
    found = {name: shape for name, shape in shapes.items() if shape is not None}
    return found | _norm_biases(config, found)


def _norm_biases(config: TransformerConfig, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    if config.norm == "rms":
        return {}
    return {f"{name}_bias": shape for name, shape in shapes.items() if name.endswith("norm") and name[1:] != "_norm"}


def param_shapes(config: TransformerConfig) -> dict[str, Any]:
    """The pytree of params with a shape at each leaf."""
    d = config.d_model
    layer = _layer_shapes(config)
    shapes: dict[str, Any] = {
        "embed": (config.vocab_size, d),
        "layers": (layer,) * config.n_layers,
        "norm": (d,),
        **_norm_biases(config, {"norm": (d,)}),
    }
    if config.positions == "learned":
        shapes["positions"] = (config.context_length, d)
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
