#!/usr/bin/env python3
"""A batch file on a Ray cluster: each worker loads the model once and answers blocks of lines.

    ray_batch.py MODEL IN.jsonl OUT_FOLDER [WORKERS]

Needs `pip install "ray[data]"`. The lines and the results are those of `jaxdecode batch`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jaxdecode.cli.batch import Translator
from jaxdecode.cli.batch_lines import BadLine, Line, parse
from jaxdecode.cli.batch_records import answered, failed
from jaxdecode.cli.choices import Request
from jaxdecode.cli.terminal import Progress

BLOCK = 256  # lines that a worker takes at a time: many more than slots, so that these stay full


class Worker:
    """What Ray keeps alive on each worker. Called with a block of lines, it returns their results."""

    def __init__(self, model: str, settings: dict[str, Any], seed: int = 0) -> None:
        import jaxdecode
        from jaxdecode.engine import Engine

        self.loaded = jaxdecode.load(model)
        self.engine = Engine(self.loaded.model, self.loaded.params)
        self.translate = Translator(self.loaded, Progress())
        plain = dict.fromkeys(("quantize", "system", "num_samples", "best_of", "record"))
        flags = dict.fromkeys(("chat", "logprobs", "stream", "compile_cache"), False)
        fixed = {"dtype": "float32", "top_logprobs": 0, "stops": (), "constraints": {}, "json": True}
        self.defaults = Request(model=model, seed=seed, settings=settings, **plain, **flags, **fixed)

    def __call__(self, block: dict[str, Any]) -> dict[str, list[str]]:
        import json

        records: dict[int, dict[str, Any]] = {}
        requests = []
        for number, text in zip(block["number"].tolist(), block["text"].tolist(), strict=True):
            try:
                line = parse(text.encode(), number, self.defaults)
                requests.append(self.translate(line))
            except BadLine as bad:
                records[number] = failed(bad)
            except ValueError as error:
                records[number] = failed(BadLine(number, line.id, line.url is not None, str(error)))
        for result in self.engine.serve(requests):
            done: Line = result.request.id
            if result.out is None:
                records[done.number] = failed(BadLine(done.number, done.id, done.url is not None, str(result.error)))
            else:
                prompt_tokens = len(result.request.prompt)
                records[done.number] = answered(self.loaded.tokenizer, done, prompt_tokens, result.out)
        ordered = sorted(records)
        return {"number": ordered, "result": [json.dumps(records[n], ensure_ascii=False) for n in ordered]}


def dataset(source: Path, model: str, settings: dict[str, Any], workers: int) -> Any:
    """The results of a file of lines, as a Ray data set of ``number`` and ``result``."""
    import ray.data

    texts = source.read_text("utf-8").splitlines()
    lines = [{"number": n, "text": text} for n, text in enumerate(texts, 1) if text.strip()]
    blocks = ray.data.from_items(lines, override_num_blocks=-(-len(lines) // BLOCK))
    arguments = {"model": model, "settings": settings}
    return blocks.map_batches(Worker, fn_constructor_kwargs=arguments, batch_size=BLOCK, concurrency=workers)


def main() -> None:
    model, source, folder, *rest = sys.argv[1:]
    settings = {"max_new_tokens": 128, "temperature": 0.0, "beams": None, "without_replacement": False}
    results = dataset(Path(source), model, settings, int(rest[0]) if rest else 1)
    results.sort("number").write_json(folder)


if __name__ == "__main__":
    main()
