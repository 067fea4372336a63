"""Which key makes a view fail: found by halving one input again and again, to be named instead of the row.

    a part of one input ──► the step that failed, written to nowhere ──► fails, or does not

First by vnode, then by a hash of the key: some twenty small jobs, once. A failure that needs several rows (a sum that
overflows) has no such key, and none is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headwater.errors import DefiniteError
from headwater.model.schema import VNODE, Schema, quoted
from headwater.runtime.tables import TableState, ViewState
from headwater.spark.query import explained
from headwater.spark.view import Source, bound_name, initial, refresh
from headwater.spark.view_input import segment_source
from headwater.spark.view_job import Inputs, as_created
from headwater.view.inputs import FrameText
from headwater.view.plan import Strategy, ViewPlan

MIN_CELLS: Final = 64  # into which the keys of one vnode are divided
CELLS_PER_KEY: Final = 16  # so many more cells than keys that the last cell has seldom two


def failing_change(core: Any, view: ViewState, inputs: Inputs) -> str | None:
    """Which change of which input makes the refresh fail, as `table.key = value`; None if it is not one alone."""
    plan = ViewPlan.from_dict(view.job.spec["plan"])
    if plan.strategy is Strategy.FULL or any(log.reset for _, log in inputs.values()):
        return failing_row(core, view, inputs)  # such a refresh reads all rows, whatever changed
    inputs = as_created(view, inputs)
    for name, (state, log) in inputs.items():
        if not log.changed:
            continue

        def changed(where: Column, name: str = name) -> DataFrame:
            sources = {n: _source(core, inputs, n, where if n == name else None) for n in inputs}
            current = segment_source(core.reader(view.schema), "current", view)
            return refresh(core.spark, plan, sources, current)

        logged = core.reader(state.schema).scan(log.log)
        found = _Search(core.vnode_count, changed, logged.where, sum(s.rows for s in log.log)).key(name, state.schema)
        if found is not None:
            return found
    return None


def failing_row(
    core: Any, view: ViewState, inputs: Inputs, driving: str = "", chunk: Column | None = None
) -> str | None:
    """Which row of which input makes the snapshot fail; `chunk` is the part of the driving input that was read."""
    inputs, plan = as_created(view, inputs), ViewPlan.from_dict(view.job.spec["plan"])
    chunks = {driving: chunk} if chunk is not None else {}
    for name in sorted(inputs, key=lambda n: (n != driving, n)):
        state = inputs[name][0]

        def part(where: Column, name: str = name, state: TableState = state) -> DataFrame:
            inside = where if name not in chunks else where & chunks[name]
            found: DataFrame = core.reader(state.schema).snapshot(state.segments, inside)
            return found

        def rows(where: Column, name: str = name, part: Callable[[Column], DataFrame] = part) -> DataFrame:
            sources = {n: _source(core, inputs, n) for n in inputs}
            number = bound_name(sorted(inputs).index(name))
            text = FrameText(number, inputs[name][0].schema, False)
            sources[name] = Source(text, {f"{number}_after": lambda: part(where)})
            return initial(core.spark, plan, sources)

        found = _Search(core.vnode_count, rows, part, sum(s.rows for s in state.segments)).key(name, state.schema)
        if found is not None:
            return found
    return None


def _source(core: Any, inputs: Inputs, name: str, where: Column | None = None) -> Source:
    state, log = inputs[name]
    return segment_source(core.reader(state.schema), sorted(inputs).index(name), state, log, where)


@dataclass(frozen=True, slots=True)
class _Search:
    """`attempt` is the failed step with a part of one input, `part` that part itself, of about that many `rows`."""

    vnode_count: int
    attempt: Callable[[Column], DataFrame]
    part: Callable[[Column], DataFrame]
    rows: int

    def key(self, name: str, schema: Schema) -> str | None:
        if self.fails(F.lit(False)) or not self.fails(F.lit(True)):
            return None
        cell = self.halve(F.col(VNODE), self.vnode_count, F.lit(True))
        cells = max(MIN_CELLS, 1 << (CELLS_PER_KEY * self.rows // self.vnode_count).bit_length())
        digest = F.pmod(F.xxhash64(*[F.col(quoted(k)) for k in schema.key]), F.lit(cells))
        cell = self.halve(digest, cells, cell)
        if not self.fails(cell):
            return None  # it takes rows of several cells
        texts = [F.col(quoted(k)).cast("string") for k in schema.key]
        with explained("VIEW_FAILED"):
            keys = self.part(cell).select(*texts).distinct().limit(2).collect()
        if len(keys) != 1:
            return None
        return ", ".join(f"{name}.{key} = {value}" for key, value in zip(schema.key, keys[0], strict=True))

    def fails(self, where: Column) -> bool:
        try:
            with explained("VIEW_FAILED"):
                self.attempt(where).write.format("noop").mode("append").save()
        except DefiniteError:
            return True
        return False

    def halve(self, value: Column, cells: int, within: Column) -> Column:
        """The one value of `value` (0 up to `cells`) within a condition with which it fails, if there is one."""
        low, high = 0, cells
        while high - low > 1:
            middle = (low + high) // 2
            if self.fails(within & (value >= low) & (value < middle)):
                high = middle
            else:
                low = middle
        return within & (value == low)
