"""`jaxdecode bench`: how fast a model decodes here, beside what its shapes and this machine allow."""

from __future__ import annotations

import itertools
import json as json_text
import os
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from jaxdecode.cli.compilation import keep_compiled_programs
from jaxdecode.cli.inspection import in_bytes
from jaxdecode.cli.terminal import BadInput, Progress, bad_input, styled, table

if TYPE_CHECKING:
    from jaxdecode.benchmark import Case
    from jaxdecode.checkpoint import Loaded
    from jaxdecode.quant import Scheme

__all__ = ["Asked", "run"]

FORMAT, VERSION = "jaxdecode-bench", 1
GROUPS = {"speculative": ("lookup_copy", "lookup_fresh")}  # several modes by one name


class Asked(NamedTuple):
    """What the options of the command say."""

    model: str
    batch_sizes: str
    prompt_lengths: str
    new_tokens: str
    modes: str
    cache_len: int | None
    runs: int
    floor: bool
    dtype: str
    quantize: Scheme | None
    cache_dtype: str | None
    context_length: int | None
    compile_cache: bool
    json: bool


def run(asked: Asked) -> int:
    """Measure and print. Returns the exit code."""
    progress = Progress()
    try:
        progress("starting")
        if asked.compile_cache:
            keep_compiled_programs()
        from jaxdecode.benchmark import bench
        from jaxdecode.cli.record import versions

        with bad_input():
            wanted = cases(asked)
            found = bench(
                lambda scheme: _load(asked, scheme, progress),
                wanted,
                runs=asked.runs,
                floor=asked.floor,
                progress=progress,
            )
    except RuntimeError as error:  # the model's fault, e.g. NaN in its logits
        raise typer.TyperException(str(error)) from error
    finally:
        progress.stop()
    about = {"format": FORMAT, "version": VERSION, "model": asked.model, "dtype": asked.dtype}
    how = {
        "quantize": asked.quantize,
        "cache_dtype": asked.cache_dtype,
        "context_length": asked.context_length,
        "threads": _threads(),
        "runs": asked.runs,
        "versions": versions(),
    }
    told = {**about, **how, **found}
    typer.echo(json_text.dumps(told, ensure_ascii=False) if asked.json else as_text(told), nl=asked.json)
    return 0


def cases(asked: Asked) -> list[Case]:
    """Every mode with every batch size, prompt length and number of new tokens. ValueError: one that cannot be."""
    from jaxdecode.benchmark import MODES, Case

    words = (word.strip() for word in asked.modes.split(","))
    modes = [mode for word in words for mode in GROUPS.get(word, (word,))]
    batches = _numbers("--batch-sizes", asked.batch_sizes)
    prompts = _numbers("--prompt-lengths", asked.prompt_lengths)
    news = _numbers("--new-tokens", asked.new_tokens)
    every = itertools.product(modes, batches, prompts, news)
    found = [Case(mode, batch, prompt, new, asked.cache_len) for mode, batch, prompt, new in every]
    own = {mode for mode in MODES if MODES[mode].text is not None}  # these have one prompt, of any length
    found = [case for case in found if case.mode not in own or case.prompt == prompts[0]]
    for case in found:
        case.check()
    return found


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise BadInput(f"{option}: expected whole numbers with commas between, got {text!r}") from None


def _load(asked: Asked, scheme: Scheme | None, progress: Progress) -> Loaded:
    """The model as a mode wants it; a mode that says nothing of the weights has those of ``--quantize``."""
    import jaxdecode

    how: Any = {"dtype": asked.dtype, "quantize": scheme or asked.quantize, "cache_dtype": asked.cache_dtype}
    return jaxdecode.load(asked.model, **how, context_length=asked.context_length, progress=progress)


def _threads() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def as_text(told: dict[str, Any]) -> str:
    """The same for a reader."""
    header = ["mode", "rows", "prompt", "new", "tokens/s", "ms/step", "prefill tokens/s", "bytes/step", "mult/step"]
    header += ["floor ms", "of floor", "compile s", "peak memory"]
    if any(row["times_greedy"] is not None for row in told["rows"]):
        header.insert(6, "of greedy")
    by_numpy = any(row["numpy_seconds"] is not None for row in told["rows"])
    rows = [_cells(row, by_numpy, "of greedy" in header) for row in told["rows"]]
    parts = [table([*header, "NumPy ms", "of NumPy"] if by_numpy else header, rows), "\n"]
    reads = statistics.median(row["read_bandwidth"] for row in told["rows"])
    rates = {row["products"]: row["multiply_rate"] for row in told["rows"]}
    multiplies = ", ".join(f"{_count(rate)} multiplications/s in {name}" for name, rate in rates.items())
    parts += [f"this machine: reads {in_bytes(round(reads))}/s, {multiplies}\n"]
    v = told["versions"]
    parts += [f"{v['device']}, {told['threads']} threads, jax {v['jax']}, Python {v['python']}"]
    if told["base_bytes"] is not None:
        parts += [f"; memory before the model {in_bytes(told['base_bytes'])}"]
    return "".join([styled(f"{told['model']} in {told['quantize'] or told['dtype']}", "bold"), "\n\n", *parts, "\n"])


def _cells(row: dict[str, Any], by_numpy: bool, by_greedy: bool) -> list[str]:
    def number(name: str, scale: float = 1, digits: int = 1) -> str:
        return "-" if row[name] is None else f"{row[name] * scale:,.{digits}f}"

    def percent(name: str) -> str:
        return "-" if row[name] is None else f"{row[name]:.0%}"

    cells = [row["mode"], *(f"{row[name]:,}" for name in ("batch", "prompt", "new"))]
    cells += [number("tokens_per_second"), number("step_seconds", 1e3, 2)]
    cells += [percent("times_greedy")] if by_greedy else []
    cells += [number("prefill_tokens_per_second")]
    cells += ["-" if row["bytes_per_step"] is None else in_bytes(round(row["bytes_per_step"]))]
    cells += ["-" if row["multiplications_per_step"] is None else _count(row["multiplications_per_step"])]
    cells += [number("floor_seconds", 1e3, 2), percent("floor_fraction"), number("compile_seconds")]
    cells += ["-" if row["peak_bytes"] is None else in_bytes(row["peak_bytes"])]
    return [*cells, number("numpy_seconds", 1e3, 2), percent("numpy_fraction")] if by_numpy else cells


def _count(n: float) -> str:
    """A number of multiplications for a reader: 134.5 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:,.1f} {unit}"
    return f"{n:,.0f}"
