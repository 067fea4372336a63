"""Differences between a captured table and a new copy of it, made outside the lane: for a resync, and for a repair.

    copy (reads are done) ─► an epoch E with P(E) ≥ their end ─► the events that the reads had not seen, up to P(E)
    ─► one Spark job: what turns the table at E into that ─► `Prepared`, which the next barrier applies (splits.py)

A barrier then takes as long as its own events need, however large the table is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from headwater.errors import DefiniteError, TransientError, UsageError
from headwater.runtime.splits import EpochPart, Prepared
from headwater.storage.checkpoint import NewSegment

if TYPE_CHECKING:
    from headwater.engine import EngineCore
    from headwater.runtime.backfill import TableBackfill

POLL_S: Final = 0.2
WAIT_S: Final = 300.0  # for the engine to reach the position of the reads


async def covering_epoch(core: EngineCore, table: TableBackfill, high: int) -> tuple[int, int]:
    """The newest committed epoch, once its position is at or after `high`; and that position."""
    from headwater.connectors.postgres.client import parse_lsn

    if table.source.reader is not None:
        table.source.reader.nudge(high)
    for _ in range(int(WAIT_S / POLL_S)):
        rows = await asyncio.to_thread(core.meta.position_rows)
        newest = max((r for r in rows if r["source_id"] == table.source.job_id), key=lambda r: int(r["epoch"]))
        position = parse_lsn(newest["position"])
        if position >= high:
            return int(newest["epoch"]), position
        await asyncio.sleep(POLL_S)
    raise TransientError(
        "VERIFY_TOO_SLOW",
        f"the engine did not reach the position of the comparison in {WAIT_S:.0f} s",
        hint="RESUME, if it is paused, or try again when it has caught up",
    )


async def add_unseen(core: EngineCore, state: EpochPart, position: int, copy: list[NewSegment], *, stage: str) -> None:
    """Bring a copy to a position: decode what its reads had not seen, as a hand-over does. Changes `copy`."""
    from headwater.runtime.source_runtime import PIECE_BYTES
    from headwater.spark.capture import DecodeTables
    from headwater.spark.query import explained
    from headwater.spark.tasks import run_tasks

    source = state.backfill.source
    ranges = tuple(await asyncio.to_thread(source.spool.ranges, state.first_lsn, position, PIECE_BYTES))
    if not ranges:
        return
    size = sum(r.end - r.start for r in ranges)
    work = state.captured(core.sequence.take(size), tuple(s.path for s in copy))
    task = DecodeTables(core.data_dir, str(source.directory), ranges, (work,), core.vnode_count)

    def run() -> list[dict[str, Any]]:
        with explained("VERIFY_FAILED"):
            return run_tasks(core.spark, [[task]])

    for result in await core.jobs.run("query", stage, run):
        if "error" in result:
            error = result["error"]
            raise DefiniteError(error["code"], error["message"], detail=error["detail"], hint=error["hint"])
        kept = _kept(state, copy, result["truncate"])
        core.forget_files(s.path for s in copy if s not in kept)
        copy[:] = [*kept, *(NewSegment(**segment) for segment in result["segments"])]


def _kept(state: EpochPart, copy: list[NewSegment], truncate: list[int] | None) -> list[NewSegment]:
    """What a TRUNCATE that its reads had not seen leaves of a copy."""
    import numpy as np

    from headwater.connectors.postgres.planner import visible

    if state.handing:
        return state.handed_segments(truncate)
    snapshot = state.snapshots[0] or ""
    unseen = truncate is not None and not visible(snapshot, np.array([truncate[1]], np.uint32))[0]
    return [] if unseen else list(copy)


async def resync_difference(table: TableBackfill) -> None:
    """All splits of a resync are read: make the difference of the table and the new copy, and hand it over."""
    core = table.core
    splits = list(table.splits.values())
    async with frozen_position(table, max(x.high for x in splits)) as (epoch, position):
        core.queries.reading.epochs[id(splits)] = epoch
        try:
            copy = [x.segment for x in splits if x.segment is not None]
            await add_unseen(core, table.handing_all(position), position, copy, stage="resync")
            await handed_over(table, await prepare(table, epoch, position, copy))
        finally:
            core.queries.reading.epochs.pop(id(splits), None)


@asynccontextmanager
async def frozen_position(table: TableBackfill, high: int, *, wanted: bool = True) -> AsyncIterator[tuple[int, int]]:
    """An epoch at or after `high` and its position, for a difference.

    The events after it are applied once more. To rows without a key that cannot be done: for such a table the source
    stands still at the position meanwhile; its stream goes on into the spool.
    """
    source = table.source
    if not (wanted and table.schema.multiset):
        yield await covering_epoch(table.core, table, high)
        return
    await covering_epoch(table.core, table, high)
    source.frozen += 1
    try:
        epoch, position = await covering_epoch(table.core, table, source.position)
        while position != source.position:  # a barrier was on its way
            epoch, position = await covering_epoch(table.core, table, source.position)
        yield epoch, position
    finally:
        source.frozen -= 1


async def handed_over(table: TableBackfill, prepared: Prepared, *, repair: bool = False) -> None:
    """Give a difference to the next barrier, and wait until it is committed.

    A table that fails, or is dropped, takes none. The copy of a resync is ended then by whoever does that; a repair
    has nobody to end it.
    """
    table.prepared = prepared
    while prepared.applied == 0 or table.core.meta.committed_epoch() < prepared.applied:
        await asyncio.sleep(POLL_S)
        if prepared.lost:
            raise TransientError(
                "RESYNC_FAILED", f"the new rows of {table.name} were dropped by a recovery or a newer copy"
            )
        if repair and (table.table_id not in table.core.registry.by_id or table.failed):
            raise UsageError("RESYNC_FAILED", f"table {table.name} was dropped, or failed, before it had the new rows")


async def prepare(
    table: TableBackfill, epoch: int, position: int, copy: Sequence[NewSegment], only: Any = None
) -> Prepared:
    """The difference of the table at an epoch and a copy as of its position; `only`: of some rows (spark/verify.py)."""
    from headwater.spark.query import explained
    from headwater.spark.resync import difference

    core, schema = table.core, table.next_shape.schema
    present = await asyncio.to_thread(core.meta.segments_at, table.table_id, epoch)

    def work() -> list[NewSegment]:
        with explained("RESYNC_FAILED"):
            return difference(core, table.table_id, schema, present, copy, only)

    segments = await core.jobs.run("backfill", "resync", work)
    return Prepared(position, segments, tuple(s.path for s in present), tuple(s.path for s in copy))
