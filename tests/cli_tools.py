"""The command line for the tests: in this process, or in one of its own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax

import jaxdecode
from jaxdecode.cli import main

ROOT = Path(__file__).parents[1]
N = 32  # of new tokens, nearly everywhere: one size, one program
TOY = ("generate", "--model", "toy", "--max-new-tokens", str(N), "--no-compile-cache")


class Result(NamedTuple):
    code: int
    out: str
    err: str


def call(*arguments: str, stdin: bytes = b"") -> Result:
    """Run the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["jaxdecode", *arguments]),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),  # the command line shows warnings in its own way
    ):
        try:
            main()
        except SystemExit as ended:
            return Result(int(ended.code or 0), out.getvalue(), err.getvalue())


def assert_bad(result: Result, about: str) -> None:
    """Bad input: one line on stderr, nothing else, exit code 2."""
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("jaxdecode: error: ")
    assert result.err.count("\n") == 1
    assert about in result.err


@contextlib.contextmanager
def process(*arguments: str, program: tuple[str, ...] = ("-m", "jaxdecode"), **options: Any) -> Iterator[Any]:
    """The command line in a process of its own, on pipes, in an environment that asks nothing of jax or XLA.

    But for XLA_FLAGS of scripts/test.
    """
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "TF_", "XLA_")) or k == "XLA_FLAGS"}
    command = [sys.executable, *program, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, encoding="utf-8", env=plain | pipes.pop("env", {}), **pipes
    ) as p:
        try:
            yield p
        finally:
            p.kill()


def finish(p: subprocess.Popen[str]) -> Result:
    out, err = p.communicate(timeout=300)
    return Result(p.returncode, out, err)


def finished(*arguments: str, **options: Any) -> Result:
    with process(*arguments, **options) as p:
        return finish(p)


def expected_text(prompt: str, **settings: Any) -> str:
    """What the toy writes after ``prompt``, by the library."""
    loaded = jaxdecode.load("toy")
    key = jax.random.key(settings.pop("seed", 0))
    chosen = loaded.settings(max_new_tokens=N, **{"temperature": 0.0, **settings})
    out = jaxdecode.generate(loaded.model, loaded.params, [loaded.tokenizer.encode(prompt)], key=key, settings=chosen)
    return loaded.tokenizer.decode(out.to_lists()[0], continuation=True)
