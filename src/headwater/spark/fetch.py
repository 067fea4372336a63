"""What a prepared refresh reads, inside its task: the changes of an input, and the rows that some values pick out.

A plan that is run again and again must not have files in it. So its leaves are these functions, and which files they
read is told to each run beside the plan, as a property of the job (`Run`): a task that is tried again reads the same.

    ReadChanges  net changes of an input, with the old rows or without
    ReadRows     all rows of a small input
    FetchRows    the rows of an input whose columns have the values that come in; by an index beside the segments
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from headwater.model.key_hash import key_hashes
from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, SEQ, Schema
from headwater.model.vnode import canonical_text
from headwater.spark.lookup import lookup_rows
from headwater.spark.row_writer import RowWriter
from headwater.spark.segment_index import TooLarge, opened
from headwater.storage.files import DataDir
from headwater.storage.segments import arrow_schema, newest_per_key, read_segments

RUN: Final = "headwater.refresh"  # the property of a job that has its `Run`
BATCH_ROWS: Final = 8192  # of what goes back to Spark
MOST_FETCHED: Final = 200_000  # rows for one look-up: more of them are better read by Spark, by many tasks
TOO_MANY: Final = "HEADWATER_TOO_MANY_ROWS"  # in the text of the error that ends such a run


class TooMany(Exception):
    """More rows than one task should fetch."""

    def __init__(self, view: int) -> None:
        super().__init__(f"{TOO_MANY} {view};")


@dataclass(frozen=True, slots=True)
class Files:
    """The segments of an input as one version has them: base and deltas."""

    base: tuple[str, ...]
    delta: tuple[str, ...]


@dataclass(slots=True)
class Run:
    """What one run of a prepared plan reads and writes; lists of files that are the same are written once."""

    files: list[list[list[str]]]
    inputs: dict[str, dict[str, int]]  # input -> version -> number of its files
    writers: dict[str, tuple[int, str]]  # view -> first `_seq`, folder

    @classmethod
    def empty(cls) -> Run:
        return cls([], {}, {})

    def add(self, name: str, version: str, found: Files) -> None:
        lists = [list(found.base), list(found.delta)]
        if lists not in self.files:
            self.files.append(lists)
        self.inputs.setdefault(name, {})[version] = self.files.index(lists)

    def text(self) -> str:
        parts = {"files": self.files, "inputs": self.inputs, "writers": self.writers, "most_rows": MOST_FETCHED}
        return json.dumps(parts)


_last: tuple[str, Any] = ("", None)


def _run() -> dict[str, Any]:
    """The run that this task belongs to."""
    global _last
    context = TaskContext.get()
    assert context is not None, "outside of a task"
    text = context.getLocalProperty(RUN)
    assert text is not None, "a plan that was not prepared for this job"
    if _last[0] != text:
        _last = (text, json.loads(text))
    found: dict[str, Any] = _last[1]
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """An input of a view, as its tasks find it."""

    name: str
    view: int
    data_dir: DataDir
    schema: Schema
    vnode_count: int

    def files(self, version: str) -> Files:
        run = _run()
        base, delta = run["files"][run["inputs"][self.name][version]]
        return Files(tuple(base), tuple(delta))

    def read(self, files: Files, columns: Sequence[str]) -> pa.Table:
        """All rows of files with `_op` and `_seq`; those of a base are older than any delta."""
        names = [*columns, OP, SEQ]
        base = _whole(self.data_dir, self.schema, files.base, names)
        base = base.set_column(len(columns), OP, pa.array(np.full(base.num_rows, OP_UPSERT, np.int8)))
        base = base.set_column(len(columns) + 1, SEQ, pa.array(np.full(base.num_rows, -1, np.int64)))
        return pa.concat_tables([base, _whole(self.data_dir, self.schema, files.delta, names)])

    def lookup(self, files: Files, keys: pa.Table, columns: Sequence[str]) -> pa.Table:
        """The rows of these keys (without NULLs)."""
        wanted = list(dict.fromkeys([*columns, *self.schema.key]))
        paths = (*files.base, *files.delta)
        rows = lookup_rows(self.data_dir, self.schema, paths, keys, self.vnode_count, wanted)
        if len(self.schema.key) > 1:
            rows = rows.filter(among(rows, keys, self.schema.key))
        return rows.select(list(columns))


def _whole(data_dir: DataDir, schema: Schema, paths: Sequence[str], names: Sequence[str]) -> pa.Table:
    """All rows of segments. The worker holds small ones in memory: the next run asks for most of them again."""
    parts = []
    for path in paths:
        try:
            segment = opened(data_dir, schema, path)
            parts.append(segment.whole(names))
        except TooLarge:
            parts.append(read_segments(data_dir, schema, [path], names))
    empty = pa.schema([arrow_schema(schema).field(n) for n in names]).empty_table()
    return pa.concat_tables([empty, *parts])


def texts(rows: pa.Table, columns: Sequence[str]) -> pa.Array:
    """One text per row that only rows with the same values share; NULL is a value."""
    parts = []
    for name in columns:
        text = canonical_text(rows.column(name))
        if len(columns) > 1:
            size = pc.utf8_length(text).cast(pa.string())
            text = pc.fill_null(pc.binary_join_element_wise(size, text, ":"), "N")
        parts.append(text)
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, "")


def among(rows: pa.Table, values: pa.Table, columns: Sequence[str]) -> pa.Array:
    """Which rows have values (of these columns, in both) that are among the others'; NULL equals NULL."""
    if len(columns) == 1 and pa.types.is_integer(rows.column(columns[0]).type):
        return pc.is_in(rows.column(columns[0]), value_set=pc.unique(values.column(columns[0])))
    return pc.is_in(texts(rows, columns), value_set=pc.unique(texts(values, columns)))


