"""`jaxdecode chat` through a pipe, and its loop: a tiny random model with a chat template and a KV cache."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_gguf
from cli_tools import Result, assert_bad, call

import jaxdecode as jd
from jaxdecode.cli import chat_loop
from jaxdecode.cli.chat_loop import COMMANDS, ChatLoop
from jaxdecode.cli.conversation import Conversation
from jaxdecode.session import Steps

N, CONTEXT = 12, 400
MESSAGES = ["the and", "an answer, then?", "in the end"]
Message = dict[str, str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXDECODE_CACHE", str(folder / "cache"))
        tiny = tiny_gguf.tiny()
        tiny.fields["llama.context_length"] = CONTEXT
        yield str(tiny_gguf.write(folder / "tiny.gguf", tiny))


def chat(model: str, *lines: str, options: tuple[str, ...] = ()) -> Result:
    arguments = ("chat", "--model", model, "--max-new-tokens", str(N), "--no-compile-cache", *options)
    return call(*arguments, stdin="".join(line + "\n" for line in lines).encode())


def events(result: Result) -> list[dict[str, Any]]:
    assert (result.code, result.err) == (0, "")
    return [json.loads(line) for line in result.out.splitlines()]


def told(model: str, *lines: str, options: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    return events(chat(model, *lines, options=("--json", *options)))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def reply_of(event: dict[str, Any]) -> Message:
    return {"role": event["role"], "content": event["content"]}


def scratch(model: str, messages: list[Message], seed: int = 0, **settings: Any) -> tuple[list[int], int]:
    """The reply's tokens from scratch, and the size of the prompt, padded so that one program serves all."""
    loaded = jd.load(model)
    ids = loaded.tokenizer.chat(messages)
    tokens = np.array([ids + [0] * (CONTEXT - N - len(ids))])
    chosen = loaded.settings(max_new_tokens=N, **{"temperature": 0.0, **settings})
    key = jax.random.key(seed)
    out = jd.generate(loaded.model, loaded.params, tokens, lengths=[len(ids)], key=key, settings=chosen)
    return out.to_lists()[0], len(ids)


# Turns


@pytest.mark.parametrize("options", [(), ("--temperature", "1.5", "--seed", "7")])
def test_every_turn_is_what_generate_gives_from_scratch(model: str, options: tuple[str, ...]) -> None:
    warm = {"temperature": 1.5, "seed": 7} if options else {}
    messages: list[Message] = []
    for event, text in zip(told(model, *MESSAGES, options=options), MESSAGES, strict=True):
        messages.append(user(text))
        tokens, size = scratch(model, messages, **warm)
        assert (event["tokens"], event["prompt_tokens"]) == (tokens, size)
        assert event["completion_tokens"] == len(tokens)
        assert event["cached_tokens"] == 0 if len(messages) == 1 else 0 < event["cached_tokens"] < size
        assert (event["role"], event["content"]) == ("assistant", jd.load(model).tokenizer.decode(tokens))
        messages.append(reply_of(event))


def test_a_later_turn_reads_little_more_than_what_is_new(model: str) -> None:
    first, second = told(model, "the " * 60, "and")
    assert second["cached_tokens"] >= first["prompt_tokens"] - 1
    assert second["prompt_tokens"] - second["cached_tokens"] < 40


def test_text_is_one_reply_after_the_other(model: str) -> None:
    expected = "".join(event["content"] + "\n" for event in told(model, *MESSAGES))
    assert chat(model, *MESSAGES) == Result(0, expected, "")


def test_the_system_message_stands_in_front(model: str) -> None:
    (event,) = told(model, "the", options=("--system", "an and"))
    assert event["tokens"] == scratch(model, [{"role": "system", "content": "an and"}, user("the")])[0]


def test_empty_lines_say_nothing_and_the_last_line_needs_no_end(model: str) -> None:
    arguments = ("chat", "--model", model, "--max-new-tokens", str(N), "--no-compile-cache", "--json")
    result = call(*arguments, stdin=b"\n  \nthe and\r\n\nan")
    assert [e["prompt_tokens"] for e in events(result)] == [e["prompt_tokens"] for e in told(model, "the and", "an")]


# Commands


