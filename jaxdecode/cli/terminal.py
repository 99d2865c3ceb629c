"""What the commands share at the terminal: output, tables, progress, Ctrl-C, and one-line errors."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TextIO

import typer

__all__ = [
    "BadInput",
    "Progress",
    "bad_input",
    "deferred_interrupt",
    "quiet_keyboard",
    "show",
    "styled",
    "table",
    "visible",
]

# A model may write control characters, and a terminal obeys them: they are shown as pictures of themselves.
_PICTURES = {c: 0x2400 + c for c in range(32) if chr(c) not in "\t\n"} | {0x7F: 0x2421}
_PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


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


def visible(text: str) -> str:
    """``text`` with every control character but tab and line end made visible."""
    return text.translate(_PICTURES)


def show(text: str) -> None:
    """Print now, since a reader follows the text while it grows: exactly into a pipe, ``visible`` on a terminal."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def styled(text: str, style: str, stream: TextIO | None = None) -> str:
    """``text`` "bold", "dim" or "red" if ``stream`` (stdout) is a terminal that has colours; else as it is."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM", "dumb") == "dumb":
        return text
    return f"\x1b[{ {'bold': 1, 'dim': 2, 'red': 31}[style] }m{text}\x1b[0m"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Lines of aligned columns; the columns numbered in ``left`` are aligned on the left, the others on the right."""
    from rich.cells import cell_len  # a CJK character is two cells wide

    widths = [max(map(cell_len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True)]
        padded = [
            cell + gap if i in left else gap + cell for i, (cell, gap) in enumerate(zip(cells, gaps, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "".join(f"{text}\n" for text in [styled(line(header), "bold"), *map(line, rows)])


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


@contextlib.contextmanager
def quiet_keyboard() -> Iterator[None]:
    """While text is written to a terminal: keys typed ahead are not echoed into it, and a paste stays in one piece.

    They wait for the next prompt. Ctrl-C works. Nothing happens where stdin is no terminal.
    """
    try:
        import termios
        import tty
    except ImportError:  # not a Unix
        yield
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard, termios.TCSADRAIN)
        _bracket_pastes(True)
        yield
    finally:
        _bracket_pastes(False)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _bracket_pastes(on: bool) -> None:
    """Ask the terminal to mark where a paste begins and ends."""
    sys.stdout.write("\x1b[?2004h" if on else "\x1b[?2004l")
    sys.stdout.flush()
