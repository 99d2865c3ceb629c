"""``config.json`` of Hugging Face directories: models of the families below, to and from ``TransformerConfig``.

Every field that changes what the model computes is used or refused by name. Fields that other architectures have are
refused too where they would change it, unless they say "off"; what only matters in training is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxdecode.checkpoint.fields import Fields
from jaxdecode.checks import require
from jaxdecode.models.transformer import RopeScaling, TransformerConfig

__all__ = ["config_from_json", "config_to_json"]


class _Family(NamedTuple):
    """Of an architecture: its model_type, what is always so (fields of the config), and values of missing fields.

    kv_heads, head_dim: None: as many as heads, hidden_size over heads. window: whether queries may see a window only.
    """

    type: str
    fields: Mapping[str, Any] = {}
    context: int = 2048
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama"),
    "MistralForCausalLM": _Family("mistral", context=1 << 17, kv_heads=8, window=4096),
    "Qwen2ForCausalLM": _Family("qwen2", {"qkv_bias": True}, 1 << 15, 32),
    "Qwen3ForCausalLM": _Family("qwen3", {"qk_norm": True}, 1 << 15, 32, 128),
}

# Fields of llama configs, and of their relatives, that change the computation -> the values that leave it as it is.
_OFF: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "quantization_config": (),
    "auto_map": ({},),
    "layer_types": ([],),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    "alibi": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
}
_ROPE = {"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"}
_LLAMA3 = {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


def config_from_json(values: Mapping[str, Any], where: str) -> TransformerConfig:
    """The config of a model of these families. ValueError, naming ``where`` and the field, for anything else."""
    read = Fields(values, f"{where}: ")
    architectures = values.get("architectures")
    named = {name: family for name, family in _FAMILIES.items() if architectures == [name]}
    expected = " or ".join(repr([name]) for name in _FAMILIES)
    require(len(named) == 1, read.name("architectures"), expected, repr(architectures))
    (family,) = named.values()
    read.only("model_type", read.get("model_type", str, family.type), family.type)
    read.only("hidden_act", read.get("hidden_act", str, "silu"), "silu", "swish")
    context = read.size("max_position_embeddings", family.context)
    for key, off in _OFF.items():
        if values.get(key) is not None and not (key == "layer_types" and set(values[key]) == {"full_attention"}):
            read.only(key, values[key], *off)
    d_model, n_heads = read.size("hidden_size"), read.size("num_attention_heads")
    if values.get("head_dim") is None and family.head_dim is None:
        require(d_model % n_heads == 0, read.name("hidden_size"), f"a multiple of {n_heads} heads", d_model)
    head_dim = read.size("head_dim", family.head_dim or max(1, d_model // n_heads), most=1 << 16)
    fields: dict[str, Any] = {
        "vocab_size": read.size("vocab_size"),
        "d_model": d_model,
        "n_layers": read.size("num_hidden_layers"),
        "n_heads": n_heads,
        "n_kv_heads": read.size("num_key_value_heads", family.kv_heads or n_heads),
        "head_dim": head_dim,
        "d_mlp": read.size("intermediate_size"),
        "context_length": context,
        "norm_eps": read.real("rms_norm_eps", 1e-6),
        "tied": read.get("tie_word_embeddings", bool, False),
        **family.fields,
    }
    fields |= {**_rope(read, context, head_dim), "sliding_window": _window(read, family, context)}
    try:
        return TransformerConfig(**fields)
    except ValueError as error:  # numbers that do not fit each other
        raise ValueError(f"{where}: {error}") from None


def _window(read: Fields, family: _Family, context: int) -> int | None:
    """Tokens that a query sees, its own included; None where the context is no longer."""
    given = read.values.get("sliding_window", family.window)
    if given is None or read.values.get("use_sliding_window") is False:
        return None
    window = read.size("sliding_window", family.window)
    if family.window is None:
        require(window >= context, read.name("sliding_window"), f"none, or at least the context of {context}", window)
    return None if window >= context else window


def _rope(read: Fields, context: int, head_dim: int) -> dict[str, Any]:
    """Rotary positions: "rope_parameters" of newer files, "rope_scaling" and "rope_theta" of older ones."""
    new, old = read.get("rope_parameters", dict, {}), read.get("rope_scaling", dict, {})
    require(not (new and old) or new == old, read.name("rope_scaling"), "the same as rope_parameters", old)
    rope = Fields(new or old, read.name("rope_parameters." if new else "rope_scaling."))
    theta = rope.real("rope_theta", read.real("rope_theta", 10000.0))
    stated = read.real("rope_theta", theta)
    require(stated == theta, read.name("rope_theta"), f"the {theta} of {rope.where}rope_theta", stated)
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    rope.only("rope_type", kind, "default", "linear", "llama3")
    rope.only("type", rope.get("type", str, kind), kind)
    rope.only("partial_rotary_factor", rope.get("partial_rotary_factor", float, 1), 1)
    unknown = sorted(rope.values.keys() - _ROPE - (_LLAMA3 if kind == "llama3" else set()))
    require(not unknown, rope.where.rstrip("."), f"the fields of {kind!r}", unknown)
    if kind == "llama3":
        original = read.size("original_max_position_embeddings", context)
        scaling = RopeScaling(
            factor=rope.real("factor"),
            low_freq_factor=rope.real("low_freq_factor"),
            high_freq_factor=rope.real("high_freq_factor"),
            original_context=rope.size("original_max_position_embeddings", original),
        )
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        require(low < high, rope.name("high_freq_factor"), f"more than low_freq_factor = {low}", high)
        return {"rope_theta": theta, "rope_scaling": scaling}
    factor = rope.real("factor", 1.0) if kind == "default" else rope.real("factor")
    if kind == "default" or factor == 1.0:
        rope.only("factor", factor, 1.0)
        return {"rope_theta": theta}
    return {"rope_theta": theta, "rope_freqs": (factor,) * (head_dim // 2)}


def config_to_json(config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """``config.json`` for a config and a dtype by name. ValueError for what no such file can state."""
    kind, window = _architecture(config), config.sliding_window
    return {
        "architectures": [kind],
        "model_type": _FAMILIES[kind].type,
        **({} if window is None else {"sliding_window": window}),
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_mlp,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config),
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }


def _architecture(config: TransformerConfig) -> str:
    """The family that has just the features of ``config``. ValueError if none has."""
    window, sinks = config.sliding_window, config.attention_sinks
    expected = "None or one number: no config.json of these families states one for each layer"
    require(not isinstance(window, tuple), "save: config.sliding_window", expected, window)
    require(sinks == 0, "save: config.attention_sinks", "0: no config.json of these families states them", sinks)
    wanted = (config.qkv_bias, config.qk_norm, window is not None)
    for name, family in _FAMILIES.items():
        has = (family.fields.get("qkv_bias", False), family.fields.get("qk_norm", False), family.window is not None)
        if has == wanted:
            return name
    told = f"qkv_bias {wanted[0]}, qk_norm {wanted[1]}, a sliding window {wanted[2]}"
    raise ValueError(f"save: config: expected at most one of these features, got {told}")


def _rope_scaling(config: TransformerConfig) -> dict[str, Any] | None:
    scaling, freqs = config.rope_scaling, config.rope_freqs
    if freqs is not None:
        alone = scaling is None and len(set(freqs)) == 1
        expected = "one divisor for all frequencies, or llama3 scaling: no other can be written to a config.json"
        require(alone, "save: config.rope_freqs", expected, freqs)
        return {"rope_type": "linear", "factor": freqs[0]}
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }
