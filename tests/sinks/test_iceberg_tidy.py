"""An Iceberg target stays small: snapshots expire, manifests are merged, dead files go, and no row is touched."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headwater.connectors.iceberg import tidy
from headwater.model.schema import Column
from headwater.sink.registry import open_sink

COLUMNS = (Column("id", "BIGINT", False), Column("name", "STRING", True))


def sink_into(folder: Path, generation: int = 1, **more: str) -> Any:
    catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
    options = {"connector": "iceberg", **{f"catalog.{k}": v for k, v in catalog.items()}, **more}
    options |= {"database.name": "shop", "table.name": "t", "type": "append-only", "snapshots.keep": "3"}
    return open_sink("small", options, COLUMNS, (), generation, os.path.expandvars)


def deliver(sink: Any, epoch: int) -> None:
    """A batch of one row, staged as Spark would."""
    token = sink.prepare(epoch, epoch + 1)
    staged = Path(token.payload["directory"].removeprefix("file://")) / "op=1"
    staged.mkdir(parents=True)
    pq.write_table(pa.table({"id": pa.array([epoch], pa.int64()), "name": ["x"]}), staged / "part-0.parquet")
    added, _ = sink._data_files(token.payload["directory"])
    sink.commit(token.written(rows=1, added=added, removed=[], seen=""))


def ids(sink: Any) -> list[int]:
    return sorted(sink.load().scan().to_arrow()["id"].to_pylist())


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidy, "STEP", 5)


def test_snapshots_of_the_sink_are_bounded_and_every_row_stays(tmp_path: Path, often: None) -> None:
    sink = sink_into(tmp_path)
    sink.validate(COLUMNS, ())
    sink.claim()
    deliver(sink, 1)
    sink.load().manage_snapshots().create_tag(sink.load().current_snapshot().snapshot_id, "mine").commit()
    tagged = sink.load().current_snapshot().snapshot_id
    for epoch in range(2, 31):
        deliver(sink, epoch)
    table = sink.load()
    assert len(table.metadata.snapshots) <= 3 + tidy.STEP + 1
    assert table.snapshot_by_id(tagged) is not None, "a snapshot with a tag was expired"
    assert len(table.current_snapshot().manifests(table.io)) <= 8 + tidy.STEP
    assert ids(sink) == list(range(1, 31))
    assert sink.last_committed() == 31


def test_files_without_a_snapshot_go_after_an_hour_and_no_others(tmp_path: Path, often: None) -> None:
    sink = sink_into(tmp_path)
    sink.validate(COLUMNS, ())
    sink.claim()
    for epoch in range(1, 21):
        deliver(sink, epoch)
    location = str(sink.load().location())
    garbage = f"{location}/headwater-expired-{sink._digest}"
    before = set(tmp_path.rglob("*.avro"))
    tidy.sweep(garbage, location)
    assert set(tmp_path.rglob("*.avro")) == before, "a reader of an hour ago may still need them"
    tidy.sweep(garbage, location, now_s=time.time() + tidy.FILES_KEPT_S + 1)
    assert len(set(tmp_path.rglob("*.avro"))) < len(before) / 2
    table = sink.load()
    assert ids(sink) == list(range(1, 21))
    for snapshot in table.metadata.snapshots:
        table.scan(snapshot_id=snapshot.snapshot_id).to_arrow()  # each one that is left is whole
    deliver(sink, 21)
    assert ids(sink) == list(range(1, 22))


def test_an_engine_that_was_replaced_tidies_nothing(tmp_path: Path, often: None) -> None:
    sink = sink_into(tmp_path)
    sink.validate(COLUMNS, ())
    sink.claim()
    for epoch in range(1, 6):
        deliver(sink, epoch)
    sink_into(tmp_path, generation=2).claim()
    before = sink.load().metadata.snapshots
    sink.tidy()
    assert sink.load().metadata.snapshots == before


def test_what_a_newer_engine_stages_is_not_removed_by_an_older_one(tmp_path: Path) -> None:
    old = sink_into(tmp_path)
    old.validate(COLUMNS, ())
    old.claim()
    table = old.load()  # the older engine has looked, and is stopped here
    successor = sink_into(tmp_path, generation=2)
    successor.claim()
    staged = Path(successor.prepare(1, 2).payload["directory"].removeprefix("file://"))
    staged.mkdir(parents=True)
    old._remove_stale(table)
    assert staged.exists()
    sink_into(tmp_path, generation=3)._remove_stale(table)
    assert not staged.exists(), "staging of a dead engine stays for ever"
