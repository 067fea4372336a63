"""All sources of an engine: created, dropped, resynced, and asked for their part of every barrier.

`source_runtime.py` has one source, `backfill.py` one captured table.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from headwater.config import check_secrets, suggestion
from headwater.errors import DefiniteError, HeadwaterError, SourceError, UsageError
from headwater.model.barrier import Barrier
from headwater.runtime import source_setup as setup
from headwater.runtime.healing import Healing
from headwater.runtime.reads import Reads
from headwater.runtime.source_runtime import SourceRuntime
from headwater.sink.tls import warn_if_open
from headwater.sql import statements as s
from headwater.storage.checkpoint import Contribution, JobRow

if TYPE_CHECKING:
    from headwater.connectors.postgres.client import PostgresConfig
    from headwater.engine import EngineCore
    from headwater.runtime.tables import Staged

log = logging.getLogger(__name__)
CONNECTORS: Final = ("postgres-cdc",)
WATCH_S: Final = 1.0
# The stream has a gap that nobody can fill: only a new copy of the tables helps.
STREAM_LOST: Final = frozenset(
    {
        "SOURCE_SLOT_LOST",
        "SOURCE_SLOT_AHEAD",
        "SOURCE_SLOT_UNREADABLE",
        "SOURCE_RESTORED",
        "SOURCE_PUBLICATION_LOST",
        "SPOOL_CORRUPT",
        "SPOOL_DAMAGED",
    }
)


class Capture:
    """All sources of an engine."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.sources: dict[int, SourceRuntime] = {}
        self.reads = Reads(core)
        self.healing = Healing(core)

    def _each(self) -> Iterator[SourceRuntime]:
        """Those that are there, also if others come and go while something waits between two of them."""
        for source_id in list(self.sources):
            if source_id in self.sources:
                yield self.sources[source_id]

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        for job in self.core.registry.of_kind("source"):
            self.sources[job.id] = SourceRuntime(self.core, job)
        for source in self._each():
            source.load()
            await source.start_reader()
        self.healing.recall(list(self.sources.values()))
        self.core.background(self._watch())

    async def stop(self) -> None:
        await asyncio.gather(*(s.stop() for s in self.sources.values()))
        await self.reads.stop()

    async def rebuild(self) -> None:
        """After a recovery: forget what was staged and not committed."""
        for source in self._each():
            await source.pause_backfills()
            source.load()
            source.start_backfills()

    async def _watch(self) -> None:
        """Show what stands in a reader's way, once per error; heal what only a new copy heals."""
        shown: dict[int, str] = {}
        while True:
            await asyncio.sleep(WATCH_S)
            for source_id, source in list(self.sources.items()):
                error = source.error
                text = str(error) if error else ""
                heals = source.failed and error is not None and error.code in STREAM_LOST
                if error is not None and shown.get(source_id) != text:
                    self.core.record_error(source_id, source.name, error, retrying=heals or not source.failed)
                shown[source_id] = text
                if (lag := source.lag_bytes()) is not None:
                    self.core.counters.source_lag(source.name, lag)
                if heals:
                    await source.heal()
            await self.healing.look(list(self.sources.values()))

    def read_at(self, table_id: int) -> float:
        """When a read of a table last succeeded, as far as this engine knows."""
        return max((s.tables[table_id].read_at for s in self.sources.values() if table_id in s.tables), default=0.0)

    def stream_lost(self, table_id: int, error: DefiniteError) -> bool:
        """Whether a task found the spool damaged, and not its table: then the source heals, and no table fails."""
        source = next((s for s in self.sources.values() if table_id in s.tables), None)
        if source is None or error.code not in STREAM_LOST:
            return False
        source.stream_lost(error)
        return True

    def table_failed(self, table_id: int, error: DefiniteError) -> bool:
        """A task found a definite error; True if it is of a captured table that a new copy may heal."""
        table = next((s.tables[table_id] for s in self.sources.values() if table_id in s.tables), None)
        return table is not None and self.healing.table_failed(table, error)

    # -- statements -------------------------------------------------------------------------------------------------

    async def create_source(self, statement: s.CreateSource) -> None:
        from headwater.connectors.postgres.client import PostgresConfig, may_be_read_by_others

        connector = statement.options.get("connector")
        if connector not in CONNECTORS:
            raise UsageError(
                "UNKNOWN_CONNECTOR",
                f"there is no source connector {connector}" if connector else "option connector is missing",
                hint=suggestion(connector or "", CONNECTORS),
            )
        check_secrets(statement.options)
        config = PostgresConfig.from_options(statement.options)
        warn_if_open(f"source {statement.name}", config.hostname, config.ssl_mode)
        self._check_slot_is_free(config)
        if warning := may_be_read_by_others(config):
            log.warning("source %s: %s", statement.name, warning)
        made = await asyncio.to_thread(setup.open_slot, config)
        spec = {"options": statement.options, "inputs": [], **made}
        row = self.core.commands.row(statement.name, "source", "live", statement.text, spec)
        from headwater.connectors.postgres.client import format_lsn

        try:
            await self.core.commands.add_job(row, Contribution(positions={row.id: format_lsn(made["start_lsn"])}))
        except BaseException:
            await asyncio.to_thread(setup.release, config, made)
            raise
        source = self.sources[row.id] = SourceRuntime(self.core, self.core.registry.by_id[row.id])
        source.load()
        await source.start_reader()  # also without tables: a slot that nobody reads makes the source's log grow

    def _check_slot_is_free(self, config: PostgresConfig) -> None:
        """A slot has one reader: two sources on it would each miss what the other was sent."""
        for other in self.sources.values():
            theirs = other.config
            if (theirs.hostname, theirs.port, theirs.slot) == (config.hostname, config.port, config.slot):
                raise UsageError(
                    "SOURCE_SLOT_FOREIGN",
                    f"replication slot {config.slot} is that of source {other.name}",
                    hint="choose another slot.name, or make the tables FROM " + other.name,
                )

    async def create_table(self, statement: s.CreateTableFrom) -> None:
        from headwater.runtime.captured_table import describe_table

        job = self.core.registry.find(statement.source, "source")
        source = self.sources[job.id]
        table = await asyncio.to_thread(describe_table, source.config, statement)
        state = await source.enter(table, statement)
        spec = {
            "schema": table.schema.as_dict(),
            "inputs": [job.id],
            "captured": state,
            "settings": table.settings,
        }
        kind_state = "creating" if table.snapshot else "live"
        row = self.core.commands.row(statement.name, "table", kind_state, statement.text, spec)
        try:
            await self.core.commands.add_job(row)
            source.add_table(self.core.registry.by_id[row.id])
            if table.notice:
                self._notice(row.id, statement.name, table.notice)
        finally:
            source.release(state["mark"])

    def _notice(self, job_id: int, name: str, text: str) -> None:
        """Nothing went wrong, and somebody should know."""
        hint = "compute them in a view, or list the columns to make it plain"
        self.core.record_error(job_id, name, SourceError("COLUMNS_LEFT_OUT", text, hint=hint), retrying=False)

    async def drop(self, jobs: Sequence[JobRow]) -> Callable[[], Awaitable[None]]:
        """Stop what works for these jobs now; gives what is to be undone at the source once they are dropped."""
        undo: list[Callable[[], None]] = []
        made: list[tuple[JobRow, PostgresConfig]] = []
        for job in sorted(jobs, key=lambda job: job.kind == "source"):  # its tables are known while it is
            for source in self._each():
                if job.id in source.tables:
                    ours = await source.remove_table(job.id)
                    if ours is not None:
                        undo.append(functools.partial(setup.withdraw, source.config, ours))
            if job.kind == "source" and (source_ := self.sources.pop(job.id, None)) is not None:
                await source_.stop()
                made.append((job, source_.config))
                self.core.forget_files([f"spool/{source_.directory.name}"])

        async def finish() -> None:
            for one in undo:
                with contextlib.suppress(HeadwaterError):
                    await asyncio.to_thread(one)
            for job, config in made:
                try:
                    await asyncio.to_thread(setup.release, config, job.spec)
                except HeadwaterError as error:
                    found = setup.not_released(job.name, config, job.spec, error)
                    if found.hint.endswith(";"):
                        self.core.record_error(None, job.name, found, retrying=False)

        return finish

    def settings_changed(self, job_id: int) -> None:
        for source in self.sources.values():
            for table_id, backfill in source.tables.items():
                if job_id in (0, table_id):
                    backfill.settings_changed()

    async def resync(self, name: str) -> None:
        job = self.core.registry.find(name, "table")
        source = next((x for x in self.sources.values() if job.id in x.tables), None)
        if source is None:
            raise UsageError("NOT_CAPTURED", f"table {job.name} is not captured from a source")
        await source.resync(job)

    # -- one barrier ------------------------------------------------------------------------------------------------

    async def prepare(self, barrier: Barrier, contribution: Contribution, staged: Staged) -> list[tuple[int, Any]]:
        tasks: list[tuple[int, Any]] = []
        for source in self._each():
            tasks += await source.prepare(barrier, contribution)
        return tasks

    def take_result(self, result: dict[str, Any], contribution: Contribution, staged: Staged) -> None:
        for source in self.sources.values():
            if result["subject"] in source.tables:
                source.take_result(result)
                if result.get("reshaped"):
                    self.healing.on_shape_seen(result["subject"], result["reshaped"])

    async def finish(self, contribution: Contribution, staged: Staged) -> None:
        for source in self._each():
            await source.finish(contribution, staged)

    def epoch_lasted(self, seconds: float) -> None:
        for source in self.sources.values():
            source.size.record_duration(seconds)
            source.handed_rows.record_duration(seconds)

    def committed(self, epoch: int, contribution: Contribution) -> None:
        for source in self.sources.values():
            source.committed(epoch, contribution)

    def goals(self) -> dict[int, int] | None:
        """What the sources have committed by now, by their ids; None while one is not heard of, or heals."""
        if not all(self.healing.quiet(source) for source in self.sources.values()):
            return None
        found = {source_id: source.goal() for source_id, source in self.sources.items()}
        known = {source_id: goal for source_id, goal in found.items() if goal is not None}
        return known if len(known) == len(found) else None

    def reached(self, goals: dict[int, int]) -> bool:
        return all(self.sources[i].committed_position >= goal for i, goal in goals.items() if i in self.sources)

    def source_rows(self) -> list[dict[str, Any]]:
        return [source.row() for source in self.sources.values()]
