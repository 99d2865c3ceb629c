"""Channel scales: an input of one weight is made smaller, and its column larger, by powers of 2: the same model.

Between two weights often stands nothing but what keeps a factor of a channel: the gain of a norm and the products that
follow it, the ``up`` half of a gated MLP and ``down``, the values of attention and ``out``. Powers of 2 there change no
output by a bit, but what a grid has to hold (SmoothQuant, Xiao et al. 2022): one large channel no longer takes the
levels of all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdecode.base import Params
from jaxdecode.models.transformer import TransformerConfig

__all__ = ["divided", "factors", "links"]

MOST = 8  # bits that a channel is shifted by


def links(config: TransformerConfig) -> tuple[str, ...]:
    """The matrices of a layer whose input channels can be divided by something before."""
    found = []
    if config.norm_place != "after":
        found.append("qkv")
        if not config.n_experts:
            found.append("gate_up" if config.gated else "up")
    found.append("out")
    if config.gated and not config.n_experts:
        found.append("down")
    return tuple(found)


def factors(config: TransformerConfig, layer: Params, moments: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By what to divide the inputs of each matrix that can be, from their second moments [K,K]: powers of 2.

    The square root of the root mean squares of inputs by that of columns, so that both sides carry half of what is
    uneven; about 1 on the whole.
    """
    found = {}
    for name in links(config):
        if name not in moments:
            continue
        size = np.diag(moments[name])
        column = np.mean(np.square(np.asarray(layer[name], np.float64)), axis=0)
        there = (size > 0) & (column > 0)
        wanted = np.log2(np.where(there, size, 1) / np.where(there, column, 1)) / 4
        wanted = np.where(there, wanted - (np.median(wanted[there]) if there.any() else 0), 0)
        if name == "out":
            wanted = wanted.reshape(config.n_kv_heads, -1, config.head_dim)
            wanted = np.broadcast_to(wanted.mean(1, keepdims=True), wanted.shape).reshape(-1)
        found[name] = 2.0 ** np.clip(np.round(wanted), -MOST, MOST)
    return found


def divided(config: TransformerConfig, layer: Params, by: Mapping[str, Any]) -> Params:
    """A layer in which channel k of what the matrix ``name`` meets is 1 / by[name][k] of what it was.

    Of "out" every query head of a group has the same numbers, those of its values.
    """
    layer = dict(layer)
    for name, scales in by.items():
        s = jnp.asarray(scales, layer[name].dtype)
        layer[name] = layer[name] * s[None]
        if name == "out":
            h, groups = config.head_dim, config.n_heads // config.n_kv_heads
            rows = s.reshape(config.n_kv_heads, groups, h)[:, 0].reshape(-1)
            _divide(layer, "qkv", rows, layer["qkv"].shape[0] - len(rows))
        elif name == "down":
            _divide(layer, "gate_up", s, config.d_mlp)
        else:
            norm = "attn_norm" if name == "qkv" else "mlp_norm"
            for vector in (norm, f"{norm}_bias"):
                if vector in layer:
                    layer[vector] = layer[vector] / s
    return layer


def _divide(layer: dict[str, Any], name: str, by: Any, first: int) -> None:
    """Rows of a matrix from ``first`` on, and of its bias."""
    last = first + len(by)
    layer[name] = layer[name].at[first:last].divide(by[:, None])
    if f"{name}_bias" in layer:
        layer[f"{name}_bias"] = layer[f"{name}_bias"].at[first:last].divide(by)
