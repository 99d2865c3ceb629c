"""The result of one line as JSON: in the project's own form, or in that of OpenAI's batch files."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from jaxdecode.cli.batch_lines import CHAT_URL, BadLine, Line
from jaxdecode.cli.choices import FAILURES, Written, best, choice, token_text

if TYPE_CHECKING:
    from jaxdecode.base import Generated
    from jaxdecode.text.tokenizer import Tokenizer

__all__ = ["answered", "failed", "written"]


def written(tokenizer: Tokenizer, line: Line, out: Generated) -> Written:
    """The rows' texts, up to their stop strings."""
    from jaxdecode.cli.generate import hypotheses
    from jaxdecode.cli.writing import RowText

    request = line.request
    texts = [RowText(tokenizer, stops=request.stops, continuation=not request.chat) for _ in range(request.rows)]
    if out.count is not None:
        return hypotheses(texts, out, [])
    for text, ids in zip(texts, out.to_lists(), strict=True):
        for token in ids:
            text.push([token])
        text.flush()
    rows = Written(texts, [t.finish(int(f)) for t, f in zip(texts, out.finish, strict=True)], out, [[] for _ in texts])
    return rows if request.best_of is None else best(rows, request.num_samples or 1)


def answered(tokenizer: Tokenizer, line: Line, prompt_tokens: int, out: Generated) -> dict[str, Any]:
    """The record of a line whose rows are ``out``."""
    rows = written(tokenizer, line, out)
    told = [choice(tokenizer, rows, row, line.request) for row in range(len(rows.texts))]
    if line.url is None:
        about: dict[str, Any] = {"id": line.id, "prompt_tokens": prompt_tokens}
        if rows.certified is not None:
            about |= {"certified": rows.certified, "certificate_gap": rows.certificate_gap}
        return about | (told[0] if line.request.several is None else {"choices": told})
    bad = next((name for name in rows.finish if name in FAILURES), None)
    if bad is not None:
        return _openai(line.id, None, {"code": bad, "message": FAILURES[bad]})
    return _openai(line.id, _response(tokenizer, line, prompt_tokens, told), None)


def _response(tokenizer: Tokenizer, line: Line, prompt_tokens: int, told: list[dict[str, Any]]) -> dict[str, Any]:
    shape = _chat_choice if line.url == CHAT_URL else _text_choice
    completion = sum(c["completion_tokens"] for c in told)
    body = {
        "id": ("chatcmpl-" if line.url == CHAT_URL else "cmpl-") + _name(line.id),
        "object": "chat.completion" if line.url == CHAT_URL else "text_completion",
        "created": 0,  # the same run again gives the same file
        "model": line.request.model,
        "choices": [shape(tokenizer, i, c) for i, c in enumerate(told)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": prompt_tokens + completion,
        },
    }
    return {"status_code": 200, "request_id": "req_" + _name(line.id), "body": body}


def failed(bad: BadLine) -> dict[str, Any]:
    """The record of a line that cannot be answered."""
    if bad.custom:
        return _openai(bad.id, None, {"code": "invalid_request", "message": str(bad), "line": bad.number})
    return {"id": bad.id, "line": bad.number, "error": str(bad)}


def _openai(line_id: str | int, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": "batch_req_" + _name(line_id), "custom_id": line_id, "response": response, "error": error}


def _name(line_id: str | int) -> str:
    return hashlib.blake2b(str(line_id).encode(), digest_size=12).hexdigest()


def _chat_choice(tokenizer: Tokenizer, index: int, told: dict[str, Any]) -> dict[str, Any]:
    logprobs = None
    if "logprobs" in told:
        best = told.get("top_logprobs") or [[] for _ in told["tokens"]]
        logprobs = {
            "content": [
                _token(tokenizer, token, logprob)
                | {"top_logprobs": [_token(tokenizer, b["id"], b["logprob"]) for b in tops]}
                for token, logprob, tops in zip(told["tokens"], told["logprobs"], best, strict=True)
            ]
        }
    message = {"role": "assistant", "content": told["text"]}
    return {"index": index, "message": message, **_ending(told, logprobs)}


def _text_choice(tokenizer: Tokenizer, index: int, told: dict[str, Any]) -> dict[str, Any]:
    logprobs = None
    if "logprobs" in told:
        texts = [token_text(tokenizer, token) for token in told["tokens"]]
        logprobs = {
            "tokens": texts,
            "token_logprobs": told["logprobs"],
            "top_logprobs": [{b["token"]: b["logprob"] for b in tops} for tops in told.get("top_logprobs", [])] or None,
            "text_offset": [sum(map(len, texts[:i])) for i in range(len(texts))],
        }
    return {"index": index, "text": told["text"], **_ending(told, logprobs)}


def _ending(told: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
    reason = "length" if told["finish"] == "length" else "stop"
    return {"logprobs": logprobs, "finish_reason": reason, "token_ids": told["tokens"]}


def _token(tokenizer: Tokenizer, token: int, logprob: Any) -> dict[str, Any]:
    data = tokenizer.id_to_bytes(token, skip_special_tokens=False)
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}
