"""The tokenizer of a Hugging Face directory: ``tokenizer.json`` and what stands beside it, to and from a vocabulary.

``tokenizer.json`` alone does not say which tokens begin and end a text, and in many directories not even which are
control tokens: ``tokenizer_config.json`` (or, in older ones, ``special_tokens_map.json``) does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdecode.checkpoint.fields import Fields, read_json, read_text
from jaxdecode.checks import require
from jaxdecode.text.backend import Vocabulary, parse_tokenizer
from jaxdecode.text.tokenizer import Tokenizer

__all__ = ["TOKENIZER", "TOKENIZER_CONFIG", "TOKENIZER_FILES", "hf_vocabulary", "tokenizer_files"]

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_SPECIAL_MAP, _TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIG, _SPECIAL_MAP, _TEMPLATE)
_MAX_TOKENIZER, _MAX_TEMPLATE = 1 << 26, 1 << 20  # bytes; the largest published ones have half of the first
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_RULES = ("single_word", "lstrip", "rstrip", "normalized")


def hf_vocabulary(folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any], size: int) -> Vocabulary:
    """The vocabulary of a directory, for a model of ``size`` ids.

    config, generation: its config.json and generation_config.json, for the end ids. A text begins with
    begin-of-sequence if the post-processor says so, or, without one, ``add_bos_token``. ValueError, naming file and
    field, if something is damaged, contradictory or not supported; FileNotFoundError: no tokenizer.json.
    """
    path = folder / TOKENIZER
    if not path.exists():
        other = folder / "tokenizer.model"
        got = f"{other.name}, which is not supported" if other.exists() else "nothing there"
        raise FileNotFoundError(f"{path}: expected this file, got {got}")
    text = read_text(path, _MAX_TOKENIZER)
    spec = parse_tokenizer(text, str(path))
    about = _optional(folder / _SPECIAL_MAP) | _optional(folder / TOKENIZER_CONFIG)
    where = f"{folder / TOKENIZER_CONFIG}: "
    if _complete(spec, about, size, where):
        text = json.dumps(spec, ensure_ascii=False)
    ids = _ids(spec)
    named = {key: _named_id(ids, about, key, where) for key in ("bos_token", "eos_token")}
    front = _front(spec.get("post_processor"), str(path))
    add_bos = Fields(about, where).get("add_bos_token", bool, False) if front is None else bool(front)
    declared = [named["eos_token"]]
    for name, values in (("generation_config.json", generation), ("config.json", config)):
        declared += _declared(values, "eos_token_id", size, f"{folder / name}: ")
    return Vocabulary(
        json=text,
        size=size,
        eos_ids=tuple(dict.fromkeys(i for i in declared if i is not None)),
        bos_id=front[0] if front else named["bos_token"],
        add_bos=add_bos and bool(front or named["bos_token"] is not None),
        chat_template=_template(folder, about, where),
    )


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """File name -> JSON: a tokenizer as ``hf_vocabulary`` and others read it. ValueError for one that was made here."""
    require(tokenizer.json is not None, "save: tokenizer", "one that was read from a file", "another")
    spec = json.loads(tokenizer.json or "")
    wanted = [tokenizer.bos_id] if tokenizer.add_bos else []
    if (_front(spec.get("post_processor"), TOKENIZER) or []) != wanted:
        spec["post_processor"] = _processor(tokenizer) if wanted else None
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.add_bos,
    }
    if tokenizer.bos_id is not None:
        about["bos_token"] = _text(tokenizer, tokenizer.bos_id)
    if tokenizer.eos_ids:
        about["eos_token"] = _text(tokenizer, tokenizer.eos_ids[0])
    if tokenizer.chat_template is not None:
        about["chat_template"] = tokenizer.chat_template
    return {TOKENIZER: spec, TOKENIZER_CONFIG: about}


def _text(tokenizer: Tokenizer, i: int) -> str:
    return tokenizer.decode([i], skip_special_tokens=False, continuation=True)


def _processor(tokenizer: Tokenizer) -> dict[str, Any]:
    """A post-processor that puts begin-of-sequence in front of every text."""
    bos = _text(tokenizer, tokenizer.bos_id or 0)

    def token(kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": bos, "type_id": kind}}

    def part(name: str, kind: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": kind}}

    return {
        "type": "TemplateProcessing",
        "single": [token(0), part("A", 0)],
        "pair": [token(0), part("A", 0), token(1), part("B", 1)],
        "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos_id], "tokens": [bos]}},
    }


def _optional(path: Path) -> dict[str, Any]:
    return {k: v for k, v in read_json(path).items() if v is not None} if path.exists() else {}


def _ids(spec: Mapping[str, Any]) -> dict[str, int]:
    vocab = spec["model"]["vocab"]
    pieces = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab) if entry)
    return dict(pieces) | {token["content"]: token["id"] for token in spec["added_tokens"]}


def _content(token: Any) -> str | None:
    """A token as tokenizer_config.json writes it: its text, or a mapping with it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _complete(spec: dict[str, Any], about: Mapping[str, Any], size: int, where: str) -> bool:
    """Bring into ``spec`` the control tokens that only tokenizer_config.json knows; whether that changed anything.

    Added tokens that the model has no row for are left out: they never can be used.
    """
    before = spec["added_tokens"]
    tokens = {token["id"]: dict(token) for token in before}
    for key, token in Fields(about, where).get("added_tokens_decoder", dict, {}).items():
        good = key.isdecimal() and len(key) < 10 and bool(_content(token))
        require(good, f"{where}added_tokens_decoder", "tokens by id", f"{key}: {token}")
        known = tokens.setdefault(int(key), _added(int(key), token))
        same = known["content"] == _content(token)
        require(same, f"{where}added_tokens_decoder.{key}", f"{known['content']!r} as in {TOKENIZER}", _content(token))
    special = [about.get(key) for key in _NAMED]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = about.get(key) or []
        special += list(more.values()) if isinstance(more, dict) else more if isinstance(more, list) else []
    ids = _ids({**spec, "added_tokens": list(tokens.values())})
    for content in {text for token in special if (text := _content(token)) in ids}:
        token = tokens.setdefault(ids[content], _added(ids[content], {"content": content}))
        token["special"] = True
    base = len(spec["model"]["vocab"])
    spec["added_tokens"] = [tokens[i] for i in sorted(tokens) if i < max(size, base)]
    return spec["added_tokens"] != before


