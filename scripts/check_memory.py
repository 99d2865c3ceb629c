#!/usr/bin/env python3
"""Peak memory of `jaxdecode batch` over files of several lengths, beside what `jaxdecode inspect` predicts.

    check_memory.py [MODEL [LINES ...]] [--slots N] [--longest-prompt N] [--max-new-tokens N]

Exit code 1 if some peak is more than 10% off the prediction. Each run is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxdecode.cli.batch_memory import peak_of_batch


def write(path: Path, lines: int, longest: int, most: int) -> None:
    """Lines with prompts of 1 to ``longest`` ids and 1 to ``most`` new tokens; the first one has the most of both."""
    rng = random.Random(lines)
    with path.open("w") as file:
        for i in range(lines):
            size, new = (longest, most) if i == 0 else (rng.randint(1, longest), rng.randint(1, most))
            prompt = [rng.randrange(32, 122) for _ in range(size)]
            file.write(json.dumps({"id": i, "prompt": prompt, "max_new_tokens": new}) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="toy")
    parser.add_argument("lines", nargs="*", default=["2000", "20000"])
    for name, default in (("slots", "16"), ("longest-prompt", "60"), ("max-new-tokens", "16")):
        parser.add_argument(f"--{name}", default=default)
    asked = parser.parse_args()
    model, counts, slots = asked.model, asked.lines, asked.slots
    longest, new = asked.longest_prompt, asked.max_new_tokens
    sizes = ["--slots", slots, "--longest-prompt", longest, "--max-new-tokens", new]
    off = []
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        for count in ["1", *counts]:  # the first leaves its compiled programs
            write(source, int(count), int(longest), int(new))
            peak = peak_of_batch("--model", model, "--no-resume", "--slots", slots, str(source), str(out))
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
