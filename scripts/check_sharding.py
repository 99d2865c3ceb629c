"""SmolLM2-135M over meshes of 8 virtual devices: how often the tokens are those of one device, and where they are not.

    python scripts/check_sharding.py [--strategy plain beams ...] [--mesh data=2,tensor=4 ...] [--quantize none int8]
    python scripts/check_sharding.py --processes 2     # of 4 devices each

Prints a line of JSON for each kind of weights, mesh and strategy: tokens compared, how many have a margin over 1e-3 and
their share, how many of those differ (of float weights there must be none: S6.5; of int8 few do, as a last bit may move
an activation to the next code), and how many of all. A row counts up to its first difference: what follows is another
text. Of beams a whole search counts as one: its margin is the smallest of its
steps and of the distances of its scores, its tokens are all hypotheses in order. Bytes of the params: of one device,
and of the largest part.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

DEVICES = 8
TOGETHER = "JAXDECODE_CHECK_SHARDING"  # in the environment of one of several processes: coordinator, how many, which
MESHES = ("data=1,tensor=8", "data=2,tensor=4", "data=8,tensor=1", "data=2,tensor=3")  # SmolLM2 has 3 KV heads
MARGIN = 1e-3
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village,",
    "def fibonacci(n):",
    "Water boils at",
    "My favourite season is autumn, because",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,",
    "The theory of evolution says that",
)
HALF = (0.0, 0.8) * 4  # every other row samples
REGEX = r" [A-Z][a-z]{2,9}( [a-z]{1,9}){1,5}\."
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
Row = tuple[list[Any], list[float]]  # what is compared, one after the other, and the margin of each
Strategy = Callable[[Any, Any, int], list[Row]]


def strategies() -> dict[str, Strategy]:
    """Name -> what gives the rows of a loaded model, its mesh (None: one device) and a number of new tokens."""
    import jax
    import numpy as np

    import jaxdecode as jd
    from jaxdecode.base import fetch
    from jaxdecode.engine import Engine, Options, Request
    from jaxdecode.keys import row_keys

    key = jax.random.key(0)

    def asked(loaded: Any, new: int, temperature: Any, **more: Any) -> Any:
        temperature = np.asarray(temperature, np.float32)
        return loaded.settings(max_new_tokens=new, temperature=temperature, top_p=0.95, **more)

    def rows_of(out: Any) -> list[Row]:
        margins = np.minimum(out.margin, out.set_margin)
        return [(ids, margin[: len(ids)].tolist()) for ids, margin in zip(out.to_lists(), margins, strict=True)]

    def generated(loaded: Any, settings: Any, **more: Any) -> Any:
        ids = [loaded.tokenizer.encode(text) for text in PROMPTS]
        return fetch(jd.generate(loaded.model, loaded.params, ids, key=key, settings=settings, **more))

    def plainly(**more: Any) -> Strategy:
        def run(loaded: Any, mesh: Any, new: int) -> list[Row]:
            return rows_of(generated(loaded, asked(loaded, new, HALF, **more)))

        return run

    def drafted(loaded: Any, mesh: Any, new: int) -> list[Row]:
        copy = jd.load("smollm2-135m", quantize="int4", mesh=mesh)
        settings = asked(loaded, new, HALF, draft_length=3)
        return rows_of(generated(loaded, settings, draft=(copy.model, copy.params)))

    def beams(loaded: Any, mesh: Any, new: int) -> list[Row]:
        out = generated(loaded, loaded.settings(max_new_tokens=new, beams=4))
        steps = np.minimum(out.margin, out.set_margin).min(axis=(1, 2))
        apart = -np.diff(out.score, axis=1).max(axis=1)
        least = np.minimum(steps, apart)
        return [([ids], [float(margin)]) for ids, margin in zip(out.to_lists(), least, strict=True)]

    def engine(loaded: Any, mesh: Any, new: int) -> list[Row]:
        requests = [
            Request(i, loaded.tokenizer.encode(text), asked(loaded, new, HALF[i]), one)
            for i, (text, one) in enumerate(zip(PROMPTS, row_keys(key, len(PROMPTS)), strict=True))
        ]
        served = Engine(loaded.model, loaded.params, options=Options(slots=8)).serve(requests)
        outs = [result.out for result in sorted(served, key=lambda result: result.request.id)]
        return [row for out in outs for row in rows_of(fetch(out))]

    return {
        "plain": plainly(),
        "beams": beams,
        "lookup": plainly(prompt_lookup=4),
        "draft": drafted,
        "regex": plainly(regex=REGEX),
        "json": plainly(json_schema=SCHEMA),
        "engine": engine,
    }


def compared(alone: list[Row], parts: list[Row]) -> dict[str, Any]:
    """Counts over all rows, each up to its first difference, and the largest margin of what differs."""
    told: dict[str, Any] = dict.fromkeys(("tokens", "clear", "clear_differ", "differ"), 0)
    told["largest_margin_that_differs"] = 0.0
    for (things, margins), (others, _) in zip(alone, parts, strict=True):
        for t, (thing, margin) in enumerate(zip(things, margins, strict=True)):
            same = t < len(others) and others[t] == thing
            clear = margin > MARGIN
            told["tokens"] += 1
            told["clear"] += clear
            told["clear_differ"] += clear and not same
            told["differ"] += not same
            if not same:
                told["largest_margin_that_differs"] = max(told["largest_margin_that_differs"], margin)
                break
    told["share_clear"] = round(told["clear"] / max(1, told["tokens"]), 4)
    return told


def lines(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import jax

    import jaxdecode as jd
    from jaxdecode.meshes import mesh_of

    every = strategies()
    for scheme in asked.quantize:
        how: Any = {"quantize": None if scheme == "none" else scheme, "steady": asked.steady}
        whole = jd.load("smollm2-135m", **how)
        alone = {name: every[name](whole, None, asked.new_tokens) for name in asked.strategy}
        for text in asked.mesh:
            mesh = mesh_of(text)
            loaded = jd.load("smollm2-135m", mesh=mesh, **how)
            leaves = jax.tree.leaves(loaded.params)
            sizes = [sum(x.nbytes for x in leaves), sum(x.addressable_shards[0].data.nbytes for x in leaves)]
            for name in asked.strategy:
                with jax.set_mesh(mesh):
                    told = compared(alone[name], every[name](loaded, mesh, asked.new_tokens))
                yield {"quantize": scheme, "mesh": text, "strategy": name, **told, "param_bytes": sizes}


def take_part(told: str) -> bool:
    """Become one of several processes; whether this is the one that prints."""
    import jax

    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what C++ prints
    coordinator, count, number = told.split()
    known: Any = {"cluster_detection_method": "deactivate", "initialization_timeout": 120}
    jax.distributed.initialize(coordinator, int(count), int(number), **known)
    return number == "0"


def together(count: int) -> int:
    """The same command in ``count`` processes."""
    with socket.socket() as trial:
        trial.bind(("", 0))
        coordinator = f"127.0.0.1:{trial.getsockname()[1]}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES // count}"
    places = [f"{coordinator} {count} {number}" for number in range(count)]
    environments = [{**os.environ, "XLA_FLAGS": flags, TOGETHER: place} for place in places]
    running = [subprocess.Popen([sys.executable, *sys.argv], env=environment) for environment in environments]
    return max(abs(process.wait()) for process in running)


def main() -> int:
    names = ["plain", "beams", "lookup", "draft", "regex", "json", "engine"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--mesh", nargs="+", default=MESHES)
    parser.add_argument("--quantize", nargs="+", default=["none", "int8"])
    parser.add_argument("--strategy", nargs="+", choices=names, default=names)
    parser.add_argument("--steady", action="store_true", help="models of steady arithmetic")
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2, 4, 8))
    asked = parser.parse_args()
    place = os.environ.get(TOGETHER)
    if asked.processes > 1 and place is None:
        return together(asked.processes)
    if place is None:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    told = place is None or take_part(place)
    wrong = 0
    for line in lines(asked):
        if told:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
        wrong += line["clear_differ"] if line["quantize"] == "none" else 0
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
