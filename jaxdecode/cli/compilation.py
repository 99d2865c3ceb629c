"""The persistent compilation cache of the command line: what one process compiles, the next one finds.

A program of 30 layers needs hundreds of MB while it is made or read, most of them free again before it runs. glibc
keeps what is freed; asked for it, it gives it back to the system.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
from pathlib import Path

__all__ = ["keep_compiled_programs"]

COMPILED = "/jax/core/compile/backend_compile_duration"  # jax tells it of programs that were read, too


def keep_compiled_programs() -> None:
    """Turn it on, and give back what compiling leaves; call before anything imports jax.

    A folder that the user gave to jax is left as it is.

    One folder per jax version and kind of CPU: jax's own key does not tell CPUs apart, and a home folder may be shared.
    """
    # XLA logs as an error that its own tuning flags are no CPU features, for every program it reads back.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import jax

    _give_back_after_compiling()
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    from jaxdecode.checkpoint.converted import cache_folder

    folder = cache_folder() / "xla" / jax.__version__ / _cpu()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a cache that cannot be kept costs time, nothing else
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@functools.cache
def _give_back_after_compiling() -> None:
    """Free memory goes back to the system whenever a program is there. Once a process: listeners stay."""
    import jax

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is None:  # not glibc
        return

    def heard(event: str, duration_secs: float, **more: str | int) -> None:
        if event == COMPILED:
            trim(0)

    jax.monitoring.register_event_duration_secs_listener(heard)


def _cpu() -> str:
    """A name for this kind of CPU and what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:  # not Linux
        features = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
