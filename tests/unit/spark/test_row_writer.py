"""Changed rows of views as a worker writes them; the worker itself is Spark's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.model.schema import Column, Schema
from headwater.spark import row_writer
from headwater.spark.row_writer import FULL, RowWriter, writable
from headwater.storage.files import DataDir
from headwater.storage.segments import read_segments

SCHEMA = Schema((Column("v", "INT"), Column("_key", "STRING", False)), ("_key",))


def writer(root: Path) -> RowWriter:
    return RowWriter(DataDir(str(root)), 7, SCHEMA, 4, 1000, "tables/7/job")


def batch(values: range) -> pa.RecordBatch:
    ones = pa.array([1] * len(values), pa.int8())
    return pa.RecordBatch.from_pydict({"v": list(values), "_key": [str(v) for v in values], "_op": ones})


def test_a_task_writes_bounded_segments_into_its_jobs_folder_with_growing_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_writer, "SEGMENT_ROWS", 10)
    found = list(writer(tmp_path)(iter([batch(range(0)), batch(range(12)), batch(range(12, 15))])))
    rows = [r for b in found for r in b.to_pylist()]
    assert [(r["table_id"], r["rows"], r["error"]) for r in rows] == [(7, 12, None), (7, 3, None)]
    assert all(r["path"].startswith("tables/7/job/") for r in rows)
    stored = read_segments(DataDir(str(tmp_path)), SCHEMA, [r["path"] for r in rows])
    assert sorted(stored.column("v").to_pylist()) == list(range(15))
    assert sorted(stored.column("_seq").to_pylist()) == list(range(1000, 1015))


def test_a_full_disk_is_told_and_not_taken_for_a_failing_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_more: object) -> Iterator[None]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_writer, "write_segment", full)
    (told,) = list(writer(tmp_path)(iter([batch(range(3))])))
    assert told.to_pylist()[0]["error"] == FULL


def test_types_that_arrow_brings_otherwise_are_left_to_sparks_writer() -> None:
    assert writable(SCHEMA)
    assert not writable(Schema((*SCHEMA.columns, Column("m", "MAP<STRING, INT>")), ("_key",)))
