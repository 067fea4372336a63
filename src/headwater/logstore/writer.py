"""The writing end of a log: chunks as they come, sealed at every barrier. It never waits for the reader or the sink."""

from __future__ import annotations

from dataclasses import replace

from headwater.logstore.buffer import LogBuffer
from headwater.logstore.chunk import ChunkRef, LogEpoch


class LogStoreWriter:
    """Owned by the job whose changes go to the sink. The chunks' segments are committed by the engine's checkpoint."""

    def __init__(self, buffer: LogBuffer, sealed_to: int) -> None:
        self._buffer = buffer
        self.sealed_to = sealed_to
        self._open: list[ChunkRef] = []

    def write_chunk(self, chunk: ChunkRef) -> ChunkRef:
        """Append a chunk of the epoch that is open; gives it with its id in the epoch.

        One without rows counts too: the table was emptied, and what it held is owed to the sink as deletes.
        """
        if chunk.epoch <= self.sealed_to:
            raise ValueError(f"epoch {chunk.epoch} is sealed")
        if self._open and self._open[-1].epoch != chunk.epoch:
            raise ValueError(f"epoch {self._open[-1].epoch} is open, not {chunk.epoch}")
        if self._open and chunk.first_seq <= self._open[-1].last_seq:
            raise ValueError("chunks of an epoch come in the order of their rows")
        numbered = replace(chunk, chunk_id=len(self._open))
        self._open.append(numbered)
        return numbered

    def flush(self, epoch: int, *, checkpoint: bool = True) -> LogEpoch:
        """The barrier that closes `epoch`: what was written becomes one sealed epoch."""
        if epoch <= self.sealed_to or (self._open and self._open[0].epoch != epoch):
            raise ValueError(f"a barrier of epoch {epoch} does not close what is open")
        sealed = LogEpoch(epoch, tuple(self._open), checkpoint)
        self._buffer.append(sealed)
        self._open = []
        self.sealed_to = epoch
        return sealed
