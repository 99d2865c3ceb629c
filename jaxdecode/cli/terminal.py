"""What the commands share at the terminal: progress, Ctrl-C, and one-line errors."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import typer

__all__ = ["BadInput", "Progress", "bad_input", "deferred_interrupt"]


class BadInput(typer.TyperException):
    """The user can mend it: one line on stderr, exit code 2."""

    exit_code = 2


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
    """Turn what the library says about its input into one line for the user."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise BadInput(str(error)) from error


class Progress:
    """``progress(text, fraction)``: one line on stderr that vanishes; nothing at all unless stderr is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._over = not sys.stderr.isatty()

    def __call__(self, text: str, fraction: float | None = None) -> None:
        """Show ``text`` and, if known, how much of it is done (0 to 1)."""
        if self._over:
            return
        if self._bar is None:
            self._bar = _bar()
            self._task = self._bar.add_task(text)
            self._bar.start()
        total = None if fraction is None else 1.0
        self._bar.update(self._task, description=text, total=total, completed=fraction or 0.0)

    def stop(self) -> None:
        """Take the line away for good, so that text may follow."""
        self._over = True
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields ``interrupted()``: the first Ctrl-C only sets it, so that a step is never torn; a second one raises."""
    seen = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True

    old = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, old)
