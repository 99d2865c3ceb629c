#!/usr/bin/env python3
"""Peak memory of `jaxdecode batch` over files of several lengths, beside what `jaxdecode inspect` predicts.

    check_memory.py [MODEL [LINES ...]]

Exit code 1 if some peak is more than 10% off the prediction. Each run is a process of its own.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxdecode.cli.batch_memory import peak_of_batch

SLOTS, PROMPT, NEW = 16, 60, 16


def write(path: Path, lines: int) -> None:
    """Lines with prompts of 1 to PROMPT ids and 1 to NEW new tokens; the first one has the most of both."""
    rng = random.Random(lines)
    with path.open("w") as file:
        for i in range(lines):
            size, new = (PROMPT, NEW) if i == 0 else (rng.randint(1, PROMPT), rng.randint(1, NEW))
            prompt = [rng.randrange(32, 122) for _ in range(size)]
            file.write(json.dumps({"id": i, "prompt": prompt, "max_new_tokens": new}) + "\n")


def main() -> int:
    model, counts = (sys.argv[1:2] or ["toy"])[0], sys.argv[2:] or ["2000", "20000"]
    sizes = ["--slots", f"{SLOTS}", "--longest-prompt", f"{PROMPT}", "--max-new-tokens", f"{NEW}"]
    off = []
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        for count in ["1", *counts]:  # the first leaves its compiled programs
            write(source, int(count))
            peak = peak_of_batch("--model", model, "--no-resume", "--slots", f"{SLOTS}", str(source), str(out))
            if count == "1":
                command = [sys.executable, "-m", "jaxdecode", "inspect", model, *sizes, "--json"]
                told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["batch"]
                print(json.dumps(told))  # noqa: T201
            assert peak is not None
            off.append(peak / told["bytes"] - 1)
            print(f"{count:>6} lines: {peak / 1e6:.1f} MB, predicted {told['bytes'] / 1e6:.1f} MB, {off[-1]:+.1%}")  # noqa: T201
    return int(max(map(abs, off[1:])) > 0.1)


if __name__ == "__main__":
    sys.exit(main())
