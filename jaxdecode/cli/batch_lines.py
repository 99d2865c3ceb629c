"""One line of a batch file: what it asks for, in the project's own form or in that of OpenAI's batch files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxdecode.cli.choices import Request
from jaxdecode.cli.decoding import CONSTRAINTS, SETTINGS, TEXTS
from jaxdecode.cli.generate import check
from jaxdecode.cli.terminal import BadInput

__all__ = ["CHAT_URL", "TEXT_URL", "BadLine", "Line", "parse"]

CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
NUMBERS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p")
WORDS = {"chat": bool, "system": str, "seed": int, "num_samples": int, "logprobs": bool, "top_logprobs": int}
WORDS |= {"best_of": int}
SEARCH = {"beams": int, "without_replacement": bool}
OWN = {"prompt", "messages", "stop", "length_penalty", *NUMBERS, *WORDS, *SEARCH, *SETTINGS, *TEXTS, *CONSTRAINTS}
GRAMMARS = {"regex", "json_schema", "choices"}
RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "n": "num_samples"}
NO_EFFECT = {"user", "metadata", "store", "service_tier"}  # what a server notes, and no text depends on


class Line(NamedTuple):
    """What a line asks for. ``url``: None for a line of the project's own form. prompt: a text or ids; or messages."""

    number: int
    id: str | int
    url: str | None
    prompt: str | list[int] | None
    messages: list[Any] | None
    request: Request


class BadLine(ValueError):
    """A line that cannot be answered: its number and id, the form that it has, and why."""

    def __init__(self, number: int, line_id: str | int, custom: bool, reason: str) -> None:
        super().__init__(reason)
        self.number, self.id, self.custom = number, line_id, custom


def parse(raw: bytes, number: int, defaults: Request) -> Line:
    """The line ``number`` (from 1), with ``defaults`` for what it does not say. BadLine: it cannot be understood."""
    line_id: str | int = f"line-{number}"
    custom = False
    try:
        fields = _object(raw)
        custom = "custom_id" in fields
        given = fields.pop("custom_id" if custom else "id", None)
        _require(given is None or type(given) in (str, int), "id", "a text or a whole number", given)
        line_id = line_id if given is None else given
        url = None
        if custom:
            url, fields = _translated(fields, defaults)
        return _line(number, line_id, url, fields, defaults)
    except (ValueError, BadInput) as error:
        raise BadLine(number, line_id, custom, error.message if isinstance(error, BadInput) else str(error)) from None


def _require(ok: bool, what: str, expected: str, got: Any) -> None:
    if not ok:
        text = json.dumps(got, ensure_ascii=False)
        raise ValueError(f"{what}: expected {expected}, got {text if len(text) <= 80 else text[:77] + '...'}")


