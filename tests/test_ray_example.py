"""The Ray example on a real local cluster, where ray is installed: the results of `jaxdecode batch`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_tools import call

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[data]")
def test_a_ray_cluster_gives_the_results_of_the_single_run(tmp_path: Path) -> None:
    lines = [{"id": f"r{i}", "prompt": "hello "[: 1 + i % 6], "temperature": 0.9} for i in range(20)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{bad\n")
    script = str(ROOT / "scripts" / "examples" / "ray_batch.py")
    command = [sys.executable, script, "toy", str(source), str(tmp_path / "out"), "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(row) for file in (tmp_path / "out").iterdir() for row in file.read_text().splitlines()]
    results = [json.loads(row["result"]) for row in sorted(found, key=lambda row: row["number"])]
    out = tmp_path / "out.jsonl"
    assert call("batch", "--model", "toy", "--no-compile-cache", str(source), str(out)).code == 0
    assert results == [json.loads(line) for line in out.read_text().splitlines()]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