def _added(i: int, token: Any) -> dict[str, Any]:
    rules = token if isinstance(token, dict) else {}
    return {
        "id": i,
        "content": _content(token),
        **{rule: rules.get(rule) is True for rule in _RULES},
        "special": rules.get("special") is True,
    }


def _named_id(ids: Mapping[str, int], about: Mapping[str, Any], key: str, where: str) -> int | None:
    token = about.get(key)
    if token is None:
        return None
    content = _content(token)
    require(content in ids, f"{where}{key}", f"a token of {TOKENIZER}", repr(content))
    return ids[content or ""]


def _declared(values: Mapping[str, Any], key: str, size: int, where: str) -> list[int]:
    """One id, a list of them, or none."""
    value = values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    good = all(type(i) is int and 0 <= i < size for i in ids)
    require(good, f"{where}{key}", f"ids in [0, {size})", value)
    return ids


def _front(processor: Any, where: str) -> list[int] | None:
    """The ids that a post-processor puts in front of a text; None if it says nothing of it.

    ValueError for what a prompt cannot have: more than one token in front, or any after it.
    """
    steps = [processor] if isinstance(processor, dict) else []
    if steps and steps[0].get("type") == "Sequence":
        steps = [step for step in steps[0].get("processors") or [] if isinstance(step, dict)]
    front: list[int] | None = None
    for step in steps:
        kind = step.get("type")
        good = kind in ("TemplateProcessing", "ByteLevel")
        require(good, f"{where}: post_processor.type", "'TemplateProcessing' or 'ByteLevel'", repr(kind))
        if kind == "TemplateProcessing":
            front = _template_front(step, where)
    return front


def _template_front(step: Mapping[str, Any], where: str) -> list[int]:
    parts = step.get("single")
    listed = parts if isinstance(parts, list) else []
    names = [next(iter(part), None) if isinstance(part, dict) else None for part in listed]
    good = names in (["Sequence"], ["SpecialToken", "Sequence"])
    require(good, f"{where}: post_processor.single", "a text, or one begin-of-sequence token and a text", parts)
    if len(names) == 1:
        return []
    try:
        (front,) = step["special_tokens"][listed[0]["SpecialToken"]["id"]]["ids"]
    except (KeyError, TypeError, ValueError):
        front = None
    require(type(front) is int and front >= 0, f"{where}: post_processor.special_tokens", "one id for it", front)
    return [front]


def _template(folder: Path, about: Mapping[str, Any], where: str) -> str | None:
    """The chat template: a file of its own comes first, of several in the config the one named "default"."""
    if (path := folder / _TEMPLATE).exists():
        return read_text(path, _MAX_TEMPLATE)
    template = about.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
        require(template is not None, f"{where}chat_template", "one that is named 'default'", sorted(map(str, named)))
    require(template is None or isinstance(template, str), f"{where}chat_template", "a text", template)
    return template
