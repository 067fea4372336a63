"""Bulk writing of segments, and what the vnode and the file format are in Spark's own terms.

Same file format as `storage/segments.py`; the rule of the vnode is in `model/vnode.py`.
"""

from __future__ import annotations

import contextlib

import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F

from headwater.errors import UsageError
from headwater.model.schema import OP, OP_UPSERT, ROW_NO, SEQ, VNODE, Schema, quoted
from headwater.model.schema import Column as SchemaColumn
from headwater.model.vnode import FLOAT_LIMIT, KEY_SEPARATOR
from headwater.spark.row_writer import RowWriter, writable, write_rows
from headwater.storage.checkpoint import NewSegment
from headwater.storage.files import DataDir, segment_folder
from headwater.storage.shared import not_shared


def canonical(column: Column, kind: str) -> Column:
    """The canonical key text of one column of DDL type `kind`."""
    kind = kind.upper()
    if kind == "DATE":
        return F.unix_date(column).cast("string")
    if kind in ("TIMESTAMP", "TIMESTAMP_LTZ"):
        return F.unix_micros(column).cast("string")
    if kind == "TIMESTAMP_NTZ":
        return F.unix_micros(column.cast("timestamp")).cast("string")
    if kind.startswith(("DECIMAL", "NUMERIC", "DEC(")):
        digits = F.translate(column.cast("string"), ".", "")
        return F.regexp_replace(digits, r"^(-?)0+(?=\d)", "$1")
    if kind == "BINARY":
        return F.hex(column)
    if kind in ("FLOAT", "DOUBLE", "REAL"):
        value = column.cast("double")
        small = F.abs(value) < F.lit(FLOAT_LIMIT)
        whole = F.when(small, value).otherwise(F.lit(0.0)).cast("bigint").cast("string")
        return F.when(F.isnan(value), F.lit("nan")).otherwise(F.when(small, whole).otherwise(F.lit("big")))
    if kind.startswith(("ARRAY", "MAP", "STRUCT")):
        raise UsageError("KEY_TYPE", f"a column of type {kind.lower()} cannot be a key")
    return column.cast("string")


def vnode_expression(key: tuple[SchemaColumn, ...], vnode_count: int, columns: list[Column] | None = None) -> Column:
    """The vnode of a row, INT; `columns` replace the key columns, e.g. by literals."""
    values = columns or [F.col(quoted(c.name)) for c in key]
    pairs = [(v, c) for v, c in zip(values, key, strict=True) if c.name != ROW_NO]
    text = F.concat_ws(KEY_SEPARATOR, *[canonical(v, c.type) for v, c in pairs])
    return F.pmod(F.crc32(text.cast("binary")), F.lit(vnode_count)).cast("int")


def dense_number() -> Column:
    """A number for each row. Spark numbers partitions from bit 33 on; this packs them closer (2**27 rows each)."""
    number = F.monotonically_increasing_id()
    return F.shiftright(number, 33) * F.lit(1 << 27) + number.bitwiseAND(F.lit((1 << 33) - 1))


def write_frame(
    frame: DataFrame,
    data_dir: DataDir,
    table_id: int,
    schema: Schema,
    *,
    kind: str,
    vnode_count: int,
    seq_base: int,
    is_change: bool = True,
    wide: bool = False,
) -> list[NewSegment]:
    """Write a DataFrame (the table's columns, optionally `_op` and `_seq`) as segments: one Spark job.

    By Python workers (`row_writer.py`); by Spark's own writer where the types want it, or the rows are `wide`.
    """
    columns = [F.col(quoted(c.name)).cast(c.type).alias(c.name) for c in schema.columns]
    op = F.col(OP).cast("tinyint") if OP in frame.columns else F.lit(OP_UPSERT).cast("tinyint")
    if writable(schema) and not wide:
        own = [F.col(SEQ)] if SEQ in frame.columns else []
        folder = segment_folder(table_id)
        writer = RowWriter(data_dir, table_id, schema, vnode_count, seq_base, folder, kind, is_change)
        return write_rows([(frame.select(*columns, op.alias(OP), *own), writer)])[table_id]
    if SEQ in frame.columns:
        seq = F.col(SEQ)
    elif kind == "base":
        seq = F.lit(0).cast("bigint")
    else:
        seq = F.lit(seq_base) + dense_number()
    vnode = vnode_expression(schema.key_columns, vnode_count)
    rows = frame.select(*columns, op.alias(OP), seq.alias(SEQ))
    rows = rows.select(*[quoted(c.name) for c in schema.columns], vnode.alias(VNODE), OP, SEQ)
    rows = rows.sortWithinPartitions(VNODE, *[quoted(k) for k in schema.key])
    return write_sorted(rows, data_dir, table_id, kind=kind, is_change=is_change)


