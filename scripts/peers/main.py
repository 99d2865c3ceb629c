"""The options of scripts/bench_peers, its rounds, and the table it prints."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from peers.rows import Figures, Row, Verdict, chosen, judge, runs_of
from peers.runs import ROOT, Failed, Setup, tell_versions

__all__ = ["main"]

DESCRIPTION = """\
Measure jaxdecode beside llama.cpp, CTranslate2 and transformers: the same weights, prompts, threads and token counts,
one process a run, the participants in turn and in the opposite order in every second round. Prints each row with its
bar; a participant that is not installed leaves its rows unmeasured."""

EXAMPLES = """\
examples:
  scripts/bench_peers --python .venv-py311/bin/python --peers-python ~/peers/bin/python
  scripts/bench_peers --only 'b1-*' 'prefill-*' --repetitions 3 --json results.json
  scripts/bench_peers --python-newest .venv-py313/bin/python --only 'newest-*'"""


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_peers",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument(
        "--model", default="smollm2-135m", help="as for `jaxdecode bench`; llama.cpp needs a .gguf file"
    )
    parser.add_argument("--python", default=sys.executable, help="has jaxdecode's requirements (default: this one)")
    parser.add_argument("--python-newest", help="the same with the newest jax, for the rows about it")
    parser.add_argument("--peers-python", default=sys.executable, help="has the peers, as many as you like")
    parser.add_argument("--only", nargs="+", metavar="ROW", default=[], help="rows by name; * and ? stand for letters")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and end")
    parser.add_argument("--repetitions", type=int, default=2, help="rounds (default 2); slow works take half of them")
    parser.add_argument("--threads", type=int, default=cpus, help=f"of every participant (default: {cpus}, all)")
    parser.add_argument("--limit", type=float, default=150, metavar="SECONDS", help="longest a run may take")
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".bench_peers", help="folder for converted models and caches"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    parser.add_argument("--smoke", action="store_true", help="few tokens: only to see that every participant runs")
    found = parser.parse_args(arguments)
    if found.repetitions < 1:
        parser.error(f"--repetitions: expected a number >= 1, got {found.repetitions}")
    if not 1 <= found.threads <= cpus:
        parser.error(f"--threads: expected 1 to {cpus}, got {found.threads}")
    try:
        found.rows = chosen(found.only)
    except ValueError as error:
        parser.error(str(error))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every measured row passes, else 1; 2 for bad input."""
    asked = options(arguments)
    if asked.list:
        _print("\n".join(f"{row.name:24}{row.text}" for row in asked.rows))
        return 0
    pythons = {"ours": asked.python, "newest": asked.python_newest, "peers": asked.peers_python}
    setup = Setup(asked.model, asked.work.resolve(), pythons, asked.threads, asked.limit, asked.smoke)
    if hasattr(os, "sched_setaffinity"):  # inherited by every run
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: asked.threads])
    begin = time.monotonic()
    _say("looking for the participants ...")
    versions = tell_versions(setup)
    if "ours" not in versions:
        _say(f"--python: expected a Python with jax and numpy, got {asked.python}")
        return 2
    peers = versions.get("peers", {})
    try:
        _say("making the copies of the model that the peers read ...")
        setup.prepare(list(peers))
    except Failed as error:
        _say(f"the model: {error}")
        return 2
    seconds, figures = measured(setup, asked.rows, asked.repetitions, peers)
    verdicts = [judge(row, figures) for row in asked.rows]
    minutes = (time.monotonic() - begin) / 60
    head = f"{date.today().isoformat()}, {asked.model}, {asked.threads} threads, {minutes:.0f} min; {_told(versions)}"
    _print(f"{head}\n\n{table(verdicts)}\n{sources(figures)}")
    if asked.json:
        asked.json.write_text(json.dumps(_report(asked, versions, figures, verdicts, seconds), indent=1) + "\n")
    return int(any(verdict.result == "falls short" for verdict in verdicts))


