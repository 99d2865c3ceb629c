"""Flax Linen modules as models."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxdecode import checks
from jaxdecode.adapters.calling import imported, logits_of, memoised, options_of, pair_of
from jaxdecode.adapters.stepwise import stepwise
from jaxdecode.base import Cache, Model, Params
from jaxdecode.composition import TokenCache, recomputed

if TYPE_CHECKING:
    from flax import linen

__all__ = ["from_linen"]

WHAT = "from_linen: module"
CACHE = "cache"  # the collection of Linen's own layers with decode=True


def from_linen(
    module: linen.Module,
    *,
    context: int | None = None,
    init_cache: Callable[[Params, int, int], Cache] | None = None,
    **options: Any,
) -> Model:
    """The model of a Linen module; params are its variables, as ``module.init`` gives them (``{"params": ...}``).

    A module that maps tokens [B,T] to logits [B,T,V], causally, is run on the whole text at every step. One that keeps
    a ``cache`` collection, as attention layers with ``decode=True`` do, is given one token at a time; every row has a
    cache of its own, its index included, so rows may have any lengths. With ``init_cache(params, batch_size, max_len)``
    the module keeps to the contract of ``Model.apply`` itself: ``module(tokens, cache, lengths=, logits_at=) ->
    (logits, cache)``. context: the most tokens it takes. options: of every call, such as ``deterministic=True``.

    Equal arguments give the same object. ValueError before any compute: other variables, other outputs, a module that
    draws random numbers or changes variables other than its cache. ImportError without flax.
    """
    linen = imported("flax.linen", "flax", "from_linen")
    checks.require(isinstance(module, linen.Module), WHAT, "a flax.linen.Module", type(module).__name__)
    return memoised(_model, module, context, init_cache, options_of(options))


@functools.lru_cache(maxsize=256, typed=True)
def _model(module: Any, context: int | None, init_cache: Any, options: tuple[tuple[str, Any], ...]) -> Model:
    call = functools.partial(_call, module, dict(options))
    if init_cache is not None:

        def explicit(params: Params, tokens: jax.Array, cache: Cache, **more: Any) -> tuple[jax.Array, Cache]:
            return pair_of(call(_variables(params), tokens, cache, **more)[0], WHAT)

        return Model(init_cache, explicit)

    def whole(params: Params, tokens: jax.Array) -> Any:
        return call(_variables(params), tokens)[0]

    @functools.partial(jax.jit, static_argnums=1)
    def empty(params: Params, max_len: int) -> Any:
        """The cache of one row, as the module makes it when it has none; nothing else is computed."""
        return call(_variables(params), jnp.zeros((1, max_len), jnp.int32))[1]

    def init(params: Params, batch_size: int, max_len: int) -> Any:
        one = empty(params, max_len)
        return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (batch_size, *x.shape)), one)

    def row(variables: Any, cache: Any, token: jax.Array) -> tuple[jax.Array, Any]:
        out, after = call({**variables, CACHE: cache}, token[None, None])
        return logits_of(out, 1, WHAT)[0, 0], after

    def step(params: Params, cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        return jax.vmap(row, (None, 0, 0))(_variables(params), cache, tokens)

    every, one = recomputed(whole, context, WHAT), stepwise(step, init, context, WHAT)

    def start(params: Params, batch_size: int, max_len: int) -> Cache:
        keeps = jax.tree.leaves(jax.eval_shape(lambda p: empty(p, max_len), params))
        return (one if keeps else every).init_cache(params, batch_size, max_len)

    def apply(params: Params, tokens: jax.Array, cache: Cache, **more: Any) -> tuple[jax.Array, Cache]:
        return (every if isinstance(cache, TokenCache) else one).apply(params, tokens, cache, **more)

    return Model(start, apply)


def _variables(params: Params) -> dict[str, Any]:
    """The variables without a cache that ``init`` may have left."""
    ok = isinstance(params, Mapping) and ("params" in params or not params)
    got = sorted(map(str, params)) if isinstance(params, Mapping) else type(params).__name__
    checks.require(ok, "from_linen: params", 'the variables of module.init, {"params": ...}', got)
    return {name: value for name, value in params.items() if name != CACHE}


def _call(module: Any, options: dict[str, Any], variables: Any, *arguments: Any, **more: Any) -> tuple[Any, Any]:
    """The output of a module, and its cache collection afterwards (empty: it keeps none)."""
    with _explained():
        out, changed = module.apply(variables, *arguments, mutable=[CACHE], **options, **more)
    return out, dict(changed).get(CACHE, {})


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Flax's errors as those of this library: what was expected, and what the module did."""
    from flax import errors

    def wrong(what: str, expected: str, error: Exception) -> ValueError:
        return ValueError(f"{what}: expected {expected}, got: {str(error).split(' (http', 1)[0]}")

    try:
        yield
    except errors.InvalidRngError as error:
        expected = "one that draws no random numbers (pass deterministic=True, train=False, or what it takes)"
        raise wrong(WHAT, expected, error) from error
    except errors.ModifyScopeVariableError as error:
        expected = (
            "one that changes nothing but its cache (pass use_running_average=True, train=False, or what it takes)"
        )
        raise wrong(WHAT, expected, error) from error
    except (
        errors.ScopeParamNotFoundError,
        errors.ScopeParamShapeError,
        errors.ScopeCollectionNotFound,
        errors.ScopeVariableNotFoundError,
    ) as error:
        raise wrong("from_linen: params", "the variables of this module", error) from error
