"""The main lane's dataflow: at each barrier all tables in one Spark job, then the views, layer by layer.

    barrier ─► take pending writes, fix P(N) of every source
            ─► one job: rows → segments, spooled events → segments          (stage `table`)
            ─► views whose inputs changed, each layer after the one before  (stage `view`)
            ─► Contribution: everything becomes visible with one commit

One actor runs it, because one Spark job serves all tables of an epoch; errors come back by job and stop only that one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from headwater.barrier.manager import BarrierReceiver, LocalBarrierManager
from headwater.errors import DefiniteError, HeadwaterError, TransientError
from headwater.model.barrier import Barrier, BarrierKind, MutationKind
from headwater.runtime.registry import schema_of
from headwater.runtime.tables import Batch, InputLog, TableState, ViewState
from headwater.storage.checkpoint import Contribution, JobRow, NewSegment

if TYPE_CHECKING:
    from headwater.engine import EngineCore

log = logging.getLogger(__name__)
Refreshed = list[tuple[ViewState, "list[NewSegment] | DefiniteError"]]
VIEW_RETRY_S: Final = 5.0  # a failed view tries again this often: the cause may be gone


@dataclass(slots=True)
class Swap:
    """A compaction's result, waiting for a barrier: these segments for those."""

    table_id: int
    removed: dict[str, int]  # path → segment id
    added: list[NewSegment]


@dataclass(slots=True)
class Staged:
    """What this barrier staged, by table."""

    segments: dict[int, list[NewSegment]] = field(default_factory=dict)
    resets: set[int] = field(default_factory=set)

    def add(self, segment: NewSegment) -> None:
        self.segments.setdefault(segment.table_id, []).append(segment)


@dataclass(slots=True)
class Taken:
    """The acknowledged writes that a barrier took; kept until they are committed: a recovery stages them again."""

    epoch: int
    batches: dict[int, list[Batch]]


