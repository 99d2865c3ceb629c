"""The rows of the table: what is compared, the bar and the aim. A figure is named by participant, work and field."""

from __future__ import annotations

import fnmatch
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["ROWS", "Figures", "Row", "Verdict", "chosen", "judge", "runs_of"]

# the name of a figure -> its values, one a round; or why there are none
Figures = dict[str, list[float] | str]


class Row(NamedTuple):
    """The best of ``above``, over the best of ``below`` if there is any, against ``bar``: at least, or at most.

    Figures may be missing as long as one is there. default: whether it is measured unasked.
    """

    name: str
    text: str
    above: Sequence[str]
    below: Sequence[str]
    bar: float
    aim: float | None = None
    at_most: bool = False
    unit: str = "x"
    scale: float = 1.0
    default: bool = True


class Verdict(NamedTuple):
    """result: "pass", "falls short" or "not measured"; missing: the runs without which it was found, or not."""

    row: Row
    measured: float | None
    result: str
    missing: list[str]


def _speed(participant: str, *works: str) -> list[str]:
    return [f"{participant}/{work}/tokens_per_second" for work in works]


def _peers(work: str) -> list[str]:
    return [f for peer in ("llama.cpp", "ctranslate2", "ctranslate2-int8", "transformers") for f in _speed(peer, work)]


def _decode() -> list[Row]:
    ours = [f"greedy-{b}" for b in (1, 8, 32)]
    best = {b: (f"greedy-{b}", f"int8-{b}") for b in (1, 8, 32)}
    ct2 = {b: _speed("ctranslate2", f"greedy-{b}") for b in (1, 8, 32)}
    torch = _speed("transformers", "greedy-1")
    return [
        Row("b1-numpy", "B=1 float32 / NumPy's products alone", ["ours/greedy-1/numpy_fraction"], [], 0.75, 0.9),
        Row(
            "b1-llama", "B=1 best of ours / llama.cpp", _speed("ours", *best[1]), _speed("llama.cpp", ours[0]), 1, 1.25
        ),
        Row("b1-ctranslate2", "B=1 float32 / CTranslate2 float32", _speed("ours", ours[0]), ct2[1], 1, 1.1),
        Row("b1-transformers", "B=1 float32 / transformers", _speed("ours", ours[0]), torch, 2.5, 3),
        Row("b8-best", "B=8 best of ours / best peer", _speed("ours", *best[8]), _peers(ours[1]), 1.4, 2),
        Row("b32-best", "B=32 best of ours / best peer", _speed("ours", *best[32]), _peers(ours[2]), 1.35, 2),
        Row("b32-best-newest", "the same, newest jax", _speed("newest", *best[32]), _peers(ours[2]), 1.7, 2),
        Row("b8-ctranslate2", "B=8 float32 / CTranslate2 float32", _speed("ours", ours[1]), ct2[8], 1.4, 1.7),
        Row("b32-ctranslate2", "B=32 float32 / CTranslate2 float32", _speed("ours", ours[2]), ct2[32], 1.2, 1.7),
        Row("b32-ctranslate2-newest", "the same, newest jax", _speed("newest", ours[2]), ct2[32], 1.4, 1.7),
    ]


def _prefill() -> list[Row]:
    rows = []
    for b, bar, bar_int8 in ((1, 1.0, 0.95), (4, 0.95, 0.75)):
        work, int8 = f"prefill-{b}", f"prefill-int8-{b}"
        peers = [*_speed("ctranslate2", work), *_speed("transformers", work)]
        head = f"prefill 512, B={b}"
        rows += [
            Row(f"prefill-b{b}", f"{head} float32 / best float32 peer", _speed("ours", work), peers, bar, 1.2),
            Row(
                f"prefill-b{b}-int8",
                f"{head} best of ours / CTranslate2 int8",
                _speed("ours", work, int8),
                _speed("ctranslate2-int8", work),
                bar_int8,
                1.2,
            ),
        ]
    return rows


def _strategies() -> list[Row]:
    """Beam search with 4 beams of one prompt, drafts from the text itself, and a JSON schema."""
    rows = [
        Row(
            f"beam{name}-ctranslate2",
            f"one search with 4 beams, {kind} / CTranslate2 {kind}",
            _speed("ours", f"beam{name}-1"),
            _speed(f"ctranslate2{name}", "beam-1"),
            bar,
        )
        for name, kind, bar in (("", "float32", 1.3), ("-int8", "int8", 2.0))
    ]
    steps = (
        ("beam-greedy", "beam-4 step / greedy step of 4 rows", "beam-1", 1.15, True),
        ("json-greedy", "step under a JSON schema / greedy step", "json-1", 1.1, True),
        ("lookup-copy", "prompt lookup on a text to copy / plain", "lookup_copy-1", 1.5, False),
        ("lookup-fresh", "prompt lookup with nothing to copy / plain", "lookup_fresh-1", 0.97, False),
    )
    for name, text, work, bar, at_most in steps:
        figure = f"ours/{work}/{'over_greedy' if at_most else 'times_greedy'}"
        rows.append(Row(name, text, [figure], [], bar, at_most=at_most))
    return rows


