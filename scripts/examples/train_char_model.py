#!/usr/bin/env python3
"""Train a tiny character model from scratch with optax, then decode it.

    train_char_model.py [--steps 300] [--width 32] [--layers 2] [--seed 0]

``jd.score`` is the loss: the log probability of every token after those before it. The model learns a page by heart;
greedy decoding then writes it on from its beginning, and samples stay close to it. Needs
`pip install 'jaxdecode[train]'`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdecode as jd
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer

TEXT = """\
the tide comes in, the tide goes out, and the boats at the pier go up and down.
a gull on a pole looks at the sea. the sea looks back and says nothing at all.
when the wind turns to the north the men pull the boats up onto the sand.
then the night comes in like a tide, and the lamps at the pier go up and down.
"""
LETTERS = sorted(set(TEXT))
IDS = np.array([LETTERS.index(letter) for letter in TEXT], np.int32)
WINDOW = 32  # tokens of a training example


def small(width: int, layers: int) -> TransformerConfig:
    """A transformer for the letters of the page."""
    return TransformerConfig(
        vocab_size=len(LETTERS),
        d_model=width,
        n_layers=layers,
        n_heads=2,
        n_kv_heads=2,
        head_dim=width // 2,
        d_mlp=2 * width,
        context_length=512,
    )


def train(config: TransformerConfig, steps: int, seed: int, batch: int = 16) -> tuple[Any, list[float]]:
    """The params, and the loss of every step, in nats per letter."""
    model, optimizer, page = transformer(config), optax.adam(1e-2), jnp.asarray(IDS)
    params = init_params(config, jax.random.key(seed))
    memory, losses = optimizer.init(params), []

    @jax.jit
    def step(params: Any, memory: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        first = jax.random.randint(key, (batch, 1), 0, len(page) - WINDOW)
        windows = page[first + jnp.arange(WINDOW)[None]]

        def loss(params: Any) -> jax.Array:
            return -jd.score(model, params, windows)[:, 1:].mean()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, memory = optimizer.update(gradient, memory, params)
        return optax.apply_updates(params, updates), memory, value

    for key in jax.random.split(jax.random.key(seed + 1), steps):
        params, memory, value = step(params, memory, key)
        losses.append(float(value))
    return params, losses


def main(arguments: Sequence[str] | None = None) -> tuple[list[float], str]:
    """Run; the losses, and what it writes. SystemExit if it learned less than the frequencies of letters."""
    parser = argparse.ArgumentParser(description="a character model from scratch")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    config = small(asked.width, asked.layers)
    params, losses = train(config, asked.steps, asked.seed)
    share = np.bincount(IDS) / len(IDS)
    frequencies = float(-np.sum(share * np.log(share)))
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per letter; by the frequencies of letters {frequencies:.2f}")
    prompts = [IDS[:12].tolist()] * 2
    settings = jd.Settings(max_new_tokens=60, temperature=np.array([0.0, 0.8], np.float32))
    out = jd.generate(transformer(config), params, prompts, key=jax.random.key(asked.seed), settings=settings)
    texts = ["".join(LETTERS[i] for i in ids) for ids in out.to_lists()]
    for kind, text in zip(("greedy", "sample"), texts, strict=True):
        print(f"{kind}: {TEXT[:12]!r} -> {text!r}")
    if losses[-1] > 0.8 * frequencies:
        raise SystemExit("the model has not learned the page")
    return losses, texts[0]


if __name__ == "__main__":
    main()
