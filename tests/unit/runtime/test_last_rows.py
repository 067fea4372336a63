"""A stop writes what was acknowledged last without waiting for Spark."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headwater.model.schema import OP, Column, Schema
from headwater.runtime.dataflow import LAST_ROWS, Dataflow
from headwater.spark.write_rows import WriteRows
from headwater.storage.files import DataDir

SCHEMA = Schema((Column("id", "BIGINT", nullable=False), Column("v", "STRING")), ("id",))


def dataflow(*, stopping: bool) -> Dataflow:
    async def by_spark(*_: Any) -> list[dict[str, Any]]:
        return [{"by": "spark"}]

    found = Dataflow.__new__(Dataflow)
    core: Any = SimpleNamespace(stopping=stopping, jobs=SimpleNamespace(run=by_spark), spark=None, slots=2)
    found.core = core
    return found


@pytest.fixture
def task(tmp_path: Path) -> WriteRows:
    data = DataDir(str(tmp_path))
    rows = pa.table({"id": [2, 1, 2], "v": ["old", "b", "new"], OP: pa.array(np.ones(3, np.int8))})
    with data.create("staging/a.arrow") as out, pa.ipc.new_file(out, rows.schema) as writer:
        writer.write_table(rows)
    return WriteRows(data, 1, SCHEMA, (("staging/a.arrow", 7),), "delta", 4)


def test_the_rows_of_the_last_statements_become_a_segment_in_the_engine_itself(tmp_path: Path, task: WriteRows) -> None:
    (result,) = asyncio.run(dataflow(stopping=True)._run_tasks([(3, task)]))
    segment = result["segment"]
    written = pq.read_table(tmp_path / segment["path"]).to_pylist()
    assert {r["id"]: r["v"] for r in written} == {1: "b", 2: "new"} and segment["rows"] == 2


def test_many_rows_and_those_of_a_running_engine_are_sparks(task: WriteRows) -> None:
    assert asyncio.run(dataflow(stopping=False)._run_tasks([(3, task)])) == [{"by": "spark"}]
    assert asyncio.run(dataflow(stopping=True)._run_tasks([(LAST_ROWS + 1, task)])) == [{"by": "spark"}]
    captured: Any = object()
    assert asyncio.run(dataflow(stopping=True)._run_tasks([(3, task), (3, captured)])) == [{"by": "spark"}]
