"""The work of one decode step, counted from the shapes, and its products alone in NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdecode.base import Model, Params
from jaxdecode.benchmark.machine import median_seconds
from jaxdecode.benchmark.timing import Case
from jaxdecode.checks import require
from jaxdecode.decoders.common import cache_spec
from jaxdecode.kvcache import stored_as
from jaxdecode.models.counts import step_counts
from jaxdecode.models.transformer import TransformerConfig

__all__ = ["Work", "numpy_seconds", "work_of"]


class Work(NamedTuple):
    """Of the average step: multiplications (S7.5, and the head's), bytes of weights and of the cache read (S7.6)."""

    multiplications: float
    weight_bytes: int
    cache_bytes: float

    @property
    def bytes(self) -> float:
        """All that is read."""
        return self.weight_bytes + self.cache_bytes


def work_of(model: Model, config: Any, params: Params, case: Case) -> Work | None:
    """The counts of a case; None for a model that is no transformer.

    Step i of N attends to prompt + i tokens. The counts are linear in that, so the average is that of both ends.
    """
    if not isinstance(config, TransformerConfig):
        return None
    cache = cache_spec(model, params, 1, 1)
    dtype = stored_as(cache.layers[0])[1]
    ends = (case.prompt, case.prompt + case.new - 1)
    first, last = (step_counts(config, params, case.batch, t, dtype) for t in ends)
    return Work(
        (first.multiplications + last.multiplications) / 2,
        first.weight_bytes,
        (first.cache_bytes + last.cache_bytes) / 2,
    )


def numpy_seconds(config: TransformerConfig, params: Params, batch: int, *, runs: int = 5) -> float:
    """One step's products with weights and nothing else, by NumPy: the median of ``runs``, after one to warm up.

    ValueError unless every matrix is float32: NumPy has fast products for nothing smaller.
    """
    matrices = _matrices(config, params)
    rng = np.random.default_rng(0)
    inputs = {k: rng.standard_normal((k, batch), np.float32) for k in {w.shape[1] for w in matrices}}

    def step() -> None:
        for w in matrices:
            w @ inputs[w.shape[1]]

    return median_seconds(step, runs)


def _matrices(config: TransformerConfig, params: Params) -> list[np.ndarray]:
    """What a step multiplies by, layer by layer, then the head: [outputs, inputs]."""
    names = ("qkv", "out", "gate_up", "up", "down", "router", "expert_gate", "expert_up", "expert_down")
    layers = [_chosen(config, name, layer[name]) for layer in params["layers"] for name in names if name in layer]
    leaves = [*layers, params["embed"] if config.tied else params["head"]]
    kinds = sorted({leaf.dtype.name if isinstance(leaf, jax.Array) else type(leaf).__name__ for leaf in leaves})
    require(kinds == ["float32"], "the floor by NumPy", "float32 weights", ", ".join(kinds))
    return [np.asarray(leaf) for leaf in leaves]


def _chosen(config: TransformerConfig, name: str, leaf: Any) -> Any:
    """Of the matrices of all experts those that one token is sent to."""
    if not name.startswith("expert") or not isinstance(leaf, jax.Array):
        return leaf
    return leaf[: len(leaf) // config.n_experts * config.experts_per_token]
