"""The Spark job of views' refresh or creation: the change of a view, written as segments of its storage table.

Small refreshes are done together: one job for several views (`TOGETHER`) that do not depend on each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headwater.model.schema import VNODE, Schema
from headwater.runtime.tables import ViewState
from headwater.spark import view_fetched
from headwater.spark.query import explained
from headwater.spark.row_writer import RowWriter, writable, write_rows
from headwater.spark.segment import segment_query, write_frame, write_sorted
from headwater.spark.session import quick_session
from headwater.spark.table import TableReader, has_wide_deltas
from headwater.spark.view import Source, bound_name, initial, refresh
from headwater.spark.view_input import segment_source
from headwater.spark.width import is_wide, may_grow
from headwater.storage.checkpoint import NewSegment
from headwater.storage.files import segment_folder
from headwater.view.inputs import FrameText
from headwater.view.plan import Strategy, ViewPlan

Inputs = view_fetched.Inputs
QUICK_ROWS: Final = 200_000  # changes that one task aggregates in well under a second
# So few rows are through before code for them would be compiled, or tasks for parts of them started.
TINY_ROWS: Final = 50_000
TOGETHER: Final = 4  # views in one job: Spark plans a job in one thread, and the plan of many grows faster than they do


def _sources(reader: Any, inputs: Inputs, vnodes: tuple[int, int] | None = None) -> dict[str, Source]:
    where = None if vnodes is None else (F.col(VNODE) >= vnodes[0]) & (F.col(VNODE) < vnodes[1])
    return {
        name: segment_source(reader(state.schema), i, state, log, where)
        for i, (name, (state, log)) in enumerate(sorted(inputs.items()))
    }


def as_created(view: ViewState, inputs: Inputs) -> Inputs:
    """The inputs with the columns that they had when the view was created: `SELECT *` means what it meant then."""
    columns = view.job.spec.get("input_columns", {})
    return {
        name: (replace(state, schema=state.schema.restricted(columns.get(name))), log)
        for name, (state, log) in inputs.items()
    }


def is_small(view: ViewState, inputs: Inputs) -> bool:
    """Whether a refresh is done in no time wherever it runs; what may be large wants adaptive execution."""
    changed = sum(s.rows for _, log in inputs.values() for s in log.log)
    whole = _plan(view).strategy is Strategy.FULL or any(log.reset for _, log in inputs.values())
    return changed <= QUICK_ROWS and not whole


def may_join(view: ViewState, inputs: Inputs) -> bool:
    """Whether a refresh may share its job with others."""
    return is_small(view, inputs) and writable(view.schema)


def refresh_together(core: Any, works: Sequence[tuple[ViewState, Inputs]]) -> dict[int, list[NewSegment]]:
    """One job for the small refreshes of views that do not read each other; segments by view."""
    found, others = _refresh_fetched(core, works)
    return {**found, **_refresh_planned(core, others)} if others else found


def _refresh_fetched(
    core: Any, works: Sequence[tuple[ViewState, Inputs]]
) -> tuple[dict[int, list[NewSegment]], list[tuple[ViewState, Inputs]]]:
    """The refreshes that are run by a prepared plan, and those that are not."""
    fetched = [work for work in (_work(*pair) for pair in works) if view_fetched.may_fetch(core.spark, work)]
    careful = any(may_be_wide(work.view, work.inputs) for work in fetched)
    spark = quick_session(core.spark, 1, interpreted=_is_tiny(works), careful=careful, one_task=True)
    done: dict[int, list[NewSegment]] = {}
    with explained("VIEW_FAILED"):
        frame, fetched = view_fetched.prepared(core, spark, fetched) if fetched else (None, [])
        if frame is not None:
            with contextlib.suppress(view_fetched.TooManyRows):
                done = view_fetched.run(core, spark, frame, fetched)
    return done, [(view, inputs) for view, inputs in works if view.job.id not in done]


def _work(view: ViewState, inputs: Inputs) -> view_fetched.Work:
    return view_fetched.Work(view, _plan(view), as_created(view, inputs))


def groups(core: Any, works: Sequence[tuple[ViewState, Inputs]]) -> list[list[tuple[ViewState, Inputs]]]:
    """The small refreshes of views that do not read each other, as they share jobs."""
    alone: list[tuple[ViewState, Inputs]] = []
    fetched: list[tuple[ViewState, Inputs]] = []
    planned: list[tuple[ViewState, Inputs]] = []
    for view, inputs in works:
        work = _work(view, inputs)
        may = view_fetched.may_fetch(core.spark, work)
        (planned if not may else alone if view_fetched.is_suspect(work) else fetched).append((view, inputs))
    return [
        list(found[i : i + most])
        for found, most in ((alone, 1), (fetched, view_fetched.TOGETHER), (planned, TOGETHER))
        for i in range(0, len(found), most)
    ]


def _refresh_planned(core: Any, works: Sequence[tuple[ViewState, Inputs]]) -> dict[int, list[NewSegment]]:
    tiny = _is_tiny(works)
    spark = _quick(core, works, tiny=tiny)
    frames = []
    with explained("VIEW_FAILED"):
        for view, inputs in works:
            seq_base, folder = core.sequence.take(1 << 39), segment_folder(view.job.id)
            writer = RowWriter(core.data_dir, view.job.id, view.schema, core.vnode_count, seq_base, folder)
            frames.append((_change(spark, core, view, inputs, one_task=tiny), writer))
        return write_rows(frames)


def refresh_segments(
    core: Any, view: ViewState, inputs: Inputs, vnodes: tuple[int, int] | None = None
) -> list[NewSegment]:
    """Run one refresh by itself; of a rowwise view also with the changes of some vnodes only."""
    works = [(view, inputs)]
    spark = _quick(core, works, tiny=_is_tiny(works)) if is_small(view, inputs) else core.spark
    finish = partial(
        segment_query, schema=view.schema, vnode_count=core.vnode_count, seq_base=core.sequence.take(1 << 39)
    )
    with explained("VIEW_FAILED"):
        frame = _change(spark, core, view, inputs, vnodes, finish=finish)
        return write_sorted(frame, core.data_dir, view.job.id, kind="delta")


def _change(
    spark: SparkSession,
    core: Any,
    view: ViewState,
    inputs: Inputs,
    vnodes: tuple[int, int] | None = None,
    *,
    one_task: bool = False,
    finish: Callable[[str], str] | None = None,
) -> DataFrame:
    def reader(schema: Schema) -> TableReader:
        return TableReader(spark, core.data_dir, schema, core.vnode_count)

    current = segment_source(reader(view.schema), "current", view)
    sources = _sources(reader, as_created(view, inputs), vnodes)
    return refresh(spark, _plan(view), sources, current, one_task=one_task, finish=finish)


def _plan(view: ViewState) -> ViewPlan:
    return ViewPlan.from_dict(view.job.spec["plan"])


def _is_tiny(works: Sequence[tuple[ViewState, Inputs]]) -> bool:
    states = [state for view, inputs in works for state in (view, *(state for state, _ in inputs.values()))]
    there = {state.job.id: sum(s.rows for s in state.segments) for state in states}
    return sum(there.values()) <= TINY_ROWS


def _quick(core: Any, works: Sequence[tuple[ViewState, Inputs]], *, tiny: bool) -> SparkSession:
    # What an aggregate gives is small; touched keys may be many more than the changes.
    aggregates = all(_plan(view).strategy is Strategy.ALGEBRAIC for view, _ in works)
    partitions = 1 if aggregates or tiny else max(2, core.slots // 2)
    careful = any(may_be_wide(view, inputs) for view, inputs in works)
    return quick_session(core.spark, partitions, interpreted=tiny, careful=careful)


def may_be_wide(view: ViewState, inputs: Inputs) -> bool:
    """Whether rows of a view's change may be."""
    read = [view.segments, *(s for state, log in inputs.values() for s in (state.segments, log.log))]
    return may_grow(_plan(view).sql) or any(is_wide(segments) for segments in read)


