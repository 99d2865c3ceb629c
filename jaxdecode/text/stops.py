"""Stop strings: where a text ends early, found while it is written."""

from __future__ import annotations

from collections.abc import Sequence

from jaxdecode.checks import require

__all__ = ["StopStrings"]


class StopStrings:
    """Passes text on, piece by piece, up to the first stop string; the stop and what follows it never come out.

    Text is held back only while it may still become a stop, and how it is cut into pieces makes no difference. Of
    several stops the one that is complete first counts, as if the text came letter by letter; of those that are
    complete at the same letter, the longest.

    >>> stops = StopStrings(["###", "User:"])
    >>> stops.push("Fine. #"), stops.push("1 is it.\\n##"), stops.push("# more"), stops.push("!")
    (('Fine. ', False), ('#1 is it.\\n', False), ('', True), ('', True))
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """ValueError unless ``stops`` is a sequence of texts, none of them empty."""
        listed = isinstance(stops, Sequence) and not isinstance(stops, str)
        good = listed and all(isinstance(stop, str) and stop for stop in stops)
        require(good, "stop", "a list of texts that are not empty", repr(stops))
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self._stopped = False

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that is certain after this piece, and whether a stop was found (now or before)."""
        if self._stopped:
            return "", True
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._stopped, self._held = True, ""
            return text[: min(found)[1]], True
        certain = len(text) - max((_open(text, stop) for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain], False

    def flush(self) -> str:
        """What is still held back, because no more text comes. The next text starts anew."""
        rest, self._held, self._stopped = self._held, "", False
        return rest


def _open(text: str, stop: str) -> int:
    """How many letters at the end of ``text`` are the beginning of ``stop``."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
