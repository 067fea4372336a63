"""Segments: one Parquet file of rows of one table, written here by workers; `parquet.py` makes the file, or pyarrow.

    format v2   the table's columns (hidden ones included), `_vnode INT`, `_op TINYINT` (1 upsert, 2 delete),
                `_seq BIGINT`; sorted by (`_vnode`, key)
    format v1   the same without `_vnode`: a row's vnode is what its key says (`model/vnode.py`)

A row of a change-log segment is an entry of every log store that reads the table: `_seq` orders it, the epoch is the
segment's (`added_epoch`), and the checkpoint that committed it is the barrier behind it. v1 is read everywhere, without
the pruning that the column allows; only v2 is written, so compaction migrates. `spark/segment.py` writes v2 by Spark's
own writer, for bulk work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headwater.model.schema import OP, OP_UPSERT, SEQ, VNODE, Schema
from headwater.model.types import arrow_type
from headwater.model.vnode import vnodes
from headwater.storage.checkpoint import NewSegment, Segment
from headwater.storage.files import DataDir, segment_path
from headwater.storage.packing import is_small, packing, unpacked

ROW_GROUP_ROWS: Final = 65_536  # small enough that a key's row group is a cheap read, large enough for columns to pack
# Of wide rows fewer: whoever reads has a row group of a column in memory, and Spark's JVM has little of it.
ROW_GROUP_BYTES: Final = 32 << 20
PAGE_BYTES: Final = 1 << 20
PAGE_ROWS: Final = 1024  # how often Arrow's writer looks whether a page is full; `parquet.py` needs no such bound

ROWS_AT_A_TIME: Final = 1024
NEARLY_IN_ORDER: Final = 16  # rows for each that is out of order, from which on to put these in costs next to nothing
_WHOLE: Final = {32: pa.int32(), 64: pa.int64()}
KNOWN_SEGMENTS: Final = 100_000  # whose format is remembered, some 20 MB


def arrow_schema(schema: Schema) -> pa.Schema:
    """The Arrow schema of a segment of this table."""
    fields = [pa.field(c.name, arrow_type(c.type)) for c in schema.columns]
    extra = [pa.field(VNODE, pa.int32()), pa.field(OP, pa.int8()), pa.field(SEQ, pa.int64())]
    return pa.schema(fields + extra)


def write_segment(
    data_dir: DataDir,
    table_id: int,
    schema: Schema,
    rows: pa.Table,
    *,
    kind: str,
    vnode_count: int,
    is_change: bool = True,
    path: str | None = None,
    packed: dict[str, Any] | None = None,
) -> NewSegment:
    """Write rows that have the table's columns, in any order; the vnode is added, the order made.

    They have `_op` and `_seq`, or neither: then all are upserts, and the first of their epoch. `packed` is how the
    columns are packed (`packing`); an empty one is filled, for segments of rows like these.
    """
    rows = _in_order(rows, schema, vnode_count, packed or {})
    packed = {} if packed is None else packed
    memory = rows.nbytes  # once: of a few rows this takes as long as to write some columns
    if not packed and not is_small(rows.schema, memory):  # from a small one the next would learn nothing
        packed.update(packing(rows, schema.key))
    path = path or segment_path(table_id)
    with data_dir.create(path) as out:
        _write_rows(rows, memory, out, packed or unpacked(rows.schema, schema.key))
    fs, target = data_dir.path(path)
    size = fs.get_file_info(target).size
    return NewSegment(table_id, path, kind, rows.num_rows, size, is_change)


def _in_order(rows: pa.Table, schema: Schema, vnode_count: int, packed: dict[str, Any]) -> pa.Table:
    """All columns of a segment, in its order."""
    from headwater.storage.placing import placed  # late: numba is only loaded where rows are touched

    wanted = arrow_schema(schema)
    present = set(rows.column_names) - {VNODE}
    keys = rows.select(list(schema.key)).cast(pa.schema([wanted.field(k) for k in schema.key]))
    vnode, places = places_of(keys, schema, vnode_count)
    rows = _as_stored(rows.select([n for n in wanted.names if n in present]), wanted)
    columns = placed(rows, places, words=packed.get("use_dictionary", ()))
    columns = columns.append_column(VNODE, vnode)
    if OP not in present:
        columns = columns.append_column(OP, pa.array(np.full(rows.num_rows, OP_UPSERT, np.int8)))
        columns = columns.append_column(SEQ, pa.array(np.zeros(rows.num_rows, np.int64)))
    return columns.select(wanted.names).combine_chunks()


def _write_rows(rows: pa.Table, memory: int, out: pa.NativeFile, packed: dict[str, Any]) -> None:
    """By our own writer if it knows all types, as it takes little more than half of the time."""
    from headwater.storage import parquet  # late: numba is only loaded where rows are touched

    groups = _groups(rows.num_rows, memory)
    if parquet.supported(rows.schema):
        parquet.write_table(rows, out, row_group_size=groups["row_group_size"], **packed)
    else:
        # Without Arrow's own types: a reader is to see those of the table.
        packed = _floats_plain(rows.schema, packed)
        pq.write_table(_without_levels(rows), out, store_schema=False, **groups, **packed)


def _as_stored(rows: pa.Table, wanted: pa.Schema) -> pa.Table:
    """In the table's types; but decimals of 64 bits are written as they are, sooner."""
    kept = [_is_compact(f.type, wanted.field(f.name).type) for f in rows.schema]
    fields = [f if keep else wanted.field(f.name) for f, keep in zip(rows.schema, kept, strict=True)]
    return rows.cast(pa.schema(fields))


