"""Checks: one clear error (what, expected, got) before any compute.

Values known only at run time cannot raise. They are turned into a poison that ends the row as ``invalid``: NaN for
numbers, a negative value for counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["POISON", "is_concrete", "real", "require", "shorten", "token_ids", "whole"]

POISON = -(2**31)  # a count that no caller may pass: marks a traced value that was out of range


def is_concrete(x: Any) -> bool:
    """Whether the value of ``x`` is known now, outside any trace."""
    return not isinstance(x, jax.core.Tracer)


def shorten(value: Any) -> str:
    """A value for an error message, on one line."""
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def require(ok: bool, what: str, expected: str, got: Any) -> None:
    """Raise the project's one form of ValueError unless ``ok``."""
    if not ok:
        raise ValueError(f"{what}: expected {expected}, got {shorten(got)}")


def _checked(value: Any, ok: Callable[[Any], Any], what: str, expected: str) -> tuple[Any, Any]:
    """``value`` with at most one axis, and whether each entry is good (concrete ones are, or this raises)."""
    require(np.ndim(value) <= 1, what, "a number or an array [B]", f"shape {np.shape(value)}")
    good = ok(value)
    if is_concrete(value):
        require(bool(np.all(good)), what, expected, value)
    return value, good


def real(value: Any, ok: Callable[[Any], Any], what: str, expected: str) -> Any:
    """A real setting, scalar or [B], as a float array (float32; float64 arrays keep their width).

    ``ok(array) -> bool array`` says which entries are in range. Concrete values out of range raise; traced ones become
    NaN.
    """
    if is_concrete(value):
        array = np.asarray(value)
        numeric = array.dtype != np.bool_ and np.issubdtype(array.dtype, np.number)
        require(numeric and not np.iscomplexobj(array), what, expected, value)
        with np.errstate(over="ignore", under="ignore"):  # out of float32's range: the range check speaks
            array = array.astype(np.float32) if not isinstance(value, jax.Array) else np.asarray(value, array.dtype)
        if array.dtype.kind != "f" or array.dtype.itemsize < 4:
            array = array.astype(np.float32)
        return _checked(array, ok, what, expected)[0]
    array = (
        value if jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize >= 4 else value.astype(jnp.float32)
    )
    array, good = _checked(array, ok, what, expected)
    return jnp.where(good, array, jnp.asarray(jnp.nan, array.dtype))


def whole(value: Any, ok: Callable[[Any], Any], what: str, expected: str) -> Any:
    """A whole-number setting, scalar or [B], as int32; traced values out of range become ``POISON``."""
    if is_concrete(value):
        array = np.asarray(value)
        require(np.issubdtype(array.dtype, np.integer), what, expected, value)
        wide = np.clip(array, -(2**31), 2**31 - 1)
        return _checked(wide, ok, what, expected)[0].astype(np.int32)
    require(jnp.issubdtype(value.dtype, jnp.integer), what, expected, value.dtype)
    array, good = _checked(value.astype(jnp.int32), ok, what, expected)
    return jnp.where(good, array, jnp.asarray(POISON, jnp.int32))


def token_ids(ids: np.ndarray, vocab_size: int, what: str) -> None:
    """Concrete ids must be integers in [0, V)."""
    require(np.issubdtype(ids.dtype, np.integer), what, "integer token ids", ids.dtype)
    bad = (ids < 0) | (ids >= vocab_size)
    require(not bad.any(), what, f"token ids in [0, {vocab_size})", ids[bad][:3] if bad.any() else "")
