"""For every test: strict JAX (no implicit dtype or rank promotion), and compiled programs that do not pile up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a background job: programs under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

MAPS = Path("/proc/self/maps")  # on Linux, where a process may have 65,530 of them and XLA:CPU crashes without one
MOST_MAPS = 20_000

# Files whose tests ask what the library does, not what the compiler makes of its arithmetic: `scripts/test` compiles
# their programs with few optimizations, in a third of the time, and those of all others as users do. (Not with files of
# narrow floats, which such programs may not know, or of numbers below the normal range, which they treat otherwise.)
LOGIC = ("adapters", "beam", "bench", "caches", "calibration", "checkpoint", "cli", "composition", "constraint")
LOGIC += ("custom_models", "cutoffs", "docs", "doctests", "engine", "evaluation", "examples", "experts", "exporting")
LOGIC += ("families", "hub", "invariance", "keys", "kvcache_windows", "layers", "models_from_models", "package")
LOGIC += ("penalties", "processes", "processing_bad_input", "ray", "scale", "scoring", "sequence_law", "session")
LOGIC += ("settings", "process_meshes", "sharding", "speculative", "temperature", "tokenizer", "transforms_table")
# The files that run on the newest Python too when both are tested: those that hang on the version of jax, and those
# that go through all parts of the library. (`scripts/test --python 3.13` runs all.)
BOTH = ("arithmetic", "bits_over_meshes", "cli_process", "engine.py", "exporting", "jax_faults", "kvcache.py")
BOTH += ("operation_counts", "package", "programs", "processes", "quant.py", "quant_products", "real_model")
BOTH += ("transformer.py",)

# Long ones of their tests that ask nothing which others of them do not ask.
ONCE = ("test_bf16", "test_goldens_with_drafts", "test_goldens_alone", "test_an_int8_cache", "test_int8_weights_change")
ONCE += ("test_rows_on_two_devices", "test_goldens_of_beam_search")
# The files that take longest, longest first: begun last, one of them would run on while the other workers are idle.
LONG = ("docs", "real_model", "speculative", "decoders_table", "constraints.py", "beam.py", "caches", "quant.py")
LONG += ("quant_products", "truncation", "processing.py", "draw", "doctests", "exporting", "cutoffs")
LONG += ("transforms_table", "sharding", "process", "batch_invariance", "operation_counts", "transformer.py", "margins")
LONG += ("engine_schedules", "programs", "bench.py", "checkpoint_quantized", "families", "cli", "kvcache")
LONG += ("calibration", "gguf_blocks", "beam_settings")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.path.name.removeprefix("test_")
        if name.startswith(LOGIC):
            item.add_marker("logic")
        if name.startswith(BOTH) and not item.name.startswith(ONCE):
            item.add_marker("both")
    items.sort(key=lambda item: _rank(item.path.name.removeprefix("test_")))


def _rank(name: str) -> int:
    """The place in ``LONG``; sorting keeps the order of all others."""
    return next((i for i, long in enumerate(LONG) if name.startswith(long)), len(LONG))


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_do_not_pile_up() -> Iterator[None]:
    """Every program that stays compiled keeps some memory maps: forget all of them when there are many."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
