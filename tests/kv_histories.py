"""KV caches beside plain lists of what was written: every query is checked against the softmax formula."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from jaxdecode import kvcache

__all__ = ["GROUPS", "HEAD", "KV", "LAYERS", "WIDTH", "History", "call", "draw", "empty", "feed"]

LAYERS, KV, GROUPS, HEAD, WIDTH = 2, 2, 3, 4, 3
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}

History = list[list[tuple[np.ndarray, np.ndarray]]]  # per row and token, keys and values [LAYERS,KV,HEAD]


@jax.jit
def call(cache: kvcache.KVCache, q: Any, k: Any, v: Any, lengths: Any) -> tuple[jax.Array, kvcache.KVCache]:
    """What a model does: plan once, then extend every layer. q[L,B,K,G,S,h], k and v [L,B,S,K,h]."""
    plan = kvcache.plan(cache, k.shape[2], lengths)
    out, layers = [], []
    for i in range(LAYERS):
        one, layer = kvcache.extend(q[i], k[i], v[i], kvcache.one_layer(cache, i), plan)
        out.append(one)
        layers.append(layer)
    return jnp.stack(out), kvcache.advance(cache, layers, plan)


def draw(rng: np.random.Generator, rows: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q = rng.normal(size=(LAYERS, rows, KV, GROUPS, size, HEAD)).astype(np.float32)
    k, v = rng.normal(size=(2, LAYERS, rows, size, KV, HEAD)).astype(np.float32)
    return q, k, v


def _stored(x: np.ndarray, dtype: Any) -> np.ndarray:
    """What the cache keeps of ``x[..., h]``: the nearest of 255 levels, or of 16, as far as the largest number."""
    if dtype == jnp.uint8:  # two numbers of 4 bits: odd multiples of a number of 8 bits, which is rounded up
        mantissa, exponent = np.frexp(np.abs(x).max(-1, keepdims=True) * np.float32(1 / 15))
        half = np.ldexp(np.ceil(mantissa * 256) / 256, exponent)
        return (half * (2 * np.clip(np.round(x / half / 2 + 7.5), 0, 15) - 15)).astype(np.float32)
    if dtype != jnp.int8:
        return x
    step = np.abs(x).max(-1, keepdims=True).astype(np.float32) * np.float32(1 / 127)
    return (np.round(x / step) * step).astype(np.float32)


def feed(cache: Any, history: History, rng: Any, lengths: list[int], width: int = WIDTH) -> kvcache.KVCache:
    """One call of ``width`` tokens; checks every real query of every layer, and grows ``history``."""
    q, k, v = draw(rng, len(history), width)
    out, cache = call(cache, q, k, v, np.array(lengths, np.int32))
    assert np.isfinite(out).all()
    k, v = (_stored(x, cache.layers[0][0].k.dtype) for x in (k, v))
    for row, n in enumerate(lengths):
        past = len(history[row])
        history[row] += [(k[:, row, s], v[:, row, s]) for s in range(n)]
        for layer in range(LAYERS):
            window = cache.window(layer)
            limits = (None, 0) if window is None else (window.size, window.sinks)
            for head in range(KV):
                keys, values = (np.array([t[i][layer, head] for t in history[row]]) for i in (0, 1))
                for group in range(GROUPS if n else 0):
                    wanted = oracle.attention(np.float64(q[layer, row, head, group, :n]), keys, values, past, *limits)
                    np.testing.assert_allclose(out[layer, row, head, group, :n], wanted, **CLOSE)
    return cache


def empty(rows: int, capacity: int, *more: Any) -> tuple[kvcache.KVCache, History]:
    """An empty cache (``more``: dtype, windows) and no history."""
    return kvcache.create(LAYERS, rows, KV, HEAD, capacity, *more), [[] for _ in range(rows)]
