"""Streaming detokenization: the pieces join to the whole, and none ends inside a character."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import byte_level, sentencepiece, smollm2

from jaxdecode.text import StreamDecoder, Tokenizer
from jaxdecode.text.bytes_tokenizer import bytes_tokenizer

MAKERS: list[Callable[[], Tokenizer]] = [smollm2, byte_level, sentencepiece, bytes_tokenizer]
SAMPLES = [
    "plain words, nothing else",
    "日本語のテキストと中文、한국어 텍스트",
    "👩‍👩‍👧‍👦🏳️‍🌈👍🏽 and flags 🇫🇷🇯🇵",
    "a\u0301e\u0308 combining, שלום עולם, नमस्ते",
    "  leading and trailing  \n\n",
    "\x00\x01\x7f\ufeff\uffff\U0010ffff",
]


@functools.cache
def tokenizer_of(i: int) -> Tokenizer:
    return MAKERS[i]()


def splits(ids: list[int], rng: random.Random) -> Iterator[list[int]]:
    cuts = sorted(rng.choices(range(len(ids) + 1), k=rng.randrange(6)))
    for start, end in itertools.pairwise([0, *cuts, len(ids)]):
        yield ids[start:end]


def characters() -> st.SearchStrategy[str]:
    return st.one_of(st.text(), st.sampled_from(SAMPLES), st.text(alphabet="日本👩\u200d👧é ab"))


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(range(len(MAKERS))), characters(), st.randoms(use_true_random=False))
def test_pieces_of_text_join_to_it_and_are_whole_characters(which: int, text: str, rng: random.Random) -> None:
    tokenizer = tokenizer_of(which)
    bytes_known = {byte for token in tokenizer.table for byte in token}
    whole = "".join(char for char in text if bytes_known.issuperset(char.encode()))
    ids = tokenizer.encode(whole, special=False)
    decoder = StreamDecoder(tokenizer)
    joined = ""
    for part in splits(ids, rng):
        joined += decoder.push(part)
        assert whole.startswith(joined)  # so no piece holds half a character, or a stand-in for one
    assert decoder.flush() == ""
    assert joined == whole == tokenizer.decode(ids)


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(range(len(MAKERS))), st.data(), st.booleans(), st.booleans())
def test_pieces_of_any_ids_join_to_their_text(which: int, data: st.DataObject, skip: bool, continuation: bool) -> None:
    tokenizer = tokenizer_of(which)
    ids = data.draw(
        st.lists(
            st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 300).map(lambda i: i % tokenizer.vocab_size),
            max_size=20,
        )
    )
    decoder = StreamDecoder(tokenizer, skip_special_tokens=skip, continuation=continuation)
    joined = "".join([*(decoder.push([i]) for i in ids), decoder.flush()])
    assert joined == tokenizer.decode(ids, skip, continuation=continuation)


def test_every_split_of_2000_random_texts() -> None:
    rng = random.Random(3)
    for n in range(2000):
        tokenizer = tokenizer_of(1 + n % 3)
        text = "".join(rng.choices("ab é日👩\u0301", k=rng.randrange(1, 5)))
        ids = tokenizer.encode(text, special=False, bos=False)[:6]
        whole = tokenizer.decode(ids)
        for count in range(len(ids)):
            for cuts in itertools.combinations(range(1, len(ids)), count):
                decoder, joined = StreamDecoder(tokenizer), ""
                for a, b in itertools.pairwise([0, *cuts, len(ids)]):
                    joined += decoder.push(ids[a:b])
                    assert text.startswith(joined), (text, cuts)  # never half a character
                assert joined + decoder.flush() == whole, (text, cuts)


@pytest.mark.parametrize("which", range(len(MAKERS)))
@pytest.mark.parametrize("text", SAMPLES)
def test_samples_token_by_token(which: int, text: str) -> None:
    tokenizer = tokenizer_of(which)
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push([i]) for i in tokenizer.encode(text, special=False)]
    assert "".join(pieces) == text


def test_half_a_character_waits_and_flush_tells_it() -> None:
    decoder = StreamDecoder(bytes_tokenizer())
    data = "é日👩".encode()
    assert [decoder.push([b]) for b in data] == ["", "é", "", "", "日", "", "", "", "👩"]
    assert decoder.push(data[:1]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(b"ab") == "ab"


@pytest.mark.parametrize("skip", [True, False])
def test_the_space_prefix_goes_once_even_if_it_comes_alone(skip: bool) -> None:
    tokenizer = sentencepiece(add_bos_token=False)
    alone, word = tokenizer.encode("é")[:1], tokenizer.encode("a a")
    assert tokenizer.id_to_bytes(alone[0]) == b" "
    decoder = StreamDecoder(tokenizer, skip_special_tokens=skip)
    assert [decoder.push([i]) for i in [*alone, *word]] == ["", " a", " a"]
    assert StreamDecoder(tokenizer, continuation=True).push(word) == " a a"


def test_a_bad_id_changes_nothing() -> None:
    decoder = StreamDecoder(bytes_tokenizer())
    decoder.push("日".encode()[:2])
    with pytest.raises(ValueError, match="expected an id"):
        decoder.push([65, 999])
    assert decoder.push("日".encode()[2:]) == "日"
