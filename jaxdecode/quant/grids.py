"""Grids of a group of weights, and the nearest codes on them: S8.1, S8.5, S8.6.

A grid is a scale and an offset: code j stands for ``scale * j + offset``. A scale has so few significant bits that
``scale * j`` is exact in float32, so a value is rounded once, by whatever it is computed with. Everything here works
with NumPy arrays and with jax's, also under jit, and ``range="max"`` gives the same bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode.quant.schemes import Uniform

__all__ = ["TINY", "bits_of", "grid_of", "namespace", "nearest_codes", "round_bits", "value_of"]

TINY = np.finfo(np.float32).tiny  # XLA has no smaller numbers: they count as 0
PERCENTILE = 99.9
_SHRINK = 2.0 ** (-np.arange(40) / 10)  # ends of the grid that the search tries, from all of the range to 1/15


def namespace(x: Any) -> Any:
    """NumPy for its arrays, else jax.numpy."""
    return np if isinstance(x, np.ndarray | np.generic) else jnp


def bits_of(uniform: Uniform) -> int:
    """Significant bits of a scale: those of float16 where there are many, else as many as leave products exact."""
    return 11 if isinstance(uniform.group, int) else 16


def round_bits(x: Any, bits: int, how: str) -> Any:
    """float32 ``x`` to so many significant bits: "nearest", "up" (away from 0 for x > 0) or "down" (to -infinity)."""
    xp = namespace(x)
    drop = 24 - bits
    whole = x.view(np.int32) if xp is np else jax.lax.bitcast_convert_type(x, jnp.int32)
    low = np.int32((1 << drop) - 1)
    if how == "nearest":  # ties to even, as a cast to float16
        add = np.int32(low >> 1) + ((whole >> np.int32(drop)) & np.int32(1))
    elif how == "up":
        add = low
    else:
        add = xp.where(whole < 0, low, np.int32(0))
    whole = (whole + add) & ~low
    return whole.view(np.float32) if xp is np else jax.lax.bitcast_convert_type(whole, jnp.float32)


def grid_of(w: Any, uniform: Uniform) -> tuple[Any, Any]:
    """``scale`` and ``offset`` [...] in float32 of each group w[...,n], as they can be stored.

    A group of zeros has scale and offset 0. By ``range="max"`` the grid covers the group, and a group that lies on an
    affine grid of float16 numbers, with both its ends, gets that grid.
    """
    xp = namespace(w)
    w = _wide(w)
    if uniform.grid == "even":
        return _even(xp, w, uniform)
    low, high = w.min(axis=-1), w.max(axis=-1)
    if uniform.range == "percentile":
        ends = (100 - PERCENTILE) / 2
        low, high = (xp.percentile(w, p, axis=-1).astype(np.float32) for p in (ends, 100 - ends))
    grid = _affine if uniform.grid == "affine" else _zero
    if uniform.range == "search":
        middle = xp.clip(w.mean(axis=-1, dtype=np.float32), low, high)
        for shrink_high in (True, False):
            find = _low_or_high(xp, grid, (low, middle, high), shrink_high, uniform)
            end = _nearer(xp, high if shrink_high else low, middle, _least_error(xp, w, find, uniform))
            low, high = (low, end) if shrink_high else (end, high)
    return grid(xp, low, high, uniform)


def nearest_codes(w: Any, scale: Any, offset: Any, bits: int) -> Any:
    """The code, uint8, of the level nearest to each entry of w[...,n] for grids [...]; ends of the grid beyond it."""
    xp = namespace(w)
    w, scale, offset = _wide(w), scale[..., None], offset[..., None]
    last = np.float32(2**bits - 1)
    inverse = 1 / xp.where(scale == 0, np.float32(1), scale)
    codes = xp.clip(xp.round((w - offset) * inverse), 0, last)
    error = w - value_of(codes, scale, offset)  # the code may be one off near a tie: what is kept is compared
    half = scale * np.float32(0.5)
    codes = codes + (error > half).astype(np.float32) - (error < -half).astype(np.float32)
    return xp.where(scale == 0, np.float32(0), xp.clip(codes, 0, last)).astype(np.uint8)


def value_of(codes: Any, scale: Any, offset: Any) -> Any:
    """What codes stand for, float32; the shapes must fit each other."""
    return codes.astype(np.float32) * scale + offset


def _wide(w: Any) -> Any:
    wide = w.astype(np.float32)
    return namespace(w).where(abs(wide) < TINY, np.float32(0), wide)


def _even(xp: Any, w: Any, uniform: Uniform) -> tuple[Any, Any]:
    size = abs(w)
    end = size.max(axis=-1)
    if uniform.range == "percentile":
        end = xp.percentile(size, PERCENTILE, axis=-1).astype(np.float32)

    def grid(end: Any) -> tuple[Any, Any]:
        half = round_bits(end * np.float32(1 / uniform.last_code), bits_of(uniform), "up")
        half = xp.where(end == 0, np.float32(0), xp.maximum(half, TINY))
        return half * 2, half * np.float32(-uniform.last_code)

    if uniform.range == "search":
        end = end * _least_error(xp, w, lambda shrink: grid(end * shrink), uniform)
    return grid(end)


def _affine(xp: Any, low: Any, high: Any, uniform: Uniform) -> tuple[Any, Any]:
    bits, inverse = bits_of(uniform), np.float32(1 / uniform.last_code)
    offset = round_bits(low, bits, "down")
    offset = xp.where(abs(offset) < TINY, np.float32(0), offset)
    scale = round_bits((high - offset) * inverse, bits, "nearest")
    short = value_of(xp.full_like(scale, uniform.last_code), scale, offset) < high
    scale = xp.where(short, round_bits(scale * np.float32(1 + 2.0**-bits), bits, "up"), scale)
    return xp.where(high > offset, xp.maximum(scale, TINY), np.float32(0)), offset


def _zero(xp: Any, low: Any, high: Any, uniform: Uniform) -> tuple[Any, Any]:
    low, high = xp.minimum(low, np.float32(0)), xp.maximum(high, np.float32(0))
    inverse = np.float32(1 / uniform.last_code)
    scale = round_bits((high - low) * inverse, bits_of(uniform), "up")
    scale = xp.where(high > low, xp.maximum(scale, TINY), np.float32(0))
    zero = xp.round(-low / xp.where(scale == 0, np.float32(1), scale))
    return scale, -(zero * scale)


def _low_or_high(xp: Any, grid: Any, ends: tuple[Any, Any, Any], shrink_high: bool, uniform: Uniform) -> Any:
    low, middle, high = ends

    def find(shrink: Any) -> tuple[Any, Any]:
        if shrink_high:
            return grid(xp, low, _nearer(xp, high, middle, shrink), uniform)
        return grid(xp, _nearer(xp, low, middle, shrink), high, uniform)

    return find


def _nearer(xp: Any, end: Any, middle: Any, shrink: Any) -> Any:
    return xp.where(shrink == np.float32(1), end, middle + (end - middle) * shrink)


def _least_error(xp: Any, w: Any, find: Any, uniform: Uniform) -> Any:
    """For each group the factor of its range, one of a row of them, whose grid has the least squared error."""
    largest = abs(w).max(axis=-1)
    unit = 1 / xp.where(largest == 0, np.float32(1), largest)  # squares of huge and tiny numbers stay in range
    factors = xp.asarray(_SHRINK, np.float32)

    def step(i: Any, found: tuple[Any, Any]) -> tuple[Any, Any]:
        best, least = found
        scale, offset = find(factors[i])
        codes = nearest_codes(w, scale, offset, uniform.bits)
        error = (w - value_of(codes, scale[..., None], offset[..., None])) * unit[..., None]
        loss = xp.sum(error * error, axis=-1, dtype=np.float32)
        return xp.where(loss < least, factors[i], best), xp.minimum(loss, least)

    found = xp.full_like(largest, 1), xp.full_like(largest, np.inf)
    if xp is np:
        for i in range(len(factors)):
            found = step(i, found)
    else:
        found = jax.lax.fori_loop(0, len(factors), step, found)
    return found[0]