class Dataflow:
    """The actor. State is rebuilt from committed state at every recovery."""

    name = "dataflow"
    job_id = 0

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tables: dict[int, TableState] = {}
        self.views: dict[int, ViewState] = {}
        self.swaps: list[Swap] = []
        self.uncommitted: list[tuple[int, NewSegment]] = []
        self._taken: list[Taken] = []
        self._written: list[tuple[int, int, int]] = []  # (epoch, table, rows in all) that wait for the commit
        self.committed_epoch = 0

    # -- life -------------------------------------------------------------------------------------------------------

    def rebuild(self, pending: dict[int, list[Batch]]) -> None:
        """Load what is visible at the last committed epoch; acknowledged writes that wait are kept."""
        self.committed_epoch = self.core.meta.committed_epoch()
        for job in self.core.registry.of_kind("table"):
            self.add_table(job)
            self.tables[job.id].pending = pending.get(job.id, [])
        for level in self.core.registry.view_levels(self._live_views()):
            for job in level:
                self._restore_view(job)

    def _live_views(self) -> list[JobRow]:
        return [j for j in self.core.registry.of_kind("view") if j.state != "creating"]

    def add_table(self, job: JobRow) -> None:
        segments = self.core.meta.segments_at(job.id, self.core.meta.committed_epoch())
        written = 0 if job.spec.get("captured") else (self.core.meta.state(job.id, "progress") or {}).get("rows", 0)
        self.tables[job.id] = TableState(job, schema_of(job), list(segments), written=written)

    def _restore_view(self, job: JobRow) -> None:
        committed = self.committed_epoch
        consumed = int(self.core.meta.state(job.id, "consumed") or committed)
        failed = job.state == "failed"
        view = ViewState(job, schema_of(job), list(self.core.meta.segments_at(job.id, committed)), failed=failed)
        view.consumed_epoch = consumed if failed else committed
        for input_id in self.core.registry.depends_on(job):
            log = InputLog(seen=list(self.core.meta.segments_at(input_id, view.consumed_epoch)))
            if failed:
                log.log = list(self.core.meta.change_segments(input_id, consumed, committed))
                log.reset = self.core.meta.was_reset(input_id, consumed, committed)
            view.inputs[input_id] = log
        self.views[job.id] = view

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
        return self.tables.get(job_id) or self.views.get(job_id)

    def sync(self) -> None:
        """Follow the registry after a commit that changed it."""
        known = self.core.registry.by_id
        for job_id in [i for i in (*self.tables, *self.views) if i not in known]:
            dropped = self.tables.pop(job_id, None)
            if dropped is not None:  # what was written to it beside the drop goes with it
                self.core.forget_files(path for b in dropped.pending for path in _files(b))
            self.views.pop(job_id, None)
        for job in self.core.registry.of_kind("table"):
            if job.id in self.tables:
                self.tables[job.id].job = job
                self.tables[job.id].schema = schema_of(job)
            else:
                self.add_table(job)
        for job_id, view in self.views.items():
            view.job = known[job_id]

    async def run(self, barriers: BarrierReceiver, manager: LocalBarrierManager) -> None:
        async for barrier in barriers:
            if barrier.kind is BarrierKind.INITIAL:
                manager.collect(self.name, barrier)
                continue
            contribution = await self._stage(barrier)
            manager.collect(self.name, barrier, contribution)

    def on_committed(self, epoch: int) -> None:
        self.committed_epoch = epoch
        self.uncommitted = [(e, s) for e, s in self.uncommitted if e > epoch]
        for view in self.views.values():
            if not view.failed:
                view.consumed_epoch = epoch
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
            self._join(view)
        if not barrier.paused or not self._paused_before(barrier) or joining or self._feeds_a_view(staged):
            await self._stage_views(contribution, staged)
        for segments in staged.segments.values():
            contribution.segments_added += segments
            self.uncommitted += [(int(barrier.epoch.prev), s) for s in segments]
        contribution.resets += sorted(staged.resets)
        self.core.delivery.contribute(contribution)
        return contribution

    def _paused_before(self, barrier: Barrier) -> bool:
        return not any(m.kind is MutationKind.PAUSE for m in barrier.mutations)

    def _feeds_a_view(self, staged: Staged) -> bool:
        """A write that was under way at the PAUSE is in this barrier: the views have it at the same epoch (I4)."""
        changed = {*staged.segments, *staged.resets}
        return any(not changed.isdisjoint(view.inputs) for view in self.views.values())

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
        from headwater.spark.tasks import balanced, run_tasks

        def work() -> list[dict[str, Any]]:
            with explained("EPOCH_FAILED"):
                return run_tasks(self.core.spark, balanced(tasks, self.core.slots))

        return await self.core.jobs.run("capture", "table", work)

    def _take_result(self, result: dict[str, Any], contribution: Contribution, staged: Staged) -> None:
        if "error" in result:
            found = result["error"]
            error = DefiniteError(found["code"], found["message"], detail=found["detail"], hint=found["hint"])
            if self.core.capture.stream_lost(result["subject"], error):
                return
            self.core.job_failed(result["subject"], error, contribution)
            self.core.capture.healing.table_failed(result["subject"], error)
        elif result.get("captured"):
            self.core.capture.take_result(result, contribution, staged)
        elif "segment" in result:
            staged.add(NewSegment(**result["segment"]))

    def _apply_swaps(self, contribution: Contribution) -> None:
        swaps, self.swaps = self.swaps, []
        for swap in swaps:
            state = self.state(swap.table_id)
            if state is None or not state.replace(set(swap.removed), list(swap.added)):
                self.core.forget_files([s.path for s in swap.added])
                continue
            contribution.segments_added += swap.added
            contribution.segments_removed += swap.removed.values()

    # -- views ------------------------------------------------------------------------------------------------------

    def _join(self, view: ViewState) -> None:
        """A created view enters: what its inputs committed since its lane's last epoch, and staged, is its log.

        With a copy of what its lane handed over: if this barrier is lost, the same enters again.
        """
        inputs = {i: InputLog(seen=list(log.seen)) for i, log in view.inputs.items()}
        view = replace(view, segments=list(view.segments), inputs=inputs)
        for input_id, log in view.inputs.items():
            state = self.state(input_id)
            if state is None:
                raise DefiniteError("INPUT_DROPPED", f"an input of view {view.job.name} was dropped")
            committed = self.core.meta.change_segments(input_id, view.consumed_epoch, self.committed_epoch)
            paths = {s.path for s in committed}
            waiting = [s for _, s in self.uncommitted if s.table_id == input_id and s.path not in paths]
            log.log = [*committed, *waiting]
            log.reset = self.core.meta.was_reset(input_id, view.consumed_epoch, self.committed_epoch)
        self.views[view.job.id] = view

    async def _stage_views(self, contribution: Contribution, staged: Staged) -> None:
        for view in self.views.values():
            for input_id, log in view.inputs.items():
                self._extend(log, input_id, staged)
        jobs = [v.job for v in self.views.values()]
        for level in self.core.registry.view_levels(jobs) if jobs else []:
            views = [self.views[j.id] for j in level]
            for view in views:
                for input_id, log in view.inputs.items():
                    if input_id in self.views:
                        self._extend(log, input_id, staged)
            ready = [view for view in views if self._is_ready(view, contribution)]
            for batch in await self._refreshed(ready):
                for view, outcome in batch:
                    self._take_refresh(view, outcome, contribution, staged)

    def _extend(self, log: InputLog, input_id: int, staged: Staged) -> None:
        known = {s.path for s in log.log}
        log.log += [s for s in staged.segments.get(input_id, []) if s.path not in known and s.is_change]
        log.reset = log.reset or input_id in staged.resets

    def _is_ready(self, view: ViewState, contribution: Contribution) -> bool:
        """Whether there is something to refresh, and nothing in the way."""
        if not any(log.changed for log in view.inputs.values()):
            self._seen(view)
            if view.failed:
                self._recovered(view, contribution)
            return False
        if any(self.views[i].failed for i in view.inputs if i in self.views):
            error = DefiniteError("INPUT_FAILED", f"an input of {view.job.name} has stopped")
            self._view_failed(view, error, contribution)
            return False
        return not view.failed or time.monotonic() >= view.retry_at

    async def _refreshed(self, views: list[ViewState]) -> Sequence[Refreshed]:
        """The new segments of each view, or why there are none. Small refreshes share jobs, large ones are one each.

        A view that has failed is tried alone: it would take the others' job down with it.
        """
        from headwater.spark.view_job import TOGETHER, may_join

        joined: list[ViewState] = []
        alone: list[ViewState] = []
        for view in views:
            (joined if not view.failed and may_join(view, self._inputs(view)) else alone).append(view)
        groups = [joined[i : i + TOGETHER] for i in range(0, len(joined), TOGETHER)]
        return await asyncio.gather(*map(self._refresh_together, groups), *map(self._refresh_alone, alone))

    async def _refresh_together(self, views: list[ViewState]) -> Refreshed:
        from headwater.spark.view_job import refresh_together

        works = [(view, self._inputs(view)) for view in views]
        try:
            found = await self.core.jobs.run("view", "view", lambda: refresh_together(self.core, works))
        except DefiniteError as error:  # of one of them: which, and who is well, shows when each runs alone
            apart = await asyncio.gather(*map(self._refresh_alone, views))
            outcomes = [outcome for part in apart for outcome in part]
            if not any(isinstance(outcome, DefiniteError) for _, outcome in outcomes):
                log.warning("a refresh of %d views failed, and each of them alone did not: %s", len(views), error)
            return outcomes
        return [(view, found[view.job.id]) for view in views]

    async def _refresh_alone(self, view: ViewState) -> Refreshed:
        from headwater.spark.view_job import refresh_segments

        inputs = self._inputs(view)
        try:
            found = await self.core.jobs.run("view", "view", lambda: refresh_segments(self.core, view, inputs))
        except DefiniteError as error:
            return [(view, error)]
        return [(view, found)]

    def _take_refresh(
        self, view: ViewState, outcome: list[NewSegment] | DefiniteError, contribution: Contribution, staged: Staged
    ) -> None:
        if isinstance(outcome, DefiniteError):
            if not view.failed:
                self.core.background(self._find_key(view, outcome))
            self._view_failed(view, outcome, contribution)
            return
        for segment in outcome:
            staged.add(segment)
        view.segments = [*view.segments, *outcome]
        self._seen(view)
        self.core.count_rows({view.job.id: outcome})
        if view.failed:
            self._recovered(view, contribution)

    async def _find_key(self, view: ViewState, error: DefiniteError) -> None:
        """Beside the lane: which key it was, for hw_errors. The others' refresh goes on meanwhile."""
        from headwater.spark.view_job import failing_key

        inputs = {
            name: (replace(state, segments=list(state.segments)), replace(log, log=list(log.log)))
            for name, (state, log) in self._inputs(view).items()
        }
        try:
            key = await self.core.jobs.run("query", "diagnosis", lambda: failing_key(self.core, view, inputs))
        except HeadwaterError:
            return  # whatever it was is reported where it matters
        if key is not None and view.failed and view.job.id in self.core.registry.by_id:
            found = DefiniteError(error.code, f"{error.message}, at {key}", detail=error.detail, hint=error.hint)
            self.core.record_error(view.job.id, view.job.name, found, retrying=True)

    def _inputs(self, view: ViewState) -> dict[str, tuple[TableState, InputLog]]:
        found = {}
        for input_id, log in view.inputs.items():
            state = self.state(input_id)
            assert state is not None
            found[state.job.name] = (state, log)
        return found

    def _seen(self, view: ViewState) -> None:
        for input_id, log in view.inputs.items():
            state = self.state(input_id)
            if state is not None:
                log.seen, log.log, log.reset = list(state.segments), [], False

    def _view_failed(self, view: ViewState, error: HeadwaterError, contribution: Contribution) -> None:
        view.retry_at = time.monotonic() + VIEW_RETRY_S
        if view.failed:
            return
        if any(s.table_id == view.job.id for _, s in self.uncommitted):
            # Barriers before this one hold rows of the view and will be committed with it, under one epoch: none could
            # say what it has consumed. From the last checkpoint on it fails with everything since at once.
            raise TransientError("VIEW_FAILED", f"view {view.job.name} failed between two checkpoints") from None
        view.failed = True
        contribution.states[(view.job.id, "consumed")] = view.consumed_epoch
        contribution.pins[f"job:{view.job.id}"] = view.consumed_epoch
        self.core.job_failed(view.job.id, error, contribution, retrying=True)

    def _recovered(self, view: ViewState, contribution: Contribution) -> None:
        view.failed = False
        contribution.pins_dropped.append(f"job:{view.job.id}")
        contribution.job_updates.setdefault(view.job.id, {})["state"] = "live"


def _files(batch: Batch) -> list[str]:
    return [s.path for s in batch.segments] + ([batch.ipc_path] if batch.ipc_path else [])
