"""The snapshot of a view that is being created, chunk by chunk of its driving input.

A position is (vnode, key): everything before it was read. A rowwise view takes the rows of a chunk as they are; an
algebraic one adds them to the accumulators that earlier chunks gave, as if they had just been inserted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headwater.backfill.snapshot.state import Key
from headwater.model.schema import OP, OP_UPSERT, VNODE, Schema, quoted
from headwater.model.schema import Column as SchemaColumn
from headwater.runtime.tables import InputLog, TableState, ViewState
from headwater.spark.query import explained
from headwater.spark.view import Source, bound_name, initial, refresh
from headwater.spark.view_input import segment_source
from headwater.spark.view_job import as_created, at_most, write_view
from headwater.storage.checkpoint import NewSegment
from headwater.view.inputs import FrameText
from headwater.view.plan import Strategy, ViewPlan


@dataclass(frozen=True, slots=True)
class Position:
    """Where reading begins (inclusive) or ends (exclusive); without a key: at the beginning of the vnode."""

    vnode: int
    key: Key | None = None

    def before(self, schema: Schema) -> Column:
        """The rows that come before it."""
        earlier = F.col(VNODE) < self.vnode
        if self.key is None:
            return earlier
        names = F.struct(*[F.col(quoted(c.name)) for c in schema.key_columns])
        values = F.struct(*[_value(v, c) for v, c in zip(self.key, schema.key_columns, strict=True)])
        return earlier | ((F.col(VNODE) == self.vnode) & (names < values))

    def upto(self, end: Position, schema: Schema) -> Column:
        """The rows from here to before another position."""
        return ~self.before(schema) & end.before(schema)


def count_vnodes(core: Any, table: TableState) -> list[int]:
    """The rows of each vnode, as the segments hold them: one job that reads one column."""
    counts = [0] * core.vnode_count
    if table.segments:
        with explained("VIEW_FAILED"):
            found = core.reader(table.schema).scan_numbered(table.segments).groupBy(VNODE).count().collect()
        for row in found:
            counts[row[0]] = row[1]
    return counts


def key_after(core: Any, table: TableState, start: Position, rows: int) -> Key | None:
    """The key that follows `rows` rows of the position's vnode; None if it has no more than that."""
    schema = table.schema
    where = (F.col(VNODE) == start.vnode) & ~start.before(schema)
    keys = [F.col(quoted(c.name)) for c in schema.key_columns]
    with explained("VIEW_FAILED"):
        frame = core.reader(schema).snapshot(table.segments, where).select(*keys).orderBy(*keys)
        found = (
            frame.offset(rows)
            .limit(1)
            .select(*[_text(k, c.type) for k, c in zip(keys, schema.key_columns, strict=True)])
        )
        first = found.collect()
    return tuple(first[0]) if first else None


def _text(column: Column, kind: str) -> Column:
    """A key's value as text; `_value` is the way back."""
    return F.hex(column) if kind.upper() == "BINARY" else column.cast("string")


def _value(text: str | None, column: SchemaColumn) -> Column:
    value = F.unhex(F.lit(text)) if column.type.upper() == "BINARY" else F.lit(text).cast(column.type)
    return value.alias(column.name)


def chunk_segments(
    core: Any,
    view: ViewState,
    inputs: dict[str, tuple[TableState, InputLog]],
    driving: str,
    start: Position,
    end: Position,
    tasks: int | None = None,
) -> list[NewSegment]:
    """The change of the view by the driving input's rows from one position to before another, read by n `tasks`."""
    inputs = as_created(view, inputs)
    plan = ViewPlan.from_dict(view.job.spec["plan"])
    sources = {
        name: segment_source(core.reader(state.schema), i, state)
        for i, (name, (state, _)) in enumerate(sorted(inputs.items()))
    }
    state = inputs[driving][0]
    number = bound_name(sorted(inputs).index(driving))
    begin, finish = start.before(state.schema), end.before(state.schema)
    chunk = _rows(core, state, start.upto(end, state.schema), tasks)
    first = start == Position(0)
    with explained("VIEW_FAILED"):
        if first or plan.strategy is Strategy.ROWWISE:
            if not first:  # the other inputs of a UNION ALL were read as a whole with the first chunk
                sources = {name: _nothing(core, i, inputs[name][0]) for i, name in enumerate(sorted(inputs))}
            sources[driving] = Source(FrameText(number, state.schema, False), {f"{number}_after": chunk})
            return write_view(core, view, inputs, initial(core.spark, plan, sources), kind="base", tasks=tasks)
        frames: dict[str, Callable[[], DataFrame]] = {
            f"{number}_before": _rows(core, state, begin),
            f"{number}_after": _rows(core, state, finish),
            f"{number}_changes": lambda: _inserts(chunk()),
            f"{number}_changes_with_old": lambda: _inserts(chunk()),
        }
        sources[driving] = Source(FrameText(number, state.schema, True), frames)
        current = segment_source(core.reader(view.schema), "current", view)
        return write_view(core, view, inputs, refresh(core.spark, plan, sources, current), kind="delta", tasks=tasks)


def _nothing(core: Any, number: int, state: TableState) -> Source:
    """An input without rows."""
    return segment_source(core.reader(state.schema), number, replace(state, segments=[]))


def _rows(core: Any, state: TableState, where: Column, tasks: int | None = None) -> Callable[[], DataFrame]:
    return lambda: at_most(core.reader(state.schema).snapshot(state.segments, where), tasks)


def _inserts(rows: DataFrame) -> DataFrame:
    return rows.withColumn(OP, F.lit(OP_UPSERT).cast("tinyint"))
