"""Whole vocabularies: ids and texts of this library against those of transformers, for directories and GGUF files.

Run by hand, first where transformers is installed, then where this library is:

    python scripts/check_tokenizers.py ask ANSWERS.json FOLDER_OR_GGUF...
    python scripts/check_tokenizers.py compare ANSWERS.json

The texts are those of the tests, two books, and random characters of all kinds.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
KINDS = [(0, 0x80), (0x80, 0x250), (0x300, 0x700), (0x900, 0xE80), (0x2000, 0x2100), (0x3040, 0x3200), (0x4E00, 0x9FFF)]
KINDS += [(0xAC00, 0xD7A4), (0x1F300, 0x1FA00), (0x10000, 0x10400), (0xFE00, 0xFFF0)]


def texts() -> Iterator[str]:
    from tokenizer_texts import TEXTS

    yield from TEXTS
    for book in sorted((ROOT / "tests" / "texts").glob("*.txt")):
        yield from (line for line in book.read_text("utf-8").splitlines()[:400] if line)
    rng = random.Random(0)
    for _ in range(600):
        kinds = rng.choices(KINDS, k=rng.randrange(1, 4))
        letters = [rng.choice(" \n\t.,'") if rng.random() < 0.25 else _letter(rng, kinds) for _ in range(40)]
        yield "".join(letters)


def _letter(rng: random.Random, kinds: list[tuple[int, int]]) -> str:
    return chr(rng.randrange(*rng.choice(kinds)))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def ask(answers: Path, sources: list[str]) -> None:
    import transformers

    found = {}
    for source in sources:
        path = Path(source).absolute()
        folder, more = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **more)
        cases = []
        for text in texts():
            ids = tokenizer.encode(text)
            decoded = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            cases.append([_digest(ids), _digest(decoded)])
        found[str(path)] = cases
        sys.stdout.write(f"{path}: {type(tokenizer).__name__}, {len(tokenizer)} tokens\n")
    answers.write_text(json.dumps(found))


def compare(answers: Path) -> None:
    from jaxdecode.checkpoint.gguf_file import read_gguf
    from jaxdecode.checkpoint.hf_tokenizer import hf_vocabulary
    from jaxdecode.text.backend import open_tokenizer
    from jaxdecode.text.gguf_vocab import gguf_vocabulary

    for source, cases in json.loads(answers.read_text()).items():
        path = Path(source)
        if path.suffix == ".gguf":
            vocabulary = gguf_vocabulary(read_gguf(path).fields, source)
        else:
            vocabulary = hf_vocabulary(path, {}, {}, 1 << 19)
        tokenizer = open_tokenizer(vocabulary, source)
        wrong = [0, 0]
        for text, (ids, decoded) in zip(texts(), cases, strict=True):
            mine = tokenizer.encode(text)
            bad = [_digest(mine) != ids, _digest(tokenizer.decode(mine)) != decoded]
            if any(bad) and sum(wrong) < 6:
                sys.stdout.write(f"  {text!r}: {mine}, {tokenizer.decode(mine)!r}\n")
            wrong = [a + b for a, b in zip(wrong, bad, strict=True)]
        sys.stdout.write(f"{source}: of {len(cases)} texts {wrong[0]} with other ids, {wrong[1]} with another text\n")


if sys.argv[1] == "ask":
    ask(Path(sys.argv[2]), sys.argv[3:])
else:
    compare(Path(sys.argv[2]))
