"""The examples in the docstrings run, and say what they print."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import jaxdecode

MODULES = ["jaxdecode", *(m.name for m in pkgutil.walk_packages(jaxdecode.__path__, "jaxdecode."))]
PUBLIC = [name for name in MODULES if not any(part.startswith("_") for part in name.split("."))]
WITH_EXAMPLES = ["generate", "temperature", "top_k", "top_p", "min_p", "chain"]  # what the README leads to first


def examples(module: ModuleType) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    for test in examples(module):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_what_users_meet_first_has_an_example(name: str) -> None:
    public = getattr(jaxdecode, name)
    found = doctest.DocTestFinder().find(public, name, module=importlib.import_module(public.__module__))
    assert any(test.examples for test in found)


def test_a_wrong_example_would_be_noticed() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=lambda text: None)
    assert (result.failed, result.attempted) == (1, 1)
