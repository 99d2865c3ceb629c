"""Models from models, and from plain functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks
from jaxdecode.base import Cache, Model, Params

__all__ = ["TokenCache", "combine", "contrastive", "guidance", "product", "recomputed", "uncached"]

Mix = Callable[..., jax.Array]


@functools.lru_cache(maxsize=256)
def combine(model_a: Model, model_b: Model, fn: Mix) -> Model:
    """Two models of one vocabulary as one, whose logits are ``fn(logits_a[B,K,V], logits_b[B,K,V], *numbers)``.

    params = ``(params_a, params_b, *numbers)``: the numbers of ``fn`` travel there, so changing them never recompiles.
    The cache is the pair of both caches. Equal arguments give the same object; ``fn`` is compared by identity. Every
    token goes to both; two prompts: docs/composition.md. ValueError where vocabularies differ, before any compute.

    >>> from jaxdecode.testing import markov_model
    >>> model = combine(markov_model(), markov_model(), guidance)
    >>> params = (jnp.array([[0.0, 1.0], [0.0, 0.0]]), jnp.zeros((2, 2)), 3.0)
    >>> model.apply(params, jnp.array([[0], [1]]), model.init_cache(params, 2, 4))[0][:, 0].tolist()
    [[0.0, 3.0], [0.0, 0.0]]
    """

    def init_cache(params: Params, batch_size: int, max_len: int) -> Cache:
        params_a, params_b, _ = _parts(params)
        return model_a.init_cache(params_a, batch_size, max_len), model_b.init_cache(params_b, batch_size, max_len)

    def apply(
        params: Params,
        tokens: jax.Array,
        cache: Cache,
        *,
        lengths: jax.Array | None = None,
        logits_at: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        params_a, params_b, numbers = _parts(params)
        a, cache_a = model_a.apply(params_a, tokens, cache[0], lengths=lengths, logits_at=logits_at)
        b, cache_b = model_b.apply(params_b, tokens, cache[1], lengths=lengths, logits_at=logits_at)
        same = a.shape == b.shape
        checks.require(same, "combine", "two models of one vocabulary", f"{a.shape[-1]} and {b.shape[-1]} ids")
        wide = np.promote_types(np.promote_types(a.dtype, b.dtype), np.float32)
        logits = fn(a.astype(wide), b.astype(wide), *numbers)
        ok = logits.shape == a.shape and jnp.issubdtype(logits.dtype, jnp.floating)
        checks.require(ok, "combine: fn", f"logits {list(a.shape)}", f"{logits.dtype}{list(logits.shape)}")
        return logits, (cache_a, cache_b)

    return Model(init_cache, apply)


def _parts(params: Params) -> tuple[Params, Params, tuple[Any, ...]]:
    ok = isinstance(params, (tuple, list)) and len(params) >= 2
    checks.require(ok, "combine: params", "(params_a, params_b, *numbers of fn)", type(params).__name__)
    params_a, params_b, *numbers = params
    return params_a, params_b, tuple(numbers)


def _number(value: Any, ok: Callable[[Any], Any], what: str, expected: str, like: jax.Array) -> jax.Array:
    """A scalar of ``fn`` in the dtype of the logits; NaN, which ends every row as ``nan``, if out of range."""
    checks.require(np.ndim(value) == 0, what, "one number for all rows", f"shape {np.shape(value)}")
    if not checks.is_concrete(value) and not jnp.issubdtype(value.dtype, jnp.floating):
        value = value.astype(like.dtype)
    return jnp.asarray(checks.real(value, ok, what, expected)).astype(like.dtype)


def _linear(a: jax.Array, b: jax.Array, weight_a: jax.Array, weight_b: jax.Array, kept: jax.Array) -> jax.Array:
    """``weight_a * a + weight_b * b`` where ``kept`` or NaN, else -inf; gradients stay finite there."""
    kept = kept | jnp.isnan(a) | jnp.isnan(b)
    a, b = jnp.where(kept, a, 0), jnp.where(kept, b, 0)
    return jnp.where(kept, weight_a * a + weight_b * b, -jnp.inf)


def guidance(logits_a: jax.Array, logits_b: jax.Array, scale: Any) -> jax.Array:
    """Classifier-free guidance: ``log p_b + scale (log p_a - log p_b)`` up to a constant (arXiv 2306.17806).

    a is the model with the condition, b the one without. scale >= 0: 1 is a alone, 0 is b alone, above 1 amplifies the
    condition. An id that a masks stays masked; one that b alone masks has no such law, and ends its row ``nan``.
    """
    s = _number(scale, lambda x: (x >= 0) & (x < np.inf), "guidance: scale", "a finite number >= 0", logits_a)
    return _linear(logits_a, logits_b, s, 1 - s, ~jnp.isneginf(logits_a))


def contrastive(logits_a: jax.Array, logits_b: jax.Array, alpha: Any = 0.1, beta: Any = 0.5) -> jax.Array:
    """Contrastive decoding: ``(1 + beta) z_a - beta z_b`` of the ids that a finds plausible (arXiv 2309.09117).

    Plausible: probability under a >= alpha times the largest. a is the strong model, b the weak one. alpha in [0, 1],
    beta >= 0. An id that b alone masks has no such score, and ends its row ``nan``.
    """
    low = _number(alpha, lambda x: (x >= 0) & (x <= 1), "contrastive: alpha", "a number in [0, 1]", logits_a)
    b = _number(beta, lambda x: (x >= 0) & (x < np.inf), "contrastive: beta", "a finite number >= 0", logits_a)
    b = jnp.where(jnp.isnan(low), low, b)  # NaN compares as false and would only mask
    plausible = ~(logits_a < jnp.max(logits_a, axis=-1, keepdims=True) + jnp.log(low))
    return _linear(logits_a, logits_b, 1 + b, -b, plausible & ~jnp.isneginf(logits_a))


def product(logits_a: jax.Array, logits_b: jax.Array, weight_a: Any = 1.0, weight_b: Any = 1.0) -> jax.Array:
    """Product of experts: the law in proportion to ``p_a^weight_a * p_b^weight_b`` (Hinton 2002).

    Weights are finite; a negative one divides. An id that either model masks stays masked.
    """
    wa, wb = (
        _number(w, np.isfinite if checks.is_concrete(w) else jnp.isfinite, f"product: weight_{n}", "finite", logits_a)
        for n, w in (("a", weight_a), ("b", weight_b))
    )
    return _linear(logits_a, logits_b, wa, wb, ~jnp.isneginf(logits_a) & ~jnp.isneginf(logits_b))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenCache:
    """All that a model without a cache remembers: tokens[B,T], of which length[B] are there."""

    tokens: jax.Array
    length: jax.Array

    @property
    def capacity(self) -> int:
        """Tokens that a row may hold."""
        return self.tokens.shape[1]


@functools.lru_cache(maxsize=256)
def uncached(fn: Callable[[Params, jax.Array], jax.Array], *, context: int | None = None) -> Model:
    """The model of a causal function ``fn(params, tokens[B,T]) -> logits[B,T,V]``.

    Logits at position t may depend on tokens up to t only: what follows is padding, and is not looked at here
    (``testing.check_model`` does). Its cache is the tokens, T = max_len of them a row, and every step runs ``fn`` on
    all of them. context: the largest T that ``fn`` takes. ``fn`` is compared by identity. ValueError if it returns
    another shape.

    >>> model = uncached(lambda params, tokens: params[tokens])
    >>> params = jnp.eye(2)
    >>> model.apply(params, jnp.array([[0, 1], [1, 0]]), model.init_cache(params, 2, 8))[0][:, -1].tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    return recomputed(fn, context, "uncached: fn")


