"""What the tasks of the data source do, in Arrow alone: the rows of a table, or its changes, in a range of vnodes.

Segments are sorted by (`_vnode`, key), so that a task reads only the row groups of its own range (of format v1: all of
them), and a key is never in two ranges. `source.py` plans; it decides which segments are visible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headwater.model.epoch import EPOCH_ZERO_UNIX_MS, PHYSICAL_SHIFT
from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, SEQ, VNODE, Schema
from headwater.storage.files import DataDir
from headwater.storage.segments import arrow_schema, newest_per_key, with_vnode

EPOCH: Final = "_hw_epoch"
CHANGE_COLUMNS: Final = "`_change_type` STRING, `_commit_version` BIGINT, `_commit_timestamp` TIMESTAMP"


@dataclass(frozen=True, slots=True)
class File:
    """A segment as a task needs it."""

    path: str
    base: bool
    epoch: int


@dataclass(frozen=True, slots=True)
class Slice:
    """A table's vnodes [low, high); everything below reads nothing else."""

    data_dir: DataDir
    schema: Schema
    low: int
    high: int
    vnode_count: int

    def snapshot(self, files: Sequence[File]) -> Iterator[pa.Table]:
        """All columns, hidden ones included: base rows that no delta touches, and the newest delta row per key."""
        deltas = [self._whole(f) for f in files if not f.base]
        net = newest_per_key(pa.concat_tables(deltas), self.schema.key) if deltas else None
        for file in files:
            if file.base:
                for rows in self._groups(file):
                    yield self._columns(rows if net is None else without_keys(rows, net, self.schema.key))
        if net is not None:
            yield self._columns(net.filter(pc.equal(net.column(OP), OP_UPSERT)))

    def changes(self, files: Sequence[File], before: Sequence[File], after: int) -> pa.Table | None:
        """The named changes of these files' epochs; `before` is what was visible at epoch `after`."""
        parts = [self._ranked(f) for f in files]
        rows = pa.concat_tables(parts) if parts else None
        if rows is None or rows.num_rows == 0:
            return None
        net = newest_per_key(rows, [*self.schema.key, EPOCH])
        known = [with_keys(t, net, self.schema.key) for t in self.snapshot(before)]
        tagged = [_tag(t, after, OP_UPSERT) for t in known if t.num_rows]
        return self._named(pa.concat_tables([self._tagged_columns(t) for t in [net, *tagged]]), after)

    def replaced(self, before: Sequence[File], now: Sequence[File], epoch: int) -> pa.Table | None:
        """The named changes of an epoch that replaced the whole table."""
        old = pa.concat_tables([self._empty(), *self.snapshot(before)])
        new = pa.concat_tables([self._empty(), *self.snapshot(now)])
        gone = without_keys(old, new, self.schema.key)
        rows = [_tag(old, epoch - 1, OP_UPSERT), _tag(new, epoch, OP_UPSERT), _tag(gone, epoch, OP_DELETE)]
        return self._named(pa.concat_tables([self._tagged_columns(t) for t in rows]), epoch - 1)

    def inserted(self, files: Sequence[File], epoch: int) -> Iterator[pa.Table]:
        """A snapshot as inserts of one epoch: what a stream begins with."""
        for rows in self.snapshot(files):
            if rows.num_rows:
                yield self._finished(_tag(rows, epoch, OP_UPSERT), "insert")

    # -- reading ----------------------------------------------------------------------------------------------------

    def _groups(self, file: File) -> Iterator[pa.Table]:
        wanted = arrow_schema(self.schema)
        fs, target = self.data_dir.path(file.path)
        with fs.open_input_file(target) as source:
            parquet = pq.ParquetFile(source)
            present = set(parquet.schema_arrow.names)
            columns = [n for n in wanted.names if n in present]
            for i in _overlapping(parquet, self.low, self.high):
                rows = parquet.read_row_group(i, columns=columns)
                if VNODE not in present:
                    rows = with_vnode(rows, self.schema, self.vnode_count)
                for at, field in enumerate(wanted):
                    if field.name not in rows.column_names:  # a column that came later
                        rows = rows.add_column(at, field, pa.nulls(rows.num_rows, field.type))
                rows = rows.select(wanted.names).cast(wanted)
                vnode = rows.column(VNODE)
                yield rows.filter(pc.and_(pc.greater_equal(vnode, self.low), pc.less(vnode, self.high)))

    def _whole(self, file: File) -> pa.Table:
        return pa.concat_tables([arrow_schema(self.schema).empty_table(), *self._groups(file)])

    def _ranked(self, file: File) -> pa.Table:
        """A change segment with its epoch; a base row (a hand-over) is older than every delta of its epoch."""
        rows = self._whole(file)
        if file.base:
            oldest = pa.array(np.full(rows.num_rows, -1, np.int64))
            rows = rows.set_column(rows.schema.get_field_index(SEQ), SEQ, oldest)
            upserts = pa.array(np.full(rows.num_rows, OP_UPSERT, np.int8))
            rows = rows.set_column(rows.schema.get_field_index(OP), OP, upserts)
        return rows.append_column(EPOCH, pa.array(np.full(rows.num_rows, file.epoch, np.int64)))

    def _empty(self) -> pa.Table:
        return self._columns(arrow_schema(self.schema).empty_table())

    def _columns(self, rows: pa.Table) -> pa.Table:
        return rows.select(list(self.schema.names))

    def _tagged_columns(self, rows: pa.Table) -> pa.Table:
        return rows.select([*self.schema.names, OP, EPOCH])

    # -- naming -----------------------------------------------------------------------------------------------------

    def _named(self, rows: pa.Table, after: int) -> pa.Table:
        """Each change beside the key's row before it; the twin of `spark/changes.py`, in Arrow."""
        rows = rows.combine_chunks().sort_by([(n, "ascending") for n in (*self.schema.key, EPOCH)])
        count = rows.num_rows
        current = np.arange(count)
        follows = np.zeros(count, bool)
        follows[1:] = _adjacent_equal(rows, self.schema.key)
        live = np.asarray(rows.column(OP).to_numpy()) == OP_UPSERT
        was = follows & np.roll(live, 1)
        fresh = np.asarray(rows.column(EPOCH).to_numpy()) > after
        same = np.zeros(count, bool)
        others = [n for n in self.schema.names if n not in self.schema.key]
        same[1:] = _adjacent_equal(rows, others)
        update = fresh & was & live & ~same
        kinds = [
            ("update_preimage", current[update] - 1, current[update]),
            ("update_postimage", current[update], current[update]),
            ("insert", current[fresh & ~was & live], current[fresh & ~was & live]),
            ("delete", current[fresh & was & ~live] - 1, current[fresh & was & ~live]),
        ]
        parts = []
        for name, images, changes in kinds:
            image = rows.take(pa.array(images))
            epochs = rows.column(EPOCH).take(pa.array(changes))
            at = image.schema.get_field_index(EPOCH)
            parts.append(self._finished(image.set_column(at, EPOCH, epochs), name))
        return pa.concat_tables(parts)

    def _finished(self, rows: pa.Table, change_type: str) -> pa.Table:
        epochs = rows.column(EPOCH)
        millis = np.asarray(epochs.to_numpy(), np.int64) >> PHYSICAL_SHIFT
        moments = pa.array((millis + EPOCH_ZERO_UNIX_MS) * 1000, pa.timestamp("us", tz="UTC"))
        visible = rows.select([c.name for c in self.schema.visible])
        visible = visible.append_column("_change_type", pa.array([change_type] * rows.num_rows, pa.string()))
        return visible.append_column("_commit_version", epochs).append_column("_commit_timestamp", moments)


