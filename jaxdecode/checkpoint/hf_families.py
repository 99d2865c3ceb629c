"""The families of Hugging Face checkpoints: how each names its tensors, and what its ``config.json`` means.

A family is a row of the table: names of tensors, names of fields, values of fields that are missing, and two small
functions for what it alone has: ``read`` from ``config.json`` to fields of the config, ``write`` back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxdecode.checkpoint.fields import Fields
from jaxdecode.checkpoint.hf_rope import Rope
from jaxdecode.checkpoint.source import Names
from jaxdecode.models.transformer import TransformerConfig

__all__ = ["ACTIVATIONS", "FAMILIES", "Family"]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_SILU, _GELU = ("silu", "swish"), ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")

_WHOLE = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_ATTENTION = {
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "out": ("self_attn.o_proj.weight",),
}
_MLP = {"gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "down": ("mlp.down_proj.weight",)}
_BEFORE = {"attn_norm": ("input_layernorm.weight",), "mlp_norm": ("post_attention_layernorm.weight",)}
_AFTER = {
    "attn_post_norm": ("post_attention_layernorm.weight",),
    "mlp_post_norm": ("post_feedforward_layernorm.weight",),
}


def _names(*parts: Mapping[str, tuple[str, ...]], **options: Any) -> Names:
    return Names(
        _WHOLE, "model.layers.{}.", {k: v for part in (_ATTENTION, *parts) for k, v in part.items()}, **options
    )


_LLAMA = _names(_MLP, _BEFORE)
_GEMMA = _names(
    _MLP,
    _AFTER,
    {"attn_norm": ("input_layernorm.weight",), "mlp_norm": ("pre_feedforward_layernorm.weight",)},
    plus_one=True,
)
_PHI3 = _names(
    _BEFORE,
    {"qkv": ("self_attn.qkv_proj.weight",), "gate_up": ("mlp.gate_up_proj.weight",), "down": _MLP["down"]},
)
_MIXTRAL = _names(
    _BEFORE,
    {
        "router": ("block_sparse_moe.gate.weight",),
        "expert_gate": ("block_sparse_moe.experts.{}.w1.weight",),
        "expert_up": ("block_sparse_moe.experts.{}.w3.weight",),
        "expert_down": ("block_sparse_moe.experts.{}.w2.weight",),
    },
)
_QWEN3_MOE = _names(
    _BEFORE,
    {
        "router": ("mlp.gate.weight",),
        "expert_gate": ("mlp.experts.{}.gate_proj.weight",),
        "expert_up": ("mlp.experts.{}.up_proj.weight",),
        "expert_down": ("mlp.experts.{}.down_proj.weight",),
    },
)


def _with_biases(names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Modules with a weight and a bias each."""
    both: dict[str, tuple[str, ...]] = {kind: (f"{module}.weight",) for kind, module in names.items()}
    return both | {f"{kind}_bias": (f"{module}.bias",) for kind, module in names.items()}


_GPT2 = Names(
    {
        "embed": "transformer.wte.weight",
        "positions": "transformer.wpe.weight",
        "norm": "transformer.ln_f.weight",
        "norm_bias": "transformer.ln_f.bias",
        "head": "lm_head.weight",
    },
    "transformer.h.{}.",
    _with_biases(
        {
            "attn_norm": "ln_1",
            "qkv": "attn.c_attn",
            "out": "attn.c_proj",
            "mlp_norm": "ln_2",
            "up": "mlp.c_fc",
            "down": "mlp.c_proj",
        }
    ),
    transposed=True,
)
_NEOX = Names(
    {
        "embed": "gpt_neox.embed_in.weight",
        "norm": "gpt_neox.final_layer_norm.weight",
        "norm_bias": "gpt_neox.final_layer_norm.bias",
        "head": "embed_out.weight",
    },
    "gpt_neox.layers.{}.",
    _with_biases(
        {
            "attn_norm": "input_layernorm",
            "qkv": "attention.query_key_value",
            "out": "attention.dense",
            "mlp_norm": "post_attention_layernorm",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        }
    ),
    heads="by head",
)


def _scaled(scale: float, config: Mapping[str, Any]) -> float | None:
    """A scale of attention; None if it is that of every model."""
    return None if scale == config["head_dim"] ** -0.5 else scale


