"""The one actor of a creating view's lane: its snapshot chunk by chunk, its inputs' change log group by group, then the
main lane.

Rowwise and algebraic views read their driving input (the largest) in chunks of vnodes, or of parts of a vnode; others
are computed at once. The state of every vnode (`backfill/snapshot/state.py`) is in the checkpoints of the lane, which
`creating.py` starts and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from headwater.backfill.snapshot.consume_upstream.upstream import GROUP_ROWS, next_group
from headwater.backfill.snapshot.state import CreatingState, Phase, next_chunk
from headwater.barrier.manager import BarrierReceiver, LocalBarrierManager
from headwater.errors import DefiniteError, HeadwaterError
from headwater.model.barrier import Barrier, BarrierKind, Mutation, MutationKind
from headwater.runtime.live_views import at_key
from headwater.runtime.registry import schema_of
from headwater.runtime.tables import InputLog, TableState, ViewState
from headwater.runtime.upstream import StoredUpstream
from headwater.storage.checkpoint import Contribution, JobRow, NewSegment

if TYPE_CHECKING:
    from headwater.engine import EngineCore

# The main lane's epochs that a lane may be behind when it asks to join: one refresh covers them in its barrier.
JOIN_LAG_S: Final = 5.0
# On a busy machine a step takes long, and the lane cannot come closer than the changes that arrive during one.
MAX_JOIN_LAG_S: Final = 300.0
# Rows of the driving input per chunk when nothing limits the rate: a second or two of work, after which others run.
CHUNK_ROWS: Final = 500_000
# Beside live views: a chunk takes about so long, on half of the slots, and then they have half as long for themselves.
BESIDE_S: Final = 1.0
BESIDE_ROWS: Final = (20_000, 100_000)  # the smallest chunk, and the first, before the speed is known
CHUNKED: Final = ("rowwise", "algebraic")
WHOLE_LOG: Final = 1 << 62
# After a step that failed; twice as long after each further one, since each may read all chunks again.
RETRY_S: Final = 5.0
MAX_RETRY_S: Final = 60.0


class ViewCreator:
    """The one actor of a creating view's lane."""

    def __init__(self, core: EngineCore, job: JobRow) -> None:
        self.core = core
        self.job_id = job.id
        self.name = f"creating {job.name}"
        self.schema = schema_of(job)
        stored = core.meta.state(job.id, "creating")
        self.state = CreatingState.from_dict(stored) if stored else CreatingState.starting(job.created_epoch)
        lane_epoch = core.meta.committed_epoch(job.lane)
        self.view = ViewState(job, self.schema, list(core.meta.segments_at(job.id, lane_epoch)))
        self.work: asyncio.Task[tuple[CreatingState, list[NewSegment]]] | None = None
        self.not_before = 0.0
        self.chunk_rows = BESIDE_ROWS[1]
        self.read = (0.0, 0.0)  # when the last step began, and the rows that it read: the rate limit counts them
        self.trouble = ""  # what the last step failed with
        self.diagnosis: Callable[[], str | None] | None = None  # of the step that runs: which key makes it fail
        self.diagnosed: tuple[CreatingState, str, str | None] | None = None  # (step, error, key), once it is looked for
        self.failures = 0
        self.last_step_s = 0.0
        self.joining = False
        self.staged_epoch = 0
        self._sizes: dict[int, int] | None = None

    @property
    def job(self) -> JobRow:
        return self.core.registry.by_id[self.job_id]

    async def run(self, barriers: BarrierReceiver, manager: LocalBarrierManager) -> None:
        async for barrier in barriers:
            manager.collect(self.name, barrier, await self._on_barrier(barrier, manager))

    def on_committed(self, epoch: int) -> None:
        """What was staged up to this epoch is safe: from here on the view may join."""
        if self.staged_epoch and epoch >= self.staged_epoch:
            self.staged_epoch = 0
            self.core.creating.nudge(self.job_id)

    async def close(self) -> None:
        if self.work is not None:
            self.work.cancel()
            await asyncio.gather(self.work, return_exceptions=True)

    # -- one barrier ------------------------------------------------------------------------------------------------

    async def _on_barrier(self, barrier: Barrier, manager: LocalBarrierManager) -> Contribution:
        contribution = Contribution()
        if barrier.kind is BarrierKind.INITIAL or self.job_id not in self.core.registry.by_id:
            return contribution
        if self.work is not None and self.work.done():
            try:
                self._take(*self.work.result(), contribution)
                self.staged_epoch = int(barrier.epoch.prev)
            except DefiniteError as error:
                self._failed(error, contribution)
            self.work = None
        if self.work is None:
            await self._next_step()
        self._report(manager)
        return contribution

    def _take(self, state: CreatingState, segments: list[NewSegment], contribution: Contribution) -> None:
        self.state = state
        self.core.creating.troubled.discard(self.job_id)
        self.trouble = ""
        self.view.segments = [*self.view.segments, *segments]
        contribution.segments_added += segments
        contribution.states[(self.job_id, "creating")] = state.as_dict()
        contribution.pins[f"job:{self.job_id}"] = state.consumed

    def _failed(self, error: DefiniteError, contribution: Contribution) -> None:
        """A definite error while creating: say so, and try again: the cause may go away.

        What is read of a past epoch never changes, and a row that was mended since is in a later one. So a snapshot is
        started over if there are later rows, and so is a group of epochs that some vnodes have consumed; what is kept
        of the view is hidden by the same checkpoint. Any other group is taken up to the newest epoch (`_consume`).
        """
        state, committed = self.state, self.core.meta.committed_epoch()
        if self.diagnosed is None or self.diagnosed[:2] != (state, str(error)):
            self.diagnosed = (state, str(error), None)
            self.core.background(self._find_key(error))
        elif (key := self.diagnosed[2]) is not None:
            error = at_key(error, key)
        self.core.record_error(self.job_id, self.job.name, error, retrying=True)
        self.core.creating.troubled.add(self.job_id)
        self.trouble = f"{error}"
        self.not_before = time.monotonic() + min(MAX_RETRY_S, RETRY_S * 2**self.failures)
        self.failures += 1
        stuck = state.phase is Phase.SNAPSHOT or state.group_epoch > 0
        if stuck and any(u.epochs(state.snapshot_epoch, committed) for u in self._upstreams()):
            self._begin_anew(committed, contribution)

    async def _find_key(self, error: DefiniteError) -> None:
        """Beside the lane: which key it was, for hw_errors and for what hw_progress says that it waits for."""
        step, search = self.diagnosed, self.diagnosis
        if step is None or search is None:
            return
        try:
            key = await self.core.jobs.run("query", "diagnosis", search)
        except HeadwaterError:
            return  # whatever it was is reported where it matters
        if key is None or self.diagnosed is not step or not self.trouble or self.job_id not in self.core.registry.by_id:
            return
        found = at_key(error, key)
        self.diagnosed, self.trouble = (*step[:2], key), f"{found}"
        self.core.record_error(self.job_id, self.job.name, found, retrying=True)

    def _begin_anew(self, epoch: int, contribution: Contribution) -> None:
        self.state = CreatingState.starting(epoch)
        self._sizes = None
        if self.view.segments:
            self.view.segments = []
            contribution.resets.append(self.job_id)
        contribution.states[(self.job_id, "creating")] = self.state.as_dict()
        contribution.pins[f"job:{self.job_id}"] = self.state.consumed

    async def _next_step(self) -> None:
        limit = rate_limit(self.job)
        waiting = self._waiting_for(limit)
        self.core.report_progress(self.job_id, waiting_for=waiting or self.trouble)
        if waiting or time.monotonic() < self.not_before:
            return
        began, rows = self.read
        if limit and time.monotonic() < began + rows / limit:  # of the limit as it is now
            self.core.report_progress(self.job_id, waiting_for=f"the rate limit of {limit} rows/s")
            return
        if self.state.phase is Phase.SNAPSHOT:
            self._begin(self._snapshot_chunk(limit))
            return
        committed = self.core.meta.committed_epoch()
        if self._is_close(committed):
            # The main lane may commit first: what this lane has only staged would come after the view is visible.
            if not self.staged_epoch:
                await self._join()
        elif committed > self.state.consumed:
            self._begin(self._consume(committed, limit))

    def _begin(self, step: Coroutine[Any, Any, tuple[CreatingState, list[NewSegment]]]) -> None:
        self.work = asyncio.create_task(step)
        self.work.add_done_callback(lambda _: self.core.creating.nudge(self.job_id))

    def _waiting_for(self, limit: int | None) -> str:
        if self.core.paused:
            return "RESUME: the engine is paused"
        if limit == 0:
            return "the rate limit is 0"
        for input_id in self.core.registry.depends_on(self.job):
            job = self.core.registry.by_id.get(input_id)
            if job is None:
                return "an input that was dropped"
            if job.state == "failed" or (job.kind == "view" and job.state != "live"):
                return f"{job.kind} {job.name} ({job.state})"
        return ""

    def _report(self, manager: LocalBarrierManager) -> None:
        state, count = self.state, self.core.vnode_count
        total = sum(state.vnode_rows) or self._driving_rows()
        if self.joining:
            phase = "Finishing [waiting for a checkpoint of the main lane]"
        elif state.phase is Phase.SNAPSHOT:
            phase = f"Snapshot [{state.next_vnode}/{count} vnodes, {state.row_count}/{total} rows]"
        else:
            inside = f", vnode {state.group_vnode}/{count}" if state.group_epoch else ""
            phase = f"LogStore [lag {self._lag_s():.1f} s{inside}]"
        value = {
            "phase": phase,
            "done": state.next_vnode,
            "total": count,
            "rows": state.row_count,
            "total_rows": total,
        }
        manager.report_create_mview_progress(self.job_id, value)

    def _lag_s(self) -> float:
        return max(0.0, ((self.core.meta.committed_epoch() - self.state.consumed) >> 16) / 1000)

    def _driving_rows(self) -> int:
        sizes = self._input_rows()
        return max(sizes.values(), default=0)

    def _input_rows(self) -> dict[int, int]:
        """Rows of the inputs' segments at the snapshot epoch, which is pinned: the answer changes only with it."""
        if self._sizes is None:
            inputs = self.core.registry.depends_on(self.job)
            at = self.state.snapshot_epoch
            self._sizes = {i: sum(s.rows for s in self.core.meta.segments_at(i, at)) for i in inputs}
        return self._sizes

    # -- steps ------------------------------------------------------------------------------------------------------

    def _upstreams(self) -> list[StoredUpstream]:
        return [StoredUpstream(self.core, i, self.job.name) for i in self.core.registry.depends_on(self.job)]

    def _inputs_at(self, epoch: int) -> dict[str, tuple[TableState, InputLog]]:
        return {u.job.name: (u.snapshot(epoch), InputLog()) for u in self._upstreams()}

    async def _snapshot_chunk(self, limit: int | None) -> tuple[CreatingState, list[NewSegment]]:
        """The next chunk: of vnodes, of a part of one, or everything at once where the strategy needs all rows."""
        from headwater.spark.view_chunk import Position, chunk_segments, count_vnodes, key_after
        from headwater.spark.view_failure import failing_row
        from headwater.spark.view_job import initial_segments

        state, count, started = self.state, self.core.vnode_count, time.monotonic()
        inputs = self._inputs_at(state.snapshot_epoch)
        sizes = self._input_rows()
        driving = self.core.registry.by_id[max(sizes, key=lambda i: sizes[i])].name if sizes else ""
        beside = bool(self.core.dataflow.live_views.states)
        run, view = self.core.jobs.run, replace(self.view)
        tasks = parallelism(self.job) or (max(1, self.core.slots // 2) if beside else None)
        if not driving or self.job.spec["plan"].get("strategy") not in CHUNKED:
            self.diagnosis = lambda: failing_row(self.core, view, inputs, driving)
            segments = await run("backfill", "view", lambda: initial_segments(self.core, view, inputs, tasks))
            return state.advanced(count, count, self._driving_rows()), segments
        table = inputs[driving][0]
        if not state.vnode_rows:
            state = state.counted(await run("backfill", "view", lambda: count_vnodes(self.core, table)))
        wanted = min(limit or CHUNK_ROWS, self.chunk_rows if beside else CHUNK_ROWS)
        start, upto = Position(state.next_vnode, state.next_key), next_chunk(state, count, wanted)
        end, then = Position(upto), None
        if upto == state.next_vnode:
            key = await run("backfill", "view", lambda: key_after(self.core, table, start, wanted))
            end = Position(upto, key) if key is not None else Position(upto + 1)
            then = state.advanced_within(key, wanted) if key is not None else None
        rows = sum(state.vnode_rows[state.next_vnode : end.vnode]) - state.rows_in_vnode
        then = then or state.advanced(end.vnode, count, rows)
        chunk = start.upto(end, table.schema)
        self.diagnosis = lambda: failing_row(self.core, view, inputs, driving, chunk)
        segments = await run(
            "backfill", "view", lambda: chunk_segments(self.core, view, inputs, driving, start, end, tasks)
        )
        self.read = (started, then.row_count - state.row_count)
        if beside:
            self._rest(time.monotonic() - started, rows=then.row_count - state.row_count)
        return then, segments

    def _rest(self, took: float, *, rows: int) -> None:
        """Leave the slots to the live views for a while; the next chunk is of a size that takes BESIDE_S."""
        self.chunk_rows = int(min(CHUNK_ROWS, max(BESIDE_ROWS[0], rows * BESIDE_S / max(took, 0.01))))
        self.not_before = max(self.not_before, time.monotonic() + took / 2)
        asyncio.get_running_loop().call_later(took / 2, self.core.creating.nudge, self.job_id)

    async def _consume(self, committed: int, limit: int | None) -> tuple[CreatingState, list[NewSegment]]:
        """The next group of epochs; a rowwise view takes a large one vnode by vnode."""
        from headwater.spark.view_failure import failing_change
        from headwater.spark.view_job import refresh_segments

        state, count, started = self.state, self.core.vnode_count, time.monotonic()
        upstreams = self._upstreams()
        # After a failure everything at once: a row that was mended is right only where both its changes are in a group.
        wanted = min(limit or GROUP_ROWS, GROUP_ROWS) if not self.trouble else WHOLE_LOG
        logs = [u.epochs(state.consumed, committed) for u in upstreams]
        group = next_group(logs, state.consumed, state.group_epoch or committed, wanted)
        if group is None:
            return state, []
        upto = state.group_epoch or group.upto
        inputs = {u.job.name: (u.snapshot(upto), u.change_log(state.consumed, upto)) for u in upstreams}
        rows = sum(s.rows for _, log in inputs.values() for s in log.log)
        parts = 1
        if self.job.spec["plan"].get("strategy") == "rowwise" and not any(log.reset for _, log in inputs.values()):
            parts = min(count, max(1, -(-rows // wanted)))
        end = min(count, state.group_vnode + -(-count // parts))
        vnodes = (state.group_vnode, end) if parts > 1 else None
        segments: list[NewSegment] = []
        view = replace(self.view)
        self.diagnosis = lambda: failing_change(self.core, view, inputs)
        if any(log.changed for _, log in inputs.values()):
            segments = await self.core.jobs.run(
                "view", "view", lambda: refresh_segments(self.core, view, inputs, vnodes)
            )
        self.last_step_s = time.monotonic() - started
        self.read = (started, rows / parts)
        if vnodes is None:
            return state.consumed_to(upto), segments
        return state.consumed_within(upto, end, count), segments

    def _is_close(self, committed: int) -> bool:
        if self.state.group_epoch:
            return False  # some vnodes are ahead of others
        lag_s = ((committed - self.state.consumed) >> 16) / 1000
        return lag_s <= min(MAX_JOIN_LAG_S, max(JOIN_LAG_S, 2 * self.last_step_s))

    async def _join(self) -> None:
        """Enter the main lane at a checkpoint: the changes since `consumed` are refreshed in that barrier."""
        view = self.view
        view.consumed_epoch = self.state.consumed
        for input_id in self.core.registry.depends_on(self.job):
            view.inputs[input_id] = InputLog(seen=list(self.core.meta.segments_at(input_id, self.state.consumed)))
        update = {"state": "live", "lane": "main", "became_live": True}
        contribution = Contribution(job_updates={self.job_id: update}, pins_dropped=[f"job:{self.job_id}"])
        self.core.report_progress(self.job_id, phase="Finishing")
        contribution.states[(self.job_id, "progress")] = self.core.progress_of(self.job_id).totals()
        self.joining = True
        self.core.background(self._finish(view, contribution))
        self.not_before = float("inf")

    async def _finish(self, view: ViewState, contribution: Contribution) -> None:
        try:
            await self.core.main.request(Mutation(MutationKind.ADD, self.job_id, view), contribution)
        except HeadwaterError as error:
            self.not_before = time.monotonic() + 1.0
            self.joining = False
            with contextlib.suppress(KeyError):
                self.core.record_error(self.job_id, self.job.name, error, retrying=True)
            return
        self.core.creating.joined(self.job_id)


def rate_limit(job: JobRow) -> int | None:
    value = job.spec.get("settings", {}).get("backfill_rate_limit")
    return None if value is None else int(value)


def parallelism(job: JobRow) -> int | None:
    """How many tasks of a step run at once, at most; None: as many as Spark gives it."""
    settings = job.spec.get("settings", {})
    found: int | None = settings.get("parallelism") or settings.get("backfill_parallelism")
    return found
