"""What the adapters of all libraries share."""

from __future__ import annotations

import importlib
from typing import Any

import jax

from jaxdecode import checks
from jaxdecode.base import Cache

__all__ = ["imported", "logits_of", "memoised", "options_of", "pair_of"]


def imported(name: str, extra: str, who: str) -> Any:
    """The module ``name``. ImportError that names what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{who} needs {name}: pip install 'jaxdecode[{extra}]'") from error


def memoised(fn: Any, *arguments: Any) -> Any:
    """``fn(*arguments)`` of an ``lru_cache``: the same object for equal arguments, a new one if they have no hash."""
    try:
        hash(arguments)
    except TypeError:
        return fn.__wrapped__(*arguments)
    return fn(*arguments)


def options_of(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Keyword arguments as a value with a hash."""
    return tuple(sorted(options.items()))


def logits_of(out: Any, rows: int, what: str) -> jax.Array:
    """``out`` of a module that was given one token of each row, if it is logits [rows,1,V]."""
    ok = isinstance(out, jax.Array) and out.ndim == 3 and out.shape[:2] == (rows, 1)
    checks.require(ok, what, f"logits [{rows}, 1, V]", checks.described(out))
    return out


def pair_of(out: Any, what: str) -> tuple[jax.Array, Cache]:
    """``out`` of a module that keeps to ``Model.apply``, if it is logits and a cache."""
    ok = isinstance(out, (tuple, list)) and len(out) == 2
    checks.require(ok, what, "(logits, cache), as init_cache= promises", type(out).__name__)
    logits, cache = out
    return logits, cache
