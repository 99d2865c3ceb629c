"""Flax NNX modules as models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxdecode import checks
from jaxdecode.adapters.calling import imported, logits_of, memoised, options_of, pair_of
from jaxdecode.adapters.stepwise import stepwise
from jaxdecode.base import Cache, Model, Params
from jaxdecode.composition import TokenCache, recomputed

if TYPE_CHECKING:
    from flax import nnx

__all__ = ["from_nnx"]

WHAT = "from_nnx: module"


def from_nnx(
    module: nnx.Module,
    *,
    context: int | None = None,
    init_cache: Callable[[Params, int, int], Cache] | None = None,
    **options: Any,
) -> Model:
    """The model of an NNX module; params are its state, ``nnx.state(module)``, any other state of such a module too.

    The module is called in evaluation mode (``module.eval()``, on a copy). One that maps tokens [B,T] to logits
    [B,T,V], causally, is run on the whole text at every step. One with ``nnx.MultiHeadAttention(decode=True)`` is given
    one token at a time; every row has a cache of its own, its index included, so rows may have any lengths. With
    ``init_cache(params, batch_size, max_len)`` the module keeps to the contract of ``Model.apply`` itself:
    ``module(tokens, cache, lengths=, logits_at=) -> (logits, cache)``. context: the most tokens it takes. options: of
    every call.

    Equal arguments and modules of equal structure give the same object. ValueError before any compute: another state,
    other outputs, a module that draws random numbers, or keeps a cache of another kind. ImportError without flax.
    """
    nnx = imported("flax.nnx", "flax", "from_nnx")
    checks.require(isinstance(module, nnx.Module), WHAT, "a flax.nnx.Module", type(module).__name__)
    return memoised(_model, nnx.graphdef(module), context, init_cache, options_of(options))


@functools.lru_cache(maxsize=256, typed=True)
def _model(graph: Any, context: int | None, init_cache: Any, options: tuple[tuple[str, Any], ...]) -> Model:
    from flax import nnx

    keywords = dict(options)
    if init_cache is not None:

        def explicit(params: Params, tokens: jax.Array, cache: Cache, **more: Any) -> tuple[jax.Array, Cache]:
            return pair_of(_called(_bound(graph, params), tokens, cache, **keywords, **more), WHAT)

        return Model(init_cache, explicit)

    def whole(params: Params, tokens: jax.Array) -> Any:
        return _called(_bound(graph, params), tokens, **keywords)

    def init(params: Params, batch_size: int, max_len: int) -> Any:
        cache = _empty(_bound(graph, params), keywords, max_len)
        return [jnp.broadcast_to(x[None], (batch_size, *x.shape)) for x in cache]

    def row(params: Params, cache: Any, token: jax.Array) -> tuple[jax.Array, Any]:
        module = _bound(graph, params)
        _empty(module, keywords, 1)  # makes the variables, which then hold the row's
        nnx.update(module, jax.tree.unflatten(jax.tree.structure(_cache_of(module)), cache))
        out = _called(module, token[None, None], keeps=True, **keywords)
        return logits_of(out, 1, WHAT)[0, 0], jax.tree.leaves(_cache_of(module))

    def step(params: Params, cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        return jax.vmap(row, (None, 0, 0))(params, cache, tokens)

    every, one = recomputed(whole, context, WHAT), stepwise(step, init, context, WHAT)

    def start(params: Params, batch_size: int, max_len: int) -> Cache:
        keeps = bool(_decoding(_bound(graph, params), keywords))
        return (one if keeps else every).init_cache(params, batch_size, max_len)

    def apply(params: Params, tokens: jax.Array, cache: Cache, **more: Any) -> tuple[jax.Array, Cache]:
        return (every if isinstance(cache, TokenCache) else one).apply(params, tokens, cache, **more)

    return Model(start, apply)


def _bound(graph: Any, params: Params) -> Any:
    """The module with these params, in evaluation mode."""
    from flax import nnx

    checks.require(isinstance(params, nnx.State), "from_nnx: params", "nnx.state(module)", type(params).__name__)
    try:
        module = nnx.merge(graph, params)
    except (ValueError, KeyError) as error:
        raise ValueError(f"from_nnx: params: expected the state of such a module, got: {error}") from error
    module.eval()
    return module


def _decoding(module: Any, options: dict[str, Any]) -> list[Any]:
    """The attention layers that keep keys and values. ValueError for a cache of another kind."""
    from flax import nnx

    layers = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.MultiHeadAttention)]
    layers = [layer for layer in layers if layer.decode or (layer.decode is None and options.get("decode"))]
    caches = {"cached_key", "cached_value", "cache_index"}
    known = {id(getattr(layer, name)) for layer in layers for name in caches}
    others = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Cache) and id(node) not in known]
    expected = "no cache but that of nnx.MultiHeadAttention (for others: recurrent, or init_cache=)"
    checks.require(not others, WHAT, expected, f"{len(others)} other nnx.Cache variables")
    return layers


def _empty(module: Any, options: dict[str, Any], max_len: int) -> list[jax.Array]:
    """Give the layers of ``module`` an empty cache of one row; the arrays of it."""
    for layer in _decoding(module, options):
        dtype = layer.dtype or layer.key.kernel[...].dtype
        layer.init_cache((1, max_len, layer.in_features), dtype)
    return jax.tree.leaves(_cache_of(module))


def _cache_of(module: Any) -> Any:
    from flax import nnx

    return nnx.state(module, nnx.Cache)


def _called(module: Any, *arguments: Any, keeps: bool = False, **options: Any) -> Any:
    """The output of ``module``. ValueError if random streams move, or, where it ``keeps`` a cache, any other state."""
    from flax import nnx

    kind: Any = nnx.Not(nnx.Any(nnx.Cache, nnx.Intermediate)) if keeps else nnx.RngState
    before = jax.tree.leaves(nnx.state(module, kind))
    out = module(*arguments, **options)
    after = jax.tree.leaves(nnx.state(module, kind))
    same = len(before) == len(after) and all(x is y for x, y in zip(before, after, strict=True))
    expected = "one that draws no random numbers" + (" and changes nothing but its cache" if keeps else "")
    checks.require(same, WHAT, expected, "one whose state is another after a call")
    return out
