"""Make tests/goldens/tokenizers.json: what transformers makes of texts and chats with the tokenizers of the families.

The tokenizers are those of tests/tiny_tokenizers.py, with words that are learned here. Run by hand, in an environment
with transformers (not needed by the tests):

    python scripts/make_goldens_tokenizers.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
LETTERS = "éüñßçøабвгдеиклморстухцшя中国日本語の한국어ا ل😀🎉’“”—…"


def corpus() -> list[str]:
    lines = (ROOT / "tests" / "texts" / "time_machine.txt").read_text("utf-8").splitlines()
    lines += ["def f(x):\n    return x\n\n\n\tif x:\n        print('ok')  # done\n"] * 20
    return [*lines, *(" ".join(LETTERS) for _ in range(3))]


def learned(lines: list[str]) -> dict[str, Any]:
    """Merges of bytes, within words; and pieces, which may hold a space in front, as SentencePiece learns them."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    options: dict[str, Any] = {"show_progress": False}
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=256 + 260, initial_alphabet=alphabet, **options))
    merges = [list(merge) for merge in json.loads(raw.to_str())["model"]["merges"]]
    words = Tokenizer(models.BPE())
    words.normalizer = normalizers.Replace(" ", "\u2581")
    words.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581*[^\u2581\\s]+|\u2581+|\\s+"), "isolated")
    words.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=420, **options))
    spec = json.loads(words.to_str())["model"]
    made = ["".join(merge) for merge in spec["merges"]]
    single = [piece for piece in spec["vocab"] if len(piece) == 1 and piece != "\n"]
    return {"merges": merges, "pieces": [*dict.fromkeys([*made, *single])]}


def answer(call: Any) -> Any:
    """What a call gives, or the message of its template's refusal."""
    from jinja2.exceptions import TemplateError

    try:
        return call()
    except (TemplateError, TypeError) as error:
        return {"refused": str(error)}


def chats(tokenizer: Any, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, case in cases.items():
        made = answer(lambda case=case: tokenizer.apply_chat_template(**case, tokenize=False))
        found[name] = made
        if isinstance(made, str):
            ids = tokenizer.apply_chat_template(**case, tokenize=True, return_dict=False)
            assert ids == tokenizer(made, add_special_tokens=False)["input_ids"]
            found[name] = {"text": made, "ids": ids}
    return found


def one(name: str, words: Any) -> dict[str, Any]:
    import tiny_tokenizers
    import tokenizer_texts
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        for file, value in tiny_tokenizers.files(name, words).items():
            (Path(folder) / file).write_text(json.dumps(value), "utf-8")
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)  # as tokenizer.json says
        named = transformers.AutoTokenizer.from_pretrained(folder)  # of the class that the config names
    cases = []
    for text in tokenizer_texts.TEXTS:
        ids = tokenizer.encode(text)
        if ids != named.encode(text):  # version 5 makes some anew, of their class's own parts
            sys.stderr.write(f"{name}: {text!r}: {ids}, but {type(named).__name__}: {named.encode(text)}\n")
        decoded = [tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True)]
        cases.append([ids, *decoded])
    found = {"cases": cases}
    if tokenizer.chat_template is not None:
        found["chats"] = chats(tokenizer, tokenizer_texts.CHATS)
    return found


def main() -> None:
    import tiny_tokenizers
    import transformers

    words = learned(corpus())
    found = {name: one(name, tiny_tokenizers.Words(**words)) for name in tiny_tokenizers.FAMILIES}
    versions = {"transformers": transformers.__version__}
    text = json.dumps(
        {"made_by": versions, "words": words, "families": found}, ensure_ascii=False, separators=(",", ":")
    )
    path = ROOT / "tests" / "goldens" / "tokenizers.json"
    path.write_text(text.replace('},"', '},\n"') + "\n", "utf-8")
    sys.stdout.write(f"{path.stat().st_size} bytes\n")


main()
