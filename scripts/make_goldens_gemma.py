"""Make tests/goldens/gemma3_270m.json: what transformers computes with the weights of the catalogue's gemma3-270m.

Tokens are llama.cpp's. Run by hand, in an environment with torch, transformers and llama-cpp-python:

    python scripts/make_goldens_gemma.py gemma-3-270m-q4_k_m.gguf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NEW, KEPT = 16, 8
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little",
    "def fibonacci(n):\n    if n",
    "Die Hauptstadt von Deutschland ist",
    "日本の首都は",
    "1, 2, 3, 5, 8, 13,",
    "<table>\n<tr><td>A</td>\t<td>  two  spaces</td>",
    "The sea was calm and the sky was clear. " * 60 + "Then",  # longer than the window of 512
]
TEXTS = [
    "",
    " ",
    "  a",
    "a\n\nb\t\tc",
    "naïve café 🙂",
    "<start_of_turn>user\nHi<end_of_turn>\n",
    "\u2581x",
    "ÿ\x00\x7f",
]


def greedy(model: Any, ids: list[int]) -> dict[str, Any]:
    import torch

    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]),
            max_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            eos_token_id=[],
        )
    steps = torch.stack(out.logits)[:, 0].double()
    two = steps.topk(2).values
    first = steps[0]
    return {
        "output_ids": out.sequences[0, len(ids) :].tolist(),
        "gaps": [round(x, 4) for x in (two[:, 0] - two[:, 1]).tolist()],
        "logits": [round(x, 5) for x in first[:KEPT].tolist()],
        "logsumexp": round(first.logsumexp(0).item(), 5),
    }


def main(path: Path) -> None:
    import llama_cpp
    import torch
    import transformers

    words = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)

    def ids(text: str, bos: bool) -> list[int]:
        return list(words.tokenize(text.encode(), add_bos=bos, special=True))

    found: list[dict[str, Any]] = [{"text": text, "prompt_ids": ids(text, True)} for text in PROMPTS]
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager")
    for golden in found:
        golden |= greedy(model, golden["prompt_ids"])
    versions = {m.__name__: m.__version__ for m in (transformers, torch, llama_cpp)}
    tokens = {text: ids(text, False) for text in TEXTS}
    text = json.dumps({"made_by": versions, "tokens": tokens, "greedy": found}, ensure_ascii=False)
    (ROOT / "tests" / "goldens" / "gemma3_270m.json").write_text(text.replace('{"text"', '\n{"text"') + "\n", "utf-8")


main(Path(sys.argv[1]))
