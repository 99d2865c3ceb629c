"""One row's text while it grows: pieces that are certain, cut at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from jaxdecode.base import Finish
from jaxdecode.cli.choices import CANCELLED
from jaxdecode.text.stops import StopStrings
from jaxdecode.text.stream import StreamDecoder
from jaxdecode.text.tokenizer import Tokenizer

__all__ = ["RowText"]


class RowText:
    """Text and tokens of one row. ``stops``: texts that end it; they are no part of the text, their tokens are kept."""

    def __init__(self, tokenizer: Tokenizer, *, stops: Sequence[str] = (), continuation: bool = False) -> None:
        self.tokens: list[int] = []
        self.stopped = False
        self._pieces: list[str] = []
        self._decoder = StreamDecoder(tokenizer, continuation=continuation)
        self._stops = StopStrings(stops)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids make certain; nothing more after a stop, whose token is the last one kept."""
        pieces = []
        for token in ids:
            if self.stopped:
                break
            self.tokens.append(token)
            pieces.append(self._take(self._decoder.push([token])))
        return "".join(pieces)

    def flush(self) -> str:
        """What was held back, at the end."""
        if self.stopped:
            return ""
        piece = self._take(self._decoder.flush())
        return piece if self.stopped else piece + self._keep(self._stops.flush())

    @property
    def text(self) -> str:
        """All pieces so far."""
        return "".join(self._pieces)

    def finish(self, code: int) -> str:
        """The name of the row's ``Finish`` code, or "stop" after a stop string, or "cancelled" if it could go on."""
        if self.stopped:
            return Finish.STOP.name.lower()
        return CANCELLED if code == Finish.RUNNING else Finish(code).name.lower()

    def _take(self, piece: str) -> str:
        text, self.stopped = self._stops.push(piece)
        return self._keep(text)

    def _keep(self, text: str) -> str:
        self._pieces.append(text)
        return text
