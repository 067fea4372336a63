"""The rows of a sink's newest small epochs, held in its log store's buffer and delivered without a Spark job.

A live sink gets a few rows an epoch. A Spark job for them takes longer than they do, and takes its time from the views.
So the engine reads the change-log segments of a small epoch itself, once, as soon as the sink turns to it: they were
just written. The buffer bounds what is held (`logstore/buffer.py`); `IN_MEMORY_ROWS` how long a delivery keeps the
engine's process busy. Whatever is larger, wider, or needs more than the changes themselves stays a reference, and Spark
reads it (`spark/delivery.py`: `change_batch`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from headwater.logstore.buffer import LogBuffer
from headwater.logstore.chunk import ChunkRef, LogBatch
from headwater.model.schema import OP, Schema
from headwater.runtime.registry import schema_of
from headwater.sink.batch import RowBatch, appended_rows, net_rows
from headwater.sink.options import SinkOptions
from headwater.sink.sink import Sink, SinkType
from headwater.storage.checkpoint import JobRow, Segment
from headwater.storage.segments import arrow_schema, read_held

log = logging.getLogger(__name__)
IN_MEMORY_ROWS: Final = 10_000  # of a batch: about a tenth of a second of the engine's interpreter for the slowest sink
IN_MEMORY_BYTES: Final = 16 << 20  # of a batch; wider rows go by Spark, in workers of their own


class SinkRows:
    """Reads and gives the held rows of one sink. The buffer is touched on the event loop alone."""

    def __init__(self, core: Any, source_id: int, buffer: LogBuffer) -> None:
        self._core = core
        self._source_id = source_id
        self._buffer = buffer
        self._looked_to = 0  # a chunk that was too large is not looked at again

    def suits(self, sink: Sink, source: JobRow, options: SinkOptions, key: Sequence[str]) -> bool:
        """Whether changes of this input can go to this sink as they are in the segments."""
        from headwater.spark.compaction import foldable

        schema = schema_of(source)
        own = options.type is SinkType.APPEND_ONLY or tuple(key) == schema.key
        return sink.takes_rows and own and foldable(schema)

    def unread(self, up_to: int) -> list[ChunkRef]:
        """The small chunks whose rows are to be read next."""
        after = max(self._looked_to, self._buffer.complete_after)
        room, _ = self._buffer.room()
        found: list[ChunkRef] = []
        for epoch in self._buffer.after(after, up_to, IN_MEMORY_ROWS):
            if epoch.rows > room:
                break
            found += [c for c in epoch.chunks if c.rows <= IN_MEMORY_ROWS]
            room -= epoch.rows
            self._looked_to = epoch.epoch
        return found

    def read(self, source: JobRow, chunks: Sequence[ChunkRef]) -> list[tuple[ChunkRef, pa.Table]]:
        """In a thread: the rows of chunks; those that cannot be read are left to Spark, which says why."""
        found: list[tuple[ChunkRef, pa.Table]] = []
        segments = self._segments(chunks)
        for chunk in chunks:
            try:
                mine = [segments[path] for path in chunk.segments]
                rows = read_held(self._core.data_dir, schema_of(source), mine, IN_MEMORY_BYTES)
            except (KeyError, OSError, ValueError, pa.ArrowException) as error:
                log.info("the rows of an epoch are not held in memory: %s", type(error).__name__)
                continue
            if rows is not None:
                found.append((chunk, rows))
        return found

    def _segments(self, chunks: Sequence[ChunkRef]) -> dict[str, Segment]:
        epochs = [c.epoch for c in chunks]
        found = self._core.meta.change_segments(self._source_id, min(epochs) - 1, max(epochs))
        return {s.path: s for s in found}

    def keep(self, read: Sequence[tuple[ChunkRef, pa.Table]]) -> None:
        for chunk, rows in read:
            self._buffer.keep(chunk, rows)

    def of(self, batch: LogBatch) -> list[pa.Table] | None:
        """The rows of a batch, if it is small and all of them are held."""
        if batch.rows > IN_MEMORY_ROWS:
            return None
        held = [self._buffer.rows_of(ref) for ref in batch.refs]
        found = [rows for rows in held if rows is not None]
        return found if len(found) == len(held) and sum(t.nbytes for t in found) <= IN_MEMORY_BYTES else None

    def change_batch(
        self, sink: str, source: JobRow, batch: LogBatch, held: Sequence[pa.Table], options: SinkOptions
    ) -> RowBatch | None:
        """In a thread: the net changes of a batch, as `change_batch` of Spark gives them; None if that must."""
        schema = schema_of(source)
        if self._core.meta.was_reset(source.id, batch.from_epoch, batch.to_epoch):
            return None  # the rows that went with it are not in the log
        if any(rows.schema != arrow_schema(schema) for rows in held):
            return None  # read before the input got another shape
        return RowBatch(_delivered(sink, net_rows(held, schema.key), schema, options))


def _delivered(sink: str, rows: pa.Table, schema: Schema, options: SinkOptions) -> pa.Table:
    rows = rows.select([*(c.name for c in schema.visible), OP])
    if options.type is SinkType.APPEND_ONLY:
        return appended_rows(sink, rows, force=options.force_append_only)
    return rows
