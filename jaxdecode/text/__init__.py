"""Text: tokenizers, chat templates and streaming detokenization."""

from __future__ import annotations

from jaxdecode.text.stream import StreamDecoder
from jaxdecode.text.tokenizer import Tokenizer

__all__ = ["StreamDecoder", "Tokenizer"]
