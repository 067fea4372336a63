"""Compaction: what is due, and that the merges of many tables are one Spark job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, SEQ, Column, Schema
from headwater.runtime import maintenance
from headwater.runtime.maintenance import MAX_DELTAS, Maintenance
from headwater.runtime.tables import TableState
from headwater.spark.tasks import Task, run_guarded
from headwater.storage.checkpoint import JobRow, Segment
from headwater.storage.files import DataDir
from headwater.storage.segments import write_segment

MB = 1024 * 1024
SCHEMA = Schema((Column("id", "BIGINT", nullable=False), Column("v", "STRING")), ("id",))


def segment(number: int, *, table: int = 1, path: str = "", kind: str = "delta", size: int = 1000) -> Segment:
    return Segment(number, table, path or f"{kind}{number}", kind, True, 1, size, 1, 9)


@pytest.mark.parametrize(
    ("base", "deltas", "folded"),
    [
        ([100 * MB], [20 * MB], False),
        ([100 * MB], [20 * MB, 6 * MB], True),
        ([], [3 * MB], False),
        ([], [5 * MB], True),
        ([1000] * 65, [], True),
        ([2 * MB] * 65, [], False),
    ],
)
def test_table_is_folded_when_its_deltas_have_grown_or_its_base_has_crumbled(
    base: list[int], deltas: list[int], folded: bool
) -> None:
    found = [segment(i, kind="base", size=size) for i, size in enumerate(base)]
    found += [segment(100 + i, size=size) for i, size in enumerate(deltas)]
    assert maintenance._must_fold(found) is folded


def written(data_dir: DataDir, table: int, count: int) -> list[Segment]:
    """So many deltas: each writes its own key and key 0, the last one deletes key 0."""
    found = []
    for number in range(1, count + 1):
        op = OP_DELETE if number == count else OP_UPSERT
        rows = {"id": [0, number], "v": [f"v{number}", "x"], OP: [op, OP_UPSERT], SEQ: [2 * number, 2 * number + 1]}
        new = write_segment(data_dir, table, SCHEMA, pa.table(rows), kind="delta", vnode_count=4)
        # The first is the largest: what merges before have made.
        size = 10_000 if number == 1 else 1000
        found.append(segment(number, table=table, path=new.path, size=size))
    return found


def test_merges_of_all_tables_with_many_deltas_are_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir = DataDir(str(tmp_path))
    deltas = {1: MAX_DELTAS + 1, 2: MAX_DELTAS, 3: MAX_DELTAS // 2, 4: MAX_DELTAS + 4}
    segments = {table: written(data_dir, table, count) for table, count in deltas.items()}
    jobs = []

    def in_this_process(_: Any, groups: Sequence[Sequence[Task]]) -> list[dict[str, Any]]:
        jobs.append(1)
        return [result for group in groups for task in group for result in run_guarded(task)]

    async def run(_: str, __: str, work: Callable[[], Any]) -> Any:
        return work()

    monkeypatch.setattr("headwater.spark.tasks.run_tasks", in_this_process)
    states = [
        TableState(JobRow(table, f"t{table}", "table", "live", "main", "", {}), SCHEMA, list(found))
        for table, found in segments.items()
    ]
    core: Any = SimpleNamespace(
        dataflow=SimpleNamespace(swaps=[], states=lambda: states, staging=False),
        meta=SimpleNamespace(committed_epoch=lambda: 5, segments_at=lambda table, _: segments[table]),
        jobs=SimpleNamespace(run=run),
        data_dir=data_dir,
        vnode_count=4,
        slots=2,
        spark=None,
    )
    house = Maintenance(core)
    asyncio.run(house.compact())
    assert len(jobs) == 1
    swaps = {swap.table_id: swap for swap in core.dataflow.swaps}
    assert set(swaps) == {1, 2, 4}, "table 2 is due soon and comes along; table 3 is not"
    for table, swap in swaps.items():
        count = deltas[table]
        assert set(swap.removed.values()) == set(range(2, count + 1)), "the largest stays"
        rows = pq.read_table(tmp_path / swap.added[0].path).to_pylist()
        assert {r["id"]: r[OP] for r in rows} == {0: OP_DELETE, **dict.fromkeys(range(2, count + 1), OP_UPSERT)}
    asyncio.run(house.compact())
    assert len(jobs) == 1, "what waits for its barrier is not merged again"
