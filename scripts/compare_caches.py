#!/usr/bin/env python3
"""What the type of the KV cache does to a model: perplexity of a text, and bytes of a token.

    compare_caches.py [--model smollm2-135m] [--tokens 20000] [--context 1024] [--text FILE]

The text is cut into rows of the given context, each scored from its second token on. Without a file it is the
reference of the Python language that comes with every Python.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import jax
import numpy as np

import jaxdecode as jd


def reference_text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(" ".join(topics[name].split()) for name in sorted(topics))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--tokens", type=int, default=20_000)
    options.add_argument("--context", type=int, default=1024)
    options.add_argument("--text", type=Path)
    options.add_argument("--types", nargs="+", default=["float32", "bfloat16", "int8"])
    asked = options.parse_args()
    text = reference_text() if asked.text is None else asked.text.read_text(encoding="utf-8")
    ids = jd.load(asked.model).tokenizer.encode(text)[: asked.tokens]
    rows = [ids[i : i + asked.context] for i in range(0, len(ids), asked.context)]
    rows = [row for row in rows if len(row) == asked.context]
    print(f"{asked.model}: {sum(map(len, rows))} tokens in rows of {asked.context}")  # noqa: T201
    first = None
    for kind in asked.types:
        loaded = jd.load(asked.model, cache_dtype=kind)
        scores = [np.asarray(jd.score(loaded.model, loaded.params, rows[i : i + 1])) for i in range(len(rows))]
        perplexity = math.exp(-np.mean([s[0, 1:].mean(dtype=np.float64) for s in scores]))
        cache = jax.eval_shape(lambda p, model=loaded.model: model.init_cache(p, 1, 1024), loaded.params)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers)) // 1024
        first = first or (perplexity, size)
        change = f"{100 * (perplexity / first[0] - 1):+.3f}%"
        print(f"{kind:>9}: perplexity {perplexity:.4f} ({change}), {size:,} bytes a token ({size / first[1]:.3f})")  # noqa: T201


if __name__ == "__main__":
    main()
