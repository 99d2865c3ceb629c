"""The command line on the toy model: what it prints, where, and how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdecode
from jaxdecode.cli import main

ROOT = Path(__file__).parents[1]
N = 32  # of new tokens, nearly everywhere: one size, one program
TOY = ("generate", "--model", "toy", "--max-new-tokens", str(N), "--no-compile-cache")

# The command line on a toy that never ends; it tells on stderr when it has loaded and when it has written 20 tokens.
ENDLESS = """
import sys, jaxdecode
from jaxdecode.cli import main
load, stream = jaxdecode.load, jaxdecode.stream
def endless(source, **options):
    loaded = load(source, **options)
    print("loaded", file=sys.stderr, flush=True)
    if "slow to load" in sys.argv:
        import time
        time.sleep(60)
    return loaded._replace(params=loaded.params.at[:, 256].set(-float("inf")))
def counted(*arguments):
    for i, info in enumerate(stream(*arguments)):
        if i == 20:
            print("twenty", file=sys.stderr, flush=True)
        yield info
jaxdecode.load, jaxdecode.stream = endless, counted
main()
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Result]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the command line in this process: ``call(*arguments, stdin=b"") -> Result``."""

    def run(*arguments: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "argv", ["jaxdecode", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            main()
        return Result(int(ended.value.code or 0), *capsys.readouterr())

    return run


@contextlib.contextmanager
def process(*arguments: str, program: tuple[str, ...] = ("-m", "jaxdecode"), **options: Any) -> Iterator[Any]:
    """The command line in a process of its own, on pipes, in an environment that asks nothing of jax or XLA."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "TF_", "XLA_"))}
    command = [sys.executable, *program, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, encoding="utf-8", env=plain | pipes.pop("env", {}), **pipes
    ) as p:
        try:
            yield p
        finally:
            p.kill()


def finish(p: subprocess.Popen[str]) -> Result:
    out, err = p.communicate(timeout=300)
    return Result(p.returncode, out, err)


def finished(*arguments: str, **options: Any) -> Result:
    with process(*arguments, **options) as p:
        return finish(p)


def expected_text(prompt: str, **settings: Any) -> str:
    loaded = jaxdecode.load("toy")
    key = jax.random.key(settings.pop("seed", 0))
    chosen = loaded.settings(max_new_tokens=N, **{"temperature": 0.0, **settings})
    out = jaxdecode.generate(loaded.model, loaded.params, [loaded.tokenizer.encode(prompt)], key=key, settings=chosen)
    return loaded.tokenizer.decode(out.to_lists()[0], continuation=True)


# Text and JSON


def test_prints_what_the_library_generates(call: Call) -> None:
    result = call(*TOY, "hello ")
    assert result == Result(0, expected_text("hello ") + "\n", "")
    assert len(result.out) > 2


@pytest.mark.parametrize("how", [["--no-stream"], ["--stream"]])
def test_settings_reach_the_draw(call: Call, how: list[str]) -> None:
    options = ["--temperature", "1.5", "--top-k", "9", "--top-p", "0.95", "--min-p", "0.01", "--seed", "3"]
    text = expected_text("hello ", temperature=1.5, top_k=9, top_p=0.95, min_p=0.01, seed=3)
    assert call(*TOY, "hello ", *options, *how) == Result(0, text + "\n", "")


def test_same_seed_same_text_other_seed_other_text(call: Call) -> None:
    one, again, other = (call(*TOY, "hello ", "--temperature", "1", "--seed", s).out for s in ("1", "1", "2"))
    assert one == again
    assert one != other


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_reads_stdin_and_drops_one_line_end(call: Call, arguments: list[str]) -> None:
    assert call(*TOY, *arguments, stdin=b"two words, \n") == call(*TOY, "two words, ")


def test_json_is_one_object_and_nothing_else(call: Call) -> None:
    result = call(*TOY, "hello ", "--json")
    told = json.loads(result.out)
    assert result == Result(0, json.dumps(told, ensure_ascii=False) + "\n", "")
    assert set(told) == {"model", "text", "tokens", "finish", "prompt_tokens", "completion_tokens"}
    assert told["model"] == "toy"
    assert told["text"] == expected_text("hello ")
    assert told["finish"] == "eos"
    assert told["tokens"] == [*told["text"].encode(), 256]
    assert (told["prompt_tokens"], told["completion_tokens"]) == (6, len(told["tokens"]))