def _alone(participant: str) -> list[Row]:
    """Rows about jaxdecode alone."""
    new = "" if participant == "ours" else "-newest"
    tail = "" if participant == "ours" else ", newest jax"
    at_most: Any = {"at_most": True}
    ms: Any = {"at_most": True, "unit": "ms", "scale": 1e3}
    rows = [
        Row(
            f"top-p-b{b}{new}",
            f"top-p step / greedy step, B={b}{tail}",
            [f"{participant}/top-p-{b}/ratio"],
            [],
            1.05,
            1.02,
            **at_most,
        )
        for b in (1, 8)
    ]
    for law in ("flat", "peaked"):
        figure = f"{participant}/sampling/{law}_seconds"
        rows.append(
            Row(f"sampling-{law}{new}", f"sampling alone, V=262,144, B=8, {law}{tail}", [figure], [], 15, 6, **ms)
        )
    rows += [
        Row(
            f"cache-4096{new}",
            f"128 tokens in 4,096 slots / in 256{tail}",
            [f"{participant}/cache/ratio"],
            [],
            1.05,
            **at_most,
        ),
        Row(
            f"context-1024{new}",
            f"1,024 tokens of context / 128, over the counts{tail}",
            [f"{participant}/context-1/ratio"],
            [],
            1.3,
            **at_most,
        ),
        Row(
            f"context-1024-b8{new}",
            f"the same, B=8{tail}",
            [f"{participant}/context-8/ratio"],
            [],
            1.3,
            default=False,
            **at_most,
        ),
        Row(
            f"second-process{new}",
            f"second process, generate 16 tokens{tail}",
            [f"{participant}/second-process/seconds"],
            [],
            4,
            3,
            unit="s",
            at_most=True,
        ),
        Row(
            f"memory{new}",
            f"peak memory int8 B=1, over weights + cache + import{tail}",
            [f"{participant}/memory/bytes"],
            [],
            250,
            unit="MB",
            at_most=True,
            scale=1e-6,
        ),
    ]
    return rows


def _newest() -> list[Row]:
    works = [f"{mode}-{b}" for b in (1, 8, 32) for mode in ("greedy", "int8")]
    works += [f"prefill{kind}-{b}" for b in (1, 4) for kind in ("", "-int8")]
    rows = [
        Row(
            f"newest-{work}",
            f"newest jax / jax 0.10.1: {work}",
            _speed("newest", work),
            _speed("ours", work),
            0.4 if work == "int8-1" else 0.8,
            1,
        )
        for work in works
    ]
    int8 = Row(
        "newest-int8-float32",
        "newest jax, B=1: int8 / float32",
        _speed("newest", "int8-1"),
        _speed("newest", "greedy-1"),
        1,
    )
    return [*rows, int8]


ROWS: list[Row] = [*_decode(), *_prefill(), *_strategies(), *_alone("ours"), *_newest(), *_alone("newest")]


def chosen(patterns: Sequence[str]) -> list[Row]:
    """The rows whose names fit one of the patterns ("b1-*"); all that are measured unasked if there is no pattern.

    ValueError for a pattern that fits none.
    """
    if not patterns:
        return [row for row in ROWS if row.default]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(row.name, pattern) for row in ROWS):
            raise ValueError(f"--only: expected names of rows ({', '.join(r.name for r in ROWS)}), got {pattern!r}")
    return [row for row in ROWS if any(fnmatch.fnmatchcase(row.name, pattern) for pattern in patterns)]


def runs_of(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Each (participant, work) that the rows need, those of one work side by side."""
    found = dict.fromkeys(tuple(figure.split("/")[:2]) for row in rows for figure in (*row.above, *row.below))
    order = list(dict.fromkeys(_kind(work) for _, work in found))
    return sorted(found, key=lambda run: order.index(_kind(run[1])))  # type: ignore[arg-type, return-value]


def _kind(work: str) -> str:
    """The works that are compared with each other: greedy-8 and int8-8 are both decoding with 8 rows."""
    head, _, batch = work.rpartition("-")
    kinds = {"greedy": "decode", "int8": "decode", "prefill": "prefill", "prefill-int8": "prefill"}
    kinds |= {"beam": "beam", "beam-int8": "beam"}
    return f"{kinds.get(head, work)}-{batch}" if head in kinds else work


def judge(row: Row, figures: Figures) -> Verdict:
    """A row against its bar. Ratios are taken round by round, and their median counts."""
    above, missing = _best(row.above, figures)
    below, lacking = _best(row.below, figures)
    missing = sorted({*missing, *lacking})
    if above is None or (row.below and below is None):
        return Verdict(row, None, "not measured", missing)
    values = above if below is None else [a / b for a, b in zip(above, below, strict=False)]
    measured = statistics.median(values) * row.scale
    good = measured <= row.bar if row.at_most else measured >= row.bar
    return Verdict(row, measured, "pass" if good else "falls short", missing)


def _best(names: Sequence[str], figures: Figures) -> tuple[list[float] | None, list[str]]:
    """Round by round the largest of the figures there are, and the runs that gave none."""
    there = [values for name in names if isinstance(values := figures[name], list)]
    missing = [name.rpartition("/")[0] for name in names if isinstance(figures[name], str)]
    return [max(values) for values in zip(*there, strict=False)] or None, missing
