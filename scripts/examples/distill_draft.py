#!/usr/bin/env python3
"""Distil a draft model for speculative decoding, and see what it buys.

    distill_draft.py [--teacher-steps 300] [--steps 300] [--width 128] [--layers 4] [--seed 0]

The teacher learns the page of train_char_model.py. The student, one small layer, then learns the teacher's law on texts
that the teacher itself writes: KL(teacher || student), next token by next token. Both write the same law together as
the teacher alone; what changes is how many drafts are accepted, and so how many passes of the teacher a text needs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from train_char_model import IDS, small, train

import jaxdecode as jd
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer

ROWS, START = 16, 8  # texts at a time, and the letters of the page that they begin with


def beginnings(key: jax.Array) -> np.ndarray:
    first = jax.random.randint(key, (ROWS, 1), 0, len(IDS) - START)
    return IDS[np.asarray(first) + np.arange(START)]


def distil(
    teacher: Any, config: TransformerConfig, student: TransformerConfig, steps: int, new: int, seed: int
) -> tuple[Any, Any]:
    """Params of the student, before and after."""
    model, small_model, optimizer = transformer(config), transformer(student), optax.adam(1e-2)
    before = params = init_params(student, jax.random.key(seed + 2))
    memory = optimizer.init(params)

    def law(model: jd.Model, params: Any, texts: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(model.apply(params, texts, model.init_cache(params, *texts.shape))[0], axis=-1)

    @jax.jit
    def step(params: Any, memory: Any, texts: jax.Array) -> tuple[Any, Any]:
        target = law(model, teacher, texts)
        gradient = jax.grad(lambda p: -jnp.mean(jnp.sum(jnp.exp(target) * law(small_model, p, texts), axis=-1)))(params)
        updates, memory = optimizer.update(gradient, memory, params)
        return optax.apply_updates(params, updates), memory

    for key in jax.random.split(jax.random.key(seed + 3), steps):
        prompts = beginnings(key)
        out = jd.generate(model, teacher, prompts, key=key, settings=jd.Settings(max_new_tokens=new))
        params, memory = step(params, memory, jnp.concatenate([prompts, out.tokens], axis=1))
    return before, params


def timed(*arguments: Any, **options: Any) -> tuple[Any, float]:
    """A result of ``jd.generate``, and the seconds of a second run."""
    jax.block_until_ready(jd.generate(*arguments, **options))
    begin = time.perf_counter()
    out = jax.block_until_ready(jd.generate(*arguments, **options))
    return jax.device_get(out), time.perf_counter() - begin


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Run; acceptance before and after. SystemExit if it does not rise, or the greedy text is not the teacher's."""
    parser = argparse.ArgumentParser(description="distil a draft model")
    for name, default in (("teacher-steps", 300), ("steps", 300), ("width", 128), ("layers", 4), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=96)
    asked = parser.parse_args(arguments)
    config, student = small(asked.width, asked.layers), small(16, 1)
    teacher, losses = train(config, asked.teacher_steps, asked.seed)
    print(f"teacher: loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per letter")
    prompts = beginnings(jax.random.key(asked.seed + 4))
    settings = jd.Settings(max_new_tokens=asked.tokens, temperature=0)
    alone, seconds = timed(transformer(config), teacher, prompts, settings=settings)
    print(f"alone: one pass a token, {1e3 * seconds / asked.tokens:.2f} ms")
    found = {}
    students = distil(teacher, config, student, asked.steps, asked.tokens, asked.seed)
    for name, params in zip(("before", "after"), students, strict=True):
        draft = (transformer(student), params)
        out, seconds = timed(transformer(config), teacher, prompts, settings=settings, draft=draft)
        drafted, accepted = (int(x.sum()) for x in out.acceptance)
        found[name] = accepted / max(drafted, 1)
        passes = (len(prompts) * asked.tokens - accepted) / len(prompts)
        print(
            f"{name} distilling: {found[name]:.0%} of {drafted} drafts accepted, about {passes:.0f} passes a row for"
            f" {asked.tokens} tokens, {1e3 * seconds / asked.tokens:.2f} ms a token"
        )
        if not np.array_equal(out.tokens, alone.tokens):
            raise SystemExit("drafts changed the text")
    if not found["after"] > found["before"] + 0.1:
        raise SystemExit("distilling did not help")
    return found


if __name__ == "__main__":
    main()
