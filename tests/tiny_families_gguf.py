"""The tiny checkpoints of ``tiny_families`` as GGUF files: what llama.cpp's converter makes of their tensors."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import tiny_families
import tiny_gguf
from tiny_families import CONTEXT, EXPERTS, HEAD, HEADS, KV, LAYERS, MLP

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "MixtralForCausalLM": "llama",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gptneox",
}
_AFTER_ATTENTION = {
    "Gemma2ForCausalLM": "post_attention_norm",
    "Gemma3ForCausalLM": "post_attention_norm",
    "Olmo2ForCausalLM": "post_attention_norm",
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
_EXPERT = re.compile(r"(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)")
_EXPERTS = {
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}


def tiny(name: str) -> tiny_gguf.Tiny:
    """The variant's checkpoint."""
    model = tiny_families.tiny(name)
    kind = model.config["architectures"][0]
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for source, stored in model.tensors.items():
        values = _values(kind, source, stored)
        base, _, ending = source.rpartition(".")
        if base in _NAMES:
            tensors[f"{_NAMES[base]}.{ending}"] = values
            continue
        found = re.fullmatch(r"(?:model\.layers|transformer\.h|gpt_neox\.layers)\.(\d+)\.(.*)", base)
        assert found is not None, source
        number, part = found.groups()
        if match := _EXPERT.fullmatch(part):
            experts.setdefault(f"blk.{number}.{_EXPERTS[match[2]]}.weight", []).append(values)
        elif part == "post_attention_layernorm":
            tensors[f"blk.{number}.{_AFTER_ATTENTION.get(kind, 'ffn_norm')}.{ending}"] = values
        else:
            tensors[f"blk.{number}.{_IN_LAYER[part]}.{ending}"] = values
    tensors |= {key: np.stack(parts) for key, parts in experts.items()}
    if kind == "Phi3ForCausalLM":
        scaling = model.config["rope_scaling"]
        for key in ("short", "long"):
            tensors[f"rope_factors_{key}.weight"] = np.array(scaling[f"{key}_factor"], np.float32)
    if model.config.get("rope_scaling", {}).get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _llama3(model.config["rope_theta"], **model.config["rope_scaling"])
    return tiny_gguf.Tiny(_fields(kind, model.config) | _tokenizer(model.tokenizer), tensors, {})


def _values(kind: str, source: str, values: np.ndarray) -> np.ndarray:
    if "Gemma" in kind and source.endswith("norm.weight"):
        return values + 1
    if kind == "GPT2LMHeadModel" and "transformer.h" in source and values.ndim == 2:
        return np.ascontiguousarray(values.T)
    if "query_key_value" in source:
        by_head = values.reshape(HEADS, 3, -1, *values.shape[1:])
        return np.concatenate([by_head[:, i].reshape(-1, *values.shape[1:]) for i in range(3)])
    return values


def _llama3(
    theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
    **_: Any,
) -> np.ndarray:
    """What the frequencies are divided by: nothing for short waves, the factor for long ones."""
    waves = 2 * math.pi * theta ** (np.arange(0, HEAD, 2) / HEAD)
    part = (original_max_position_embeddings / waves - low_freq_factor) / (high_freq_factor - low_freq_factor)
    part = np.clip(part, 0, 1)
    return (1 / ((1 - part) / factor + part)).astype(np.float32)


def _fields(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    arch = ARCHITECTURES[kind]
    width = config.get("hidden_size", tiny_families.D)
    layer_norm = arch in ("gpt2", "gptneox")
    head = width // HEADS if layer_norm else HEAD
    fields: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": config.get("max_position_embeddings", CONTEXT),
        "embedding_length": width,
        "feed_forward_length": config.get("intermediate_size", MLP),
        "attention.head_count": HEADS,
        f"attention.layer_norm{'' if layer_norm else '_rms'}_epsilon": 1e-5,
    }
    if not layer_norm:
        fields |= {"attention.head_count_kv": KV, "attention.key_length": HEAD, "attention.value_length": HEAD}
        fields |= {"rope.freq_base": float(config["rope_theta"])}
    if arch in ("gemma2", "gemma3"):
        fields |= {"attention.sliding_window": tiny_families.WINDOW, "attention.sliding_window_pattern": 2}
    if arch == "gemma2":
        fields |= {key: config[key] for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    if arch == "gemma3":
        fields |= {"rope.freq_base_swa": config["rope_local_base_freq"]}
    if arch == "phi3":
        original, context = config["original_max_position_embeddings"], CONTEXT
        scale = math.sqrt(1 + math.log(context / original) / math.log(original))
        fields |= {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": scale}
        fields |= {"rope.dimension_count": 12, "attention.sliding_window": config.get("sliding_window", 0)}
    if arch == "gptneox":
        turning = int(head * config["rotary_pct"])
        fields |= {"rope.dimension_count": turning, "use_parallel_residual": config["use_parallel_residual"]}
    if "num_experts_per_tok" in config:
        fields |= {"expert_count": EXPERTS, "expert_used_count": config["num_experts_per_tok"]}
    if arch == "qwen3moe":
        fields["expert_feed_forward_length"] = MLP
    scaling = config.get("rope_scaling", {})
    if scaling.get("rope_type") in ("yarn", "linear"):
        fields |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
    if scaling.get("rope_type") == "yarn":
        fields["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in fields.items()}


def _tokenizer(spec: dict[str, Any]) -> dict[str, Any]:
    vocab = spec["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    controls = {token["content"] for token in spec["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    about = {key: tiny_gguf.FIELDS[key] for key in tiny_gguf.FIELDS if key.endswith(("_id", "bos_token", "template"))}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in controls else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        **about,
    }
