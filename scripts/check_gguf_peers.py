"""The GGUF files of tests/tiny_families_gguf.py as llama.cpp reads them, against the logits of transformers.

Says whether the files that the tests read are such as people have. Run by hand, where llama-cpp-python is installed:

    python scripts/check_gguf_peers.py [NAME]

Not compared: gemma2, whose scale of scores no file states.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]


def main(wanted: str) -> None:
    import llama_cpp
    import tiny_families
    import tiny_families_gguf
    import tiny_gguf

    goldens = json.loads((ROOT / "tests" / "goldens" / "families.json").read_text())["variants"]
    for name, golden in goldens.items():
        if name == "gemma2" or "dynamic" in name or wanted not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_gguf.write(Path(folder) / "m.gguf", tiny_families_gguf.tiny(name))
            try:
                options = {"n_ctx": 128, "n_batch": 128, "type_k": 0, "type_v": 0, "logits_all": True}
                model = llama_cpp.Llama(str(path), n_threads=1, verbose=False, **options)
            except ValueError as error:
                sys.stdout.write(f"{name}: {error}\n")
                continue
            worst = []
            for prompt, positions, row in zip(tiny_families.PROMPTS, tiny_families.POSITIONS, golden, strict=True):
                model.reset()
                model.eval(prompt)
                for at, expected in zip(positions, row["logits"], strict=True):
                    got = model.scores[at, : tiny_families.KEPT]
                    worst.append(f"{np.abs(got - expected).max():.1e}")
            sys.stdout.write(f"{name}: {' '.join(worst)}\n")


main(sys.argv[1] if len(sys.argv) > 1 else "")
