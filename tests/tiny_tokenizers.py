"""Tokenizers of every family, with few words: the files of a Hugging Face directory, and the fields of a GGUF file.

What a family's own files have stands here: normalizer, pre-tokenizer, control tokens and where, begin-of-sequence, chat
template. The words (merges of bytes, pieces with merges) are learned by scripts/make_goldens_tokenizers.py and kept in
the goldens. Needs no jax, so that the script can run beside transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from tiny_templates import TEMPLATES

__all__ = ["FAMILIES", "Family", "Words", "files", "gguf_fields", "in_gguf"]

SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SPLITS = {
    "llama3": rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}",
    "qwen2": rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SHORT}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
BYTES = [f"<0x{b:02X}>" for b in range(256)]
MARK = "\u2581"


class Words(NamedTuple):
    """merges: of GPT-2's letters for bytes, best first. pieces: of SentencePiece, best first, then single letters."""

    merges: list[list[str]]
    pieces: list[str]


class Family(NamedTuple):
    """A tokenizer. kind: "bytes" or "pieces".

    front, back: control tokens before and after the words, by text -> letters of their rules ("l", "r": take white
    space along; "t": text that is never split, no control token; "n": found after the normalizer). about: of
    tokenizer_config.json. bos: put in front of every text. split: how byte-level text is cut first. ignore: words are
    looked up whole. prefix: how pieces get a space in front: "text" (normalizer), "first" (pre-tokenizer), "". pre: the
    name of the split in GGUF files, None where such files have none.
    """

    kind: str
    about: Mapping[str, Any]
    front: Mapping[str, str] = {}
    back: Mapping[str, str] = {}
    bos: str | None = None
    split: str = "gpt2"
    normalizer: str | None = None
    ignore: bool = False
    prefix: str = ""
    pre: str | None = None


def _plain(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "")


