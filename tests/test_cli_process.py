"""The command line as a process: start, signals, pipes, the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cli_tools import TOY, Result, assert_bad, expected_text, finish, finished, process

import jaxdecode

# The command line on a toy that never ends; it tells on stderr when it has loaded and when it has written 20 tokens.
ENDLESS = """
import sys, jaxdecode
from jaxdecode.cli import main
from jaxdecode.session import Steps
load, take = jaxdecode.load, Steps.__next__
def endless(source, **options):
    loaded = load(source, **options)
    print("loaded", file=sys.stderr, flush=True)
    if "slow to load" in sys.argv:
        import time
        time.sleep(60)
    return loaded._replace(params=loaded.params.at[:, 256].set(-float("inf")))
def counted(steps):
    steps.taken = getattr(steps, "taken", 0) + 1
    if steps.taken == 21:
        print("twenty", file=sys.stderr, flush=True)
    return take(steps)
jaxdecode.load, Steps.__next__ = endless, counted
main()
"""


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["chat", "--help"], ["--version"], []])
def test_help_and_version_do_not_import_jax(arguments: list[str]) -> None:
    tell = "import atexit, sys; atexit.register(lambda: print('jax' in sys.modules))"
    result = finished(*arguments, program=("-c", f"{tell}; from jaxdecode.cli import main; main()"))
    assert (result.code, result.err) == (0, "")
    *text, imported = result.out.splitlines()
    assert imported == "False"
    assert (f"jaxdecode {jaxdecode.__version__}" if "--version" in arguments else "Usage: jaxdecode") in text[0]


@pytest.mark.parametrize(
    ("line", "word", "expected"),
    [
        ("jaxdecode ", 1, {"batch", "bench", "chat", "eval", "generate", "inspect", "quantize", "verify"}),
        ("jaxdecode generate --model ", 3, {"gemma3-270m", "smollm2-135m", "toy"}),
        ("jaxdecode inspect s", 2, {"smollm2-135m"}),
        ("jaxdecode chat --dtype ", 3, {"float32", "bfloat16", "float16"}),
        ("jaxdecode generate --top-", 2, {"--top-k", "--top-p", "--top-logprobs", "--top-n-sigma"}),
    ],
)
def test_a_shell_completes_without_jax(line: str, word: int, expected: set[str]) -> None:
    tell = "import atexit, sys; atexit.register(lambda: print('jax' in sys.modules))"
    asked = {"_JAXDECODE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(word)}
    result = finished(program=("-c", f"{tell}; from jaxdecode.cli import main; main()"), env=asked)
    assert (result.code, result.err) == (0, "")
    assert set(result.out.split()) == expected | {"False"}


def test_without_its_extra_it_names_the_command_to_run() -> None:
    program = "import sys; sys.modules['typer'] = None; from jaxdecode.cli import main; main()"
    assert_bad(finished("--help", program=("-c", program)), "pip install 'jaxdecode[cli]'")


def test_compiled_programs_are_kept_unless_told_otherwise(tmp_path: Path) -> None:
    def run(folder: str, *options: str) -> Result:
        return finished(*TOY[:-1], "hello ", *options, env={"JAXDECODE_CACHE": str(tmp_path / folder)})

    (tmp_path / "file").touch()
    cold, warm, nowhere, off = run("on"), run("on"), run("file/below"), run("off", "--no-compile-cache")
    assert cold == warm == nowhere == off == Result(0, expected_text("hello ") + "\n", "")
    assert any("step" in path.name for path in (tmp_path / "on" / "xla" / jax.__version__).rglob("*-cache"))
    assert not (tmp_path / "off").exists()


def endless(*options: str) -> Any:
    return process(*TOY, "hello ", "--max-new-tokens", "60000", *options, program=("-c", ENDLESS))


def endless_text(n: int) -> str:
    """The arg-max chain of the toy without its end token."""
    best = np.array(jaxdecode.load("toy").params)[:, :256].argmax(axis=1)
    ids = [ord(" ")]
    for _ in range(n):
        ids.append(int(best[ids[-1]]))
    return bytes(ids[1:]).decode()


def test_interrupt_in_the_middle_keeps_the_text() -> None:
    with endless() as p:
        assert [p.stderr.readline(), p.stderr.readline()] == ["loaded\n", "twenty\n"]
        p.send_signal(signal.SIGINT)
        result = finish(p)
    assert (result.code, result.err, result.out[-1]) == (130, "", "\n")
    text = result.out[:-1]
    assert 20 <= len(text) < 60000
    assert text == endless_text(len(text))


def test_interrupt_in_the_middle_keeps_the_json() -> None:
    with endless("--json") as p:
        assert [p.stderr.readline(), p.stderr.readline()] == ["loaded\n", "twenty\n"]
        p.send_signal(signal.SIGINT)
        result = finish(p)
    assert (result.code, result.err) == (130, "")
    told = json.loads(result.out)
    assert told["finish"] == "cancelled"
    assert 20 <= told["completion_tokens"] == len(told["tokens"]) < 60000
    assert told["text"] == endless_text(len(told["tokens"]))


def test_interrupt_while_loading_is_quiet() -> None:
    with process(*TOY, "slow to load", program=("-c", ENDLESS)) as p:
        assert p.stderr.readline() == "loaded\n"
        p.send_signal(signal.SIGINT)
        assert finish(p) == Result(130, "", "")


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    with endless() as p:
        assert len(p.stdout.read(10)) == 10
        p.stdout.close()
        assert set(p.stderr.read().split()) <= {"loaded", "twenty"}
        assert p.wait(timeout=300) > 0


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_progress_is_shown_on_a_terminal_and_taken_away() -> None:
    ours, theirs = os.openpty()
    shown = b""
    with process(*TOY, "hello ", stderr=theirs, env={"TERM": "xterm", "COLUMNS": "80"}) as p:
        os.close(theirs)
        with contextlib.suppress(OSError):  # the other end is closed
            while True:
                shown += os.read(ours, 4096)
        assert finish(p)[:2] == (0, expected_text("hello ") + "\n")
    os.close(ours)
    assert b"compiling" in shown
    assert shown.rstrip().endswith(b"\x1b[2K")  # that line is empty now


# ---------------------------------------------------------------- what compiling leaves behind
COMPILING = """
import ctypes, types
given = []
ctypes.CDLL = lambda name: types.SimpleNamespace(malloc_trim=given.append)
from jaxdecode.cli.compilation import COMPILED, keep_compiled_programs
keep_compiled_programs()
keep_compiled_programs()
import jax
told = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: told.append(name))
made = jax.jit(lambda x: x + 1)
made(1.0)
print(len(given), told.count(COMPILED), end=" ")
made(2.0)
print(len(given))
"""


def test_memory_is_given_back_after_a_program_is_made_or_read_and_only_then(tmp_path: Path) -> None:
    env = {**os.environ, "JAXDECODE_CACHE": str(tmp_path)}
    told = [subprocess.run([sys.executable, "-c", COMPILING], env=env, capture_output=True, text=True) for _ in "ab"]
    for run in told:  # the first compiles, the second reads
        assert run.returncode == 0, run.stderr
        after_one, programs, after_two = map(int, run.stdout.split())
        assert after_one == programs == after_two >= 1
