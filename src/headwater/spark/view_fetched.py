"""Small refreshes whose plan Spark makes once and runs at every barrier: one job of one stage for many views.

To analyse, optimise and plan a refresh takes Spark longer than its few thousand rows. Here the plan has no files in it
(`fetch.py` reads them, and is told by each run which), nothing is sent anywhere, and each view is one task; so the same
plan, even the same RDDs, serve all epochs. A refresh that cannot be written that way is done as `view_job.py` says.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, Final
from weakref import WeakKeyDictionary

import sqlglot
from pyspark.sql import DataFrame, SparkSession
from sqlglot import exp

from headwater.model.schema import OP, Schema, quoted
from headwater.model.spark_text import SparkText
from headwater.runtime.tables import AnySegment, InputLog, TableState, ViewState
from headwater.spark.batches import map_batches
from headwater.spark.compaction import foldable
from headwater.spark.fetch import RUN, TOO_MANY, FetchRows, Files, Place, PreparedWriter, ReadChanges, ReadRows, Run
from headwater.spark.functions import registered
from headwater.spark.row_writer import RESULT, RowWriter, written_rows
from headwater.spark.view import Source, bound_name, refresh
from headwater.storage.checkpoint import NewSegment
from headwater.storage.files import segment_folder
from headwater.view.fetched import FetchedText, NotFetched
from headwater.view.plan import Strategy, ViewPlan
from headwater.view.relations import Fetch

Inputs = dict[str, tuple[TableState, InputLog]]
TOGETHER: Final = 16  # views in one job: its tasks each unpack the plan of all of them
# So few rows of an input are read whole: that costs less than to ask for some of them.
WHOLE_ROWS: Final = 10_000
# Changes that one task takes through a kept plan in the few seconds that an epoch should have (`epoch_size.py`); to
# plan again for as many takes several times as long. More are worth the work of many tasks.
MOST_CHANGES: Final = 200_000
MOST_FILES: Final = 500  # of a view and its inputs: every Python worker of a run is told of all
# What values may be compared by: types of which Spark and Arrow agree about what is equal.
_EXACT: Final = re.compile(
    r"TINYINT|SMALLINT|INT|BIGINT|STRING|DATE|BOOLEAN|TIMESTAMP|TIMESTAMP_NTZ|BINARY|DECIMAL\(\d+,\d+\)"
)
_PLANS: Final = 64  # that are kept; a view has few shapes, but which views share an epoch varies
_REFUSED_S: Final = 600.0  # how long such changes of a view are left alone of which too many rows had to be fetched
_STATUS_S: Final = 5.0  # until Spark's own listeners know of a job that has ended

_lock = threading.Lock()
_plans: WeakKeyDictionary[SparkSession, OrderedDict[Hashable, DataFrame]] = WeakKeyDictionary()
_refused: set[Hashable] = set()  # shapes
_too_many: dict[int, tuple[float, int]] = {}  # view -> until when, and from how many changes on
_suspects: set[Hashable] = set()  # shapes of which one had more than one stage; they run alone until it is known which


class TooManyRows(Exception):
    """A run that wanted more rows of a view's inputs than one task should fetch."""


@dataclass(frozen=True, slots=True)
class Work:
    """The refresh of one view; `inputs` with the columns that they had when the view was created."""

    view: ViewState
    plan: ViewPlan
    inputs: Inputs

    @property
    def changes(self) -> int:
        return sum(_rows(log.log) for _, log in self.inputs.values())

    @property
    def texts(self) -> dict[str, FetchedText]:
        found = {
            name: _text(bound_name(i), state, log.changed)
            for i, (name, (state, log)) in enumerate(sorted(self.inputs.items()))
        }
        return {**found, "": _text(bound_name("current"), self.view, False)}

    @property
    def shape(self) -> Hashable:
        return (self.view.job.id, self.plan, self.view.schema, tuple(sorted(self.texts.items())))


def _text(name: str, state: TableState, changed: bool) -> FetchedText:
    return FetchedText(name, state.schema, changed, _rows(state.segments) <= WHOLE_ROWS)


def _rows(segments: Sequence[AnySegment]) -> int:
    return sum(s.rows for s in segments)


