"""Tokenizers: the reference ids of a real checkpoint, exact round trips, control tokens, begin-of-sequence."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxdecode.checkpoint.catalogue import CATALOGUE
from jaxdecode.checkpoint.gguf_file import read_gguf
from jaxdecode.text import Tokenizer
from jaxdecode.text.backend import Vocabulary, byte_alphabet, open_tokenizer
from jaxdecode.text.bytes_tokenizer import bytes_tokenizer
from jaxdecode.text.gguf_vocab import gguf_vocabulary
from jaxdecode.text.pre_tokenizers import PRE_TOKENIZERS

GOLDENS = Path(__file__).parent / "goldens"
TOKENS = json.loads((GOLDENS / "smollm2_tokens.json").read_text("utf-8"))
GREEDY = json.loads((GOLDENS / "smollm2_135m.json").read_text("utf-8"))["greedy"]


@functools.cache
def smollm2_vocabulary() -> Vocabulary:
    return gguf_vocabulary(read_gguf(CATALOGUE["smollm2-135m"].path()).fields, "smollm2")


@functools.cache
def smollm2() -> Tokenizer:
    return open_tokenizer(smollm2_vocabulary(), "smollm2")


def byte_level(**changes: Any) -> Tokenizer:
    """The tiny byte-level vocabulary, with some fields changed (None: left out)."""
    fields = tiny_gguf.FIELDS | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return open_tokenizer(gguf_vocabulary({k: v for k, v in fields.items() if v is not None}, "tiny"), "tiny")


PIECES = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁ab", "ca", "é", "▁▁", "aa"]
SCORES = [-20.0, -21.0, -22.0, -23.0, -1.0, -4.0, -3.0, -2.0, -6.0, -5.0, -24.0, -7.0, -8.0]
SP_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES]
SP_FIELDS = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": SP_TOKENS,
    "tokenizer.ggml.scores": [0.0] * 259 + SCORES,
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def sentencepiece(**changes: Any) -> Tokenizer:
    fields = SP_FIELDS | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return open_tokenizer(gguf_vocabulary(fields, "tiny"), "tiny")


def sentencepiece_oracle(text: str) -> list[int]:
    """SentencePiece's own rule: while two neighbours form a piece, merge the best pair, leftmost first."""
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    score = dict(zip(PIECES, SCORES, strict=True))
    while True:
        pairs = [(-score[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in score]
        if not pairs:
            break
        i = min(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    in_bytes = ([SP_TOKENS.index(p)] if p in score else [3 + b for b in p.encode()] for p in pieces)
    return list(itertools.chain.from_iterable(in_bytes))


@pytest.mark.parametrize("golden", TOKENS, ids=lambda golden: repr(golden["text"])[:30])
def test_reference_ids_and_exact_round_trip(golden: dict[str, Any]) -> None:
    ids = smollm2().encode(golden["text"])
    assert ids == golden["ids"]
    assert smollm2().decode(ids, skip_special_tokens=False) == golden["text"]


@pytest.mark.parametrize("golden", GREEDY, ids=lambda golden: golden["text"][:20])
def test_reference_prompts_and_outputs(golden: dict[str, Any]) -> None:
    text = golden["text"]
    ids = smollm2().chat([{"role": "user", "content": text}]) if golden["chat"] else smollm2().encode(text)
    assert ids == golden["prompt_ids"]
    assert smollm2().decode(golden["output_ids"]) == golden["output_text"]


def test_smollm2_ends_and_sizes() -> None:
    tokenizer = smollm2()
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.add_bos) == (49152, (2,), False)
    assert tokenizer.id_to_bytes(2) == b""
    assert tokenizer.id_to_bytes(2, skip_special_tokens=False) == b"<|im_end|>"


@settings(max_examples=150, deadline=None)
@given(st.text())
@example("a\u0301\u200d\u202eשלום 👩‍👩‍👧‍👦\x00\x7f\ufeff")
@example("1²٣ ½ 12\u2028\u0085 \u00a0x")
def test_smollm2_equals_the_steps_of_its_own_tokenizer_json(text: str) -> None:
    # The published file cuts digits one by one, then words by the byte-level step's own expression.
    ids = smollm2().encode(text, special=False)
    assert ids == published().encode(text, add_special_tokens=False).ids
    if unwritable().isdisjoint(text.encode()):
        assert smollm2().decode(ids) == text


@functools.cache
def published() -> Any:
    steps = tokenizers.pre_tokenizers
    backend = tokenizers.Tokenizer.from_str(smollm2_vocabulary().json)
    cut = [steps.Digits(individual_digits=True), steps.ByteLevel(add_prefix_space=False, use_regex=True)]
    backend.pre_tokenizer = steps.Sequence(cut)
    backend.encode_special_tokens = True
    return backend


@functools.cache
def unwritable() -> set[int]:
    """Bytes that SmolLM2's vocabulary has no token for: it drops them, as its own tokenizer does."""
    return set(range(256)) - {byte for token in smollm2().table for byte in token}


def test_what_smollm2_cannot_write_is_a_few_control_characters_and_unassigned_planes() -> None:
    in_utf8 = {*range(0x80), *range(0x80, 0xC0), *range(0xC2, 0xF5)}
    assert unwritable() & in_utf8 == {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
    assert smollm2().encode("a\x04b") == smollm2().encode("a") + smollm2().encode("b")


WORDS = {
    "gpt-2": ("I'll pay 12345 dollars!!\n\n ok", ["I", "'ll", " pay", " 12345", " dollars", "!!", "\n\n", " ok"]),
    "smollm": ("I'll pay 123 dollars!", ["I", "'ll", " pay", " ", "1", "2", "3", " dollars", "!"]),
    "llama-bpe": (
        "I'LL pay 12345 dollars!!\n\n ok  x",
        ["I", "'LL", " pay", " ", "123", "45", " dollars", "!!\n\n", " ok", " ", " x"],
    ),
    "qwen2": ("we'Ve 123\r\n\t(ok)", ["we", "'Ve", " ", "1", "2", "3", "\r\n", "\t", "(ok", ")"]),
    "default": ("a+b (c) 12345", ["a", "+", "b", " ", "(", "c", ")", " ", "123", "45"]),
    "tekken": ("HelloWorld isn't 42/\n", ["Hello", "World", " isn", "'t", " ", "4", "2", "/\n"]),
    "falcon": ("a`b 12345", ["a", "`", "b", " ", "123", "45"]),
    "deepseek-coder": ("def f1(x):\n 中文", ["def", " f", "1", "(", "x", "):", "\n", " ", "中文"]),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_of_each_pre_tokenizer(name: str) -> None:
    text, expected = WORDS[name]
    fields = tiny_gguf.FIELDS | {"tokenizer.ggml.pre": name}
    backend = tokenizers.Tokenizer.from_str(gguf_vocabulary(fields, "tiny").json)
    alphabet = byte_alphabet()
    words = [bytes(alphabet[c] for c in word) for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [word.decode() for word in words] == expected


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_round_trips(name: str) -> None:
    tokenizer = byte_level(pre=name)
    for text in [
        "the Land and  the\tsea\r\n\r\n 123 ½ don't I'LL",
        "日本語 👩‍👧 naïve",
        " ",
        "\n",
        "x" * 300,
        "`+=|<>^",
    ]:
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


def test_merges_apply_in_order_and_a_missing_pre_tokenizer_means_default() -> None:
    tokenizer = byte_level(pre=None)
    assert [tokenizer.id_to_bytes(i) for i in tokenizer.encode("and the then")] == [b"and", b" the", b" the", b"n"]


def test_whole_words_of_the_vocabulary_need_no_merges_only_where_the_family_says_so() -> None:
    merges = ["t h", "a n", "an d", "Ġ and"]  # no way to "the"
    assert len(byte_level(pre="llama-bpe", merges=merges, add_bos_token=False).encode("the")) == 1
    assert len(byte_level(pre="gpt-2", merges=merges).encode("the")) == 2


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="aaabbcc é\n日", max_size=30))
def test_sentencepiece_ids_equal_its_rule(text: str) -> None:
    tokenizer = sentencepiece(add_bos_token=False)
    ids = tokenizer.encode(text, special=False)
    assert ids == sentencepiece_oracle(text)
    assert tokenizer.decode(ids) == text


def test_a_sentencepiece_token_without_end_is_refused_at_once() -> None:
    tokens = [*SP_TOKENS[:-1], "a" * 1_000_000]
    with pytest.raises(ValueError, match="tokens: expected pieces of at most 256 characters"):
        sentencepiece(tokens=tokens)


def test_sentencepiece_space_prefix() -> None:
    tokenizer = sentencepiece(add_bos_token=False)
    assert [SP_TOKENS[i] for i in tokenizer.encode("a ab")] == ["▁a", "▁ab"]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"
    assert tokenizer.decode(tokenizer.encode("a"), continuation=True) == " a"
    bare = sentencepiece(add_bos_token=False, add_space_prefix=False)
    assert [SP_TOKENS[i] for i in bare.encode("ab a")] == ["ab", "▁a"]
    assert bare.decode(bare.encode(" a")) == " a"


@pytest.mark.parametrize("make", [byte_level, sentencepiece, bytes_tokenizer, smollm2])
def test_control_tokens_are_ids_or_plain_text(make: Any) -> None:
    tokenizer = make()
    assert tokenizer.controls
    for control, i in tokenizer.controls.items():
        parsed = tokenizer.encode(f"x{control}{control}y", bos=False)
        plain = tokenizer.encode(f"x{control}y", special=False, bos=False)
        assert [j for j in parsed if j in tokenizer.controls.values()] == [i, i]
        assert not set(plain) & set(tokenizer.controls.values())
        assert tokenizer.decode(plain) == f"x{control}y"
        assert control not in tokenizer.decode(parsed)


def test_the_longest_control_token_wins() -> None:
    tokenizer = Tokenizer([b"a", b"<x>", b"<x>>"], lambda text: [0] * len(text), controls={"<x>": 1, "<x>>": 2})
    assert tokenizer.encode("<x>><x>a") == [2, 1, 0]


def test_user_defined_tokens_are_text_that_is_never_split() -> None:
    tokens = [*tiny_gguf.TOKENS, "  two words"]
    types = [*tiny_gguf.FIELDS["tokenizer.ggml.token_type"], 4]
    tokenizer = byte_level(tokens=tokens, token_type=types)
    assert tokenizer.encode("x  two wordsx", special=False)[1:-1] == [len(tokens) - 1]
    assert tokenizer.decode([len(tokens) - 1]) == "  two words"


@pytest.mark.parametrize("special", [True, False])
def test_begin_of_sequence_only_if_the_file_asks_and_never_twice(special: bool) -> None:
    plain = byte_level()
    assert plain.encode("the", special)[0] != 1
    assert plain.encode("the", special, bos=True)[0] == 1
    asks = byte_level(add_bos_token=True)
    assert asks.encode("the", special).count(1) == 1
    assert asks.encode("the", special, bos=False).count(1) == 0
    assert asks.encode("", special) == [1]
    assert asks.encode("<|im_start|>the").count(1) == 1
    assert asks.encode("<|im_start|>the", special=False).count(1) == 1
    assert asks.chat([{"role": "user", "content": "the"}]).count(1) == 2  # the template's own two, none in front


def test_defaults_of_a_file_that_says_nothing_of_begin_of_sequence() -> None:
    assert byte_level(add_bos_token=None).add_bos is False
    assert byte_level(pre="llama-bpe", add_bos_token=None).add_bos is True
    assert byte_level(pre="llama-bpe", add_bos_token=None, bos_token_id=None).add_bos is False
    assert sentencepiece().encode("a")[0] == 1


def test_end_ids_are_the_declared_ones_and_known_ends_of_a_turn() -> None:
    assert byte_level().eos_ids == (2,)
    assert byte_level(eos_token_id=0, eot_token_id=1).eos_ids == (0, 1, 2)
    assert byte_level(eos_token_id=None).eos_ids == (2,)
    assert sentencepiece().eos_ids == (2,)


def test_asking_for_begin_of_sequence_without_an_id_is_refused() -> None:
    with pytest.raises(ValueError, match="add_bos"):
        byte_level(bos_token_id=None, add_bos_token=True)
    with pytest.raises(ValueError, match="begin-of-sequence"):
        bytes_tokenizer().encode("x", bos=True)


@pytest.mark.parametrize("ids", [[-1], [257], [0, 10**9]])
def test_ids_out_of_range_are_refused(ids: Sequence[int]) -> None:
    with pytest.raises(ValueError, match=r"token id: expected an id in \[0, 257\)"):
        bytes_tokenizer().decode(ids)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(ValueError, match="lone surrogate at position 1"):
        smollm2().encode("a\ud800")


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_bytes_tokenizer_is_utf8(text: str) -> None:
    tokenizer = bytes_tokenizer()
    assert tokenizer.encode(text, special=False) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxdecode\[text\]'"):
        gguf_vocabulary(tiny_gguf.FIELDS, "tiny")
