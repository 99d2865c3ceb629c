"""Float arithmetic whose last bits do not hang on what else a program computes, for models that round activations.

A sum is taken in whatever order suits the shape of an array, a product that is added to something may be rounded or
not, and a compiler may have one ``exp`` or ``rsqrt`` for vectors and another for single numbers. Such last bits do no
harm until an activation is rounded to a code: it then may become another one, and the difference is a thousand times as
large. ``STEADY`` leaves none of them to chance that was found, on CPUs, and takes up to a tenth longer: logits of int8
have the same bits whatever the number of rows and the mesh, for prompts and caches of the same lengths
(tests/test_arithmetic.py, tests/test_bits_over_meshes.py). The erf of exact GELU is left to the compiler. Elsewhere it
is the same as ``PLAIN``.

A division of many numbers by one that is no constant is not among them: write a product with its reciprocal. XLA turns
the first into the second in some programs and leaves it in others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["PLAIN", "STEADY", "Arithmetic"]

_LOG2_E = np.float32(1.4426950408889634)
# ln 2 as a number of 9 bits, whose products with whole numbers are exact, and the rest (Cody and Waite 1980)
_LN2, _LN2_REST = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87.33), np.float32(87.33)  # exp and its inverse are normal floats between them
# (tanh(x) / x - 1) / x^2 for |x| < 0.625, highest power of x^2 first, as there
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
# (exp(r) - 1 - r) / r^2 for |r| <= ln(2) / 2, highest power first, as in Cephes (S. Moshier): exp(r) within 1.1e-9
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


class Arithmetic(NamedTuple):
    """``sum(x, axis)`` keeps the axis; ``product(x)``: the product x as it is rounded, whatever is added to it."""

    sum: Callable[[jax.Array, int], jax.Array]
    product: Callable[[jax.Array], jax.Array]
    exp: Callable[[jax.Array], jax.Array]
    rsqrt: Callable[[jax.Array], jax.Array]
    tanh: Callable[[jax.Array], jax.Array]

    def mean(self, x: jax.Array, axis: int) -> jax.Array:
        return self.product(self.sum(x, axis) / x.shape[axis])

    def softmax(self, x: jax.Array, axis: int) -> jax.Array:
        if self is PLAIN:
            return jax.nn.softmax(x, axis)
        weight = self.exp(x - jnp.max(x, axis, keepdims=True))
        return weight * (1 / self.sum(weight, axis))

    def capped(self, x: jax.Array, cap: float | None) -> jax.Array:
        """c tanh(x / c): near x where that is small, never beyond c."""
        return x if cap is None else self.product(self.tanh(x / cap) * cap)

    def gelu_tanh(self, x: jax.Array) -> jax.Array:
        if self is PLAIN:
            return jax.nn.gelu(x, approximate=True)
        inside = x + self.product(jnp.asarray(0.044715, x.dtype) * (x * x * x))
        return x * (0.5 + 0.5 * self.tanh(jnp.asarray(np.sqrt(2 / np.pi), x.dtype) * inside))

    def silu(self, x: jax.Array) -> jax.Array:
        return jax.nn.silu(x) if self is PLAIN else x / (1 + self.exp(-x))


def _on_cpu(steady: Callable[[jax.Array], jax.Array], plain: Callable[[jax.Array], jax.Array], x: jax.Array) -> Any:
    return lax.platform_dependent(x, cpu=steady, default=plain)


def _plain_sum(x: jax.Array, axis: int) -> jax.Array:
    return jnp.sum(x, axis, keepdims=True)


def _sum(x: jax.Array, axis: int) -> jax.Array:
    return _on_cpu(lambda x: _halves(x, axis), lambda x: _plain_sum(x, axis), x)


def _halves(x: jax.Array, axis: int) -> jax.Array:
    """One half added to the other until one is left; what is odd is added at last."""
    x, odd = _as_rounded(x), []
    while (size := x.shape[axis]) > 1:
        if size % 2:
            odd.append(lax.slice_in_dim(x, size - 1, size, axis=axis))
        first, second = (lax.slice_in_dim(x, i * (size // 2), (i + 1) * (size // 2), axis=axis) for i in (0, 1))
        x = first + second
    for one in odd:
        x = x + one
    return x if x.shape[axis] else _plain_sum(x, axis)


def _product(x: jax.Array) -> jax.Array:
    return _on_cpu(_as_rounded, lambda x: x, x)


def _as_rounded(x: jax.Array) -> jax.Array:
    """x but for -infinity: a maximum stands between a product and a sum, so that no instruction does both."""
    return jnp.maximum(x, jnp.finfo(x.dtype).min)


@jax.custom_jvp
def _exp(x: jax.Array) -> jax.Array:
    return _on_cpu(_polynomial, jnp.exp, x) if x.dtype == jnp.float32 else jnp.exp(x)


@_exp.defjvp
def _exp_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    y = _exp(*primals)
    return y, y * tangents[0]


def _polynomial(x: jax.Array) -> jax.Array:
    """exp within 2 units in the last place, 0 below the normal floats; above e^87.33 it stays there.

    It ends in a division by a power of 2, as exact as the product would be: what divides counts as dear, and XLA does
    not compute it again for everything that reads it.
    """
    inside = jnp.clip(x, _LOWEST, _HIGHEST)
    n = jnp.round(inside * _LOG2_E)
    r = inside - n * _LN2 - n * _LN2_REST
    p = jnp.float32(0)
    for coefficient in _EXP:
        p = p * r + np.float32(coefficient)
    inverse = lax.bitcast_convert_type((127 - n.astype(jnp.int32)) << 23, jnp.float32)  # 2^-n
    return jnp.where(x < _LOWEST, 0, (p * r * r + r + 1) / inverse)


def _rsqrt(x: jax.Array) -> jax.Array:
    # Both are exact to the last bit; what XLA has for the two at once is an estimate, and another one for vectors.
    return _on_cpu(lambda x: 1 / _as_rounded(jnp.sqrt(x)), lax.rsqrt, x)


@jax.custom_jvp
def _tanh(x: jax.Array) -> jax.Array:
    return _on_cpu(_odd, jnp.tanh, x) if x.dtype == jnp.float32 else jnp.tanh(x)


@_tanh.defjvp
def _tanh_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    y = _tanh(*primals)
    return y, (1 - y * y) * tangents[0]


def _odd(x: jax.Array) -> jax.Array:
    """tanh within 2 units in the last place."""
    size = jnp.abs(x)
    square, p = x * x, jnp.float32(0)
    for coefficient in _TANH:
        p = p * square + np.float32(coefficient)
    far = jnp.sign(x) * (1 - 2 / (_polynomial(2 * size) + 1))
    return jnp.where(size < 0.625, _as_rounded(p * square * x) + x, far)


PLAIN = Arithmetic(_plain_sum, lambda x: x, jnp.exp, lax.rsqrt, jnp.tanh)
STEADY = Arithmetic(_sum, _product, _exp, _rsqrt, _tanh)
