"""Make tests/goldens/sentencepiece.json: small vocabularies, and what SentencePiece itself makes of texts.

Run by hand, in an environment with sentencepiece (not needed by the tests):

    python scripts/make_goldens_sentencepiece.py
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as pb

ROOT = Path(__file__).parents[1]
RULES = "FB01\t66 69\nFF21\t41\n00B2\t32\n"  # normalization: ligature fi, full-width A, superscript two
MODELS: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "bpe without prefix": {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    },
    "unigram": {"model_type": "unigram", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "unigram with rules": {"model_type": "unigram", "remove_extra_whitespaces": True},
    "unigram without bytes": {
        "model_type": "unigram",
        "normalization_rule_name": "identity",
        "byte_fallback": False,
        "remove_extra_whitespaces": False,
    },
}
PARTS = ["the ", "cat", "s ", "sat ", "on", " ", "  ", "mat", "é", "日", "👩", "ﬁ", "Ａ", "²", "thin", "\n"]
PARTS += ["<0x41>", "[user]", "</s>"]
WORDS = "the cat sat on a mat and then thin cats that hat in the inn sing a song of things anon"


def corpus() -> list[str]:
    rng = random.Random(1)
    return [" ".join(rng.choices(WORDS.split(), k=rng.randrange(3, 9))) for _ in range(400)]


def texts() -> list[str]:
    rng = random.Random(2)
    return ["", " ", "a", *("".join(rng.choices(PARTS, k=rng.randrange(1, 8))) for _ in range(60))]


def trained(folder: Path, options: dict[str, Any]) -> Path:
    (folder / "rules.tsv").write_text(RULES)
    lines = folder / "corpus.txt"
    lines.write_text("\n".join(corpus()))
    rules = {} if "normalization_rule_name" in options else {"normalization_rule_tsv": str(folder / "rules.tsv")}
    fallback = options.get("byte_fallback", True)
    spm.SentencePieceTrainer.train(
        input=str(lines),
        model_prefix=str(folder / "m"),
        vocab_size=360 if fallback else 100,
        user_defined_symbols=["[user]"],
        hard_vocab_limit=False,
        minloglevel=2,
        **{"byte_fallback": fallback, **options, **rules},
    )
    return folder / "m.model"


def main() -> None:
    found = {}
    for name, options in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = trained(Path(folder), options)
            model = pb.ModelProto.FromString(path.read_bytes())
            processor = spm.SentencePieceProcessor(model_file=str(path))
        found[name] = {
            "pieces": [piece.piece for piece in model.pieces],
            "scores": [piece.score for piece in model.pieces],
            "types": [piece.type for piece in model.pieces],
            "charsmap": list(model.normalizer_spec.precompiled_charsmap),
            "add_space_prefix": model.normalizer_spec.add_dummy_prefix,
            "remove_extra_whitespaces": model.normalizer_spec.remove_extra_whitespaces,
            "cases": [[text, processor.encode(text), processor.decode(processor.encode(text))] for text in texts()],
        }
    text = json.dumps({"made_by": {"sentencepiece": spm.__version__}, "models": found}, ensure_ascii=False)
    (ROOT / "tests" / "goldens" / "sentencepiece.json").write_text(text + "\n")


main()
