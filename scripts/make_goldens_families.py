"""Make tests/goldens/families.json: the logits of transformers for the tiny models of tests/tiny_families.py.

Run by hand, in an environment with torch and transformers (neither is needed by the tests):

    python scripts/make_goldens_families.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))


def answers(model: Any, prompt: list[int], positions: tuple[int, ...]) -> dict[str, Any]:
    """Logits of some positions, and the greedy tokens, each from the whole text anew."""
    import tiny_families
    import torch

    def logits(ids: list[int]) -> Any:
        with torch.no_grad():
            return model(torch.tensor([ids]), use_cache=False).logits[0].double()

    every, text, gaps = logits(prompt), list(prompt), []
    for _ in range(tiny_families.NEW):
        two = logits(text)[-1].topk(2)
        text.append(int(two.indices[0]))
        gaps.append(float(two.values[0] - two.values[1]))
    return {
        "logits": [[round(x, 6) for x in every[at, : tiny_families.KEPT].tolist()] for at in positions],
        "logsumexp": [round(every[at].logsumexp(0).item(), 6) for at in positions],
        "greedy": text[len(prompt) :],
        "gap": round(min(gaps), 5),
    }


def main() -> None:
    import tiny_families
    import tiny_hf
    import torch
    import transformers

    found = {}
    for name in tiny_families.VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_hf.write(Path(folder) / "model", tiny_families.tiny(name))
            kind = transformers.AutoModelForCausalLM
            model, info = kind.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
        wrong = {key: value for key, value in info.items() if value}
        assert not wrong, f"{name}: {wrong}"
        rows = zip(tiny_families.PROMPTS, tiny_families.POSITIONS, strict=True)
        found[name] = [answers(model, prompt, positions) for prompt, positions in rows]
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    text = json.dumps({"made_by": versions, "variants": found}, separators=(",", ":"))
    (ROOT / "tests" / "goldens" / "families.json").write_text(
        text.replace('},"', '},\n"').replace("},{", "},\n{") + "\n"
    )


main()
