"""The copy of one captured table: wait until it has entered the stream, plan its splits, read them by Spark jobs.

It runs beside the lane and only stages; `backfill.py` hands over at barriers. Transient errors are retried with
back-off, for ever; a definite one stops this table.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from headwater.backfill.cdc.state import ReadPaused, SplitEvent, SplitState, step
from headwater.capture.splits import DEFAULT_ROWS_PER_SPLIT, Split, SplitKind
from headwater.errors import HeadwaterError, TransientError
from headwater.runtime.reads import SMALL_BYTES
from headwater.runtime.splits import SplitInfo, bounds_of
from headwater.storage.checkpoint import Contribution, NewSegment, SplitRow

if TYPE_CHECKING:
    from headwater.connectors.postgres.client import PostgresConfig
    from headwater.runtime.backfill import TableBackfill

log = logging.getLogger(__name__)
POLL_S: Final = 0.2
RETRY_S: Final = (0.5, 10.0)
# A job costs about as much as reading 100,000 rows. Small splits are read several in turn, but results come at its end.
JOB_S: Final = 2.0
MOST_IN_TURN: Final = 8
# Definite while a table is being created, but for one that exists they may pass: passwords are rotated, servers moved.
PASSING: Final = frozenset({"SOURCE_AUTH_FAILED", "SOURCE_NOT_FOUND", "SOURCE_TLS"})


@dataclasses.dataclass(frozen=True, slots=True)
class SharedSnapshot:
    """A snapshot that several reads use: its name at the server, what it sees, and the table's files before it."""

    name: str = ""
    low: str = ""
    storage: str = ""


