"""What stands beside tokenizer.json: begin-of-sequence, control tokens, end ids, chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_hf

from jaxdecode.checkpoint.hf_tokenizer import hf_vocabulary
from jaxdecode.text import Tokenizer
from jaxdecode.text.backend import open_tokenizer

Change = Callable[[dict[str, Any]], Any]


def opened(folder: Path, *changes: Change, size: int = 400, **configs: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a directory with these changes to its files; ``configs``: config, generation."""
    texts = tiny_hf.tiny().texts
    files: dict[str, Any] = {name: texts[name] for name in ("tokenizer.json", "tokenizer_config.json")}
    for change in changes:
        change(files)
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    vocabulary = hf_vocabulary(folder, configs.get("config", {}), configs.get("generation", {}), size)
    return open_tokenizer(vocabulary, str(folder))


def about(**fields: Any) -> Change:
    return lambda files: files["tokenizer_config.json"].update(fields)


def spec(**fields: Any) -> Change:
    return lambda files: files["tokenizer.json"].update(fields)


def template(*names: str, ids: dict[str, list[int]] | None = None) -> dict[str, Any]:
    """A post-processor of these parts; "A" is the text."""
    parts = [
        {"Sequence": {"id": "A", "type_id": 0}} if name == "A" else {"SpecialToken": {"id": name, "type_id": 0}}
        for name in names
    ]
    known = {"<|endoftext|>": [0], "<|im_start|>": [1], "<|im_end|>": [2]} if ids is None else ids
    tokens = {name: {"id": name, "ids": i, "tokens": [name]} for name, i in known.items()}
    return {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": tokens}


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], None),
        ([about(add_bos_token=True)], 1),
        ([about(add_bos_token=False)], None),
        ([spec(post_processor=template("<|endoftext|>", "A"))], 0),  # it says which one, too
        ([spec(post_processor=template("<|im_start|>", "A")), about(add_bos_token=False)], 1),  # and comes first
        ([spec(post_processor=template("A")), about(add_bos_token=True)], None),
        ([spec(post_processor=BYTES), about(add_bos_token=True)], 1),  # this one says nothing of it
        ([spec(post_processor={"type": "Sequence", "processors": [BYTES, template("<|im_start|>", "A")]})], 1),
        ([about(add_bos_token=True, bos_token=None)], None),
    ],
)
def test_begin_of_sequence_as_the_files_ask(tmp_path: Path, changes: list[Change], expected: int | None) -> None:
    tokenizer = opened(tmp_path, *changes)
    ids = tokenizer.encode("the land")
    assert ids[:1] == ([expected] if expected is not None else tokenizer.encode("the land", bos=False)[:1])
    assert tokenizer.add_bos is (expected is not None)
    if expected is not None:
        assert ids.count(expected) == 1
        text = tokenizer.decode([expected], skip_special_tokens=False)
        assert tokenizer.encode(f"{text}the land") == ids  # never twice
        chat = [{"role": "user", "content": "x"}]
        for written in ("", "{{ bos_token }}"):
            content = opened(tmp_path, *changes, about(chat_template=written + "{{ messages[0].content }}")).chat(chat)
            assert content == [expected, *tokenizer.encode("x", bos=False)]


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (template("A", "<|im_end|>"), "post_processor.single"),
        (template("<|im_start|>", "A", "<|im_end|>"), "post_processor.single"),
        (template("<|im_start|>", "<|im_start|>", "A"), "post_processor.single"),
        (template("<|im_start|>", "A", ids={"<|im_start|>": [1, 1]}), "tokenizer.json"),
        ({"type": "BertProcessing", "sep": ["<|im_end|>", 2], "cls": ["<|im_start|>", 1]}, "post_processor.type"),
    ],
)
def test_what_a_prompt_cannot_have_is_refused(tmp_path: Path, processor: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, spec(post_processor=processor))


def test_end_ids_come_from_all_files_and_the_tokenizers_own_is_first(tmp_path: Path) -> None:
    ends = opened(tmp_path, config={"eos_token_id": 0}, generation={"eos_token_id": [0, 7, 2]})
    assert ends.eos_ids == (2, 0, 7)
    assert opened(tmp_path, about(eos_token=None), config={"eos_token_id": 5}).eos_ids == (5,)
    assert opened(tmp_path, about(eos_token=None)).eos_ids == ()
    text = opened(tmp_path, about(chat_template="{{ eos_token }}"), generation={"eos_token_id": [0, 2]})
    assert text.apply_chat_template([{"role": "user", "content": "x"}]) == "<|im_end|>"


def plain_ends(files: dict[str, Any]) -> None:
    """A tokenizer.json that does not mark its tokens."""
    files["tokenizer.json"]["added_tokens"] = []


def test_control_tokens_that_only_the_config_knows(tmp_path: Path) -> None:
    decoder = {
        "2": {"content": "<|im_end|>", "special": True, "rstrip": True},
        "263": {"content": "and", "special": False},
    }
    tokenizer = opened(
        tmp_path, plain_ends, about(added_tokens_decoder=decoder, pad_token={"content": "<|endoftext|>"})
    )
    assert tokenizer.controls == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert tokenizer.encode("a<|im_end|>  b") == [*tokenizer.encode("a"), 2, *tokenizer.encode("b")]
    assert opened(tmp_path, plain_ends, about(added_tokens_decoder=None)).controls == {
        "<|im_start|>": 1,
        "<|im_end|>": 2,
    }


