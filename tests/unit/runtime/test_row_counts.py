"""When the rows of a table are counted, and what is known of them while no engine runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, SEQ, Column, Schema
from headwater.runtime import row_counts
from headwater.runtime.row_counts import QUIET_S, STALE_S, RowCount, RowCounts, offline_count, stored_count
from headwater.runtime.tables import TableState
from headwater.storage.checkpoint import Contribution, JobRow, NewSegment
from headwater.storage.files import DataDir
from headwater.storage.meta import MAIN_LANE, MetaStore
from headwater.storage.segments import write_segment

SCHEMA = Schema((Column("id", "BIGINT"),), ("id",))
JOB = JobRow(1, "t", "table", "live", MAIN_LANE, "", {"schema": SCHEMA.as_dict(), "inputs": []})


def segment(data_dir: DataDir, kind: str, rows: list[tuple[int, int]], seq: int = 0) -> NewSegment:
    ids, ops = zip(*rows, strict=True)
    table = pa.table({"id": ids, OP: pa.array(ops, pa.int8()), SEQ: pa.array(range(seq, seq + len(ids)), pa.int64())})
    return write_segment(data_dir, JOB.id, SCHEMA, table, kind=kind, vnode_count=4)


@pytest.fixture
def meta(tmp_path: Path) -> Iterator[MetaStore]:
    store = MetaStore(f"sqlite:///{tmp_path}/meta.db")
    store.acquire()
    yield store
    store.close()


def test_a_directory_without_an_engine_tells_the_rows_that_it_holds(tmp_path: Path, meta: MetaStore) -> None:
    data_dir = DataDir(str(tmp_path))
    base = segment(data_dir, "base", [(i, OP_UPSERT) for i in range(5)])
    meta.commit_checkpoint(MAIN_LANE, 5, Contribution([base], jobs_added=[JOB]), seq_high=1)
    assert offline_count(meta, data_dir, JOB, 4) == stored_count(meta, 1) == RowCount(5, 5)
    delta = segment(data_dir, "delta", [(4, OP_UPSERT), (5, OP_UPSERT), (0, OP_DELETE), (9, OP_DELETE)], 10)
    meta.commit_checkpoint(MAIN_LANE, 7, Contribution([delta]), seq_high=1)
    assert stored_count(meta, 1) == RowCount(5, 0)  # not counted since it has deltas
    assert offline_count(meta, data_dir, JOB, 4) == RowCount(5, 7)
    stored = Contribution(states={(1, "rows"): {"rows": 5, "epoch": 7}})
    meta.commit_checkpoint(MAIN_LANE, 9, stored, seq_high=1)
    (tmp_path / delta.path).unlink()  # what was counted is not counted again
    assert offline_count(meta, data_dir, JOB, 4) == RowCount(5, 7)


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_a_table_is_counted_when_it_is_quiet_or_was_not_for_long_and_then_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, jobs = Clock(), []
    state = TableState(JOB, SCHEMA)
    monkeypatch.setattr(row_counts, "time", clock)

    async def run(_pool: str, stage: str, _work: Any) -> dict[int, int]:
        jobs.append(stage)
        return {1: 7}

    core: Any = SimpleNamespace(
        meta=SimpleNamespace(committed_epoch=lambda: 5),
        dataflow=SimpleNamespace(states=lambda: [state], uncommitted=[]),
        registry=SimpleNamespace(by_id={1: JOB}),
        jobs=SimpleNamespace(run=run),
    )
    counts = RowCounts(core)

    def after(seconds: float) -> tuple[int, int]:
        clock.now += seconds
        asyncio.run(counts.update())
        return counts.of(JOB).rows, len(jobs)

    assert after(0) == (0, 0)  # a table without deltas costs no job
    delta = NewSegment(1, "a", "delta", 9, 9)
    state.segments = [*state.segments, delta]
    core.dataflow.uncommitted = [(6, delta)]
    assert after(60) == (0, 0)
    core.dataflow.uncommitted = []
    assert after(0) == (7, 1)
    assert after(STALE_S) == after(STALE_S) == (7, 1)
    for _ in range(int(STALE_S)):
        state.segments = [*state.segments, delta]
        found = after(1.0)
    assert found == (7, 2), "once in all that time"
    assert after(QUIET_S)[1] == 3
    state.segments = [NewSegment(1, "b", "base", 8, 9)]  # folded
    assert after(0) == (8, 3)
    contribution = Contribution()
    counts.contribute(contribution)
    assert contribution.states == {(1, "rows"): {"rows": 8, "epoch": 5}}
    core.registry.by_id = {}
    core.dataflow.states = list
    asyncio.run(counts.update())
    assert counts._counts == {} and counts._watched == {}
