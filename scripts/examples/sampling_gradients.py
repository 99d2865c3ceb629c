#!/usr/bin/env python3
"""Gradients of an expected reward through sampling: exact, by score function, and straight through a scan.

    sampling_gradients.py [--rows 20000] [--seed 0]

The model is a table of logits, so that the expectation over all texts, and its gradient, can be enumerated. Against
that exact gradient: REINFORCE, which is unbiased and noisy (texts by ``jd.generate``, their probability by
``jd.score``), and straight-through Gumbel-softmax, which differentiates one reward of relaxed tokens through
``lax.scan``, and is biased.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdecode as jd
from jaxdecode.testing import markov_model

IDS, NEW, START, TAU = 4, 3, 0, 0.7
WORTH = jnp.array([[0.0, 1.0, 0.2, 0.0], [0.5, 0.0, 0.0, 1.5], [0.0, 0.3, 0.0, 0.1], [2.0, 0.0, 0.7, 0.0]])


def reward(tokens: jax.Array) -> jax.Array:
    """Of one-hot (or relaxed) tokens [...,NEW,IDS]: what each pair of neighbours is worth, summed."""
    first = jnp.broadcast_to(jax.nn.one_hot(START, IDS), (*tokens.shape[:-2], 1, IDS))
    before = jnp.concatenate([first, tokens[..., :-1, :]], axis=-2)
    return jnp.einsum("...ti,ij,...tj->...", before, WORTH, tokens)


def exact(table: jax.Array) -> jax.Array:
    """The expected reward, by all IDS^NEW texts."""
    texts = jnp.array(list(itertools.product(range(IDS), repeat=NEW)))
    law = jax.nn.log_softmax(table, axis=-1)
    before = jnp.concatenate([jnp.full((len(texts), 1), START), texts[:, :-1]], axis=1)
    return jnp.sum(jnp.exp(law[before, texts].sum(axis=1)) * reward(jax.nn.one_hot(texts, IDS)))


@jax.jit
def score_function(table: jax.Array, prompts: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean of ``(reward - mean reward) grad log p(text)`` over rows, and its standard error."""
    out = jd.generate(markov_model(), table, prompts, key=key, settings=jd.Settings(max_new_tokens=NEW))
    texts = jnp.concatenate([prompts, out.tokens], axis=1)
    rewards = reward(jax.nn.one_hot(out.tokens, IDS))

    def one(table: jax.Array, text: jax.Array) -> jax.Array:
        return jd.score(markov_model(), table, text[None]).sum()

    slopes = jax.vmap(jax.grad(one), in_axes=(None, 0))(table, texts)
    each = (rewards - rewards.mean())[:, None, None] * slopes
    return each.mean(axis=0), each.std(axis=0) / np.sqrt(len(texts))


@jax.jit
def straight_through(table: jax.Array, keys: jax.Array) -> jax.Array:
    """The mean gradient of rewards whose tokens are hard on the way forward and relaxed on the way back."""

    def rollout(table: jax.Array, key: jax.Array) -> jax.Array:
        def one(last: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            z = last @ table + jax.random.gumbel(key, (IDS,))
            soft = jax.nn.softmax(z / TAU)
            hard = jax.nn.one_hot(jnp.argmax(z), IDS)
            token = hard + soft - jax.lax.stop_gradient(soft)
            return token, token

        return reward(jax.lax.scan(one, jax.nn.one_hot(START, IDS), jax.random.split(key, NEW))[1])

    return jax.vmap(jax.grad(rollout), in_axes=(None, 0))(table, keys).mean(axis=0)


def cosine(a: Any, b: Any) -> float:
    a, b = np.ravel(a), np.ravel(b)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Run; how the estimates compare with the exact gradient. SystemExit if one does not hold."""
    parser = argparse.ArgumentParser(description="gradients of an expected reward")
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    key = jax.random.key(asked.seed)
    table = jax.random.normal(key, (IDS, IDS))
    value, truth = jax.value_and_grad(exact)(table)
    prompts = jnp.full((asked.rows, 1), START)
    estimate, error = score_function(table, prompts, jax.random.fold_in(key, 1))
    away = float(jnp.max(jnp.abs(estimate - truth) / jnp.maximum(error, 1e-6)))
    relaxed = straight_through(table, jax.random.split(jax.random.fold_in(key, 2), asked.rows))
    found = {"standard_errors": away, "score_function": cosine(estimate, truth), "relaxed": cosine(relaxed, truth)}
    print(f"expected reward {float(value):.4f}, its gradient has norm {float(jnp.linalg.norm(truth)):.4f}")
    print(
        f"score function: no entry further than {away:.1f} standard errors away, cosine {found['score_function']:.4f}"
    )
    print(f"straight through, temperature {TAU}: cosine {found['relaxed']:.4f}, biased")
    if away > 4.5 or found["relaxed"] < 0.7:
        raise SystemExit("an estimate is not what it should be")
    return found


if __name__ == "__main__":
    main()
