"""The command line. The only package that imports typer and rich; nothing imports it."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["exit_with", "main"]


def main() -> NoReturn:
    """Run the command line and exit: 0, 1 for a failure, 2 for bad input, 130 after Ctrl-C. Errors take one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")
    warnings.showwarning = _warn  # type: ignore[assignment]  # only the first argument is shown
    try:
        from jaxdecode.cli.app import app
    except ImportError as error:
        _fail(f"the command line needs {error.name}: pip install 'jaxdecode[cli]'", 2)
    exit_with(lambda: app(prog_name="jaxdecode", standalone_mode=False))


def exit_with(run: Callable[[], Any]) -> NoReturn:
    """Exit with the code that ``run`` returns; what it has to say to the user instead takes one line on stderr."""
    import typer

    try:
        code = run()
    except typer.TyperException as error:
        _fail(error.format_message(), error.exit_code)
    sys.exit(code)


def _warn(message: Warning | str, *where: Any) -> None:
    _say("warning", str(message))


def _fail(message: str, code: int) -> NoReturn:
    _say("error", message)
    sys.exit(code)


def _say(kind: str, message: str) -> None:
    print(f"jaxdecode: {kind}:", " ".join(message.split()), file=sys.stderr)  # noqa: T201
