"""Typed access to what a checkpoint's files say, and JSON files read with care."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxdecode.checks import require, shorten

__all__ = ["Fields", "is_offline", "read_json", "read_text"]

_MAX_JSON = 1 << 25  # bytes; the index of the largest published checkpoints has a quarter of this


class Fields:
    """Values by key. Errors name ``where`` (a file, and what stands before the key) and the key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def name(self, key: str) -> str:
        return f"{self.where}{key}"

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value, or ``default`` if there is none (or null); a ``kind`` of float takes whole numbers too."""
        value = self.values.get(key)
        value = default if value is None else value
        kinds = (int, float) if kind is float else kind
        good = isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))
        require(good, self.name(key), f"a value of type {kind.__name__}", repr(value))
        return value

    def size(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        value = self.get(key, int, default)
        require(1 <= value <= most, self.name(key), f"a number from 1 to {most}", value)
        return int(value)

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key, float, default)
        good = 0 < value < 1e300 and math.isfinite(value)
        require(good, self.name(key), "a positive number", value)
        return float(value)

    def only(self, key: str, got: Any, *supported: Any) -> None:
        """Refuse what is not supported: better than to ignore it."""
        expected = " or ".join(map(repr, supported))
        require(got in supported, self.name(key), f"{expected} (others are not supported)", repr(got))


def is_offline() -> bool:
    """Whether the environment forbids the network: JAXDECODE_OFFLINE or HF_HUB_OFFLINE is set, and not to 0."""
    values = (os.environ.get(name, "") for name in ("JAXDECODE_OFFLINE", "HF_HUB_OFFLINE"))
    return any(value.lower() not in ("", "0", "no", "off", "false") for value in values)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. ValueError, naming the file, if it is damaged or repeats a name."""
    text = read_text(path, _MAX_JSON)
    try:
        values = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON with each name once, got {shorten(error)}") from None
    require(isinstance(values, dict), str(path), "a JSON object", type(values).__name__)
    return values


def read_text(path: Path, limit: int) -> str:
    """The text of a file of at most ``limit`` bytes. ValueError: longer, or not UTF-8; FileNotFoundError: no file."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: expected a file, got {'something else' if path.exists() else 'nothing there'}"
        )
    require(path.stat().st_size <= limit, str(path), f"at most {limit} bytes", "more")
    data = path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8, got another byte at {error.start}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name}")