def test_streamed_bytes_that_are_no_text_join_to_the_decoded_text(call: Call) -> None:
    options = (*TOY, "hello ", "--temperature", "50", "--seed", "7")
    told = json.loads(call(*options, "--json").out)
    assert "�" in told["text"]
    assert told["text"] == jaxdecode.load("toy").tokenizer.decode(told["tokens"])
    assert call(*options).out == told["text"] + "\n"


def test_finish_is_told(call: Call) -> None:
    told = json.loads(call(*TOY, "hello ", "--json", "--temperature", "50").out)
    assert (told["finish"], told["completion_tokens"]) == ("length", N)
    told = json.loads(call(*TOY, "hello ", "--json", "--max-new-tokens", "0").out)
    assert (told["finish"], told["completion_tokens"], told["text"]) == ("length", 0, "")


def test_dtype_reaches_the_params(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    load, seen = jaxdecode.load, []

    def watched(source: str, **options: Any) -> Any:
        seen.append(load(source, **options))
        return seen[-1]

    monkeypatch.setattr(jaxdecode, "load", watched)
    assert call(*TOY, "hello ", "--dtype", "bfloat16").code == 0
    assert [loaded.params.dtype for loaded in seen] == [jnp.bfloat16]


def test_chat_uses_the_template_and_the_system_message(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    load = jaxdecode.load
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"

    def with_template(source: str, **options: Any) -> Any:
        loaded = load(source, **options)
        return loaded._replace(tokenizer=dataclasses.replace(loaded.tokenizer, chat_template=template))

    monkeypatch.setattr(jaxdecode, "load", with_template)
    count = len("uhi;")
    assert json.loads(call(*TOY, "hi", "--chat", "--json").out)["prompt_tokens"] == count
    count += len("sbe kind;")
    told = json.loads(call(*TOY, "hi", "--chat", "--system", "be kind", "--json").out)
    assert told["prompt_tokens"] == count
    assert json.loads(call(*TOY, "hi", "--json").out)["prompt_tokens"] == 2


def test_a_broken_model_is_told_after_the_output(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    load = jaxdecode.load

    def broken(source: str, **options: Any) -> Any:
        loaded = load(source, **options)
        return loaded._replace(params=loaded.params.at[ord("o")].set(jnp.nan))

    monkeypatch.setattr(jaxdecode, "load", broken)
    result = call(*TOY, "hello w", "--json")
    told = json.loads(result.out)
    assert (result.code, told["finish"], told["text"][-1:]) == (1, "nan", "o")
    assert result.err == "jaxdecode: error: the text ends early (nan): the model's logits held NaN or infinity\n"


# Errors


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "warm"], "--temperature"),
        (["--top-k", "-1"], "top_k"),
        (["--top-k", "2.5"], "--top-k"),
        (["--top-p", "0"], "top_p"),
        (["--top-p", "1.01"], "top_p"),
        (["--min-p", "-0.1"], "min_p"),
        (["--max-new-tokens", "-1"], "max_new_tokens"),
        (["--max-new-tokens", "70000"], "context"),
        (["--seed", "-1"], "--seed"),
        (["--seed", "4294967296"], "--seed"),
        (["--dtype", "int3"], "--dtype"),
        (["--model", "toys"], "toys"),
        (["--model", "nowhere.gguf"], "nowhere.gguf"),
        (["--system", "be kind"], "--chat"),
        (["--chat"], "chat template"),
        (["--frobnicate"], "--frobnicate"),
        (["another"], "another"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_input_is_one_line_and_exit_2(call: Call, arguments: list[str], about: str) -> None:
    assert_bad(call(*TOY, "hello", *arguments), about)


def test_bad_prompts(call: Call) -> None:
    assert_bad(call(*TOY, ""), "PROMPT")
    assert_bad(call(*TOY, stdin=b""), "PROMPT")
    assert_bad(call(*TOY, stdin=b"\n"), "PROMPT")
    assert_bad(call(*TOY, stdin=b"\xff\xfe"), "UTF-8")
    assert_bad(call(*TOY, "a\udcff"), "surrogate")
    assert_bad(call(*TOY, stdin=b"a" * 65536), "context")


def test_unknown_command(call: Call) -> None:
    assert_bad(call("genrate", "hello"), "genrate")


def assert_bad(result: Result, about: str) -> None:
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("jaxdecode: error: ")
    assert result.err.count("\n") == 1
    assert about in result.err


# The process: start, signals, pipes, terminal


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"], []])
def test_help_and_version_do_not_import_jax(arguments: list[str]) -> None:
    tell = "import atexit, sys; atexit.register(lambda: print('jax' in sys.modules))"
    result = finished(*arguments, program=("-c", f"{tell}; from jaxdecode.cli import main; main()"))
    assert (result.code, result.err) == (0, "")
    *text, imported = result.out.splitlines()
    assert imported == "False"
    assert (f"jaxdecode {jaxdecode.__version__}" if "--version" in arguments else "Usage: jaxdecode") in text[0]


def test_without_its_extra_it_names_the_command_to_run() -> None:
    program = "import sys; sys.modules['typer'] = None; from jaxdecode.cli import main; main()"
    assert_bad(finished("--help", program=("-c", program)), "pip install 'jaxdecode[cli]'")


def test_compiled_programs_are_kept_unless_told_otherwise(tmp_path: Path) -> None:
    def run(folder: str, *options: str) -> Result:
        return finished(*TOY[:-1], "hello ", *options, env={"JAXDECODE_CACHE": str(tmp_path / folder)})

    (tmp_path / "file").touch()
    cold, warm, nowhere, off = run("on"), run("on"), run("file/below"), run("off", "--no-compile-cache")
    assert cold == warm == nowhere == off == Result(0, expected_text("hello ") + "\n", "")
    assert any("step" in path.name for path in (tmp_path / "on" / "xla" / jax.__version__).rglob("*-cache"))
    assert not (tmp_path / "off").exists()


def endless(*options: str) -> Any:
    return process(*TOY, "hello ", "--max-new-tokens", "60000", *options, program=("-c", ENDLESS))


def endless_text(n: int) -> str:
    """The arg-max chain of the toy without its end token."""
    best = np.array(jaxdecode.load("toy").params)[:, :256].argmax(axis=1)
    ids = [ord(" ")]
    for _ in range(n):
        ids.append(int(best[ids[-1]]))
    return bytes(ids[1:]).decode()


def test_interrupt_in_the_middle_keeps_the_text() -> None:
    with endless() as p:
        assert [p.stderr.readline(), p.stderr.readline()] == ["loaded\n", "twenty\n"]
        p.send_signal(signal.SIGINT)
        result = finish(p)
    assert (result.code, result.err, result.out[-1]) == (130, "", "\n")
    text = result.out[:-1]
    assert 20 <= len(text) < 60000
    assert text == endless_text(len(text))


def test_interrupt_in_the_middle_keeps_the_json() -> None:
    with endless("--json") as p:
        assert [p.stderr.readline(), p.stderr.readline()] == ["loaded\n", "twenty\n"]
        p.send_signal(signal.SIGINT)
        result = finish(p)
    assert (result.code, result.err) == (130, "")
    told = json.loads(result.out)
    assert told["finish"] == "cancelled"
    assert 20 <= told["completion_tokens"] == len(told["tokens"]) < 60000
    assert told["text"] == endless_text(len(told["tokens"]))


def test_interrupt_while_loading_is_quiet() -> None:
    with process(*TOY, "slow to load", program=("-c", ENDLESS)) as p:
        assert p.stderr.readline() == "loaded\n"
        p.send_signal(signal.SIGINT)
        assert finish(p) == Result(130, "", "")


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    with endless() as p:
        assert len(p.stdout.read(10)) == 10
        p.stdout.close()
        assert set(p.stderr.read().split()) <= {"loaded", "twenty"}
        assert p.wait(timeout=300) > 0


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_progress_is_shown_on_a_terminal_and_taken_away() -> None:
    ours, theirs = os.openpty()
    shown = b""
    with process(*TOY, "hello ", stderr=theirs, env={"TERM": "xterm", "COLUMNS": "80"}) as p:
        os.close(theirs)
        with contextlib.suppress(OSError):  # the other end is closed
            while True:
                shown += os.read(ours, 4096)
        assert finish(p)[:2] == (0, expected_text("hello ") + "\n")
    os.close(ours)
    assert b"compiling" in shown
    assert shown.rstrip().endswith(b"\x1b[2K")  # that line is empty now
