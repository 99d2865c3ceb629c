"""Every case of a model measured, beside the floor: what the table of `jaxdecode bench` holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxdecode.base import Model, Params
from jaxdecode.benchmark.machine import measure_machine, peak_bytes, reset_peak
from jaxdecode.benchmark.texts import text_ids
from jaxdecode.benchmark.timing import MODES, Case, Times, measure
from jaxdecode.benchmark.work import Work, numpy_seconds, work_of
from jaxdecode.checks import require
from jaxdecode.decoders.common import cache_spec
from jaxdecode.generation import vocab_size_of
from jaxdecode.models.counts import param_bytes
from jaxdecode.models.transformer import TransformerConfig
from jaxdecode.quant import QTensor, Scheme

if TYPE_CHECKING:
    from jaxdecode.checkpoint import Loaded

__all__ = ["bench", "bench_model"]

CLOSING_BIAS = -100.0
LEAST_READ, MOST_READ = 1 << 27, 1 << 30  # bytes read to measure the bandwidth: those of the weights, between these

Progress = Callable[[str, float], None]


def _silent(text: str, fraction: float) -> None:
    pass


def bench(
    load: Callable[[Scheme | None], Loaded],
    cases: Sequence[Case],
    *,
    runs: int = 3,
    floor: bool = False,
    progress: Progress = _silent,
) -> dict[str, Any]:
    """Measure ``cases``, and beside each this machine. All but the times (and the memory) is the same at every call.

    load: gives the model with weights by a quantization scheme (None: as they are); called once a scheme, and only one
    model is held at a time. floor: also time each step's products alone by NumPy, where the weights are float32.
    Returns ``rows`` (a dict a case, in their order) and ``base_bytes``, the memory this process had taken before.
    ValueError: a case that cannot be; RuntimeError: a model whose logits are NaN.

    >>> import jaxdecode
    >>> found = bench(lambda scheme: jaxdecode.load("toy"), [Case("greedy", 2, 4, 8)], runs=1)
    >>> found["rows"][0]["mode"], found["rows"][0]["batch"], found["rows"][0]["multiplications_per_step"]
    ('greedy', 2, None)
    """
    require(len(cases) > 0, "cases", "at least one", "none")
    require(runs >= 1, "runs", "a number >= 1", runs)
    for case in cases:
        case.check()
    reset_peak()
    base, schemes = peak_bytes(), list(dict.fromkeys(MODES[case.mode].quantize for case in cases))
    rows: dict[int, dict[str, Any]] = {}
    for scheme in schemes:
        progress("loading", len(rows) / len(cases))
        loaded = load(scheme)
        cases = [_with_its_prompt(loaded, case) for case in cases]
        for case in cases:
            case.check(loaded.config.context_length)
        for i, case in enumerate(cases):
            if MODES[case.mode].quantize == scheme:
                rows[i] = _row(loaded, case, base, runs, floor, _part(progress, case, len(rows), len(cases)))
        del loaded
    return {"base_bytes": base, "rows": [rows[i] for i in range(len(cases))]}


def bench_model(
    model: Model, params: Params, cases: Sequence[Case], *, runs: int = 3, progress: Progress = _silent
) -> dict[str, Any]:
    """``bench`` of a model that is no checkpoint. ValueError for modes that need a tokenizer or quantize the weights.

    Those that do not: greedy, top_p, beam. Of the work of a step nothing is known but the bytes of the params.

    >>> from jaxdecode.testing import markov_model
    >>> found = bench_model(markov_model(), jnp.eye(3), [Case("greedy", 2, 4, 8)], runs=1)
    >>> found["rows"][0]["param_bytes"]
    36
    """
    plain = [name for name, mode in MODES.items() if not (mode.quantize or mode.text or mode.schema)]
    for case in cases:
        require(case.mode in plain, "mode", f"one of {', '.join(plain)} for a model without a tokenizer", case.mode)
    params = jax.tree.map(jnp.asarray, params)
    sizes = SimpleNamespace(vocab_size=vocab_size_of(model, params), context_length=None)
    loaded: Any = SimpleNamespace(model=model, params=params, tokenizer=None, config=sizes)
    return bench(lambda scheme: loaded, cases, runs=runs, progress=progress)


def _ids(loaded: Loaded, case: Case) -> list[list[int]] | None:
    """The prompts of a mode that has its own text."""
    name = MODES[case.mode].text
    return None if name is None else [text_ids(loaded.tokenizer, name, loaded.config.vocab_size)] * case.batch


def _settings(loaded: Loaded, case: Case) -> dict[str, Any]:
    """Fields of ``Settings``, a schema compiled for the model's tokens. ValueError for one that has no tokenizer."""
    mode = MODES[case.mode]
    if mode.schema is None:
        return dict(mode.settings)
    made = loaded.settings(json_schema=mode.schema, max_new_tokens=case.new)
    return {**mode.settings, "json_schema": made.json_schema, "eos": made.eos, "logit_bias": _unclosed(loaded)}


