"""Watching what a weight is multiplied with: a leaf type that stands where a weight stands, inside any model.

A product with an `Observed` weight is the product with the weight. The cotangent of its ``moment`` [K,K], whose value
plays no part, is the sum of x x^T over all columns x that the weight meets. So one gradient of any function of the
params with respect to the moments gives the second moments of all inputs, also through jit, scan and repeated use; what
a gradient would compute on the way hangs on nothing that is asked for, and XLA removes it.

Of a moment [2,K,K] the columns are pairs: those of the first half are x, those of the second half y, and the cotangent
is the sum of y y^T and of x y^T.

The cotangent of a moment that is a number is what rounding x to bytes costs: half of the mean square of what it changes
in the scalar that the gradient is of. That needs the gradients of x, which moments of the other kinds cut off.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdecode.quant import is_quantized

__all__ = ["Observed", "product", "rounding_costs", "second_moments"]

LEVELS = 127  # of each sign, as in ``linear.int8``


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observed:
    """A ``weight`` [N,K] and the ``moment`` [K,K], [2,K,K] or [] by which its inputs are seen."""

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
    if moment.ndim == 0:
        back = _outer(weight.astype(jnp.float32).T, cotangent.astype(jnp.float32).T)
        step = jnp.max(jnp.abs(wide), axis=0) * np.float32(1 / LEVELS)
        cost = jnp.sum(jnp.square(step) * jnp.sum(jnp.square(back), axis=0)) * np.float32(1 / 24)
        return jnp.zeros_like(weight), cost, back.astype(x.dtype)
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

    def outputs(moments: Any) -> tuple[jax.Array, Any]:
        out = fn(_tagged(params, moments), *args)
        total = jnp.float32(0)
        for x in jax.tree.leaves(out):
            total = total + jnp.sum(x.astype(jnp.float32))
        return total, out

    def blank(w: Any) -> jax.Array | None:
        return jnp.zeros(((2,) if pairs else ()) + (w.shape[1],) * 2, jnp.float32) if _is_matrix(w) else None

    moments, out = jax.grad(outputs, has_aux=True)(jax.tree.map(blank, params, is_leaf=is_quantized))
    return out, moments


def rounding_costs(loss: Callable[..., jax.Array], params: Any, *args: Any) -> Any:
    """Half of the mean square of what ``loss(params, *args)``, a number, changes by where the inputs of a matrix are
    rounded to bytes, one scale for each row of them: a number for every matrix of ``params``, by its place.

    To first order, with errors that are uniform and independent. Of the log probability of ids drawn from a model's own
    laws it is the KL divergence that this costs (by Fisher's information). Other leaves have None. It is all traced.
    """

    def of(costs: Any) -> jax.Array:
        return loss(_tagged(params, costs), *args)

    blank = jax.tree.map(lambda w: jnp.float32(0) if _is_matrix(w) else None, params, is_leaf=is_quantized)
    return jax.grad(of)(blank)


def _is_matrix(w: Any) -> bool:
    return isinstance(w, jax.Array) and w.ndim == 2 and jnp.issubdtype(w.dtype, jnp.floating)


def _tagged(params: Any, moments: Any) -> Any:
    return jax.tree.map(lambda w, m: w if m is None else Observed(w, m), params, moments, is_leaf=is_quantized)
