"""Views that are being created: each in a lane of its own, with its own barriers, so that it holds nobody up.

    CREATE ── pin S ──► snapshot at S (chunk by chunk) ──► change log from S on ──► join the main lane
                        └── committed chunk by chunk ────┘  └ group by group      └── with the changes since, in one

`Creating` takes the statements and owns the lanes; the steps of one view are in `view_creator.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from headwater.barrier.coordinator import Actor, Lane
from headwater.config import suggestion
from headwater.errors import HeadwaterError, UsageError
from headwater.model.schema import Schema
from headwater.runtime.registry import schema_of
from headwater.runtime.view_creator import ViewCreator, rate_limit
from headwater.sql import statements as s
from headwater.sql.binding import table_names
from headwater.storage.checkpoint import PIN_THIS_EPOCH, Contribution, JobRow

if TYPE_CHECKING:
    from headwater.engine import EngineCore

# A small view is usable when CREATE returns; a large one goes on behind.
SETTLE_S: Final = 30.0
OPTIONS: Final = {"backfill.rate_limit": 0, "backfill.parallelism": 1}  # with the smallest value


class Creating:
    """All views that are being created."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.lanes: dict[int, Lane] = {}
        self.troubled: set[int] = set()  # views whose last step failed

    # -- statements -------------------------------------------------------------------------------------------------

    async def create(self, statement: s.CreateView) -> int:
        """Analyse, register, start the lane; gives the job id."""
        settings = _settings(statement.options)
        inputs, plan = self._analyse(statement)
        schema = await self.core.jobs.run("query", "analyse", lambda: self._schema(plan, inputs))
        spec = {
            "schema": schema.as_dict(),
            "plan": plan.as_dict(),
            "input_columns": {j.name: [c.name for c in schema_of(j).visible] for j in inputs},
            "inputs": [j.id for j in inputs],
            "settings": settings,
        }
        lane = f"view {statement.name}"
        row = self.core.commands.row(statement.name, "view", "creating", statement.text, spec)
        row = JobRow(row.id, row.name, row.kind, row.state, lane, row.definition, row.spec)
        await self.core.commands.add_job(row, Contribution(pins={f"job:{row.id}": PIN_THIS_EPOCH}))
        self._start(self.core.registry.by_id[row.id])
        return row.id

    def _analyse(self, statement: s.CreateView) -> tuple[list[JobRow], Any]:
        from headwater.view.analyse import analyse

        names = table_names(statement.query)
        found = [self.core.registry.find(n, "table", "view") for n in names]
        inputs = list({j.id: j for j in found}.values())  # `t` and `T` are one
        schemas = {j.name: schema_of(j) for j in inputs}
        return inputs, analyse(statement.query.sql(dialect="spark"), schemas)

    def _schema(self, plan: Any, inputs: list[JobRow]) -> Schema:
        from headwater.spark.query import explained
        from headwater.spark.view import storage_schema

        with explained():
            return storage_schema(self.core.spark, plan, {j.name: schema_of(j) for j in inputs})

    async def explain(self, statement: s.CreateView) -> str:
        from headwater.view.plan import explain

        inputs, plan = self._analyse(statement)
        await self.core.jobs.run("query", "analyse", lambda: self._schema(plan, inputs))
        return explain(plan)

    async def settle(self, job_id: int) -> None:
        """Wait a little for a view to become live."""
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            job = self.core.registry.by_id.get(job_id)
            if job is None or job.state != "creating" or self.core.paused or rate_limit(job) == 0:
                return
            if job_id in self.troubled:  # hw_errors says why; it goes on trying
                return
            inputs = [self.core.registry.by_id.get(i) for i in self.core.registry.depends_on(job)]
            if any(one is not None and one.state == "failed" for one in inputs):  # it waits for that one to be mended
                return
            await asyncio.sleep(0.02)

    # -- lanes ------------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        for job in self.core.registry.of_kind("view"):
            if job.state == "creating":
                self._start(job)

    def _start(self, job: JobRow) -> None:
        lane = Lane(job.lane, self.core, self.core.clock, self.core.parameters.of_lanes, self.core.rng)
        self.lanes[job.id] = lane
        self.core.report_progress(job.id, phase="waiting", total=self.core.vnode_count)
        lane.start()
        self.nudge(job.id)

    def nudge(self, job_id: int) -> None:
        """A step is possible: do not wait for the lane's next barrier."""

        async def checkpoint(lane: Lane) -> None:
            with contextlib.suppress(HeadwaterError):
                await lane.checkpoint()

        if (lane := self.lanes.get(job_id)) is not None:
            self.core.background(checkpoint(lane))

    def retry(self) -> None:
        """RECOVER: what failed is tried again now, not after its pause."""
        for job_id in list(self.troubled):
            lane, job = self.lanes.get(job_id), self.core.registry.by_id.get(job_id)
            creator = lane.actor(f"creating {job.name}") if lane is not None and job is not None else None
            if isinstance(creator, ViewCreator) and not creator.joining:
                creator.not_before, creator.failures = 0.0, 0
                self.nudge(job_id)

    def settings_changed(self, job_id: int) -> None:
        """A limit was changed, or the engine paused or resumed (0: it concerns all)."""
        for creating_id in self.lanes:
            if job_id in (0, creating_id):
                self.nudge(creating_id)

    def build(self, lane: str) -> Sequence[Actor]:
        job = next((j for j in self.core.registry.of_kind("view") if j.lane == lane), None)
        return [ViewCreator(self.core, job)] if job is not None and job.state == "creating" else []

    async def cancel(self, job: JobRow) -> None:
        self.troubled.discard(job.id)
        if (lane := self.lanes.pop(job.id, None)) is not None:
            await lane.stop(final_checkpoint=False)

    async def stop(self) -> None:
        for lane in self.lanes.values():
            await lane.stop(final_checkpoint=False)
        self.lanes.clear()

    def joined(self, job_id: int) -> None:
        """The view is in the main lane: its own one ends."""
        if (lane := self.lanes.pop(job_id, None)) is not None:
            self.core.background(lane.stop(final_checkpoint=False))
        self.core.progress_of(job_id).finish()


def _settings(options: Mapping[str, str]) -> dict[str, int]:
    for name, text in options.items():
        if name not in OPTIONS:
            raise UsageError("UNKNOWN_OPTION", f"a view has no option {name}", hint=suggestion(name, OPTIONS))
        if not text.isdecimal() or int(text) < OPTIONS[name]:
            raise UsageError(
                "OPTION_VALUE", f"option {name} takes a whole number", hint=f"{name}='{OPTIONS[name] or 1000}'"
            )
    return {name.replace(".", "_"): int(text) for name, text in options.items()}
