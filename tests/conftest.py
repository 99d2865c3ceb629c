"""For every test: strict JAX (no implicit dtype or rank promotion), and compiling that costs no more than it must."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

MAPS = Path("/proc/self/maps")  # on Linux, where a process may have 65,530 of them and XLA:CPU crashes without one
MOST_MAPS = 20_000

# Files whose tests ask what the library does, not what the compiler makes of its arithmetic: their programs are made
# with few optimizations, in about half the time. All others, and these too with JAXDECODE_TEST_OPTIMIZED=1, test what
# users run. A new file is optimized unless its name begins so.
UNOPTIMIZED = (
    "bad_input",
    "bench",
    "checkpoint",
    "cli",
    "composition",
    "constraints",
    "doc",
    "engine",
    "hub",
    "models_from_models",
)
UNOPTIMIZED += ("processing_bad_input", "scoring", "session", "settings")
# Files that compile next to nothing come last: short and many, they keep all workers busy to the end.
LAST = ("cli_terminal", "constraint_languages", "hub", "layers", "package", "tokenizer")


FEW = pytest.StashKey[bool]()  # whether few optimizations are asked for now


def _begins(path: Path, names: tuple[str, ...]) -> bool:
    return path.name.removeprefix("test_").startswith(names)


def _unoptimized(path: Path) -> bool:
    return _begins(path, UNOPTIMIZED) and not os.environ.get("JAXDECODE_TEST_OPTIMIZED")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One change of the compiler's options is enough: files of a kind stand together."""

    def kind(item: pytest.Item) -> int:
        return 2 if _begins(item.path, LAST) else int(_unoptimized(item.path))

    items.sort(key=kind)


@pytest.fixture(autouse=True, scope="module")
def _compiled_as_the_file_asks(request: pytest.FixtureRequest) -> None:
    """Nothing that was compiled for a file of the other kind is used again."""
    few = _unoptimized(request.path)
    if request.config.stash.get(FEW, False) != few:
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", few)
        request.config.stash[FEW] = few


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_do_not_pile_up() -> Iterator[None]:
    """Every program that stays compiled keeps some memory maps: forget all of them when there are many."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
