"""Files the commands write: complete, or as they were before."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

__all__ = ["check_target", "read_json", "write_json"]


def check_target(path: str) -> Path:
    """The file to write later. OSError now if that cannot work: no folder, a folder itself, no right."""
    file = Path(path).expanduser()
    if file.is_dir():
        raise IsADirectoryError(f"{file}: expected a file to write, got a folder")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{file}: expected a file in a folder that exists, got no folder {file.parent}")
    if not os.access(file.parent, os.W_OK):
        raise PermissionError(f"{file}: expected a folder that may be written to, got {file.parent}")
    return file


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value`` in one piece, a field a line: under another name first, flushed, then renamed."""
    text = "{\n" + ",\n".join(f" {_dumps(name)}: {_lines(field)}" for name, field in value.items()) + "\n}\n"
    made = path.with_name(f".{path.name[:100]}.unfinished-{secrets.token_hex(4)}")
    try:
        with made.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
    finally:
        with contextlib.suppress(OSError):
            made.unlink(missing_ok=True)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _lines(value: Any) -> str:
    """A list of objects takes a line for each, all else one line."""
    if not (isinstance(value, list) and value and all(isinstance(item, dict) for item in value)):
        return _dumps(value)
    return "[\n" + ",\n".join(f"  {_dumps(item)}" for item in value) + "\n ]"


def read_json(path: Path, kind: str, version: int) -> dict[str, Any]:
    """The object in ``path``, whose "format" is ``kind`` and whose "version" is at most ``version``.

    ValueError names the file and what is wrong with it; OSError: it cannot be read.
    """
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON in UTF-8, got {error}") from None
    if not isinstance(value, dict) or value.get("format") != kind:
        got = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{path}: format: expected {kind!r}, got {got!r}")
    found = value.get("version")
    if not isinstance(found, int) or not 1 <= found <= version:
        raise ValueError(f"{path}: version: expected 1 to {version}, got {found!r}")
    return value
