"""The loop of a chat: messages and commands in, replies out."""

from __future__ import annotations

import json as json_text
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import typer

from jaxdecode.cli.choices import CANCELLED, FAILURES
from jaxdecode.cli.conversation import Conversation, check_numbers, parse_setting
from jaxdecode.cli.decoding import fields, shown
from jaxdecode.cli.files import check_target
from jaxdecode.cli.terminal import Progress, bad_input, deferred_interrupt, quiet_keyboard, show, styled, visible
from jaxdecode.cli.writing import RowText
from jaxdecode.session import Session

if TYPE_CHECKING:
    from jaxdecode.checkpoint import Loaded

__all__ = ["COMMANDS", "ChatLoop"]


class Command(NamedTuple):
    """What follows the command's name, and what it does."""

    argument: str
    help: str


COMMANDS = {
    "/help": Command("", "this list"),
    "/reset": Command("", "forget the conversation; the system message and the settings stay"),
    "/undo": Command("", "take back your last message and its reply"),
    "/edit": Command("TEXT", "put TEXT in place of your last message, and answer that"),
    "/system": Command("[TEXT]", "show the system message, or set it; '-' removes it"),
    "/settings": Command("[NAME VALUE]", "show the settings, or change one, as in: /settings temperature 0.7"),
    "/save": Command("FILE", "write the conversation to a file"),
    "/load": Command("FILE", "go on with a conversation from a file"),
    "/quit": Command("", "end; so does Ctrl-D"),
}
HINTS = """\
Ctrl-C stops a reply and keeps what is there. A pasted text is one message, its lines and all.
A space in front of a command's name makes it a message.
"""
_COMMAND = re.compile(r"/[A-Za-z]+(\s|$)")  # so paths and comments in pasted code are messages


