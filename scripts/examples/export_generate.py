#!/usr/bin/env python3
"""Generation as a file: export it, and run it in a process that has only jax and NumPy.

    export_generate.py [FOLDER]

Writes FOLDER/generate.jaxexport and FOLDER/params.npz (a small random model), runs both in a fresh process, and checks
that the tokens are those of ``generate``. With real weights, params belong into a safetensors file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

import jaxdecode as jd
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer

ELSEWHERE = """
import sys
import jax, jax.export
import numpy as np

folder = sys.argv[1]
with open(f"{folder}/generate.jaxexport", "rb") as file:
    program = jax.export.deserialize(bytearray(file.read()))
params = dict(np.load(f"{folder}/params.npz"))
inputs = {
    "tokens": np.array([[5, 6, 7, 8], [9, 10, 0, 0]], np.int32),
    "lengths": np.array([4, 2], np.int32),
    "temperature": np.array([0.0, 0.8], np.float32),
    "min_new_tokens": np.array([0, 0], np.int32),
}
out = program.call(params, inputs, jax.random.key(7))
assert "jaxdecode" not in sys.modules
print(np.asarray(out["tokens"]).tolist())
"""


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    config = TransformerConfig(64, 32, 2, 4, 2, 8, 64, 128)
    model, params = transformer(config), init_params(config, jax.random.key(0))
    settings = jd.Settings(max_new_tokens=8, eos=[0])
    exported = jd.export_generate(model, params, batch_size=2, prompt_len=4, settings=settings)
    (folder / "generate.jaxexport").write_bytes(exported.serialize())
    np.savez(folder / "params.npz", **jd.named_params(params))
    command = [sys.executable, "-c", ELSEWHERE, str(folder)]
    there = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    chosen = jd.Settings(max_new_tokens=8, eos=[0], temperature=np.array([0.0, 0.8]))
    here = jd.generate(model, params, [[5, 6, 7, 8], [9, 10]], key=jax.random.key(7), settings=chosen).tokens
    print(f"{(folder / 'generate.jaxexport').stat().st_size} bytes for {', '.join(exported.platforms)}: {there}")
    return int(str(np.asarray(here).tolist()) != there)


if __name__ == "__main__":
    sys.exit(main())