class Copying:
    """See the head of this module."""

    def __init__(self, backfill: TableBackfill) -> None:
        self.table = backfill
        self.core = backfill.core
        self._in_turn = 1
        self._trouble = ""  # why the last read failed; shown until one succeeds

    async def run(self) -> None:
        delay = RETRY_S[0]
        while self.table.unfinished:
            try:
                if not self.table.planned:
                    await self._wait_for_entry()
                    await self._plan()
                await self._read_some()
                delay = RETRY_S[0]
            except ReadPaused:
                pass  # the split is read anew when the limit is lifted
            except HeadwaterError as error:
                if not isinstance(error, TransientError) and error.code not in PASSING:
                    if not self.core.capture.healing.read_failed(self.table, error):
                        await self._stop_for_good(error)
                    return
                self.core.record_error(self.table.table_id, self.table.name, error, retrying=True)
                self._trouble = str(error)
                self.table.report(waiting_for=self._trouble)
                await asyncio.sleep(delay)
                delay = min(RETRY_S[1], delay * 2)
            except Exception as error:
                # A fault of ours: it is shown, and tried again like a passing one, because nothing is lost by that.
                log.exception("the copy of %s failed", self.table.name)
                fault = TransientError("BACKFILL_FAILED", f"the copy failed: {type(error).__name__}")
                self.core.record_error(self.table.table_id, self.table.name, fault, retrying=True)
                await asyncio.sleep(RETRY_S[1])

    async def _stop_for_good(self, error: HeadwaterError) -> None:
        contribution = Contribution()
        self.core.job_failed(self.table.table_id, error, contribution)
        with contextlib.suppress(HeadwaterError):
            await self.core.main.request(contribution=contribution)
        self.table.report(waiting_for=str(error))

    async def _wait_for_entry(self) -> None:
        async for text in entry(self.table.source.config, self.table.mark):
            self.table.report(phase="waiting", waiting_for=text)
        self.table.report(waiting_for="")

    async def _plan(self) -> None:
        table = self.table
        splits = await asyncio.to_thread(self._planned)
        estimate = max(0, table.info.rows)
        kind = splits[0].kind
        cursor = table.wants_cursor and kind is SplitKind.KEY
        rows = [
            SplitRow(table.table_id, table.generation, x.split_id, *bounds_of(x), SplitState.PLANNED) for x in splits
        ]
        states: dict[tuple[int, str], Any] = {
            (table.table_id, "plan"): {"kind": str(kind), "rows": estimate, "cursor": cursor},
        }
        await self.core.main.request(contribution=Contribution(splits=rows, states=states))
        table.planned_as(kind, rows, estimate, cursor=cursor)

    def _planned(self) -> list[Split]:
        """Two planners over one hand-over rule: ranges for parallel reads (v2), or one cursor (v1)."""
        from headwater.connectors.postgres.client import connect
        from headwater.connectors.postgres.planner import plan_cursor, plan_splits

        table = self.table
        rows_per_split = int(table.settings.get("backfill_num_rows_per_split") or DEFAULT_ROWS_PER_SPLIT)
        with connect(table.source.config) as conn:
            table.describe(conn)
            if table.wants_cursor and (splits := plan_cursor(table.info)):
                return splits
            return plan_splits(conn, table.info, rows_per_split=rows_per_split)

    # -- reading ----------------------------------------------------------------------------------------------------

    async def _read_some(self) -> None:
        """One Spark job over the next splits, or over all of them in turn where they must share a snapshot."""
        table = self.table
        waiting = [s for s in table.splits.values() if s.state is SplitState.PLANNED]
        if not waiting and table.replacing and table.prepared is None:
            await self._difference()
        elif not waiting or table.rate_limit == 0:
            table.report(waiting_for="the rate limit is 0" if waiting and not self.core.paused else "")
            await table.wait(POLL_S)
        elif table.kind is SplitKind.KEY:
            await self._read_ranges(waiting)
        else:
            await self._read_whole(waiting)

    async def _read_ranges(self, waiting: list[SplitInfo]) -> None:
        """The next splits; so many in turn that the job is worth its cost, unless somebody wants it slow."""
        slow = self.table.rate_limit is not None or self.table.cursor
        turns = 1 if slow else min(self._in_turn, -(-len(waiting) // self._batch))
        begin = time.monotonic()
        await self._read(waiting[: self._batch * turns], SharedSnapshot())
        per_turn = (time.monotonic() - begin) / turns
        self._in_turn = max(1, min(MOST_IN_TURN, int(JOB_S / per_turn)))

    async def _difference(self) -> None:
        """A resync is read: what it changes is made here, and taken by the next barrier."""
        from headwater.runtime.difference import resync_difference

        table = self.table
        if any(s.state is not SplitState.STAGED for s in table.splits.values()):
            await table.wait(POLL_S)
            return
        table.report(waiting_for="the difference of the table and its new copy")
        await resync_difference(table)
        table.report(waiting_for="")

    async def _read_whole(self, waiting: list[SplitInfo]) -> None:
        """Physical ranges: a row that an update moved between two reads would be missed, or seen twice."""
        if len(self.table.splits) == 1:
            await self._read(waiting, SharedSnapshot())
            return
        async with exported_snapshot(self.table.source.config, self.table.oid) as snapshot:
            while waiting:
                batch = waiting[: self._batch]
                await self._read(batch, snapshot)
                waiting = waiting[len(batch) :]

    @property
    def _batch(self) -> int:
        return 1 if self.table.cursor else min(self.table.parallelism, self.core.capture.reads.slots.total)

    @property
    def _small(self) -> bool:
        """The table is read whole and quickly: it shares a job with others. A limited read would hold them up."""
        table = self.table
        one = len(table.splits) == 1 and not table.cursor and table.rate_limit is None
        return one and table.info is not None and table.info.size_bytes <= SMALL_BYTES

    async def _read(self, batch: list[SplitInfo], snapshot: SharedSnapshot) -> None:
        self.table.report(waiting_for=self._trouble)
        for split in batch:
            split.state = step(split.state, SplitEvent.READ_STARTED)
        try:
            results = await self._read_job(batch, snapshot)
        except BaseException:
            for split in batch:
                split.state = step(split.state, SplitEvent.READ_FAILED)
            if snapshot.name:
                self.table.forget_staged()
            raise
        await asyncio.to_thread(self._staged, batch, results)
        self._trouble = ""
        self.table.report(waiting_for="")

    async def _read_job(self, batch: list[SplitInfo], snapshot: SharedSnapshot) -> dict[int, dict[str, Any]]:
        tasks = await asyncio.to_thread(self._read_tasks, batch, snapshot)
        reads, table = self.core.capture.reads, self.table
        results = await reads.run(table.table_id, tasks, at_once=self._batch, small=self._small)
        return {r["split_id"]: r for r in results}

    def _read_tasks(self, batch: list[SplitInfo], snapshot: SharedSnapshot) -> list[Any]:
        tasks = self.table.read_tasks([i.row for i in batch], snapshot)
        return [dataclasses.replace(t, page_rows=self.table.page_rows) for t in tasks] if self.table.cursor else tasks

    def _staged(self, batch: list[SplitInfo], results: dict[int, dict[str, Any]]) -> None:
        from headwater.connectors.postgres.client import format_lsn

        table = self.table
        for info in batch:
            result = results[info.row.split_id]
            segment = NewSegment(**result["segment"]) if result["segment"] else None
            info.segment = segment
            info.low_lsn = table.low_lsn(result["low"])
            info.row = dataclasses.replace(
                info.row,
                state=SplitState.STAGED,
                right=result["right"],
                row_count=result["rows"],
                bytes=segment.bytes if segment else 0,
                offset_low=result["low"],
                offset_high=format_lsn(result["high"]),
                staged_path=segment.path if segment else None,
            )
        table.staged(batch, max(r["high"] for r in results.values()))


async def entry(config: PostgresConfig, mark: int) -> AsyncIterator[str]:
    """Ends when every transaction that ran at the mark is visible; gives, again and again, whom it waits for."""
    from headwater.connectors.postgres.client import connect
    from headwater.connectors.postgres.slots import EntryMark, blocking_transactions, entry_satisfied, waiting_for

    def look() -> str | None:
        with connect(config) as conn:
            if entry_satisfied(conn, EntryMark(mark)):
                return None
            return waiting_for(blocking_transactions(conn, EntryMark(mark))) or "transactions that are still open"

    while (text := await asyncio.to_thread(look)) is not None:
        yield text
        await asyncio.sleep(POLL_S)


@asynccontextmanager
async def exported_snapshot(config: PostgresConfig, table_oid: int) -> AsyncIterator[SharedSnapshot]:
    """A snapshot that other sessions can take as theirs while this lasts."""
    from headwater.connectors.postgres.client import connect, translated
    from headwater.connectors.postgres.planner import read_snapshot_mark, storage

    def export() -> tuple[Any, SharedSnapshot]:
        conn = connect(config, application="headwater snapshot")
        files = storage(conn, table_oid)
        with translated("exporting a snapshot"):
            conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            low = read_snapshot_mark(conn)
            row = conn.execute("SELECT pg_export_snapshot()").fetchone()
        return conn, SharedSnapshot(str(row[0]) if row else "", low, files)

    conn, snapshot = await asyncio.to_thread(export)
    try:
        yield snapshot
    finally:
        conn.close()
