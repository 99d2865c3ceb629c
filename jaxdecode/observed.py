"""Watching what a weight is multiplied with: a leaf type that stands where a weight stands, inside any model.

A product with an `Observed` weight is the product with the weight. The cotangent of its ``moment`` [K,K], whose value
plays no part, is the sum of x x^T over all columns x that the weight meets. So one gradient of any function of the
params with respect to the moments gives the second moments of all inputs, also through jit, scan and repeated use; what
a gradient would compute on the way hangs on nothing that is asked for, and XLA removes it.

Of a moment [2,K,K] the columns are pairs: those of the first half are x, those of the second half y, and the cotangent
is the sum of y y^T and of x y^T.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdecode.quant import is_quantized

__all__ = ["Observed", "product", "second_moments"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observed:
    """A ``weight`` [N,K] and the ``moment`` [K,K] or [2,K,K] by which its inputs are seen."""

    weight: jax.Array
    moment: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        return self.weight.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(multiply: Callable[..., jax.Array], weight: jax.Array, moment: jax.Array, x: jax.Array) -> jax.Array:
    """``multiply(weight, x[K,R])``."""
    return multiply(weight, x)


def _forward(multiply: Callable[..., jax.Array], weight: jax.Array, moment: jax.Array, x: jax.Array) -> Any:
    return multiply(weight, x), (weight, moment, x)


def _backward(multiply: Callable[..., jax.Array], kept: Any, cotangent: jax.Array) -> Any:
    weight, moment, x = kept
    wide = x.astype(jnp.float32)
    if moment.ndim == 2:
        seen = _outer(wide, wide)
    else:
        first, second = jnp.split(wide, 2, axis=1)
        seen = jnp.stack([_outer(second, second), _outer(first, second)])
    return jnp.zeros_like(weight), seen, jnp.zeros_like(x)


def _outer(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dot_general(x, y, (((1,), (1,)), ((), ())))


product.defvjp(_forward, _backward)


def second_moments(fn: Callable[..., Any], params: Any, *args: Any, pairs: bool = False) -> tuple[Any, Any]:
    """``fn(params, *args)``, and the sum of x x^T [K,K] over the inputs x of every matrix of ``params``, by its place.

    pairs: the inputs are pairs (x, y), all x first, and the sums are of y y^T and x y^T [2,K,K]. ``fn`` returns float
    arrays that hang on every product that counts; a matrix that multiplies nothing has zeros. Other leaves have None.
    Everything is traced: jit what calls this.

    >>> from jaxdecode import linear
    >>> w, x = jnp.ones((3, 2)), jnp.array([[1.0, 2.0], [0.0, 1.0]])
    >>> second_moments(lambda params: linear.matmul(params["w"], x), {"w": w})[1]["w"].tolist()
    [[5.0, 2.0], [2.0, 1.0]]
    """

    def seen(w: Any) -> bool:
        return isinstance(w, jax.Array) and w.ndim == 2 and jnp.issubdtype(w.dtype, jnp.floating)

    def outputs(moments: Any) -> tuple[jax.Array, Any]:
        tagged = jax.tree.map(lambda w, m: w if m is None else Observed(w, m), params, moments, is_leaf=is_quantized)
        out = fn(tagged, *args)
        total = jnp.float32(0)
        for x in jax.tree.leaves(out):
            total = total + jnp.sum(x.astype(jnp.float32))
        return total, out

    def blank(w: Any) -> jax.Array | None:
        return jnp.zeros(((2,) if pairs else ()) + (w.shape[1],) * 2, jnp.float32) if seen(w) else None

    moments, out = jax.grad(outputs, has_aux=True)(jax.tree.map(blank, params, is_leaf=is_quantized))
    return out, moments
