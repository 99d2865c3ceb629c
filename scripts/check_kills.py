#!/usr/bin/env python3
"""Kill a batch run at random instants, resume it each time, and compare the file with an uninterrupted run's.

    check_kills.py [MODEL [KILLS [LINES [SEED]]]]

Each kill is a SIGKILL after a random part of the time that the whole run takes; every second one after a tenth of that
at most, counted from the moment when something new is in the file.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> int:
    model, kills, lines, seed = (*sys.argv[1:], *("toy", "50", "500", "1")[len(sys.argv) - 1 :])
    rng = random.Random(int(seed))
    words = ["a toy", "can write", "few words", "we want", "to write", "more words", "who would", "hoard cards"]
    with tempfile.TemporaryDirectory() as folder:
        source, whole, out = (Path(folder) / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
        texts = [
            {"id": i, "prompt": " ".join(rng.choices(words, k=rng.randint(1, 8))), "max_new_tokens": rng.randint(1, 60)}
            for i in range(int(lines))
        ]
        source.write_text("".join(json.dumps(text) + "\n" for text in texts))
        command = [sys.executable, "-m", "jaxdecode", "batch", "--model", model, "--temperature", "0.9", str(source)]
        subprocess.run([*command, str(whole)], check=True, stdout=subprocess.DEVNULL)  # compiles
        begin = time.monotonic()
        subprocess.run([*command, "--no-resume", str(whole)], check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - begin
        done, killed, torn = [0], 0, 0
        while killed < int(kills):
            process = subprocess.Popen([*command, str(out)], stdout=subprocess.DEVNULL)
            part = 1.0
            if killed % 2:
                part = 0.1
                while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") > done[-1]):
                    time.sleep(0.001)
            try:
                process.wait(timeout=rng.uniform(0, part * seconds))
                out.unlink()  # it came to its end: begin anew
                done.append(0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                killed += 1
                data = out.read_bytes() if out.exists() else b""
                done.append(data.count(b"\n"))
                torn += not data.endswith(b"\n") and bool(data)
                assert whole.read_bytes().startswith(data), "what is there is not a beginning of the whole"
        subprocess.run([*command, str(out)], check=True, stdout=subprocess.DEVNULL)
        same = whole.read_bytes() == out.read_bytes()
    print(f"{killed} kills, lines there (0: begun anew): {done}, torn lines: {torn}; the same file: {same}")  # noqa: T201
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
