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

    text: the prompt, by its name in ``TEXTS``, of a mode that is also held against plain greedy decoding of the same.
    """

    settings: Mapping[str, Any]
    quantize: Scheme | None = None
    text: str | None = None


MODES: dict[str, Mode] = {
    "greedy": Mode({"temperature": 0.0}),
    "top_p": Mode({"temperature": 1.0, "top_p": 0.9}),
    "int8": Mode({"temperature": 0.0}, quantize="int8"),
    "int8_weights": Mode({"temperature": 0.0}, quantize="int8_weights"),
    "lookup_copy": Mode({"temperature": 0.0, "prompt_lookup": 7}, text="copy"),
    "lookup_fresh": Mode({"temperature": 0.0, "prompt_lookup": 7}, text="fresh"),
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

    No row has an end id, so each makes all its tokens; RuntimeError if one ends all the same (NaN in the logits). A
    step is the time of a run with all tokens minus that of one with one token, by the same program, over the steps
    between; each of the ``runs`` is such a pair, and the median counts. ids, settings: others than those of the case.
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

    def seconds(new: int) -> float:
        limit: Any = np.full_like(rules.limit, new)
        begin = time.perf_counter()
        out = jax.block_until_ready(compiled(*arguments, dataclasses.replace(rules, limit=limit)))
        taken = time.perf_counter() - begin
        if (wrong := np.flatnonzero(np.asarray(out.length) != new)).size:
            code = Finish(int(np.asarray(out.finish)[wrong[0]]))
            raise RuntimeError(f"row {wrong[0]} ended early: {code.name.lower()}")
        return taken

    progress("warming up")
    seconds(1)
    pairs = []
    for i in range(runs):
        progress(f"run {i + 1} of {runs}")
        pairs.append((seconds(1), seconds(case.new)))
    first, whole = (statistics.median(times) for times in zip(*pairs, strict=True))
    step = statistics.median((b - a) / (case.new - 1) for a, b in pairs)
    known = 0 < step < first
    return Times(
        compile_seconds, first, whole, step if step > 0 else None, first - step if known else None, plan.cache_len
    )
