#!/usr/bin/env python3
"""Policy-gradient fine-tuning: rollout, reward, loss and update are one compiled step.

    policy_gradient.py [--steps 150] [--batch 64] [--seed 0]

A small transformer with random weights is paid for every token that is its predecessor plus one. REINFORCE with the
mean reward of the batch as its baseline: the gradient of ``(reward - mean) log p(text)``, where ``jd.generate`` draws
the texts inside the step and ``jd.score`` says how likely they were. Needs `pip install 'jaxdecode[train]'`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxdecode as jd
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer

IDS, NEW = 8, 8


def reward(texts: jax.Array) -> jax.Array:
    """Of texts [B,T]: the share of tokens that follow their predecessor, [B]."""
    return jnp.mean(texts[:, 1:] == (texts[:, :-1] + 1) % IDS, axis=1)


def make_step(model: jd.Model, optimizer: Any, batch: int) -> Callable[..., Any]:
    """``step(params, memory of the optimizer, key) -> (params, memory, mean reward)``, compiled once."""
    prompts = jnp.zeros((batch, 1), jnp.int32)

    @jax.jit
    def step(params: Any, memory: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        out = jd.generate(model, params, prompts, key=key, settings=jd.Settings(max_new_tokens=NEW))
        texts = jnp.concatenate([prompts, out.tokens], axis=1)
        rewards = reward(texts)

        def loss(params: Any) -> jax.Array:
            return -jnp.mean((rewards - rewards.mean()) * jd.score(model, params, texts).sum(axis=1))

        updates, memory = optimizer.update(jax.grad(loss)(params), memory, params)
        return optax.apply_updates(params, updates), memory, rewards.mean()

    return step


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Run; the mean reward of every step. SystemExit if it does not rise."""
    parser = argparse.ArgumentParser(description="REINFORCE in one compiled step")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    config = TransformerConfig(
        vocab_size=IDS, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_mlp=32, context_length=64
    )
    model, optimizer = transformer(config), optax.adam(2e-2)
    params = init_params(config, jax.random.key(asked.seed))
    memory, step = optimizer.init(params), make_step(model, optimizer, asked.batch)
    rewards = []
    for key in jax.random.split(jax.random.key(asked.seed + 1), asked.steps):
        params, memory, mean = step(params, memory, key)
        rewards.append(float(mean))
        if len(rewards) % max(1, asked.steps // 10) == 0:
            print(f"step {len(rewards)}: mean reward {rewards[-1]:.3f}")
    tenth = max(1, len(rewards) // 10)
    first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    print(f"mean reward of the first {tenth} steps {first:.3f}, of the last {last:.3f}; chance is {1 / IDS:.3f}")
    if not last > first + 0.2:
        raise SystemExit("the reward did not rise")
    return rewards


if __name__ == "__main__":
    main()
