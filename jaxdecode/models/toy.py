"""A tiny table model over bytes, so that every command and every test runs without a download.

The next byte's law depends on the last byte alone: counts of neighbouring bytes in the text below, smoothed. What it
writes looks like words, and ends.
"""

from __future__ import annotations

import dataclasses

import numpy as np

__all__ = ["END", "ToyConfig", "logits"]

END = 256  # the id after the 256 bytes: end of text

_TEXT = """\
a toy can write few words.
we want to write more words.
who would hoard cards, or swords?
one bird heard the words.
work on, o lord of worlds.
a wizard with a toad swaps swords.
why not put it in two words.
what a world of birds.
the end of the book has no words.
"""

_BACKOFF = 0.05  # weight, in counts, of the law of single bytes in each row


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    """Size of the toy: 256 bytes and the end token; the model itself would take any context."""

    vocab_size: int = 257
    context_length: int = 65536


def logits() -> np.ndarray:
    """The table [257, 257], float32: row = last id, entry = log probability of the next one; always the same."""
    size = ToyConfig().vocab_size
    pairs = np.zeros((size, size))
    for line in _TEXT.splitlines():
        ids = [END, *line.encode(), END]
        np.add.at(pairs, (ids[:-1], ids[1:]), 1.0)
    single = pairs.sum(0) + 1e-3
    single /= single.sum()
    law = (pairs + _BACKOFF * single) / (pairs.sum(1, keepdims=True) + _BACKOFF)
    return np.log(law).astype(np.float32)
