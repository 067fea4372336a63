"""The live views in the main lane: what each has not yet consumed of its inputs, and its refresh at each barrier.

All views are refreshed layer by layer, so that a view on views sees what its inputs have at the same epoch (I4). A
view that fails keeps what it has not consumed, stops alone, and is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from headwater.errors import DefiniteError, HeadwaterError, TransientError
from headwater.runtime.registry import schema_of
from headwater.runtime.tables import InputLog, Staged, TableState, ViewState
from headwater.storage.checkpoint import Contribution, JobRow, NewSegment

if TYPE_CHECKING:
    from headwater.runtime.dataflow import Dataflow

log = logging.getLogger(__name__)
Refreshed = list[tuple[ViewState, "list[NewSegment] | DefiniteError"]]
Inputs = dict[str, tuple[TableState, InputLog]]
VIEW_RETRY_S: Final = 5.0  # a failed view tries again this often: the cause may be gone


def at_key(error: DefiniteError, key: str) -> DefiniteError:
    """The error of a view with the key that makes it fail."""
    return DefiniteError(error.code, f"{error.message}, at {key}", detail=error.detail, hint=error.hint)


class LiveViews:
    """See the head of this module. `flow` has the state of the tables, and what waits for its commit."""

    def __init__(self, flow: Dataflow) -> None:
        self.flow = flow
        self.core = flow.core
        self.states: dict[int, ViewState] = {}
        self.epoch = 0  # the one that is being staged

    def rebuild(self) -> None:
        """Every view that has entered the lane, as of the last committed epoch."""
        jobs = [j for j in self.core.registry.of_kind("view") if j.state != "creating"]
        for level in self.core.registry.view_levels(jobs):
            for job in level:
                self._restore(job)

    def _restore(self, job: JobRow) -> None:
        committed = self.flow.committed_epoch
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
        self.states[job.id] = view

    def sync(self) -> None:
        """Follow the registry after a commit that changed it."""
        known = self.core.registry.by_id
        if gone := self.states.keys() - known.keys():
            from headwater.spark.view_fetched import forget

            forget(gone)
        self.states = {job_id: view for job_id, view in self.states.items() if job_id in known}
        for job_id, view in self.states.items():
            view.job = known[job_id]

    def on_committed(self, epoch: int) -> None:
        for view in self.states.values():
            if not view.failed:
                view.consumed_epoch = epoch

    def are_fed_by(self, staged: Staged) -> bool:
        changed = {*staged.segments, *staged.resets}
        return any(not changed.isdisjoint(view.inputs) for view in self.states.values())

    def join(self, view: ViewState) -> None:
        """A created view enters: what its inputs committed since its lane's last epoch, and staged, is its log.

        With a copy of what its lane handed over: if this barrier is lost, the same enters again.
        """
        inputs = {i: InputLog(seen=list(log.seen)) for i, log in view.inputs.items()}
        view = replace(view, segments=list(view.segments), inputs=inputs)
        for input_id, log in view.inputs.items():
            state = self.flow.state(input_id)
            if state is None:
                raise DefiniteError("INPUT_DROPPED", f"an input of view {view.job.name} was dropped")
            committed = self.core.meta.change_segments(input_id, view.consumed_epoch, self.flow.committed_epoch)
            paths = {s.path for s in committed}
            waiting = [s for _, s in self.flow.uncommitted if s.table_id == input_id and s.path not in paths]
            log.log = [*committed, *waiting]
            log.reset = self.core.meta.was_reset(input_id, view.consumed_epoch, self.flow.committed_epoch)
        self.states[view.job.id] = view

    async def stage(self, contribution: Contribution, staged: Staged, epoch: int) -> None:
        self.epoch = epoch
        for view in self.states.values():
            for input_id, log in view.inputs.items():
                self._extend(log, input_id, staged)
        jobs = [v.job for v in self.states.values()]
        for level in self.core.registry.view_levels(jobs) if jobs else []:
            views = [self.states[j.id] for j in level]
            for view in views:
                for input_id, log in view.inputs.items():
                    if input_id in self.states:
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
        if any(self.states[i].failed for i in view.inputs if i in self.states):
            # Also if nothing changed: what it shows is not of this epoch any more.
            error = DefiniteError("INPUT_FAILED", f"an input of {view.job.name} has stopped")
            self._view_failed(view, error, contribution)
            view.retry_at = 0.0  # it resumes in the barrier in which its input does
            return False
        if not any(log.changed for log in view.inputs.values()):
            self._seen(view)
            if view.failed:
                self._recovered(view, contribution)
            return False
        return not view.failed or time.monotonic() >= view.retry_at

    async def _refreshed(self, views: list[ViewState]) -> Sequence[Refreshed]:
        """The new segments of each view, or why there are none. Small refreshes share jobs, large ones are one each.

        A view that has failed is tried alone: it would take the others' job down with it.
        """
        from headwater.spark.view_job import groups, may_join

        works = [(view, self._inputs(view)) for view in views]
        joined = [(view, inputs) for view, inputs in works if not view.failed and may_join(view, inputs)]
        together = groups(self.core, joined)
        alone = [view for view, _ in works if all(view is not other for other, _ in joined)]
        return await asyncio.gather(*map(self._refresh_together, together), *map(self._refresh_alone, alone))

    async def _refresh_together(self, works: list[tuple[ViewState, Inputs]]) -> Refreshed:
        from headwater.spark.view_job import refresh_together

        views = [view for view, _ in works]
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
        from headwater.spark.view_failure import failing_change

        inputs = {
            name: (replace(state, segments=list(state.segments)), replace(log, log=list(log.log)))
            for name, (state, log) in self._inputs(view).items()
        }
        frozen = replace(view, segments=list(view.segments))
        try:
            key = await self.core.jobs.run("query", "diagnosis", lambda: failing_change(self.core, frozen, inputs))
        except HeadwaterError:
            return  # whatever it was is reported where it matters
        if key is not None and view.failed and view.job.id in self.core.registry.by_id:
            self.core.record_error(view.job.id, view.job.name, at_key(error, key), retrying=True)

    def _inputs(self, view: ViewState) -> Inputs:
        found = {}
        for input_id, log in view.inputs.items():
            state = self.flow.state(input_id)
            assert state is not None
            found[state.job.name] = (state, log)
        return found

    def _seen(self, view: ViewState) -> None:
        for input_id, log in view.inputs.items():
            state = self.flow.state(input_id)
            if state is not None:
                log.seen, log.log, log.reset = list(state.segments), [], False

    def _view_failed(self, view: ViewState, error: HeadwaterError, contribution: Contribution) -> None:
        view.retry_at = time.monotonic() + VIEW_RETRY_S
        if view.failed:
            return
        if any(s.table_id == view.job.id for _, s in self.flow.uncommitted):
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
        # The epochs in between cannot be read: their rows of the view are not those of its inputs (I4).
        oldest = self.core.meta.oldest_epoch()
        gaps = [gap for gap in self.core.meta.state(view.job.id, "gaps") or [] if gap[1] > oldest]
        contribution.states[(view.job.id, "gaps")] = [*gaps, [view.consumed_epoch, self.epoch]]
        contribution.job_updates.setdefault(view.job.id, {})["state"] = "live"
