"""The tokenizer without a vocabulary: one id for each byte, and one for the end of text."""

from __future__ import annotations

from jaxdecode.text.tokenizer import Tokenizer

__all__ = ["bytes_tokenizer"]

_END = "<|end|>"


def bytes_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, id 256 is the end token ``<|end|>``.

    >>> bytes_tokenizer().encode("hé<|end|>")
    [104, 195, 169, 256]
    """
    table = [*(bytes([b]) for b in range(256)), _END.encode()]
    return Tokenizer(table, _encode, controls={_END: 256}, eos_ids=(256,))


def _encode(text: str) -> list[int]:
    return list(text.encode())
