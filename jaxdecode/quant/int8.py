"""The schemes with a byte for each weight and one scale per output channel: 255 levels, 0 among them.

``int8`` rounds weights and activations (one scale per row of them, to the nearest of 255 levels), ``int8_weights``
rounds weights only, at every number of rows and on every platform.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

__all__ = ["codes_and_scale"]


def codes_and_scale(w: Any, xp: Any = jnp) -> tuple[Any, Any]:
    """``codes`` and ``scale`` of w[N,K], by NumPy (``xp=np``) or jax: the same bits.

    The scale is rounded to the dtype of w first, so that the codes are the nearest for the scale that is kept. Divided
    is by reciprocals, as XLA would do it by itself, and a row is zero whose scale is no normal float32: XLA has no
    others.
    """
    wide = w.astype(np.float32)
    scale = (xp.max(xp.abs(wide), axis=1) * np.float32(1 / 127)).astype(w.dtype)
    step = scale.astype(np.float32)
    zero = step < np.finfo(np.float32).tiny
    codes = xp.round(wide * (1 / xp.where(zero, np.float32(1), step))[:, None])
    return xp.clip(codes, -127, 127).astype(np.int8), xp.where(zero, scale.dtype.type(0), scale)
