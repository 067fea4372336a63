"""Materialized views on Spark: binds a view's inputs and runs the one statement that `view/refresh.py` writes.

The text of a refresh depends only on the view and on the shape of its inputs (which of them changed, which have
deltas), so it is written once per shape and kept; a refresh binds the scans and has Spark analyse the text once.
Everything returned is lazy: the caller writes it, so the job belongs to the caller's stage. Names are unique, so that
several views may be refreshed at the same time in one session. A scan that another refresh will ask for again (a base
stays for many epochs, and all views of an input read the same files) is bound once and stays; nothing else does.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from headwater.errors import UsageError
from headwater.model.schema import OP, OP_UPSERT, VIEW_KEY, Column, Schema, quoted
from headwater.model.types import arrow_type
from headwater.view.analyse import analysis
from headwater.view.inputs import FrameText, InputText
from headwater.view.plan import ViewPlan
from headwater.view.refresh import Refresh
from headwater.view.relations import Fetch, Sql, Types

__all__ = ["Source", "ViewInput", "initial", "output_schema", "refresh", "storage_schema"]

_PREFIX: Final = "hw_bound_"  # of names in a text, replaced by those of temporary views
_NAME: Final = re.compile(rf"\b{_PREFIX}\w+")
_TEXTS: Final = 512  # texts that are kept; a view has few shapes
_SCANS: Final = 1024  # scans that stay bound, the last used ones
_numbers = count()
_texts: OrderedDict[Hashable, tuple[str, Mapping[str, Fetch]]] = OrderedDict()
_lock = threading.Lock()
_lasting: WeakKeyDictionary[SparkSession, OrderedDict[Hashable, str]] = WeakKeyDictionary()
Frames = Mapping[str, Callable[[], DataFrame]]


class ViewInput(Protocol):
    """One input of a view over an epoch range (E1, E2]; every DataFrame has all columns of `schema`, hidden ones too.

    before()            the rows at E1
    after()             the rows at E2
    changes()           one row per key touched in between, and `_op`; a delete has only its key filled
    changes_with_old()  rows with `_op` 1 (new) and 2 (old, complete); an update is both
    changed             False promises that there are no changes: then only after() is called
    """

    @property
    def schema(self) -> Schema: ...
    @property
    def changed(self) -> bool: ...
    def before(self) -> DataFrame: ...
    def after(self) -> DataFrame: ...
    def changes(self) -> DataFrame: ...
    def changes_with_old(self) -> DataFrame: ...


@dataclass(frozen=True, slots=True)
class Lasting:
    """A frame that will be asked for again; equal keys give equal frames."""

    key: Hashable
    make: Callable[[], DataFrame]

    def __call__(self) -> DataFrame:
        return self.make()


@dataclass(frozen=True, slots=True)
class Source:
    """An input as text, and what its names are bound to; a frame is only made if the text reads it.

    `asked` gives the frames of names that are made up while the text is written, None for the names of others; `fetch`
    those of rows that values pick out.
    """

    text: InputText
    frames: Frames
    asked: Callable[[str], Callable[[], DataFrame] | None] = lambda _: None
    fetch: Callable[[Fetch, DataFrame], DataFrame] | None = None


def source_of(name: str, found: ViewInput) -> Source:
    """An input whose versions are DataFrames."""
    text = FrameText(name, found.schema, found.changed)
    frames = {f"{name}_{part}": getattr(found, part) for part in ("before", "after", "changes", "changes_with_old")}
    return Source(text, frames)


def bound_name(number: int | str) -> str:
    """The name of a view's n-th input in its text."""
    return f"{_PREFIX}{number}"


# -- schemas


def output_schema(spark: SparkSession, plan: ViewPlan, inputs: Mapping[str, Schema]) -> list[Column]:
    """The visible columns of a view with their types, as Spark derives them; UsageError if Spark refuses the query."""
    sources = {name: _empty_source(spark, bound_name(i), schema) for i, (name, schema) in enumerate(inputs.items())}
    try:
        with _bound(spark, sources.values()) as run:
            sql = Sql(run.types)
            texts = {name: source.text for name, source in sources.items()}
            rel = Refresh(sql, plan, analysis(plan.sql, inputs), texts).query()
            fields = run(sql.text(rel)).schema.fields
    except (AnalysisException, ParseException) as error:
        detail = next((line for line in str(error).splitlines() if line.strip()), "")
        raise UsageError("VIEW_NOT_UNDERSTOOD", "Spark refuses the query", detail=detail) from None
    for found in fields:
        if isinstance(found.dataType, T.NullType):
            raise UsageError(
                "VIEW_COLUMN_UNTYPED",
                f"the column {found.name} is NULL without a type",
                hint=f"write CAST(NULL AS STRING) AS {found.name}",
            )
    columns = [Column(found.name, _ddl(found.dataType)) for found in fields]
    for column in columns:
        _refuse_type(column)
    return columns