class ChatLoop:
    """Messages and commands in, replies out. One ``Session`` keeps the model's cache from turn to turn."""

    def __init__(
        self,
        loaded: Loaded,
        model: str,
        conversation: Conversation,
        *,
        json: bool,
        interactive: bool,
        texts: dict[str, tuple[str, ...]] | None = None,
        constraint: dict[str, Any] | None = None,
    ) -> None:
        self.loaded, self.model, self.conversation = loaded, model, conversation
        # As given at the start, not part of the conversation: settings that are texts, and those of a constraint.
        self.texts, self.constraint = texts or {}, constraint or {}
        self.json, self.interactive = json, interactive
        self.session = Session(loaded.model, loaded.params, context=loaded.config.context_length)

    def run(self, read: Callable[[], str | None]) -> int:
        """Answer what ``read`` gives until it gives None. The first error ends it, unless somebody types."""
        while True:
            try:
                line = read()
                if line is None or line.strip().lower() == "/quit":
                    if line is None and self.interactive:
                        typer.echo()
                    return 0
                with bad_input():
                    finish = self.take(line)
                if finish == CANCELLED and not self.interactive:
                    return 130
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                typer.echo(styled("\n(/quit or Ctrl-D ends the chat)", "dim"))
            except typer.TyperException as error:
                if not self.interactive:
                    raise
                typer.echo(styled(visible(" ".join(error.format_message().split())), "red", sys.stderr), err=True)

    def take(self, line: str) -> str | None:
        """Do what ``line`` says. Returns how the reply ended, if there was one. ValueError, OSError: bad input."""
        if not line.strip():
            return None
        return self.command(line) if _COMMAND.match(line) else self.answer(line)

    def command(self, line: str) -> str | None:
        """A line that starts with a slash."""
        name, rest = (*line.split(maxsplit=1), "")[:2]
        name, rest = name.lower(), rest.strip()
        if name not in COMMANDS:
            raise ValueError(f"{name}: no such command; /help lists them, and a space in front makes it a message")
        needed = COMMANDS[name].argument
        if (rest and not needed) or (not rest and needed[:1] not in ("", "[")):
            raise ValueError(f"{name}: expected {needed or 'nothing after it'}, got {rest or 'nothing'}")
        if name == "/edit":
            before = list(self.conversation.messages)
            self.conversation.undo()
            return self.answer(rest, before)
        handler = getattr(self, f"on_{name[1:]}")
        self.tell(name, handler(rest) if needed else handler())
        return None

    def tell(self, command: str, text: str) -> None:
        """What a command has to say."""
        if self.json:
            typer.echo(json_text.dumps({"command": command, "message": text}, ensure_ascii=False))
        elif text:
            typer.echo(styled(visible(text), "dim"))

    def on_help(self) -> str:
        lines = [f"{f'{name} {c.argument}':24}{c.help}\n" for name, c in COMMANDS.items()]
        return "".join(lines) + HINTS.removesuffix("\n")

    def on_reset(self) -> str:
        self.conversation.messages.clear()
        self.session.reset()
        return "the conversation is empty"

    def on_undo(self) -> str:
        return f"took back: {_shortened(self.conversation.undo())}"

    def on_system(self, rest: str) -> str:
        if rest:
            self.conversation.system = None if rest == "-" else rest
        return f"system message: {self.conversation.system or 'none'}"

    def on_settings(self, rest: str) -> str:
        numbers = self.conversation.numbers
        if rest:
            name, *values = rest.split()
            if len(values) > 1:
                raise ValueError(f"/settings: expected NAME VALUE, got {rest}")
            if values:
                key, value = parse_setting(name, values[0])
                check_numbers({**numbers, key: value})
                numbers[key] = value
            else:
                key = parse_setting(name, "none")[0]
            return f"{key.replace('_', '-')} = {shown(numbers.get(key))}"
        return "\n".join(f"{key.replace('_', '-')} = {shown(value)}" for key, value in numbers.items())

    def on_save(self, rest: str) -> str:
        self.conversation.save(check_target(rest), self.model)
        return f"wrote {len(self.conversation.messages)} messages to {rest}"

    def on_load(self, rest: str) -> str:
        found, model = Conversation.load(Path(rest).expanduser())
        check_numbers(found.numbers)
        self.conversation = found
        other = "" if model == self.model else f"; they were written with {model}"
        return f"read {len(found.messages)} messages from {rest}{other}"

    def answer(self, text: str, before: list[dict[str, str]] | None = None) -> str:
        """Reply to ``text`` and keep both; returns how the reply ended. If there is none, all is as ``before``."""
        conversation = self.conversation
        before = list(conversation.messages) if before is None else before
        conversation.add("user", text)
        reply, ids, kept = RowText(self.loaded.tokenizer), list[int](), False
        try:
            ids += self.encode()
            finish = self.write(ids, reply)
            kept = bool(reply.tokens)
        except KeyboardInterrupt:  # pressed twice
            if not self.interactive:
                raise
            finish, kept = CANCELLED, bool(reply.text)
        finally:
            if kept:
                conversation.add("assistant", reply.text)
            else:
                conversation.messages[:] = before
        self.close(reply, finish, kept)
        if self.json:
            counts = {"prompt_tokens": len(ids), "cached_tokens": self.session.reused}
            told = {"role": "assistant", "content": reply.text, "tokens": reply.tokens, "finish": finish, **counts}
            typer.echo(json_text.dumps({**told, "completion_tokens": len(reply.tokens)}, ensure_ascii=False))
        if finish in FAILURES:
            raise typer.TyperException(f"the reply ends early ({finish}): {FAILURES[finish]}")
        return finish

    def encode(self) -> list[int]:
        """The conversation as ids. ValueError if they leave no room for a reply."""
        ids, most = self.loaded.tokenizer.chat(self.conversation.chat()), self.session.context - 1
        if len(ids) > most:
            got = f"got {len(ids)}; /undo, /edit or /reset make room"
            raise ValueError(f"conversation: expected at most {most} tokens, what the model's context holds, {got}")
        return ids

    def write(self, ids: list[int], reply: RowText) -> str:
        """Decode the reply to the conversation ``ids``, printing its pieces; returns how it ended."""
        numbers = dict(self.conversation.numbers)
        key = jax.random.key(numbers.pop("seed"))
        progress = Progress()
        with quiet_keyboard(), deferred_interrupt() as interrupted:
            try:
                progress("reading")
                chosen = fields({**numbers, **self.texts}, self.loaded.tokenizer)
                steps = self.session.reply(ids, key=key, settings=self.loaded.settings(**chosen, **self.constraint))
                while not interrupted() and (step := next(steps, None)) is not None:
                    info = jax.device_get(step)
                    self.print(reply.push(info.tokens[0, : info.count[0]].tolist()), progress)
                self.print(reply.flush(), progress)
            finally:
                progress.stop()
        return reply.finish(int(steps.result().finish[0]))

    def print(self, piece: str, progress: Progress) -> None:
        """A piece of the reply."""
        if piece and not self.json:
            progress.stop()
            show(piece)

    def close(self, reply: RowText, finish: str, kept: bool) -> None:
        """End the line of the reply, and say why it ended if that is not obvious."""
        notes = {"length": f"ended after {len(reply.tokens)} tokens", CANCELLED: "stopped"}
        note = notes.get(finish, "") if kept else "nothing written, your message is taken back"
        if self.json:
            return
        if reply.text or not self.interactive:
            typer.echo()
        if note and self.interactive:
            typer.echo(styled(f"({note})", "dim"))


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."
