"""SELECT: every table of a query at one and the same epoch, as a DataFrame and as rows for the interfaces."""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from sqlglot import exp

from headwater.errors import UsageError
from headwater.model.schema import Schema, quoted
from headwater.model.vnode import vnodes_of_values
from headwater.runtime.registry import schema_of
from headwater.sink.encode import date_text, flat, timestamp_text
from headwater.sql.binding import TableRef, bind
from headwater.storage.checkpoint import JobRow

if TYPE_CHECKING:
    from headwater.engine import EngineCore

Constants = Mapping[str, tuple[int | str, ...]]
TARGET: Final = "hw_target"  # in a query of UPDATE or DELETE: all columns of the table that it changes
NO_CONSTANTS: Final[Constants] = {}
MAX_POINTS: Final = 1000  # keys of one look-up; more of them touch most vnodes anyway
INTEGERS: Final = ("TINYINT", "SMALLINT", "INT", "INTEGER", "BIGINT")


@dataclass(frozen=True, slots=True)
class Result:
    """The rows of a query, values spelt as `--format json` does; `epoch` is what was read."""

    columns: list[str]
    rows: list[dict[str, Any]]
    epoch: int


class Queries:
    """See the head of this module. `reading` holds the epochs of running queries, which garbage collection respects."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.reading: dict[int, int] = {}
        self._next = 0

    async def run(self, query: exp.Expression) -> Result:
        # What the engine says of itself is to be had above all while nothing else goes on.
        if not (self.core.waiting_for and all(ref.catalogue for ref in bind(query)[1])):
            await self.core.writes.settle()
        return await self.core.jobs.run("query", "query", lambda: self.run_blocking(query))

    def run_blocking(self, query: exp.Expression) -> Result:
        from headwater.spark.query import explained, with_plain_intervals

        epoch = self.core.meta.committed_epoch()
        with self._reading(epoch), explained():
            frame = with_plain_intervals(self.frame(query, epoch))
            names = unique_names(frame.columns)
            return Result(names, json_rows(frame, names), epoch)

    def frame(self, query: exp.Expression, epoch: int, target: tuple[int, Schema] | None = None) -> Any:
        """The query as a DataFrame at an epoch; `hw_target` stands for all columns of one table (UPDATE, DELETE)."""
        from headwater.spark.query import run_sql

        sql, refs = bind(query)
        tables = {}
        for ref in refs:
            if target is not None and ref.name == TARGET:
                tables[ref.placeholder] = self.snapshot(*target, epoch, ref.constants)
            else:
                tables[ref.placeholder] = self._bound(ref, epoch)
        return run_sql(self.core.spark, sql, tables)

    def snapshot(self, table_id: int, schema: Schema, epoch: int, constants: Constants = NO_CONSTANTS) -> Any:
        """All columns, hidden ones included; only the vnodes that can hold the constants, if they fix the key."""
        homes = vnodes_wanted(schema, constants, self.core.parameters["vnode_count"])
        return self.core.reader(schema).snapshot(self.core.meta.segments_at(table_id, epoch), vnodes=homes)

    def visible(self, job: JobRow, epoch: int, constants: Constants = NO_CONSTANTS) -> Any:
        schema = schema_of(job)
        frame = self.snapshot(job.id, schema, epoch, constants)
        return frame.select(*[quoted(c.name) for c in schema.visible])

    # -- binding ----------------------------------------------------------------------------------------------------

    def _bound(self, ref: TableRef, epoch: int) -> Any:
        if ref.catalogue:
            return self.core.catalogue.frame(ref.name)
        job = self.core.registry.find(ref.name, "table", "view")
        if ref.changes is not None:
            return self._changes(job, *ref.changes)
        if ref.version is not None:
            epoch = self._version(job, ref.version)
        elif ref.timestamp is not None:
            epoch = self._at_timestamp(job, ref.timestamp)
        else:
            self.check_readable(job)
        return self.visible(job, epoch, ref.constants)

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

    def _version(self, job: JobRow, text: str) -> int:
        try:
            epoch = int(text.strip("'\""))
        except ValueError:
            raise UsageError("SQL_SYNTAX", "VERSION AS OF takes an epoch") from None
        return self.check_epoch(job, epoch)

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
        return self.check_epoch(job, epoch)

    def _changes(self, job: JobRow, after: int, upto: int) -> Any:
        """`table_changes('t', E1, E2)`: the changes of the epochs in (E1, E2]."""
        from headwater.spark.changes import change_feed

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

    @contextmanager
    def _reading(self, epoch: int) -> Iterator[None]:
        self._next += 1
        ticket = self._next
        self.reading[ticket] = epoch
        try:
            yield
        finally:
            del self.reading[ticket]


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


def json_rows(frame: Any, names: list[str]) -> list[dict[str, Any]]:
    """All rows of a DataFrame, JSON-ready. Local relations cost no Spark job."""
    if not _needs_arrow(frame):
        return [dict(zip(names, map(json_value, row), strict=True)) for row in frame.collect()]
    table = frame.toArrow()
    columns = [json_column(table.column(i)) for i in range(table.num_columns)]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _needs_arrow(frame: Any) -> bool:
    """Collected as rows, instants pass through the local time zone, far dates do not fit into Python's, and a FLOAT
    is a number of twice its digits."""
    kinds = frame.schema.simpleString()
    return any(kind in kinds for kind in ("timestamp", ":date", "<date", ":float", "<float"))


def unique_names(names: Iterable[str]) -> list[str]:
    """Two columns of one name would be one in a JSON object: `x`, `x_2`."""
    names = list(names)
    taken, result = set(names), list[str]()
    for name in names:
        if name in result:
            name = next(n for i in itertools.count(2) if (n := f"{name}_{i}") not in taken)
            taken.add(name)
        result.append(name)
    return result


def json_column(array: Any) -> list[Any]:
    """The values of an Arrow column, spelt as `json_value` does; the extreme moments print as `infinity`."""
    array = flat(array)
    kind = array.type
    if pa.types.is_timestamp(kind):
        return list(timestamp_text(array).to_pylist())
    if pa.types.is_date(kind):
        return list(date_text(array).to_pylist())
    if pa.types.is_float32(kind):  # with as many digits as it has
        return [json_value(None if text is None else float(text)) for text in array.cast(pa.string()).to_pylist()]
    if pa.types.is_map(kind):
        keys, items = [_json_key(k) for k in json_column(array.keys)], json_column(array.items)
        return _cut(array, [dict(zip(keys[a:b], items[a:b], strict=True)) for a, b in _bounds(array)])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        values = json_column(array.values)
        return _cut(array, [values[a:b] for a, b in _bounds(array)])
    if pa.types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        parts = [json_column(part) for part in array.flatten()]
        return _cut(array, [dict(zip(names, row, strict=True)) for row in zip(*parts, strict=True)])
    return [json_value(v) for v in array.to_pylist()]


def _bounds(array: Any) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(array.offsets.to_pylist())


def _cut(array: Any, values: list[Any]) -> list[Any]:
    """The values, with NULL where the array has it."""
    return [v if valid else None for v, valid in zip(values, array.is_valid().to_pylist(), strict=True)]


def json_value(value: Any) -> Any:
    """Integers exact, decimals strings, timestamps ISO 8601 in UTC with microseconds, binary base64, NaN strings."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
        case decimal.Decimal():
            return format(value, "f")
        case dt.datetime():
            return _timestamp(value)
        case dt.date():
            return value.isoformat()
        case bytes() | bytearray() | memoryview():
            return base64.b64encode(bytes(value)).decode()
        case dict():
            return {_json_key(json_value(k)): json_value(v) for k, v in value.items()}
        case _ if hasattr(value, "asDict"):
            return {k: json_value(v) for k, v in value.asDict().items()}
        case list() | tuple():
            return [json_value(v) for v in value]
    return str(value)


def _json_key(value: Any) -> str:
    """A map's key as the name in an object: a text as it is, others as the text of their JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _timestamp(value: dt.datetime) -> str:
    if value.tzinfo is not None:
        value = value.astimezone(dt.UTC)
        return value.strftime("%Y-%m-%dT%H:%M:%S.%f") + "Z"
    return value.strftime("%Y-%m-%dT%H:%M:%S.%f")