def _refuse_type(column: Column) -> None:
    try:
        arrow_type(column.type)
    except ValueError:
        raise UsageError(
            "VIEW_COLUMN_TYPE",
            f"the column {column.name} is of the type {column.type}, which a view cannot store",
            hint=f"write CAST(… AS STRING) AS {column.name}",
        ) from None


def storage_schema(spark: SparkSession, plan: ViewPlan, inputs: Mapping[str, Schema]) -> Schema:
    """The schema of the table that stores a view."""
    hidden = [Column(name, ddl, hidden=True) for name, ddl in plan.hidden]
    key = Column(VIEW_KEY, "STRING", nullable=False, hidden=True)
    return Schema((*output_schema(spark, plan, inputs), key, *hidden), (VIEW_KEY,))


def _empty_source(spark: SparkSession, name: str, schema: Schema) -> Source:
    ddl = ", ".join(f"{quoted(c.name)} {c.type}" for c in schema.columns)
    return Source(FrameText(name, schema, False), {f"{name}_after": lambda: spark.createDataFrame([], ddl)})


def _ddl(kind: T.DataType) -> str:
    nested = isinstance(kind, (T.StructType, T.ArrayType, T.MapType))
    return _nested(kind) if nested else str(kind.simpleString()).upper()


def _nested(kind: T.DataType) -> str:
    """As `simpleString`, with fields in quotes whose names are no plain words: Spark reads it again."""
    match kind:
        case T.ArrayType():
            return f"array<{_nested(kind.elementType)}>"
        case T.MapType():
            return f"map<{_nested(kind.keyType)},{_nested(kind.valueType)}>"
        case T.StructType():
            names = [f.name if f.name.isidentifier() else quoted(f.name) for f in kind.fields]
            return f"struct<{','.join(f'{n}:{_nested(f.dataType)}' for n, f in zip(names, kind.fields, strict=True))}>"
    return str(kind.simpleString())


# -- rows and changes


def initial(spark: SparkSession, plan: ViewPlan, inputs: Mapping[str, ViewInput | Source]) -> DataFrame:
    """All rows of a view over its inputs' rows after the epoch: visible columns, `_key`, hidden columns."""
    sources = _sources(inputs)
    return _run(spark, plan, sources, None, broadcast=True)


def refresh(
    spark: SparkSession,
    plan: ViewPlan,
    inputs: Mapping[str, ViewInput | Source],
    current: DataFrame | Source,
    *,
    broadcast: bool = True,
    one_task: bool = False,
    finish: Callable[[str], str] | None = None,
) -> DataFrame:
    """The change of a view whose stored rows are `current`; at least one input has changed if there is a `finish`.

    `broadcast` says that the changes are small enough to be sent to every task (some 100,000 rows), `one_task` that all
    there is to read is best read by one, without any shuffle. `finish` puts the statement into another one, so that
    Spark analyses both at once.
    """
    sources = _sources(inputs)
    if isinstance(current, DataFrame):
        current = _stored(plan, current)
    if not any(sources[name].text.changed for name in plan.inputs):
        names = [F.col(quoted(c)) for c in (*plan.columns, VIEW_KEY, *(name for name, _ in plan.hidden))]
        rows = next(iter(current.frames.values()))()
        return rows.select(*names, F.lit(OP_UPSERT).cast("tinyint").alias(OP)).limit(0)
    return _run(spark, plan, sources, current, broadcast=broadcast, one_task=one_task, finish=finish)


def _sources(inputs: Mapping[str, ViewInput | Source]) -> dict[str, Source]:
    return {
        name: found if isinstance(found, Source) else source_of(bound_name(i), found)
        for i, (name, found) in enumerate(sorted(inputs.items()))
    }