_CHATML = _plain("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA = _plain("<unk>", "<s>", "</s>")
_LLAMA_ABOUT = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_GEMMA_TAGS = ["\n\n", "\n\n\n", *(MARK * n for n in range(2, 9)), "<table>", "<td>", "</td>", "</table>"]
_GEMMA = Family(
    "pieces",
    {
        "tokenizer_class": "GemmaTokenizer",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    },
    _plain("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    | dict.fromkeys(["<2mass>", "[@BOS@]"], "t")
    | _plain("<start_of_turn>", "<end_of_turn>")
    | dict.fromkeys(_GEMMA_TAGS, "t"),
    bos="<bos>",
    normalizer="gemma",
)
_QWEN_ABOUT = {
    "tokenizer_class": "Qwen2Tokenizer",
    "bos_token": None,
    "add_bos_token": False,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "errors": "replace",
}
FAMILIES: dict[str, Family] = {
    "smollm2": Family(
        "bytes",
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        _CHATML,
        split="digits",
        pre="smollm",
    ),
    "llama2": Family(
        "pieces",
        {**_LLAMA_ABOUT, "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False},
        _LLAMA,
        bos="<s>",
        prefix="text",
    ),
    "llama3": Family(
        "bytes",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "clean_up_tokenization_spaces": True,
        },
        back=_plain(
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
        ),
        bos="<|begin_of_text|>",
        split="llama3",
        ignore=True,
        pre="llama-bpe",
    ),
    "mistral": Family(
        "pieces",
        {**_LLAMA_ABOUT, "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": True},
        _LLAMA,
        bos="<s>",
        prefix="text",
    ),
    "mistral v3": Family(
        "pieces",
        {**_LLAMA_ABOUT, "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False},
        _LLAMA
        | _plain("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
        | _plain("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        bos="<s>",
        prefix="first",
    ),
    "mixtral": Family(
        "pieces",
        {**_LLAMA_ABOUT, "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False},
        _LLAMA,
        bos="<s>",
        prefix="text",
    ),
    "qwen2": Family("bytes", _QWEN_ABOUT, back=_CHATML, split="qwen2", normalizer="nfc", pre="qwen2"),
    "qwen3": Family(
        "bytes",
        _QWEN_ABOUT,
        back=_CHATML
        | _plain("<|vision_start|>")
        | dict.fromkeys(
            ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"], "t"
        ),
        split="qwen2",
        normalizer="nfc",
        pre="qwen2",
    ),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": Family(
        "pieces",
        {
            **_LLAMA_ABOUT,
            "tokenizer_class": "LlamaTokenizer",
            "eos_token": "<|endoftext|>",
            "add_bos_token": False,
            "legacy": False,
        },
        _LLAMA | {"</s>": "rt"},
        dict.fromkeys(["<|assistant|>", "<|system|>", "<|end|>", "<|user|>"], "r") | {"<|endoftext|>": ""},
        prefix="text",
    ),
    "phi4": Family(
        "bytes",
        {
            "tokenizer_class": "GPT2Tokenizer",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>",
            "add_bos_token": False,
        },
        back=_plain("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>"),
        split="o200k",
        pre="gpt-4o",
    ),
    "olmo2": Family(
        "bytes",
        {
            "tokenizer_class": "GPT2Tokenizer",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>",
            "add_bos_token": False,
        },
        back=_plain("<|endoftext|>", "<|pad|>"),
        split="llama3",
        pre="dbrx",
    ),
    "gpt2": Family(
        "bytes",
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
        back={"<|endoftext|>": "n"},
        pre="gpt-2",
    ),
    "neox": Family(
        "bytes",
        {"tokenizer_class": "GPTNeoXTokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
        _plain("<|endoftext|>", "<|padding|>"),
        {" " * n: "tn" for n in (8, 7, 6, 5, 4, 3, 2)},
        normalizer="nfc",
        pre="olmo",
    ),
}


def _alphabet() -> list[str]:
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def _vocabulary(family: Family, words: Words) -> list[str]:
    """The tokens of all ids."""
    if family.kind == "bytes":
        middle = [*_alphabet(), *("".join(merge) for merge in words.merges)]
    else:
        middle = [*BYTES, *words.pieces]
    return [*family.front, *(token for token in middle if token not in family.front), *family.back]


def _merges(family: Family, words: Words) -> list[list[str]]:
    """Of pieces: the neighbours whose union is a piece, best piece first."""
    if family.kind == "bytes":
        return words.merges
    ids = {token: i for i, token in enumerate(_vocabulary(family, words))}
    runs = [token for token in family.front if set(token) == {MARK}]
    pieces = [*runs, *(piece for piece in words.pieces if piece not in family.front)]
    merges = []
    for piece in pieces:
        cuts = [(piece[:n], piece[n:]) for n in range(1, len(piece))]
        made = [list(cut) for cut in cuts if all(part in pieces for part in cut)]
        merges += sorted(made, key=lambda cut: (ids[cut[0]], ids[cut[1]]))
    return merges


def _steps(*steps: dict[str, Any]) -> dict[str, Any]:
    return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": list(steps)}


def _byte_level(**options: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True, **options}


def _normalizer(family: Family) -> dict[str, Any] | None:
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    if family.normalizer is not None:
        return {"nfc": {"type": "NFC"}, "gemma": spaces}[family.normalizer]
    if family.prefix == "text":
        return {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, spaces]}
    return None


def _pre_tokenizer(family: Family) -> dict[str, Any] | None:
    if family.kind == "pieces":
        if family.normalizer == "gemma":
            return {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        scheme = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "first", "split": False}
        return scheme if family.prefix == "first" else None
    if family.split == "gpt2":
        return _byte_level()
    if family.split == "digits":
        return _steps({"type": "Digits", "individual_digits": True}, _byte_level())
    pattern = {"Regex": SPLITS[family.split]}
    cut = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return _steps(cut, _byte_level(use_regex=False))


def _decoder(family: Family) -> dict[str, Any]:
    if family.kind == "bytes":
        return _byte_level()
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {"type": "Sequence", "decoders": [*steps, strip] if family.prefix else steps}


def _processor(family: Family, ids: Mapping[str, int]) -> dict[str, Any] | None:
    plain = _byte_level() if family.kind == "bytes" else None
    if family.bos is None:
        return plain
    front = {"SpecialToken": {"id": family.bos, "type_id": 0}}
    text = [{"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB")]
    again = {"SpecialToken": {"id": family.bos, "type_id": 1}}
    template = {
        "type": "TemplateProcessing",
        "single": [front, text[0]],
        "pair": [front, text[0], again, text[1]],
        "special_tokens": {family.bos: {"id": family.bos, "ids": [ids[family.bos]], "tokens": [family.bos]}},
    }
    return template if plain is None else {"type": "Sequence", "processors": [plain, template]}


def files(name: str, words: Words) -> dict[str, dict[str, Any]]:
    """File name -> JSON, of a directory with this family's tokenizer."""
    family = FAMILIES[name]
    ids = {token: i for i, token in enumerate(_vocabulary(family, words))}
    added = [
        {
            "id": ids[token],
            "content": token,
            "single_word": False,
            "lstrip": "l" in rules,
            "rstrip": "r" in rules,
            "normalized": "n" in rules,
            "special": "t" not in rules,
        }
        for token, rules in {**family.front, **family.back}.items()
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<unk>" if family.kind == "pieces" else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": family.kind == "pieces",
        "byte_fallback": family.kind == "pieces",
        "ignore_merges": family.ignore,
        "vocab": ids,
        "merges": _merges(family, words),
    }
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "normalizer": _normalizer(family),
        "pre_tokenizer": _pre_tokenizer(family),
        "post_processor": _processor(family, ids),
        "decoder": _decoder(family),
        "model": model,
    }
    decoder = {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in spec["added_tokens"]}
    about = {"clean_up_tokenization_spaces": False, **family.about, "added_tokens_decoder": decoder}
    if name in TEMPLATES:
        about["chat_template"] = TEMPLATES[name]
    return {"tokenizer.json": spec, "tokenizer_config.json": about}


def in_gguf(name: str) -> bool:
    """Whether a GGUF file can say the same: it knows no space in front of the first part of a text alone."""
    return FAMILIES[name].prefix != "first"


def gguf_fields(name: str, words: Words) -> dict[str, Any]:
    """The metadata of a GGUF file with this family's tokenizer, as llama.cpp's converter writes it."""
    family = FAMILIES[name]
    tokens = _vocabulary(family, words)
    ids = {token: i for i, token in enumerate(tokens)}
    rules = {**family.front, **family.back}
    types = [6 if token in BYTES else 1 for token in tokens]
    for token, letters in rules.items():
        types[ids[token]] = 2 if token == "<unk>" else 4 if "t" in letters else 3
    kept = {token: token.replace(MARK, " ") for token, letters in rules.items() if "t" in letters}
    fields: dict[str, Any] = {
        "tokens": [kept.get(token, token) for token in tokens],
        "token_type": types,
        "add_bos_token": family.bos is not None or family.about.get("add_bos_token", False),
    }
    if family.kind == "bytes":
        fields |= {"model": "gpt2", "pre": family.pre, "merges": [" ".join(merge) for merge in words.merges]}
    else:
        scores = [-float(i) for i in range(len(tokens))]
        fields |= {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": family.prefix == "text"}
    for key in ("bos", "eos", "unk"):
        if family.about.get(f"{key}_token") is not None:
            fields[f"{'unknown' if key == 'unk' else key}_token_id"] = ids[family.about[f"{key}_token"]]
    made = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    architecture = {"phi4": "phi3", "mixtral": "llama", "smollm2": "llama", "neox": "gptneox"}.get(name, name)
    made["general.architecture"] = architecture.split(" ")[0].rstrip("23") if "llama" in name else architecture
    if name in TEMPLATES:
        made["tokenizer.chat_template"] = TEMPLATES[name]
    return made
