"""scripts/bench_peers: its rows, its verdicts and its rounds, with runs that are made up; no peer is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def peers() -> Iterator[Any]:
    """The modules of the script, which are no part of the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        from peers import main, rows, runs

        yield type("Peers", (), {"main": main, "rows": rows, "runs": runs})


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", str(ROOT / "scripts" / "bench_peers"), *arguments]  # no package is in reach
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_needs_nothing_but_python_and_lists_its_rows(peers: Any) -> None:
    listed = script("--list")
    assert (listed.returncode, listed.stderr) == (0, "")
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    assert names == [row.name for row in peers.rows.ROWS if row.default]
    assert len({row.name for row in peers.rows.ROWS}) == len(peers.rows.ROWS)


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["--only", "b2-*"], "--only: expected names of rows"),
        (["--repetitions", "0"], "--repetitions: expected a number >= 1, got 0"),
        (["--threads", "0"], "--threads: expected 1 to"),
        (["--python", "/no/such/python"], "--python: expected a Python with jax and numpy, got /no/such/python"),
    ],
)
def test_bad_input(arguments: list[str], about: str, tmp_path: Path) -> None:
    result = script(*arguments, "--work", str(tmp_path / "work"))
    assert (result.returncode, result.stdout) == (2, "")
    assert about in result.stderr
    assert "Traceback" not in result.stderr


def test_the_bars_are_those_that_were_set(peers: Any) -> None:
    bars = {row.name: (row.bar, row.aim) for row in peers.rows.ROWS}
    assert bars["b1-numpy"] == (0.75, 0.9)
    assert bars["b1-llama"] == (1, 1.25)
    assert (bars["b1-ctranslate2"], bars["b1-transformers"]) == ((1, 1.1), (2.5, 3))
    assert (bars["b8-best"], bars["b32-best"], bars["b32-best-newest"]) == ((1.4, 2), (1.35, 2), (1.7, 2))
    assert [bars[f"{b}-ctranslate2{new}"][0] for b, new in (("b8", ""), ("b32", ""), ("b32", "-newest"))] == [
        1.4,
        1.2,
        1.4,
    ]
    assert [bars[f"prefill-{b}"][0] for b in ("b1", "b4", "b1-int8", "b4-int8")] == [1, 0.95, 0.95, 0.75]
    assert bars["newest-int8-1"][0] == 0.4
    assert {bars[name][0] for name in bars if name.startswith("newest-greedy")} == {0.8}
    for new in ("", "-newest"):
        assert bars[f"top-p-b8{new}"] == (1.05, 1.02)
        assert bars[f"sampling-flat{new}"] == bars[f"sampling-peaked{new}"] == (15, 6)
        assert [bars[f"{name}{new}"][0] for name in ("cache-4096", "context-1024", "second-process", "memory")] == [
            1.05,
            1.3,
            4,
            250,
        ]


def test_a_ratio_is_taken_round_by_round_of_the_best(peers: Any) -> None:
    row = peers.rows.Row("r", "", ["ours/a/x", "ours/b/x"], ["p/a/x", "q/a/x"], 2.0)
    figures = {
        "ours/a/x": [4.0, 10.0, 9.0],
        "ours/b/x": [6.0, 1.0, 1.0],
        "p/a/x": [2.0, 4.0, 1.0],
        "q/a/x": [1.0, 5.0, 3.0],
    }
    assert peers.rows.judge(row, figures) == (row, 3.0, "pass", [])  # 6/2, 10/5, 9/3
    short = peers.rows.judge(row, figures | {"ours/a/x": [1.0, 1.0, 1.0], "q/a/x": "broke"})
    assert short == (row, 1.0, "falls short", ["q/a"])  # 6/2, 1/4, 1/1
    gone = peers.rows.judge(row, figures | {"p/a/x": "not installed", "q/a/x": "broke"})
    assert gone == (row, None, "not measured", ["p/a", "q/a"])
    alone = peers.rows.Row("s", "", ["ours/a/x"], [], 5.0, at_most=True, scale=0.5)
    assert peers.rows.judge(alone, figures)[1:3] == (4.5, "pass")
    assert peers.rows.judge(alone._replace(bar=4.4), figures)[2] == "falls short"