def _stored(plan: ViewPlan, current: DataFrame) -> Source:
    name = bound_name("current")
    columns = tuple(Column(f.name, f.dataType.simpleString()) for f in current.schema.fields)
    return Source(FrameText(name, Schema(columns, (VIEW_KEY,)), False), {f"{name}_after": lambda: current})


def _run(
    spark: SparkSession,
    plan: ViewPlan,
    sources: Mapping[str, Source],
    current: Source | None,
    *,
    broadcast: bool,
    one_task: bool = False,
    finish: Callable[[str], str] | None = None,
) -> DataFrame:
    shapes = tuple((name, sources[name].text.shape) for name in plan.inputs)
    key = (plan, shapes, None if current is None else current.text.shape, broadcast, one_task)
    bound = [sources[name] for name in plan.inputs] + ([] if current is None else [current])
    with _bound(spark, bound, one_task=one_task) as run:
        with _lock:
            known = _texts.get(key)
        if known is None:
            sql = Sql(run.types, broadcast=broadcast, one_task=one_task)
            run.fetches = sql.fetches
            known = _write(sql, plan, sources, current), sql.fetches
            with _lock:
                _texts[key] = known
                while len(_texts) > _TEXTS:
                    _texts.popitem(last=False)
        text, run.fetches = known
        return run(finish(text) if finish else text)


def _write(sql: Sql, plan: ViewPlan, sources: Mapping[str, Source], current: Source | None) -> str:
    found = analysis(plan.sql, {name: sources[name].text.schema for name in sources})
    work = Refresh(sql, plan, found, {name: source.text for name, source in sources.items()})
    return sql.text(work.initial() if current is None else work.changes(current.text))


# -- binding


@dataclass(slots=True)
class _Binding:
    """Runs texts over sources; binds what a text names, once."""

    spark: SparkSession
    sources: Sequence[Source]
    one_task: bool
    fetches: Mapping[str, Fetch] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)

    def __call__(self, text: str) -> DataFrame:
        return self.spark.sql(_NAME.sub(lambda match: self._bound(match[0]), text))

    def types(self, text: str) -> Types:
        return {f.name: f.dataType.simpleString() for f in self(text).schema.fields}

    def _bound(self, name: str) -> str:
        if name not in self.names:
            frame = self._frame(name)
            if isinstance(frame, Lasting):
                self.names[name] = _bind_lasting(self.spark, frame, self.one_task)
            else:
                fetched = any(source.fetch is not None for source in self.sources)  # by one task as it is
                self.names[name] = _bind(frame, self.one_task and not fetched)
                self.own.append(self.names[name])
        return self.names[name]

    def _frame(self, name: str) -> Callable[[], DataFrame]:
        if name in self.fetches:
            return lambda: self._fetched(self.fetches[name])
        for source in self.sources:
            found = source.frames.get(name) or source.asked(name)
            if found is not None:
                return found
        raise KeyError(name)

    def _fetched(self, fetch: Fetch) -> DataFrame:
        of = next(s for s in self.sources if s.fetch is not None and s.text.name == fetch.input)
        assert of.fetch is not None
        return of.fetch(fetch, self(fetch.values))


def _bind(make: Callable[[], DataFrame], one_task: bool) -> str:
    name = f"hw_view_{next(_numbers)}"
    frame = make().coalesce(1) if one_task else make()
    frame.createOrReplaceTempView(name)
    return name


def _bind_lasting(spark: SparkSession, frame: Lasting, one_task: bool) -> str:
    key = (frame.key, one_task)
    with _lock:
        scans = _lasting.setdefault(spark, OrderedDict())
        if key in scans:
            scans.move_to_end(key)
            return scans[key]
    name = _bind(frame, one_task)
    with _lock:
        other = scans.setdefault(key, name)  # somebody else may have been faster
        unused = [name] if other != name else []
        while len(scans) > _SCANS:
            unused.append(scans.popitem(last=False)[1])
    for gone in unused:
        spark.catalog.dropTempView(gone)
    return other


@contextmanager
def _bound(spark: SparkSession, sources: Any, *, one_task: bool = False) -> Iterator[_Binding]:
    binding = _Binding(spark, list(sources), one_task)
    try:
        yield binding
    finally:
        for name in binding.own:
            spark.catalog.dropTempView(name)