def _overlapping(parquet: pq.ParquetFile, low: int, high: int) -> Iterator[int]:
    """The row groups that may hold vnodes of [low, high), by their statistics."""
    meta = parquet.metadata
    column = meta.schema.to_arrow_schema().get_field_index(VNODE)
    leaf = next((i for i in range(meta.num_columns) if meta.schema.column(i).path == VNODE), None)
    for i in range(meta.num_row_groups):
        statistics = meta.row_group(i).column(leaf).statistics if leaf is not None and column >= 0 else None
        if statistics is None or not statistics.has_min_max or (statistics.max >= low and statistics.min < high):
            yield i


def _tag(rows: pa.Table, epoch: int, op: int) -> pa.Table:
    rows = rows.append_column(OP, pa.array(np.full(rows.num_rows, op, np.int8)))
    return rows.append_column(EPOCH, pa.array(np.full(rows.num_rows, epoch, np.int64)))


def without_keys(rows: pa.Table, keys: pa.Table, key: Sequence[str]) -> pa.Table:
    """The rows whose key is not among the keys."""
    return _by_key(rows, keys, key, "left anti")


def with_keys(rows: pa.Table, keys: pa.Table, key: Sequence[str]) -> pa.Table:
    """The rows whose key is among the keys."""
    return _by_key(rows, keys, key, "left semi")


def _by_key(rows: pa.Table, keys: pa.Table, key: Sequence[str], how: str) -> pa.Table:
    # Only keys and positions are joined: Arrow's join cannot carry arrays and structs along.
    left = rows.select(list(key)).append_column("_hw_at", pa.array(np.arange(rows.num_rows)))
    joined = left.join(keys.select(list(key)), keys=list(key), join_type=how)
    return rows.take(joined.column("_hw_at").combine_chunks().sort())


def _adjacent_equal(rows: pa.Table, names: Sequence[str]) -> Any:
    """For each row but the first, whether these columns equal the row's before it; NULL equals NULL, NaN equals NaN."""
    count = max(0, rows.num_rows - 1)
    result = np.ones(count, bool)
    for name in names:
        column = rows.column(name).combine_chunks()
        first, second = column.slice(0, count), column.slice(1)
        if pa.types.is_nested(column.type):
            pairs = zip(first.to_pylist(), second.to_pylist(), strict=True)
            result &= np.fromiter((a == b for a, b in pairs), bool, count)
            continue
        equal = pc.fill_null(pc.equal(first, second), False)
        equal = pc.or_(equal, pc.and_(first.is_null(), second.is_null()))
        if pa.types.is_floating(column.type):
            both = pc.and_(pc.is_nan(first), pc.is_nan(second))
            equal = pc.or_(equal, pc.fill_null(both, False))
        result &= np.asarray(equal.to_numpy(zero_copy_only=False), bool)
    return result