# -- which


def may_fetch(spark: SparkSession, work: Work) -> bool:
    """Whether a refresh may be done this way, as far as can be told before it is written."""
    until, changes = _too_many.get(work.view.job.id, (0.0, 0))
    if time.monotonic() < until and 2 * work.changes >= changes:
        return False
    if work.shape in _refused or getattr(spark, "_sc", None) is None:
        return False
    if work.plan.strategy is Strategy.FULL or not _functions(work.plan.sql).isdisjoint(registered(spark)):
        return False  # a function may be replaced, and the plan would not know
    logs = [log for _, log in work.inputs.values()]
    if any(log.reset for log in logs) or work.changes > MOST_CHANGES:
        return False
    lists = [work.view.segments, *(s for state, log in work.inputs.values() for s in (state.segments, log.seen))]
    if sum(map(len, lists)) > MOST_FILES:
        return False
    return all(foldable(state.schema) for state in (work.view, *(state for state, _ in work.inputs.values())))


@lru_cache(maxsize=256)
def _functions(sql: str) -> frozenset[str]:
    """The functions of a query that are not Spark's own, as far as the parser can tell."""
    return frozenset(node.name.lower() for node in sqlglot.parse_one(sql, read=SparkText).find_all(exp.Anonymous))


# -- the plan


def prepared(core: Any, spark: SparkSession, works: Sequence[Work]) -> tuple[DataFrame | None, list[Work]]:
    """The plan of those views that have one, and which these are."""
    key = _key(core, works)
    with _lock:
        plans = _plans.setdefault(spark, OrderedDict())
        if key in plans:
            plans.move_to_end(key)
            return plans[key], list(works)
    frames, planned = [], []
    for work in works:
        try:
            frames.append(_written(core, spark, work))
            planned.append(work)
        except NotFetched:
            _refused.add(work.shape)
    return (reduce(DataFrame.union, frames) if frames else None), planned


def _written(core: Any, spark: SparkSession, work: Work) -> DataFrame:
    texts = work.texts
    sources = {name: _source(core, spark, work, text) for name, text in texts.items()}
    current = sources.pop("")
    changes = refresh(spark, work.plan, sources, current, one_task=True)
    writer = RowWriter(core.data_dir, work.view.job.id, work.view.schema, core.vnode_count, 0, "")
    return map_batches(changes, PreparedWriter(writer), RESULT)


def _source(core: Any, spark: SparkSession, work: Work, text: FetchedText) -> Source:
    view = work.view.job.id
    place = Place(f"{view}/{text.name}", view, core.data_dir, text.schema, core.vnode_count)

    def asked(name: str) -> Callable[[], DataFrame] | None:
        found = text.asked(name)
        if found is None:
            return None
        part, columns = found
        wanted = tuple(columns)
        if part in ("changes", "both"):
            read = ReadChanges(place, wanted, part == "both")
            return lambda: leaf(read, [*_typed(text.schema, wanted), (OP, "TINYINT")])
        return lambda: leaf(ReadRows(place, part, wanted), _typed(text.schema, wanted))

    def leaf(read: Any, columns: Sequence[tuple[str, str]]) -> DataFrame:
        return spark.range(0, 1, numPartitions=1).mapInArrow(read, _ddl(columns))

    def fetch(wanted: Fetch, values: DataFrame) -> DataFrame:
        kinds = ["".join(text.schema[name].type.upper().split()) for name in wanted.match]
        found = [field.dataType.simpleString().upper() for field in values.schema.fields]
        if found != kinds or not all(_EXACT.fullmatch(kind) for kind in kinds):
            raise NotFetched(f"{text.name} by {found}")
        values = values.toDF(*[f"v{i}" for i in range(len(kinds))]).coalesce(1)
        rows = FetchRows(place, wanted.version, wanted.columns, wanted.match)
        return values.mapInArrow(rows, _ddl(_typed(text.schema, wanted.columns)))

    return Source(text, {}, asked, fetch)


def _typed(schema: Schema, columns: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, schema[name].type) for name in columns]


