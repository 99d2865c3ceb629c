"""One peer, measured once in this process. Runs in a Python that has the peer; prints one line of JSON at the end.

    systems.py installed                       which peers there are, and their versions
    systems.py convert HF_FOLDER OUT KIND      a CTranslate2 model of weights "float32" or "int8"
    systems.py SYSTEM SPEC                     llama.cpp, ctranslate2 or transformers; SPEC is JSON

Every system is timed in the same two ways: from the prompts to the first new token, and from there to the last one.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = {"llama.cpp": "llama-cpp-python", "ctranslate2": "ctranslate2", "transformers": "transformers"}
BESIDE = {"transformers": "torch", "ctranslate2": "transformers"}  # CTranslate2 converts by transformers


def installed() -> dict[str, str]:
    """Versions of the peers that can run here."""
    found = {}
    for system, package in PACKAGES.items():
        try:
            importlib.metadata.version(BESIDE.get(system, package))
            found[system] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def prompt_ids(batch: int, length: int, vocab_size: int) -> Any:
    """The ids that jaxdecode.benchmark.prompt_ids gives."""
    import numpy as np

    return np.random.default_rng(0).integers(vocab_size // 4, 3 * vocab_size // 4, (batch, length))


def seconds(fn: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


def from_totals(make: Callable[[int], Any], spec: dict[str, Any]) -> tuple[float, float]:
    """(first, step) of a system that is only asked for n tokens: ``make(n)`` for 1 and for all of them."""
    make(2)
    firsts = [seconds(lambda: make(1)) for _ in range(spec["runs"])]
    if spec["new"] == 1:
        return statistics.median(firsts), float("nan")
    wholes = [seconds(lambda: make(spec["new"])) for _ in range(spec["runs"])]
    steps = [(whole - first) / (spec["new"] - 1) for first, whole in zip(firsts, wholes, strict=True)]
    return statistics.median(firsts), statistics.median(steps)


def transformers(spec: dict[str, Any]) -> tuple[float, float]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(spec["threads"])
    model = AutoModelForCausalLM.from_pretrained(spec["hf"], dtype=torch.float32).eval()
    ids = torch.tensor(prompt_ids(spec["batch"], spec["prompt"], spec["vocab_size"]))
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}

    def make(n: int) -> None:
        with torch.inference_mode():
            out = model.generate(ids, max_new_tokens=n, min_new_tokens=n, **options)
        assert out.shape[1] == spec["prompt"] + n

    return from_totals(make, spec)


def ctranslate2(spec: dict[str, Any]) -> tuple[float, float]:
    from ctranslate2 import Generator

    vocab = json.loads((Path(spec["hf"]) / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    token = {i: text for text, i in vocab.items()}
    prompts = [
        [token[i] for i in row] for row in prompt_ids(spec["batch"], spec["prompt"], spec["vocab_size"]).tolist()
    ]
    generator = Generator(spec["ct2"], device="cpu", intra_threads=spec["threads"], inter_threads=1)

    def make(n: int) -> None:
        options = {"min_length": n, "max_length": n, "include_prompt_in_result": False}
        found = generator.generate_batch(prompts, beam_size=spec["beams"], **options)
        assert {len(row.sequences_ids[0]) for row in found} == {n}

    return from_totals(make, spec)


def llama_cpp(spec: dict[str, Any]) -> tuple[float, float]:
    """By llama.cpp's own interface: its Python class decodes one sequence only."""
    import llama_cpp as c
    import numpy as np

    c.llama_backend_init()
    model = c.llama_model_load_from_file(spec["gguf"].encode(), c.llama_model_default_params())
    vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    rows, prompt = range(spec["batch"]), spec["prompt"]
    prompts = prompt_ids(spec["batch"], prompt, vocab_size)
    options = c.llama_context_default_params()
    options.n_ctx = (prompt + spec["new"] + 8) * len(rows)
    options.n_batch, options.n_ubatch, options.n_seq_max = max(2048, prompts.size), 512, len(rows)
    options.n_threads = options.n_threads_batch = spec["threads"]
    options.kv_unified = True
    context = c.llama_init_from_model(model, options)
    batch = c.llama_batch_init(options.n_batch, 0, 1)

    def decode(entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Entries (token, position, row, wanted); the arg max behind each wanted one."""
        batch.n_tokens = len(entries)
        for i, (token, position, row, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = row
        assert c.llama_decode(context, batch) == 0
        places = [i for i, entry in enumerate(entries) if entry[3]]
        logits = (c.llama_get_logits_ith(context, i) for i in places)
        return [
            int(np.ctypeslib.as_array(ctypes.cast(x, c.llama_get_logits_ith.restype), (vocab_size,)).argmax())
            for x in logits
        ]

    def once() -> tuple[float, float]:
        c.llama_memory_clear(c.llama_get_memory(context), True)
        begin = time.perf_counter()
        last = decode([(int(prompts[r, j]), j, r, j == prompt - 1) for r in rows for j in range(prompt)])
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        for i in range(spec["new"] - 1):
            last = decode([(last[r], prompt + i, r, True) for r in rows])
        return first, (time.perf_counter() - begin) / max(spec["new"] - 1, 1)

    new, spec["new"] = spec["new"], 2
    once()
    spec["new"] = new
    firsts, steps = zip(*(once() for _ in range(spec["runs"])), strict=True)
    return statistics.median(firsts), statistics.median(steps)


def convert(folder: str, out: str, kind: str) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(folder, copy_files=["tokenizer.json"]).convert(out, quantization=kind)


SYSTEMS = {"llama.cpp": llama_cpp, "ctranslate2": ctranslate2, "transformers": transformers}


def main() -> None:
    command, *rest = sys.argv[1:]
    found: dict[str, Any] = {}
    if command == "installed":
        found = dict(installed())
    elif command == "convert":
        convert(*rest)
    else:
        spec = json.loads(rest[0])
        first, step = SYSTEMS[command](spec)
        found = {"first_token_seconds": first, "step_seconds": step if spec["new"] > 1 else None}
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
