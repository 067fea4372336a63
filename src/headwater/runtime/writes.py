"""INSERT, UPDATE and DELETE. A statement is acknowledged when its rows are staged; the next barrier makes them visible.

    VALUES …            evaluated without a Spark job, kept as an Arrow file; at the barrier all tables' are one job
    SELECT, UPDATE, …   one Spark job of its own, which writes finished segments

Writes to one table are serialised by a lock, so that the order of `_seq` is the order of commits. UPDATE and DELETE
read what is committed, after everything acknowledged before them is: nothing is lost in between.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.ipc
from sqlglot import exp

from headwater.errors import TransientError, UsageError, disk_full, is_disk_full
from headwater.model.schema import ROW_ID, Column, Schema
from headwater.runtime.queries import TARGET
from headwater.runtime.reading import Hold
from headwater.runtime.registry import schema_of
from headwater.runtime.tables import Batch
from headwater.sql import statements as s
from headwater.sql.binding import table_names
from headwater.sql.parser import parse
from headwater.storage.checkpoint import Contribution, NewSegment, States

if TYPE_CHECKING:
    from headwater.engine import EngineCore

# Numbers (`_seq`, row ids) that a bulk write takes: 4,096 partitions of 2**27 rows; 2**24 such writes fit into 63 bits.
BULK_NUMBERS: Final = 1 << 39
INLINE_ROWS: Final = 100_000  # a longer VALUES list is a bulk write


class Writes:
    """See the head of this module."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.locks: dict[int, asyncio.Lock] = {}
        self.acknowledged = 0
        self.row_ids: dict[int, int] = {}

    def lock(self, table_id: int) -> asyncio.Lock:
        return self.locks.setdefault(table_id, asyncio.Lock())

    async def settle(self) -> None:
        """Wait until everything acknowledged so far is committed; what is written meanwhile is not waited for."""
        ticket = self.acknowledged
        while self.core.dataflow.waits(ticket):
            await self.core.main.checkpoint()

    # -- statements -------------------------------------------------------------------------------------------------

    async def insert(self, statement: s.Insert, states: States) -> None:
        job = self._target(statement.table)
        schema = schema_of(job)
        columns = self._insert_columns(schema, statement.columns)
        async with self.lock(job.id):
            # Each is a walk through every value of a list.
            if await asyncio.to_thread(_is_inline, statement.query):
                rows = [await self._values(schema, columns, statement.query)]
                for text in statement.more:
                    rows.append(await self._values(schema, columns, await asyncio.to_thread(_rows_of, text)))
                await self.stage(job.id, schema, pa.concat_tables(rows), states)
            elif statement.more:
                raise _not_constants()
            else:
                if await asyncio.to_thread(table_names, statement.query):
                    await self.settle()
                segments = await self._query_segments(job.id, schema, columns, statement.query)
                self.hand_over(job.id, segments, states)

    async def update(self, statement: s.Update, states: States) -> None:
        job = self._target(statement.table)
        schema = schema_of(job)
        names = {c.name.lower(): c for c in schema.visible}
        changes: dict[str, exp.Expression] = {}
        for name, value in statement.assignments:
            column = names.get(name.lower())
            if column is None:
                raise UsageError("UNKNOWN_COLUMN", f"table {job.name} has no column {name}")
            if column.name in changes:
                raise UsageError("DUPLICATE_COLUMN", f"column {column.name} is set twice")
            changes[column.name] = value
        async with self.lock(job.id):
            await self.settle()
            rows = self._selection(statement.alias, schema, changes, statement.where, job.id)
            moves = any(k in changes for k in schema.key)
            segments = await self._segments(
                job.id, schema, rows[0], lambda hold: self._update_frame(rows, schema, moves, hold), "delta"
            )
            self.hand_over(job.id, segments, states)

    async def delete(self, statement: s.Delete, states: States) -> None:
        job = self._target(statement.table)
        schema = schema_of(job)
        async with self.lock(job.id):
            await self.settle()
            rows = self._selection(statement.alias, schema, {}, statement.where, job.id)
            segments = await self._segments(
                job.id, schema, rows[0], lambda hold: self._delete_frame(rows, schema, hold), "delta"
            )
            self.hand_over(job.id, segments, states)

    # -- pieces -----------------------------------------------------------------------------------------------------

    def _target(self, name: str) -> Any:
        job = self.core.registry.find(name, "table", "view", "source", "sink")
        if job.kind != "table":
            raise UsageError("READ_ONLY", f"{job.name} is a {job.kind} and cannot be written to")
        if job.spec.get("captured"):
            raise UsageError(
                "READ_ONLY", f"table {job.name} is kept in step with its source", hint="write to the source instead"
            )
        if job.spec.get("follows"):
            raise UsageError("READ_ONLY", f"table {job.name} follows another table", hint="write to that one instead")
        if self.core.main.paused and self.core.registry.all_dependants(job.id):
            raise UsageError("PAUSED", f"the engine is paused and {job.name} feeds views or sinks", hint="RESUME first")
        return job

    def _insert_columns(self, schema: Schema, names: tuple[str, ...] | None) -> list[Column]:
        visible = {c.name.lower(): c for c in schema.visible}
        if names is None:
            return list(schema.visible)
        unknown = [n for n in names if n.lower() not in visible]
        if unknown:
            raise UsageError("UNKNOWN_COLUMN", f"the table has no column {unknown[0]}")
        found = [visible[n.lower()] for n in names]
        if len({c.name for c in found}) < len(found):
            raise UsageError("DUPLICATE_COLUMN", "a column is named twice")
        missing = [c.name for c in schema.visible if not c.nullable and c not in found]
        if missing:
            raise UsageError("NOT_NULL", f"column {missing[0]} must have a value")
        return found

    async def _values(self, schema: Schema, columns: list[Column], query: exp.Expression) -> pa.Table:
        def evaluate() -> pa.Table:
            from headwater.spark.query import rows_of_values

            return rows_of_values(self.core.spark, query, columns, schema)

        return await self.core.jobs.run("query", "insert", evaluate)

    async def stage(self, table_id: int, schema: Schema, rows: pa.Table, states: States) -> None:
        """Acknowledge rows (all of the table's columns and `_op`): the next barrier takes them."""
        if rows.num_rows == 0:
            return
        if schema.keyless:
            first = self._take_row_ids(table_id, rows.num_rows)
            ids = pa.array(range(first, first + rows.num_rows), pa.int64())
            rows = rows.set_column(rows.schema.get_field_index(ROW_ID), ROW_ID, ids)
        path = f"staging/{uuid.uuid4().hex}.arrow"
        try:
            await asyncio.to_thread(self._write_ipc, path, rows)
        except OSError as error:
            self.core.forget_files([path])
            if is_disk_full(error):
                raise disk_full() from error
            raise TransientError("WRITE_FAILED", "the rows could not be staged", detail=type(error).__name__) from error
        kind = "base" if schema.keyless else "delta"
        seq_base = self.core.sequence.take(rows.num_rows)
        self._acknowledge(table_id, ipc_path=path, rows=rows.num_rows, kind=kind, seq_base=seq_base, states=states)

    def _write_ipc(self, path: str, rows: pa.Table) -> None:
        with self.core.data_dir.create(path) as out, pa.ipc.new_file(out, rows.schema) as writer:
            writer.write_table(rows)

    def _take_row_ids(self, table_id: int, count: int) -> int:
        if table_id not in self.row_ids:
            self.row_ids[table_id] = int(self.core.meta.state(table_id, "row_id") or 0)
        first = self.row_ids[table_id] + 1
        self.row_ids[table_id] += count
        return first

    async def staged_query(self, table_id: int, schema: Schema, query: exp.Expression) -> Contribution:
        """The rows of a query, written for a table that is not there yet: what its creation commits with it."""
        await self.settle()
        segments = await self._query_segments(table_id, schema, list(schema.visible), query)
        states: dict[tuple[int, str], Any] = {(table_id, "progress"): {"rows": sum(s.rows for s in segments)}}
        if schema.keyless:
            states[(table_id, "row_id")] = self.row_ids.get(table_id, 0)
        return Contribution(segments_added=segments, states=states)

    async def _query_segments(
        self, table_id: int, schema: Schema, columns: list[Column], query: exp.Expression
    ) -> list[NewSegment]:
        def frame(hold: Hold) -> Any:
            from headwater.spark.query import insert_frame

            source = self.core.queries.frame(query, hold)
            row_id = self._take_row_ids(table_id, BULK_NUMBERS) if schema.keyless else 0
            return insert_frame(source, columns, schema, row_id)

        return await self._segments(table_id, schema, query, frame, "base" if schema.keyless else "delta")

    async def _segments(
        self, table_id: int, schema: Schema, query: exp.Expression, frame: Callable[[Hold], Any], kind: str
    ) -> list[NewSegment]:
        """Run one Spark job that writes changes of a table as segments; what it reads is held meanwhile."""
        seq_base = self.core.sequence.take(BULK_NUMBERS)

        def write() -> Any:
            from headwater.spark.query import explained
            from headwater.spark.segment import write_frame

            with self.core.queries.reading.hold() as hold, explained():
                return write_frame(
                    frame(hold),
                    self.core.data_dir,
                    table_id,
                    schema,
                    kind=kind,
                    vnode_count=self.core.vnode_count,
                    seq_base=seq_base,
                    wide=self._is_wide(table_id, query),
                )

        found: list[NewSegment] = await self.core.jobs.run("query", "write", write)
        return found

    def _is_wide(self, table_id: int, query: exp.Expression) -> bool:
        """Whether rows of a query may be: those of the tables that it reads are, or it makes long values of them."""
        from headwater.spark.width import is_wide, may_grow

        names = [n for n in table_names(query) if n != TARGET]
        read = [job.id for job in map(self.core.registry.get, names) if job is not None]
        epoch = self.core.meta.committed_epoch()
        return may_grow(query.sql(dialect="spark")) or any(
            is_wide(self.core.meta.segments_at(i, epoch)) for i in {table_id, *read}
        )

    def hand_over(self, table_id: int, segments: Sequence[NewSegment], states: States) -> None:
        """Segments that are ready, with states that are committed together with them."""
        if segments or states:
            self._acknowledge(table_id, segments=tuple(segments), states=states)

    def _acknowledge(self, table_id: int, **batch: Any) -> None:
        if self.core.stopping:  # the last checkpoint may have been taken
            raise TransientError("ENGINE_STOPPING", "the engine is stopping", hint="start it again")
        state = self.core.dataflow.tables.get(table_id)
        if state is None:
            raise UsageError("UNKNOWN_TABLE", "the table was dropped while it was written to")
        self.acknowledged += 1
        state.pending.append(Batch(self.acknowledged, **batch))

    def _selection(
        self,
        alias: str,
        schema: Schema,
        changes: dict[str, exp.Expression],
        where: exp.Expression | None,
        table_id: int,
    ) -> tuple[exp.Expression, str, int]:
        """`SELECT old key AS _hw_old_…, new values FROM table WHERE …` over all columns, hidden ones included."""
        outputs: list[Any] = []
        for column in schema.columns:
            value = changes.get(column.name) or exp.column(column.name, quoted=True)
            outputs.append(exp.alias_(exp.cast(value.copy(), column.type, dialect="spark"), column.name, quoted=True))
        for name in schema.key:
            outputs.append(exp.alias_(exp.column(name, quoted=True), f"_hw_old_{name}", quoted=True))
        named = exp.TableAlias(this=exp.to_identifier(alias, quoted=True))
        query = exp.select(*outputs).from_(exp.Table(this=exp.to_identifier(TARGET), alias=named))
        if where is not None:
            query = query.where(where.copy())
        return query, alias, table_id

    def _selected(self, rows: tuple[exp.Expression, str, int], schema: Schema, hold: Hold) -> Any:
        query, _, table_id = rows
        return self.core.queries.frame(query, hold, target=(table_id, schema))

    def _update_frame(self, rows: tuple[exp.Expression, str, int], schema: Schema, moves: bool, hold: Hold) -> Any:
        from headwater.spark.query import checked_columns, tombstones

        selected = self._selected(rows, schema, hold)
        new = checked_columns(selected, schema, upserts=True)
        return tombstones(selected, schema).unionByName(new) if moves else new

    def _delete_frame(self, rows: tuple[exp.Expression, str, int], schema: Schema, hold: Hold) -> Any:
        from headwater.spark.query import tombstones

        return tombstones(self._selected(rows, schema, hold), schema)


def _rows_of(text: str) -> exp.Expression:
    """The rows of a part of a long INSERT."""
    (statement,) = parse(text)
    if not isinstance(statement, s.Insert) or not _is_inline(statement.query):
        raise _not_constants()
    return statement.query


def _not_constants() -> UsageError:
    return UsageError("SQL_INVALID", "a long INSERT takes constants", hint="INSERT INTO … SELECT for the others")


def _is_inline(query: exp.Expression) -> bool:
    """A VALUES list of constants, or a SELECT without FROM; nothing of it is bound, so it names no table."""
    if isinstance(query, exp.Values):
        return len(query.expressions) <= INLINE_ROWS and not query.find(exp.Select, exp.Table)
    alone = isinstance(query, exp.Select) and not query.args.get("from_")
    return alone and not query.find(exp.Subquery, exp.Explode, exp.Table)