def recomputed(fn: Callable[[Params, jax.Array], jax.Array], context: int | None, what: str) -> Model:
    """``uncached``; errors call the function ``what``."""

    def init_cache(params: Params, batch_size: int, max_len: int) -> TokenCache:
        fits = context is None or max_len <= context
        checks.require(fits, "max_len", f"at most the context of {context} tokens", max_len)
        return TokenCache(jnp.zeros((batch_size, max_len), jnp.int32), jnp.zeros((batch_size,), jnp.int32))

    def apply(
        params: Params,
        tokens: jax.Array,
        cache: TokenCache,
        *,
        lengths: jax.Array | None = None,
        logits_at: jax.Array | None = None,
    ) -> tuple[jax.Array, TokenCache]:
        (batch, size), slots = tokens.shape, cache.capacity
        lengths = jnp.full((batch,), size, jnp.int32) if lengths is None else lengths
        steps = jnp.arange(size, dtype=jnp.int32)[None, :]
        rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
        place = jnp.where(steps < lengths[:, None], cache.length[:, None] + steps, slots)
        kept = cache.tokens.at[rows, place].set(tokens.astype(jnp.int32), mode="drop")
        new = TokenCache(kept, jnp.minimum(cache.length + lengths, slots))
        spec: Any = jax.eval_shape(fn, params, kept)
        ok = isinstance(spec, jax.ShapeDtypeStruct) and len(spec.shape) == 3 and spec.shape[:2] == kept.shape
        ok = ok and jnp.issubdtype(spec.dtype, jnp.floating)
        checks.require(ok, what, f"floating logits [{batch}, {slots}, V]", checks.described(spec))
        at = jnp.broadcast_to(steps, (batch, size)) if logits_at is None else logits_at
        wide = np.promote_types(spec.dtype, np.float32)
        if at.shape[1] == 0:
            return jnp.zeros((batch, 0, spec.shape[2]), wide), new
        at = jnp.minimum(cache.length[:, None] + at, slots - 1)
        return jnp.take_along_axis(fn(params, kept), at[:, :, None], axis=1).astype(wide), new

    return Model(init_cache, apply)
