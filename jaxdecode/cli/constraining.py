"""The options that say what the whole text may be: checked, read and compiled. `generate` and `chat` have the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdecode.cli.terminal import BadInput, Progress

if TYPE_CHECKING:
    from jaxdecode.checkpoint import Loaded

__all__ = ["check", "compiled", "read"]


def check(given: Mapping[str, Any], stops: Sequence[str] = ()) -> None:
    """Refuse several of them at once, and stops beside one. ``given``: the options' values by name."""
    names = [f"--{name.replace('_', '-')}" for name in given if name != "prefix"]
    if len(names) > 1:
        raise BadInput(f"{' and '.join(names)}: expected one of them")
    if names and stops:
        raise BadInput(f"--stop: expected none beside {names[0]}, whose match it would cut")
    if given.get("prefix") == "":
        raise BadInput("--prefix: expected a text, got an empty one")


def read(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same with a schema instead of its file, all sources checked. ValueError, OSError: bad input."""
    from jaxdecode.constraints import check_source

    found = dict(given)
    if "json_schema" in found:
        path = Path(found["json_schema"]).expanduser()
        try:
            found["json_schema"] = json.loads(path.read_bytes().decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected JSON in UTF-8, got {error}") from None
    for name, source in found.items():
        if name != "prefix":
            check_source(name, source)
    return found


def compiled(loaded: Loaded, sources: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """What ``read`` gave as fields of ``Settings``, from the user's cache if it was compiled before."""
    from jaxdecode.checkpoint.converted import cache_folder
    from jaxdecode.constraints import compiled_fields

    if sources:
        progress("compiling the grammar")
    return compiled_fields(sources, loaded.tokenizer, folder=cache_folder() / "grammars")