def test_a_run_that_fails_says_why_in_a_line(peers: Any, tmp_path: Path) -> None:
    setup = peers.runs.Setup("toy", tmp_path, {"ours": sys.executable, "newest": None, "peers": None}, 1, 20.0)
    assert setup.call("ours", "-c", "import os; print(os.environ['OMP_NUM_THREADS'])") == "1\n"
    with pytest.raises(peers.runs.Failed, match=r"^ValueError: x$"):
        setup.call("ours", "-c", "raise ValueError('x')")
    with pytest.raises(peers.runs.Failed, match="no --python-newest"):
        setup.call("newest", "-c", "")
    with pytest.raises(peers.runs.Failed, match="longer than 0 s"):
        setup._replace(limit=0.2).call("ours", "-c", "import time; time.sleep(60)")


def test_rounds_turn_round_and_the_table_tells_all(
    peers: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    done: list[tuple[str, str]] = []

    def figures(setup: Any, participant: str, work: str) -> dict[str, float]:
        done.append((participant, work))
        if (participant, work) == ("ours", "int8-1"):
            raise peers.runs.Failed("no int8")
        fields = ("numpy_fraction", "ratio", "seconds", "bytes", "flat_seconds", "peaked_seconds")
        return {"tokens_per_second": 30.0 if participant == "ours" else 20.0, **dict.fromkeys(fields, 0.9)}

    versions = {"ours": {"jax": "1", "python": "3"}, "peers": {"llama.cpp": "5", "transformers": "6"}}
    monkeypatch.setattr(peers.runs.Setup, "figures", figures)
    monkeypatch.setattr(peers.runs.Setup, "prepare", lambda setup, systems: None)
    monkeypatch.setattr(peers.main, "tell_versions", lambda setup: versions)
    report = tmp_path / "found.json"
    code = peers.main.main(["--only", "b1-*", "cache-4096", "--work", str(tmp_path), "--json", str(report)])
    assert code == 1, "a row falls short"
    first = [("ours", "greedy-1"), ("ours", "int8-1"), ("llama.cpp", "greedy-1"), ("transformers", "greedy-1")]
    second = [run for run in first[::-1] if run != ("ours", "int8-1")]  # what failed is not tried again
    assert done == [*first, ("ours", "cache"), *second]
    out = capsys.readouterr().out
    cells = {
        line.split("|")[1].strip(): [c.strip() for c in line.split("|")[3:7]]
        for line in out.splitlines()
        if "x  " in line
    }
    assert cells["b1-numpy"] == ["0.9x", ">= 0.75x", "0.9x", "pass"]
    assert cells["b1-llama"] == ["1.5x", ">= 1x", "1.25x", "pass, without ours/int8-1"]
    assert cells["b1-ctranslate2"][3] == "not measured"
    assert cells["b1-transformers"] == ["1.5x", ">= 2.5x", "3x", "falls short"]
    assert "not measured: ours int8-1: no int8\n" in out
    assert "not measured: ctranslate2 greedy-1: ctranslate2 is not installed\n" in out
    told = json.loads(report.read_text())
    assert (told["format"], told["version"], told["versions"]) == ("jaxdecode-bench-peers", 1, versions)
    assert told["figures"]["llama.cpp/greedy-1/tokens_per_second"] == [20.0, 20.0]
    assert [row["result"] for row in told["rows"]] == ["pass", "pass", "not measured", "falls short", "pass"]
    assert set(told["seconds"]) == {"/".join(run) for run in [*done, ("ctranslate2", "greedy-1")]}


def test_sampling_alone_has_other_logits_at_every_step(peers: Any) -> None:
    """Flat laws keep most ids under top-p 0.9, peaked ones few."""
    import numpy as np
    from peers import sampling_alone

    for name, table in sampling_alone.tables(1000).items():
        p = np.exp(table - table.max(1, keepdims=True))
        ordered = -np.sort(-p / p.sum(1, keepdims=True), axis=1)
        kept = (np.cumsum(ordered, axis=1) < 0.9).sum(1) + 1
        assert (kept > 850).all() if name == "flat" else (kept < 10).all()
        assert len({row.tobytes() for row in table}) == sampling_alone.TABLE
