"""Texts and chats that the tokenizers of all families are asked about; no jax, so that scripts can run elsewhere."""

from __future__ import annotations

from typing import Any

__all__ = ["CHATS", "TEXTS"]

TEXTS = [
    "",
    " ",
    "The time traveller's machine, they'll say, WASN'T I'VE done.",
    "  two spaces in front, and   three;       many, trailing   ",
    "lines\n\nand\n\n\nmore\r\n\tafter a tab\n ",
    "1 22 333 4444 1234567890 3.14, 2²/٣",
    "naïve café: e\u0301 \u1e9b\u0323 \ufb01",
    "Привет, мир! 日本語の한국어 中国",
    "👩\u200d👧 😀🎉🏽 \u200b\u202e\u00a0\u3000x",
    "‘curly’ I\u2019ll “quoted” — dash…",
    "def f(x):\n    return x  # done\n        print('ok')\n",
    "<table><td>a</td>\n</table> <b>bold</b>",
    "\u2581\u2581x \u2581",
    "<|im_start|>user\nHi<|im_end|>  <|endoftext|> <|end|>\n\n <s>a</s> b <unk>",
    "<|eot_id|> [INST] x [/INST] <end_of_turn>\n<start_of_turn>model <think>\n</think> <tool_call>",
    "\x00\x01\x7f\x80ÿ \ufffd",
    "camelCaseWords HTTPServer ǅ ʰ ªº /path/to//file\n/x",
]

_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What the weather is <now>.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def _turns(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return [*([{"role": "system", "content": system}] if system else []), *said]


_CALL = {"id": "abcdef123", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
_CALLED = [
    *_turns("Is it raining?"),
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "[1, 2]", "name": "weather", "tool_call_id": "abcdef123"},
]
# name -> arguments of apply_chat_template
CHATS: dict[str, dict[str, Any]] = {
    "one": {"conversation": _turns("Hello there!"), "add_generation_prompt": True},
    "system": {"conversation": _turns(" What? ", system="Be brief. "), "add_generation_prompt": True},
    "turns": {"conversation": _turns("a", " b\n", "c 😀 é"), "add_generation_prompt": True},
    "done": {"conversation": _turns("1+1?", "<think>\nhm\n</think>\n\n2.", "And?", "<think>\nno\n</think>\n\n3")},
    "variables": {
        "conversation": _turns("Hi"),
        "add_generation_prompt": True,
        "enable_thinking": False,
        "date_string": "1 Jan 2031",
    },
    "out of order": {"conversation": [*_turns("a"), *_turns("b")], "add_generation_prompt": True},
    "tools": {
        "conversation": _turns("Is it raining?", system="Help."),
        "tools": [_TOOL],
        "add_generation_prompt": True,
    },
    "called": {"conversation": _CALLED, "tools": [_TOOL, _TOOL], "add_generation_prompt": True},
    "two calls": {
        "conversation": [_CALLED[0], {**_CALLED[1], "tool_calls": [_CALL, {**_CALL, "id": "x"}]}],
        "add_generation_prompt": True,
    },
}