def test_undo_takes_back_the_turn_and_edit_puts_another_in_its_place(model: str) -> None:
    one, _, undone, three = told(model, MESSAGES[0], MESSAGES[1], "/undo", MESSAGES[2])
    plain = told(model, MESSAGES[0], MESSAGES[2])
    assert undone == {"command": "/undo", "message": f"took back: {MESSAGES[1]}"}
    assert [one["tokens"], three["tokens"]] == [e["tokens"] for e in plain]
    edited = told(model, MESSAGES[0], MESSAGES[1], f"/edit {MESSAGES[2]}")
    assert edited[2]["tokens"] == plain[1]["tokens"]
    assert edited[2]["cached_tokens"] >= plain[1]["cached_tokens"] > 0  # the first turn is still in the cache


def test_reset_forgets_the_messages_and_nothing_else(model: str) -> None:
    *_, reset, system, last = told(model, MESSAGES[0], "/system an", MESSAGES[1], "/reset", "/system", MESSAGES[2])
    assert (reset["command"], system["message"]) == ("/reset", "system message: an")
    assert last["tokens"] == scratch(model, [{"role": "system", "content": "an"}, user(MESSAGES[2])])[0]
    assert last["cached_tokens"] == 0


def test_system_is_shown_set_and_removed(model: str) -> None:
    lines = ["/system", "/system the end", "/system -", MESSAGES[0]]
    *said, reply = told(model, *lines)
    assert [e["message"] for e in said] == [f"system message: {s}" for s in ("none", "the end", "none")]
    assert reply["tokens"] == scratch(model, [user(MESSAGES[0])])[0]


def test_settings_are_shown_and_changed(model: str) -> None:
    shown, one, two, reply = told(model, "/settings", "/settings temperature 1.5", "/SETTINGS seed 7", "the")
    assert shown["message"].splitlines() == [
        *("temperature = 0.0", "top-k = none", "top-p = none", "min-p = none", f"max-new-tokens = {N}", "seed = 0")
    ]
    assert (one["message"], two["message"]) == ("temperature = 1.5", "seed = 7")
    assert reply["tokens"] == scratch(model, [user("the")], seed=7, temperature=1.5)[0]
    lines = ["/settings top-p 0.5", "/settings top_p", "/settings top-p off", "/settings top-p"]
    assert [e["message"] for e in told(model, *lines)] == ["top-p = 0.5"] * 2 + ["top-p = none"] * 2


def test_more_settings_appear_when_they_are_given_and_are_saved(model: str, tmp_path: Path) -> None:
    path, options = tmp_path / "talk.json", ("--repetition-penalty", "1.5", "--bad-words", "an", "--xtc", "0.5,0.1")
    lines = [
        "/settings",
        "/settings dry 1,2,1",
        "/settings no-repeat-ngram",
        f"/save {path}",
        "the",
        f"/load {path}",
        "the",
    ]
    listed, dry, ngram, *rest = told(model, *lines, options=options)
    assert listed["message"].splitlines()[-2:] == ["xtc = 0.5,0.1", "repetition-penalty = 1.5"]
    assert (dry["message"], ngram["message"]) == ("dry = 1.0,2.0,1", "no-repeat-ngram = none")
    given = {"repetition_penalty": 1.5, "xtc": (0.5, 0.1), "dry": (1, 2, 1)}
    words = [jd.load(model).tokenizer.encode("an", bos=False)]
    assert rest[1]["tokens"] == rest[3]["tokens"] == scratch(model, [user("the")], bad_words=words, **given)[0]


def test_help_names_every_command_and_its_own_loop_knows_them(model: str) -> None:
    (event,) = told(model, "/help")
    for name, command in COMMANDS.items():
        assert f"{name} {command.argument}".rstrip() in event["message"]
        assert name in ("/edit", "/quit") or hasattr(ChatLoop, f"on_{name[1:]}")
    assert chat(model, "/help").out == event["message"] + "\n"


@pytest.mark.parametrize("text", [" /help me", "// a comment", "/usr/bin is a folder", "/", "/2"])
def test_what_only_looks_like_a_command_is_a_message_and_quit_ends(model: str, text: str) -> None:
    (event,) = told(model, text, "/Quit", "the")
    assert event["tokens"] == scratch(model, [user(text)])[0]


