"""Tables that follow an upstream of somebody else's (a Delta table): copied once, then its change log, group by group.

One task per table, outside the lanes. What it read becomes a batch of segments with the version up to which they go;
the next barrier of the main lane takes both, so they are committed together, or read again.

    state `upstream` of the job: {"version": n}, absent until the copy is committed
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from headwater.backfill.snapshot.consume_upstream.upstream import next_group
from headwater.config import check_secrets, is_reference
from headwater.errors import DefiniteError, HeadwaterError, TransientError, UsageError
from headwater.model.barrier import Mutation, MutationKind
from headwater.model.schema import keyed
from headwater.runtime.registry import schema_of
from headwater.sink.registry import library_missing
from headwater.sql import statements as s
from headwater.storage.checkpoint import Contribution, JobRow, NewSegment

if TYPE_CHECKING:
    from headwater.engine import EngineCore

log = logging.getLogger(__name__)
STATE: Final = "upstream"
POLL_S: Final = 1.0
RETRY_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
STORAGE: Final = "storage."  # options with this prefix go to the file system
VERSIONS: Final = 100  # that one step takes at most: how much a version changed is not known beforehand


class Followed:
    """See the head of this module."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    def resume(self) -> None:
        for job in self.core.registry.of_kind("table"):
            if job.spec.get("follows"):
                self.core.background(self._follow(job.id))

    async def create(self, statement: s.CreateTable) -> None:
        """`CREATE TABLE … WITH (connector='delta', path='…')`"""
        options = dict(statement.options)
        if options.pop("connector") != "delta" or "path" not in options:
            raise UsageError(
                "UNKNOWN_OPTION", "a table follows a Delta table", hint="WITH (connector='delta', path='…')"
            )
        unknown = [o for o in options if o != "path" and not o.startswith(STORAGE)]
        if unknown:
            raise UsageError("UNKNOWN_OPTION", f"a followed table has no option {unknown[0]}", hint="path, storage.…")
        check_secrets(options)
        if is_reference(options["path"]):
            raise UsageError(
                "OPTION_VALUE", "the path of a followed table takes no credentials", hint="storage.… options take them"
            )
        if not statement.key:
            raise UsageError("KEY_MISSING", "a table that follows another needs a primary key", hint="PRIMARY KEY (…)")
        schema = keyed(statement.columns, statement.key)
        spec: dict[str, Any] = {"schema": schema.as_dict(), "inputs": [], "follows": options}
        row = self.core.commands.row(statement.name, "table", "live", statement.text, spec)
        await asyncio.to_thread(self._upstream(row).check)
        await self.core.commands.add_job(row)
        self.core.background(self._follow(row.id))

    def _upstream(self, job: JobRow) -> Any:
        try:
            from headwater.connectors.delta.upstream import DeltaUpstream
        except ImportError as error:
            raise library_missing("delta", error) from error

        options = job.spec["follows"]
        storage = {name.removeprefix(STORAGE): value for name, value in options.items() if name.startswith(STORAGE)}
        return DeltaUpstream(job.name, options["path"], schema_of(job), storage)

    # -- one table --------------------------------------------------------------------------------------------------

    async def _follow(self, job_id: int) -> None:
        failures = 0
        while (job := self.core.registry.by_id.get(job_id)) is not None:
            try:
                moved = not self.core.paused and await self._step(job)
                if job.state == "failed":
                    await self._set_state(job, "live")
                failures = 0
                await asyncio.sleep(0 if moved else POLL_S)
            except HeadwaterError as error:
                definite = isinstance(error, DefiniteError)
                if failures == 0 or not definite:
                    self.core.record_error(job_id, job.name, error, retrying=True)
                if definite and job.state != "failed":
                    await self._set_state(job, "failed")
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1

    async def _step(self, job: JobRow) -> bool:
        """Copy, or take the next versions; False if there is nothing new."""
        upstream = self._upstream(job)
        stored = self.core.meta.state(job.id, STATE)
        latest = await asyncio.to_thread(upstream.latest_epoch)
        if stored is None:
            segments = await self._run(job, await asyncio.to_thread(self._copy_tasks, job, upstream, latest))
            await self._commit(job, segments, latest)
            return True
        after = int(stored["version"])
        if latest < after:
            raise DefiniteError(
                "UPSTREAM_EXPIRED",
                f"the Delta table of {job.name} was made again: its versions begin again",
                hint=f"DROP TABLE {job.name} and create it again",
            )
        group = next_group([upstream.epochs(after, latest)], after, latest, VERSIONS)
        if group is None:
            return False
        tasks = await asyncio.to_thread(self._change_tasks, job, upstream, group.after, group.upto)
        await self._commit(job, await self._run(job, tasks), group.upto)
        return True

    def _copy_tasks(self, job: JobRow, upstream: Any, version: int) -> list[Any]:
        from headwater.connectors.delta.upstream import CopyFiles

        step = max(1, min(self.core.slots, upstream.snapshot(version)))
        return [
            CopyFiles(self.core.data_dir, job.id, upstream, version, i, step, self.core.vnode_count)
            for i in range(step)
        ]

    def _change_tasks(self, job: JobRow, upstream: Any, after: int, upto: int) -> list[Any]:
        from headwater.connectors.delta.upstream import TakeChanges

        first, last = upstream.change_log(after, upto)
        base = self.core.sequence.take(1 << 39)
        return [TakeChanges(self.core.data_dir, job.id, upstream, first, last, base, self.core.vnode_count)]

    async def _run(self, job: JobRow, tasks: list[Any]) -> list[NewSegment]:
        from headwater.spark.query import explained
        from headwater.spark.tasks import run_tasks

        def work() -> list[dict[str, Any]]:
            with explained("EPOCH_FAILED"):
                return run_tasks(self.core.spark, [[task] for task in tasks])

        results = await self.core.jobs.run("backfill", "follow", work)
        for result in results:
            if "error" in result:
                error = result["error"]
                raise DefiniteError(error["code"], error["message"], detail=error["detail"], hint=error["hint"])
        return [NewSegment(**result["segment"]) for result in results]

    async def _commit(self, job: JobRow, segments: list[NewSegment], version: int) -> None:
        """Hand the rows to the next barrier, and wait until they are committed."""
        states = {(job.id, STATE): {"version": version}}
        self.core.writes.hand_over(job.id, segments, states)
        ticket = self.core.writes.acknowledged
        while self.core.dataflow.waits(ticket):
            if job.id not in self.core.registry.by_id:
                return
            await asyncio.sleep(0.02)
        if self.core.meta.state(job.id, STATE) != {"version": version} and job.id in self.core.registry.by_id:
            raise TransientError("EPOCH_FAILED", "an epoch failed", hint="it is tried again")

    async def _set_state(self, job: JobRow, state: str) -> None:
        contribution = Contribution(job_updates={job.id: {"state": state}})
        await self.core.main.request(Mutation(MutationKind.THROTTLE, job.id), contribution)
