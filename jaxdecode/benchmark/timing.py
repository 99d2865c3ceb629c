"""The time of decoding: one program, run to its first token and to its last."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdecode import generation
from jaxdecode.base import Finish, Model, Params
from jaxdecode.checks import require
from jaxdecode.quant import Scheme

__all__ = ["MODES", "Case", "Mode", "Times", "measure", "prompt_ids"]


class Mode(NamedTuple):
    """A way to decode: fields of ``Settings``, and the scheme of the weights (None: as they are).

    text: its own prompt, by its name in ``TEXTS``. schema: a JSON Schema for the output. greedy_rows: it is also held
    against plain greedy decoding of that many rows for each of its own (0: it is not).
    """

    settings: Mapping[str, Any]
    quantize: Scheme | None = None
    text: str | None = None
    schema: Mapping[str, Any] | None = None
    greedy_rows: int = 0


MODES: dict[str, Mode] = {
    "greedy": Mode({"temperature": 0.0}),
    "top_p": Mode({"temperature": 1.0, "top_p": 0.9}),
    "int8": Mode({"temperature": 0.0}, quantize="int8"),
    "int8_weights": Mode({"temperature": 0.0}, quantize="int8_weights"),
    "beam": Mode({"beams": 4}, greedy_rows=4),
    "json": Mode({"temperature": 0.0}, schema={"type": "array", "items": {"type": "integer"}}, greedy_rows=1),
    "lookup_copy": Mode({"temperature": 0.0, "prompt_lookup": 7}, text="copy", greedy_rows=1),
    "lookup_fresh": Mode({"temperature": 0.0, "prompt_lookup": 7}, text="fresh", greedy_rows=1),
}


class Case(NamedTuple):
    """What to measure: ``batch`` rows of ``prompt`` ids, ``new`` tokens each. cache_len: slots a row; None: enough."""

    mode: str
    batch: int
    prompt: int
    new: int
    cache_len: int | None = None

    def check(self, context: int | None = None) -> None:
        """ValueError for a case that cannot be measured, with a context of that many tokens if it is known."""
        require(self.mode in MODES, "mode", f"one of {', '.join(MODES)}", self.mode)
        require(self.batch >= 1, "batch size", "a number >= 1", self.batch)
        require(self.prompt >= 1, "prompt length", "a number >= 1", self.prompt)
        require(self.new >= 2, "new tokens", "a number >= 2 (a step is the time between two tokens)", self.new)
        need = self.prompt + self.new
        held = need if self.cache_len is None else self.cache_len
        require(held >= need, "cache slots", f"at least prompt + new tokens = {need}", held)
        if context is not None:
            require(held <= context, "prompt + new tokens, or cache slots", f"at most the context of {context}", held)


class Times(NamedTuple):
    """Seconds, medians of warm runs. step, prefill: None where the clock cannot tell them apart.

    compile: tracing and compiling the one program; first: from the prompt to the first token; whole: to the last one;
    step: of one decode step; prefill: of the pass over all prompt tokens but the last; cache_len: slots a row got.
    """

    compile: float
    first: float
    whole: float
    step: float | None
    prefill: float | None
    cache_len: int


def prompt_ids(batch: int, length: int, vocab_size: int) -> list[list[int]]:
    """The same ids at every call, from the middle half of the vocabulary, where no special token lies."""
    rng = np.random.default_rng(0)
    return rng.integers(vocab_size // 4, max(3 * vocab_size // 4, vocab_size // 4 + 1), (batch, length)).tolist()


def measure(
    model: Model,
    params: Params,
    vocab_size: int,
    case: Case,
    *,
    runs: int = 3,
    progress: Callable[[str], None] = lambda text: None,
    ids: list[list[int]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Times:
    """Compile the program of ``generate`` for a case, warm it up, and time it.

    Without end ids each row makes all its tokens; RuntimeError if one ends all the same (NaN in the logits). A step is
    the time of a run with all tokens minus that of one with one token (half of them, if there are end ids), by the same
    program, over the steps between; each of the ``runs`` is such a pair, and the median counts. ids, settings: others
    than those of the case.
    """
    progress("compiling")
    begin = time.perf_counter()
    chosen = MODES[case.mode].settings if settings is None else settings
    ids = prompt_ids(case.batch, case.prompt, vocab_size) if ids is None else ids
    # What generate does, in its two parts: only the second is timed.
    prepared = generation._prepare(
        model,
        params,
        ids,
        key=jax.random.key(0),
        settings=generation.Settings(max_new_tokens=case.new, **chosen),
        cache_len=case.cache_len,
    )
    compiled = generation._whole.lower(*prepared).compile()
    compile_seconds = time.perf_counter() - begin
    plan, *arguments, rules = prepared
    free = rules.eos.shape[1] == 0

    def seconds(new: int) -> tuple[float, int]:
        """Of a run with that limit; and its steps."""
        limit: Any = np.full_like(rules.limit, new)
        begin = time.perf_counter()
        out = jax.block_until_ready(compiled(*arguments, dataclasses.replace(rules, limit=limit)))
        taken = time.perf_counter() - begin
        length = np.asarray(out.length).reshape(case.batch, -1)
        finish = np.asarray(out.finish).reshape(case.batch, -1)[:, 0]
        if (wrong := np.flatnonzero((length[:, 0] != new) & (free | (finish > Finish.LENGTH)))).size:
            raise RuntimeError(f"row {wrong[0]} ended early: {Finish(int(finish[wrong[0]])).name.lower()}")
        return taken, int(np.max(length))

    progress("warming up")
    few = 1 if free else max(case.new // 2, 1)
    seconds(few)
    pairs = []
    for i in range(runs):
        progress(f"run {i + 1} of {runs}")
        pairs.append((seconds(few), seconds(case.new)))
    first, whole = (statistics.median(taken for taken, _ in times) for times in zip(*pairs, strict=True))
    step = statistics.median((b - a) / max(n - m, 1) for (a, m), (b, n) in pairs)
    known = free and 0 < step < first
    slots = plan.cache_len or case.prompt + case.new
    return Times(compile_seconds, first, whole, step if step > 0 else None, first - step if known else None, slots)
