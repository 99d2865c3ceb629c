"""A conversation and its file: who said what, under which settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdecode.checks import require
from jaxdecode.cli.decoding import SETTINGS, parse, shown
from jaxdecode.cli.files import read_json, write_json
from jaxdecode.rulebook import Settings

__all__ = ["NUMBERS", "Conversation", "check_numbers", "parse_setting"]

_FORMAT, _VERSION = "jaxdecode-chat", 1

# The settings every chat has, their types, and which of them may be none (off). Those of ``SETTINGS`` may be beside.
NUMBERS: dict[str, tuple[type[int] | type[float], bool]] = {
    "temperature": (float, False),
    "top_k": (int, True),
    "top_p": (float, True),
    "min_p": (float, True),
    "max_new_tokens": (int, False),
    "seed": (int, False),
}


@dataclasses.dataclass
class Conversation:
    """``system`` message, then ``messages`` of "user" and "assistant" in turn; ``numbers``: every name in NUMBERS."""

    numbers: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)

    def chat(self) -> list[dict[str, str]]:
        """All messages for the chat template."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def add(self, role: str, content: str) -> None:
        """One more message."""
        self.messages.append({"role": role, "content": content})

    def undo(self) -> str:
        """Take the last message of the user and all after it away, and return it. ValueError if there is none."""
        at = max((i for i, m in enumerate(self.messages) if m["role"] == "user"), default=-1)
        require(at >= 0, "undo", "a message of yours", "none yet")
        text = self.messages[at]["content"]
        del self.messages[at:]
        return text

    def save(self, path: Path, model: str) -> None:
        """Write it to ``path``; ``model`` is told for the reader."""
        described = {"format": _FORMAT, "version": _VERSION, "model": model}
        write_json(path, {**described, "settings": self.numbers, "system": self.system, "messages": self.messages})

    @classmethod
    def load(cls, path: Path) -> tuple[Conversation, str]:
        """What ``save`` wrote, and the name of its model. ValueError for a file that says anything else."""
        model: Any
        system: Any
        messages: Any
        numbers: Any
        value = read_json(path, _FORMAT, _VERSION)
        model, system, messages, numbers = (value.get(name) for name in ("model", "system", "messages", "settings"))
        require(isinstance(model, str), f"{path}: model", "a text", model)
        require(system is None or isinstance(system, str), f"{path}: system", "a text or null", system)
        require(isinstance(messages, list), f"{path}: messages", "a list", messages)
        for i, message in enumerate(messages):
            role = ("user", "assistant")[i % 2]
            good = isinstance(message, dict) and message.get("role") == role and isinstance(message.get("content"), str)
            require(good, f"{path}: message {i}", f"one of role {role} with a text as content", message)
        known = isinstance(numbers, dict) and NUMBERS.keys() <= numbers.keys() <= NUMBERS.keys() | SETTINGS.keys()
        require(known, f"{path}: settings", "all", numbers)
        checked = {name: parse_setting(name, shown(value))[1] for name, value in numbers.items()}
        return cls(checked, system, [{k: m[k] for k in ("role", "content")} for m in messages]), model


def parse_setting(name: str, text: str) -> tuple[str, Any]:
    """A setting's name as in ``Settings`` and its value: "top-p", "0.9" or "none". ValueError for anything else."""
    key = name.strip().lower().replace("-", "_")
    if key in SETTINGS:
        return key, None if text.strip().lower() in ("none", "off") else parse(key, text)
    require(key in NUMBERS, "settings", f"one of {_listed([*NUMBERS, *SETTINGS])}", name)
    kind, optional = NUMBERS[key]
    if optional and text.strip().lower() in ("none", "off"):
        return key, None
    try:
        return key, kind(text)
    except ValueError:
        expected = ("a whole number" if kind is int else "a number") + (", or none" if optional else "")
        raise ValueError(f"{key}: expected {expected}, got {text}") from None


def check_numbers(numbers: dict[str, Any]) -> None:
    """ValueError for a setting out of range."""
    Settings(**{k: v for k, v in numbers.items() if k != "seed"})
    require(0 <= numbers["seed"] < 2**32, "seed", "a number in [0, 2^32)", numbers["seed"])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name.replace("_", "-") for name in names)
