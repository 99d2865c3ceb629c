"""Streaming detokenization: text as soon as it is certain, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from jaxdecode.text.tokenizer import Tokenizer

__all__ = ["StreamDecoder"]


class StreamDecoder:
    """Turns ids into text piece by piece; the pieces join to exactly ``tokenizer.decode(all ids)``.

    A token may end inside a character (byte-level and byte-fallback vocabularies): its bytes wait for the rest.
    ``skip_special_tokens`` and ``continuation`` are those of ``Tokenizer.decode``.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continuation: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._strip = tokenizer.space_prefix and not continuation
        self._at_start = True
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; often "" while a character is unfinished. ValueError: id out of range."""
        data = b"".join([self._tokenizer.id_to_bytes(i, self._skip) for i in ids])
        if data and self._at_start:
            self._at_start = False
            data = data.removeprefix(b" ") if self._strip else data
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is still held back: U+FFFD for an unfinished character. The next text starts anew."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._at_start = True
        return rest
