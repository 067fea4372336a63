"""Writing the changed rows of views inside Python workers: what several views write is then one Spark job.

Spark's own writer (`segment.py`) is one job for each table that it writes, so it serves the bulk work alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from headwater.errors import TransientError, disk_full, is_disk_full
from headwater.model.schema import SEQ, Schema
from headwater.storage.checkpoint import NewSegment
from headwater.storage.files import DataDir, segment_path
from headwater.storage.segments import write_segment

SEGMENT_ROWS: Final = 262_144  # what a task holds before it writes a segment: its memory is bounded
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
    """Turns the batches of one task (the table's columns and `_op`) into segments, and says which."""

    data_dir: DataDir
    table_id: int
    schema: Schema
    vnode_count: int
    seq_base: int
    folder: str

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        seq = self.seq_base + ((context.partitionId() if context else 0) << TASK_BITS)
        try:
            for rows in _together(batches):
                numbered = rows.append_column(SEQ, pa.array(np.arange(seq, seq + rows.num_rows)))
                seq += rows.num_rows
                segment = write_segment(
                    self.data_dir,
                    self.table_id,
                    self.schema,
                    numbered,
                    kind="delta",
                    vnode_count=self.vnode_count,
                    path=segment_path(self.table_id, self.folder),
                )
                yield self._result(segment.path, segment.rows, segment.bytes, None)
        except OSError as error:
            # Not the view's fault: it must not look as if one of its functions had raised.
            yield self._result("", 0, 0, FULL if is_disk_full(error) else error.strerror or type(error).__name__)

    def _result(self, path: str, rows: int, size: int, error: str | None) -> pa.RecordBatch:
        values = {"table_id": [self.table_id], "path": [path], "rows": [rows], "bytes": [size]}
        return pa.RecordBatch.from_pydict({**values, "error": pa.array([error], pa.string())})


def _together(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        if batch.num_rows:
            waiting.append(batch)
        if sum(b.num_rows for b in waiting) >= SEGMENT_ROWS:
            yield pa.Table.from_batches(waiting)
            waiting = []
    if waiting:
        yield pa.Table.from_batches(waiting)


def write_rows(frames: list[tuple[DataFrame, RowWriter]]) -> dict[int, list[NewSegment]]:
    """Write each frame's rows as delta segments: one Spark job for all. Segments by table."""
    found: dict[int, list[NewSegment]] = {writer.table_id: [] for _, writer in frames}
    written = [frame.mapInArrow(writer, RESULT) for frame, writer in frames]
    try:
        for row in reduce(DataFrame.union, written).collect():
            if row.error is not None:
                raise disk_full() if row.error == FULL else TransientError("SPARK_FAILED", f"Spark failed: {row.error}")
            found[row.table_id].append(NewSegment(row.table_id, row.path, "delta", row.rows, row.bytes))
    except BaseException:
        for _, writer in frames:  # some tasks may have finished before another failed
            with contextlib.suppress(OSError):
                writer.data_dir.delete([writer.folder])
        raise
    return found
