"""The package as a whole: what importing it costs, what it exports, what it requires, how big its parts are."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxdecode

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "jaxdecode").rglob("*.py"))
MODULES = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in SOURCES]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run_fresh(code: str) -> str:
    """What ``code`` prints in an interpreter of its own."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_import_brings_nothing_beyond_jax_and_numpy() -> None:
    code = """
import sys
import numpy, jax, jax.numpy, jax.monitoring
known = {name.split('.')[0] for name in sys.modules} | set(sys.stdlib_module_names)
import jaxdecode
for name in jaxdecode.__all__:
    getattr(jaxdecode, name)
print(*{name.split('.')[0] for name in sys.modules} - known)
"""
    assert run_fresh(code).split() == ["jaxdecode"]


def test_import_alone_runs_no_computation_and_starts_no_backend() -> None:
    code = "import jaxdecode; jaxdecode.generate; from jax._src import xla_bridge as x"
    assert run_fresh(f"{code}; print(x.backends_are_initialized())") == "False\n"


def test_version_costs_no_jax() -> None:
    assert run_fresh("import sys, jaxdecode; print(jaxdecode.__version__, 'jax' in sys.modules)") == (
        f"{jaxdecode.__version__} False\n"
    )


@pytest.mark.parametrize("name", MODULES)
def test_all_is_explicit_and_true(name: str) -> None:
    module = importlib.import_module(name)
    exported = module.__all__
    assert len(set(exported)) == len(exported)
    for public in exported:
        assert hasattr(module, public), f"{name}.{public}"


def test_every_folder_is_a_package() -> None:
    assert [str(p.parent) for p in SOURCES if not (p.parent / "__init__.py").exists()] == []


def test_version_stands_in_one_place() -> None:
    version = jaxdecode.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", version)
    assert PROJECT["dynamic"] == ["version"]
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text()
    assert [p.name for p in SOURCES if f'"{version}"' in p.read_text()] == ["_version.py"]


def test_installed_version_is_this_one() -> None:
    try:
        installed = importlib.metadata.version("jaxdecode")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from the checkout, not installed")
    assert installed == jaxdecode.__version__


@pytest.mark.parametrize("name", ["jax", "jaxlib"])
def test_requirement_excludes_the_two_faulty_versions(name: str) -> None:
    (requirement,) = [r for r in PROJECT["dependencies"] if re.match(rf"{name}\b", r)]
    assert set(requirement.removeprefix(name).split(",")) == {">=0.10.1", "!=0.10.2", "!=0.11.1"}


def test_runtime_requirements_are_three() -> None:
    assert [re.split(r"[<>=!]", r)[0] for r in PROJECT["dependencies"]] == ["jax", "jaxlib", "numpy"]


def test_types_are_published() -> None:
    assert (ROOT / "jaxdecode" / "py.typed").exists()


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= 60, f"{node.name}: {lines} lines"
