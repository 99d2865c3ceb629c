"""Many prompts of many lengths through one peer, in this process. Runs in a Python that has the peer.

    batches.py SYSTEM SPEC     llama.cpp or ctranslate2; SPEC is JSON; prints one line of JSON at the end

SPEC names a file of work: a list of [prompt ids, new tokens]. ``slots``: rows at a time. Loading and warming up are not
timed.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

Work = list[tuple[list[int], int]]


def ctranslate2(spec: dict[str, Any], work: Work) -> tuple[float, list[list[int]]]:
    """By its own batches: prompts sorted by length, and rows that end leave their batch."""
    from ctranslate2 import Generator

    vocab = json.loads((Path(spec["hf"]) / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    token = {i: text for text, i in vocab.items()}
    generator = Generator(spec["ct2"], device="cpu", intra_threads=spec["threads"], inter_threads=1)

    def run(work: Work) -> list[list[int]]:
        """A call for each batch, so that the callback knows whose rows it counts."""
        order = sorted(range(len(work)), key=lambda i: -len(work[i][0]))
        rows: dict[int, list[int]] = {}
        for at in range(0, len(order), spec["slots"]):
            part = order[at : at + spec["slots"]]
            # What is beyond the shortest prompt of a batch is decoded a token at a time, and counted as steps.
            shortest = min(len(work[i][0]) for i in part)
            limits = [len(work[i][0]) - shortest + work[i][1] for i in part]
            found = generator.generate_batch(
                [[token[t] for t in work[i][0]] for i in part],
                min_length=max(limits),
                max_length=max(limits),
                include_prompt_in_result=False,
                callback=lambda step, limits=limits: step.step + 1 >= limits[step.batch_id],
            )
            rows |= {i: list(row.sequences_ids[0]) for i, row in zip(part, found, strict=True)}
        return [rows[i] for i in range(len(work))]

    run([(prompt[:16], 2) for prompt, _ in work[: spec["slots"]]])
    begin = time.perf_counter()
    rows = run(work)
    return time.perf_counter() - begin, rows


class _Row(NamedTuple):
    """A sequence that runs: which one, tokens of the prompt that are in, and what it wrote."""

    number: int
    done: int
    written: list[int]


def llama_cpp(spec: dict[str, Any], work: Work) -> tuple[float, list[list[int]]]:
    """By parallel sequences, as its server does: a call has the next token of every running row, and new prompts."""
    import llama_cpp as c
    import numpy as np

    c.llama_backend_init()
    model = c.llama_model_load_from_file(spec["gguf"].encode(), c.llama_model_default_params())
    vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    options = c.llama_context_default_params()
    longest = max(len(prompt) + new for prompt, new in work)
    options.n_ctx = (longest + 8) * spec["slots"]
    options.n_batch, options.n_ubatch, options.n_seq_max = 512, 512, spec["slots"]
    options.n_threads = options.n_threads_batch = spec["threads"]
    options.kv_unified = True
    context = c.llama_init_from_model(model, options)
    memory, batch = c.llama_get_memory(context), c.llama_batch_init(512, 0, 1)

    def decode(entries: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Entries (token, position, sequence, wanted); the arg max behind each wanted one, by sequence."""
        batch.n_tokens = len(entries)
        for i, (token, position, row, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = row
        assert c.llama_decode(context, batch) == 0
        kind = c.llama_get_logits_ith.restype
        return {
            entry[2]: int(
                np.ctypeslib.as_array(ctypes.cast(c.llama_get_logits_ith(context, i), kind), (vocab_size,)).argmax()
            )
            for i, entry in enumerate(entries)
            if entry[3]
        }

    def run(work: Work) -> list[list[int]]:
        waiting, slots = deque(range(len(work))), dict[int, _Row]()
        rows: dict[int, list[int]] = {}
        while waiting or slots:
            for slot in range(spec["slots"]):
                if slot not in slots and waiting:
                    c.llama_memory_seq_rm(memory, slot, -1, -1)
                    slots[slot] = _Row(waiting.popleft(), 0, [])
            entries = []
            for slot, row in slots.items():
                if row.written:
                    entries.append((row.written[-1], len(work[row.number][0]) + len(row.written) - 1, slot, True))
            for slot, row in slots.items():
                prompt = work[row.number][0]
                if not row.written:
                    end = min(len(prompt), row.done + options.n_batch - len(entries))
                    entries += [(prompt[j], j, slot, j == len(prompt) - 1) for j in range(row.done, end)]
                    slots[slot] = row._replace(done=end)
            for slot, token in decode(entries).items():
                row = slots[slot]
                row.written.append(token)
                if len(row.written) == work[row.number][1]:
                    rows[row.number] = row.written
                    del slots[slot]
        return [rows[i] for i in range(len(work))]

    run([(prompt[:16], 2) for prompt, _ in work[: spec["slots"]]])
    begin = time.perf_counter()
    rows = run(work)
    return time.perf_counter() - begin, rows


SYSTEMS = {"llama.cpp": llama_cpp, "ctranslate2": ctranslate2}


def main() -> None:
    system, text = sys.argv[1:]
    spec = json.loads(text)
    work = [(prompt, new) for prompt, new in json.loads(Path(spec["file"]).read_text())]
    seconds, rows = SYSTEMS[system](spec, work)
    assert [len(row) for row in rows] == [new for _, new in work], "rows have other lengths than was asked for"
    print(json.dumps({"seconds": seconds, "rows": rows}))  # noqa: T201


if __name__ == "__main__":
    main()
