"""What this machine can do now: how fast it reads and multiplies; and the most memory this process took."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

__all__ = ["Machine", "measure_machine", "median_seconds", "peak_bytes", "reset_peak"]

_READ = 1 << 28  # bytes: far more than any cache keeps
_TRIES = 7


class Machine(NamedTuple):
    """``read_bandwidth`` in bytes per second, ``multiply_rate`` in multiplications per second by type of number."""

    read_bandwidth: float
    multiply_rate: dict[str, float]

    def rate(self, dtype: str) -> float:
        """For products of ``dtype``: its own rate, or that of float32, since any float may be widened first."""
        rates = self.multiply_rate
        return rates[dtype] if dtype == "int8" else max(rates[dtype], rates["float32"])

    def floor_seconds(self, read: float, multiplications: float, dtype: str) -> float:
        """The least time for that many bytes and multiplications, if both overlap perfectly."""
        return max(read / self.read_bandwidth, multiplications / self.rate(dtype))


def measure_machine(dtypes: Iterable[str] = (), *, read: int = _READ, tries: int = _TRIES) -> Machine:
    """Measure now, all threads, the median of ``tries``: reading ``read`` bytes, products of float32 and ``dtypes``.

    By jax on its default device, and by NumPy too where that is the CPU; the faster one counts.
    """
    rates = {name: _multiply_rate(name, tries) for name in sorted({"float32", *dtypes})}
    return Machine(_read_bandwidth(read, tries), rates)


def median_seconds(fn: Callable[[], Any], tries: int) -> float:
    """The median time of ``tries`` calls, after one that does not count."""
    fn()
    times = []
    for _ in range(tries):
        begin = time.perf_counter()
        fn()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


@functools.partial(jax.jit, static_argnums=2)
def _product(w: jax.Array, x: jax.Array, wide: DTypeLike) -> jax.Array:
    return lax.dot_general(w, x, (((1,), (0,)), ((), ())), preferred_element_type=wide)


def _read_bandwidth(read: int, tries: int) -> float:
    """One pass over a float32 matrix, as a product with one vector."""
    width = 1024
    w, x = jnp.ones((max(1, read // (4 * width)), width), jnp.float32), jnp.ones((width,), jnp.float32)
    seconds = median_seconds(lambda: _product(w, x, jnp.float32).block_until_ready(), tries)
    if _on_cpu():
        matrix, vector = np.asarray(w), np.asarray(x)  # views of the same memory
        seconds = min(seconds, median_seconds(lambda: matrix @ vector, tries))
    return w.nbytes / seconds


def _multiply_rate(dtype: DTypeLike, tries: int) -> float:
    """One product of a size that every library is at its best for."""
    n, k, m = (4096, 1024, 256) if _on_cpu() else (8192, 8192, 8192)
    w, x = jnp.ones((n, k), dtype), jnp.ones((k, m), dtype)
    wide = jnp.int32 if w.dtype == jnp.int8 else jnp.float32
    seconds = median_seconds(lambda: _product(w, x, wide).block_until_ready(), tries)
    if _on_cpu() and w.dtype == jnp.float32:
        left, right = np.asarray(w), np.asarray(x)
        seconds = min(seconds, median_seconds(lambda: left @ right, tries))
    return n * k * m / seconds


def reset_peak() -> bool:
    """Let the peak start again from what this process holds now; False where the system cannot (not Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int | None:
    """The most memory that was resident in this process, mapped files included; None where it is not told."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
