"""How many staged splits one epoch hands over: what views behind them take in a few seconds, and all that are late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headwater.backfill.cdc.state import SplitState
from headwater.capture.splits import SplitKind
from headwater.connectors.postgres.client import format_lsn
from headwater.runtime.backfill import OVERDUE_BYTES, TableBackfill
from headwater.runtime.epoch_size import FIRST_ROWS, ROW_SIZES, EpochSize
from headwater.runtime.splits import SplitInfo
from headwater.storage.checkpoint import JobRow, SplitRow

TABLE = 7
LIMIT = ROW_SIZES[FIRST_ROWS]
TARGET = 10 * OVERDUE_BYTES


def job(job_id: int, kind: str, state: str, **spec: Any) -> JobRow:
    return JobRow(job_id, f"{kind}{job_id}", kind, state, "main", "", spec)


def table(*dependants: JobRow, splits: int = 6, rows: int = LIMIT // 2, low: int = TARGET - 1) -> TableBackfill:
    registry = SimpleNamespace(dependants=lambda _: list(dependants))
    spool = SimpleNamespace(bytes_between=lambda after, upto: upto - after)
    source = SimpleNamespace(handed_rows=EpochSize(ROW_SIZES, FIRST_ROWS), spool=spool)
    core: Any = SimpleNamespace(registry=registry)
    found = TableBackfill(core, source, job(TABLE, "table", "creating", captured={"floor": 1}))  # type: ignore[arg-type]
    for i in range(splits):
        row = SplitRow(TABLE, 1, i, None, None, SplitState.STAGED, row_count=rows, offset_high=format_lsn(TARGET))
        found.splits[i] = SplitInfo(row, SplitState.STAGED, low_lsn=low - i)
    return found


def handed(found: TableBackfill) -> list[int]:
    found.source.handed_rows.record_arrived(0)
    return sorted(x.row.split_id for x in found._ready(TARGET))


def test_table_that_no_view_reads_hands_over_all_that_is_staged() -> None:
    sink, creating = job(8, "sink", "live"), job(9, "view", "creating")
    assert handed(table(sink, creating)) == [0, 1, 2, 3, 4, 5]


def test_table_behind_a_live_view_hands_over_as_many_rows_as_an_epoch_takes_the_oldest_reads_first() -> None:
    assert handed(table(job(8, "view", "live"))) == [4, 5]


def test_failed_view_still_has_to_take_them() -> None:
    assert handed(table(job(8, "view", "failed"))) == [4, 5]


def test_split_that_is_larger_than_an_epoch_is_handed_over_alone() -> None:
    assert handed(table(job(8, "view", "live"), rows=3 * LIMIT)) == [5]


def test_reads_that_the_stream_has_left_far_behind_do_not_wait() -> None:
    """Everything since such a read is decoded once more when it is handed over."""
    found = table(job(8, "view", "live"), low=TARGET - OVERDUE_BYTES - 1)
    assert handed(found) == [0, 1, 2, 3, 4, 5]


def test_rows_in_physical_ranges_are_handed_over_whole_whatever_reads_them() -> None:
    found = table(job(8, "view", "live"))
    found.kind = SplitKind.CTID
    assert handed(found) == [0, 1, 2, 3, 4, 5]


def test_all_are_handed_over_in_the_end() -> None:
    found, count = table(job(8, "view", "live")), 0
    for _ in range(3):
        for split in handed(found):
            found.splits[split].state = SplitState.HANDED_OVER
            count += 1
    assert count == 6
