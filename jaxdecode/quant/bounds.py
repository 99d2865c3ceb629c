"""What rounding to a grid can do at most, and what it does on average: S8.2 and S8.4."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks
from jaxdecode.quant.grids import TINY, round_bits
from jaxdecode.quant.packing import grids_of
from jaxdecode.quant.tensor import QTensor

__all__ = ["Bounds", "bounds"]


class Bounds(NamedTuple):
    """Of W - Q for a weight Q [N,K] whose grids cover W.

    entry: the largest error of an entry in each group [G,N], D/2 and 2 ulp of the end of the grid. frobenius: the
    largest ``||W - Q||_F``, and so the largest ``||(W - Q) x|| / ||x||``. model: ``||W - Q||_F`` if errors are uniform
    on a step, D^2 / 12 each.
    """

    entry: jax.Array
    frobenius: jax.Array
    model: jax.Array


def bounds(q: QTensor) -> Bounds:
    """The bounds that hold for any W inside the grids of ``q``, as ``range="max"`` makes them; they need no W.

    An error of 2^-126, below which numbers count as zero, is always allowed for. ValueError: int8 and int8_weights.

    >>> import jax.numpy as jnp, jaxdecode as jd
    >>> q = jd.quantize({"w": jnp.linspace(-1, 1, 6).reshape(2, 3)}, "int3_tensor")["w"]
    >>> float(bounds(q).entry[0, 0])  # S8.5: levels 1/7, 3/7, ... are 2/7 apart
    0.142...
    """
    ok = isinstance(q, QTensor) and q.form is not None
    checks.require(ok, "q", "a QTensor of a uniform scheme", q.scheme if isinstance(q, QTensor) else type(q).__name__)
    assert q.form is not None
    scale, offset = grids_of(q)
    scale = abs(scale)
    end = jnp.maximum(abs(offset), abs(offset + scale * np.float32(2**q.form.bits - 1)))
    ulp = round_bits(end, 1, "down") * np.float32(2.0**-23)  # of a single bit its power of 2 is left
    entry = jnp.maximum(scale / 2 + 2 * ulp, TINY)
    sizes = np.full(q.form.groups, q.form.group, np.float32)
    sizes[-1] = q.form.width - (q.form.groups - 1) * q.form.group
    return Bounds(entry, _norm(entry, sizes), _norm(scale / np.sqrt(np.float32(12)), sizes))


def _norm(error: Any, sizes: np.ndarray) -> jax.Array:
    """The Frobenius norm of a matrix with the same entry in all of a group."""
    largest = jnp.max(error)
    unit = jnp.where(largest == 0, 1, largest)
    return unit * jnp.sqrt(jnp.sum(sizes @ jnp.square(error / unit)))