def _ddl(columns: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{quoted(name)} {kind}" for name, kind in columns)


# -- the run


def run(core: Any, spark: SparkSession, frame: DataFrame, works: Sequence[Work]) -> dict[int, list[NewSegment]]:
    """Run a plan of these views over their files of this epoch; segments by view. TooManyRows: not this way."""
    this, writers = Run.empty(), []
    for work in works:
        texts, view = work.texts, work.view.job.id
        seq_base, folder = core.sequence.take(1 << 39), segment_folder(view)
        this.writers[str(view)] = (seq_base, folder)
        writers.append(RowWriter(core.data_dir, view, work.view.schema, core.vnode_count, seq_base, folder))
        this.add(f"{view}/{texts[''].name}", "after", _files(work.view.segments))
        for name, (state, log) in work.inputs.items():
            place = f"{view}/{texts[name].name}"
            this.add(place, "after", _files(state.segments))
            this.add(place, "before", _files(log.seen))
            this.add(place, "log", _files(log.log))
    context = spark.sparkContext
    known = set(_jobs(context))
    context.setLocalProperty(RUN, this.text())
    try:
        found = written_rows(frame, writers)
    except Exception as error:
        if TOO_MANY not in str(error):
            raise
        for work in works:
            if f"{TOO_MANY} {work.view.job.id};" in str(error):
                _too_many[work.view.job.id] = (time.monotonic() + _REFUSED_S, work.changes)
        raise TooManyRows from None
    finally:
        context.setLocalProperty(RUN, None)  # type: ignore[arg-type, unused-ignore]
    _keep(spark, frame, _key(core, works), [work.shape for work in works], known)
    return found


def _files(segments: Sequence[AnySegment]) -> Files:
    paths = [(s.kind == "base", s.path) for s in segments]
    return Files(tuple(sorted(p for base, p in paths if base)), tuple(sorted(p for base, p in paths if not base)))


def _key(core: Any, works: Sequence[Work]) -> Hashable:
    """What a plan is of; a session may outlive the data directory that a plan was made for."""
    return (core.data_dir, core.vnode_count, *(work.shape for work in works))


def _keep(spark: SparkSession, frame: DataFrame, key: Hashable, shapes: Sequence[Hashable], known: set[int]) -> None:
    """A plan that was one job of one stage can be run again; of others Spark keeps what it shuffled or broadcast."""
    with _lock:
        plans = _plans.setdefault(spark, OrderedDict())
        if key in plans:
            return
    one_stage = _was_one_stage(spark.sparkContext, known)
    with _lock:
        if one_stage:
            _suspects.difference_update(shapes)
            plans[key] = frame
            while len(plans) > _PLANS:
                plans.popitem(last=False)
        elif len(shapes) == 1:
            _refused.add(shapes[0])
            _suspects.discard(shapes[0])
        else:
            _suspects.update(shapes)


def forget(view_ids: Collection[int]) -> None:
    """Of views that are gone: their plans, alone or with others, and what was learnt about them."""

    def is_gone(shape: Hashable) -> bool:
        return isinstance(shape, tuple) and shape[0] in view_ids

    with _lock:
        for plans in _plans.values():
            for key in [k for k in plans if isinstance(k, tuple) and any(map(is_gone, k[2:]))]:
                del plans[key]
        for shapes in (_refused, _suspects):
            shapes.difference_update([shape for shape in shapes if is_gone(shape)])
        for view_id in view_ids:
            _too_many.pop(view_id, None)


def is_suspect(work: Work) -> bool:
    """Whether a refresh had better not share its job: its plan may be one that cannot be run twice."""
    return work.shape in _suspects


def _was_one_stage(context: Any, known: set[int]) -> bool:
    end = time.monotonic() + _STATUS_S
    while time.monotonic() < end:
        jobs = [context.statusTracker().getJobInfo(job) for job in set(_jobs(context)) - known]
        if jobs and all(job is not None and job.status == "SUCCEEDED" for job in jobs):
            return len(jobs) == 1 and len(jobs[0].stageIds) == 1
        time.sleep(0.01)
    return False


def _jobs(context: Any) -> Sequence[int]:
    found: Sequence[int] = context.statusTracker().getJobIdsForGroup(context.getLocalProperty("spark.jobGroup.id"))
    return found
