"""Tiny llama-family Hugging Face directories for the tests, with random weights, by the ``safetensors`` package.

Needs no jax, so that the script that makes the goldens can run beside transformers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers

D, LAYERS, MLP, CONTEXT = 64, 2, 96, 128
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("an", "d"), ("Ġ", "and"), ("Ġ", "a"), ("s", "t")]
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level() -> dict[str, Any]:
    """A byte-level BPE tokenizer.json: all bytes, some merges, three control tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*CONTROL_TOKENS, *alphabet, *("".join(merge) for merge in MERGES)]
    model = tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, MERGES)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in CONTROL_TOKENS])
    return json.loads(backend.to_str())


@dataclasses.dataclass
class Tiny:
    """What to write; texts maps the names of JSON files to their values, and of other files to their text."""

    texts: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @property
    def config(self) -> dict[str, Any]:
        return self.texts["config.json"]

    @property
    def tokenizer(self) -> dict[str, Any]:
        return self.texts["tokenizer.json"]


def tiny(
    *, heads: int = 4, kv_heads: int = 2, head_dim: int = 16, tied: bool = True, seed: int = 0, **config: Any
) -> Tiny:
    """A model with random weights; ``config``: more fields of config.json, or other values of them."""
    rng = np.random.default_rng(seed)
    tokenizer = byte_level()
    vocab = len(tokenizer["model"]["vocab"])

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape, scale=shape[-1] ** -0.5).astype(np.float32)

    def norm() -> np.ndarray:
        return rng.uniform(0.5, 1.5, D).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(vocab, D), "model.norm.weight": norm()}
    for i in range(LAYERS):
        layer = {
            "input_layernorm": norm(),
            "self_attn.q_proj": normal(heads * head_dim, D) * 3,  # attention that is far from uniform
            "self_attn.k_proj": normal(kv_heads * head_dim, D) * 3,
            "self_attn.v_proj": normal(kv_heads * head_dim, D),
            "self_attn.o_proj": normal(D, heads * head_dim),
            "post_attention_layernorm": norm(),
            "mlp.gate_proj": normal(MLP, D),
            "mlp.up_proj": normal(MLP, D),
            "mlp.down_proj": normal(D, MLP),
        }
        tensors |= {f"model.layers.{i}.{name}.weight": values for name, values in layer.items()}
    if not tied:
        tensors["lm_head.weight"] = normal(vocab, D)
    kind = config.get("architectures", [""])[0]
    for i in range(LAYERS):
        part = f"model.layers.{i}.self_attn."
        if kind == "Qwen2ForCausalLM":
            sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
            tensors |= {f"{part}{x}_proj.bias": normal(n * head_dim) * 4 for x, n in sizes.items()}
        if kind == "Qwen3ForCausalLM":
            scales = (rng.uniform(0.5, 2, head_dim).astype(np.float32) for _ in "qk")
            tensors |= {f"{part}{x}_norm.weight": scale for x, scale in zip("qk", scales, strict=True)}
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": D,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config,
    }
    about = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    texts = {"config.json": fields, "tokenizer.json": tokenizer, "tokenizer_config.json": about}
    return Tiny(texts, tensors)


def write(folder: Path, model: Tiny, change: Callable[[Tiny], None] = lambda model: None, *, shards: int = 1) -> Path:
    """Write the model to ``folder``, after ``change`` to it, its tensors dealt out to ``shards`` files."""
    change(model)
    folder.mkdir(parents=True)
    for name, value in model.texts.items():
        (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), "utf-8")
    names = sorted(model.tensors)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for i, file in enumerate(files):
        part = {name: np.ascontiguousarray(model.tensors[name]) for name in names[i::shards]}
        safetensors.numpy.save_file(part, folder / (file if shards > 1 else "model.safetensors"), {"format": "pt"})
    if shards > 1:
        places = {name: files[i % shards] for i, name in enumerate(names)}
        index = {"metadata": {"total_size": sum(v.nbytes for v in model.tensors.values())}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
# Models whose logits transformers has computed (tests/goldens/tiny_hf.json): options of ``tiny``.
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "untied": {"tied": False, "kv_heads": 1, "rms_norm_eps": 1e-3},
    "wide heads": {"head_dim": 32, "rope_theta": 500000.0},
    "every head its own": {"kv_heads": 4, "rope_scaling": None},
    "llama3 scaling": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3 scaling, new names": {
        "rope_theta": 20000.0,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 20000.0, **LLAMA3},
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 13},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "kv_heads": 1},
    "linear scaling": {"rope_scaling": {"type": "linear", "factor": 2.5}},
}
PROMPTS = [[5, 200, 3, 77, 140, 260, 9, 9, 31, 8] * 6, [250, 4, 4, 100, 7, 66, 180, 20, 11, 254] * 6]
KEPT = 12  # logits of each prompt's last position that are kept, beside their logsumexp