def measured(setup: Setup, rows: Sequence[Row], rounds: int, peers: dict[str, str]) -> tuple[dict[str, float], Figures]:
    """Seconds each run took in all, and the figures: a list for each, or why it is missing."""
    runs, figures, seconds = runs_of(rows), Figures(), dict[str, float]()
    reasons: dict[tuple[str, str], str] = {}
    for index in range(rounds):
        now = [run for run in runs if index < rounds_of(*run, rounds)]
        now = now if index % 2 == 0 else now[::-1]
        for number, (participant, work) in enumerate(now):
            _say(f"round {index + 1} of {rounds}, {number + 1} of {len(now)}: {participant} {work}")
            if (participant, work) in reasons:
                continue
            begin = time.monotonic()
            try:
                if (system := participant.removesuffix("-int8")) not in ("ours", "newest", *peers):
                    raise Failed(f"{system} is not installed")
                for name, value in setup.figures(participant, work).items():
                    values = figures.setdefault(f"{participant}/{work}/{name}", [])
                    assert isinstance(values, list)
                    values.append(value)
            except Failed as error:
                reasons[participant, work] = str(error)
                _say(f"  {error}")
            key = f"{participant}/{work}"
            seconds[key] = seconds.get(key, 0) + time.monotonic() - begin
    for row in rows:
        for name in (*row.above, *row.below):
            figures.setdefault(name, reasons.get(tuple(name.split("/")[:2]), "no figure"))  # type: ignore[arg-type, call-overload]
    return seconds, figures


ONCE = ("top-p", "cache", "context", "sampling", "second-process", "memory")  # have their own ratio or median
SLOW = ("greedy-32", "int8-32", "prefill-4", "prefill-int8-4")


def rounds_of(participant: str, work: str, rounds: int) -> int:
    """How many of the rounds a run takes part in: half of them if it is slow, or compares within itself."""
    return (rounds + 1) // 2 if work.startswith(ONCE) or work in SLOW or participant == "newest" else rounds


def table(verdicts: Sequence[Verdict]) -> str:
    """The rows as a Markdown table."""
    lines = [["row", "work", "measured", "bar", "aim", "result"]]
    for row, value, result, missing in verdicts:
        sign = "<=" if row.at_most else ">="
        lines.append(
            [
                row.name,
                row.text,
                "-" if value is None else _number(value, row.unit),
                f"{sign} {row.bar:g}{_unit(row.unit)}",
                "" if row.aim is None else f"{row.aim:g}{_unit(row.unit)}",
                result if value is None or not missing else f"{result}, without {', '.join(missing)}",
            ]
        )
    return markdown(lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head, *rest = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([head, "|" + "|".join("-" * (w + 2) for w in widths) + "|", *rest]) + "\n"


def _unit(unit: str) -> str:
    return unit if unit == "x" else f" {unit}"


def _number(value: float, unit: str) -> str:
    return f"{value:.3g}{_unit(unit)}" if value < 100 else f"{value:.0f}{_unit(unit)}"


def sources(figures: Figures) -> str:
    """What the rows are made of: tokens per second of every run in each round, and why a run gave none."""
    lines, reasons = [["participant", "work", "tokens/s in each round"]], {}
    for name, values in figures.items():
        participant, work, field = name.split("/")
        if isinstance(values, str):
            reasons[f"{participant} {work}"] = values
        elif field == "tokens_per_second":
            lines.append([participant, work, ", ".join(f"{value:.1f}" for value in values)])
    told = "".join(f"not measured: {run}: {reason}\n" for run, reason in reasons.items())
    return markdown(lines) + (f"\n{told}" if told else "")


def _told(versions: dict[str, Any]) -> str:
    parts = [f"{who}: jax {v['jax']} on Python {v['python']}" for who, v in versions.items() if who != "peers"]
    return ", ".join([*parts, *(f"{name} {version}" for name, version in versions.get("peers", {}).items())])


def _report(
    asked: argparse.Namespace,
    versions: dict[str, Any],
    figures: Figures,
    verdicts: Sequence[Verdict],
    seconds: dict[str, float],
) -> dict[str, Any]:
    rows = [
        {
            "name": row.name,
            "text": row.text,
            "measured": value,
            "unit": row.unit,
            "bar": row.bar,
            "aim": row.aim,
            "at_most": row.at_most,
            "result": result,
            "missing": missing,
        }
        for row, value, result, missing in verdicts
    ]
    about = {"format": "jaxdecode-bench-peers", "version": 1, "date": date.today().isoformat(), "model": asked.model}
    return {
        **about,
        "threads": asked.threads,
        "versions": versions,
        "rows": rows,
        "figures": figures,
        "seconds": seconds,
    }


def _say(text: str) -> None:
    print(f"bench_peers: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201