def _unclosed(loaded: Loaded) -> dict[int, float]:
    """A bias against the tokens that close an array, so that a row goes on until its limit makes it close."""
    tokens = range(min(loaded.tokenizer.vocab_size, loaded.config.vocab_size))
    closing = (i for i in tokens if b"]" in loaded.tokenizer.id_to_bytes(i, skip_special_tokens=False))
    return dict.fromkeys(closing, CLOSING_BIAS)


def _with_its_prompt(loaded: Loaded, case: Case) -> Case:
    ids = _ids(loaded, case)
    return case if ids is None else case._replace(prompt=len(ids[0]))


def _part(progress: Progress, case: Case, done: int, of: int) -> Callable[[str], None]:
    """The progress of one case."""
    name = f"{case.mode}, {case.batch} x {case.prompt} + {case.new}"
    return lambda text: progress(f"{name}: {text}", done / of)


def _row(
    loaded: Loaded, case: Case, base: int | None, runs: int, floor: bool, progress: Callable[[str], None]
) -> dict[str, Any]:
    """One case, and right after it what the machine can do: both change from minute to minute."""
    model, params, config = loaded.model, loaded.params, loaded.config
    reset_peak()
    ids = _ids(loaded, case)
    how: Any = {"runs": runs, "progress": progress}
    times = measure(model, params, config.vocab_size, case, ids=ids, settings=_settings(loaded, case), **how)
    peak = peak_bytes()
    greedy: float | None = None
    if rows := MODES[case.mode].greedy_rows:
        plain = case._replace(batch=case.batch * rows)
        same = None if ids is None else ids * rows
        how["settings"] = {"temperature": 0.0}
        greedy = measure(model, params, config.vocab_size, plain, ids=same, **how).step
    held = cache_spec(model, params, case.batch, times.cache_len)
    work = work_of(model, config, params, case)
    numpy: float | None = None
    if floor and isinstance(config, TransformerConfig) and not _schemes(params):
        progress("the same products by NumPy")
        numpy = numpy_seconds(config, params, case.batch)
    progress("measuring this machine")
    products, weights = _products(params), param_bytes(params)
    machine = measure_machine({products}, read=min(max(weights, LEAST_READ), MOST_READ))
    floor_seconds = None if work is None else machine.floor_seconds(work.bytes, work.multiplications, products)
    return {
        **case._asdict(),
        "cache_len": times.cache_len,
        **_speeds(case, times),
        "times_greedy": _fraction(greedy, times.step),
        **_work(work),
        "products": products,
        "read_bandwidth": machine.read_bandwidth,
        "multiply_rate": machine.rate(products),
        "floor_seconds": floor_seconds,
        "floor_fraction": _fraction(floor_seconds, times.step),
        "numpy_seconds": numpy,
        "numpy_fraction": _fraction(numpy, times.step),
        "param_bytes": weights,
        "cache_allocated_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(held)),
        "peak_bytes": peak,
        "peak_above_base_bytes": None if peak is None or base is None else peak - base,
    }


def _schemes(params: Params) -> set[Scheme]:
    """By what the weights are quantized."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, QTensor))
    return {leaf.scheme for leaf in leaves if isinstance(leaf, QTensor)}


def _products(params: Params) -> str:
    """The type of the numbers that a step multiplies, by the scheme; how a platform does it is its own affair."""
    return "int8" if "int8" in _schemes(params) else _float_name(params)


def _float_name(params: Any) -> str:
    """The widest float among the params; float32 if there is none."""
    kinds = [leaf.dtype for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return max(kinds, key=lambda kind: kind.itemsize, default=jnp.dtype(jnp.float32)).name


def _speeds(case: Case, times: Times) -> dict[str, float | None]:
    prefill = times.prefill if case.prompt > 1 else None
    return {
        "tokens_per_second": None if times.step is None else case.batch / times.step,
        "step_seconds": times.step,
        "prefill_tokens_per_second": None if prefill is None else case.batch * (case.prompt - 1) / prefill,
        "prefill_seconds": prefill,
        "first_token_seconds": times.first,
        "whole_seconds": times.whole,
        "compile_seconds": times.compile,
    }


def _work(work: Work | None) -> dict[str, float | None]:
    return {
        "multiplications_per_step": None if work is None else work.multiplications,
        "weight_bytes_per_step": None if work is None else work.weight_bytes,
        "cache_bytes_per_step": None if work is None else work.cache_bytes,
        "bytes_per_step": None if work is None else work.bytes,
    }


def _fraction(least: float | None, step: float | None) -> float | None:
    return None if least is None or step is None else least / step
