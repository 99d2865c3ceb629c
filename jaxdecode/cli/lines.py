"""What the user says, a message at a time: typed or pasted at a terminal, or piped in, one line each."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdecode.cli.terminal import BadInput, styled

__all__ = ["Lines", "read_history"]

KEPT = 1000  # lines of history
PASTE_SECONDS = 0.05  # within which the next line of a paste follows


class Lines:
    """``read()`` gives the next message. At a terminal with line editing, a history and ``words`` completed by Tab.

    A pasted text is one message, its lines and all: terminals tell GNU readline where a paste begins and ends.
    """

    def __init__(self, history: Path, words: Sequence[str]) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._history, self._words = history, words
        self._readline = _readline() if self.interactive else None
        if self._readline is not None:
            self._set_up(self._readline)

    def read(self) -> str | None:
        """The next message, or None at the end. KeyboardInterrupt: Ctrl-C at the prompt."""
        if not self.interactive:
            return _piped()
        try:
            line = input(self._prompt())
            while self._splits_pastes() and select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
                line += "\n" + input()
        except EOFError:
            return None
        self._remember(line)
        return line

    def _prompt(self) -> str:
        prompt = styled("> ", "bold")
        # Readline must know which characters take no room, else a long line is drawn wrong in a narrow window.
        marked = prompt.replace("\x1b[1m", "\x01\x1b[1m\x02").replace("\x1b[0m", "\x01\x1b[0m\x02")
        return prompt if self._readline is None else marked

    def _splits_pastes(self) -> bool:
        """Whether a line end within a paste ends the line: libedit, which some Pythons use in readline's place."""
        return self._readline is not None and "libedit" in (self._readline.__doc__ or "")

    def _set_up(self, readline: Any) -> None:
        readline.set_auto_history(False)  # one entry may have several lines, which readline's own file would split
        for line in read_history(self._history):
            readline.add_history(line)
        if self._splits_pastes():
            readline.parse_and_bind("bind ^I rl_complete")
        else:
            readline.parse_and_bind("set enable-bracketed-paste on")
            readline.parse_and_bind("tab: complete")
        readline.set_completer_delims(" \n")
        readline.set_completer(self._complete)

    def _complete(self, start: str, number: int) -> str | None:
        found = [word + " " for word in self._words if word.startswith(start)] if start.startswith("/") else []
        return found[number] if number < len(found) else None

    def _remember(self, line: str) -> None:
        if self._readline is None or not line.strip():
            return
        self._readline.add_history(line)
        try:
            self._history.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._history, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with open(descriptor, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:  # a history that cannot be kept is no reason to stop
            return


def read_history(path: Path) -> list[str]:
    """The last KEPT lines typed, oldest first; what is no JSON text is skipped. A file that grew too long is cut."""
    try:
        stored = path.read_text("utf-8", "replace").splitlines()
        if len(stored) > 2 * KEPT:
            path.write_text("\n".join(stored[-KEPT:]) + "\n", "utf-8")
    except OSError:
        return []
    found = []
    for entry in stored[-KEPT:]:
        try:
            line = json.loads(entry)
        except ValueError:
            continue
        found += [line] if isinstance(line, str) else []
    return found


def _readline() -> Any:
    try:
        import readline
    except ImportError:  # not in every Python
        return None
    return readline


def _piped() -> str | None:
    line = sys.stdin.buffer.readline()
    if not line:
        return None
    try:
        return line.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise BadInput(f"stdin: expected UTF-8 text, got {error}") from None