def initial_segments(core: Any, view: ViewState, inputs: Inputs, tasks: int | None = None) -> list[NewSegment]:
    """The rows of a new view over its inputs' present segments (`view_chunk.py`: of a part of them)."""
    with explained("VIEW_FAILED"):
        frame = initial(core.spark, _plan(view), _whole(core, as_created(view, inputs)))
        return write_view(core, view, inputs, frame, kind="base", tasks=tasks)


def _whole(core: Any, inputs: Inputs) -> dict[str, Source]:
    """The inputs as they are. Of wide rows the newest are found by their keys (`table.py`): they are never sorted."""
    sources = _sources(core.reader, inputs)
    for i, (name, (state, _)) in enumerate(sorted(inputs.items())):
        if has_wide_deltas(state.segments):
            rows = partial(core.reader(state.schema).snapshot, state.segments)
            sources[name] = Source(FrameText(bound_name(i), state.schema, False), {f"{bound_name(i)}_after": rows})
    return sources


def at_most(frame: DataFrame, tasks: int | None) -> DataFrame:
    """The frame, read by that many tasks at most."""
    return frame if tasks is None else frame.coalesce(tasks)


def write_view(
    core: Any, view: ViewState, inputs: Inputs, frame: DataFrame, kind: str, tasks: int | None = None
) -> list[NewSegment]:
    seq_base = core.sequence.take(1 << 39)
    return write_frame(
        at_most(frame, tasks),
        core.data_dir,
        view.job.id,
        view.schema,
        kind=kind,
        vnode_count=core.vnode_count,
        seq_base=seq_base,
        wide=may_be_wide(view, inputs),
    )
