"""The log store against a plain model, with a crash possible between any two steps.

The model is a list of the rows of each epoch. The world around the log store is played here: a meta store (committed
epochs and the stored state) that survives a crash, and a target that keeps what was committed to it and the epoch, in
one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headwater.logstore import (
    Backlog,
    ChunkRef,
    LogBatch,
    LogBuffer,
    LogEpoch,
    LogStoreReader,
    LogStoreState,
    LogStoreWriter,
    TruncateOffset,
)


@dataclass
class Meta:
    """What survives: committed epochs with their chunks, the stored state, the segments that were not collected."""

    epochs: list[LogEpoch] = field(default_factory=list)
    committed_to: int = 0
    state: dict[str, object] = field(default_factory=lambda: LogStoreState.starting_at(0).as_dict())
    collected_to: int = 0

    def epochs_in(self, after: int, up_to: int) -> list[LogEpoch]:
        assert after >= self.collected_to, "the reader wants segments that were garbage collected"
        found = [e for e in self.epochs if after < e.epoch <= up_to and e.chunks]
        return sorted(found, key=lambda e: e.epoch)


@dataclass
class MetaHistory:
    meta: Meta

    def epochs(self, after: int, up_to: int, limit: int) -> Sequence[LogEpoch]:
        return self.meta.epochs_in(after, up_to)[:limit]

    def backlog(self, after: int, up_to: int) -> Backlog:
        some = self.meta.epochs_in(after, up_to)
        return Backlog(sum(e.rows for e in some), sum(e.bytes for e in some), len(some))


class LogStoreMachine(RuleBasedStateMachine):
    """Rules are the steps; `crash` may come between any two of them."""

    @initialize(rows=st.integers(1, 40), epochs=st.integers(1, 6))
    def begin(self, rows: int, epochs: int) -> None:
        self.bounds = {"max_rows": rows, "max_bytes": 10_000, "max_epochs": epochs}
        self.meta = Meta()
        self.model: dict[int, int] = {}
        self.target: list[int] = []
        self.target_epoch: int | None = None
        self.next_epoch = 1
        self.next_seq = 0
        self.restart()

    def restart(self) -> None:
        state = LogStoreState.from_dict(self.meta.state)
        self.buffer = LogBuffer(self.meta.committed_to, **self.bounds)
        self.reader = LogStoreReader(state, MetaHistory(self.meta), self.buffer)
        self.writer = LogStoreWriter(self.buffer, self.meta.committed_to)
        self.sealed: list[LogEpoch] = []
        self.batch: LogBatch | None = None
        self.reader.start_from(self.target_epoch)
        self.next_epoch = max(self.next_epoch, self.meta.committed_to + 1)
        self.written: dict[int, int] = {}
        self.chunks: list[ChunkRef] = []

    @rule(rows=st.integers(0, 30))
    def write(self, rows: int) -> None:
        chunk = ChunkRef(self.next_epoch, self.next_seq, self.next_seq + rows, rows, rows * 10, (f"s{self.next_seq}",))
        self.chunks.append(self.writer.write_chunk(chunk))
        self.next_seq += rows + 1
        self.written[self.next_epoch] = self.written.get(self.next_epoch, 0) + rows

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def hold_rows(self, data: st.DataObject) -> None:
        """Rows are read beside everything else: their epoch may be truncated by then, or be out of the buffer."""
        chunk = data.draw(st.sampled_from(self.chunks))
        if self.buffer.keep(chunk, pa.table({"epoch": pa.array([chunk.epoch] * chunk.rows, pa.int64())})):
            assert chunk.epoch > self.buffer.complete_after

    @rule()
    def barrier(self) -> None:
        self.sealed.append(self.writer.flush(self.next_epoch))
        self.next_epoch += 1

    @precondition(lambda self: self.sealed)
    @rule()
    def checkpoint(self) -> None:
        self.meta.epochs += self.sealed
        self.meta.committed_to = self.sealed[-1].epoch
        for epoch in self.sealed:
            self.model[epoch.epoch] = self.written.get(epoch.epoch, 0)
        self.sealed = []
        self.meta.state = self.reader.state.as_dict()
        self.reader.committed(self.meta.committed_to)
        self.meta.collected_to = self.reader.forget(LogStoreState.from_dict(self.meta.state))

    @precondition(lambda self: self.batch is None)
    @rule(rows=st.integers(1, 50), epochs=st.integers(1, 5))
    def read(self, rows: int, epochs: int) -> None:
        self.batch = self.reader.next_batch(rows, epochs)
        if self.batch is not None:
            assert self.batch.to_epoch > self.batch.from_epoch
            with_rows = {r.epoch for r in self.batch.refs}
            assert len(with_rows) <= epochs and (self.batch.rows <= rows or len(with_rows) == 1)

    @precondition(lambda self: self.batch is None and self.meta.committed_to > self.reader.read_to)
    @rule(data=st.data())
    def read_as_it_was_begun(self, data: st.DataObject) -> None:
        """A range that is partly in the target is read up to its end, however large, and no further."""
        end = data.draw(st.integers(self.reader.read_to + 1, self.meta.committed_to))
        self.batch = self.reader.next_batch(1 << 62, 1 << 62, end)
        assert self.batch is not None and self.batch.to_epoch == end
        assert self.batch.rows == sum(r for e, r in self.model.items() if self.batch.from_epoch < e <= end)

    @rule()
    def migrate_from_version_1(self) -> None:
        """The stored state is one of an older release: it says only how far the log is truncated."""
        offset = LogStoreState.from_dict(self.meta.state).truncated_to
        self.meta.state = {"epoch": offset.epoch, "seq": offset.chunk_id}

    @precondition(lambda self: self.batch is not None and not self.batch.empty)
    @rule()
    def target_commits(self) -> None:
        assert self.batch is not None
        if self.target_epoch is not None and self.target_epoch >= self.batch.to_epoch:
            return
        assert self.target_epoch is None or self.target_epoch <= self.batch.from_epoch
        for ref in self.batch.refs:
            held = self.buffer.rows_of(ref)
            self.target += [ref.epoch] * ref.rows if held is None else held.column("epoch").to_pylist()
        self.target_epoch = self.batch.to_epoch

    @precondition(
        lambda self: self.batch is not None and (self.batch.empty or (self.target_epoch or 0) >= self.batch.to_epoch)
    )
    @rule()
    def note(self) -> None:
        assert self.batch is not None
        self.reader.delivered(self.batch)
        self.batch = None

    @precondition(lambda self: self.batch is not None and (self.target_epoch or 0) < self.batch.to_epoch)
    @rule()
    def fail(self) -> None:
        self.reader.rewind()
        self.batch = None

    @rule()
    def crash(self) -> None:
        self.restart()

    @invariant()
    def target_has_each_change_once(self) -> None:
        if not hasattr(self, "meta"):
            return
        wanted = [e for e, rows in sorted(self.model.items()) if e <= (self.target_epoch or 0) for _ in range(rows)]
        assert self.target == wanted

    @invariant()
    def nothing_is_forgotten_before_the_target_has_it(self) -> None:
        if not hasattr(self, "meta"):
            return
        owed = [e for e, rows in self.model.items() if rows and e > (self.target_epoch or 0)]
        assert all(self.meta.collected_to < e for e in owed)
        assert all(self.reader.state.truncated_to.epoch < e for e in owed)

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "meta"):
            assert 0 <= self.buffer.resident_rows <= self.bounds["max_rows"]
            assert 0 <= self.buffer.resident_bytes <= self.bounds["max_bytes"]
            assert len(self.buffer) <= self.bounds["max_epochs"]

    @invariant()
    def backlog_is_what_is_owed(self) -> None:
        if hasattr(self, "meta"):
            after = self.reader.state.truncated_to.epoch
            assert self.reader.backlog().rows == sum(r for e, r in self.model.items() if e > after)


TestLogStore = LogStoreMachine.TestCase
TestLogStore.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

offsets = st.builds(TruncateOffset, st.integers(0, 5), st.one_of(st.none(), st.integers(0, 3)))


@settings(deadline=None)
@given(offsets, offsets)
def test_offsets_are_ordered_as_chunks_then_their_barrier(a: TruncateOffset, b: TruncateOffset) -> None:
    plain = lambda o: (o.epoch, float("inf") if o.chunk_id is None else o.chunk_id)  # noqa: E731
    assert (a < b) == (plain(a) < plain(b))
    assert (a == b) == (plain(a) == plain(b))
    assert TruncateOffset.from_json(a.as_json()) == a


EVERY = frozenset(range(8))


@settings(deadline=None)
@given(st.data())
def test_of_a_batch_that_is_there_in_part_only_the_other_vnodes_are_read_again(data: st.DataObject) -> None:
    """Several writers publish a batch, each for some vnodes; engines die in between, and others have more writers."""
    meta = Meta(committed_to=9)
    meta.epochs = [LogEpoch(e, (ChunkRef(e, 0, 9, 10, 1, ("s",)),)) for e in data.draw(st.sets(st.integers(1, 9)))]
    begun = data.draw(st.integers(1, 9))
    target: list[tuple[int, int]] = []
    landed: frozenset[int] = frozenset()  # what the target says of the range under way
    while len(landed) < len(EVERY):
        reader = LogStoreReader(LogStoreState.from_dict(meta.state), MetaHistory(meta), LogBuffer(9), vnode_count=8)
        assert reader.state.reached(begun) <= landed, "the log knows more than the target"
        reader.set_partial(begun, landed)
        batch = reader.next_batch(1 << 62, 1 << 62, begun)
        assert batch is not None and (batch.from_epoch, batch.to_epoch) == (0, begun)
        assert batch.empty or (batch.vnodes or EVERY) == EVERY - landed == (reader.pending(begun) or EVERY)
        if data.draw(st.booleans()):
            meta.state = reader.state.as_dict()  # a checkpoint; without one the next engine asks the target alone
        writers = data.draw(st.integers(1, 9))
        for writer in data.draw(st.sets(st.integers(0, writers - 1), min_size=1)):
            mine = {v for v in EVERY - landed if v % writers == writer}
            target += [(ref.epoch, v) for ref in batch.refs for v in mine & (ref.vnodes or EVERY)]
            landed |= mine
    reader = LogStoreReader(LogStoreState.from_dict(meta.state), MetaHistory(meta), LogBuffer(9), vnode_count=8)
    reader.start_from(begun)
    assert reader.state.per_vnode is None and reader.pending(begun) is None
    while (batch := reader.next_batch(25, 2)) is not None:
        assert batch.vnodes is None
        target += [(ref.epoch, v) for ref in batch.refs for v in EVERY]
        reader.delivered(batch)
    assert sorted(target) == [(e.epoch, v) for e in sorted(meta.epochs, key=lambda e: e.epoch) for v in sorted(EVERY)]


def test_a_batch_is_of_one_set_of_vnodes() -> None:
    meta = Meta(committed_to=9)
    meta.epochs = [LogEpoch(e, (ChunkRef(e, 0, 9, 10, 1, ("s",)),)) for e in (1, 2, 3)]
    reader = LogStoreReader(LogStoreState.starting_at(0), MetaHistory(meta), LogBuffer(9), vnode_count=8)
    reader.set_partial(2, frozenset({1, 2}))
    batches = [reader.next_batch(1_000, 1_000), reader.next_batch(1_000, 1_000)]
    assert [(b.to_epoch, b.vnodes) for b in batches if b is not None] == [(2, EVERY - {1, 2}), (9, None)]
