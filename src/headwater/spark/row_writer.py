"""Writing rows as segments inside Python workers: several tables in one Spark job, and columns instead of rows.

Spark's own writer takes a row at a time and sorts whole rows; here a row costs half as much, its sorting included. That
one remains for types that do not arrive here as segments have them, and for wide rows (`segment.py`: `write_frame`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from headwater.errors import TransientError, disk_full, is_disk_full
from headwater.model.schema import SEQ, Schema
from headwater.spark.batches import gathered, map_batches
from headwater.storage.checkpoint import NewSegment
from headwater.storage.files import DataDir, segment_path
from headwater.storage.segments import write_segment

# What a task holds before it writes a segment: its memory is bounded.
SEGMENT_ROWS: Final = 524_288
SEGMENT_BYTES: Final = 64 * 1024 * 1024
TASK_BITS: Final = 27  # of a row's number within its task
RESULT: Final = "table_id BIGINT, path STRING, rows BIGINT, bytes BIGINT, error STRING"
FULL: Final = "full"  # as the error of a task: the disk is
# Types that do not arrive from Spark as segments have them.
_OTHERS: Final = ("MAP<", "INTERVAL", "VARIANT", "GEOMETRY", "GEOGRAPHY", "TIME(")


def writable(schema: Schema) -> bool:
    """Whether a worker can write rows of these columns."""
    return not any(word in c.type.upper() for c in schema.columns for word in _OTHERS)


@dataclass(frozen=True, slots=True)
class RowWriter:
    """Turns the batches of one task (the table's columns, `_op`, perhaps `_seq`) into segments, and says which.

    Rows that come without a number get one: 0 in a base segment, else the next from `seq_base` on.
    """

    data_dir: DataDir
    table_id: int
    schema: Schema
    vnode_count: int
    seq_base: int
    folder: str
    kind: str = "delta"
    is_change: bool = True

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        seq = self.seq_base + ((context.partitionId() if context else 0) << TASK_BITS)
        try:
            for rows in gathered(batches, SEGMENT_ROWS, SEGMENT_BYTES):
                segment = write_segment(
                    self.data_dir,
                    self.table_id,
                    self.schema,
                    self._numbered(rows, seq),
                    kind=self.kind,
                    vnode_count=self.vnode_count,
                    path=segment_path(self.table_id, self.folder),
                )
                seq += rows.num_rows
                yield self._result(segment.path, segment.rows, segment.bytes, None)
        except OSError as error:
            # Not the view's fault: it must not look as if one of its functions had raised.
            yield self._result("", 0, 0, FULL if is_disk_full(error) else error.strerror or type(error).__name__)

    def _numbered(self, rows: pa.Table, first: int) -> pa.Table:
        if SEQ in rows.column_names:
            return rows
        if self.kind == "base":
            return rows.append_column(SEQ, pa.array(np.zeros(rows.num_rows, np.int64)))
        return rows.append_column(SEQ, pa.array(np.arange(first, first + rows.num_rows)))

    def _result(self, path: str, rows: int, size: int, error: str | None) -> pa.RecordBatch:
        values = {"table_id": [self.table_id], "path": [path], "rows": [rows], "bytes": [size]}
        return pa.RecordBatch.from_pydict({**values, "error": pa.array([error], pa.string())})


def write_rows(frames: list[tuple[DataFrame, RowWriter]]) -> dict[int, list[NewSegment]]:
    """Write each frame's rows as segments: one Spark job for all. Segments by table."""
    written = [map_batches(frame, writer, RESULT) for frame, writer in frames]
    return written_rows(reduce(DataFrame.union, written), [writer for _, writer in frames])


def written_rows(frame: DataFrame, writers: Sequence[RowWriter]) -> dict[int, list[NewSegment]]:
    """Run a frame of what writers say; segments by table. Nothing is left of what they wrote if one of them fails."""
    found: dict[int, list[NewSegment]] = {writer.table_id: [] for writer in writers}
    by_table = {writer.table_id: writer for writer in writers}
    try:
        for row in frame.collect():
            if row.error is not None:
                raise disk_full() if row.error == FULL else TransientError("SPARK_FAILED", f"Spark failed: {row.error}")
            of = by_table[row.table_id]
            found[of.table_id].append(NewSegment(of.table_id, row.path, of.kind, row.rows, row.bytes, of.is_change))
    except BaseException:
        for writer in writers:  # some tasks may have finished before another failed
            with contextlib.suppress(OSError):
                writer.data_dir.delete([writer.folder])
        raise
    return found
