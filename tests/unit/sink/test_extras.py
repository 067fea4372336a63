"""Libraries that only some connectors need are extras; who lacks one is told which to install."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest

from headwater.errors import UsageError
from headwater.sink.registry import CONNECTORS, EXTRAS, sink_options

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LIBRARIES = {"mysql": "pymysql", "kafka": "confluent_kafka", "delta": "deltalake", "iceberg": "pyiceberg"}


@pytest.mark.parametrize("connector", sorted(EXTRAS))
def test_missing_library_is_an_error_that_says_what_to_install(connector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, ours = LIBRARIES[EXTRAS[connector]], f"headwater.connectors.{EXTRAS[connector]}."
    for name in [n for n in sys.modules if n.startswith((f"{library}.", ours))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError) as found:
        sink_options({"connector": connector}, resolve_secret=str)
    assert found.value.code == "SINK_LIBRARY_MISSING"
    assert found.value.hint == f"pip install 'headwater[{EXTRAS[connector]}]'"
    assert EXTRAS[connector] in PROJECT["optional-dependencies"]


def test_library_of_an_extra_is_imported_by_the_connectors_that_have_it_and_nobody_else() -> None:
    users: dict[str, set[str]] = {library: set() for library in LIBRARIES.values()}
    for path in (ROOT / "src" / "headwater").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.partition(".")[0] in users:
                    users[name.partition(".")[0]].add(path.parent.name)
    assert users == {library: {extra} for extra, library in LIBRARIES.items()}


def test_every_extra_is_part_of_all() -> None:
    extras = set(PROJECT["optional-dependencies"]) - {"all"}
    assert PROJECT["optional-dependencies"]["all"] == [
        f"headwater[{','.join(e for e in PROJECT['optional-dependencies'] if e in extras)}]"
    ]
    assert set(EXTRAS.values()) < extras and set(EXTRAS) < set(CONNECTORS)