def _is_compact(given: pa.DataType, wanted: pa.DataType) -> bool:
    decimal = pa.types.is_decimal64(given) and pa.types.is_decimal(wanted)
    return bool(decimal and (given.precision, given.scale) == (wanted.precision, wanted.scale))


def _floats_plain(schema: pa.Schema, packed: dict[str, Any]) -> dict[str, Any]:
    """Spark looks a filter's 0.0 up in the dictionary of a row group, where -0.0 is another value, and takes a NaN to
    be within the least and greatest value, which Arrow notes without it. `parquet.py` knows how to write both."""
    others = [f.name for f in schema if not pa.types.is_floating(f.type)]
    noted = packed.get("write_statistics", others)
    return packed | {
        "use_dictionary": [n for n in packed["use_dictionary"] if n in others],
        "write_statistics": [n for n in noted if n in others],
    }


def _without_levels(rows: pa.Table) -> pa.Table:
    """Columns without a NULL are marked as such: the file need not say it row by row, which costs time.

    Readers take every column as one that may have NULLs, so files of one table may differ in this.
    """
    fields = [f.with_nullable(c.null_count > 0) for f, c in zip(rows.schema, rows.columns, strict=True)]
    return pa.Table.from_arrays(rows.columns, schema=pa.schema(fields))


