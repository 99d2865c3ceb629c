"""`jaxdecode chat` at a terminal: pastes, Ctrl-C, other window sizes, the history; and its reader of lines."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_tools import process

from jaxdecode.cli import lines
from jaxdecode.cli.lines import Lines, read_history

# The chat on a toy that never ends. Opening the terminal makes it the one whose Ctrl-C reaches this process.
PROGRAM = """
import dataclasses, os
os.close(os.open(os.ttyname(0), os.O_RDWR))
import jaxdecode
from jaxdecode.cli import main
load = jaxdecode.load
def endless(source, **options):
    loaded = load(source, **options)
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer = dataclasses.replace(loaded.tokenizer, chat_template=template)
    return loaded._replace(params=loaded.params.at[:, 256].set(-float("inf")), tokenizer=tokenizer)
jaxdecode.load = endless
main()
"""
PASTE = "\x1b[200~{}\x1b[201~"


class Screen:
    """Our end of a terminal: ``until`` returns what is shown up to a text, ``type`` is the keyboard."""

    def __init__(self, end: int) -> None:
        self.end, self.shown = end, ""

    def until(self, text: str, press: str = "") -> str:
        """``press`` is typed every two seconds: readline may leave a Ctrl-C for the next key."""
        deadline, again = time.monotonic() + 300, time.monotonic()
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if press and time.monotonic() >= again:
                self.type(press)
                again = time.monotonic() + 2
            if select.select([self.end], [], [], 1)[0]:
                self.shown += os.read(self.end, 65536).decode("utf-8", "replace")
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def resize(self, rows: int, columns: int) -> None:
        import fcntl
        import termios

        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextlib.contextmanager
def chat(cache: Path, *options: str) -> Iterator[tuple[Any, Screen]]:
    ours, theirs = os.openpty()
    arguments = ("chat", "--model", "toy", "--no-compile-cache", *options)
    env = {"TERM": "xterm", "JAXDECODE_CACHE": str(cache), "TF_CPP_MIN_LOG_LEVEL": "3", "NO_COLOR": "1"}
    pipes = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with process(*arguments, program=("-c", PROGRAM), env=env, start_new_session=True, **pipes) as p:
        os.close(theirs)
        screen = Screen(ours)
        screen.resize(24, 80)
        yield p, screen
    os.close(ours)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_chat_at_a_terminal(tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    with chat(tmp_path / "cache", "--max-new-tokens", "20") as (p, screen):
        screen.until("/help lists the commands")
        screen.until("> ")
        screen.type("hello\r")
        screen.until("reading")
        screen.type(PASTE.format("first line\rsecond line\r/third") + "\r")  # one message, typed ahead
        for _ in range(2):
            screen.until("(ended after 20 tokens)")
        screen.until("> ")
        screen.resize(10, 40)
        screen.type("/settings max-new-tokens 60000\r")
        screen.until("max-new-tokens = 60000")
        screen.type("long\r")
        for rows in (40, 12, 24):  # while it writes
            screen.until("words. words. words. ")
            screen.resize(rows, 30 + rows)
        assert p.poll() is None
        screen.type("\x03")
        screen.until("(stopped)")
        screen.until("> ")
        screen.type("half a line")
        screen.until("half a line")  # Ctrl-C throws away what was typed, so the prompt must have read it
        screen.until("Ctrl-D ends", press="\x03")
        screen.type(f"/save {saved}\r")
        screen.until("wrote 6 messages")
        screen.until("> ")
        screen.type("\x04")
        assert p.wait(timeout=300) == 0
    _, _, pasted, reply, long, partial = (m["content"] for m in json.loads(saved.read_text())["messages"])
    assert (pasted, long) == ("first line\nsecond line\n/third", "long")
    assert len(reply) == 20
    assert 3 * len("words. ") < len(partial) < 60000  # the partial reply stayed
    assert set(partial.split()[1:-1]) == {"words."}
    typed = ["hello", pasted, "/settings max-new-tokens 60000", "long", f"/save {saved}"]
    assert read_history(tmp_path / "cache" / "chat_history") == typed
    assert (tmp_path / "cache" / "chat_history").stat().st_mode & 0o077 == 0


# The reader of lines


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


class FakeReadline:
    """As much of readline as is used; ``typed`` are the lines that come next."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc
        self.history: list[str] = []
        self.bound: list[str] = []
        self.completer: Any = None

    def add_history(self, line: str) -> None:
        self.history.append(line)

    def parse_and_bind(self, text: str) -> None:
        self.bound.append(text)

    def set_completer(self, completer: Any) -> None:
        self.completer = completer

    def set_auto_history(self, on: bool) -> None:
        assert not on

    def set_completer_delims(self, text: str) -> None:
        assert "/" not in text


def typing(monkeypatch: pytest.MonkeyPatch, typed: list[str], doc: str = "GNU readline") -> FakeReadline:
    readline = FakeReadline(doc)
    monkeypatch.setitem(sys.modules, "readline", readline)
    monkeypatch.setattr(sys, "stdin", Keyboard())
    monkeypatch.setattr(sys, "stdout", Keyboard())
    monkeypatch.setattr("builtins.input", lambda prompt="": typed.pop(0))
    monkeypatch.setattr(lines.select, "select", lambda r, w, x, seconds: ([*r] if typed else [], [], []))
    return readline


def test_history_is_kept_and_offered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache" / "history"
    readline = typing(monkeypatch, ["a", "  ", "b\nc", "é"])
    reader = Lines(path, ["/help"])
    assert [reader.read() for _ in range(4)] == ["a", "  ", "b\nc", "é"]
    assert readline.history == read_history(path) == ["a", "b\nc", "é"]
    assert "set enable-bracketed-paste on" in readline.bound
    assert typing(monkeypatch, []).history == []
    Lines(path, ["/help"])
    assert sys.modules["readline"].history == ["a", "b\nc", "é"]


def test_a_history_that_cannot_be_kept_is_no_reason_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    typing(monkeypatch, ["a"])
    assert Lines(tmp_path / "file" / "history", []).read() == "a"


def test_a_history_is_cut_when_it_is_long_and_rubbish_in_it_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_text("".join(f'"{i}"\n' for i in range(2 * lines.KEPT + 1)) + "no JSON\n3\n")
    kept = read_history(path)
    assert kept == [str(i) for i in range(lines.KEPT + 3, 2 * lines.KEPT + 1)]
    assert len(path.read_text().splitlines()) == lines.KEPT
    assert read_history(path) == kept
    assert read_history(tmp_path / "none") == []


def test_tab_completes_commands_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readline = typing(monkeypatch, [])
    Lines(tmp_path / "history", ["/save", "/settings", "/help"])
    assert [readline.completer("/s", i) for i in range(3)] == ["/save ", "/settings ", None]
    assert readline.completer("s", 0) is None
    assert readline.completer("", 0) is None


def test_libedit_cuts_a_paste_into_lines_and_they_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readline = typing(monkeypatch, ["one", "two", "three"], doc="Interface to libedit")
    assert Lines(tmp_path / "history", []).read() == "one\ntwo\nthree"
    assert readline.bound == ["bind ^I rl_complete"]


def test_a_pipe_gives_a_line_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("a\n\nb é\r\nlast".encode())))
    reader = Lines(tmp_path / "history", [])
    assert not reader.interactive
    assert [reader.read() for _ in range(5)] == ["a", "", "b é", "last", None]
    assert not (tmp_path / "history").exists()


def test_the_end_of_typing_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typing(monkeypatch, [])

    def ended(prompt: str = "") -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", ended)
    assert Lines(tmp_path / "history", []).read() is None
