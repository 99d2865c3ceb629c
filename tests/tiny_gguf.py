"""Tiny llama-family GGUF files for the tests, with random weights, written by the ``gguf`` package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxdecode.text.backend import byte_alphabet

D, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP, CONTEXT = 64, 2, 4, 2, 16, 96, 128
KINDS = gguf.GGMLQuantizationType

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "a n", "an d", "Ġ and"]
TOKENS = [*CONTROL_TOKENS, *byte_alphabet(), "th", "the", "Ġthe", "an", "and", "Ġand"]
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": CONTEXT,
    "llama.embedding_length": D,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(CONTROL_TOKENS) + [1] * (len(TOKENS) - len(CONTROL_TOKENS)),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": CHATML,
}


@dataclasses.dataclass
class Tiny:
    """What to write: metadata, and the tensors in the Hugging Face convention under the file's names."""

    fields: dict[str, Any]
    tensors: dict[str, np.ndarray]
    kinds: dict[str, gguf.GGMLQuantizationType]  # by the end of a tensor's name; float32 otherwise


def tiny(*, tied: bool = True, matrices: gguf.GGMLQuantizationType = KINDS.F32, seed: int = 0) -> Tiny:
    """A model with random weights; ``matrices``: the block type of everything but the norms."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    tensors = {"token_embd.weight": normal(len(TOKENS), D), "output_norm.weight": normal(D)}
    for i in range(LAYERS):
        tensors |= {
            f"blk.{i}.attn_norm.weight": normal(D),
            f"blk.{i}.attn_q.weight": normal(HEADS * HEAD_DIM, D),
            f"blk.{i}.attn_k.weight": normal(KV_HEADS * HEAD_DIM, D),
            f"blk.{i}.attn_v.weight": normal(KV_HEADS * HEAD_DIM, D),
            f"blk.{i}.attn_output.weight": normal(D, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_norm.weight": normal(D),
            f"blk.{i}.ffn_gate.weight": normal(MLP, D),
            f"blk.{i}.ffn_up.weight": normal(MLP, D),
            f"blk.{i}.ffn_down.weight": normal(D, MLP),
        }
    if not tied:
        tensors["output.weight"] = normal(len(TOKENS), D)
    kinds = {name: matrices for name in tensors if "norm" not in name}
    return Tiny(dict(FIELDS), tensors, kinds)


def as_qwen(model: Tiny, kind: str) -> None:
    """Make it a "qwen2", with biases, or a "qwen3", with norms of every head's queries and keys."""
    rng = np.random.default_rng(1)
    model.fields = {key.replace("llama.", f"{kind}."): value for key, value in model.fields.items()}
    model.fields |= {"general.architecture": kind, "tokenizer.ggml.pre": "qwen2"}
    sizes = {"attn_q.bias": HEADS * HEAD_DIM, "attn_k.bias": KV_HEADS * HEAD_DIM, "attn_v.bias": KV_HEADS * HEAD_DIM}
    sizes = sizes if kind == "qwen2" else {"attn_q_norm.weight": HEAD_DIM, "attn_k_norm.weight": HEAD_DIM}
    for i in range(LAYERS):
        model.tensors |= {f"blk.{i}.{name}": rng.uniform(0.5, 2, n).astype(np.float32) for name, n in sizes.items()}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix as llama.cpp's converter writes them: the halves of a head, interleaved."""
    rows, *rest = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, *rest).swapaxes(1, 2).reshape(weight.shape)


def quantized(model: Tiny, name: str) -> np.ndarray:
    """The tensor's values after its round trip through the block type it is stored in, in the file's row order."""
    kind = model.kinds.get(name, KINDS.F32)
    return gguf.dequantize(gguf.quantize(model.tensors[name], kind), kind).reshape(model.tensors[name].shape)


def write(path: Path, model: Tiny, change: Callable[[Tiny], None] = lambda model: None) -> Path:
    """Write the model to ``path``, after ``change`` to it."""
    change(model)
    writer = gguf.GGUFWriter(path, model.fields["general.architecture"])
    for key, value in model.fields.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for name, values in model.tensors.items():
        permuted = model.fields["general.architecture"] == "llama"
        heads = {"attn_q.weight": HEADS, "attn_k.weight": KV_HEADS}.get(name.split(".", 2)[-1]) if permuted else None
        stored = values if heads is None else interleaved(values, heads)
        kind = model.kinds.get(name, KINDS.F32)
        writer.add_tensor(name, gguf.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