def segment_query(query: str, schema: Schema, *, vnode_count: int, seq_base: int) -> str:
    """What `write_frame` does to the rows of a query (the table's columns and `_op`), as text, for a STRING key.

    A DataFrame is analysed again at each step; for the statement of a view's refresh that costs more than the refresh.
    """
    (key,) = schema.key
    assert schema[key].type == "STRING"
    names = [quoted(c.name) for c in schema.columns]
    columns = ", ".join(f"CAST({name} AS {c.type}) AS {name}" for name, c in zip(names, schema.columns, strict=True))
    vnode = f"CAST(pmod(crc32(CAST({quoted(key)} AS BINARY)), {vnode_count}) AS INT)"
    number = "monotonically_increasing_id()"
    number = f"shiftright({number}, 33) * {1 << 27}L + ({number} & {(1 << 33) - 1}L)"
    # Spark writes a BIGINT into the code that it generates, and another number would be other code, compiled again for
    # every refresh; a DECIMAL is handed over beside the code.
    seq = f"CAST(CAST({seq_base} AS DECIMAL(19, 0)) + CAST({number} AS DECIMAL(19, 0)) AS BIGINT)"
    return (
        f"SELECT {columns}, {vnode} AS {VNODE}, CAST({OP} AS TINYINT) AS {OP}, {seq} AS {SEQ} FROM ({query}) "
        f"SORT BY {VNODE}, {quoted(key)}"
    )


def write_sorted(
    rows: DataFrame, data_dir: DataDir, table_id: int, *, kind: str, is_change: bool = True
) -> list[NewSegment]:
    """Write rows that are as a segment has them: one Spark job.

    The files are written by Spark's JVMs, which know nothing of our mark in the data directory (`storage/shared.py`):
    on a cluster the rows are counted as they are written, and all must be in the files that we see.
    """
    folder = segment_folder(table_id)
    counted = None if rows.sparkSession.sparkContext.master.startswith("local") else Observation()
    if counted is not None:
        rows = rows.observe(counted, F.count(F.lit(1)).alias("rows"))
    try:
        data_dir.make(folder)
        rows.write.mode("append").parquet(data_dir.url(folder))
    except BaseException:
        with contextlib.suppress(OSError):
            data_dir.delete([folder])  # some tasks may have finished before another failed
        raise
    found = written_segments(data_dir, folder, table_id, kind, is_change)
    if counted is not None and sum(s.rows for s in found) != counted.get["rows"]:
        raise not_shared("of an executor", data_dir.root, "files that it wrote do not arrive at the engine")
    return found


def written_segments(data_dir: DataDir, folder: str, table_id: int, kind: str, is_change: bool) -> list[NewSegment]:
    """The files that Spark's writer left in a folder, with row counts from the footers; empty ones are deleted."""
    found: list[NewSegment] = []
    for path, size in sorted(data_dir.list(folder)):
        if not path.endswith(".parquet"):
            data_dir.delete([path])
            continue
        fs, target = data_dir.path(path)
        with fs.open_input_file(target) as source:
            rows = pq.read_metadata(source).num_rows
        if rows:
            data_dir.close_to_others(path)  # Hadoop gives its files a mode of its own
            found.append(NewSegment(table_id, path, kind, rows, size, is_change))
        else:
            data_dir.delete([path])
    return found
