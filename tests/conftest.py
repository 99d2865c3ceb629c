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

# Files whose tests ask what the library does, not what the compiler makes of its arithmetic: `scripts/test` compiles
# their programs with few optimizations, in a third of the time, and those of all others as users do.
LOGIC = ("bad_input", "bench", "checkpoint", "cli", "composition", "constraints", "doc", "engine", "hub", "layers")
LOGIC += ("models_from_models", "package", "processing_bad_input", "ray", "scoring", "session", "settings", "tokenizer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.removeprefix("test_").startswith(LOGIC):
            item.add_marker("logic")


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_do_not_pile_up() -> Iterator[None]:
    """Every program that stays compiled keeps some memory maps: forget all of them when there are many."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
