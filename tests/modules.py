"""Language models of stock layers, as people write them in Flax and Equinox."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen, nnx

from jaxdecode import kvcache

__all__ = ["HEADS", "PLACES", "SIZE", "Cached", "EquinoxLM", "EquinoxRNN", "LinenLM", "NnxLM", "D", "V", "empty_cache"]

V, D, HEADS, SIZE, PLACES = 5, 8, 2, 4, 32


class LinenLM(linen.Module):
    """One block; with ``decode`` it keeps Linen's own cache, that of the attention and the number of the next place."""

    decode: bool = False
    rate: float = 0.1

    @linen.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        if self.decode:
            known = self.has_variable("cache", "place")
            place = self.variable("cache", "place", lambda: jnp.zeros((), jnp.int32))
            if known:
                places = place.value[None, None]
                place.value = place.value + 1
        x = linen.Embed(V, D, name="embed")(tokens) + linen.Embed(PLACES, D, name="places")(places)
        mask = None if self.decode else linen.make_causal_mask(tokens)
        attention = linen.MultiHeadDotProductAttention(
            HEADS, dropout_rate=self.rate, deterministic=not train, decode=self.decode, name="attention"
        )
        x = x + attention(linen.LayerNorm(name="norm")(x), mask=mask)
        return linen.Dense(V, name="head")(x)


class _Attention(linen.Module):
    """The attention of ``LinenLM``, over a cache of this library."""

    @linen.compact
    def __call__(self, x: jax.Array, past: Any, plan: Any) -> tuple[jax.Array, Any]:
        q, k, v = (linen.DenseGeneral((HEADS, SIZE), name=name)(x) for name in ("query", "key", "value"))
        out, layer = kvcache.extend(q.swapaxes(1, 2)[:, :, None], k, v, past, plan)
        return linen.DenseGeneral(D, axis=(-2, -1), name="out")(out[:, :, 0].swapaxes(1, 2)), layer


class Cached(linen.Module):
    """``LinenLM`` with the same variables, that keeps to the contract of ``Model.apply`` by itself."""

    @linen.compact
    def __call__(self, tokens: jax.Array, cache: Any, *, lengths: Any = None, logits_at: Any = None) -> Any:
        plan = kvcache.plan(cache, tokens.shape[1], lengths)
        places = jnp.minimum(plan.position, PLACES - 1)
        x = linen.Embed(V, D, name="embed")(tokens) + linen.Embed(PLACES, D, name="places")(places)
        past = kvcache.one_layer(cache, 0)
        out, layer = _Attention(name="attention")(linen.LayerNorm(name="norm")(x), past, plan)
        x = x + out
        x = x if logits_at is None else jnp.take_along_axis(x, logits_at[:, :, None], axis=1)
        return linen.Dense(V, name="head")(x), kvcache.advance(cache, [layer], plan)


def empty_cache(params: Any, batch_size: int, max_len: int) -> Any:
    return kvcache.create(1, batch_size, HEADS, SIZE, max_len)


class NnxLM(nnx.Module):
    """One block without places; ``decode``: attention with NNX's own cache."""

    def __init__(self, rngs: nnx.Rngs, decode: bool = False) -> None:
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.inside = nnx.Linear(D, D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, D, dropout_rate=0.2, decode=decode, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.dropout(nnx.gelu(self.inside(self.embed(tokens))))
        mask = None if self.attention.decode else nnx.make_causal_mask(tokens)
        return self.head(x + self.attention(x, mask=mask))


class EquinoxLM(eqx.Module):
    """One block without places; the activation is a leaf that is no array."""

    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear
    activation: Any

    def __init__(self, key: jax.Array) -> None:
        first, second, third = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(V, D, key=first)
        self.attention = eqx.nn.MultiheadAttention(HEADS, D, dropout_p=0.2, key=second)
        self.dropout = eqx.nn.Dropout(0.5)
        self.head = eqx.nn.Linear(D, V, key=third)
        self.activation = jax.nn.gelu

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.activation(jax.vmap(self.embed)(tokens))
        mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        return jax.vmap(self.head)(self.dropout(x + self.attention(x, x, x, mask=mask)))


class EquinoxRNN(eqx.Module):
    """A recurrent cell of one row, as Equinox has it."""

    embed: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        first, second, third = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(V, D, key=first)
        self.cell = eqx.nn.GRUCell(D, D, key=second)
        self.head = eqx.nn.Linear(D, V, key=third)

    def __call__(self, state: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = self.cell(self.embed(token), state)
        return self.head(state), state
