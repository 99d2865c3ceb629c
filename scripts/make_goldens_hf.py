"""Make tests/goldens/tiny_hf.json: the logits of transformers for the tiny models of tests/tiny_hf.py.

Run by hand, in an environment with torch and transformers (neither is needed by the tests):

    python scripts/make_goldens_hf.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))


def main() -> None:
    import tiny_hf
    import torch
    import transformers

    found = {}
    for name, options in tiny_hf.VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_hf.write(Path(folder) / "model", tiny_hf.tiny(**options))
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor(tiny_hf.PROMPTS)).logits[:, -1].double()
        found[name] = [
            {
                "logits": [round(x, 6) for x in row[: tiny_hf.KEPT].tolist()],
                "logsumexp": round(row.logsumexp(0).item(), 6),
            }
            for row in logits
        ]
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    text = json.dumps({"made_by": versions, "variants": found}, indent=1)
    (ROOT / "tests" / "goldens" / "tiny_hf.json").write_text(text + "\n")


main()
