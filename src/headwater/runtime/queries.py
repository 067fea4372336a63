"""SELECT: every table of a query at one and the same epoch, as a DataFrame and as rows for the interfaces."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from sqlglot import exp

from headwater.errors import DefiniteError, UsageError
from headwater.model.schema import Schema, quoted
from headwater.model.vnode import vnodes_of_values
from headwater.runtime.reading import Hold, Reading
from headwater.runtime.registry import schema_of
from headwater.runtime.result import CollectedRows, Result
from headwater.runtime.spelling import json_value, unique_names
from headwater.sql.binding import TableRef, bind
from headwater.storage.checkpoint import JobRow

if TYPE_CHECKING:
    from headwater.engine import EngineCore

Constants = Mapping[str, tuple[int | str, ...]]
TARGET: Final = "hw_target"  # in a query of UPDATE or DELETE: all columns of the table that it changes
NO_CONSTANTS: Final[Constants] = {}
MAX_POINTS: Final = 1000  # keys of one look-up; more of them touch most vnodes anyway
INTEGERS: Final = ("TINYINT", "SMALLINT", "INT", "INTEGER", "BIGINT")


class Queries:
    """See the head of this module. What queries read is in `reading`, which garbage collection respects."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.reading = Reading(core.meta.committed_epoch)

    async def run(self, query: exp.Expression) -> Result:
        """Ends with whoever waits for it, and after `statement_timeout_s`, if that is set; its Spark job too."""
        limit = self.core.parameters["statement_timeout_s"]
        try:
            async with asyncio.timeout(limit or None):
                # What the engine says of itself is to be had above all while nothing else goes on.
                if not (self.core.waiting_for and all(ref.catalogue for ref in bind(query)[1])):
                    await self.core.writes.settle()
                return await self.core.jobs.run("query", "query", lambda: self.run_blocking(query), ends=True)
        except TimeoutError:
            raise DefiniteError(
                "STATEMENT_TIMEOUT",
                f"the query took longer than {limit} s",
                hint="ALTER SYSTEM SET statement_timeout_s = 0 takes the limit away",
            ) from None

    def run_blocking(self, query: exp.Expression) -> Result:
        from headwater.spark.query import explained, with_plain_intervals

        with self.reading.hold() as hold, explained():
            frame = with_plain_intervals(self.frame(query, hold))
            names = unique_names(frame.columns)
            return Result(names, self._rows(frame, names), hold.epoch)

    def _rows(self, frame: Any, names: list[str]) -> list[dict[str, Any]] | CollectedRows:
        from headwater.spark.collect import collect_batches, comes_as_rows

        if comes_as_rows(frame):
            return [dict(zip(names, map(json_value, row), strict=True)) for row in frame.collect()]
        found = CollectedRows(names, getattr(self.core, "local_dir", None))
        found.finish(collect_batches(frame, found.take))
        return found

    def frame(self, query: exp.Expression, hold: Hold, target: tuple[int, Schema] | None = None) -> Any:
        """The query as a DataFrame at the hold's epoch, which must last until its rows have been read.

        `hw_target` stands for all columns of one table (UPDATE, DELETE).
        """
        from headwater.spark.query import run_sql

        sql, refs = bind(query)
        tables = {}
        for ref in refs:
            if target is not None and ref.name == TARGET:
                tables[ref.placeholder] = self.snapshot(*target, hold.epoch, ref.constants)
            else:
                tables[ref.placeholder] = self._bound(ref, hold)
        return run_sql(self.core.spark, sql, tables)

    def lasting_frame(self, query: exp.Expression) -> Any:
        """A DataFrame for whoever reads it when they like."""
        return self._lasting(lambda hold: self.frame(query, hold))

    def table_frame(self, job: JobRow, epoch: int | None) -> Any:
        """The rows of a table at an epoch, the last committed one if none is given, as `lasting_frame` has them."""
        return self._lasting(lambda hold: self.visible(job, self._asked(job, epoch, hold)))

    def _lasting(self, make: Callable[[Hold], Any]) -> Any:
        hold = self.reading.hold()
        try:
            frame = make(hold)
        except BaseException:
            hold.release()
            raise
        hold.follow(frame)
        return frame

    def _asked(self, job: JobRow, epoch: int | None, hold: Hold) -> int:
        if epoch is None:
            self.check_readable(job)
            return hold.epoch
        hold.back_to(epoch)
        return self.check_epoch(job, epoch)

    def snapshot(self, table_id: int, schema: Schema, epoch: int, constants: Constants = NO_CONSTANTS) -> Any:
        """All columns, hidden ones included; only the vnodes that can hold the constants, if they fix the key."""
        homes = vnodes_wanted(schema, constants, self.core.parameters["vnode_count"])
        return self.core.reader(schema).snapshot(self.core.meta.segments_at(table_id, epoch), vnodes=homes)

    def visible(self, job: JobRow, epoch: int, constants: Constants = NO_CONSTANTS) -> Any:
        schema = schema_of(job)
        frame = self.snapshot(job.id, schema, epoch, constants)
        return frame.select(*[quoted(c.name) for c in schema.visible])

    # -- binding ----------------------------------------------------------------------------------------------------

    def _bound(self, ref: TableRef, hold: Hold) -> Any:
        if ref.catalogue:
            return self.core.catalogue.frame(ref.name)
        job = self.core.registry.find(ref.name, "table", "view")
        if ref.changes is not None:
            return self._changes(job, *ref.changes, hold)
        past: int | None = None
        if ref.version is not None:
            past = self._version(ref.version)
        elif ref.timestamp is not None:
            past = self._at_timestamp(job, ref.timestamp)
        return self.visible(job, self._asked(job, past, hold), ref.constants)

    def check_readable(self, job: JobRow) -> None:
        """Refuses a view whose rows are not those of the last epoch."""
        if job.kind == "view" and job.state == "creating":
            raise UsageError(
                "VIEW_CREATING", f"view {job.name} is still being created", hint="WAIT, or see hw_catalog.hw_progress"
            )
        if job.kind == "view" and job.state == "failed":
            raise UsageError(
                "VIEW_FAILED",
                f"view {job.name} has stopped",
                hint="hw_catalog.hw_errors says why; VERSION AS OF an earlier epoch reads what it held",
            )

    def _version(self, text: str) -> int:
        try:
            return int(text.strip("'\""))
        except ValueError:
            raise UsageError("SQL_SYNTAX", "VERSION AS OF takes an epoch") from None

    def check_epoch(self, job: JobRow, epoch: int) -> int:
        """The epoch itself, if it is committed and retained and the job was there."""
        first = max(self.core.meta.oldest_epoch(), job_start(job))
        last = self.core.meta.committed_epoch()
        if not first <= epoch <= last or not self.core.meta.epochs_between(epoch - 1, epoch):
            raise UsageError(
                "EPOCH_NOT_AVAILABLE",
                f"epoch {epoch} of {job.name} is not available",
                detail=f"retained: {first} to {last}",
                hint="SELECT epoch FROM hw_catalog.hw_epochs",
            )
        if self.core.meta.had_stopped(job, epoch):
            raise UsageError(
                "EPOCH_NOT_AVAILABLE",
                f"view {job.name} had stopped at epoch {epoch}",
                detail="it had failed before, and had not yet recovered",
                hint="hw_catalog.hw_errors says why, and when; choose an epoch before that, or a later one",
            )
        return epoch

    def _at_timestamp(self, job: JobRow, text: str) -> int:
        from headwater.spark.query import explained

        with explained():
            row = self.core.spark.sql(f"SELECT unix_micros(CAST({text} AS TIMESTAMP)) AS t").collect()[0]
        epoch = self.core.meta.epoch_at(row.t / 1e6) if row.t is not None else None
        if epoch is None:
            first = max(self.core.meta.oldest_epoch(), job_start(job))
            raise UsageError(
                "EPOCH_NOT_AVAILABLE",
                f"nothing of {job.name} is retained from that moment",
                detail=f"retained: {first} to {self.core.meta.committed_epoch()}",
            )
        return epoch

    def _changes(self, job: JobRow, after: int, upto: int, hold: Hold) -> Any:
        """`table_changes('t', E1, E2)`: the changes of the epochs in (E1, E2]; what was there at E1 is read, too."""
        from headwater.spark.changes import change_feed

        hold.back_to(max(after, job_start(job)))
        first, last = self.core.meta.oldest_epoch(), self.core.meta.committed_epoch()
        if after > upto:
            raise UsageError("EPOCH_RANGE", "the first epoch of table_changes is after the last")
        if upto > last or (after < first and job_start(job) < first):
            raise UsageError(
                "EPOCH_NOT_AVAILABLE",
                f"the changes of {job.name} from {after} to {upto} are not available",
                detail=f"retained: {first} to {last}",
                hint="SELECT epoch FROM hw_catalog.hw_epochs",
            )
        return change_feed(self.core, job, after, upto)


def vnodes_wanted(schema: Schema, constants: Constants, vnode_count: int) -> list[int] | None:
    """The vnodes of the keys that constants allow; None if they leave the key open.

    Only literals of the column's own kind count: a string column compared with a number is compared as a number.
    """
    values = []
    for column in schema.key_columns:
        found = constants.get(column.name.lower(), ())
        kind = int if column.type.upper() in INTEGERS else str if column.type.upper() == "STRING" else None
        if kind is None or not found or not all(isinstance(v, kind) for v in found):
            return None
        values.append(found)
    if math.prod(map(len, values)) > MAX_POINTS:
        return None
    return vnodes_of_values(values, vnode_count)


def job_start(job: JobRow) -> int:
    """The first epoch at which a job can be read."""
    return job.live_epoch if job.kind == "view" else job.created_epoch