def test_tokens_named_as_additional_ones_are_control_tokens(tmp_path: Path) -> None:
    for key, value in (
        ("additional_special_tokens", ["and", "nowhere"]),
        ("extra_special_tokens", {"x_token": "and"}),
    ):
        assert opened(tmp_path, about(**{key: value})).controls["and"] == 263
    assert "and" not in opened(tmp_path).controls


def test_the_older_map_of_special_tokens_counts_where_the_config_says_nothing(tmp_path: Path) -> None:
    def older(files: dict[str, Any]) -> None:
        files["special_tokens_map.json"] = {"eos_token": {"content": "<|endoftext|>"}, "bos_token": "<|im_start|>"}
        files["tokenizer_config.json"] = {"eos_token": "<|im_end|>"}

    tokenizer = opened(tmp_path, older)
    assert (tokenizer.eos_ids, tokenizer.bos_id) == ((2,), 1)


def test_added_tokens_past_the_model_are_left_out(tmp_path: Path) -> None:
    vocab = len(tiny_hf.byte_level()["model"]["vocab"])

    def grow(files: dict[str, Any]) -> None:
        token = {**files["tokenizer.json"]["added_tokens"][0], "id": vocab, "content": "<pad>"}
        files["tokenizer.json"]["added_tokens"].append(token)

    assert opened(tmp_path, grow).controls["<pad>"] == vocab
    small = opened(tmp_path, grow, size=vocab)
    assert "<pad>" not in small.controls
    assert max(small.encode("<pad>")) < vocab == small.vocab_size


def test_chat_templates(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert opened(tmp_path, about(chat_template=several)).apply_chat_template(chat) == "plain"
    assert opened(tmp_path / "none", about(chat_template=None)).chat_template is None
    own = {"chat_template.jinja": "{{ messages[0].content }}!"}
    assert opened(tmp_path / "own", lambda files: files.update(own)).apply_chat_template(chat) == "x!"
    with pytest.raises(ValueError, match="chat_template: expected one that is named 'default'"):
        opened(tmp_path / "a", about(chat_template=several[:1]))
    with pytest.raises(ValueError, match="chat_template: expected a text"):
        opened(tmp_path / "b", about(chat_template=5))


BAD: dict[str, tuple[Change, str]] = {
    "a bos token that is not there": (about(bos_token="<s>"), "tokenizer_config.json: bos_token.*<s>"),
    "an eos token that is a number": (about(eos_token=3), "tokenizer_config.json: eos_token"),
    "add_bos that is a text": (about(add_bos_token="yes"), "add_bos_token"),
    "added tokens of another kind": (about(added_tokens_decoder=[1]), "added_tokens_decoder"),
    "added tokens by name": (about(added_tokens_decoder={"x": {"content": "a"}}), "added_tokens_decoder"),
    "an added token without text": (about(added_tokens_decoder={"3": {}}), "added_tokens_decoder"),
    "an added token that contradicts": (
        about(added_tokens_decoder={"2": {"content": "other"}}),
        "added_tokens_decoder.2.*<|im_end|>",
    ),
    "a config that is a list": (lambda files: files.update({"tokenizer_config.json": "[]"}), "tokenizer_config.json"),
    "a config that is cut": (lambda files: files.update({"tokenizer_config.json": '{"a": '}), "tokenizer_config.json"),
    "a repeated name": (
        lambda files: files.update({"tokenizer_config.json": '{"a": 1, "a": 2}'}),
        "tokenizer_config.json.*'a' twice",
    ),
    "a deep nest": (
        lambda files: files.update({"tokenizer_config.json": '{"a":' * 100_000}),
        "tokenizer_config.json: expected JSON",
    ),
    "not a number": (lambda files: files.update({"tokenizer_config.json": '{"a": NaN}'}), "the number NaN"),
    "a huge number": (
        lambda files: files.update({"tokenizer_config.json": '{"a": ' + "9" * 9999 + "}"}),
        "tokenizer_config.json",
    ),
    "a tokenizer that is cut": (lambda files: files.update({"tokenizer.json": '{"model": {'}), "tokenizer.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named(tmp_path: Path, case: str) -> None:
    change, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        opened(tmp_path, change)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [-1, 400, 2.0, True, "2", [2, None], {"a": 1}])
def test_bad_end_ids(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id: expected ids in \[0, 400\)"):
        opened(tmp_path, generation={"eos_token_id": value})


def test_files_that_are_too_long_or_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxdecode.checkpoint import hf_tokenizer

    monkeypatch.setattr(hf_tokenizer, "_MAX_TOKENIZER", 1000)
    with pytest.raises(ValueError, match=r"tokenizer\.json: expected at most 1000 bytes, got more"):
        opened(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"tokenizer\.json: expected UTF-8, got another byte at 7"):
        hf_vocabulary(tmp_path, {}, {}, 400)
