"""An independent transformer in float64 NumPy: one sequence, everything recomputed, no cache.

It shares the pytree of params with the library and nothing else. It is written another way on purpose: rows are
tokens, heads are a loop, rotary positions are complex numbers, rotary scaling goes by wavelength.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from jaxdecode.models.transformer import TransformerConfig

__all__ = ["Greedy", "Trace", "attention", "forward", "greedy", "rope_speeds", "softmax"]


class Trace(NamedTuple):
    """logits[T,V]; for every layer the keys and values [T,K,h] and the residual stream after it [T,D]."""

    logits: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    residual: list[np.ndarray]


class Greedy(NamedTuple):
    """Greedy tokens, and at each step the gap between the two largest logits and their log-softmax at the token."""

    tokens: list[int]
    gaps: list[float]
    logprobs: list[float]


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis; -inf entries get 0."""
    shifted = np.exp(scores - scores.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, past: int = 0, window: int | None = None, sinks: int = 0
) -> np.ndarray:
    """S10: softmax(Q K^T / sqrt(d) + M) V for one head; q[S,h] follows ``past`` of the T positions of k, v [T,h].

    With a window M is a band, of the last ``window`` positions, and the first ``sinks`` columns.
    """
    scores = q @ k.T / math.sqrt(q.shape[1])
    row, column = past + np.arange(len(q))[:, None], np.arange(len(k))[None, :]
    hidden = column > row
    if window is not None:
        hidden |= (column <= row - window) & (column >= sinks)
    return softmax(np.where(hidden, -np.inf, scores)) @ v


def rope_speeds(config: TransformerConfig) -> np.ndarray:
    """Radians per position of each rotary pair, [h/2]."""
    speeds = []
    for pair in range(config.head_dim // 2):
        speed = 1.0 / config.rope_theta ** (2 * pair / config.head_dim)
        if config.rope_freqs is not None:
            speed /= config.rope_freqs[pair]
        if config.rope_scaling is not None:
            speed = _llama31(speed, config.rope_scaling)
        speeds.append(speed)
    return np.array(speeds)


def _llama31(speed: float, scaling: Any) -> float:
    wavelength = 2 * math.pi / speed
    shortest = scaling.original_context / scaling.high_freq_factor
    longest = scaling.original_context / scaling.low_freq_factor
    if wavelength < shortest:
        return speed
    if wavelength > longest:
        return speed / scaling.factor
    smooth = scaling.original_context / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * speed / scaling.factor + smooth * speed


def _rotate(x: np.ndarray, speeds: np.ndarray) -> np.ndarray:
    """x[T,h]: feature i and feature i + h/2 are the real and imaginary part of one number that turns."""
    half = x.shape[1] // 2
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.arange(len(x))[:, None] * speeds[None, :])
    return np.concatenate([turned.real, turned.imag], axis=1)


def _rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(1, keepdims=True) + eps) * scale


def forward(config: TransformerConfig, params: Any, tokens: Any) -> Trace:
    """The whole sequence ``tokens[T]`` at once."""

    def wide(x: Any) -> np.ndarray:
        return np.asarray(x).astype(np.float64)

    heads, kv, h = config.n_heads, config.n_kv_heads, config.head_dim
    speeds = rope_speeds(config)
    embed = wide(params["embed"])
    x = embed[np.asarray(tokens)]
    keys, values, residual = [], [], []
    window = config.sliding_window
    windows = window if isinstance(window, tuple) else (window,) * config.n_layers
    for number, layer in enumerate(params["layers"]):
        weights = wide(layer["qkv"])
        wq, wk, wv = weights[: heads * h], weights[heads * h : (heads + kv) * h], weights[(heads + kv) * h :]
        normed = _rms_norm(x, wide(layer["attn_norm"]), config.norm_eps)
        k = np.stack([_rotate(normed @ wk[i * h : (i + 1) * h].T, speeds) for i in range(kv)], axis=1)
        v = (normed @ wv.T).reshape(len(x), kv, h)
        out = []
        for i in range(heads):
            q = _rotate(normed @ wq[i * h : (i + 1) * h].T, speeds)
            group = i // (heads // kv)  # query heads share KV heads in order
            out.append(attention(q, k[:, group], v[:, group], 0, windows[number], config.attention_sinks))
        x = x + np.concatenate(out, axis=1) @ wide(layer["out"]).T
        normed = _rms_norm(x, wide(layer["mlp_norm"]), config.norm_eps)
        both = normed @ wide(layer["gate_up"]).T
        gate, up = both[:, : config.d_mlp], both[:, config.d_mlp :]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ wide(layer["down"]).T
        keys.append(k)
        values.append(v)
        residual.append(x)
    head = embed if config.tied else wide(params["head"])
    logits = _rms_norm(x, wide(params["norm"]), config.norm_eps) @ head.T
    return Trace(logits, keys, values, residual)


def greedy(config: TransformerConfig, params: Any, prompt: list[int], n: int) -> Greedy:
    """n greedy tokens after ``prompt``, the whole text recomputed for each."""
    text, gaps, logprobs = list(prompt), [], []
    for _ in range(n):
        logits = forward(config, params, text).logits[-1]
        second, first = np.sort(logits)[-2:]
        text.append(int(logits.argmax()))
        gaps.append(float(first - second))
        logprobs.append(float(np.log(softmax(logits)[text[-1]])))
    return Greedy(text[len(prompt) :], gaps, logprobs)
