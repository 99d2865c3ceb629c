"""Who may import whom: the table of layers, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "jaxdecode"
BOTTOM = {"arithmetic", "base", "checks", "keys", "meshes", "observed", "quant"}
EVERYTHING = {p.stem for p in ROOT.iterdir() if p.stem[0] not in "_." and (p.suffix == ".py" or p.is_dir())}
# For each part, the parts it may import. Decoders and models meet at base, never at each other.
MAY_IMPORT = {
    **dict.fromkeys(BOTTOM, BOTTOM),
    **dict.fromkeys(["kvcache", "linear", "transforms"], BOTTOM),
    "models": BOTTOM | {"kvcache", "linear"},
    **dict.fromkeys(["testing", "composition"], BOTTOM),
    "adapters": BOTTOM | {"composition"},
    "decoders": BOTTOM | {"kvcache", "transforms"},
    "constraints": BOTTOM | {"transforms"},
    **dict.fromkeys(["processing", "rulebook"], BOTTOM | {"transforms", "constraints", "processing"}),
    **dict.fromkeys(
        [
            "loop",
            "generation",
            "exporting",
            "caches",
            "scoring",
            "session",
            "engine",
            "checkpoint",
            "text",
            "benchmark",
        ],
        EVERYTHING - {"cli"},
    ),
    **dict.fromkeys(["calibration", "evaluation", "quantization_report"], EVERYTHING - {"cli"}),
    "cli": EVERYTHING,
}
FILES = sorted(
    p for p in ROOT.rglob("*.py") if p.relative_to(ROOT).parts[0] not in ("__init__.py", "__main__.py", "_version.py")
)


def imported_parts(tree: ast.AST) -> set[str]:
    """The parts of the package that run when this file does; imports for annotations alone do not count."""
    parts = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{a.name}" for a in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("jaxdecode.")}
        parts |= imported_parts(node)
    return parts & EVERYTHING


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_layers(path: Path) -> None:
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert part in MAY_IMPORT, f"{part} stands in no layer"
    assert imported_parts(ast.parse(path.read_text())) <= MAY_IMPORT[part] | {part}


def test_the_table_would_notice() -> None:
    assert imported_parts(ast.parse("def f():\n    from jaxdecode.models import toy")) == {"models"}
    assert imported_parts(ast.parse("from jaxdecode import checks, kvcache")) == {"checks", "kvcache"}
    assert imported_parts(ast.parse("import jaxdecode.cli.app")) == {"cli"}
    assert not imported_parts(ast.parse("if TYPE_CHECKING:\n    from jaxdecode.models import toy"))
    assert "models" not in MAY_IMPORT["decoders"]
    assert "decoders" not in MAY_IMPORT["models"]
