"""The Spark job of a view's refresh or creation: the change of the view, written as segments of its storage table."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headwater.errors import DefiniteError
from headwater.model.schema import VNODE, Schema, quoted
from headwater.runtime.tables import InputLog, TableState, ViewState
from headwater.spark.query import explained
from headwater.spark.segment import segment_query, write_frame, write_sorted
from headwater.spark.session import quick_session
from headwater.spark.table import TableReader
from headwater.spark.view import Source, initial, refresh
from headwater.spark.view_input import segment_source
from headwater.storage.checkpoint import NewSegment
from headwater.view.plan import Strategy, ViewPlan

HASH_CELLS: Final = 64  # into which the keys of one vnode are divided to find the one that fails
QUICK_ROWS: Final = 200_000  # changes that one task aggregates in well under a second
INTERPRETED_ROWS: Final = 50_000  # so few are through before code for them would be compiled


def _sources(
    reader: Any, inputs: dict[str, tuple[TableState, InputLog]], vnodes: tuple[int, int] | None = None
) -> dict[str, Source]:
    where = None if vnodes is None else (F.col(VNODE) >= vnodes[0]) & (F.col(VNODE) < vnodes[1])
    return {
        name: segment_source(reader(state.schema), i, state, log, where)
        for i, (name, (state, log)) in enumerate(sorted(inputs.items()))
    }


def as_created(
    view: ViewState, inputs: dict[str, tuple[TableState, InputLog]]
) -> dict[str, tuple[TableState, InputLog]]:
    """The inputs with the columns that they had when the view was created: `SELECT *` means what it meant then."""
    columns = view.job.spec.get("input_columns", {})
    return {
        name: (replace(state, schema=state.schema.restricted(columns.get(name))), log)
        for name, (state, log) in inputs.items()
    }


def refresh_segments(
    core: Any,
    view: ViewState,
    inputs: dict[str, tuple[TableState, InputLog]],
    vnodes: tuple[int, int] | None = None,
) -> list[NewSegment]:
    """Run one refresh; of a rowwise view also with the changes of some vnodes only."""
    plan = ViewPlan.from_dict(view.job.spec["plan"])
    spark = _session(core, plan, view, inputs)

    def reader(schema: Schema) -> TableReader:
        return TableReader(spark, core.data_dir, schema)

    with explained("VIEW_FAILED"):
        current = segment_source(reader(view.schema), "current", view)
        finish = partial(
            segment_query, schema=view.schema, vnode_count=core.vnode_count, seq_base=core.sequence.take(1 << 39)
        )
        frame = refresh(spark, plan, _sources(reader, as_created(view, inputs), vnodes), current, finish=finish)
        return write_sorted(frame, core.data_dir, view.job.id, kind="delta")


def failing_key(core: Any, view: ViewState, inputs: dict[str, tuple[TableState, InputLog]]) -> str | None:
    """Which change makes the refresh fail, as `table.key = value`; None if it is not one alone.

    Halves the change log again and again: first by vnode, then by a hash of the key. Some fifteen small jobs, once.
    """
    for name, (state, log) in inputs.items():
        if not log.changed or log.reset:
            continue
        search = _Search(core, view, inputs, name)
        if not search.fails(F.lit(False)) and search.fails(F.lit(True)):
            cell = search.halve(F.col(VNODE), core.vnode_count, F.lit(True))
            digest = F.pmod(F.xxhash64(*[F.col(quoted(k)) for k in state.schema.key]), F.lit(HASH_CELLS))
            cell = search.halve(digest, HASH_CELLS, cell)
            rows = core.reader(state.schema).scan(log.log).where(cell)
            keys = (
                rows.select(*[F.col(quoted(k)).cast("string") for k in state.schema.key]).distinct().limit(2).collect()
            )
            if len(keys) == 1:
                pairs = zip(state.schema.key, keys[0], strict=True)
                return ", ".join(f"{name}.{key} = {value}" for key, value in pairs)
    return None


class _Search:
    """Refreshes with a part of one input's change log, to nowhere."""

    def __init__(self, core: Any, view: ViewState, inputs: dict[str, tuple[TableState, InputLog]], name: str) -> None:
        self.core, self.view, self.inputs, self.name = core, view, as_created(view, inputs), name
        self.plan = ViewPlan.from_dict(view.job.spec["plan"])

    def fails(self, where: Column) -> bool:
        sources = _sources(self.core.reader, self.inputs)
        number = sorted(self.inputs).index(self.name)
        state, log = self.inputs[self.name]
        sources[self.name] = segment_source(self.core.reader(state.schema), number, state, log, where)
        current = segment_source(self.core.reader(self.view.schema), "current", self.view)
        try:
            with explained("VIEW_FAILED"):
                refresh(self.core.spark, self.plan, sources, current).write.format("noop").mode("append").save()
        except DefiniteError:
            return True
        return False

    def halve(self, value: Column, cells: int, within: Column) -> Column:
        """The one value of `value` (0 up to `cells`) within a condition with which the refresh fails."""
        low, high = 0, cells
        while high - low > 1:
            middle = (low + high) // 2
            if self.fails(within & (value >= low) & (value < middle)):
                high = middle
            else:
                low = middle
        return within & (value == low)


def _session(
    core: Any, plan: ViewPlan, view: ViewState, inputs: dict[str, tuple[TableState, InputLog]]
) -> SparkSession:
    """A quick one for small changes; adaptive execution for what may be large."""
    spark: SparkSession = core.spark
    changed = sum(s.rows for _, log in inputs.values() for s in log.log)
    if changed > QUICK_ROWS or plan.strategy is Strategy.FULL or any(log.reset for _, log in inputs.values()):
        return spark
    # What an aggregate gives is small; touched keys may be many more than the changes.
    partitions = 1 if plan.strategy is Strategy.ALGEBRAIC else max(2, core.slots // 2)
    there = sum(s.rows for state in (view, *(state for state, _ in inputs.values())) for s in state.segments)
    return quick_session(spark, partitions, interpreted=there <= INTERPRETED_ROWS)


def initial_segments(core: Any, view: ViewState, inputs: dict[str, tuple[TableState, InputLog]]) -> list[NewSegment]:
    """The rows of a new view over its inputs' present segments (`view_chunk.py`: of a part of them)."""
    plan = ViewPlan.from_dict(view.job.spec["plan"])
    with explained("VIEW_FAILED"):
        frame = initial(core.spark, plan, _sources(core.reader, as_created(view, inputs)))
        return write_view(core, view, frame, kind="base")


def write_view(core: Any, view: ViewState, frame: DataFrame, kind: str) -> list[NewSegment]:
    seq_base = core.sequence.take(1 << 39)
    return write_frame(
        frame,
        core.data_dir,
        view.job.id,
        view.schema,
        kind=kind,
        vnode_count=core.vnode_count,
        seq_base=seq_base,
    )
