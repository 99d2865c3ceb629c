#!/usr/bin/env python3
"""An ensemble as one model: vmap over params, and the mixture or the product of its members' laws.

    ensemble.py [--members 4] [--tokens 12] [--seed 0]

The params of all members are stacked along a new first axis of every leaf; ``jax.vmap`` runs them as one program. What
comes out is a model like any other: here it decodes greedily, by samples and (the mixture) by beams, and the law of
every token is compared with that of the members, one by one.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxdecode as jd

IDS, WIDTH = 16, 8


@functools.cache
def ensemble(model: jd.Model, kind: Literal["mixture", "product"]) -> jd.Model:
    """The model whose law is the mean of the members' laws, or their geometric mean; params: the members', stacked.

    For caches of plain arrays, whose first axis is the row: the member becomes the second one.
    """

    def init_cache(params: Any, batch_size: int, max_len: int) -> Any:
        return jax.vmap(lambda one: model.init_cache(one, batch_size, max_len), out_axes=1)(params)

    def apply(params: Any, tokens: jax.Array, cache: Any, **more: Any) -> tuple[jax.Array, Any]:
        def member(params: Any, cache: Any) -> tuple[jax.Array, Any]:
            logits, cache = model.apply(params, tokens, cache, **more)
            return jax.nn.log_softmax(logits, axis=-1), cache

        laws, cache = jax.vmap(member, in_axes=(0, 1), out_axes=(0, 1))(params, cache)
        return jax.nn.logsumexp(laws, axis=0) if kind == "mixture" else laws.mean(axis=0), cache

    return jd.Model(init_cache, apply)


def rnn() -> jd.Model:
    """A small recurrent model; its cache is its state, [B, WIDTH]."""

    def init_cache(params: Any, batch_size: int, max_len: int) -> jax.Array:
        return jnp.zeros((batch_size, WIDTH))

    def apply(params: Any, tokens: Any, cache: Any, *, lengths: Any = None, logits_at: Any = None) -> Any:
        size = tokens.shape[1]
        lengths = jnp.full((len(tokens),), size) if lengths is None else lengths

        def one(state: jax.Array, part: Any) -> tuple[jax.Array, jax.Array]:
            token, i = part
            new = jnp.tanh(params["embed"][token] + state @ params["mix"])
            return jnp.where((i < lengths)[:, None], new, state), new

        cache, states = jax.lax.scan(one, cache, (tokens.T, jnp.arange(size)))
        states = states.swapaxes(0, 1)
        states = states if logits_at is None else jnp.take_along_axis(states, logits_at[:, :, None], axis=1)
        return states @ params["embed"].T, cache

    return jd.Model(init_cache, apply)


def law(kind: str, members: Sequence[Any], text: list[int]) -> np.ndarray:
    """log p(next | text) of the ensemble, member by member, from scratch, in float64."""
    laws = []
    for params in members:
        embed, mix = (np.asarray(params[name], np.float64) for name in ("embed", "mix"))
        state = np.zeros(WIDTH)
        for token in text:
            state = np.tanh(embed[token] + state @ mix)
        weight = np.exp(state @ embed.T)
        laws.append(weight / weight.sum())
    mean = np.mean(laws, axis=0) if kind == "mixture" else np.exp(np.mean(np.log(laws), axis=0))
    return np.log(mean / mean.sum())


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Run; of each kind the largest difference of a log probability. SystemExit if one is not small."""
    parser = argparse.ArgumentParser(description="mixtures and products of models by vmap")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    keys = jax.random.split(jax.random.key(asked.seed), (asked.members, 2))
    shapes = {"embed": (IDS, WIDTH), "mix": (WIDTH, WIDTH)}
    params = {
        name: jax.vmap(lambda k, s=s: jax.random.normal(k, s))(keys[:, i]) for i, (name, s) in enumerate(shapes.items())
    }
    members = [jax.tree.map(lambda x, i=i: x[i], params) for i in range(asked.members)]
    prompts, worst = [[1], [2, 7, 3]], {}
    rows: dict[str, Any] = {"temperature": np.array([0.0, 1.0], np.float32)}
    for kind, ways in (("mixture", [rows, {"beams": 3}]), ("product", [rows])):
        model, found = ensemble(rnn(), kind), []
        for fields in ways:
            settings = jd.Settings(max_new_tokens=asked.tokens, **fields)
            out = jax.device_get(jd.generate(model, params, prompts, key=jax.random.key(1), settings=settings))
            for prompt, ids, logprob in zip(prompts, out.to_lists(), out.logprob, strict=True):
                ids, logprob = (ids[0], logprob[0]) if "beams" in fields else (ids, logprob)
                exact = [law(kind, members, [*prompt, *ids[:i]])[token] for i, token in enumerate(ids)]
                found.append(float(np.max(np.abs(logprob[: len(ids)] - exact))))
                print(f"{kind}, {next(iter(fields))}: {prompt} -> {ids}")
        worst[kind] = max(found)
        print(f"{kind} of {asked.members}: log probabilities are those of the members within {worst[kind]:.1e}")
    if max(worst.values()) > 1e-3:
        raise SystemExit("the ensemble is not what its members make")
    return worst


if __name__ == "__main__":
    main()
