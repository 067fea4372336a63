"""One captured table: its splits from PLANNED to HANDED_OVER, and its part of every epoch.

    wait until the table has entered the stream ─► plan ─► read (Spark jobs outside the lane) ─► staged     copying.py
    barrier N, P(N) ≥ high ─► hand over: the staged file, and the events its read had not seen, in one checkpoint

The rule is `backfill/cdc/mark.py`; the reads are `spark/backfill.py`; the events are decoded by `spark/capture.py`.

A resync is a new generation of splits beside the table's rows. It is handed over whole, as the difference between what
the table holds and what the source had at P(N) (`spark/resync.py`). Meanwhile the table follows the stream as before,
or stands still if the stream has a gap (`follow`).
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import dataclasses
import json
import logging
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

from headwater.backfill.cdc.mark import DROP
from headwater.backfill.cdc.state import CursorState, SplitEvent, SplitState, migrated, step
from headwater.barrier.progress import percent_of
from headwater.capture.splits import (
    DEFAULT_ROWS_PER_SPLIT,
    LEAST_ROWS_PER_SPLIT,
    MAX_SPLITS,
    WHOLE,
    WHOLE_UP_TO,
    Page,
    SplitKind,
    bound_from_json,
    paced_rows,
)
from headwater.errors import HeadwaterError, UsageError
from headwater.runtime.captured_job import TableFacts
from headwater.runtime.copying import Copying, SharedSnapshot
from headwater.runtime.shape import TableShape, evolved, widens
from headwater.runtime.splits import EpochPart, Prepared, SplitInfo, bounds_of, in_order, split_of
from headwater.storage.checkpoint import Contribution, JobRow, NewSegment, SplitRow
from headwater.storage.files import control_file

if TYPE_CHECKING:
    from headwater.engine import EngineCore
    from headwater.runtime.source_runtime import SourceRuntime

log = logging.getLogger(__name__)
# Of the spool since a read: all of it is decoded again when the split is handed over, so it must not grow long.
OVERDUE_BYTES: Final = 32 << 20
DEFAULT_PAGE_ROWS: Final = 10_000  # of a single cursor: every page is a statement and a hand-over


class TableBackfill(TableFacts):
    """See the head of this module. `floor`: the spool must keep what comes after this position."""

    def __init__(self, core: EngineCore, source: SourceRuntime, job: JobRow) -> None:
        super().__init__(core, source, job)
        self.generation = 1
        self.splits: dict[int, SplitInfo] = {}  # in the order of their ranges
        self.planned = False
        self.kind = SplitKind.KEY
        self.cursor = False
        self._migrated = False
        self.floor = int(job.spec["captured"]["floor"])
        self.estimate = 0
        self.info: Any = None
        self.prepared: Prepared | None = None  # waits for the next barrier
        self._applied: Prepared | None = None  # a barrier has it, and is perhaps not committed yet
        self.repairing = asyncio.Lock()  # two differences of one table would each miss what the other does
        # Held by whoever begins a copy or stops the table: the user's RESYNC and `Healing` may want both at once.
        self.deciding = asyncio.Lock()
        self._stands_still = False
        self._dirty: list[SplitRow] = []
        self._changing = threading.Lock()  # reads are noted in one thread, a barrier looks in another
        self._totals: dict[str, Any] = {}
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._launch_floor = self.floor
        self._held = ""  # what was told of it last
        self.read_at = 0.0  # when a read last succeeded

    # -- facts ------------------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        return not self.planned or any(s.state is not SplitState.HANDED_OVER for s in self.splits.values())

    @property
    def stopped(self) -> bool:
        """No copy is being made at the moment."""
        return self._task is None

    def describe(self, conn: Any) -> None:
        """Ask the source for the table as it is now: its name, key and size."""
        from headwater.connectors.postgres.catalogue import describe
        from headwater.runtime.captured_table import with_usable_order

        info = describe(conn, *self.captured["external"])
        self.info = with_usable_order(info, self.next_shape.plans, self.settings)

    @property
    def wants_cursor(self) -> bool:
        """`backfill.parallelism='0'`: one cursor over the table, page by page (v1)."""
        return self.settings.get("backfill_parallelism") == 0

    def page(self, readers: int, *, in_parts: bool) -> Page:
        """How much of its split each reader takes: a cursor a page, a limited read what its limit allows in seconds,
        and others the whole, which they always do if it is not possible `in_parts`."""
        fewest = -(-self.estimate // MAX_SPLITS)
        least = max(LEAST_ROWS_PER_SPLIT, fewest)
        paced = paced_rows(self.rate_limit, readers, least) if self.rate_limit else None
        if self.cursor:
            wanted = max(int(self.settings.get("snapshot_batch_size") or DEFAULT_PAGE_ROWS), fewest)
            rows = min(wanted, paced or wanted)
            return Page(rows, rows, least)
        if not in_parts or len(self.splits) >= MAX_SPLITS:
            return WHOLE
        if self.kind is SplitKind.CTID:  # never given up: all that was read under the same snapshot would be lost
            return Page(0, paced, least) if paced else WHOLE
        if paced:
            return Page(WHOLE_UP_TO * paced, paced, least)
        return Page(int(self.settings.get("backfill_num_rows_per_split") or DEFAULT_ROWS_PER_SPLIT), 0, least)

    # -- life -------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """From committed state; what was read and not stored is read again."""
        states = self.core.meta.states(self.table_id)
        plan = states.get("plan") or {}
        self._resync = states.get("resync") or {}
        self.floor = self._launch_floor = int(states.get("floor") or self.captured["floor"])
        self.kind = SplitKind(plan.get("kind", SplitKind.KEY))
        self.cursor = bool(plan.get("cursor"))
        self.estimate = int(plan.get("rows", 0))
        rows = self.core.meta.split_rows(self.table_id)
        newest = max((r.generation for r in rows), default=self.generation)
        self.generation = int(self._resync.get("generation") or newest)
        rows = in_order(r for r in rows if r.generation == self.generation)
        self._dirty = []
        for prepared in (self.prepared, self._applied):
            if prepared is not None and not 0 < prepared.applied <= self.core.meta.committed_epoch():
                prepared.lost = True
        self.prepared = self._applied = None
        self._totals = states.get("progress") or {}
        self.splits = {row.split_id: self._loaded(row) for row in rows}
        self._shape = None
        self.planned = bool(rows) or not (self.captured["snapshot"] or self.replacing)
        if (stored := states.get("backfill")) and not rows:
            self._migrate(CursorState.from_dict(stored))
        if self.kind is SplitKind.CTID and len({r.offset_low for r in rows}) > 1:
            self.forget_staged()  # of two snapshots: an update may have moved a row between them
        self.report()

    def _migrate(self, state: CursorState) -> None:
        """State of schema v1: it is stored as v2 with the next checkpoint."""
        rows = [
            SplitRow(self.table_id, self.generation, split.split_id, *bounds_of(split), phase)
            for split, phase in migrated(state)
        ]
        rows[0] = dataclasses.replace(rows[0], row_count=state.row_count)
        self.splits = {row.split_id: SplitInfo(row, SplitState(row.state)) for row in rows}
        self._dirty = list(rows)
        self.planned = self.cursor = self._migrated = True

    def _loaded(self, row: SplitRow) -> SplitInfo:
        info = SplitInfo(row, SplitState(row.state))
        if row.state == SplitState.STAGED:
            if row.staged_path:
                info.segment = NewSegment(self.table_id, row.staged_path, "base", row.row_count, row.bytes)
            info.low_lsn = self.low_lsn(row.offset_low or "")
        return info

    def forget_staged(self) -> list[str]:
        """Read everything that is not handed over again: physical ranges of one table need one snapshot. Gives the
        files that nobody needs now."""
        files = []
        with self._changing:
            for info in self.splits.values():
                if info.state is SplitState.STAGED:
                    files += [info.segment.path] if info.segment is not None else []
                    info.state = SplitState.PLANNED
                    planned = dataclasses.replace(info.row, state=info.state, staged_path=None, offset_low=None)
                    info.row, info.segment = planned, None
                    self._dirty.append(info.row)
        return files

    def start(self) -> None:
        if self._task is None and self.unfinished and not self.failed:
            self._write_control()
            self._task = asyncio.create_task(self._copy(), name=f"backfill {self.name}")

    async def _copy(self) -> None:
        await Copying(self).run()
        self._task = None

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            self.core.jobs.cancel(f"backfill-{self.table_id}-")
            await asyncio.gather(task, return_exceptions=True)

    def settings_changed(self) -> None:
        self._write_control()
        self._wake.set()
        self._tell_held()

    def _tell_held(self) -> None:
        """At once: a read that has begun stays in its job for a while, in case the limit is lifted again soon."""
        before, self._held = self._held, self.held
        to_read = (SplitState.PLANNED, SplitState.READING)
        if self._held != before and any(x.state in to_read for x in self.splits.values()):
            self.report(waiting_for=self._held)

    async def wait(self, seconds: float) -> None:
        """Until a setting changes, or the time is over."""
        self._wake.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    @property
    def _control(self) -> str:
        return control_file(self.table_id)

    def _write_control(self) -> None:
        with self.core.data_dir.create(self._control) as out:
            out.write(json.dumps({"rate": self.rate_limit}).encode())

    # -- for the copy -----------------------------------------------------------------------------------------------

    def planned_as(self, kind: SplitKind, rows: list[SplitRow], estimate: int, *, cursor: bool) -> None:
        self.kind, self.estimate, self.cursor = kind, estimate, cursor
        self.splits = {r.split_id: SplitInfo(r, SplitState(r.state)) for r in rows}
        self.planned = True
        self.report()

    def reading(self, batch: list[SplitInfo]) -> None:
        """Reads of these splits begin: what earlier ones have seen they will see too."""
        for info in batch:
            info.low_lsn = self._launch_floor
            info.state = step(info.state, SplitEvent.READ_STARTED)

    def read_tasks(self, rows: list[SplitRow], snapshot: SharedSnapshot, readers: int) -> list[Any]:
        """The tasks that read these splits, that many `readers` at once; asks the source for the table's description if
        need be."""
        from headwater.connectors.postgres.client import connect
        from headwater.spark.backfill import ReadSplit

        if self.info is None:
            with connect(self.source.config) as conn:
                self.describe(conn)
        shape = self.next_shape
        return [
            ReadSplit(
                self.core.data_dir,
                self.table_id,
                shape.schema,
                self.source.config,
                self.info,
                shape.plans,
                split_of(row, self.kind),
                self.core.vnode_count,
                self._control,
                readers,
                snapshot.name,
                snapshot.low,
                self.generation,
                snapshot.storage,
            )
            for row in rows
        ]

    def staged(self, batch: list[SplitInfo], highest: int) -> None:
        """These splits are read, and their files complete."""
        batch = [info for info in batch if self.splits.get(info.row.split_id) is info]
        if not batch:
            return  # loaded again meanwhile, as the last checkpoint has them
        with self._changing:
            for info in batch:
                self._keep_rest(info)
                info.state = step(info.state, SplitEvent.READ_FINISHED)
                self._dirty.append(info.row)
        # Reads that begin now see at least what these have seen.
        self._launch_floor = max(self._launch_floor, min(i.low_lsn for i in batch))
        if self.source.reader is not None:
            self.source.reader.nudge(highest)
        self.report()

    def _keep_rest(self, info: SplitInfo) -> None:
        """What a read has left of its split is a split of its own, stored together with what it read."""
        order = list(self.splits.values())
        behind = 1 + next(i for i, x in enumerate(order) if x is info)
        end = order[behind].row.left if behind < len(order) else None
        if info.row.right == end:
            return
        number = max(self.splits) + 1
        row = SplitRow(self.table_id, self.generation, number, info.row.right, end, SplitState.PLANNED)
        order.insert(behind, SplitInfo(row, SplitState.PLANNED))
        self.splits = {x.row.split_id: x for x in order}  # another one: a barrier may be looking at the old
        self._dirty.append(row)

    def low_lsn(self, snapshot: str) -> int:
        """The position just before the first transaction of the spool that a read with this snapshot had not seen."""
        from headwater.connectors.postgres.planner import visible

        index = self.source.spool.transactions(self.floor, self.source.durable)
        if not len(index):
            return self.floor
        unseen = ~visible(snapshot, index["xid"])
        if not unseen.any():
            return int(index["end_lsn"][-1])
        first = int(unseen.argmax())
        return int(index["end_lsn"][first - 1]) if first else self.floor

    # -- one barrier ------------------------------------------------------------------------------------------------

    def at_barrier(self, last: int, target: int, contribution: Contribution, paused: bool) -> EpochPart | None:
        """Decide this epoch's part: what is handed over, and from where events are needed. None: nothing at all."""
        if self.failed or self._stands_still:
            return None
        with self._changing:
            dirty, self._dirty = self._dirty, []
        contribution.splits += dirty
        if self._migrated:
            plan = {"kind": str(self.kind), "rows": self.estimate, "cursor": True}
            contribution.states[(self.table_id, "plan")] = plan
            self._migrated = False
        if self.prepared is not None and not paused and not self.failed:
            handing = list(self.splits.values()) if self.replacing else []
            since = self.prepared.position
            return EpochPart(
                self, last, min(since, target), (), (since,), (None,), handing, self.replacing, self.prepared
            )
        handing = [] if paused else self._ready(target)
        if self.replacing and not handing:
            return EpochPart(self, last, last, (), (last,), (None,)) if self._resync["follow"] else None
        if not self.splits:
            # Only changes are captured, or nothing is planned yet.
            return EpochPart(self, last, last, (), (last,), (None,)) if self.planned else None
        state = self._state(last, target, handing)
        return None if state.first_lsn == target and not handing and min(state.after) == DROP else state

    def handing_all(self, target: int) -> EpochPart:
        """As if everything that is staged were handed over at a position: for the difference of a resync."""
        return self._state(0, target, list(self.splits.values()))

    def _state(self, last: int, target: int, handing: list[SplitInfo]) -> EpochPart:
        order = list(self.splits.values())
        bounds: tuple[tuple[str, ...], ...] = ()
        if self.kind is SplitKind.CTID:
            order = order[:1]  # all in the same state, with the same snapshot
        else:
            bounds = tuple(bound_from_json(x.row.left) or () for x in order[1:])
        after = tuple(self._after(x, last, handing) for x in order)
        snapshots = tuple(x.row.offset_low if x in handing else None for x in order)
        return EpochPart(self, last, min(*after, target), bounds, after, snapshots, handing, replaces=self.replacing)

    def _ready(self, target: int) -> list[SplitInfo]:
        ready = [x for x in self.splits.values() if x.state is SplitState.STAGED and x.high <= target]
        if self.replacing:
            return []  # a resync is handed over as a difference that is made beside (`prepared`)
        if self.kind is SplitKind.CTID:
            rest = [x for x in self.splits.values() if x.state is not SplitState.HANDED_OVER]
            return ready if len(ready) == len(rest) else []
        return self._as_many(ready, target) if self.feeds_views else ready

    def _as_many(self, ready: list[SplitInfo], target: int) -> list[SplitInfo]:
        """So many of them as the views behind them take in one epoch, and those that cannot wait."""
        first = sorted(ready, key=lambda x: x.low_lsn)
        passed = self.source.spool.bytes_between
        count = bisect.bisect(first, False, key=lambda x: passed(x.low_lsn, target) <= OVERDUE_BYTES)
        late, rest = first[:count], first[count:]
        return [*late, *rest[: self.source.handed_rows.fit(x.row.row_count for x in rest)]]

    @property
    def feeds_views(self) -> bool:
        """Whether what is handed over goes through live views in the same epoch."""
        return any(j.kind == "view" and j.state != "creating" for j in self.core.registry.dependants(self.table_id))

    def _after(self, info: SplitInfo, last: int, handing: list[SplitInfo]) -> int:
        if info.state is SplitState.HANDED_OVER:
            return last
        return info.low_lsn if info in handing else DROP

    def handed_over(self, state: EpochPart, contribution: Contribution) -> None:
        """The barrier's staging is complete: mark the splits, and the table when it was the last of them."""
        if state.prepared is not None:
            self.prepared, self._applied = None, state.prepared
        for info in state.handing:
            info.state = step(info.state, SplitEvent.HAND_OVER)
            info.row = dataclasses.replace(info.row, state=SplitState.HANDED_OVER, staged_path=None)
            contribution.splits.append(info.row)
        if state.replaces:
            self._replaced(contribution)
            contribution.splits_cleared.append((self.table_id, self.generation))
        floor = self._new_floor()
        if floor > self.floor:
            self.floor = floor
            contribution.states[(self.table_id, "floor")] = floor
        if state.handing and not self.unfinished and self.job.state == "creating":
            contribution.job_updates.setdefault(self.table_id, {}).update(state="live", became_live=True)
        self.report()

    def _replaced(self, contribution: Contribution) -> None:
        """The new copy is the table, with the columns that it has."""
        shape = self._resync.get("shape")
        if shape:
            self._shape = TableShape.from_dict(shape)
            self.core.dataflow.tables[self.table_id].schema = self._shape.schema
            patch = {"schema": shape["schema"], "captured": {**self.captured, "shape": shape}}
            contribution.job_updates.setdefault(self.table_id, {})["spec_patch"] = patch
        self._resync = {**self._resync, "done": True, "shape": None}
        contribution.states[(self.table_id, "resync")] = self._resync

    def _new_floor(self) -> int:
        under_way = (SplitState.READING, SplitState.STAGED)
        waiting = [x.low_lsn for x in self.splits.values() if x.state in under_way]
        if not self.planned or any(x.state is SplitState.PLANNED for x in self.splits.values()):
            waiting.append(self._launch_floor)
        return min(waiting) if waiting else max(self.floor, self.source.position)

    # -- resync -----------------------------------------------------------------------------------------------------

    async def resync(self) -> None:
        """Copy the table again beside what it holds. A failed table stands still meanwhile, any other goes on."""
        async with self.deciding:
            if self.unfinished and not self.failed:
                raise UsageError(
                    "BACKFILL_RUNNING", f"table {self.name} is being copied already", hint="wait until it is live"
                )
            await self.copy_again(follow=not self.failed)

    async def copy_again(
        self, *, follow: bool, only_if_reshaped: bool = False, notice: HeadwaterError | None = None
    ) -> bool:
        """Begin another generation. `follow`: the table goes on following the stream until it is handed over.

        `notice` is shown before anything happens, so that a crash cannot hide it. What was found in the table before
        the new generation does not matter any more: `Healing` forgets it.
        """
        with self.source.holding() as floor:
            mark = await asyncio.to_thread(self.source.enter_again, self)
            if only_if_reshaped and not mark.get("shape"):
                return False
            if notice is not None:
                self.core.record_error(self.table_id, self.name, notice, retrying=True)
            contribution = Contribution()
            self.contribute_resync(contribution, mark, floor, follow=follow)
            await self.stop()
            # A failed table stands still until the new generation is loaded, also at barriers between that and commit.
            self._stands_still = self.failed
            try:
                await self.core.main.request(contribution=contribution)
                self.core.capture.healing.forget(self)
                self.load()
            finally:
                self._stands_still = False
        self.start()
        return True

    def present_membership(self) -> str | None:
        """Which entry of the publication has the table now; asks the source."""
        from headwater.connectors.postgres.client import connect
        from headwater.connectors.postgres.slots import membership_of

        entered = self.entered
        with connect(self.source.config) as conn:
            return membership_of(conn, self.source.config.publication, entered["oid"], entered["schema_oid"])

    def contribute_resync(self, contribution: Contribution, mark: dict[str, Any], floor: int, *, follow: bool) -> None:
        """What begins a resync when it is committed; `mark`: how the table entered the stream, and its new columns."""
        resync = {"generation": self.generation + 1, "follow": follow, "old_oid": self.followed_oid, **mark}
        if not follow:  # what the table holds is of no position of the new stream
            contribution.splits_cleared.append((self.table_id, self.generation + 1))
        contribution.states |= {(self.table_id, "resync"): resync, (self.table_id, "floor"): floor}
        contribution.job_updates.setdefault(self.table_id, {})["state"] = "creating"  # WAIT waits for it
        self.info = None

    @property
    def used(self) -> bool:
        """Views or sinks read the table."""
        return bool(self.core.registry.dependants(self.table_id))

    @property
    def widens(self) -> bool:
        """Another width of a column is taken over: nobody has the old one, and no key is made of it."""
        return widens(self.policy) and not self.used

    def reshaped(self, info: Any, streamed: Collection[str]) -> TableShape | None:
        """The columns that the table gets from a source that has changed; None if they stay as they are."""
        used = self.used
        options = self.captured["options"]
        found = evolved(self.shape, info, policy=self.policy, options=options, used=used, streamed=streamed)
        return found if found != self.shape else None

    # -- progress ---------------------------------------------------------------------------------------------------

    def report(self, **extra: Any) -> None:
        """Tell the phase; the counters are told when they are committed (I7)."""
        report: dict[str, Any] = {"generation": self.generation}
        if self.unfinished and (self.planned or self.replacing):
            report["phase"] = "resync" if self.replacing else "backfill"
        with contextlib.suppress(KeyError):
            self.core.report_progress(self.table_id, **{**report, **extra})

    def contribute_progress(self, contribution: Contribution) -> None:
        """The totals as of this barrier; what must be read once more after a restart is not taken off them."""
        if not self.splits:
            return
        done = [x for x in self.splits.values() if x.state is SplitState.HANDED_OVER]
        read = [x for x in self.splits.values() if x.state in (SplitState.HANDED_OVER, SplitState.STAGED)]
        found = {
            "done": len(done),
            "rows": sum(x.row.row_count for x in read),
            "bytes": sum(x.row.bytes for x in read),
        }
        before = self._totals if self._totals.get("generation") == self.generation else {}
        totals: dict[str, Any] = {name: max(value, before.get(name, 0)) for name, value in found.items()}
        totals |= {"generation": self.generation, "total": len(self.splits)}
        totals["total_rows"] = max(self.estimate, totals["rows"]) if self.estimate else 0
        totals["least_percent"] = percent_of(**before)  # a split that is cut in two makes the total grow
        if totals != self._totals:
            self._totals = totals
            contribution.states[(self.table_id, "progress")] = totals

    def progress_committed(self, totals: dict[str, Any] | None) -> None:
        if totals is not None:
            self.core.report_progress(self.table_id, **totals)
        progress = self.core.progress_of(self.table_id)
        if self.job.state == "live" and not self.unfinished and not progress.finished:
            progress.finish()
