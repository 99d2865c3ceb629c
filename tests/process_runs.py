"""One mesh over the devices of two processes, with four each: the same tokens as on one device.

    process_runs.py [MODEL ...]

Runs every strategy of these models (table, llama, int8; all take some minutes) in two processes of its own, which this
program becomes if it is given a coordinator and a number. `test_process_meshes.py` runs the few of ``SHORT``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
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
LLAMA = TransformerConfig(64, 32, 2, 8, 4, 8, 64, 128)
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
MODELS = ("table", "llama", "int8")
SHORT = ("llama plain 3",)
FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


def made(name: str) -> tuple[TransformerConfig | None, Model, Any]:
    if name == "table":
        return None, markov_model(), np.random.default_rng(1).standard_normal((64, 64), np.float32)
    params = init_params(LLAMA, jax.random.key(0))
    params = jd.quantize(params, "int8") if name == "int8" else params
    return LLAMA, transformer(LLAMA), jax.tree.map(np.asarray, params)


def tokens(name: str, n: str, model: Model, params: Any) -> list[Any]:
    """``n`` at most of every row, under the mesh that is set, if there is one."""
    key = jax.random.key(SEED)
    if name == "engine":
        requests = [
            Request(i, prompt, jd.Settings(max_new_tokens=int(n), temperature=HALF[i], eos=[0]), row)
            for i, (prompt, row) in enumerate(zip(PROMPTS, row_keys(key, len(PROMPTS)), strict=True))
        ]
        served = Engine(model, params, options=Options(slots=4, staged=4, chunk=8)).serve(requests)
        return [result.out.to_lists()[0] for result in sorted(served, key=lambda r: r.request.id) if result.out]
    settings = jd.Settings(max_new_tokens=int(n), eos=[0], **STRATEGIES[name])
    draft = (model, params) if name == "draft" else None
    return fetch(jd.generate(model, params, PROMPTS, key=key, settings=settings, draft=draft)).to_lists()


def over_both(which: list[str]) -> list[Any]:
    """In one of the two processes."""
    mesh, found = mesh_of(MESH), []
    for model_name, name, n in map(str.split, which):
        config, model, params = made(model_name)
        with jax.set_mesh(mesh):
            placed = place(params, mesh) if config is None else shard(config, params, mesh)
            found.append(tokens(name, n, model, placed))
    return found


def compared(which: list[str]) -> list[tuple[str, list[Any], list[Any]]]:
    """Of each "model strategy n" the tokens on one device, and those of both processes."""
    with socket.socket() as trial:
        trial.bind(("", 0))
        coordinator = f"127.0.0.1:{trial.getsockname()[1]}"
    flags = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"}
    commands = [[sys.executable, __file__, coordinator, number, *which] for number in "01"]
    both = [subprocess.Popen(command, env=flags, stdout=subprocess.PIPE) for command in commands]
    alone = [tokens(name, n, *made(model)[1:]) for model, name, n in map(str.split, which)]
    told = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    parts = [json.loads(out) for out in told]
    return [(name, one, [part[i] for part in parts]) for i, (name, one) in enumerate(zip(which, alone, strict=True))]


def take_part(coordinator: str, number: str, which: list[str]) -> None:
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what C++ prints
    known = {"cluster_detection_method": "deactivate", "initialization_timeout": 60}
    jax.distributed.initialize(coordinator, 2, int(number), **known)
    assert (len(jax.devices()), len(jax.local_devices())) == (8, 4)
    print(json.dumps(over_both(which)), file=stdout, flush=True)
    jax.distributed.shutdown()


def main() -> int:
    arguments = sys.argv[1:]
    if arguments and ":" in arguments[0]:
        take_part(arguments[0], arguments[1], arguments[2:])
        return 0
    every = [f"{model} {name} 8" for model in arguments or MODELS for name in (*STRATEGIES, "engine")]
    unequal = 0
    for name, alone, parts in compared(every):
        same = sum(row == rows[0] == rows[1] for row, *rows in zip(alone, *parts, strict=True))
        unequal += len(alone) - same
        sys.stdout.write(f"{name}: {same} of {len(alone)} rows equal\n")
    return int(unequal > 0)


if __name__ == "__main__":
    sys.exit(main())
