"""Checks: one clear error (what, expected, got) before any compute.

Values known only at run time cannot raise. They are turned into a poison that ends the row as ``invalid``: NaN for
numbers, a negative value for counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "POISON",
    "described",
    "dtype",
    "in_range",
    "is_concrete",
    "real",
    "require",
    "shorten",
    "token_ids",
    "whole",
]

POISON = -(2**31)  # a count that no caller may pass: marks a traced value that was out of range


def is_concrete(x: Any) -> bool:
    """Whether the value of ``x`` is known now, outside any trace."""
    return not isinstance(x, jax.core.Tracer)


def shorten(value: Any) -> str:
    """A value for an error message, on one line."""
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def described(x: Any) -> str:
    """Dtype and shape of an array, as in float32[2, 3]; of anything else its type."""
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") and hasattr(x, "shape") else type(x).__name__


def require(ok: bool, what: str, expected: str, got: Any) -> None:
    """Raise the project's one form of ValueError unless ``ok``."""
    if not ok:
        raise ValueError(f"{what}: expected {expected}, got {shorten(got)}")


def dtype(what: str, given: Any, names: Sequence[str]) -> str:
    """The name of a dtype, which must be one of ``names``."""
    try:
        name = jnp.dtype(given).name
    except TypeError:
        name = None
    require(name in names, what, f"one of {', '.join(names)}", name or given)
    return str(name)


def _setting(value: Any, what: str, expected: str) -> np.ndarray:
    """A concrete setting as a numeric array with at most one axis."""
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        array = np.asarray(None)
    numeric = array.dtype != np.bool_ and jnp.issubdtype(array.dtype, jnp.number) and not np.iscomplexobj(array)
    require(numeric, what, expected, value)
    require(array.ndim <= 1, what, "a number or an array [B]", f"shape {array.shape}")
    return array


def _traced(value: Any, what: str) -> Any:
    require(value.ndim <= 1, what, "a number or an array [B]", f"shape {value.shape}")
    return value


def real(value: Any, ok: Callable[[Any], Any], what: str, expected: str) -> Any:
    """A real setting, scalar or [B], as a float array (float32; float64 jax arrays keep their width).

    ``ok(array) -> bool array`` says which entries are in range. Concrete values out of range, as given or as float32,
    raise; traced ones become NaN.
    """
    if is_concrete(value):
        array = _setting(value, what, expected)
        width = np.float64 if isinstance(value, jax.Array) and array.dtype == np.float64 else np.float32
        with np.errstate(over="ignore", under="ignore"):  # the range check speaks
            exact, rounded = array.astype(np.float64), array.astype(width)
        require(bool(np.all(ok(exact) & ok(rounded))), what, expected, value)
        return rounded
    array = _traced(value, what)
    wide = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize >= 4
    array = array if wide else array.astype(jnp.float32)
    return jnp.where(ok(array), array, jnp.asarray(jnp.nan, array.dtype))


def whole(value: Any, ok: Callable[[Any], Any], what: str, expected: str) -> Any:
    """A whole-number setting, scalar or [B], as int32; traced values out of range become ``POISON``."""
    if is_concrete(value):
        array = _setting(value, what, expected)
        require(np.issubdtype(array.dtype, np.integer) and bool(np.all(ok(array))), what, expected, value)
        return np.clip(array, -(2**31), 2**31 - 1).astype(np.int32)
    array = _traced(value, what)
    require(jnp.issubdtype(array.dtype, jnp.integer), what, expected, array.dtype)
    array = array.astype(jnp.int32)
    return jnp.where(ok(array), array, jnp.asarray(POISON, jnp.int32))


def in_range(setting: Any) -> Any:
    """Which entries of a result of ``real`` or ``whole`` are no poison."""
    return setting != POISON if jnp.issubdtype(setting.dtype, jnp.integer) else setting == setting


def token_ids(ids: np.ndarray, vocab_size: int, what: str) -> None:
    """Concrete ids must be integers in [0, V)."""
    require(np.issubdtype(ids.dtype, np.integer), what, "integer token ids", ids.dtype)
    bad = (ids < 0) | (ids >= vocab_size)
    require(not bad.any(), what, f"token ids in [0, {vocab_size})", ids[bad][:3] if bad.any() else "")