def _live(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.equal(rows.column(OP), OP_UPSERT))


def _with_op(rows: pa.Table, columns: Sequence[str], op: int) -> pa.Table:
    return rows.select(list(columns)).append_column(OP, pa.array(np.full(rows.num_rows, op, np.int8)))


@dataclass(frozen=True, slots=True)
class ReadChanges:
    """The newest change per key of the log, with `_op`; with `old`: the new rows, and the rows as they were before."""

    place: Place
    columns: tuple[str, ...]
    old: bool

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield from self._rows().to_batches(BATCH_ROWS)

    def _rows(self) -> pa.Table:
        place, columns = self.place, self.columns
        wanted = list(dict.fromkeys([*columns, *place.schema.key]))
        net = newest_per_key(place.read(place.files("log"), wanted), place.schema.key)
        if not self.old:
            return net.select([*columns, OP])
        before = place.lookup(place.files("before"), net.select(list(place.schema.key)), columns)
        return pa.concat_tables([_with_op(before, columns, OP_DELETE), _with_op(_live(net), columns, OP_UPSERT)])


@dataclass(frozen=True, slots=True)
class ReadRows:
    """All rows of an input at a version."""

    place: Place
    version: str
    columns: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                wanted = list(dict.fromkeys([*self.columns, *self.place.schema.key]))
                rows = self.place.read(self.place.files(self.version), wanted)
                rows = _live(newest_per_key(rows, self.place.schema.key))
                yield from rows.select(list(self.columns)).to_batches(BATCH_ROWS)


@dataclass(frozen=True, slots=True)
class FetchRows:
    """Of the values that come in (one column for each of `match`) the rows of the input that have them."""

    place: Place
    version: str
    columns: tuple[str, ...]
    match: tuple[str, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = [batch for batch in batches if batch.num_rows]
        if not found:
            return
        types = arrow_schema(self.place.schema)
        table = pa.Table.from_batches(found).rename_columns(list(self.match))
        values = table.cast(pa.schema([types.field(name) for name in self.match]))
        files = self.place.files(self.version)
        rows = (
            self._by_key(files, values) if set(self.match) == set(self.place.schema.key) else self._any(files, values)
        )
        yield from rows.select(list(self.columns)).to_batches(BATCH_ROWS)

    def _by_key(self, files: Files, values: pa.Table) -> pa.Table:
        keys = values.drop_null()  # no row has such a key
        return self.place.lookup(files, keys.group_by(list(self.match)).aggregate([]), self.columns)

    def _any(self, files: Files, values: pa.Table) -> pa.Table:
        """Rows that have had the values are found by an index; what a delta says of their keys is what they are now."""
        key = self.place.schema.key
        wanted = list(dict.fromkeys([*self.columns, *self.match, *key]))
        base = self._found(files.base, self.match, values, wanted)
        once = self._found(files.delta, self.match, values, list(key))
        keys = pa.concat_tables([base.select(list(key)), once]).group_by(list(key)).aggregate([])
        newest = newest_per_key(self._found(files.delta, key, keys, [*wanted, OP, SEQ]), key)
        base = base.filter(pc.invert(among(base, newest, key)))
        rows = pa.concat_tables([base, _live(newest).select(wanted)])
        return rows.filter(among(rows, values, self.match))

    def _found(self, paths: Sequence[str], match: tuple[str, ...], values: pa.Table, wanted: list[str]) -> pa.Table:
        """The rows of segments that have one of the values, or that a hash cannot tell from those."""
        hashes = np.unique(key_hashes(values, match))
        place, parts, rows = self.place, [], 0
        for path in paths:
            try:
                segment = opened(place.data_dir, place.schema, path)
                places = segment.find(match, hashes)
                rows += len(places)
                if rows > _run()["most_rows"]:
                    raise TooMany(place.view)
                parts.append(segment.take(wanted, places))
            except TooLarge:
                parts.append(read_segments(place.data_dir, place.schema, [path], wanted))
        empty = pa.schema([arrow_schema(place.schema).field(n) for n in wanted]).empty_table()
        return pa.concat_tables([empty, *parts])


@dataclass(frozen=True, slots=True)
class PreparedWriter:
    """A `RowWriter` that learns from its run under which numbers and where it writes."""

    writer: RowWriter

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        seq_base, folder = _run()["writers"][str(self.writer.table_id)]
        yield from replace(self.writer, seq_base=seq_base, folder=folder)(batches)
