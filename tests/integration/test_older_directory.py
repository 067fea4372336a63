"""Data directories that earlier commits made, killed under load, are opened by this one and go on exactly.

`tests/fixtures/make_directory.py` says what they hold. Their source is gone for good, so what each must come to is what
it has by itself: everything that its spool held, in every table, view and sink.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from engine_process import EngineProcess, running, wait_until
from headwater.connectors.files.sink import read_table

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures").glob("directory-*.tar.xz"))


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.name)
def test_directory_of_an_earlier_commit_goes_on_exactly_from_what_its_spool_holds(
    fixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(fixture) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)  # the sink's target is named by a relative path
    monkeypatch.setenv("HW_TEST_PASSWORD", "of a server that is gone")
    expected = json.loads((tmp_path / "data" / "expected.json").read_text())
    with running(tmp_path / "data") as engine:
        began = engine.sql("SELECT count(*) AS n FROM slow")
        assert _plain(engine, "orders") != _sorted(expected["orders"])  # the last transactions are in the spool alone
        engine.sql("RESUME")
        for name, rows in expected.items():
            wait_until(lambda name=name, rows=rows: _plain(engine, name) == _sorted(rows), 60, f"{name} as it was")  # type: ignore[misc]
        engine.sql("INSERT INTO notes VALUES (4, 'four'); FLUSH")
        assert _table(engine, "SELECT * FROM notes") == [
            {"id": 1, "body": "one"}, {"id": 2, "body": "zwei"}, {"id": 3, "body": "three"}, {"id": 4, "body": "four"},
        ]  # fmt: skip
        _views_equal_their_queries(engine)
        revenue = _table(engine, "SELECT * FROM revenue")
        wait_until(lambda: _delivered(tmp_path / "target") == revenue, 60, "delivery")
        assert engine.sql("SELECT count(*) AS n FROM slow") == began  # the rest of its copy needs the source
        states = {r["name"]: r["state"] for r in engine.sql("SELECT name, state FROM hw_catalog.hw_jobs")}
        assert states["slow"] == "creating" and states["orders"] == states["revenue"] == "live"


def _views_equal_their_queries(engine: EngineProcess) -> None:
    for view in ("large", "revenue", "pages"):
        definition = engine.sql(f"SELECT definition FROM hw_catalog.hw_jobs WHERE name = '{view}'")[0]["definition"]
        query = definition.split(" AS ", 1)[1]
        assert _table(engine, f"SELECT * FROM {view}") == _table(engine, query), view


def _plain(engine: EngineProcess, name: str) -> list[Any]:
    return _sorted(engine.sql(f"SELECT * FROM {name}"))


def _table(engine: EngineProcess, query: str) -> list[Any]:
    return sorted(engine.sql(query), key=repr)


def _sorted(rows: list[dict[str, Any]]) -> list[str]:
    """Amounts are numbers in the source's JSON and text in ours, moments are spelt in two ways."""
    return sorted(json.dumps({k: _value(k, v) for k, v in r.items()}, sort_keys=True) for r in rows)


def _value(name: str, value: Any) -> Any:
    if name == "amount":
        return float(value)
    return value[:19] if name == "at" else value


def _delivered(target: Path) -> list[Any]:
    return sorted(read_table(target).to_pylist(), key=repr)
