"""Deltas of wide rows are put together by their keys: what is read is the same, and other columns are not touched."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headwater.model.schema import OP, SEQ, Column, Schema
from headwater.spark import table
from headwater.spark.table import TableReader
from headwater.storage.checkpoint import NewSegment
from headwater.storage.files import DataDir
from headwater.storage.segments import write_segment

pytestmark = pytest.mark.spark
SCHEMA = Schema((Column("id", "BIGINT", nullable=False), Column("n", "INT"), Column("body", "BINARY")), ("id",))


def segment(data_dir: DataDir, kind: str, seq: int, rows: dict[int, int | None]) -> NewSegment:
    """Rows by id with their n; None is a delete."""
    found = pa.table(
        {
            "id": pa.array(list(rows), pa.int64()),
            "n": pa.array(list(rows.values()), pa.int32()),
            "body": pa.array([bytes(1000) if n is not None else None for n in rows.values()], pa.binary()),
            OP: pa.array([2 if n is None else 1 for n in rows.values()], pa.int8()),
            SEQ: pa.array([seq] * len(rows), pa.int64()),
        }
    )
    return write_segment(data_dir, 1, SCHEMA, found, kind=kind, vnode_count=16)


def test_wide_deltas_give_the_same_rows_and_leave_the_columns_that_are_not_wanted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = DataDir(str(tmp_path))
    segments = [
        segment(data_dir, "base", 0, {1: 1, 2: 2, 3: 3, 4: 4}),
        segment(data_dir, "delta", 1, {2: 20, 3: None, 5: 50}),
        segment(data_dir, "delta", 2, {2: 21, 3: 30, 5: None, 6: 60, 4: None}),
    ]
    reader = TableReader(spark, data_dir, SCHEMA, 16)
    expected = {1: 1, 2: 21, 3: 30, 6: 60}
    for wide in (False, True):
        monkeypatch.setattr(table, "SMALL_DELTA_BYTES", 0 if wide else 1 << 20)
        assert table.has_wide_deltas(segments) is wide
        rows = reader.snapshot(segments)
        assert {r.id: r.n for r in rows.collect()} == expected
        assert rows.where("length(body) = 1000").count() == len(expected)
        changes = reader.changes(segments[1:])
        assert {r.id: (r[OP], r.n) for r in changes.collect() if r[OP] == 1} == {2: (1, 21), 3: (1, 30), 6: (1, 60)}
        assert {r.id for r in changes.collect() if r[OP] == 2} == {4, 5}
    plan = rows.select("id", "n")._jdf.queryExecution().executedPlan().toString()
    assert "FileScan" in plan and "body" not in plan
