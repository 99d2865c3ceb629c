"""Chat templates in a sandbox, and the shield that keeps contents from writing control tokens.

A template is code from a file, a content is text from anybody. The template runs in ``jaxdecode.text.sandbox``, over
plain data only. The shield hides, in contents that could form a control token even by losing characters, the first
character of every control token behind a private-use character that occurs nowhere else. So what looks like a control
token in the rendered text was written by the template; the rest gets its characters back and is encoded as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxdecode.checks import require

__all__ = ["Chat", "Shield", "check_chat", "could_form", "map_texts", "render", "shield_for", "texts_of"]

_ROLE = re.compile(r"[\w-]+")
_OWN = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")  # variables that are always set


class Chat(NamedTuple):
    """Checked plain data: the messages, the tools that a model may call (None: none), and what else a template gets."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any] = {}  # noqa: RUF012


def check_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] | None = None,
) -> Chat:
    """The chat as plain data. ValueError unless it is JSON-like, each role a word, and each content a text.

    A message with ``tool_calls`` may do without a content.
    """
    try:
        return _checked(messages, tools)._replace(variables=_checked_variables({} if variables is None else variables))
    except RecursionError:
        raise ValueError("chat: expected plain data, got values that hold themselves, or are nested too deep") from None


def _checked(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Chat:
    listed = isinstance(messages, Sequence) and not isinstance(messages, str)
    require(listed and len(messages) > 0, "chat: messages", "a list with at least one message", messages)
    checked = []
    for i, message in enumerate(messages):
        require(isinstance(message, Mapping), f"chat: message {i}", "a mapping with role and content", message)
        role, content = message.get("role"), message.get("content")
        good_role = isinstance(role, str) and _ROLE.fullmatch(role) is not None
        require(good_role, f"chat: role of message {i}", "a word such as 'user'", role)
        spoken = isinstance(content, str) or (content is None and bool(message.get("tool_calls")))
        require(spoken, f"chat: content of message {i}", "a str", content)
        checked.append(_plain(message, str))
    if tools is None:
        return Chat(checked, None)
    good = isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)
    require(good, "chat: tools", "a list of mappings", tools)
    return Chat(checked, [_plain(tool, str) for tool in tools] or None)


def _checked_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    named = isinstance(variables, Mapping) and all(isinstance(name, str) for name in variables)
    require(named, "chat: variables", "a mapping of values by name", variables)
    wrong = sorted(name for name in variables if not name.isidentifier() or name in _OWN)
    require(not wrong, "chat: variables", f"names other than {', '.join(_OWN)}", wrong)
    return {name: _plain(value) for name, value in variables.items()}


def map_texts(chat: Chat, change: Callable[[str], str], change_key: Callable[[str], str]) -> Chat:
    """The chat with ``change`` applied to every text in it except the roles, and ``change_key`` to the keys inside."""

    def changed(value: Any) -> Any:
        return _plain(value, change, change_key)

    messages = [{k: v if k == "role" else changed(v) for k, v in message.items()} for message in chat.messages]
    return Chat(messages, changed(chat.tools), {name: changed(value) for name, value in chat.variables.items()})


def texts_of(chat: Chat) -> list[str]:
    """Every text in the chat except the roles."""
    texts: list[str] = []

    def note(text: str) -> str:
        texts.append(text)
        return text

    map_texts(chat, note, note)
    return texts


def render(template: str, chat: Chat, **variables: Any) -> str:
    """The text that ``template`` makes of the chat. ValueError if it is malformed, refuses, or breaks out."""
    try:
        from jaxdecode.text import sandbox
    except ImportError as error:
        raise ImportError("chat templates need jinja2: pip install 'jaxdecode[text]'") from error
    given = {"documents": None, **chat.variables, **variables}
    return sandbox.render(template, messages=chat.messages, tools=chat.tools, **given)


def _plain(value: Any, change: Callable[[str], str] = str, change_key: Callable[[str], str] = str) -> Any:
    """JSON-like data with its texts and keys changed; anything else is refused, so templates see no objects."""
    if isinstance(value, str):
        return change(str(value))
    if isinstance(value, Mapping):
        return {change_key(str(key)): _plain(item, change, change_key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, change, change_key) for item in value]
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
    """``hide`` is for contents before rendering, ``hide_key`` for keys, and ``show`` takes both back in the result."""

    hide: Callable[[str], str]
    hide_key: Callable[[str], str]
    show: Callable[[str], str]


def shield_for(controls: Iterable[str], texts: Iterable[str]) -> Shield:
    """The shield for these control tokens, with private-use characters that occur in none of ``texts``.

    Keys that are words stay, since templates ask for them by name, unless a control token could lie in a word.
    """
    controls = list(controls)
    firsts = sorted({control[0] for control in controls})
    used = set().union(*texts)
    free = (chr(c) for c in range(0xF0000, 0xFFFFE) if chr(c) not in used)
    pairs = dict(zip(firsts, free, strict=False))
    require(len(pairs) == len(firsts), "chat: contents", "some private-use character left unused", "all in use")
    to_private = str.maketrans(pairs)
    from_private = str.maketrans({private: char for char, private in pairs.items()})
    words_are_safe = not any(f"_{control}".isidentifier() for control in controls)

    def hide(text: str) -> str:
        return text.translate(to_private)

    def hide_key(key: str) -> str:
        return key if words_are_safe and key.isidentifier() else hide(key)

    return Shield(hide, hide_key, lambda text: text.translate(from_private))
