"""What quantization did to every matrix: measured errors beside their bounds (S8.2, S8.4)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxdecode.base import Params
from jaxdecode.quant import QTensor, bounds, dequantize, is_quantized

__all__ = ["OUTLIER", "described_matrices"]

OUTLIER = 6.0  # standard deviations about 0


def described_matrices(
    params: Params, quantized: Params, costs: Mapping[str, Any] | None = None, *, inside: bool = False
) -> list[dict[str, Any]]:
    """Of every quantized matrix, beside the one in ``params`` that it stands for, in the order of the tree.

    name, shape, scheme, bytes; error, model and bound, relative to ``||W||``: ``||W - Q||`` as measured, as the uniform
    error model says, and at most; largest_error of an entry; outliers: entries beyond 6 standard deviations, and peak,
    the largest in standard deviations. product and product_by_rounding: the error of W x on the calibration text,
    relative to W x, from ``costs`` of `calibrate`. inside: the grids cover all entries, so that the bound holds.
    """
    found = []
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(quantized, is_leaf=is_quantized),
        jax.tree.leaves(params),
        strict=True,
    )
    for (path, q), w in pairs:
        if not is_quantized(q):
            continue
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        found.append({"name": name, **_described(np.asarray(w, np.float32), q, inside)})
        cost = (costs or {}).get(name)
        for kind, value in (("product", "calibrated"), ("product_by_rounding", "rounding")):
            found[-1][kind] = None if cost is None else math.sqrt(max(0.0, getattr(cost, value)))
    return found


def _described(w: np.ndarray, q: Any, inside: bool) -> dict[str, Any]:
    error = w - np.asarray(dequantize(q), np.float32)
    norm = float(np.linalg.norm(w)) or 1.0
    sd = float(np.sqrt(np.mean(np.square(w, dtype=np.float64)))) or 1.0
    bound, model = _limits(q, w.shape[1])
    size = np.abs(w)
    return {
        "shape": list(w.shape),
        "scheme": str(q.scheme) if isinstance(q, QTensor) else "several",
        "bytes": int(q.nbytes),
        "error": float(np.linalg.norm(error)) / norm,
        "model": None if model is None else model / norm,
        "bound": None if bound is None or not inside else bound / norm,
        "largest_error": float(np.abs(error).max()),
        "outliers": int((size > OUTLIER * sd).sum()),
        "peak": float(size.max()) / sd,
    }


def _limits(q: Any, width: int) -> tuple[float | None, float | None]:
    """The bound of ``||W - Q||``, and what the uniform error model says."""
    if not isinstance(q, QTensor):
        return None, None
    if q.form is None:  # one scale a row, the nearest of 255 levels
        steps = float(np.linalg.norm(np.asarray(q.scale, np.float64))) * math.sqrt(width)
        return steps / 2, steps / math.sqrt(12)
    limits = bounds(q)
    return float(limits.frobenius), float(limits.model)
