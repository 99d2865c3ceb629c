"""Stop strings: trimmed at the first one, whatever the pieces; nothing held back without need."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import byte_level, sentencepiece, smollm2

from jaxdecode.text import StopStrings, StreamDecoder, Tokenizer
from jaxdecode.text.bytes_tokenizer import bytes_tokenizer


def trimmed(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The rule, letter by letter: cut before the longest stop that the text ends with, as soon as there is one."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - len(max(ending, key=len))], True
    return text, False


def every_split(n: int) -> Iterator[list[tuple[int, int]]]:
    """All ways to cut 0..n into consecutive spans."""
    for count in range(n):
        for cuts in itertools.combinations(range(1, n), count):
            yield list(itertools.pairwise([0, *cuts, n]))


def streamed(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, bool]:
    """What comes out for these pieces; checks that what is held back could still become a stop."""
    machine = StopStrings(stops)
    given_text, out, stopped = "", "", False
    for piece in pieces:
        text, stopped = machine.push(piece)
        out += text
        given_text += piece
        if not stopped:
            held = given_text[len(out) :]
            assert given_text.startswith(out)
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
    rest = machine.flush()
    assert not (stopped and rest)
    return out + rest, stopped


def test_every_split_of_2000_random_texts_gives_the_same_text() -> None:
    rng = random.Random(7)
    for _ in range(2000):
        text = "".join(rng.choices("ab#日é", k=rng.randrange(1, 8)))
        stops = ["".join(rng.choices("ab#日é", k=rng.randrange(1, 4))) for _ in range(rng.randrange(1, 4))]
        expected = trimmed(text, stops)
        for spans in every_split(len(text)):
            assert streamed([text[a:b] for a, b in spans], stops) == expected, (text, stops, spans)


LETTERS = "aabc\n。日👩"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(alphabet=LETTERS, max_size=40), st.lists(st.text(alphabet=LETTERS, min_size=1), max_size=4), st.data())
def test_any_text_and_stops(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert streamed(pieces, stops) == trimmed(text, stops)


@pytest.mark.parametrize(
    ("stops", "kept"), [(["abc", "b"], "xa"), (["ab", "b"], "x"), (["bcd", "abcde"], "xa"), (["cd", "bc"], "xa")]
)
def test_the_stop_that_is_complete_first_counts_and_of_equals_the_longest(stops: list[str], kept: str) -> None:
    for pieces in (["xabcdef"], list("xabcdef"), ["xab", "cdef"]):
        assert streamed(pieces, stops) == (kept, True)


@pytest.mark.parametrize("make", [smollm2, byte_level, sentencepiece, bytes_tokenizer])
@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["e"], "on"),
        ("答えは四。終わり", ["。"], "答えは四"),
        ("答えは四。終わり", ["は四。終", "四。"], "答えは"),
        ("family 👩‍👩‍👧‍👦 here", ["‍👧"], "family 👩‍👩"),
        ("naïve\n\nUser: hi", ["\nUser:", "\n\n"], "naïve"),
        ("no stop at al", ["all"], "no stop at al"),
    ],
)
def test_across_the_borders_of_tokens_and_bytes(make: object, text: str, stops: list[str], kept: str) -> None:
    tokenizer: Tokenizer = make()  # type: ignore[operator]
    ids = tokenizer.encode(text, special=False, bos=False)
    decoder, machine = StreamDecoder(tokenizer), StopStrings(stops)
    out = []
    for i in ids:
        piece, stopped = machine.push(decoder.push([i]))
        out.append(piece)
        if stopped:
            break
    else:
        piece, stopped = machine.push(decoder.flush())
        out += [piece, machine.flush()]
    assert "".join(out) == kept
    assert stopped == (kept != text)


def test_only_what_may_become_a_stop_waits() -> None:
    machine = StopStrings(["<end>", "zz"])
    pieces = ["a", "<", "e", "x<en", "d", "y<e", "z", "yz"]
    assert [machine.push(piece)[0] for piece in pieces] == ["a", "", "", "<ex", "", "<endy", "<e", "zy"]
    assert machine.flush() == "z"


def test_without_stops_all_passes_at_once() -> None:
    machine = StopStrings([])
    assert machine.push("any") == ("any", False)
    assert machine.flush() == ""


def test_after_a_stop_nothing_comes_and_flush_starts_anew() -> None:
    machine = StopStrings(["x"])
    assert machine.push("axb") == ("a", True)
    assert machine.push("c") == ("", True)
    assert machine.flush() == ""
    assert machine.push("c") == ("c", False)


@pytest.mark.parametrize("stops", ["text", [""], ["a", ""], [1], None, [b"a"]])
def test_bad_stops(stops: object) -> None:
    with pytest.raises(ValueError, match="stop: expected a list of texts that are not empty"):
        StopStrings(stops)  # type: ignore[arg-type]
