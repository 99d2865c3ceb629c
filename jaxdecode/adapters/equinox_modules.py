"""Equinox modules as models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from jaxdecode import checks
from jaxdecode.adapters.calling import imported, memoised, options_of, pair_of
from jaxdecode.base import Cache, Model, Params
from jaxdecode.composition import recomputed

if TYPE_CHECKING:
    import equinox

__all__ = ["from_equinox"]

WHAT = "from_equinox: module"


def from_equinox(
    module: equinox.Module,
    *,
    context: int | None = None,
    init_cache: Callable[[Params, int, int], Cache] | None = None,
    **options: Any,
) -> Model:
    """The model of an Equinox module; params are its arrays, ``eqx.filter(module, eqx.is_array)``, or others like them.

    The module is called in inference mode (``eqx.nn.inference_mode``). It maps the tokens [T] of one row to logits
    [T,V], causally, and is run on the whole text at every step, under ``vmap`` over rows. With ``init_cache(params,
    batch_size, max_len)`` it keeps to the contract of ``Model.apply`` instead, for all rows at once: ``module(tokens,
    cache, lengths=, logits_at=) -> (logits, cache)``. context: the most tokens it takes. options: of every call.

    Modules that differ in their arrays alone give the same object. ValueError before any compute: other params, other
    outputs, a module that wants a key or a state. ImportError without equinox.
    """
    eqx = imported("equinox", "equinox", "from_equinox")
    ok = isinstance(module, eqx.Module) and callable(module)
    checks.require(ok, WHAT, "an equinox.Module that can be called", type(module).__name__)
    static = eqx.filter(module, eqx.is_array, inverse=True)
    return memoised(_model, static, context, init_cache, options_of(options))


@functools.lru_cache(maxsize=256, typed=True)
def _model(static: Any, context: int | None, init_cache: Any, options: tuple[tuple[str, Any], ...]) -> Model:
    import equinox as eqx

    keywords = dict(options)

    def bound(params: Params) -> Any:
        like: Any = jax.tree.structure(static, is_leaf=lambda x: x is None)
        given: Any = jax.tree.structure(params, is_leaf=lambda x: x is None)
        expected = "eqx.filter(module, eqx.is_array) of such a module"
        checks.require(like == given, "from_equinox: params", expected, type(params).__name__)
        return eqx.nn.inference_mode(eqx.combine(params, static))

    if init_cache is not None:

        def explicit(params: Params, tokens: jax.Array, cache: Cache, **more: Any) -> tuple[jax.Array, Cache]:
            return pair_of(_called(bound(params), tokens, cache, **keywords, **more), WHAT)

        return Model(init_cache, explicit)

    def whole(params: Params, tokens: jax.Array) -> Any:
        module = bound(params)
        return jax.vmap(lambda row: _called(module, row, **keywords))(tokens)

    return recomputed(whole, context, WHAT)


def _called(module: Any, *arguments: Any, **options: Any) -> Any:
    """The output of ``module``. ValueError for one that cannot be called so."""
    try:
        return module(*arguments, **options)
    except (TypeError, RuntimeError) as error:
        expected = "one that maps a row's tokens [T] to logits [T, V] and needs no key and no state"
        raise ValueError(f"{WHAT}: expected {expected}, got {type(error).__name__}: {error}") from error
