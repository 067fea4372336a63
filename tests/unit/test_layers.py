"""Imports follow the rooms of DESIGN.md section 11, and only the data plane knows pyspark."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "headwater"

# A room may import, at module level, itself and rooms of lower rank; late imports (inside functions) are how the
# engine reaches the data plane and the connectors, and are not counted.
RANK = {
    "errors": 0,
    "codes": 0,
    "config": 1,
    "limits": 1,
    "model": 2,
    "storage": 3,
    "capture": 4,
    "backfill": 4,
    "view": 4,
    "logstore": 4,
    "sink": 4,
    "sql": 4,
    "server": 4,
    "barrier": 5,
    "connectors": 6,
    "runtime": 7,
    "spark": 8,
    "engine": 9,
    "readonly": 9,
    "api": 10,
    "testing": 10,
    "cli": 10,
    "demo": 11,
}
# Within a rank: the delivery loop and backfills build on contracts of their neighbours.
NEIGHBOURS = {("sink", "logstore"), ("backfill", "capture")}
# The connectors' own Spark parts, inside functions.
LATE_PYSPARK = {"connectors"}


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def early_imports(nodes: Sequence[ast.stmt]) -> Iterator[str]:
    """The modules imported when a module is imported; not what only the type checker sees, nor inside functions."""
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.Import(names=names):
                yield from (n.name for n in names)
            case ast.If(test=test, body=body, orelse=other):
                if "TYPE_CHECKING" not in ast.unparse(test):
                    yield from early_imports(body)
                yield from early_imports(other)
            case ast.Try(body=body) | ast.With(body=body) | ast.ClassDef(body=body):
                yield from early_imports(body)


def all_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.Import(names=names):
                yield from (n.name for n in names)


def modules() -> list[Path]:
    return sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py")


def test_every_room_has_a_rank() -> None:
    assert {room(p) for p in modules()} <= set(RANK)


def test_imports_go_downwards_only() -> None:
    wrong = []
    for path in modules():
        for module in early_imports(ast.parse(path.read_text()).body):
            if not module.startswith("headwater."):
                continue
            here, there = room(path), module.split(".")[1]
            if here != there and RANK[there] >= RANK[here] and (here, there) not in NEIGHBOURS:
                wrong.append(f"{path.relative_to(SOURCE)} imports {module}")
    assert wrong == []


def test_pyspark_is_imported_in_the_data_plane_only() -> None:
    wrong = []
    for path in modules():
        if room(path) == "spark":
            continue
        tree = ast.parse(path.read_text())
        allowed = room(path) in LATE_PYSPARK or path.is_relative_to(SOURCE / "testing")
        found = early_imports(tree.body) if allowed else all_imports(tree)
        wrong += [f"{path.relative_to(SOURCE)} imports {m}" for m in found if m.split(".")[0] == "pyspark"]
    assert wrong == []


@pytest.mark.parametrize("module", ["headwater.engine", "headwater.cli", "headwater.testing", "headwater.sql.parser"])
def test_everything_outside_the_data_plane_is_importable_without_spark(module: str) -> None:
    code = f"import sys; sys.modules['pyspark'] = None; import {module}; assert 'py4j' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-600:]
