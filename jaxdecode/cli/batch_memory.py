"""How much memory `jaxdecode batch` takes at most: what its model and slots add to a run that has next to none."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Run", "base_bytes", "peak_of_batch", "predicted"]

LOGITS_COPIES = 6  # arrays [slots, V] in float32 that a step holds
PROGRAM_BYTES = 12_500_000  # of each layer, in compiled programs and what they were traced from: measured, not counted
CODE = """
import sys
from jaxdecode.cli import main
try:
    main()
finally:
    from jaxdecode.benchmark.machine import peak_bytes
    print(peak_bytes(), file=sys.stderr)
"""


class Run(NamedTuple):
    """slots: rows decoded together; prompt, new: the longest prompt and the most new tokens of any line."""

    slots: int
    prompt: int
    new: int


def predicted(
    run: Run, base: int | None, weights: int, cache: int, *, context: int, vocab_size: int, layers: int
) -> dict[str, Any]:
    """The parts and their sum: ``base`` bytes, those of the ``weights``, those of the ``cache`` a token, and the rest.

    ValueError: the rows are longer than the context.
    """
    from jaxdecode.engine import Options
    from jaxdecode.engine.serving import row_sizes

    sizes = row_sizes(run.prompt, run.new, lambda total: total <= context)
    if sizes is None:
        raise ValueError(
            f"prompt + new tokens: expected at most the context of {context}, got {run.prompt} + {run.new}"
        )
    options = Options(slots=run.slots)
    rows = options.slots + options.staged + options.prefixes + 1
    parts: dict[str, int] = {
        "weight_bytes": weights,
        "cache_bytes": rows * sum(sizes) * cache,
        "work_bytes": run.slots * (LOGITS_COPIES * 4 * vocab_size + 4 * sum(sizes) + 16 * sizes[1]),
        "program_bytes": layers * PROGRAM_BYTES,
    }
    whole = {"base_bytes": base, "bytes": None if base is None else base + sum(parts.values())}
    return {**run._asdict(), "rows": rows, "tokens_per_row": sum(sizes), **parts, **whole}


def base_bytes() -> int | None:
    """The peak of a run whose model is the toy and whose file has one line; None where a peak is not told.

    Of two runs the smaller: the first one may compile what later ones find, in 200 MB more.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        source.write_text(json.dumps({"prompt": [1, 2], "max_new_tokens": 2}) + "\n")
        run = ("--model", "toy", "--no-resume", str(source), str(Path(folder) / "out.jsonl"))
        peaks = [peak for peak in (peak_of_batch(*run) for _ in range(2)) if peak is not None]
    return min(peaks, default=None)


def peak_of_batch(*arguments: str) -> int | None:
    """The most memory of `jaxdecode batch` with these arguments, in a process of its own. RuntimeError: it fails."""
    command = [sys.executable, "-c", CODE, "batch", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    *rest, last = done.stderr.splitlines() or [""]
    if done.returncode:
        raise RuntimeError(f"jaxdecode batch: {(rest or [last])[-1]}")
    return None if last == "None" else int(last)
