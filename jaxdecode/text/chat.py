"""Chat templates in a sandbox, and the shield that keeps contents from writing control tokens.

A template is code from a file, a content is text from anybody. The template runs in Jinja's immutable sandbox over
plain data only. The shield hides, in contents that could form a control token even by losing characters, the first
character of every control token behind a private-use character that occurs nowhere else. So what looks like a control
token in the rendered text was written by the template; the rest gets its characters back and is encoded as plain text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jaxdecode.checks import require, shorten

__all__ = ["Shield", "check_messages", "could_form", "map_texts", "render", "shield_for", "texts_of"]

_ROLE = re.compile(r"[\w-]+")


def render(template: str, **variables: Any) -> str:
    """The text that ``template`` makes of ``variables``. ValueError if it is malformed, refuses, or breaks out.

    ``strftime_now`` is not defined, so that the same chat gives the same text every day: templates that ask for the
    date fall back on their own.
    """
    try:
        return _compiled(template).render(tools=None, documents=None, **variables)
    except ImportError:
        raise
    except Exception as error:  # a template can fail in any way; the caller needs to know only that it did
        raise ValueError(f"chat template: {type(error).__name__}: {shorten(error)}") from None


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    try:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError("chat templates need jinja2: pip install 'jaxdecode[text]'") from error
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = _to_json
    return environment.from_string(template)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as plain data. ValueError unless each has a role (a word) and a content (a text)."""
    listed = isinstance(messages, Sequence) and not isinstance(messages, str)
    require(listed and len(messages) > 0, "chat: messages", "a list with at least one message", messages)
    checked = []
    for i, message in enumerate(messages):
        require(isinstance(message, Mapping), f"chat: message {i}", "a mapping with role and content", message)
        role, content = message.get("role"), message.get("content")
        good_role = isinstance(role, str) and _ROLE.fullmatch(role) is not None
        require(good_role, f"chat: role of message {i}", "a word such as 'user'", role)
        require(isinstance(content, str), f"chat: content of message {i}", "a str", content)
        checked.append({str(key): _plain(value, str) for key, value in message.items()})
    return checked


def map_texts(messages: list[dict[str, Any]], change: Callable[[str], str]) -> list[dict[str, Any]]:
    """The messages with ``change`` applied to every text in them except the roles."""
    return [{k: v if k == "role" else _plain(v, change) for k, v in message.items()} for message in messages]


def texts_of(messages: list[dict[str, Any]]) -> list[str]:
    """Every text in the messages except the roles."""
    texts: list[str] = []

    def note(text: str) -> str:
        texts.append(text)
        return text

    map_texts(messages, note)
    return texts


def _plain(value: Any, change: Callable[[str], str]) -> Any:
    """JSON-like data with ``change`` applied to its texts; anything else is refused, so templates see no objects."""
    if isinstance(value, str):
        return change(str(value))
    if isinstance(value, Mapping):
        return {change(str(key)): _plain(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, change) for item in value]
    require(value is None or isinstance(value, bool | int | float), "chat: message", "JSON-like values", value)
    return value


def could_form(controls: Iterable[str], texts: Iterable[str]) -> bool:
    """Whether a control token's characters occur in this order in the texts, so that a cut could leave it there."""
    text = "".join(texts)
    return any(_is_subsequence(control, text) for control in controls)


def _is_subsequence(short: str, text: str) -> bool:
    at = 0
    for char in short:
        at = text.find(char, at) + 1
        if at == 0:
            return False
    return True


class Shield(NamedTuple):
    """Two inverse texts maps: ``hide`` for contents before rendering, ``show`` for plain parts after it."""

    hide: Callable[[str], str]
    show: Callable[[str], str]


def shield_for(controls: Iterable[str], texts: Iterable[str]) -> Shield:
    """The shield for these control tokens, with private-use characters that occur in none of ``texts``."""
    firsts = sorted({control[0] for control in controls})
    used = set().union(*texts)
    free = (chr(c) for c in range(0xF0000, 0xFFFFE) if chr(c) not in used)
    pairs = dict(zip(firsts, free, strict=False))
    require(len(pairs) == len(firsts), "chat: contents", "some private-use character left unused", "all in use")
    hide = str.maketrans(pairs)
    show = str.maketrans({private: char for char, private in pairs.items()})
    return Shield(lambda text: text.translate(hide), lambda text: text.translate(show))
