"""The main lane's dataflow: at each barrier all tables in one Spark job, then the views, layer by layer.

    barrier ─► take pending writes, fix P(N) of every source
            ─► one job: rows → segments, spooled events → segments          (stage `table`)
            ─► views whose inputs changed, each layer after the one before  (stage `view`)
            ─► Contribution: everything becomes visible with one commit

One actor runs it, because one Spark job serves all tables of an epoch; errors come back by job and stop only that one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from headwater.barrier.manager import BarrierReceiver, LocalBarrierManager
from headwater.errors import DefiniteError
from headwater.model.barrier import Barrier, BarrierKind, MutationKind
from headwater.runtime.healing import being_healed
from headwater.runtime.live_views import LiveViews
from headwater.runtime.registry import schema_of
from headwater.runtime.tables import Batch, Staged, Swap, TableState, Taken
from headwater.storage.checkpoint import Contribution, JobRow, NewSegment
from headwater.storage.files import cache_entry

if TYPE_CHECKING:
    from headwater.engine import EngineCore

LAST_ROWS: Final = 65_536  # that the engine itself writes as it stops: in less than a second


class Dataflow:
    """The actor. State is rebuilt from committed state at every recovery."""

    name = "dataflow"
    job_id = 0

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tables: dict[int, TableState] = {}
        self.live_views = LiveViews(self)
        self.swaps: list[Swap] = []
        self.uncommitted: list[tuple[int, NewSegment]] = []
        self._taken: list[Taken] = []
        self._written: list[tuple[int, int, int]] = []  # (epoch, table, rows in all) that wait for the commit
        self.committed_epoch = 0
        self.staging = False  # a barrier's work is under way

    # -- life -------------------------------------------------------------------------------------------------------

    def rebuild(self, pending: dict[int, list[Batch]]) -> None:
        """Load what is visible at the last committed epoch; acknowledged writes that wait are kept."""
        self.committed_epoch = self.core.meta.committed_epoch()
        for job in self.core.registry.of_kind("table"):
            self.add_table(job)
            self.tables[job.id].pending = pending.get(job.id, [])
        self.live_views.rebuild()

    def add_table(self, job: JobRow) -> None:
        segments = self.core.meta.segments_at(job.id, self.core.meta.committed_epoch())
        written = 0 if job.spec.get("captured") else (self.core.meta.state(job.id, "progress") or {}).get("rows", 0)
        self.tables[job.id] = TableState(job, schema_of(job), list(segments), written=written)

    def waits(self, ticket: int) -> bool:
        """Whether a write with this ticket, or an earlier one, is not committed yet."""
        waiting = [b for batches in self.unfinished().values() for b in batches]
        return any(b.ticket <= ticket for b in waiting)

    def unfinished(self) -> dict[int, list[Batch]]:
        """Acknowledged writes that are not committed, in their order."""
        found: dict[int, list[Batch]] = {}
        for taken in self._taken:
            for table_id, batches in taken.batches.items():
                found.setdefault(table_id, []).extend(batches)
        for table_id, state in self.tables.items():
            found.setdefault(table_id, []).extend(state.pending)
        return found

    def abandoned_files(self) -> list[str]:
        """Files that were staged, are not committed, and will be written again."""
        kept = {s.path for batches in self.unfinished().values() for b in batches for s in b.segments}
        # A split whose hand-over did not commit is staged again, with the same file.
        kept |= {row.staged_path for row in self.core.meta.split_rows() if row.staged_path}
        return [s.path for _, s in self.uncommitted if s.path not in kept]

    def state(self, job_id: int) -> TableState | None:
        return self.tables.get(job_id) or self.live_views.states.get(job_id)

    def states(self) -> list[TableState]:
        return [*self.tables.values(), *self.live_views.states.values()]

    def sync(self) -> None:
        """Follow the registry after a commit that changed it."""
        known = self.core.registry.by_id
        for job_id in [i for i in self.tables if i not in known]:
            dropped = self.tables.pop(job_id)
            # What was written to it beside the drop goes with it.
            self.core.forget_files(path for b in dropped.pending for path in _files(b))
        for job in self.core.registry.of_kind("table"):
            if job.id in self.tables:
                self.tables[job.id].job = job
                self.tables[job.id].schema = schema_of(job)
            else:
                self.add_table(job)
        self.live_views.sync()

    async def run(self, barriers: BarrierReceiver, manager: LocalBarrierManager) -> None:
        async for barrier in barriers:
            if barrier.kind is BarrierKind.INITIAL:
                manager.collect(self.name, barrier)
                continue
            self.staging = True
            began = time.monotonic()
            try:
                contribution = await self._stage(barrier)
            finally:
                self.staging = False
            self.core.capture.epoch_lasted(time.monotonic() - began)
            manager.collect(self.name, barrier, contribution)

    def on_committed(self, epoch: int) -> None:
        self.committed_epoch = epoch
        self.uncommitted = [(e, s) for e, s in self.uncommitted if e > epoch]
        self.live_views.on_committed(epoch)
        for _, table_id, rows in [w for w in self._written if w[0] <= epoch]:
            if table_id in self.tables:
                self.core.report_progress(table_id, rows=rows)
        self._written = [w for w in self._written if w[0] > epoch]
        done = [t for t in self._taken if t.epoch <= epoch]
        self._taken = [t for t in self._taken if t.epoch > epoch]
        for taken in done:
            files = [b.ipc_path for batches in taken.batches.values() for b in batches if b.ipc_path]
            self.core.forget_files(files)

    async def close(self) -> None:
        self.core.jobs.cancel("table")
        self.core.jobs.cancel("view")

    # -- one barrier ------------------------------------------------------------------------------------------------

    async def _stage(self, barrier: Barrier) -> Contribution:
        contribution = Contribution()
        staged = Staged()
        await self._stage_tables(barrier, contribution, staged)
        self._apply_swaps(contribution)
        joining = [m.argument for m in barrier.mutations if m.kind is MutationKind.ADD and m.argument is not None]
        for view in joining:
            self.live_views.join(view)
        # A write that was under way at the PAUSE is in this barrier: the views have it at the same epoch (I4).
        if not barrier.at_rest or not self._paused_before(barrier) or joining or self.live_views.are_fed_by(staged):
            await self.live_views.stage(contribution, staged, int(barrier.epoch.prev))
        for segments in staged.segments.values():
            contribution.segments_added += segments
            self.uncommitted += [(int(barrier.epoch.prev), s) for s in segments]
        contribution.resets += sorted(staged.resets)
        self.core.delivery.contribute(contribution)
        self.core.row_counts.contribute(contribution)
        return contribution

    def _paused_before(self, barrier: Barrier) -> bool:
        return not any(m.kind is MutationKind.PAUSE for m in barrier.mutations)

    async def _stage_tables(self, barrier: Barrier, contribution: Contribution, staged: Staged) -> None:
        tasks = self._take_pending(int(barrier.epoch.prev), contribution, staged)
        capture = await self.core.capture.prepare(barrier, contribution, staged)
        tasks += capture
        for result in await self._run_tasks(tasks):
            self._take_result(result, contribution, staged)
        await self.core.capture.finish(contribution, staged)
        for table_id in staged.resets:
            self.tables[table_id].segments = []
        for table_id, segments in staged.segments.items():
            self.tables[table_id].segments = [*self.tables[table_id].segments, *segments]
            self._count_written(int(barrier.epoch.prev), self.tables[table_id], segments, contribution)
        self.core.count_rows(staged.segments)

    def _count_written(
        self, epoch: int, table: TableState, segments: list[NewSegment], contribution: Contribution
    ) -> None:
        """Rows that statements wrote, as a total that is committed with them (I7); captured tables have their own."""
        if table.job.spec.get("captured"):
            return
        table.written += sum(s.rows for s in segments if s.is_change)
        contribution.states[(table.job.id, "progress")] = {"rows": table.written}
        self._written.append((epoch, table.job.id, table.written))

    def _take_pending(self, epoch: int, contribution: Contribution, staged: Staged) -> list[tuple[int, Any]]:
        tasks: list[tuple[int, Any]] = []
        taken: dict[int, list[Batch]] = {}
        for state in self.tables.values():
            batches, state.pending = state.pending, []
            if batches:
                taken[state.job.id] = batches
                tasks += self._write_tasks(state, batches, contribution, staged)
        if taken:
            self._taken.append(Taken(epoch, taken))
        return tasks

    def _write_tasks(
        self, state: TableState, batches: list[Batch], contribution: Contribution, staged: Staged
    ) -> list[tuple[int, Any]]:
        """Ready segments are taken as they are; the rows of all other batches become one segment."""
        from headwater.spark.write_rows import WriteRows

        if state.schema.keyless:
            contribution.states[(state.job.id, "row_id")] = self.core.writes.row_ids.get(state.job.id, 0)
        for batch in batches:
            contribution.states.update(batch.states)
            for segment in batch.segments:
                staged.add(segment)
        inline = [b for b in batches if b.ipc_path]
        if not inline:
            return []
        rows = sum(b.rows for b in inline)
        paths = tuple((b.ipc_path, b.seq_base) for b in inline if b.ipc_path)
        task = WriteRows(self.core.data_dir, state.job.id, state.schema, paths, inline[0].kind, self.core.vnode_count)
        return [(rows, task)]

    async def _run_tasks(self, tasks: list[tuple[int, Any]]) -> Sequence[dict[str, Any]]:
        if not tasks:
            return []
        from headwater.spark.query import explained
        from headwater.spark.tasks import balanced, run_here, run_tasks
        from headwater.spark.write_rows import WriteRows

        def work() -> list[dict[str, Any]]:
            with explained("EPOCH_FAILED"):
                return run_tasks(self.core.spark, balanced(tasks, self.core.slots))

        # Spark's workers may not even have begun, and a stop has some seconds: what is acknowledged must not be lost.
        rows = sum(weight for weight, _ in tasks)
        if self.core.stopping and rows <= LAST_ROWS and all(isinstance(task, WriteRows) for _, task in tasks):
            return await asyncio.to_thread(run_here, [task for _, task in tasks])

        return await self.core.jobs.run("capture", "table", work)

    def _take_result(self, result: dict[str, Any], contribution: Contribution, staged: Staged) -> None:
        if "error" in result:
            found = result["error"]
            error = DefiniteError(found["code"], found["message"], detail=found["detail"], hint=found["hint"])
            if self.core.capture.stream_lost(result["subject"], error):
                return
            heals = self.core.capture.table_failed(result["subject"], error)
            error = being_healed(error) if heals else error
            self.core.job_failed(result["subject"], error, contribution, retrying=heals)
        elif result.get("captured"):
            self.core.capture.take_result(result, contribution, staged)
        elif "segment" in result:
            staged.add(NewSegment(**result["segment"]))

    def _apply_swaps(self, contribution: Contribution) -> None:
        swaps, self.swaps = self.swaps, []
        for swap in swaps:
            state = self.state(swap.table_id)
            if state is None or not state.replace(set(swap.removed), list(swap.added)):
                if swap.new_files:
                    self.core.forget_files([s.path for s in swap.added])
                continue
            contribution.segments_added += swap.added
            contribution.segments_removed += swap.removed.values()
            if swap.new_files:
                self.core.forget_files(map(cache_entry, swap.removed))


def _files(batch: Batch) -> list[str]:
    return [s.path for s in batch.segments] + ([batch.ipc_path] if batch.ipc_path else [])
