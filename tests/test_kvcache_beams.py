"""Rows that are beams: following another beam moves no key and no value, and is the same as copying its whole past."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdecode import base, kvcache
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer

CONFIG = TransformerConfig(29, 16, 2, 4, 2, 4, 24, 512)
MODEL, PARAMS = transformer(CONFIG), init_params(CONFIG, jax.random.key(0))
BEAMS = 3
LENGTH = np.array([4, 2], np.int32)
apply = jax.jit(MODEL.apply)


def prefilled(max_len: int = 8) -> Any:
    tokens = np.random.default_rng(0).integers(0, 29, (2, 4)).astype(np.int32)
    return apply(PARAMS, tokens, MODEL.init_cache(PARAMS, 2, max_len), lengths=LENGTH)[1]


def histories(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """At every step the next tokens [R] and the row each row follows [R], in its own group."""
    rng = np.random.default_rng(1)
    first = np.repeat(np.arange(2) * BEAMS, BEAMS)
    tokens = rng.integers(0, 29, (steps, 2 * BEAMS)).astype(np.int32)
    parents = (first + rng.integers(0, BEAMS, (steps, 2 * BEAMS))).astype(np.int32)
    return list(zip(tokens, parents, strict=True))


@pytest.mark.parametrize("steps", [6, pytest.param(140, id="over-two-blocks")])
def test_reorder_equals_copying_the_past(steps: int) -> None:
    cache = prefilled()
    beams = kvcache.branch(cache, BEAMS, steps, 4)
    copies = base.repeat_rows(kvcache.share(cache, steps, 4), BEAMS)
    reorder, copy = jax.jit(kvcache.reorder), jax.jit(base.take_rows)
    for i, (tokens, parents) in enumerate(histories(steps)):
        one, beams = apply(PARAMS, tokens[:, None], beams)
        other, copies = apply(PARAMS, tokens[:, None], copies)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5, err_msg=f"step {i}")
        beams, copies = reorder(beams, parents), copy(copies, parents)
    assert beams.source is not None
    assert len(np.unique(beams.source)) == BEAMS
    plain = base.take_rows(beams, jnp.array([4, 0, 1]))
    assert plain.source is None
    for a, b in zip(
        jax.tree.leaves(plain.layers), jax.tree.leaves(base.take_rows(copies, jnp.array([4, 0, 1])).layers), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_reorder_touches_no_buffer() -> None:
    beams = kvcache.branch(prefilled(), BEAMS, 8, 4)
    compiled = jax.jit(kvcache.reorder, donate_argnums=0).lower(beams, jnp.arange(6, dtype=jnp.int32)).compile()
    moved = kvcache.reorder(beams, jnp.array([1, 1, 0, 5, 5, 5]))
    assert all(a is b for a, b in zip(jax.tree.leaves(moved.layers), jax.tree.leaves(beams.layers), strict=True))
    assert moved.shared[0].layers is beams.shared[0].layers
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 6 * 8  # the sources, not a layer


def test_a_prompt_is_stored_once() -> None:
    beams = kvcache.branch(prefilled(), BEAMS, 8, 4)
    assert beams.shared[0].layers[0][0].k.shape[0] == 2
    assert beams.capacity == 8
    np.testing.assert_array_equal(beams.total, np.repeat(LENGTH, BEAMS))


def test_other_state_is_copied() -> None:
    state = {"last": jnp.array([[1], [2]])}
    branched = kvcache.branch(state, 2, 8)
    assert branched["last"].tolist() == [[1], [1], [2], [2]]
    assert kvcache.reorder(branched, jnp.array([0, 0, 3, 2]))["last"].tolist() == [[1], [1], [2], [2]]


def test_beams_cannot_be_shared_again_or_replaced() -> None:
    beams = kvcache.branch(prefilled(), BEAMS, 8, 4)
    with pytest.raises(ValueError, match="got beams"):
        kvcache.share(beams, 8)
    with pytest.raises(ValueError, match="without shared segments and beams"):
        beams.put_rows(jnp.array([0]), beams)