def _object(raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line: expected a JSON object in UTF-8, got {error}") from None
    _require(isinstance(fields, dict), "line", "a JSON object", fields)
    return fields


def _line(number: int, line_id: str | int, url: str | None, fields: dict[str, Any], defaults: Request) -> Line:
    unknown = sorted(fields.keys() - OWN)
    _require(not unknown, "line", "fields that jaxdecode knows", unknown)
    prompt, messages = fields.pop("prompt", None), fields.pop("messages", None)
    _require((prompt is None) != (messages is None), "line", "one of prompt and messages", "both" if prompt else "none")
    if prompt is not None:
        ids = isinstance(prompt, list) and all(type(i) is int for i in prompt)
        _require((isinstance(prompt, str) or ids) and bool(prompt), "prompt", "a text or ids, not empty", prompt)
    else:
        _require(isinstance(messages, list), "messages", "a list of objects", messages)
        _require("chat" not in fields, "chat", "none beside messages", fields.get("chat"))
        fields["chat"] = True
    request = _request(fields, defaults)
    if not request.chat and "system" not in fields:
        request = request._replace(system=None)
    check(request)
    return Line(number, line_id, url, prompt, messages, request)


def _request(fields: dict[str, Any], defaults: Request) -> Request:
    """``defaults`` with what the fields say instead; null takes a setting away."""
    settings, constraints, changed = dict(defaults.settings), dict(defaults.constraints), {}
    for name, value in fields.items():
        if name in WORDS:
            _require(type(value) is WORDS[name], name, f"{WORDS[name].__name__}", value)
            changed[name] = value
        elif name in SEARCH:
            _require(type(value) is SEARCH[name], name, SEARCH[name].__name__, value)
            settings[name] = value
        elif name == "stop":
            changed["stops"] = _texts(name, value)
        elif name in CONSTRAINTS:
            if name in GRAMMARS:
                for other in GRAMMARS:
                    constraints.pop(other, None)
            if value is not None:
                constraints[name] = _constraint(name, value)
        elif value is None:
            _require(name not in ("max_new_tokens", "temperature", "length_penalty"), name, "a number", None)
            settings.pop(name, None)
        else:
            settings[name] = _texts(name, value) if name in TEXTS else _setting(name, value)
    samples = changed.get("num_samples", defaults.num_samples)
    _require(samples is None or samples >= 1, "num_samples", "a whole number >= 1", samples)
    most = changed.get("top_logprobs", defaults.top_logprobs)
    logprobs = changed.pop("logprobs", defaults.logprobs) or most > 0
    return defaults._replace(settings=settings, constraints=constraints, logprobs=logprobs, **changed)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    good = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    _require(good, name, "a text, or a list of texts, none of them empty", value)
    return tuple(texts)


def _setting(name: str, value: Any) -> Any:
    """A value as ``Settings`` takes it, which says whether it is in range."""
    kind = SETTINGS[name].kind if name in SETTINGS else None
    if kind is None or (kind.size == 1 and not kind.pairs):
        _require(type(value) in (int, float), name, "a number", value)
        return value
    if kind.pairs:
        pairs = list(value.items()) if isinstance(value, Mapping) else value
        good = isinstance(pairs, list) and all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs)
        _require(good, name, "an object, or pairs", value)
        try:
            return tuple((int(key), of) for key, of in pairs)
        except (TypeError, ValueError):
            _require(False, name, "whole numbers as keys", value)
    good = isinstance(value, list) and all(type(x) in (int, float) for x in value)
    _require(good and (not kind.size or len(value) == kind.size), name, f"numbers {SETTINGS[name].metavar}", value)
    return tuple(value)


def _constraint(name: str, value: Any) -> Any:
    from jaxdecode.constraints import check_source

    if name == "choices":
        value = _texts(name, value)
    elif name != "json_schema":
        _require(isinstance(value, str), name, "a text", value)
    if name != "prefix":
        check_source(name, value)
    return value


def _translated(fields: dict[str, Any], defaults: Request) -> tuple[str, dict[str, Any]]:
    """The url and the body of a line of OpenAI's form, by the project's own names. Null means the default there."""
    url, body = fields.pop("url", None), fields.pop("body", None)
    _require(url in (CHAT_URL, TEXT_URL), "url", f"{CHAT_URL} or {TEXT_URL}", url)
    _require(fields.pop("method", "POST") == "POST", "method", "POST", "another")
    _require(not fields, "line", "custom_id, method, url and body", sorted(fields))
    _require(isinstance(body, dict), "body", "an object", body)
    body = {k: v for k, v in body.items() if v is not None and k not in NO_EFFECT}
    model = body.pop("model", defaults.model)
    _require(model == defaults.model, "model", f"{defaults.model!r}, as --model says", model)
    _require(body.pop("stream", False) is False, "stream", "false", True)
    _require(
        ("messages" if url == CHAT_URL else "prompt") in body, "body", "messages or prompt, as the url says", "none"
    )
    out = {RENAMED.get(name, name): value for name, value in body.items()}
    if url == TEXT_URL and type(out.get("logprobs")) is int:
        out["top_logprobs"] = out.pop("logprobs")
        out["logprobs"] = True
    kind = out.pop("response_format", {"type": "text"})
    word = kind.get("type") if isinstance(kind, dict) else None
    if word == "json_object":
        out["json_schema"] = {"type": "object"}
    elif word == "json_schema":
        inner = kind.get("json_schema")
        _require(isinstance(inner, dict) and "schema" in inner, "response_format", "a json_schema with a schema", kind)
        out["json_schema"] = inner["schema"]
    else:
        _require(word == "text", "response_format", "text, json_object or json_schema", kind)
    return url, out


def same_program(line: Line) -> str:
    """Equal for lines with the same settings."""
    request = line.request
    known = (request.settings, request.constraints, request.num_samples, request.best_of, request.top_logprobs)
    return json.dumps(known, default=str)
