"""Two faults of excluded jax versions, reproduced at whatever version runs: it must have neither.

0.10.2 computes wrong sums on CPU (jax-ml/jax#39103). 0.11.1 rewrites the whole buffer for every small write in a loop
(jax-ml/jax#40101): its optimized HLO is the right one, only the machine code has a loop over the buffer, so the test
reads that.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

ON_CPU = jax.default_backend() == "cpu"
SIZE = 10_007  # a prime: a compiled loop over the buffer holds it, rounded down to whole vectors, as a constant
BUFFER = jax.ShapeDtypeStruct((SIZE,), jnp.float32)


def squared_norms(x: jax.Array) -> jax.Array:
    """Per row, the squared norm of ``identity @ row``: a matrix-vector product followed by a sum."""
    identity = jnp.eye(3, dtype=x.dtype)
    return jax.vmap(lambda row: jnp.sum((identity @ row) ** 2))(x)


@pytest.mark.parametrize("rows", [16_384, 32_768, 32_769, 65_537])
def test_product_then_sum_is_right_for_many_rows(rows: int) -> None:
    """Row i is (i, 1, 0) and its squared norm i^2 + 1; 0.10.2 puts another row's there."""
    i = np.arange(rows, dtype=np.float32)
    x = np.stack([i, np.ones_like(i), np.zeros_like(i)], axis=1)
    got = jax.jit(squared_norms)(x)
    np.testing.assert_allclose(got, i.astype(np.float64) ** 2 + 1, rtol=1e-6)


def fill(buffer: jax.Array) -> jax.Array:
    """One small write into a large buffer per step: what a token buffer or a KV cache sees while decoding."""
    return lax.fori_loop(1, 50, lambda t, b: b.at[t].set(b[t - 1] * 0.5 + 1), buffer)


def rewrite(buffer: jax.Array) -> jax.Array:
    """The whole buffer, every step: what ``fill`` must not compile to."""
    return lax.fori_loop(0, 50, lambda t, b: b * 0.5 + t.astype(jnp.float32), buffer)


def whole_buffer_constants(compiled: jax.stages.Compiled) -> int:
    """How often the machine code names the buffer's length in elements or bytes, rounded down to vectors."""
    executable: Any = compiled.runtime_executable()
    serialized = executable.serialize() if hasattr(executable, "serialize") else b""
    code = serialized[serialized.find(b"\x7fELF") :] if b"\x7fELF" in serialized else b""
    lengths = {SIZE - SIZE % width for width in (4, 8, 16, 32, 64, 128)}
    return sum(code.count(struct.pack("<i", n * unit)) for n in lengths for unit in (1, 4))


@pytest.mark.skipif(not ON_CPU, reason="reads the CPU compiler's output")
def test_a_small_write_in_a_loop_touches_only_what_it_writes() -> None:
    if whole_buffer_constants(jax.jit(rewrite).lower(BUFFER).compile()) == 0:
        pytest.skip("this machine's code does not show loop bounds as constants: the fault would not be seen")
    compiled = jax.jit(fill, donate_argnums=0).lower(BUFFER).compile()
    assert whole_buffer_constants(compiled) == 0


@pytest.mark.skipif(not ON_CPU, reason="reads the CPU compiler's output")
def test_a_small_write_in_a_loop_copies_no_buffer() -> None:
    """The other way to pay for the whole buffer, visible in the HLO."""
    hlo = str(jax.jit(fill, donate_argnums=0).lower(BUFFER).compile().as_text())
    assert re.search(rf"f32\[{SIZE}\]\S* (dynamic-update-slice|scatter|fusion)\(", hlo)
    assert not re.search(rf"f32\[{SIZE}\]\S* copy\(", hlo)


def test_fill_is_right() -> None:
    expected = np.zeros(60)
    for t in range(1, 50):
        expected[t] = expected[t - 1] * 0.5 + 1
    np.testing.assert_allclose(jax.jit(fill)(jnp.zeros(60)), expected, rtol=1e-6)
