"""What `test_process_meshes.py` runs in each of two processes with four devices: one mesh over the eight of both.

    process_runs.py COORDINATOR NUMBER [--all]

Prints a JSON object: model, strategy, and the tokens of every row. --all: every strategy, of a table, a Llama, and that
in int8; by hand, as it takes minutes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import jaxdecode as jd
from jaxdecode.base import Model, fetch
from jaxdecode.engine import Engine, Options, Request
from jaxdecode.keys import row_keys
from jaxdecode.meshes import mesh_of, place
from jaxdecode.models.sharding import shard
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.testing import markov_model

MESH = "data=2,tensor=4"
LLAMA = TransformerConfig(64, 32, 1, 8, 4, 8, 64, 128)
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12], [13, 14, 15]]
SEED = 7
HALF = [0.0, 0.9] * 2  # every other row takes the arg max
STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {"temperature": HALF, "top_p": 0.9},
    "penalties": {"temperature": HALF, "top_k": 20, "repetition_penalty": 1.1, "top_logprobs": 2},
    "samples": {"temperature": 0.8, "min_p": 0.05, "num_samples": 2},
    "beams": {"beams": 3, "length_penalty": 0.5},
    "lookup": {"temperature": HALF, "prompt_lookup": 3},
    "draft": {"temperature": HALF},
    "choices": {"temperature": HALF, "choices": [[3, 4, 5], [3, 7], [8, 8, 8, 8]]},
}
SHORT = (("table", "engine"), ("llama", "plain"))
ALL = tuple((model, name) for model in ("table", "llama", "int8") for name in (*STRATEGIES, "engine"))


def made(name: str) -> tuple[TransformerConfig | None, Model, Any]:
    if name == "table":
        return None, markov_model(), np.random.default_rng(1).standard_normal((64, 64), np.float32)
    params = init_params(LLAMA, jax.random.key(0))
    params = jd.quantize(params, "int8") if name == "int8" else params
    return LLAMA, transformer(LLAMA), jax.tree.map(np.asarray, params)


def tokens(name: str, model: Model, params: Any) -> list[Any]:
    """Of every row, under the mesh that is set, if there is one."""
    key = jax.random.key(SEED)
    if name == "engine":
        requests = [
            Request(i, prompt, jd.Settings(max_new_tokens=6, temperature=HALF[i], eos=[0]), row)
            for i, (prompt, row) in enumerate(zip(PROMPTS, row_keys(key, len(PROMPTS)), strict=True))
        ]
        served = Engine(model, params, options=Options(slots=4, staged=4, chunk=8)).serve(requests)
        return [result.out.to_lists()[0] for result in sorted(served, key=lambda r: r.request.id) if result.out]
    settings = jd.Settings(max_new_tokens=8, eos=[0], **STRATEGIES[name])
    draft = (model, params) if name == "draft" else None
    return fetch(jd.generate(model, params, PROMPTS, key=key, settings=settings, draft=draft)).to_lists()


def over_both(which: Any) -> Iterator[tuple[str, str, list[Any]]]:
    mesh = mesh_of(MESH)
    for model_name, name in which:
        config, model, params = made(model_name)
        with jax.set_mesh(mesh):
            placed = place(params, mesh) if config is None else shard(config, params, mesh)
            yield model_name, name, tokens(name, model, placed)


def main() -> None:
    coordinator, number, *more = sys.argv[1:]
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what C++ prints
    known = {"cluster_detection_method": "deactivate", "initialization_timeout": 60}
    jax.distributed.initialize(coordinator, 2, int(number), **known)
    assert (len(jax.devices()), len(jax.local_devices())) == (8, 4)
    print(json.dumps(list(over_both(ALL if "--all" in more else SHORT))), file=stdout, flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
