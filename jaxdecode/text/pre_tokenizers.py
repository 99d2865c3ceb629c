"""How byte-level vocabularies cut text into words, by the names that GGUF files use.

The regular expressions behind the names are not in the files; they are those that the models' own ``tokenizer.json``
files and llama.cpp use.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PRE_TOKENIZERS", "PreTokenizer"]

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
_O200K = rf"{_CASED % (_SHORT + '?', _SHORT + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_ENDS}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


class PreTokenizer(NamedTuple):
    """How a family of byte-level vocabularies cuts text into words.

    splits: regular expressions, applied one after the other to what the one before left; matches and gaps are words.
    whole_words: a word that is in the vocabulary is taken as it is, before any merge. add_bos: what holds if the file
    does not say whether a text begins with begin-of-sequence. composed: letters and their accents become one character
    first (NFC), as the models' own tokenizers do; llama.cpp does not.
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    composed: bool = False


_GPT2_WORDS = PreTokenizer((_GPT2,))
_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_CL100K % "{1,3}",), whole_words=True, add_bos=True)
_GPT4 = PreTokenizer((_CL100K % "{1,3}",))
_QWEN2 = PreTokenizer((_CL100K % "",))
_GPT4O = PreTokenizer((_O200K,))
_DEEPSEEK = PreTokenizer((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "olmo": PreTokenizer((_GPT2,), composed=True),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "jais", "trillion", "roberta-bpe"), _GPT2_WORDS),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_THEN_GPT2
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _GPT4),
    "qwen2": PreTokenizer(_QWEN2.splits, composed=True),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}