def _gemma(pattern: int, caps: tuple[float | None, float | None]) -> Callable[[Fields, dict[str, Any]], dict[str, Any]]:
    """Every ``pattern``-th layer sees all, unless "layer_types" says otherwise. caps: of scores, of logits."""

    def read(read: Fields, config: dict[str, Any]) -> dict[str, Any]:
        n_layers = config["n_layers"]
        kinds = read.get("layer_types", list, [])
        read.only("layer_types", len(kinds), 0, n_layers)
        period = read.size("sliding_window_pattern", pattern)
        if not kinds:
            kinds = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(n_layers)]
        for kind in kinds:
            read.only("layer_types", kind, "full_attention", "sliding_attention")
        window = read.size("sliding_window", 4096)
        scores, logits = (
            cap if key not in read.values else None if read.values[key] is None else read.real(key)
            for key, cap in zip(("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True)
        )
        local = "sliding_attention" in kinds
        return {
            "sliding_window": tuple(window if kind == "sliding_attention" else None for kind in kinds),
            "local_rope_theta": config.get("local_rope_theta") if local else None,
            "attention_scale": _scaled(read.real("query_pre_attn_scalar", 256.0) ** -0.5, config),
            "attention_softcap": scores,
            "logit_softcap": logits,
            "embed_scale": config["d_model"] ** 0.5,
        }

    return read


def _gemma_to_json(config: TransformerConfig) -> dict[str, Any]:
    windows = config.layer_windows
    scale = config.attention_scale or config.head_dim**-0.5
    scalar = round(scale**-2)
    return {
        "layer_types": ["full_attention" if size is None else "sliding_attention" for size in windows],
        "sliding_window": next((size for size in windows if size is not None), config.context_length),
        "query_pre_attn_scalar": scalar if scalar**-0.5 == scale else scale**-2,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }


def _mixtral(read: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "n_experts": read.size("num_local_experts", read.size("num_experts", 8)),
        "experts_per_token": read.size("num_experts_per_tok", 2),
    }


def _mixtral_to_json(config: TransformerConfig) -> dict[str, Any]:
    return {"num_local_experts": config.n_experts, "num_experts_per_tok": config.experts_per_token}


def _qwen3_moe(read: Fields, config: dict[str, Any]) -> dict[str, Any]:
    read.only("decoder_sparse_step", read.get("decoder_sparse_step", int, 1), 1)
    read.only("mlp_only_layers", read.get("mlp_only_layers", list, []), [])
    return {
        "n_experts": read.size("num_experts", read.size("num_local_experts", 128)),
        "experts_per_token": read.size("num_experts_per_tok", 8),
        "norm_expert_weights": read.get("norm_topk_prob", bool, False),
        "d_mlp": read.size("moe_intermediate_size", 768),
    }


def _qwen3_moe_to_json(config: TransformerConfig) -> dict[str, Any]:
    return {
        "num_experts": config.n_experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.norm_expert_weights,
        "moe_intermediate_size": config.d_mlp,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt2(read: Fields, config: dict[str, Any]) -> dict[str, Any]:
    read.only("scale_attn_weights", read.get("scale_attn_weights", bool, True), True)
    inverse = "scale_attn_by_inverse_layer_idx"
    read.only(inverse, read.get(inverse, bool, False), False)
    return {}


def _neox(read: Fields, config: dict[str, Any]) -> dict[str, Any]:
    biases = read.get("attention_bias", bool, True)
    return {"parallel": read.get("use_parallel_residual", bool, True), "qkv_bias": biases, "out_bias": biases}


def _neox_to_json(config: TransformerConfig) -> dict[str, Any]:
    return {"use_parallel_residual": config.parallel, "attention_bias": config.qkv_bias}


class Family(NamedTuple):
    """An architecture: its model_type, names of tensors, and what is always so (fields of the config).

    keys: its names of fields; None: it has no such field. context, eps, tied, kv_heads, head_dim, window: values of
    missing fields (None: as many as heads, hidden_size over heads, no window). mlp_times: likewise the width of the MLP
    as a multiple of hidden_size; None: it must be there. windowed: all layers may have a window. own: fields that
    ``read`` uses, beside those that every family has. derived: tensors that old files have and no model needs. prefix:
    of the tensors of a model without its head, which is left out where a file has that alone.
    """

    type: str
    names: Names = _LLAMA
    fields: Mapping[str, Any] = {}
    context: int = 2048
    kv_heads: int | None = None
    head_dim: int | None = None
    windowed: bool = False
    window: int | None = None
    mlp_times: int | None = None
    eps: float = 1e-6
    tied: bool = False
    activations: tuple[str, ...] = _SILU
    rope: Rope = Rope()
    keys: Mapping[str, str | None] = {}
    own: frozenset[str] = frozenset()
    read: Callable[[Fields, dict[str, Any]], dict[str, Any]] = lambda read, config: {}
    write: Callable[[TransformerConfig], dict[str, Any]] = lambda config: {}
    derived: re.Pattern[str] = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    prefix: str = "model."

    def key(self, name: str) -> str:
        """This family's name of a field."""
        return self.keys.get(name, name) or name


_GEMMA_FIELDS = {"norm_place": "both", "activation": "gelu_tanh"}
_GEMMA_OWN = frozenset({"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "layer_types"})
_GPT_FIELDS = {"norm": "layer", "gated": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", context=1 << 17, kv_heads=8, windowed=True, window=4096),
    "Qwen2ForCausalLM": Family("qwen2", fields={"qkv_bias": True}, context=1 << 15, kv_heads=32),
    "Qwen3ForCausalLM": Family("qwen3", fields={"qk_norm": True}, context=1 << 15, kv_heads=32, head_dim=128),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        _GEMMA,
        _GEMMA_FIELDS,
        context=1 << 13,
        kv_heads=4,
        head_dim=256,
        tied=True,
        activations=("gelu_pytorch_tanh",),
        keys={"hidden_act": "hidden_activation"},
        own=_GEMMA_OWN,
        read=_gemma(2, (50.0, 30.0)),
        write=_gemma_to_json,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        _GEMMA,
        {**_GEMMA_FIELDS, "qk_norm": True},
        context=1 << 17,
        kv_heads=4,
        head_dim=256,
        tied=True,
        activations=("gelu_pytorch_tanh",),
        rope=Rope(default=1e6, by_kind=True),
        keys={"hidden_act": "hidden_activation"},
        own=_GEMMA_OWN,
        read=_gemma(6, (None, None)),
        write=_gemma_to_json,
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        _PHI3,
        context=4096,
        eps=1e-5,
        windowed=True,
        rope=Rope(part="partial_rotary_factor", kinds={"su": "longrope", "yarn": "longrope"}),
        own=frozenset({"partial_rotary_factor"}),
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2", _names(_MLP, _AFTER), {"norm_place": "after", "qk_norm": "projection"}, eps=1e-5
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        _MIXTRAL,
        context=1 << 17,
        kv_heads=8,
        windowed=True,
        eps=1e-5,
        rope=Rope(default=1e6),
        own=frozenset({"num_local_experts", "num_experts"}),
        read=_mixtral,
        write=_mixtral_to_json,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        _QWEN3_MOE,
        {"qk_norm": True},
        context=1 << 15,
        kv_heads=4,
        own=frozenset({"num_local_experts", "num_experts"}),
        read=_qwen3_moe,
        write=_qwen3_moe_to_json,
    ),
    "GPT2LMHeadModel": Family(
        "gpt2",
        _GPT2,
        {**_GPT_FIELDS, "positions": "learned"},
        context=1024,
        mlp_times=4,
        eps=1e-5,
        tied=True,
        activations=("gelu_new", *_GELU),
        keys={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "num_key_value_heads": None,
            "head_dim": None,
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        read=_gpt2,
        derived=re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias"),
        prefix="transformer.",
    ),
    "GPTNeoXForCausalLM": Family(
        "gpt_neox",
        _NEOX,
        _GPT_FIELDS,
        eps=1e-5,
        activations=_GELU,
        rope=Rope(theta="rotary_emb_base", part="rotary_pct", default_part=0.25),
        keys={"num_key_value_heads": None, "head_dim": None, "rms_norm_eps": "layer_norm_eps"},
        own=frozenset({"attention_bias", "partial_rotary_factor"}),
        read=_neox,
        write=_neox_to_json,
        derived=re.compile(r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)"),
        prefix="gpt_neox.",
    ),
}
