"""``config.json`` of Hugging Face directories: models of the families that are known, to and from a config.

Every field that changes what the model computes is used or refused by name. Fields that other architectures have are
refused too where they would change it, unless they say "off"; what only matters in training is left alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxdecode.checkpoint.fields import Fields
from jaxdecode.checkpoint.hf_families import ACTIVATIONS, FAMILIES, Family
from jaxdecode.checkpoint.hf_rope import Rope, read_rope, rope_to_json
from jaxdecode.checks import require
from jaxdecode.models.transformer import DynamicScaling, LongRope, TransformerConfig

__all__ = ["config_from_json", "config_to_json", "family_of"]

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
    "use_bidirectional_attention": (False,),
    "pruned_heads": ({},),
}


def config_from_json(values: Mapping[str, Any], where: str) -> TransformerConfig:
    """The config of a model of these families. ValueError, naming ``where`` and the field, for anything else."""
    read = Fields(values, f"{where}: ")
    architectures = values.get("architectures")
    named = [family for name, family in FAMILIES.items() if architectures == [name]]
    expected = f"one of {', '.join(FAMILIES)}"
    require(len(named) == 1, read.name("architectures"), expected, repr(architectures))
    (family,) = named
    read.only("model_type", read.get("model_type", str, family.type), family.type)
    for key, off in _OFF.items():
        value = values.get(key)
        full = key == "layer_types" and isinstance(value, list) and all(kind == "full_attention" for kind in value)
        if value is not None and key not in family.own and not full:
            read.only(key, value, *off)
    fields = _sizes(read, family)
    context = fields["context_length"]
    if family.fields.get("positions") != "learned":
        fields |= read_rope(read, family.rope, context, fields["head_dim"])
    fields |= {"sliding_window": _window(read, family, context)} if "layer_types" not in family.own else {}
    fields |= family.read(read, fields)
    try:
        return TransformerConfig(**fields)
    except ValueError as error:  # numbers that do not fit each other
        raise ValueError(f"{where}: {error}") from None


def _sizes(read: Fields, family: Family) -> dict[str, Any]:
    """What every family has."""
    key = family.key
    activation = read.get(key("hidden_act"), str, family.activations[0])
    read.only(key("hidden_act"), activation, *family.activations)
    d_model, n_heads = read.size(key("hidden_size")), read.size(key("num_attention_heads"))
    stated = family.keys.get("head_dim", "") is not None and read.values.get("head_dim") is not None
    if family.head_dim is None and not stated:
        require(d_model % n_heads == 0, read.name(key("hidden_size")), f"a multiple of {n_heads} heads", d_model)
    head_dim, kv_heads = family.head_dim or max(1, d_model // n_heads), family.kv_heads or n_heads
    mlp = None if family.mlp_times is None else family.mlp_times * d_model
    return {
        "vocab_size": read.size("vocab_size"),
        "d_model": d_model,
        "n_layers": read.size(key("num_hidden_layers"), most=1 << 16),
        "n_heads": n_heads,
        "n_kv_heads": _size(read, family, "num_key_value_heads", kv_heads),
        "head_dim": _size(read, family, "head_dim", head_dim, most=1 << 16),
        "d_mlp": read.size(key("intermediate_size"), mlp),
        "context_length": read.size(key("max_position_embeddings"), family.context),
        "norm_eps": read.real(key("rms_norm_eps"), family.eps),
        "tied": read.get("tie_word_embeddings", bool, family.tied),
        "activation": ACTIVATIONS[activation],
        **family.fields,
    }


def _size(read: Fields, family: Family, name: str, default: int, most: int = 2**31 - 1) -> int:
    """A size that not every family states."""
    return default if name in family.keys and family.keys[name] is None else read.size(family.key(name), default, most)


def _window(read: Fields, family: Family, context: int) -> int | None:
    """Tokens that a query sees, its own included; None where the context is no longer."""
    given = read.values.get("sliding_window", family.window)
    if given is None or read.values.get("use_sliding_window") is False:
        return None
    window = read.size("sliding_window", family.window)
    if not family.windowed:
        require(window >= context, read.name("sliding_window"), f"none, or at least the context of {context}", window)
    return None if window >= context else window


def config_to_json(config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """``config.json`` for a config and a dtype by name. ValueError for what no such file can state."""
    return _stated(family_of(config), config) | {"torch_dtype": dtype}


def family_of(config: TransformerConfig) -> str:
    """The architecture whose ``config.json`` means just ``config``. ValueError, naming a field, if none has it."""
    wanted, scaling = config, config.rope_scaling
    if isinstance(scaling, LongRope | DynamicScaling):  # loaded again it has the original context
        longest = scaling.longest if isinstance(scaling, LongRope) else scaling.original_context
        wanted = dataclasses.replace(config, context_length=min(longest, scaling.original_context))
    rope_to_json(config, Rope())  # says what is wrong with them
    wrong: dict[str, dict[str, Any]] = {}  # architecture -> fields that it has otherwise
    for name in FAMILIES:
        try:
            read = config_from_json(_stated(name, config), f"save: config as {name}")
        except ValueError:  # sizes that this architecture cannot have
            continue
        fields = {field.name: getattr(read, field.name) for field in dataclasses.fields(read)}
        wrong[name] = {key: value for key, value in fields.items() if value != getattr(wanted, key)}
        if not wrong[name]:
            return name
    name = min(wrong, key=lambda name: len(wrong[name]))
    key, value = next(iter(wrong[name].items()))
    expected = f"{value!r}, as {name} with the rest has it"
    raise ValueError(f"save: config.{key}: expected {expected}, got {getattr(config, key)!r}")


def _stated(name: str, config: TransformerConfig) -> dict[str, Any]:
    """What ``config.json`` of an architecture says for a config, as far as it can."""
    family, scaling, window = FAMILIES[name], config.rope_scaling, config.sliding_window
    longest = config.context_length
    if isinstance(scaling, LongRope | DynamicScaling):
        longest = scaling.longest if isinstance(scaling, LongRope) else scaling.original_context
    activation = next((key for key in family.activations if ACTIVATIONS[key] == config.activation), None)
    sizes = {
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_mlp,
        "max_position_embeddings": longest,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": activation or family.activations[0],
    }
    biases = {key: False for key in ("attention_bias", "mlp_bias") if family.type == "llama"}
    return {
        "architectures": [name],
        "model_type": family.type,
        "vocab_size": config.vocab_size,
        **{family.key(key): value for key, value in sizes.items() if family.keys.get(key, key) is not None},
        **(rope_to_json(config, family.rope) if family.fields.get("positions") != "learned" else {}),
        "tie_word_embeddings": config.tied,
        **biases,
        **({"sliding_window": window if isinstance(window, int) else None} if family.windowed else {}),
        **family.write(config),
    }
