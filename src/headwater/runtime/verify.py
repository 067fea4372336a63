"""`headwater verify TABLE`: count and checksum per split, at one position, against the source. Exact under load.

    hold the spool ─► wait until all that it held is visible ─► read the source under one snapshot (Spark tasks)
    ─► wait for an epoch N with P(N) ≥ the end of the reads ─► add the events that the snapshot had not seen, up to P(N)
    ─► both sides at P(N): count and checksum of the rows of each split (one Spark job each)

With `repair` the difference of the ranges that are not equal is made the same way and applied by the next barrier
(`difference.py`). Only ranges that are handed over at N are compared. The sums are made in Spark; no row comes to the
driver.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from headwater.backfill.cdc.state import SplitState
from headwater.capture.splits import SplitKind, bound_from_json
from headwater.errors import UsageError
from headwater.runtime.copying import SharedSnapshot, entry, exported_snapshot
from headwater.runtime.difference import add_unseen, frozen_position, handed_over, prepare
from headwater.runtime.splits import EpochPart, in_order
from headwater.storage.checkpoint import NewSegment, Segment, SplitRow

if TYPE_CHECKING:
    from headwater.engine import EngineCore
    from headwater.runtime.backfill import TableBackfill

Bounds = tuple[tuple[str, ...], ...]
IN_TURN: Final = 16  # splits that a reader takes in one job: others wait for its slot so long


@dataclass(slots=True)
class _Copy:
    """The source's rows: what the reads staged, and what they had not seen. All files are ours to delete."""

    generation: int
    """Of the table's rows that it is compared with."""
    segments: list[NewSegment] = field(default_factory=list)
    low: str = ""
    high: int = 0


async def verify(core: EngineCore, name: str, *, repair: bool = False) -> list[dict[str, Any]]:
    """One row per split: split_id, left, right, rows, source_rows, equal, repaired."""
    job = core.registry.find(name, "table")
    table = next((s.tables[job.id] for s in core.capture.sources.values() if job.id in s.tables), None)
    if table is None:
        raise UsageError("NOT_CAPTURED", f"table {job.name} is not captured from a source")
    if core.paused:  # the position of no epoch would reach that of the reads
        raise UsageError(
            "PAUSED", f"the engine is paused, and {table.name} cannot be compared meanwhile", hint="RESUME first"
        )
    if table.rate_limit == 0:
        raise UsageError(
            "PAUSED",
            f"the rate limit of {table.name} is 0: nothing of it is read at the source",
            hint=f"ALTER TABLE {table.name} SET BACKFILL_RATE_LIMIT = DEFAULT",
        )
    if table.replacing:
        raise UsageError("BACKFILL_RUNNING", f"table {table.name} is being copied again", hint="wait until it is live")
    if not repair:
        return await _verify(core, table, repair=False)
    async with table.repairing:
        if table.failed:
            raise UsageError(
                "VERIFY_FAILED", f"table {table.name} has failed and takes no rows", hint=f"RESYNC {table.name}"
            )
        if table.unfinished:
            raise UsageError("BACKFILL_RUNNING", f"table {table.name} is being copied", hint="wait until it is live")
        return await _verify(core, table, repair=True)


async def _verify(core: EngineCore, table: TableBackfill, *, repair: bool) -> list[dict[str, Any]]:
    copy = _Copy(table.generation)
    splits = [s.row for s in table.splits.values()]
    if not splits:
        raise _nothing(table)
    with table.source.holding() as floor:
        try:
            await _read_source(core, table, splits, copy)
            async with frozen_position(table, copy.high, wanted=repair) as (epoch, position):
                core.queries.reading.epochs[id(copy)] = epoch
                state = EpochPart(table, floor, floor, (), (floor,), (copy.low,), replaces=True)
                await add_unseen(core, state, position, copy.segments, stage="verify")
                rows, bounds = await _compare(core, table, copy, epoch)
                _still_the_same(table, copy)
                if not rows:
                    raise _nothing(table)
                if repair and not all(r["equal"] for r in rows):
                    await _repair(table, copy, epoch, position, rows, bounds)
            return rows
        finally:
            core.queries.reading.epochs.pop(id(copy), None)
            core.forget_files([s.path for s in copy.segments])


def _still_the_same(table: TableBackfill, copy: _Copy) -> None:
    """A new copy takes the place of all rows: what was compared with those before it says nothing, nor mends them."""
    if table.generation != copy.generation:
        raise UsageError(
            "BACKFILL_RUNNING",
            f"a new copy of table {table.name} began while it was compared",
            hint="wait until it is live, and compare it again",
        )


