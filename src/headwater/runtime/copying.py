"""The copy of one captured table: wait until it has entered the stream, plan its splits, read them by Spark jobs.

It runs outside the lane and only stages; `backfill.py` hands over at barriers. Transient errors are retried with
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

from headwater.backfill.cdc.notes import Notes
from headwater.backfill.cdc.state import ReadPaused, SplitEvent, SplitState, step
from headwater.capture.splits import Split, SplitKind, rows_per_split
from headwater.errors import HeadwaterError, TransientError
from headwater.runtime.reads import SMALL_BYTES
from headwater.runtime.splits import SplitInfo, bounds_of
from headwater.storage.checkpoint import Contribution, NewSegment, SplitRow

if TYPE_CHECKING:
    from headwater.connectors.postgres.client import PostgresConfig
    from headwater.runtime.backfill import TableBackfill

log = logging.getLogger(__name__)
POLL_S: Final = 0.2
REACHED_S: Final = 5.0  # how long the stream may take to reach a read that has ended; then barriers come as they come
RETRY_S: Final = (0.5, 10.0)
MOST_IN_TURN: Final = 256  # splits for each reader: what its jobs are told about them is part of their tasks
NOTES_S: Final = 0.5  # how often the engine looks what a running job has read


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
        self._paths: dict[int, str] = {}  # the file that was taken for a split
        self._failed = False
        self._asked_for_barrier = False
        self._trouble = ""  # why the last read failed; shown until one succeeds

    async def run(self) -> None:
        from headwater.connectors.postgres.client import may_pass

        delay = RETRY_S[0]
        while self.table.unfinished:
            try:
                if not self.table.planned:
                    await self._wait_for_entry()
                    await self._plan()
                await self._read_some()
                delay = RETRY_S[0]
            except ReadPaused:
                pass  # the split is read again when the limit is lifted
            except HeadwaterError as error:
                if self.core.stopping:  # which ends what Spark does
                    return
                if not may_pass(error):
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
        with connect(table.source.config) as conn:
            table.describe(conn)
            if table.wants_cursor and (splits := plan_cursor(table.info)):
                return splits
            wanted = table.settings.get("backfill_num_rows_per_split")
            # Physical ranges are all handed over at once, however small they are.
            rate = table.rate_limit if table.info.ordered_key else None
            rows = rows_per_split(int(wanted) if wanted else None, rate, self._batch)
            return plan_splits(conn, table.info, rows_per_split=rows)

    # -- reading ----------------------------------------------------------------------------------------------------

    async def _read_some(self) -> None:
        """Spark jobs over the splits that wait, in turn or all under one snapshot."""
        table = self.table
        waiting = self._waiting()
        if not waiting and table.replacing and table.prepared is None:
            await self._difference()
        elif not waiting and not (self.core.paused or table.replacing or self._asked_for_barrier):
            await self._hand_over_now()
        elif not waiting or table.rate_limit == 0:
            table.report(waiting_for=table.held if waiting else "")
            await table.wait(POLL_S)
        elif table.kind is SplitKind.KEY:
            await self._read_ranges()
        else:
            await self._read_whole(waiting)

    async def _hand_over_now(self) -> None:
        """All is read. The barrier that hands the last splits over is asked for as soon as the stream has reached them,
        instead of being waited for; once, since whatever keeps it from handing them over may last."""
        table, reader = self.table, self.table.source.reader
        high = max((x.high for x in table.splits.values() if x.state is SplitState.STAGED), default=0)
        self._asked_for_barrier = True
        with contextlib.suppress(TimeoutError, HeadwaterError):  # a stream in trouble is the source's concern
            if reader is not None:
                async with asyncio.timeout(REACHED_S):
                    await reader.wait_for(high)
            await self.core.main.checkpoint()

    async def _read_ranges(self) -> None:
        """Several readers that take from the same splits; where somebody wants it slow, each one split at a time."""
        count, table = self._batch, self.table
        if table.rate_limit is None and not table.cursor:
            await self._read(self._waiting()[: count * MOST_IN_TURN], SharedSnapshot(), readers=count, at_once=count)
            return
        ends = await asyncio.gather(*(self._slow_reader(count) for _ in range(count)), return_exceptions=True)
        faults = [end for end in ends if end is not None]
        if faults:  # one that will not pass by itself decides
            raise min(faults, key=lambda fault: isinstance(fault, TransientError | ReadPaused))

    async def _slow_reader(self, count: int) -> None:
        """Read the next split until there is none, somebody wants it otherwise, or another reader has failed."""
        self._failed = False
        while not self._failed and (split := self._next_split(count)):
            try:
                await self._read([split], SharedSnapshot(), readers=count)
            except BaseException:
                self._failed = True
                raise

    def _next_split(self, count: int) -> SplitInfo | None:
        table = self.table
        slow = table.rate_limit is not None or table.cursor
        waiting = self._waiting() if slow and table.rate_limit != 0 and self._batch == count else []
        return waiting[0] if waiting else None

    def _waiting(self) -> list[SplitInfo]:
        return [s for s in self.table.splits.values() if s.state is SplitState.PLANNED]

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
        if len(self.table.splits) == 1 and self.table.rate_limit is None:
            await self._read(waiting, SharedSnapshot(), readers=1)
            return
        async with exported_snapshot(self.table.source.config, self.table.oid) as snapshot:
            while waiting := self._waiting():  # what a read has left of its split is among them
                readers = self.core.capture.reads.slots.at_once(min(self._batch, len(waiting)))
                each = 1 if self.table.rate_limit is not None else MOST_IN_TURN
                await self._read(waiting[: readers * each], snapshot, readers=readers, at_once=readers)

    @property
    def _batch(self) -> int:
        return 1 if self.table.cursor else min(self.table.parallelism, self.core.capture.reads.slots.total)

    def _goes_on(self, readers: int) -> bool:
        """Nobody wants it otherwise meanwhile."""
        return self.table.rate_limit is None and self._batch == readers

    @property
    def _small(self) -> bool:
        """The table is read whole and quickly: it shares a job with others. A limited read would hold them up."""
        table = self.table
        one = len(table.splits) == 1 and not table.cursor and table.rate_limit is None
        return one and table.info is not None and table.info.size_bytes <= SMALL_BYTES

    async def _read(self, batch: list[SplitInfo], snapshot: SharedSnapshot, *, readers: int, at_once: int = 1) -> None:
        """Spark jobs for as many of them as they get to, `at_once` of the `readers` that the table has."""
        self.table.report(waiting_for=self._trouble)
        self.table.reading(batch)
        try:
            tasks = await asyncio.to_thread(self._read_tasks, batch, snapshot, readers)
            async with self._noted(batch, wanted=len(batch) > 1) as notes:
                reads = self.core.capture.reads
                if self._small:
                    found = await reads.run_small(self.table.table_id, tasks)
                else:
                    found = await reads.run(
                        self.table.table_id, tasks, at_once=at_once, notes=notes, go_on=lambda: self._goes_on(readers)
                    )
            await self._take(batch, {r["split_id"]: r for r in found})
        except BaseException:
            if snapshot.name and any(
                x.state in (SplitState.PLANNED, SplitState.READING) for x in self.table.splits.values()
            ):
                self.core.forget_files(self.table.forget_staged())
            raise
        finally:
            for split in batch:
                if split.state is SplitState.READING:
                    split.state = step(split.state, SplitEvent.READ_FAILED)
        self._trouble = ""
        self.table.read_at = time.time()
        self.table.report(waiting_for="")

    @asynccontextmanager
    async def _noted(self, batch: list[SplitInfo], *, wanted: bool) -> AsyncIterator[Notes | None]:
        """While this lasts, splits are taken as staged when a job has noted that they are; for the last time at the
        end, whatever that was."""
        if not wanted:
            yield None
            return
        notes = await asyncio.to_thread(Notes.fresh, self.core.data_dir)
        ended = asyncio.Event()

        async def look() -> None:
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(NOTES_S):
                        await ended.wait()
                await self._take(batch, await asyncio.to_thread(notes.read))
            await self._take(batch, await asyncio.to_thread(notes.read))

        looking = asyncio.create_task(look(), name=f"notes of {self.table.name}")
        try:
            yield notes
        finally:
            ended.set()
            await asyncio.gather(looking, return_exceptions=True)
            self.core.forget_files([notes.folder])

    def _read_tasks(self, batch: list[SplitInfo], snapshot: SharedSnapshot, readers: int) -> list[Any]:
        tasks = self.table.read_tasks([i.row for i in batch], snapshot, readers)
        page = self.table.page(readers, in_parts=self.table.kind is SplitKind.KEY or bool(snapshot.name))
        return [dataclasses.replace(t, page=page) for t in tasks]

    async def _take(self, batch: list[SplitInfo], results: dict[int, dict[str, Any]]) -> None:
        self.core.forget_files(await asyncio.to_thread(self._staged, batch, results))

    def _staged(self, batch: list[SplitInfo], results: dict[int, dict[str, Any]]) -> list[str]:
        """Take what was read; gives files of reads that were made twice, because a task was tried again."""
        from headwater.connectors.postgres.client import format_lsn

        table = self.table
        taken, left_over = [], []
        for info in batch:
            result = results.get(info.row.split_id)
            if result is None:
                continue
            segment = NewSegment(**result["segment"]) if result["segment"] else None
            if info.state is not SplitState.READING:
                first = self._paths.get(info.row.split_id)
                if segment is not None and first is not None and segment.path != first:
                    left_over.append(segment.path)
                continue
            taken.append(info)
            self._paths[info.row.split_id] = segment.path if segment else ""
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
        if taken:
            table.staged(taken, max(results[i.row.split_id]["high"] for i in taken))
        return left_over


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
