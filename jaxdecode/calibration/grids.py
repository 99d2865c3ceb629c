"""Grids of groups of weights that fit an objective: by search under weights, and by least squares under a Hessian.

All in NumPy. A matrix is w[N,K], its K columns in groups of ``size`` (the last may be short); grids are ``scale`` and
``offset`` [N,G], codes c stand for ``scale * c + offset``. The error e = w - value of a row costs ``e H e``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxdecode import checks
from jaxdecode.quant import Uniform, grid_of, nearest_codes, quantize_matrix, unpack, value_of
from jaxdecode.quant.grids import TINY, bits_of, round_bits
from jaxdecode.quant.packing import storable

__all__ = ["by_groups", "expand", "group_size", "refit", "rounded", "search", "stored"]

SHRINKS = np.linspace(1.0, 0.4, 9, dtype=np.float32)  # of the range, where the search starts
STEPS = 2  # of codes and grid in turn, from each start
RIDGE = 1e-6  # of the diagonal: groups whose codes are all equal do not tell scale and offset apart


def group_size(k: int, uniform: Uniform) -> int:
    """Columns of a group. ValueError: one grid for all rows, which hang together then."""
    checks.require(uniform.group != "tensor", "scheme", "a grid for each group or channel", uniform)
    return k if uniform.group == "channel" else min(k, int(uniform.group))


def by_groups(x: np.ndarray, size: int) -> list[np.ndarray]:
    """x[...,K] as [...,G,size], and what is left as [...,1,rest]."""
    whole = x.shape[-1] // size * size
    parts = [x[..., :whole].reshape(*x.shape[:-1], -1, size), x[..., None, whole:]]
    return [part for part in parts if part.size]


def expand(grid: np.ndarray, k: int, size: int) -> np.ndarray:
    """[N,G] -> [N,K]: the grid of every column."""
    return np.repeat(grid, size, axis=1)[:, :k]


def rounded(w: np.ndarray, uniform: Uniform) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Plain rounding: codes [N,K], scale and offset [N,G], by the scheme's own range."""
    codes, scale, offset = unpack(quantize_matrix(w, uniform))
    return codes, scale, offset


def stored(scale: np.ndarray, offset: np.ndarray, uniform: Uniform) -> tuple[np.ndarray, np.ndarray]:
    """The nearest grids that can be kept: few bits, and those of an even or zero grid symmetric or with a 0."""
    bits = bits_of(uniform)
    scale = np.maximum(scale.astype(np.float32), TINY)
    if uniform.grid == "even":
        half = np.maximum(round_bits(scale * np.float32(0.5), bits, "nearest"), TINY)
        return half * 2, half * np.float32(-uniform.last_code)
    if uniform.grid == "zero":
        zero = np.clip(np.round(-offset / scale), 0, uniform.last_code).astype(np.float32)
        scale = round_bits(scale, bits, "nearest")
        return scale, -(zero * scale)
    offset = round_bits(offset.astype(np.float32), bits, "nearest")
    return round_bits(scale, bits, "nearest"), np.where(abs(offset) < TINY, np.float32(0), offset)


def _base(codes: np.ndarray, scale: np.ndarray, offset: np.ndarray, uniform: Uniform) -> np.ndarray:
    """Codes as the multiples of the scale that they stand for, where the offset follows from the scale."""
    middle = np.float32(uniform.last_code / 2)
    zero = middle if uniform.grid == "even" else np.round(-offset / np.where(scale == 0, np.float32(1), scale))
    return codes.astype(np.float32) - zero


def search(w: np.ndarray, weight: np.ndarray, uniform: Uniform) -> tuple[np.ndarray, np.ndarray]:
    """Grids [N,G] of little ``sum(weight[K] * error^2)``: from several ranges, codes and grid in turn."""
    size = group_size(w.shape[1], uniform)
    whole = dataclasses.replace(uniform, range="max")
    parts = zip(by_groups(w, size), by_groups(weight, size), strict=True)
    grids = [_search(part, heavy, grid_of(part, whole), uniform) for part, heavy in parts]
    return storable(np.concatenate([g[0] for g in grids], 1), np.concatenate([g[1] for g in grids], 1), uniform)


