"""How fast decoding is here, beside what the shapes and this machine allow."""

from __future__ import annotations

from jaxdecode.benchmark.machine import Machine, measure_machine, peak_bytes, reset_peak
from jaxdecode.benchmark.report import bench, bench_model
from jaxdecode.benchmark.timing import MODES, Case, Mode, Times, measure, prompt_ids
from jaxdecode.benchmark.work import Work, numpy_seconds, work_of

__all__ = [
    "MODES",
    "Case",
    "Machine",
    "Mode",
    "Times",
    "Work",
    "bench",
    "bench_model",
    "measure",
    "measure_machine",
    "numpy_seconds",
    "peak_bytes",
    "prompt_ids",
    "reset_peak",
    "work_of",
]