def _groups(rows: int, memory: int) -> dict[str, int]:
    """How many rows are a row group, and are put by Arrow into a page at a time; a row is never cut, however large."""
    width = max(1, memory // max(1, rows))
    return {
        "row_group_size": max(1, min(ROW_GROUP_ROWS, ROW_GROUP_BYTES // width)),
        "write_batch_size": max(1, min(PAGE_ROWS, PAGE_BYTES // width)),
    }


def places_of(keys: pa.Table, schema: Schema, vnode_count: int) -> tuple[pa.Array, NDArray[np.int64]]:
    """The vnodes of a segment of rows with these keys, in its order, and where in it each row goes."""
    keys = with_vnode(keys, schema, vnode_count)
    falls = _falls(keys, schema.key)
    if falls * NEARLY_IN_ORDER > keys.num_rows:
        order = _compared(keys, (VNODE, *schema.key)).to_numpy()
        return keys.column(VNODE).combine_chunks().take(pa.array(order)), _inverse(order)
    # As copies of a table mostly come: rows of a vnode stay as they are, so that counting tells their places.
    from headwater.storage.placing import scatter_positions  # late: numba is only loaded where rows are touched

    vnode = keys.column(VNODE).to_numpy()
    if falls:
        number = _as_number(keys, schema.key)  # numpy's sort takes less the fewer there are to move
        order = _compared(keys, schema.key).to_numpy() if number is None else np.argsort(number, kind="stable")
        counts, dealt = scatter_positions(vnode[order], vnode_count)
        places = np.empty(keys.num_rows, np.int64)
        places[order] = dealt
    else:
        counts, places = scatter_positions(vnode, vnode_count)
    return pa.array(np.repeat(np.arange(vnode_count, dtype=np.int32), counts)), places


def _inverse(order: NDArray[Any]) -> NDArray[np.int64]:
    places = np.empty(order.size, np.int64)
    places[order] = np.arange(order.size)
    return places


def _as_number(rows: pa.Table, key: Sequence[str]) -> NDArray[np.int64] | None:
    """The keys, each as one whole number, which are ordered as they are; None if they are others, or too far apart."""
    columns = [rows.column(k).combine_chunks() for k in key]
    if not all(_is_number(c.type) for c in columns):
        return None
    first, *others = map(_whole_numbers, columns)
    if not others:
        return first
    number, room = np.zeros_like(first), 1
    for values in (first, *others):
        least = int(values.min())
        span = int(values.max()) - least + 1
        room *= span
        if room >= 1 << 63:
            return None
        number = number * span + (values - least)
    return number


def _whole_numbers(column: pa.Array) -> NDArray[np.int64]:
    """Of times too: numpy takes the least of them for none at all, and sorts it last."""
    kind = column.type if pa.types.is_integer(column.type) else _WHOLE[column.type.bit_width]
    numbers: NDArray[np.int64] = column.view(kind).to_numpy().astype(np.int64, copy=False)
    return numbers


def _compared(rows: pa.Table, key: Sequence[str]) -> pa.Array:
    return pc.sort_indices(rows, sort_keys=[(k, "ascending") for k in key])


def _falls(rows: pa.Table, key: Sequence[str]) -> int:
    """How many rows have a lower key than the row before them; all, if that cannot be told."""
    columns = [rows.column(k).combine_chunks() for k in key]
    if not columns or any(c.null_count or not _is_compared(c.type) for c in columns):
        return int(rows.num_rows)
    falls = 0
    ahead: pa.Array | None = None  # whether a row's first columns are those of the row before it
    for column in columns:
        before, after = column[:-1], column[1:]
        lower = pc.greater(before, after)
        falls += int(pc.sum(lower if ahead is None else pc.and_(lower, ahead), min_count=0).as_py())
        if column is not columns[-1]:
            same = pc.equal(before, after)
            ahead = same if ahead is None else pc.and_(ahead, same)
    return falls


def _is_compared(kind: pa.DataType) -> bool:
    """Whether Arrow compares values as it sorts them; floats have NaN."""
    return _is_text(kind) or _is_number(kind)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def with_vnode(rows: pa.Table, schema: Schema, vnode_count: int) -> pa.Table:
    if VNODE in rows.column_names:
        rows = rows.drop_columns([VNODE])
    return rows.append_column(VNODE, vnodes(rows, schema.key, vnode_count))


def newest_per_key(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """One row per key, the one with the highest `_seq`; ties go to the later row."""
    if rows.num_rows <= 1:
        return rows
    rows = rows.combine_chunks()
    order = pc.sort_indices(rows.select([SEQ]), sort_keys=[(SEQ, "ascending")])
    rows = rows.take(order)
    position = pa.array(np.arange(rows.num_rows, dtype=np.int64))
    last = rows.select(list(key)).append_column("_hw_at", position).group_by(list(key)).aggregate([("_hw_at", "max")])
    return rows.take(last.column("_hw_at_max"))


def read_segments(
    data_dir: DataDir,
    schema: Schema,
    paths: Sequence[str],
    columns: Sequence[str] | None = None,
    where: VnodeFilter | None = None,
) -> pa.Table:
    """The rows of several segments as one table; columns that an older segment does not have are NULL.

    `where` takes the rows of some vnodes, and prunes row groups.
    """
    wanted = arrow_schema(schema)
    if columns is not None:
        wanted = pa.schema([wanted.field(c) for c in columns])
    parts = [_read_one(data_dir, schema, path, wanted, where) for path in paths]
    return pa.concat_tables(parts) if parts else wanted.empty_table()


@dataclass(frozen=True, slots=True)
class VnodeFilter:
    """A condition on `_vnode`, and what it takes to know the vnode of a row that does not have it."""

    condition: pc.Expression
    vnode_count: int


def _read_one(data_dir: DataDir, schema: Schema, path: str, wanted: pa.Schema, where: VnodeFilter | None) -> pa.Table:
    fs, target = data_dir.path(path)
    present = set(pq.read_schema(target, filesystem=fs).names)
    names = [n for n in wanted.names if n in present]
    if where is None or VNODE in present:
        condition = None if where is None else where.condition
        table = pq.read_table(target, filesystem=fs, columns=names, filters=condition, partitioning=None)
    else:
        with_key = list(dict.fromkeys([*names, *schema.key]))
        table = pq.read_table(target, filesystem=fs, columns=with_key, partitioning=None)
        table = with_vnode(table, schema, where.vnode_count).filter(where.condition).select(names)
    return _conforming(table, wanted)


_has_vnode: dict[tuple[str, str], bool] = {}
_FOOTERS_AT_ONCE: Final = 16


def without_vnode(data_dir: DataDir, paths: Sequence[str]) -> frozenset[str]:
    """Those of the segments that are of format v1. A footer is read once: segments never change."""

    def look(path: str) -> None:
        fs, target = data_dir.path(path)
        # Whoever reads a file that is gone or damaged says so better.
        with contextlib.suppress(OSError, pa.ArrowException):
            _has_vnode[data_dir.root, path] = VNODE in pq.read_schema(target, filesystem=fs).names

    unknown = [p for p in paths if (data_dir.root, p) not in _has_vnode]
    if len(_has_vnode) > KNOWN_SEGMENTS:
        _has_vnode.clear()
        unknown = list(paths)
    if unknown:
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as threads:
            list(threads.map(look, unknown))
    return frozenset(p for p in paths if not _has_vnode.get((data_dir.root, p), True))


def column_widths(data_dir: DataDir, paths: Sequence[str], names: Iterable[str]) -> dict[str, float]:
    """Bytes of an average value of these columns, as the footers of some segments have them."""
    sizes = dict.fromkeys(names, 0)
    rows = 0
    for path in paths:
        fs, target = data_dir.path(path)
        with fs.open_input_file(target) as source:
            footer = pq.read_metadata(source)
        rows += footer.num_rows
        for group in (footer.row_group(i) for i in range(footer.num_row_groups)):
            for column in (group.column(i) for i in range(group.num_columns)):
                name = column.path_in_schema.split(".", 1)[0]
                if name in sizes:
                    sizes[name] += column.total_uncompressed_size
    return {name: size / max(1, rows) for name, size in sizes.items()}


def _conforming(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    present = set(table.column_names)
    for i, field in enumerate(wanted):
        if field.name not in present:
            table = table.add_column(i, field, pa.nulls(table.num_rows, field.type))
    return table.select(wanted.names).cast(wanted)


def read_held(data_dir: DataDir, schema: Schema, segments: Sequence[Segment], max_bytes: int) -> pa.Table | None:
    """The rows of small change-log segments, to be held in memory; None if they would be more than that many bytes.

    Rows of a base segment (a hand-over) get a `_seq` below every change's: a change of the same epochs is newer.
    """
    wanted = arrow_schema(schema)
    parts: list[pa.Table] = []
    for segment in segments:
        table = _read_small(data_dir, segment.path, wanted, max_bytes - sum(p.nbytes for p in parts))
        if table is None:
            return None
        if segment.kind == "base":
            older = pa.array(np.full(table.num_rows, -1, np.int64))
            table = table.set_column(wanted.names.index(SEQ), wanted.field(SEQ), older)
            upsert = pa.array(np.full(table.num_rows, OP_UPSERT, np.int8))
            table = table.set_column(wanted.names.index(OP), wanted.field(OP), upsert)
        parts.append(table)
    return pa.concat_tables(parts) if parts else wanted.empty_table()


def _read_small(data_dir: DataDir, path: str, wanted: pa.Schema, max_bytes: int) -> pa.Table | None:
    """Some rows at a time: a file says little about how large its rows are, values may be repeated in it."""
    fs, target = data_dir.path(path)
    batches: list[pa.RecordBatch] = []
    size = 0
    with fs.open_input_file(target) as source, pq.ParquetFile(source) as file:
        names = [n for n in wanted.names if n in set(file.schema_arrow.names)]
        for batch in file.iter_batches(ROWS_AT_A_TIME, columns=names, use_threads=False):
            size += batch.nbytes
            if size > max_bytes:
                return None
            batches.append(batch)
        empty = pa.schema([file.schema_arrow.field(n) for n in names])
    table = pa.Table.from_batches(batches) if batches else empty.empty_table()
    return _conforming(table, wanted)
