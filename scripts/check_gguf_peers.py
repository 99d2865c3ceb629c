"""The GGUF files of tests/tiny_families_gguf.py as llama.cpp reads them, against the logits of transformers.

Says whether the files that the tests read are such as people have. Run by hand, first where this library is installed,
then where llama-cpp-python is:

    python scripts/check_gguf_peers.py write FOLDER
    python scripts/check_gguf_peers.py read FOLDER

Not compared: gemma2, whose scale of scores no file states, and dynamic scaling, which no file has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]


def names() -> list[str]:
    import tiny_families

    return [name for name in tiny_families.VARIANTS if name != "gemma2" and "dynamic" not in name]


def write(folder: Path) -> None:
    import tiny_families_gguf
    import tiny_gguf

    folder.mkdir(parents=True, exist_ok=True)
    for name in names():
        tiny_gguf.write(folder / f"{name}.gguf", tiny_families_gguf.tiny(name))


def read(folder: Path) -> None:
    import llama_cpp
    import tiny_families

    goldens = json.loads((ROOT / "tests" / "goldens" / "families.json").read_text())["variants"]
    options = {"n_ctx": 96, "n_batch": 96, "n_threads": 1, "type_k": 0, "type_v": 0, "logits_all": True}
    for name in names():
        try:
            model = llama_cpp.Llama(str(folder / f"{name}.gguf"), verbose=False, **options)
        except ValueError as error:
            sys.stdout.write(f"{name}: {error}\n")
            continue
        worst = []
        for prompt, positions, row in zip(tiny_families.PROMPTS, tiny_families.POSITIONS, goldens[name], strict=True):
            model.reset()
            model.eval(prompt)
            for at, expected in zip(positions, row["logits"], strict=True):
                got = model.scores[at, : tiny_families.KEPT]
                worst.append(f"{np.abs(got - expected).max():.1e}")
        sys.stdout.write(f"{name}: {' '.join(worst)}\n")


{"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