def _search(w: np.ndarray, weight: np.ndarray, widest: Any, uniform: Uniform) -> tuple[np.ndarray, np.ndarray]:
    best, least = widest, None
    centre = np.float32(uniform.last_code / 2)
    empty = widest[0] == 0  # one value, which its offset holds
    for shrink in SHRINKS:
        scale = widest[0] * shrink
        offset = widest[1] * shrink if uniform.grid != "affine" else widest[1] + centre * (widest[0] - scale)
        for step in range(STEPS + 1):
            scale, offset = stored(scale, offset, uniform)
            codes = nearest_codes(w, scale, offset, uniform.bits)
            error = w - value_of(codes, scale[..., None], offset[..., None])
            loss = np.einsum("ngk,gk->ng", error * error, weight)
            better = ~empty if least is None else (loss < least) & ~empty
            least = loss if least is None else np.where(better, loss, least)
            best = np.where(better, scale, best[0]), np.where(better, offset, best[1])
            if step < STEPS:
                scale, offset = _fit_diagonal(w, codes, scale, offset, weight, uniform)
    return best


def _fit_diagonal(
    w: np.ndarray, codes: np.ndarray, scale: np.ndarray, offset: np.ndarray, weight: np.ndarray, uniform: Uniform
) -> tuple[np.ndarray, np.ndarray]:
    """The best grid of codes that stay, under weights of the columns alone."""
    if uniform.grid != "affine":
        base = _base(codes, scale[..., None], offset[..., None], uniform)
        below = np.einsum("ngk,gk->ng", base * base, weight)
        new = np.einsum("ngk,gk->ng", base * w, weight) / np.where(below > 0, below, 1)
        new = np.where((below > 0) & (new > 0), new, scale).astype(np.float32)
        return new, offset / np.where(scale == 0, 1, scale) * new
    c = codes.astype(np.float32)
    total = weight.sum(-1)[None] + np.float32(TINY)
    mean_c, mean_w = (np.einsum("ngk,gk->ng", x, weight) / total for x in (c, w))
    c, centred = c - mean_c[..., None], w - mean_w[..., None]
    below = np.einsum("ngk,gk->ng", c * c, weight)
    new = np.einsum("ngk,gk->ng", c * centred, weight) / np.where(below > 0, below, 1)
    ok = (below > 0) & (new > 0)
    return np.where(ok, new, scale), np.where(ok, mean_w - new * mean_c, offset)


def refit(
    w: np.ndarray, h: np.ndarray, codes: np.ndarray, scale: np.ndarray, offset: np.ndarray, uniform: Uniform
) -> tuple[np.ndarray, np.ndarray]:
    """The grids [N,G] that cost least for codes that stay: all grids of a row together, in closed form."""
    k = w.shape[1]
    size = group_size(k, uniform)
    starts = np.arange(0, k, size)
    affine = uniform.grid == "affine"
    s, o = expand(scale, k, size), expand(offset, k, size)
    bases = [codes.astype(np.float32), np.ones_like(w)] if affine else [_base(codes, s, o, uniform)]
    error = w - value_of(codes, s, o)
    g = len(starts)
    gram = np.empty((len(w), len(bases) * g, len(bases) * g), np.float32)
    right = np.empty((len(w), len(bases) * g), np.float32)
    pulled = error @ h
    for i, a in enumerate(bases):
        right[:, i * g : (i + 1) * g] = np.add.reduceat(a * pulled, starts, axis=1)
        for at, first in enumerate(starts):
            row = a[:, first : first + size] @ h[first : first + size]
            for j, b in enumerate(bases):
                gram[:, i * g + at, j * g : (j + 1) * g] = np.add.reduceat(row * b, starts, axis=1)
    diagonal = np.einsum("nii->ni", gram)
    diagonal += RIDGE * diagonal + np.float32(TINY)
    change = np.linalg.solve(gram.astype(np.float64), right.astype(np.float64)[..., None])[..., 0]
    new = scale + change[:, :g]
    ok = (new > 0) & (scale > 0) & np.isfinite(new)
    new = np.where(ok, new, scale).astype(np.float32)
    moved = offset + change[:, g:] if affine else offset / np.where(scale == 0, 1, scale) * new
    kept = stored(new, np.where(ok, moved, offset).astype(np.float32), uniform)
    return storable(np.where(scale == 0, scale, kept[0]), np.where(scale == 0, offset, kept[1]), uniform)