def test_a_saved_conversation_goes_on_as_if_it_had_never_stopped(model: str, tmp_path: Path) -> None:
    path = tmp_path / "a talk.json"
    options = ("--temperature", "1.5", "--seed", "3", "--system", "an")
    whole = told(model, *MESSAGES, options=options)
    told(model, *MESSAGES[:2], f"/save {path}", options=options)
    saved = json.loads(path.read_text())
    assert list(saved) == ["format", "version", "model", "settings", "system", "messages"]
    assert (saved["format"], saved["version"], saved["model"]) == ("jaxdecode-chat", 1, model)
    assert saved["messages"] == [
        m for text, e in zip(MESSAGES[:2], whole[:2], strict=True) for m in (user(text), reply_of(e))
    ]
    loaded, last = told(model, f"/load {path}", MESSAGES[2])
    assert loaded["message"] == f"read 4 messages from {path}"
    assert last["tokens"] == whole[2]["tokens"]


def test_a_conversation_with_another_model_says_so(model: str, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    told(model, "the", f"/save {path}")
    path.write_text(path.read_text().replace(json.dumps(model), '"another"'))
    assert told(model, f"/load {path}")[0]["message"].endswith("; they were written with another")


# Errors


@pytest.mark.parametrize(
    ("line", "about"),
    [
        ("/hello", "/hello: no such command"),
        ("/edit", "/edit: expected TEXT, got nothing"),
        ("/edit the", "undo: expected a message of yours"),
        ("/undo", "undo: expected a message of yours"),
        ("/undo twice", "/undo: expected nothing after it, got twice"),
        ("/settings warmth 3", "expected one of temperature, top-k"),
        ("/settings top-k 2.5", "top_k: expected a whole number, or none, got 2.5"),
        ("/settings temperature none", "temperature: expected a number, got none"),
        ("/settings temperature -1", "temperature"),
        ("/settings seed -1", "seed: expected a number in [0, 2^32)"),
        ("/settings top-p 0.5 0.6", "NAME VALUE"),
        ("/save", "/save: expected FILE"),
        ("/save /nowhere/at/all", "no folder"),
        ("/load /nowhere", "/nowhere"),
        ("the " * CONTEXT, "conversation: expected at most 399 tokens"),
    ],
)
def test_a_line_that_is_wrong_ends_a_pipe(model: str, line: str, about: str) -> None:
    assert_bad(chat(model, line, "the"), about)


@pytest.mark.parametrize(
    ("change", "about"),
    [
        ({"format": "jaxdecode-record"}, "format"),
        ({"version": 2}, "version: expected 1 to 1, got 2"),
        ({"model": 3}, "model"),
        ({"system": 3}, "system"),
        ({"messages": {}}, "messages"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "message 0: expected one of role user"),
        ({"messages": [user("a"), user("b")]}, "message 1: expected one of role assistant"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 0"),
        ({"settings": {}}, "settings"),
        ({"settings": {"temperature": -1}}, "temperature"),
        ({"settings": {"top_k": "many"}}, "top_k"),
    ],
    ids=str,
)
def test_a_conversation_that_is_wrong_is_refused(
    tmp_path: Path, model: str, change: dict[str, Any], about: str
) -> None:
    path = tmp_path / "talk.json"
    numbers = {"temperature": 0.0, "top_k": None, "top_p": None, "min_p": None, "max_new_tokens": N, "seed": 0}
    good = {"format": "jaxdecode-chat", "version": 1, "model": "x", "settings": numbers, "system": None, "messages": []}
    if change.get("settings"):
        change = {"settings": numbers | change["settings"]}
    path.write_text(json.dumps(good | change))
    loop = fresh(model)
    with pytest.raises(ValueError, match=about):
        loop.take(f"/load {path}")
    assert loop.conversation.numbers["max_new_tokens"] == N
    path.write_text(json.dumps(good))
    loop.take(f"/load {path}")


@pytest.mark.parametrize("data", [b"", b"\xff", b"[" * 100_000, b"[]", b"null"])
def test_a_file_that_is_no_conversation_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"talk\.json: "):
        Conversation.load(path)


def test_bad_options() -> None:
    assert_bad(call("chat", "--model", "toy", "--no-compile-cache"), "chat template")
    assert_bad(call("chat", "--model", "toy", "--temperature", "-1", "--no-compile-cache"), "temperature")
    assert_bad(call("chat", "--model", "toy", "--seed", "-1", "--no-compile-cache"), "seed")


def test_stdin_that_is_no_text(model: str) -> None:
    assert_bad(call("chat", "--model", model, "--no-compile-cache", stdin=b"\xff\n"), "UTF-8")


# Replies that end early


def fresh(model: str, **numbers: Any) -> ChatLoop:
    chosen = {"temperature": 0.0, "top_k": None, "top_p": None, "min_p": None, "max_new_tokens": N, "seed": 0}
    return ChatLoop(jd.load(model), model, Conversation({**chosen, **numbers}), json=False, interactive=True)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Ctrl-C when the nth step has been taken."""
    asked = iter([False] * n + [True] * 100)
    monkeypatch.setattr(chat_loop, "deferred_interrupt", lambda: contextlib.nullcontext(lambda: next(asked)))


def test_interrupted_reply_stays_in_the_history(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = fresh(model)
    whole = scratch(model, [user("the and")])[0]
    assert len(whole) == N
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        assert loop.take("the and") == "cancelled"
    part = jd.load(model).tokenizer.decode(whole[:5])
    assert loop.conversation.messages == [user("the and"), {"role": "assistant", "content": part}]
    assert capsys.readouterr().out.endswith("(stopped)\n")
    assert loop.take("an") == "length"
    after = scratch(model, [*loop.conversation.messages[:2], user("an")])[0]
    assert loop.conversation.messages[3]["content"] == jd.load(model).tokenizer.decode(after)
    assert loop.session.reused > 0


def test_interrupted_before_the_first_token_the_message_is_taken_back(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = fresh(model)
    interrupt_after(monkeypatch, 0)
    assert loop.take("the and") == "cancelled"
    assert loop.conversation.messages == []
    assert "taken back" in capsys.readouterr().out


def test_two_interrupts_tear_the_step_and_keep_the_text(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, take, taken = fresh(model), Steps.__next__, []

    def torn(steps: Steps) -> Any:
        taken.append(1)
        if len(taken) == 6:
            steps.state = None
            raise KeyboardInterrupt
        return take(steps)

    with monkeypatch.context() as patch:
        patch.setattr(Steps, "__next__", torn)
        assert loop.take("the and") == "cancelled"
    (_, reply) = loop.conversation.messages
    whole = jd.load(model).tokenizer.decode(scratch(model, [user("the and")])[0])
    assert reply["content"]
    assert whole.startswith(reply["content"])
    assert loop.take("an") == "length"
    assert loop.session.reused == 0


def test_an_edit_that_fails_leaves_the_conversation_as_it_was(model: str) -> None:
    loop = fresh(model)
    loop.take("the and")
    before = list(loop.conversation.messages)
    with pytest.raises(ValueError, match="at most 399 tokens"):
        loop.take("/edit " + "the " * CONTEXT)
    assert loop.conversation.messages == before


def test_at_a_terminal_errors_are_told_and_the_chat_goes_on(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    loop = fresh(model)
    lines: Iterator[Any] = iter(["/hello", KeyboardInterrupt, "the and", None])

    def read() -> str | None:
        line = next(lines)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    assert loop.run(read) == 0
    out, err = capsys.readouterr()
    assert err == "/hello: no such command; /help lists them, and a space in front makes it a message\n"
    assert "Ctrl-D ends" in out
    assert len(loop.conversation.messages) == 2


def test_a_reply_cut_at_the_limit_says_so(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fresh(model).take("the and") == "length"
    assert capsys.readouterr().out.endswith(f"\n(ended after {N} tokens)\n")


def test_a_broken_model_is_told(model: str) -> None:
    loop = fresh(model)
    nan = jax.tree.map(lambda x: x * float("nan"), loop.loaded.params)
    loop = ChatLoop(loop.loaded._replace(params=nan), model, loop.conversation, json=True, interactive=False)
    with pytest.raises(Exception, match=r"the reply ends early \(nan\)"):
        loop.take("the and")
    assert loop.conversation.messages == []


def test_no_room_for_new_tokens_is_no_reply(model: str) -> None:
    loop = fresh(model, max_new_tokens=0)
    assert loop.take("the and") == "length"
    assert loop.conversation.messages == []
    assert dataclasses.asdict(loop.conversation)["numbers"]["max_new_tokens"] == 0


def test_every_reply_is_under_the_constraint(model: str) -> None:
    options = ("--choices", "the", "--choices", "in", "--prefix", "t", "--banned-ids", "1")
    assert [r["content"] for r in told(model, *MESSAGES[:2], options=options)] == ["the", "the"]
    assert_bad(chat(model, "a", options=("--choices", "the", "--regex", "a")), "--regex and --choices: expected one")
