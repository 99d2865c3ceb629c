"""Products with codes of a byte for each weight and one scale per output channel: int8 and int8_weights.

| scheme       | CPU                                                             | elsewhere                         |
|--------------|-----------------------------------------------------------------|-----------------------------------|
| int8         | int8 x int8 -> int32, x rounded per row; one row is padded to 2 | the same, unpadded                |
|              | (jax < 0.10.2: codes converted inside the product, ``_one_row``)|                                   |
| int8_weights | the same with x as three int8 digits, side by side as 3R rows   | ``W`` converted inside the product|

On XLA:CPU one row of int8 never reaches the library kernels (two do), and a convert of W would be hoisted out of the
decode loop as a float copy of the model. Integer products have no rounding, so the forms agree bit for bit at every
number of rows. Three digits carry 21 bits of the largest activation of a row, where a code of the weight carries 7.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdecode.meshes import DATA, size_of
from jaxdecode.quant import QTensor

__all__ = ["product"]

_CONTRACT = (((1,), (0,)), ((), ()))


def product(w: QTensor, x: jax.Array) -> jax.Array:
    """``W[N,K] @ x[K,R]`` -> [N,R] in the dtype of x, float32 or wider."""
    return _by_codes(w.scheme == "int8", w.codes, x) * w.scale.astype(x.dtype)[:, None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _by_codes(rounds: bool, codes: jax.Array, x: jax.Array) -> jax.Array:
    return _rounded(codes, x) if rounds else _digits(codes, x)


@_by_codes.defjvp
def _by_codes_jvp(
    rounds: bool, primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """As if x were not rounded (straight through, Bengio et al. 2013): of steps the slope is 0 nearly everywhere."""
    codes, x = primals
    return _by_codes(rounds, codes, x), _values_product(codes, tangents[1])


def _values_product(codes: jax.Array, x: jax.Array) -> jax.Array:
    return lax.dot_general(codes.astype(x.dtype), x, _CONTRACT, preferred_element_type=x.dtype)


def _scale(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One scale per row of x[K,R], [1,R], of which the largest magnitude is 127, and its reciprocal.

    By that x is multiplied: XLA turns a division by what is one number for many into that by itself, but not in every
    program, and a code that hangs on it would be another one over a mesh. NaN stays NaN, and makes its row NaN; a row
    is zero whose scale is no normal number.
    """
    scale = jnp.max(jnp.abs(x), axis=0, keepdims=True) * np.asarray(1 / 127, x.dtype)
    scale = jnp.where(scale < jnp.finfo(x.dtype).tiny, 1, scale)
    return scale, 1 / scale


def _integer(codes: jax.Array, x: jax.Array) -> jax.Array:
    return lax.dot_general(codes, x, _CONTRACT, preferred_element_type=jnp.int32)


def _rounded(codes: jax.Array, x: jax.Array) -> jax.Array:
    scale, inverse = _scale(x)

    def default(codes: jax.Array, x: jax.Array, inverse: jax.Array) -> jax.Array:
        return _integer(codes, jnp.round(x * inverse).astype(jnp.int8))

    def pairs(codes: jax.Array, x: jax.Array, inverse: jax.Array) -> jax.Array:
        """One row on every device, which is padded where it lies."""
        out = default(codes, *(jnp.repeat(y, 2, axis=1) for y in (x, inverse)))
        return out.reshape(out.shape[0], -1, 2)[:, :, 0]

    def cpu(codes: jax.Array, x: jax.Array, inverse: jax.Array) -> jax.Array:
        if 1 < x.shape[1] == size_of(DATA):
            return pairs(codes, x, inverse)
        if x.shape[1] > 1:
            return default(codes, x, inverse)
        if _FUSES_CONVERT:
            return _one_row(codes, x, inverse)
        return default(codes, jnp.tile(x, (1, 2)), jnp.tile(inverse, (1, 2)))[:, :1]

    return lax.platform_dependent(codes, x, inverse, cpu=cpu, default=default).astype(x.dtype) * scale


_FUSES_CONVERT = jax.__version_info__ < (0, 10, 2)


def _one_row(codes: jax.Array, x: jax.Array, inverse: jax.Array) -> jax.Array:
    """The integer product with x[K,1] as XLA:CPU before 0.10.2 makes it at the speed of memory.

    There a converted weight is read by the product itself, unless the conversion is hoisted out of the decode loop: the
    barrier keeps it in, and reshapes of x out. The rounding of x would be drawn into the product too, once for every
    output: a division by ones that XLA cannot know, and holds to be dear, keeps it out. Where every sum of products of
    bytes fits a float, floats are exact.
    """
    wide = jnp.float32 if x.shape[0] * 127 * 127 < 2**24 else jnp.int32
    codes, x = lax.optimization_barrier((codes, x))
    rounded = lax.div(jnp.round(x * inverse).astype(wide), (x == x).astype(wide))
    return lax.dot_general(codes.astype(wide), rounded, _CONTRACT, preferred_element_type=wide).astype(jnp.int32)


def _digits(codes: jax.Array, x: jax.Array) -> jax.Array:
    def cpu(codes: jax.Array, x: jax.Array) -> jax.Array:
        base = 128  # a power of 2: fused or not, what is put together below rounds alike
        scale, inverse = _scale(x)
        rest, digits = x * inverse, []
        for _ in range(3):
            digit = jnp.round(rest)
            digits.append(digit.astype(jnp.int8))
            rest = (rest - digit) * base
        high, middle, low = jnp.split(_integer(codes, jnp.concatenate(digits, axis=1)).astype(x.dtype), 3, axis=1)
        return (high + (middle + low / base) / base) * scale

    return lax.platform_dependent(codes, x, cpu=cpu, default=_values_product)
