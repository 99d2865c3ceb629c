"""The families of GGUF files: how llama.cpp names their tensors and fields, and what is always so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxdecode.checkpoint.fields import Fields
from jaxdecode.checkpoint.source import Names

__all__ = ["FAMILIES", "GgufFamily"]

_WHOLE = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "norm_bias": "output_norm.bias",
    "positions": "position_embd.weight",
    "head": "output.weight",
}
_PARTS = {
    "attn_norm": ("attn_norm.weight",),
    "attn_norm_bias": ("attn_norm.bias",),
    "qkv": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "qkv_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "q_norm": ("attn_q_norm.weight",),
    "k_norm": ("attn_k_norm.weight",),
    "out": ("attn_output.weight",),
    "out_bias": ("attn_output.bias",),
    "attn_post_norm": ("post_attention_norm.weight",),
    "mlp_norm": ("ffn_norm.weight",),
    "mlp_norm_bias": ("ffn_norm.bias",),
    "gate_up": ("ffn_gate.weight", "ffn_up.weight"),
    "up": ("ffn_up.weight",),
    "up_bias": ("ffn_up.bias",),
    "down": ("ffn_down.weight",),
    "down_bias": ("ffn_down.bias",),
    "mlp_post_norm": ("post_ffw_norm.weight",),
    "router": ("ffn_gate_inp.weight",),
    "expert_gate": ("ffn_gate_exps.weight",),
    "expert_up": ("ffn_up_exps.weight",),
    "expert_down": ("ffn_down_exps.weight",),
}
_NAMES = Names(_WHOLE, "blk.{}.", _PARTS, stacked=True)
_FUSED_PARTS = _PARTS | {"qkv": ("attn_qkv.weight",), "qkv_bias": ("attn_qkv.bias",)}
_FUSED = _NAMES._replace(parts=_FUSED_PARTS)


def _experts(read: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """A mixture of experts, where the file has any."""
    count = read.get("expert_count", int, 0)
    if not count:
        return {}
    return {"n_experts": read.size("expert_count"), "experts_per_token": read.size("expert_used_count")}


def _qwen3_moe(read: Fields, config: dict[str, Any]) -> dict[str, Any]:
    width = read.size("expert_feed_forward_length", config["d_mlp"])
    experts = {"n_experts": read.size("expert_count"), "experts_per_token": read.size("expert_used_count")}
    return experts | {"d_mlp": width}


def _gemma(
    period: int, largest: int, caps: tuple[float | None, float | None], local: float | None
) -> Callable[[Fields, dict[str, Any]], dict[str, Any]]:
    """Every ``period``-th layer sees all. The model of ``largest`` layers scales its scores by d_model / heads.

    caps: of scores and logits. local: the rotary base of layers with a window, if it is their own.
    """

    def read(read: Fields, config: dict[str, Any]) -> dict[str, Any]:
        n_layers, window = config["n_layers"], read.size("attention.sliding_window", 4096)
        pattern = read.values.get("attention.sliding_window_pattern", period)
        if not isinstance(pattern, int):  # whether each layer has a window
            flags = read.get("attention.sliding_window_pattern", list)
            read.only("attention.sliding_window_pattern", len(flags), n_layers)
            windowed = [flag is True for flag in flags]
        else:
            every = read.size("attention.sliding_window_pattern", period)
            windowed = [(i + 1) % every != 0 for i in range(n_layers)]
        scale = (config["d_model"] / config["n_heads"]) ** -0.5 if n_layers == largest else None
        scores, logits = (
            read.real(key, cap) if cap is not None or key in read.values else None
            for key, cap in zip(("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True)
        )
        return {
            "sliding_window": tuple(window if has else None for has in windowed),
            "local_rope_theta": read.real("rope.freq_base_swa", local) if local and any(windowed) else None,
            "attention_scale": None if scale == config["head_dim"] ** -0.5 else scale,
            "attention_softcap": scores,
            "logit_softcap": logits,
            "embed_scale": config["d_model"] ** 0.5,
        }

    return read


def _phi3(read: Fields, config: dict[str, Any]) -> dict[str, Any]:
    window = read.get("attention.sliding_window", int, 0)
    return {"sliding_window": window if 0 < window < config["context_length"] else None}


def _neox(read: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {"parallel": read.get("use_parallel_residual", bool, True)}


class GgufFamily(NamedTuple):
    """An architecture: names of its tensors, what is always so, and more fields that ``read`` uses.

    eps: the name of the epsilon. partial: only a part of a head may turn.
    """

    names: Names = _NAMES
    fields: Mapping[str, Any] = {}
    known: frozenset[str] = frozenset()
    read: Callable[[Fields, dict[str, Any]], dict[str, Any]] = lambda read, config: {}
    eps: str = "attention.layer_norm_rms_epsilon"
    partial: bool = False


_WINDOWS = frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"})
_CAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
_GEMMA = {"norm_place": "both", "activation": "gelu_tanh"}
_GPT = {"norm": "layer", "gated": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
_LAYER_NORM = "attention.layer_norm_epsilon"
FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily(_NAMES._replace(heads="interleaved"), read=_experts),
    "qwen2": GgufFamily(fields={"qkv_bias": True}),
    "qwen3": GgufFamily(fields={"qk_norm": True}),
    "qwen3moe": GgufFamily(fields={"qk_norm": True}, known=frozenset({"expert_feed_forward_length"}), read=_qwen3_moe),
    "gemma2": GgufFamily(fields=_GEMMA, known=_WINDOWS | _CAPS, read=_gemma(2, 46, (50.0, 30.0), None)),
    "gemma3": GgufFamily(
        fields={**_GEMMA, "qk_norm": True}, known=_WINDOWS | _CAPS, read=_gemma(6, 62, (None, None), 10000.0)
    ),
    "phi3": GgufFamily(
        _NAMES._replace(parts=_FUSED_PARTS | {"gate_up": ("ffn_up.weight",)}),
        known=frozenset({"attention.sliding_window"}),
        read=_phi3,
        partial=True,
    ),
    "olmo2": GgufFamily(fields={"norm_place": "after", "qk_norm": "projection"}),
    "gpt2": GgufFamily(
        _FUSED,
        {**_GPT, "positions": "learned", "activation": "gelu_tanh"},
        frozenset({_LAYER_NORM}),
        eps=_LAYER_NORM,
    ),
    "gptneox": GgufFamily(
        _FUSED,
        {**_GPT, "activation": "gelu"},
        frozenset({_LAYER_NORM, "use_parallel_residual"}),
        _neox,
        _LAYER_NORM,
        partial=True,
    ),
}
