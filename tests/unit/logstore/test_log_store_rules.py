"""The log store's single rules, one sentence each; the whole against a model is in tests/property/test_logstore.py."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from headwater.logstore import (
    Backlog,
    Backoff,
    ChunkRef,
    LogBuffer,
    LogStoreReader,
    LogStoreState,
    LogStoreWriter,
    TruncateOffset,
)
from headwater.runtime.sink_log import log_store_row


class NoHistory:
    def epochs(self, after: int, up_to: int, limit: int) -> list[object]:
        return []

    def backlog(self, after: int, up_to: int) -> Backlog:
        return Backlog()


def chunk(epoch: int, seq: int, rows: int = 1) -> ChunkRef:
    return ChunkRef(epoch, seq, seq + rows - 1, rows, 8 * rows, (f"segment-{seq}",))


def log(**bounds: int) -> tuple[LogStoreWriter, LogStoreReader, LogBuffer]:
    buffer = LogBuffer(0, **bounds)
    reader = LogStoreReader(LogStoreState.starting_at(0), NoHistory(), buffer)  # type: ignore[arg-type]
    return LogStoreWriter(buffer, 0), reader, buffer


def test_small_epochs_are_delivered_as_one_batch() -> None:
    writer, reader, _ = log()
    for epoch in (1, 2, 3):
        writer.write_chunk(chunk(epoch, 10 * epoch))
        writer.flush(epoch)
    reader.committed(3)
    batch = reader.next_batch(100, 10)
    assert batch is not None
    assert (batch.from_epoch, batch.to_epoch, batch.rows) == (0, 3, 3)
    assert reader.next_batch(100, 10) is None


def test_an_epoch_that_only_emptied_the_table_is_delivered_too() -> None:
    writer, reader, _ = log()
    writer.write_chunk(ChunkRef(1, 0, 0, 0, 0, ()))
    writer.flush(1)
    reader.committed(1)
    assert reader.backlog().epochs == 1
    batch = reader.next_batch(100, 10)
    assert batch is not None and not batch.empty


def test_an_epoch_larger_than_the_batch_is_delivered_whole() -> None:
    writer, reader, _ = log()
    for part in range(3):
        writer.write_chunk(chunk(1, 100 * part, rows=50))
    writer.flush(1)
    reader.committed(1)
    batch = reader.next_batch(10, 1)
    assert batch is not None and batch.rows == 150


def test_nothing_is_read_before_its_checkpoint_has_committed() -> None:
    writer, reader, _ = log()
    writer.write_chunk(chunk(1, 1))
    writer.flush(1)
    assert reader.next_batch(10, 10) is None


def rows(count: int) -> pa.Table:
    return pa.table({"id": pa.array(range(count), pa.int64())})


def test_rows_above_the_bound_are_held_as_references_only() -> None:
    writer, _, buffer = log(max_rows=10, max_bytes=1_000, max_epochs=10)
    first = writer.write_chunk(chunk(1, 1, rows=8))
    second = writer.write_chunk(chunk(1, 100, rows=8))
    writer.flush(1)
    assert buffer.keep(first, rows(8))
    assert not buffer.keep(second, rows(8))
    assert buffer.rows_of(first) is not None
    assert buffer.rows_of(second) is None
    buffer.forget(1)
    assert (buffer.resident_rows, buffer.resident_bytes) == (0, 0)


def test_bytes_bound_the_buffer_as_rows_do() -> None:
    writer, _, buffer = log(max_rows=1_000, max_bytes=60, max_epochs=10)
    first = writer.write_chunk(chunk(1, 1, rows=8))
    writer.flush(1)
    assert not buffer.keep(first, rows(8))


def test_rows_that_were_read_while_their_epoch_was_truncated_are_not_kept() -> None:
    writer, _, buffer = log()
    first = writer.write_chunk(chunk(1, 1, rows=8))
    writer.flush(1)
    buffer.forget(1)
    assert not buffer.keep(first, rows(8))
    assert buffer.resident_rows == 0


def test_truncating_backwards_is_an_error() -> None:
    state = LogStoreState.starting_at(5)
    with pytest.raises(ValueError, match="back"):
        state.truncated(TruncateOffset.barrier(4))


def test_truncating_beyond_what_was_read_is_an_error() -> None:
    _, reader, _ = log()
    with pytest.raises(ValueError, match="read only"):
        reader.truncate(TruncateOffset.barrier(1))


def test_a_chunk_of_a_sealed_epoch_is_refused() -> None:
    writer, _, _ = log()
    writer.flush(1)
    with pytest.raises(ValueError, match="sealed"):
        writer.write_chunk(chunk(1, 1))


def test_rewind_to_an_epoch_that_is_no_longer_retained_is_an_error() -> None:
    _, reader, _ = log()
    with pytest.raises(ValueError, match="retained"):
        reader.rewind_to(0, retained_after=1)


def test_truncation_of_some_vnodes_leaves_the_others_where_they_are() -> None:
    state = LogStoreState.starting_at(1).truncated(TruncateOffset.barrier(3), vnodes=frozenset({4}))
    assert state.offset_of(4) == TruncateOffset.barrier(3)
    assert state.offset_of(5) == TruncateOffset.barrier(1)
    assert LogStoreState.from_dict(state.as_dict()) == state
    assert state.truncated(TruncateOffset.barrier(3)).per_vnode is None


def test_state_of_version_1_is_migrated() -> None:
    assert LogStoreState.from_dict({"epoch": 7, "seq": None}).truncated_to == TruncateOffset.barrier(7)


def test_two_readers_of_one_log_truncate_independently() -> None:
    buffers = [LogBuffer(0), LogBuffer(0)]
    readers = [LogStoreReader(LogStoreState.starting_at(0), NoHistory(), b) for b in buffers]  # type: ignore[arg-type]
    for buffer in buffers:
        writer = LogStoreWriter(buffer, 0)
        writer.write_chunk(chunk(1, 1))
        writer.flush(1)
    for reader in readers:
        reader.committed(1)
    batch = readers[0].next_batch(10, 10)
    assert batch is not None
    readers[0].delivered(batch)
    assert [r.backlog().rows for r in readers] == [0, 1]


def test_backoff_doubles_up_to_thirty_seconds_and_is_fresh_after_a_minute_of_running() -> None:
    now = [0.0]
    backoff = Backoff(lambda: now[0], random.Random(1))
    delays = [backoff.failed() for _ in range(8)]
    for delay, full in zip(delays, [1, 2, 4, 8, 16, 30, 30, 30], strict=True):
        assert full / 2 <= delay <= full
    backoff.started()
    now[0] += 59
    assert backoff.failed() > 14
    backoff.started()
    now[0] += 61
    assert backoff.failed() <= 1


def test_delivered_to_moves_over_epochs_without_changes() -> None:
    def delivered_to(state: LogStoreState) -> int | None:
        found: int | None = log_store_row("s", Backlog(), state)["delivered_to"]
        return found

    state = LogStoreState.starting_at(0)
    assert delivered_to(state) is None  # the snapshot is still owed
    state = LogStoreState.starting_at(5).delivered(5)
    assert delivered_to(state.truncated(TruncateOffset.barrier(9))) == 9
    assert delivered_to(state.truncated(TruncateOffset.chunk(9, 1))) == 5
