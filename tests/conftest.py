"""For every test: strict JAX (no implicit dtype or rank promotion), and compiled programs that do not pile up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

MAPS = Path("/proc/self/maps")  # on Linux, where a process may have 65,530 of them and XLA:CPU crashes without one
MOST_MAPS = 20_000


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_do_not_pile_up() -> Iterator[None]:
    """Every program that stays compiled keeps some memory maps: forget all of them when there are many."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
