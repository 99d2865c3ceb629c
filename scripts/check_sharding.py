"""SmolLM2-135M over meshes of 8 virtual devices: how often the tokens are those of one device, and where they are not.

    python scripts/check_sharding.py [--new-tokens N] [--mesh data=2,tensor=4 ...]

Prints a line of JSON for each mesh and kind of weights: tokens compared, the share of them whose margin exceeds 1e-3,
how many of those differ (of float weights there must be none: S6.5; int8 rounds activations, and a last bit may move
one to the next code), and how many of all. A row counts up to its first difference: what
follows is another text. Bytes of the params: of one device, and of the largest part.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

COUNT = "--xla_force_host_platform_device_count=8"
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


def compared(alone: Any, parts: Any) -> dict[str, Any]:
    """Counts over all rows, each up to its first difference, and the largest margin of a token that differs."""
    told: dict[str, Any] = dict.fromkeys(("tokens", "clear", "clear_differ", "differ"), 0)
    told["largest_margin_that_differs"] = 0.0
    rows = zip(alone.to_lists(), parts.to_lists(), alone.margin, alone.set_margin, strict=True)
    for tokens, others, margin, set_margin in rows:
        for t, token in enumerate(tokens):
            same = t < len(others) and others[t] == token
            both = float(min(margin[t], set_margin[t]))
            clear = both > MARGIN
            told["tokens"] += 1
            told["clear"] += clear
            told["clear_differ"] += clear and not same
            told["differ"] += not same
            if not same:
                told["largest_margin_that_differs"] = max(told["largest_margin_that_differs"], both)
                break
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--mesh", nargs="+", default=MESHES)
    parser.add_argument("--quantize", nargs="+", default=["none", "int8"])
    asked = parser.parse_args()

    import jax
    import numpy as np

    import jaxdecode as jd
    from jaxdecode.meshes import mesh_of

    temperature = np.array([0.0, 0.8] * 4, np.float32)  # every other row samples
    wrong = 0
    for scheme in asked.quantize:
        how: Any = {"quantize": None if scheme == "none" else scheme}
        whole = jd.load("smollm2-135m", **how)
        ids = [whole.tokenizer.encode(text) for text in PROMPTS]
        settings = whole.settings(max_new_tokens=asked.new_tokens, temperature=temperature, top_p=0.95)
        alone = jax.device_get(jd.generate(whole.model, whole.params, ids, key=jax.random.key(0), settings=settings))
        for text in asked.mesh:
            mesh = mesh_of(text)
            loaded = jd.load("smollm2-135m", mesh=mesh, **how)
            with jax.set_mesh(mesh):
                out = jd.generate(loaded.model, loaded.params, ids, key=jax.random.key(0), settings=settings)
            told = compared(alone, jax.device_get(out))
            leaves = jax.tree.leaves(loaded.params)
            sizes = [sum(x.nbytes for x in leaves), sum(x.addressable_shards[0].data.nbytes for x in leaves)]
            share = round(told["clear"] / told["tokens"], 4)
            line = {"mesh": text, "quantize": scheme, **told, "share_clear": share, "param_bytes": sizes}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
            wrong += told["clear_differ"] if scheme == "none" else 0
    return int(wrong > 0)


if __name__ == "__main__":
    if COUNT not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COUNT}"
    sys.exit(main())
