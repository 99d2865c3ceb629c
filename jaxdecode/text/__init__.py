"""Text: tokenizers, chat templates, streaming detokenization and stop strings."""

from __future__ import annotations

from jaxdecode.text.stops import StopStrings
from jaxdecode.text.stream import StreamDecoder
from jaxdecode.text.tokenizer import Tokenizer

__all__ = ["StopStrings", "StreamDecoder", "Tokenizer"]
