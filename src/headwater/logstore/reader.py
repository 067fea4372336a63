"""The reading end of a log: history first, then the live buffer; whole epochs, combined into batches.

    history (meta store) ───────────► | ◄─────── live buffer (memory)
    ▲ truncated      ▲ read           complete_after                   ▲ committed   ▲ sealed

Only what a checkpoint has committed is read: a sink must never see an epoch that a recovery could take back. History
and buffer hold the same epochs where they overlap, so falling out of the buffer costs time, not data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from headwater.logstore.buffer import LogBuffer
from headwater.logstore.chunk import Backlog, ChunkRef, LogBatch, LogEpoch
from headwater.logstore.offset import TruncateOffset
from headwater.logstore.state import LogStoreState
from headwater.model.vnode import DEFAULT_VNODE_COUNT

PAGE_EPOCHS: Final = 256  # epochs asked of the history at a time


class History(Protocol):
    """The committed change log of the sink's input, as the meta store knows it. Nothing here is sink specific."""

    def epochs(self, after: int, up_to: int, limit: int) -> Sequence[LogEpoch]:
        """Committed epochs in `(after, up_to]` that hold changes, oldest first, at most `limit` of them."""
        ...

    def backlog(self, after: int, up_to: int) -> Backlog:
        """How much they hold together."""
        ...


@dataclass(frozen=True, slots=True)
class _Page:
    epochs: Sequence[LogEpoch]
    reaches: int  # everything up to here has been looked at


class LogStoreReader:
    """Gives batches and takes truncations. `state` is what the next checkpoint has to store."""

    def __init__(
        self, state: LogStoreState, history: History, buffer: LogBuffer, *, vnode_count: int = DEFAULT_VNODE_COUNT
    ) -> None:
        self.state = state
        self.committed_to = buffer.complete_after
        self.read_to = _epoch_before(state.truncated_to)
        self._history = history
        self._buffer = buffer
        self._every = frozenset(range(vnode_count))

    def committed(self, epoch: int) -> None:
        """A checkpoint has committed everything up to `epoch`; it may be read now."""
        self.committed_to = max(self.committed_to, epoch)

    def start_from(self, epoch: int | None) -> None:
        """Begin after what the target already holds (`DeliveryLoop.start`), where that is further than we knew."""
        if epoch is None or TruncateOffset.barrier(epoch) <= self.state.truncated_to:
            return
        self.read_to = max(self.read_to, epoch)
        self.state = self.state.truncated(TruncateOffset.barrier(epoch)).delivered(epoch)

    def set_partial(self, epoch: int, vnodes: frozenset[int]) -> None:
        """What the target says of a batch that ends at `epoch` and is there in part: it has these vnodes of it.

        Only the others are read again. The target knows best: what was noted of single vnodes before is replaced.
        """
        self.state = self.state.aligned()
        if vnodes:
            self.state = self.state.truncated(TruncateOffset.barrier(epoch), vnodes=vnodes)

    def pending(self, epoch: int) -> frozenset[int] | None:
        """The vnodes of which the target lacks something up to `epoch`; None for all."""
        reached = self.state.reached(epoch)
        return self._every - reached if reached else None

    def next_batch(self, max_rows: int, max_epochs: int, up_to: int | None = None) -> LogBatch | None:
        """The next whole epochs, None if all that is committed (or, with `up_to`, all up to it) has been read.

        At least one epoch, however large; further ones while the batch stays within `max_rows` and `max_epochs`
        epochs with changes. A batch without refs means that the epochs up to `to_epoch` hold nothing: truncate and go
        on.
        """
        last = self.committed_to if up_to is None else min(up_to, self.committed_to)
        if self.read_to >= last:
            return None
        start, to, rows, epochs = self.read_to, self.read_to, 0, 0
        refs: list[ChunkRef] = []
        for epoch, reaches in self._walk(last):
            if epoch is not None:
                if epochs and (rows + epoch.rows > max_rows or epochs >= max_epochs):
                    break
                pending = [c for c in map(self._pending, epoch.chunks) if c is not None]
                if refs and pending and pending[0].vnodes != refs[0].vnodes:
                    break
                refs += pending
                rows += sum(c.rows for c in pending)
                epochs += bool(pending)
            to = reaches
        self.read_to = to
        return LogBatch(start, to, tuple(refs))

    def truncate(self, offset: TruncateOffset) -> LogStoreState:
        """The target has everything up to `offset`. Durable with the next checkpoint; nothing is removed before."""
        if offset.epoch > self.read_to:
            raise ValueError(f"cannot truncate to epoch {offset.epoch}: read only to {self.read_to}")
        self.state = self.state.truncated(offset)
        return self.state

    def delivered(self, batch: LogBatch) -> LogStoreState:
        """A batch is durable in the target (or was empty): truncate to its end."""
        if not batch.empty:
            self.state = self.state.delivered(batch.to_epoch)
        return self.truncate(TruncateOffset.barrier(batch.to_epoch))

    def rewind(self) -> None:
        """After a failure: read again from the truncated position. A chunk offset goes back to the start of its
        epoch.
        """
        self.read_to = _epoch_before(self.state.truncated_to)

    def rewind_to(self, epoch: int, *, retained_after: int) -> LogStoreState:
        """The user's rewind, to any epoch whose changes are still retained."""
        if epoch < retained_after:
            raise ValueError(f"changes after epoch {epoch} are no longer retained, only after {retained_after}")
        self.state = self.state.rewound(epoch)
        self.rewind()
        return self.state

    def forget(self, persisted: LogStoreState) -> int:
        """A checkpoint has stored `persisted`: free memory; gives the epoch after which segments are still needed."""
        needed_after = _epoch_before(persisted.truncated_to)
        self._buffer.forget(min(needed_after, self.committed_to))
        return needed_after

    def backlog(self) -> Backlog:
        """What is committed and not truncated."""
        after = _epoch_before(self.state.truncated_to)
        middle = min(max(after, self._buffer.complete_after), self.committed_to)
        old = self._history.backlog(after, middle) if after < middle else Backlog()
        return old + self._buffer.backlog(middle, self.committed_to) if middle < self.committed_to else old

    def _walk(self, last: int) -> Iterator[tuple[LogEpoch | None, int]]:
        """Epochs after `read_to` up to `last` in order, each with the position up to which it brings the reader."""
        position = self.read_to
        while position < last:
            page = self._page(position, last)
            for epoch in page.epochs:
                yield epoch, epoch.epoch
            yield None, page.reaches
            position = page.reaches

    def _page(self, position: int, last: int) -> _Page:
        live = position >= self._buffer.complete_after
        end = last if live else min(last, self._buffer.complete_after)
        read = self._buffer.after if live else self._history.epochs
        found = read(position, end, PAGE_EPOCHS)
        return _Page(found, found[-1].epoch if len(found) >= PAGE_EPOCHS else end)

    def _pending(self, chunk: ChunkRef) -> ChunkRef | None:
        """The part of a chunk that is not truncated yet."""
        position = TruncateOffset.chunk(chunk.epoch, chunk.chunk_id)
        if position <= self.state.truncated_to:
            return None
        done = frozenset(v for v, offset in self.state.per_vnode or () if position <= offset)
        return chunk.only(self._every - done) if done else chunk


def _epoch_before(offset: TruncateOffset) -> int:
    """The last epoch that is truncated completely."""
    return offset.epoch if offset.is_barrier else offset.epoch - 1
