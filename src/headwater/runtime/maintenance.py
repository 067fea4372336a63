"""House-keeping outside the lanes: compaction of deltas, and garbage collection of what no epoch can see any more.

Compaction reads what is committed, writes new segments, and hands them to the dataflow, which swaps them in at a
barrier if what they replace is still there. Removed segments stay for retention, pins and running queries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from headwater.errors import DefiniteError, HeadwaterError
from headwater.model.epoch import Epoch
from headwater.runtime.tables import AnySegment, Swap, TableState
from headwater.storage.checkpoint import NewSegment, Segment
from headwater.storage.files import segment_folder, table_folder
from headwater.storage.segments import without_vnode

if TYPE_CHECKING:
    from headwater.engine import EngineCore

log = logging.getLogger(__name__)
ROUND_S: Final = 1.0
LULL_S: Final = 3.0  # compaction waits at most so long for a moment between two barriers' work
# More small files than this make every read slower than folding them does.
MAX_DELTAS: Final = 16
# Deltas beyond this part of the base are folded into it; below both floors a table is too small to care. A read sorts
# the rows of deltas, which for that many takes as long as everything else that a small query does.
FOLD_FRACTION: Final = 0.25
FOLD_FLOOR_BYTES: Final = 4 * 1024 * 1024
FOLD_FLOOR_ROWS: Final = 50_000
# Many base files that are smaller than this on average are written again as few.
SMALL_BASE_BYTES: Final = 1024 * 1024


class Maintenance:
    """See the head of this module."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.well_at = 0.0  # when a round last went through
        self._rewritten: set[int] = set()  # tables whose deltas were found to be more than new keys

    async def run(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            try:
                await self.collect_garbage()
                await self.compact()
                await self.core.row_counts.update()
                await asyncio.to_thread(self.core.jobs.release.collect)
                self.well_at = time.time()
            except HeadwaterError as error:
                log.warning("house-keeping failed: %s", error)
                self.core.record_error(None, "maintenance", error, retrying=True)
                await asyncio.sleep(5)

    # -- garbage ----------------------------------------------------------------------------------------------------

    async def collect_garbage(self) -> None:
        paths = await asyncio.to_thread(self._expire)
        if paths:
            await asyncio.to_thread(self._delete, paths)

    def _delete(self, paths: Sequence[str]) -> None:
        """Files of the data directory (a letter elsewhere is the user's), and with a table its folder."""
        data_dir = self.core.data_dir
        ours = [data_dir.relative(path) for path in paths]
        data_dir.delete(ours)
        known = {table_folder(table_id) for table_id in self.core.registry.by_id}
        tables = {"/".join(path.split("/")[:2]) for path in ours if path.startswith("tables/")}
        data_dir.remove_empty(tables - known)

    def _expire(self) -> list[str]:
        """Nobody begins to read between the look at who reads what and the forgetting of the rest."""
        with self.core.queries.reading.gate:
            horizon = self.horizon()
            return self.core.meta.expire(horizon) if horizon else []

    def horizon(self) -> int:
        """The oldest epoch that must stay readable."""
        committed = self.core.meta.committed_epoch()
        kept_ms = int((time.time() - self.core.parameters["retention_s"]) * 1000)
        epochs = [int(Epoch.at_unix_ms(kept_ms)), committed]
        epochs += self.core.queries.reading.held()
        epochs += self.core.meta.pin_rows().values()
        epochs += [v.consumed_epoch for v in self.core.dataflow.live_views.states.values()]
        oldest = min(epochs)
        # An epoch that falls between two committed ones keeps the earlier one readable.
        earlier = self.core.meta.last_epoch_before(oldest)
        return min(oldest, earlier) if earlier else 0

    # -- compaction -------------------------------------------------------------------------------------------------

    async def compact(self) -> None:
        """Fold the tables whose deltas have grown; merge the deltas of the others that have many, all in one job."""
        waiting = {s.table_id for s in self.core.dataflow.swaps}
        states = [s for s in self.core.dataflow.states() if s.job.id not in waiting]
        large = [s for s in states if _must_fold(s.segments)]
        for state in large:
            segments = await self._committed(state)
            if _must_fold(segments) and not await self._promote(state, segments):
                await self._fold(state, segments)
        states = [s for s in states if s not in large]
        if any(_deltas(state.segments) > MAX_DELTAS for state in states):
            # Those that will be due soon come along: the job costs more than what it does.
            many = [state for state in states if _deltas(state.segments) > MAX_DELTAS // 2]
            await self._merge([(state, _without_largest(await self._committed(state))) for state in many])

    async def _lull(self) -> None:
        """Between two barriers: much of what is due is done before the next one needs the cores."""
        deadline = time.monotonic() + LULL_S
        while self.core.dataflow.staging and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def _committed(self, state: TableState) -> list[Segment]:
        """What is staged and not committed may be lost yet: only what is committed is rewritten."""
        return await asyncio.to_thread(self.core.meta.segments_at, state.job.id, self.core.meta.committed_epoch())

    async def _promote(self, state: TableState, segments: list[Segment]) -> bool:
        """Deltas that only add keys are base as they are: nothing is rewritten. One job that reads the keys alone.

        Tried for tables that statements write, until it does not hold: bulk inserts are mostly that; what a source or a
        query changes hardly ever is.
        """
        deltas = [s for s in segments if s.kind == "delta"]
        if state.job.kind != "table" or state.job.spec.get("captured") or state.job.id in self._rewritten:
            return False
        if not deltas or _crumbled(segments):
            return False
        if await asyncio.to_thread(without_vnode, self.core.data_dir, [s.path for s in deltas]):
            return False  # of an older format: written again, they are of the present one

        def work() -> bool:
            from headwater.spark.compaction import foldable, once_tasks
            from headwater.spark.query import explained

            if not foldable(state.schema):
                return False
            tasks = once_tasks(self.core.data_dir, state.schema, segments, self.core.vnode_count)
            with explained("COMPACTION_FAILED"):
                return all(result.get("once") for result in self._run_tasks(tasks))

        await self._lull()
        if not await self.core.jobs.run("compaction", "compaction", work):
            self._rewritten.add(state.job.id)
            return False
        added = [NewSegment(s.table_id, s.path, "base", s.rows, s.bytes, is_change=False) for s in deltas]
        removed = {s.path: s.id for s in deltas}
        self.core.dataflow.swaps.append(Swap(state.job.id, removed, added, new_files=False))
        return True

    async def _fold(self, state: TableState, segments: list[Segment]) -> None:
        """Everything into a new base: one Spark job."""

        def work() -> list[NewSegment]:
            from headwater.spark.compaction import foldable
            from headwater.spark.query import explained

            with explained("COMPACTION_FAILED"):
                return (
                    self._fold_by_tasks(state, segments) if foldable(state.schema) else self._rewrite(state, segments)
                )

        await self._lull()
        added = await self.core.jobs.run("compaction", "compaction", work)
        self.core.dataflow.swaps.append(Swap(state.job.id, {s.path: s.id for s in segments}, added))

    def _fold_by_tasks(self, state: TableState, segments: list[Segment]) -> list[NewSegment]:
        from headwater.spark.compaction import fold_tasks

        folder = segment_folder(state.job.id)
        tasks = fold_tasks(self.core.data_dir, folder, state.schema, segments, self.core.vnode_count)
        try:
            results = self._run_tasks(tasks)
            for result in results:
                if "error" in result:
                    raise DefiniteError(**result["error"])
        except BaseException:
            with contextlib.suppress(OSError):
                self.core.data_dir.delete([folder])  # some tasks may have finished before another failed
            raise
        return [NewSegment(**result["segment"]) for result in results]

    def _run_tasks(self, tasks: Sequence[Any]) -> list[dict[str, Any]]:
        """On half of the slots: the others are for what must be fresh."""
        from headwater.spark.tasks import run_tasks

        count = min(len(tasks), max(1, self.core.slots // 2))
        return run_tasks(self.core.spark, [tasks[i::count] for i in range(count)])

    def _rewrite(self, state: TableState, segments: list[Segment]) -> list[NewSegment]:
        """By Spark's own reader and writer, for columns that only those know."""
        from headwater.spark.segment import write_frame

        frame = self.core.reader(state.schema).snapshot(segments)
        parts = max(1, sum(s.bytes for s in segments) // (64 * 1024 * 1024))
        return write_frame(
            frame.coalesce(int(parts)),
            self.core.data_dir,
            state.job.id,
            state.schema,
            kind="base",
            vnode_count=self.core.vnode_count,
            seq_base=0,
            is_change=False,
        )

    async def _merge(self, due: list[tuple[TableState, list[Segment]]]) -> None:
        """Many small deltas of each table into one of it, newest change per key."""
        due = [(state, deltas) for state, deltas in due if len(deltas) > 1]

        def work() -> list[dict[str, Any]]:
            from headwater.spark.compaction import MergeDeltas
            from headwater.spark.query import explained
            from headwater.spark.tasks import balanced, run_tasks

            tasks = []
            for state, deltas in due:
                paths = tuple(s.path for s in deltas)
                task = MergeDeltas(self.core.data_dir, state.job.id, state.schema, paths, self.core.vnode_count)
                tasks.append((sum(s.bytes for s in deltas), task))
            with explained("COMPACTION_FAILED"):
                return run_tasks(self.core.spark, balanced(tasks, self.core.slots))

        await self._lull()
        merged = {r["subject"]: r for r in await self.core.jobs.run("compaction", "compaction", work)}
        for state, deltas in due:
            result = merged[state.job.id]
            if "error" in result:
                self.core.record_error(state.job.id, state.job.name, DefiniteError(**result["error"]), retrying=True)
                continue
            added = [NewSegment(**result["segment"])]
            self.core.dataflow.swaps.append(Swap(state.job.id, {s.path: s.id for s in deltas}, added))


def _must_fold(segments: Sequence[AnySegment]) -> bool:
    base = [s for s in segments if s.kind == "base"]
    deltas = [s for s in segments if s.kind == "delta"]
    by_bytes = sum(s.bytes for s in deltas) > max(FOLD_FLOOR_BYTES, FOLD_FRACTION * sum(s.bytes for s in base))
    by_rows = sum(s.rows for s in deltas) > max(FOLD_FLOOR_ROWS, FOLD_FRACTION * sum(s.rows for s in base))
    return _crumbled(segments) or by_bytes or by_rows


def _crumbled(segments: Sequence[AnySegment]) -> bool:
    base = [s.bytes for s in segments if s.kind == "base"]
    return len(base) > 4 * MAX_DELTAS and sum(base) / len(base) < SMALL_BASE_BYTES


def _deltas(segments: Sequence[AnySegment]) -> int:
    return sum(s.kind == "delta" for s in segments)


def _without_largest(segments: Sequence[Segment]) -> list[Segment]:
    """The deltas to merge: the largest is what the merges before have made, and would be written again each time."""
    return sorted((s for s in segments if s.kind == "delta"), key=lambda s: s.bytes)[:-1]
