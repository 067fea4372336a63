"""The live part of a log in memory: the newest epochs, bounded in rows, bytes and number.

Rows of small chunks (the engine reads them once, `runtime/sink_rows.py`) stay in memory up to `MAX_ROWS` and
`MAX_BYTES` until they are truncated; a chunk beyond that is only its reference. The references are bounded too: beyond
`MAX_EPOCHS` the oldest are dropped, and a reader that is so far behind reads them from the history (`reader.py`), where
the same epochs are durable. So a sink that is down for a month costs the memory of a healthy one.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import pyarrow as pa

from headwater.logstore.chunk import Backlog, ChunkRef, LogEpoch

MAX_ROWS: Final = 65_536  # rows kept in memory; as RisingWave's
MAX_BYTES: Final = 64 << 20  # so that wide rows cannot use more than this
MAX_EPOCHS: Final = 4_096  # references: over an hour of epochs at one per second, about 1 MB


class LogBuffer:
    """Holds every epoch after `complete_after`, without gaps. One writer and one reader on one event loop."""

    def __init__(
        self,
        complete_after: int,
        *,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_BYTES,
        max_epochs: int = MAX_EPOCHS,
    ) -> None:
        self.complete_after = complete_after
        self.resident_rows = 0
        self.resident_bytes = 0
        self._limits = (max_rows, max_bytes, max_epochs)
        self._epochs: list[LogEpoch] = []
        self._rows: dict[tuple[int, int], tuple[pa.Table, int, int]] = {}

    def __len__(self) -> int:
        return len(self._epochs)

    def room(self) -> tuple[int, int]:
        """How many more rows and bytes may be kept."""
        return self._limits[0] - self.resident_rows, self._limits[1] - self.resident_bytes

    def keep(self, chunk: ChunkRef, rows: pa.Table) -> bool:
        """Keep a chunk's rows in memory if the bounds allow; False: only the reference is held."""
        room, size = self.room()
        if self.rows_of(chunk) is not None or chunk.epoch <= self.complete_after:
            return False  # it is there, or was truncated while its rows were being read
        if chunk.rows > room or rows.nbytes > size:
            return False
        self._rows[chunk.epoch, chunk.chunk_id] = (rows, chunk.rows, rows.nbytes)
        self.resident_rows += chunk.rows
        self.resident_bytes += rows.nbytes
        return True

    def rows_of(self, chunk: ChunkRef) -> pa.Table | None:
        """The rows of a chunk, if they are in memory."""
        kept = self._rows.get((chunk.epoch, chunk.chunk_id))
        return kept[0] if kept is not None else None

    def append(self, epoch: LogEpoch) -> None:
        """Add a sealed epoch; never waits and never refuses."""
        last = self._epochs[-1].epoch if self._epochs else self.complete_after
        if epoch.epoch <= last:
            raise ValueError(f"epoch {epoch.epoch} does not follow {last}")
        self._epochs.append(epoch)
        if len(self._epochs) > self._limits[2]:
            self.forget(self._epochs[len(self._epochs) - self._limits[2] - 1].epoch)

    def after(self, epoch: int, up_to: int, limit: int) -> list[LogEpoch]:
        """The epochs in `(epoch, up_to]`, oldest first."""
        if epoch < self.complete_after:
            raise ValueError(f"epochs after {epoch} are no longer in memory")
        start = bisect_right(self._epochs, epoch, key=lambda e: e.epoch)
        return [e for e in self._epochs[start : start + limit] if e.epoch <= up_to]

    def backlog(self, epoch: int, up_to: int) -> Backlog:
        some = self.after(max(epoch, self.complete_after), up_to, len(self._epochs))
        return Backlog(sum(e.rows for e in some), sum(e.bytes for e in some), sum(1 for e in some if e.chunks))

    def forget(self, up_to: int) -> None:
        """Drop epochs up to and including `up_to`."""
        end = bisect_right(self._epochs, up_to, key=lambda e: e.epoch)
        for epoch in self._epochs[:end]:
            for chunk in epoch.chunks:
                _, rows, size = self._rows.pop((chunk.epoch, chunk.chunk_id), (None, 0, 0))
                self.resident_rows -= rows
                self.resident_bytes -= size
        del self._epochs[:end]
        self.complete_after = max(self.complete_after, up_to)
