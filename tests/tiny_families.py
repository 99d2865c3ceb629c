"""Tiny checkpoints of every family, with random weights, as Hugging Face directories and as GGUF files.

Needs no jax, so that the script that makes the goldens can run beside transformers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tiny_hf
from tiny_hf import CHATML, Tiny

D, HEADS, KV, HEAD, MLP, LAYERS, CONTEXT, WINDOW, EXPERTS = 48, 4, 2, 16, 64, 2, 128, 13, 5
NORM, MATRIX, BIAS = "norm", "matrix", "bias"
LAYER_TYPES = ["sliding_attention", "full_attention"]
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0]}


def _attention(hidden: int = D) -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_proj.weight": (HEADS * HEAD, hidden),
        "self_attn.k_proj.weight": (KV * HEAD, hidden),
        "self_attn.v_proj.weight": (KV * HEAD, hidden),
        "self_attn.o_proj.weight": (hidden, HEADS * HEAD),
    }


_HEAD_NORMS = {"self_attn.q_norm.weight": (HEAD,), "self_attn.k_norm.weight": (HEAD,)}
_BIASES = {
    "self_attn.q_proj.bias": (HEADS * HEAD,),
    "self_attn.k_proj.bias": (KV * HEAD,),
    "self_attn.v_proj.bias": (KV * HEAD,),
}
_MLP = {"mlp.gate_proj.weight": (MLP, D), "mlp.up_proj.weight": (MLP, D), "mlp.down_proj.weight": (D, MLP)}
_TWO = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
_AFTER = {"post_attention_layernorm.weight": (D,), "post_feedforward_layernorm.weight": (D,)}
_FOUR = _AFTER | {"input_layernorm.weight": (D,), "pre_feedforward_layernorm.weight": (D,)}
_WHOLE = {"model.embed_tokens.weight": (0, D), "model.norm.weight": (D,)}
_HEADED = {**_WHOLE, "lm_head.weight": (0, D)}


def _experts(pattern: str, names: tuple[str, str, str]) -> dict[str, tuple[int, ...]]:
    gate, up, down = names
    shapes = {gate: (MLP, D), up: (MLP, D), down: (D, MLP)}
    return {pattern.format(i, name): shape for i in range(EXPERTS) for name, shape in shapes.items()}


def _both(shapes: dict[str, tuple[int, ...]], outputs: int) -> dict[str, tuple[int, ...]]:
    """A weight and a bias for each; ``outputs``: the axis of a matrix that has them."""
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    return weights | {f"{name}.bias": (shape[outputs if len(shape) > 1 else 0],) for name, shape in shapes.items()}


# architecture -> model_type, the tensors outside the layers (0: the vocabulary), of a layer and what stands before it
_SHAPES: dict[str, tuple[str, dict[str, tuple[int, ...]], str, dict[str, tuple[int, ...]]]] = {
    "LlamaForCausalLM": ("llama", _WHOLE, "model.layers.{}.", {**_attention(), **_MLP, **_TWO}),
    "MistralForCausalLM": ("mistral", _HEADED, "model.layers.{}.", {**_attention(), **_MLP, **_TWO}),
    "Qwen2ForCausalLM": ("qwen2", _WHOLE, "model.layers.{}.", {**_attention(), **_BIASES, **_MLP, **_TWO}),
    "Qwen3ForCausalLM": ("qwen3", _HEADED, "model.layers.{}.", {**_attention(), **_HEAD_NORMS, **_MLP, **_TWO}),
    "Gemma2ForCausalLM": ("gemma2", _WHOLE, "model.layers.{}.", {**_attention(), **_MLP, **_FOUR}),
    "Gemma3ForCausalLM": ("gemma3_text", _WHOLE, "model.layers.{}.", {**_attention(), **_MLP, **_FOUR, **_HEAD_NORMS}),
    "Phi3ForCausalLM": (
        "phi3",
        _HEADED,
        "model.layers.{}.",
        {
            **_TWO,
            "self_attn.qkv_proj.weight": ((HEADS + 2 * KV) * HEAD, D),
            "self_attn.o_proj.weight": (D, HEADS * HEAD),
            "mlp.gate_up_proj.weight": (2 * MLP, D),
            "mlp.down_proj.weight": (D, MLP),
        },
    ),
    "Olmo2ForCausalLM": (
        "olmo2",
        _HEADED,
        "model.layers.{}.",
        {
            **_attention(),
            **_MLP,
            **_AFTER,
            "self_attn.q_norm.weight": (HEADS * HEAD,),
            "self_attn.k_norm.weight": (KV * HEAD,),
        },
    ),
    "MixtralForCausalLM": (
        "mixtral",
        _HEADED,
        "model.layers.{}.",
        {
            **_attention(),
            **_TWO,
            "block_sparse_moe.gate.weight": (EXPERTS, D),
            **_experts("block_sparse_moe.experts.{}.{}.weight", ("w1", "w3", "w2")),
        },
    ),
    "Qwen3MoeForCausalLM": (
        "qwen3_moe",
        _HEADED,
        "model.layers.{}.",
        {
            **_attention(),
            **_TWO,
            **_HEAD_NORMS,
            "mlp.gate.weight": (EXPERTS, D),
            **_experts("mlp.experts.{}.{}_proj.weight", ("gate", "up", "down")),
        },
    ),
    "GPT2LMHeadModel": (
        "gpt2",
        {
            "transformer.wte.weight": (0, D),
            "transformer.wpe.weight": (CONTEXT, D),
            "transformer.ln_f.weight": (D,),
            "transformer.ln_f.bias": (D,),
        },
        "transformer.h.{}.",
        _both(
            {
                "ln_1": (D,),
                "ln_2": (D,),
                "attn.c_attn": (D, 3 * D),
                "attn.c_proj": (D, D),
                "mlp.c_fc": (D, MLP),
                "mlp.c_proj": (MLP, D),
            },
            1,
        ),
    ),
    "GPTNeoXForCausalLM": (
        "gpt_neox",
        {
            "gpt_neox.embed_in.weight": (0, D),
            "gpt_neox.final_layer_norm.weight": (D,),
            "gpt_neox.final_layer_norm.bias": (D,),
            "embed_out.weight": (0, D),
        },
        "gpt_neox.layers.{}.",
        _both(
            {
                "input_layernorm": (D,),
                "post_attention_layernorm": (D,),
                "attention.query_key_value": (3 * D, D),
                "attention.dense": (D, D),
                "mlp.dense_h_to_4h": (MLP, D),
                "mlp.dense_4h_to_h": (D, MLP),
            },
            0,
        ),
    ),
}
_GPT_SIZES = {
    "n_embd": D,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_inner": MLP,
    "n_positions": CONTEXT,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}
_NEOX_SIZES = {
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": MLP,
    "max_position_embeddings": CONTEXT,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "rotary_pct": 0.5,
    "rotary_emb_base": 10000,
}
_SIZES = {
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD,
    "intermediate_size": MLP,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
_OWN_SIZES = {"GPT2LMHeadModel": _GPT_SIZES, "GPTNeoXForCausalLM": _NEOX_SIZES}

_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": WINDOW, "layer_types": LAYER_TYPES}
_LLAMA3 = {"rope_type": "llama3", **tiny_hf.LLAMA3}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# Models whose logits transformers has computed (tests/goldens/families.json): fields of config.json, "architectures"
# among them.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama, linear": {
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": {"rope_type": "linear", "factor": 2.5},
    },
    "llama 3": {"architectures": ["LlamaForCausalLM"], "rope_theta": 500000.0, "rope_scaling": _LLAMA3},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": WINDOW},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": WINDOW},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6, "use_sliding_window": False},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        **_GEMMA,
        "query_pre_attn_scalar": 9,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        **_GEMMA,
        "query_pre_attn_scalar": HEAD,
        "rope_theta": 1e6,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "head_dim": None,
        "hidden_size": HEADS * HEAD,
        "partial_rotary_factor": 0.75,
        "sliding_window": 40,
        "original_max_position_embeddings": 96,
        "rope_scaling": {"type": "longrope", **FACTORS},
        "tie_word_embeddings": False,
    },
    "phi3 beyond its original context": {
        "architectures": ["Phi3ForCausalLM"],
        "head_dim": None,
        "hidden_size": HEADS * HEAD,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 32,
        "rope_scaling": {"type": "longrope", **FACTORS},
        "tie_word_embeddings": False,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "head_dim": None, "hidden_size": HEADS * HEAD},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": 30,
    },
    "qwen3 moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": MLP,
        "intermediate_size": 7,
        "norm_topk_prob": False,
    },
    "gpt2": {"architectures": ["GPT2LMHeadModel"]},
    "neox": {"architectures": ["GPTNeoXForCausalLM"]},
    "neox, one after the other": {
        "architectures": ["GPTNeoXForCausalLM"],
        "use_parallel_residual": False,
        "rotary_pct": 1.0,
        "hidden_act": "gelu_fast",
    },
    "yarn": {"architectures": ["LlamaForCausalLM"], "rope_scaling": _YARN},
    "dynamic beyond its original context": {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 40,
        "rope_scaling": {"rope_type": "dynamic", "factor": 3.0},
    },
}
TIED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel")
# Two rows of unequal lengths, both beyond every window; logits are kept of some positions of each.
PROMPTS = [[5, 200, 3, 77, 140, 260, 9, 9, 31, 8] * 6, [250, 4, 4, 100, 7, 66, 180, 20, 11, 254, 90] * 4]
POSITIONS = [(0, 12, 13, 31, 32, 59), (0, 5, 14, 29, 40, 43)]
KEPT, NEW = 8, 8


def tiny(name: str) -> Tiny:
    """The variant's checkpoint."""
    rng = np.random.default_rng(len(name))
    fields = {**VARIANTS[name]}
    kind = fields["architectures"][0]
    model_type, whole, before, layer = _SHAPES[kind]
    tokenizer = tiny_hf.byte_level()
    vocab = len(tokenizer["model"]["vocab"])
    width = fields.get("hidden_size", D)

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        shape = tuple({0: vocab, D: width}.get(n, n) for n in shape)
        if len(shape) == 1:
            low = -0.5 if "Gemma" in kind or name.endswith("bias") else 0.5
            return rng.uniform(low, low + 1, shape).astype(np.float32)
        outputs = 0 if kind != "GPT2LMHeadModel" or "transformer.h" not in name else 1
        scale = shape[1 - outputs] ** -0.5
        sharp = any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key", "c_attn", "gate.weight"))
        return rng.normal(size=shape, scale=scale * (2 if sharp else 1)).astype(np.float32)

    tensors = {name: values(name, shape) for name, shape in whole.items()}
    for i in range(LAYERS):
        tensors |= {before.format(i) + name: values(before.format(i) + name, shape) for name, shape in layer.items()}
    config = {
        "model_type": model_type,
        "vocab_size": vocab,
        **_OWN_SIZES.get(kind, _SIZES),
        "tie_word_embeddings": kind in TIED,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **fields,
    }
    if kind == "GPTNeoXForCausalLM":
        config.setdefault("use_parallel_residual", True)
    config = {key: value for key, value in config.items() if value is not None}
    about = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    texts = {"config.json": config, "tokenizer.json": tokenizer, "tokenizer_config.json": about}
    return Tiny(texts, tensors)
