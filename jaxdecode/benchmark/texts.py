"""Prompts of the modes that need a text: one to copy from, one with nothing to copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdecode.text.tokenizer import Tokenizer

__all__ = ["TEXTS", "text_ids"]

_STORY = """\
The ferry to Harrow Island left every morning at six, except on Sundays, when old Marit Lund slept late and nobody \
dared to wake her. She had bought the boat from a baker for two cows and a stove, painted it green, and never once \
asked for more than a coin and a joke as the fare. In the winter of the long ice she carried the post on a sledge \
instead, forty letters at a time, and read the postcards aloud to the dog."""

TEXTS = {
    "copy": f"Repeat this text word for word.\n\n{_STORY}",
    "fresh": "Write a short story about a clockmaker who has lost the sense of time.",
}


def text_ids(tokenizer: Tokenizer | None, name: str, vocab_size: int) -> list[int]:
    """The text as a user would ask for it, where the model can chat; its bytes where there is no tokenizer."""
    text: Any = TEXTS[name]
    if tokenizer is None:
        return [byte % vocab_size for byte in text.encode()]
    try:
        return tokenizer.chat([{"role": "user", "content": text}])
    except ValueError:  # no chat format
        return tokenizer.encode(text)