def _nothing(table: TableBackfill) -> UsageError:
    copied = table.captured.get("snapshot", True)
    hint = "wait for its copy" if copied else "it was created with snapshot='false': only later changes are in it"
    return UsageError("NOTHING_TO_VERIFY", f"nothing of table {table.name} is handed over", hint=hint)


async def _repair(
    table: TableBackfill, copy: _Copy, epoch: int, position: int, rows: list[dict[str, Any]], bounds: Bounds
) -> None:
    """Put the source's rows into the ranges that differ; returns when that is committed."""
    from headwater.spark.verify import in_splits

    wrong = tuple(i for i, row in enumerate(rows) if not row["equal"])
    plans = {p.name: p for p in table.plans}
    keys = tuple(plans[k] for k in table.schema.key) if bounds else ()
    only = in_splits(table.schema.key, keys, bounds, wrong) if bounds else None
    prepared = await prepare(table, epoch, position, copy.segments, only)
    prepared.copy = ()  # the files are the caller's to delete
    try:
        _still_the_same(table, copy)
    except UsageError:
        table.core.forget_files([s.path for s in prepared.segments])
        raise
    await handed_over(table, prepared, repair=True)
    for i in wrong:
        rows[i]["repaired"] = True


async def _read_source(core: EngineCore, table: TableBackfill, splits: list[SplitRow], copy: _Copy) -> None:
    mark = await asyncio.to_thread(table.source.enter_again, table)
    async for _ in entry(table.source.config, mark["mark"]):
        pass
    async with exported_snapshot(table.source.config, table.oid) as snapshot:
        copy.low = snapshot.low
        first = 0
        while first < len(splits):
            count = core.capture.reads.slots.at_once(table.parallelism)
            size = count * (IN_TURN if table.rate_limit is None else 1)
            await _read_batch(core, table, splits[first : first + size], count, snapshot, copy)
            first += size


async def _read_batch(
    core: EngineCore, table: TableBackfill, rows: list[SplitRow], readers: int, snapshot: SharedSnapshot, copy: _Copy
) -> None:
    readers = min(readers, len(rows))
    tasks = await asyncio.to_thread(table.read_tasks, rows, snapshot, readers)
    tasks = [replace(task, by_index=True) for task in tasks]
    for result in await core.capture.reads.run(table.table_id, tasks, at_once=readers):
        copy.high = max(copy.high, result["high"])
        if result["segment"]:
            copy.segments.append(NewSegment(**result["segment"]))


async def _compare(
    core: EngineCore, table: TableBackfill, copy: _Copy, epoch: int
) -> tuple[list[dict[str, Any]], Bounds]:
    from headwater.spark.query import explained
    from headwater.spark.verify import checksums

    rows = await asyncio.to_thread(core.meta.split_rows, table.table_id)
    rows = in_order(r for r in rows if r.generation == table.generation)
    bounds: Bounds = ()
    if table.kind is SplitKind.KEY:
        bounds = tuple(bound_from_json(r.left) or () for r in rows[1:])
    else:
        rows = rows[:1]  # physical ranges have no place among keys: the table is compared as a whole
    ours = await asyncio.to_thread(core.meta.segments_at, table.table_id, epoch)

    def work(segments: Sequence[Segment | NewSegment]) -> dict[int, tuple[int, str, str]]:
        with explained("VERIFY_FAILED"):
            plans = {p.name: p for p in table.plans}
            keys = tuple(plans[k] for k in table.schema.key) if bounds else ()
            return checksums(core.reader(table.schema).snapshot(segments), table.schema, keys, bounds)

    mine = await core.jobs.run("query", "verify", functools.partial(work, ours))
    theirs = await core.jobs.run("query", "verify", functools.partial(work, copy.segments))
    none = (0, "", "")
    found = [
        {
            "split_id": row.split_id,
            "left": row.left if bounds else None,
            "right": row.right if bounds else None,
            "rows": mine.get(i, none)[0],
            "source_rows": theirs.get(i, none)[0],
            "equal": mine.get(i, none) == theirs.get(i, none),
            "repaired": False,
        }
        for i, row in enumerate(rows)
        if row.state == SplitState.HANDED_OVER and (row.handed_over_epoch or 0) <= epoch
    ]
    return found, bounds
