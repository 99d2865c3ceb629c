"""A tokenizer that is exact both ways: every id stands for bytes, and text is bytes joined.

One final class serves every vocabulary. What differs between vocabularies is data (the table of bytes) and one
function that encodes text without control tokens; finding control tokens, begin-of-sequence and chats is here, once.
Needs no third-party package; `jaxdecode.text.backend` fills it from a ``tokenizer.json``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxdecode.checks import require
from jaxdecode.text import chat
from jaxdecode.text.chat import Chat

__all__ = ["Tokenizer"]

_WORD = re.compile(r"\w")
_SPACE = re.compile(r"[^\S\x1c-\x1f]")  # Unicode's white space; Python counts four separators more


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tokenizer:
    """Text to token ids and back.

    table: the bytes of each id. encode_text: text to ids, knowing no control tokens. controls: text of each control
    token -> id; they mark structure, and ``decode`` skips them. eos_ids: the ids that end a text. add_bos: whether
    the file asks for ``bos_id`` in front of every text. space_prefix: ``encode_text`` puts a space in front of the
    text, as SentencePiece does, so ``decode`` takes one away. chat_template: the file's Jinja template, if any.
    encode_rest: as ``encode_text``, for text that follows a control token, if that differs. marks: letters for control
    tokens that are found by a rule of their own: "l", "r" take the white space on that side along, "w" finds the token
    only where it is a word. json: the ``tokenizer.json`` that all this is from, to save it again.
    """

    table: Sequence[bytes]
    encode_text: Callable[[str], list[int]]
    controls: Mapping[str, int] = dataclasses.field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    add_bos: bool = False
    space_prefix: bool = False
    chat_template: str | None = None
    encode_rest: Callable[[str], list[int]] | None = None
    marks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    json: str | None = None

    def __post_init__(self) -> None:
        ids = [*self.controls.values(), *self.eos_ids, *([] if self.bos_id is None else [self.bos_id])]
        bad = [i for i in ids if not 0 <= i < self.vocab_size]
        require(not bad, "tokenizer: special ids", f"ids in [0, {self.vocab_size})", bad)
        require(not self.add_bos or self.bos_id is not None, "tokenizer: add_bos", "a begin-of-sequence id", None)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self.table)

    def encode(self, text: str, special: bool = True, *, bos: bool | None = None) -> list[int]:
        """Ids of ``text``.

        special: control tokens such as ``<|im_start|>`` written in the text become their ids; False encodes them like
        any other text. bos: put begin-of-sequence in front, never twice; None does what the file asks for. Bytes that
        the vocabulary has no token for are dropped, as the checkpoint's own tokenizer does (SmolLM2: six control
        characters and two unassigned planes). ValueError for text that is not Unicode (lone surrogates).
        """
        _check_text(text)
        ids = self._encode_parts(text) if special else self._encode_plain(text)
        return self._with_bos(ids) if (self.add_bos if bos is None else bos) else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, *, continuation: bool = False) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD.

        continuation: the ids follow other text, so the space that SentencePiece puts in front of a text stays.
        ValueError for an id out of range.
        """
        data = b"".join(self.id_to_bytes(i, skip_special_tokens) for i in ids)
        if self.space_prefix and not continuation:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def id_to_bytes(self, token: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes that one id stands for: b"" for a control token that is skipped. ValueError if out of range."""
        i = int(token)
        require(0 <= i < self.vocab_size, "decode: token id", f"an id in [0, {self.vocab_size})", i)
        return b"" if skip_special_tokens and i in self._control_ids else self.table[i]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as one text, by the file's template. To encode chats of untrusted text use ``chat``.

        messages: mappings with "role" ("system", "user", "assistant", "tool") and "content"; what else they hold
        ("tool_calls") is for the template, as are ``tools``, JSON schemas of functions, and ``variables``, what else a
        template asks for by name (Qwen3's ``{"enable_thinking": False}``). ValueError without a template, or if the
        template refuses.
        """
        return self._render(chat.check_chat(messages, tools, variables), add_generation_prompt)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of the chat, in which only the template can write control tokens, whatever the contents say."""
        checked = chat.check_chat(messages, tools, variables)
        ids = self._with_own_bos(self._encode_parts(self._render(checked, add_generation_prompt)))
        texts = chat.texts_of(checked)
        if not chat.could_form(self.controls, texts):
            return ids
        shield = chat.shield_for(self.controls, [*texts, self.chat_template or ""])
        hidden = chat.map_texts(checked, shield.hide, shield.hide_key)
        safe = self._with_own_bos(self._encode_parts(self._render(hidden, add_generation_prompt), shield.show))
        # A template may look into contents ("<think>" and the like). If nothing in them is a control token, and hiding
        # their first characters made no difference to the control tokens, the plain rendering is the right one.
        harmless = not any(c in t for t in texts for c in self.controls)
        return ids if harmless and self._controls_in(ids) == self._controls_in(safe) else safe

    @functools.cached_property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(self.controls.values())

    @functools.cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.controls, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def _controls_in(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i in self._control_ids]

    def _render(self, messages: Chat, add_generation_prompt: bool) -> str:
        template = self.chat_template
        if template is None:
            raise ValueError("chat: expected a checkpoint with a chat template, got one without; use raw text instead")
        text = chat.render(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            bos_token="" if self.bos_id is None else self.decode([self.bos_id], False, continuation=True),
            eos_token=self.decode(self.eos_ids[:1], False, continuation=True),
        )
        _check_text(text)
        return text

    def _parts(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Text between control tokens, each with the id of the control token that follows it."""
        at = 0
        for match in self._control_pattern.finditer(text):
            start, end, marks = match.start(), match.end(), self.marks.get(match.group(), "")
            if start < at or ("w" in marks and _in_word(text, start, end)):
                continue
            while "l" in marks and start > at and _SPACE.match(text, start - 1):
                start -= 1
            while "r" in marks and _SPACE.match(text, end):
                end += 1
            yield text[at:start], self.controls[match.group()]
            at = end
        yield text[at:], None

    def _encode_parts(self, text: str, show: Callable[[str], str] = str) -> list[int]:
        ids: list[int] = []
        for i, (part, control) in enumerate(self._parts(text)):
            ids += self._encode_plain(show(part), rest=i > 0)
            ids += [] if control is None else [control]
        return ids

    def _encode_plain(self, text: str, rest: bool = False) -> list[int]:
        encode = self.encode_rest if rest and self.encode_rest is not None else self.encode_text
        return list(encode(text)) if text else []

    def _with_own_bos(self, ids: list[int]) -> list[int]:
        return self._with_bos(ids) if self.add_bos else ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        require(self.bos_id is not None, "encode: bos", "a vocabulary with a begin-of-sequence id", None)
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]  # type: ignore[list-item]


def _in_word(text: str, start: int, end: int) -> bool:
    return bool(_WORD.match(text[start - 1 : start]) or _WORD.match(text[end : end + 1]))


def _check_text(text: str) -> None:
    require(isinstance(text, str), "encode: text", "a str", type(text).__name__)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        got = f"a lone surrogate at position {error.start}"
        raise ValueError(f"encode: text: expected Unicode text, got {got}") from None
