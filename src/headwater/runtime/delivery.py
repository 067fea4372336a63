"""Sinks at work: creating them, starting a worker for each (`sink_worker.py`), and what the engine asks of all of them.

    commit ─► LogStoreWriter (references) ─► LogStoreReader.next_batch ─► DeliveryLoop.deliver ─► target
                                                                   └─ durable ─► truncate, with the next checkpoint

Nothing here is in the way of a barrier. A sink whose target is down retries for ever and grows only its own backlog.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

from headwater.config import check_secrets, resolve_secret
from headwater.errors import TransientError, UsageError
from headwater.runtime.registry import schema_of
from headwater.runtime.sink_log import stored_row
from headwater.runtime.sink_worker import SinkWorker, raw_options
from headwater.sink.options import SinkOptions
from headwater.sink.registry import open_sink, sink_key, sink_options
from headwater.sql import statements as s
from headwater.storage.checkpoint import PIN_THIS_EPOCH, Contribution, JobRow

if TYPE_CHECKING:
    from headwater.engine import EngineCore


class Delivery:
    """All sinks of an engine."""

    def __init__(self, core: EngineCore) -> None:
        # A connector's thread would load it (pyiceberg's catalogs use it), and a statement that the meta store makes
        # meanwhile meets a module that is half there: the epoch would fail and the lane recover.
        importlib.import_module("sqlalchemy.orm")
        self.core = core
        self.sinks: dict[int, SinkWorker] = {}

    async def create(self, statement: s.CreateSink) -> None:
        check_secrets(statement.options)
        options = sink_options(statement.options, resolve_secret=resolve_secret)
        source_id = await self._input(statement)
        try:
            row = await self._row(statement, options, self.core.registry.by_id[source_id])
        except BaseException:
            if statement.query is not None:  # a statement that fails leaves nothing of itself
                await self.core.commands.drop(self.core.registry.by_id[source_id], cascade=False)
            raise
        contribution = Contribution(pins={f"sink:{row.id}": PIN_THIS_EPOCH})
        await self.core.commands.add_job(row, contribution)
        self._start(self.core.registry.by_id[row.id])

    async def _row(self, statement: s.CreateSink, options: SinkOptions, source: JobRow) -> JobRow:
        schema = schema_of(source)
        key = sink_key(options, schema.visible, schema.key)
        spec = {"inputs": [source.id], "options": statement.options, "key": list(key), "settings": {}}
        spec["columns"] = [c.name for c in schema.visible]
        row = self.core.commands.row(statement.name, "sink", "live", statement.text, spec)
        await asyncio.to_thread(self._validate, row, schema.visible, schema.key)
        return row

    async def _input(self, statement: s.CreateSink) -> int:
        if statement.source is not None:
            return self.core.registry.find(statement.source, "table", "view").id
        assert statement.query is not None
        name = hidden_view(statement.name)
        text = f"CREATE MATERIALIZED VIEW {name} AS {statement.query.sql(dialect='spark')}"
        await self.core.writes.settle()
        return await self.core.creating.create(s.CreateView(text, name, statement.query))

    def _validate(self, row: JobRow, columns: Any, key: Any) -> None:
        """Errors while creating are definite: wrong password, no such host, no such column."""
        try:
            options = raw_options(self.core, row)
            sink = open_sink(row.name, options, columns, key, self.core.generation, resolve_secret)
            try:
                sink.validate(columns, row.spec["key"])
            finally:
                sink.close()
        except TransientError as error:
            raise UsageError(error.code, error.message, detail=error.detail, hint=error.hint) from error

    def start(self) -> None:
        for job in self.core.registry.of_kind("sink"):
            self._start(job)

    def _start(self, job: JobRow) -> None:
        worker = self.sinks[job.id] = SinkWorker(self.core, job)
        worker.task = asyncio.create_task(worker.run(), name=f"sink {job.name}")

    async def stop(self) -> None:
        await asyncio.gather(*(w.stop() for w in self.sinks.values()))
        self.sinks.clear()

    async def drop(self, job: JobRow) -> None:
        if (worker := self.sinks.pop(job.id, None)) is not None:
            await worker.stop()

    def hidden_inputs(self, job: JobRow) -> list[JobRow]:
        """The view behind a sink `AS SELECT …`, which goes with it."""
        if job.kind != "sink":
            return []
        view = self.core.registry.by_id.get(int(job.spec["inputs"][0]))
        if view is None or view.name != hidden_view(job.name):
            return []
        return [view] if self.core.registry.all_dependants(view.id) == [job] else []

    def recovered(self) -> None:
        """The lane was rebuilt from what is committed: what was handed over and not committed is handed over again."""
        for worker in self.sinks.values():
            worker.recovered()

    def committed(self, epoch: int) -> None:
        """A main checkpoint landed: references of what it added go to each sink's log."""
        for worker in self.sinks.values():
            worker.committed(epoch)

    def contribute(self, contribution: Contribution) -> None:
        """What the next checkpoint has to store of the log stores."""
        for worker in self.sinks.values():
            worker.contribute(contribution)

    def log_store_rows(self) -> list[dict[str, Any]]:
        rows = []
        for job in self.core.registry.of_kind("sink"):
            worker = self.sinks.get(job.id)
            rows.append(worker.row() if worker else stored_row(self.core, job))
        return rows

    def delivered(self, epoch: int) -> bool:
        """Every sink's target has what was committed up to the epoch."""
        return all(w.delivered(epoch) for w in self.sinks.values())

    async def rewind(self, name: str, epoch: int) -> None:
        job = self.core.registry.find(name, "sink")
        await self.sinks[job.id].rewind_to(epoch)

    async def replay(self, name: str) -> int:
        """Deliver a sink's dead letters again; gives how many rows they were."""
        job = self.core.registry.find(name, "sink")
        return await self.sinks[job.id].replay()


def hidden_view(sink: str) -> str:
    return f"{sink}__query"
