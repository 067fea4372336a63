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
    reassign,
)
from headwater.logstore.entries import (
    BARRIERS,
    Entry,
    EntryOp,
    aligned,
    cut,
    decode,
    encode,
    encode_v1,
    migrate,
    read_any,
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
        return [e for e in self.epochs if after < e.epoch <= up_to and e.chunks]


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


rows = st.builds(
    Entry,
    st.integers(0, 2**62),
    st.integers(0, 2**31 - 1),
    st.integers(0, 255),
    st.sampled_from([o for o in EntryOp if o not in BARRIERS]),
    st.binary(max_size=20),
)
barriers = st.builds(Entry, st.integers(0, 2**62), st.none(), st.integers(0, 255), st.sampled_from(sorted(BARRIERS)))


@settings(deadline=None)
@given(st.lists(st.one_of(rows, barriers), max_size=20))
def test_v2_keeps_every_entry_and_its_order(entries: list[Entry]) -> None:
    stored = [encode(e) for e in entries]
    assert [decode(k, v) for k, v in stored] == entries
    by_key = sorted(zip((k for k, _ in stored), entries, strict=True), key=lambda p: p[0])
    assert [(e.vnode, *e.order) for _, e in by_key] == sorted((e.vnode, *e.order) for e in entries)


@settings(deadline=None)
@given(st.lists(st.one_of(rows, barriers).filter(lambda e: e.op is not EntryOp.CHUNK), max_size=20), st.data())
def test_v1_is_read_and_migrated_also_after_an_interruption(entries: list[Entry], data: st.DataObject) -> None:
    stored = [encode_v1(e) for e in entries]
    assert [read_any(k, v) for k, v in stored] == entries
    done = data.draw(st.integers(0, len(stored)))
    half = [*migrate(stored[:done]), *stored[done:]]
    assert [decode(k, v) for k, v in migrate(half)] == entries


@settings(deadline=None)
@given(st.lists(st.sampled_from(["row", "pair", "barrier"]), max_size=30), st.integers(1, 5))
def test_update_pairs_are_never_cut_apart(kinds: list[str], max_rows: int) -> None:
    entries: list[Entry] = []
    epoch, seq = 1, 0
    for kind in kinds:
        if kind == "barrier":
            entries.append(Entry(epoch, None, 0, EntryOp.BARRIER))
            epoch, seq = epoch + 1, 0
            continue
        ops = [EntryOp.INSERT] if kind == "row" else [EntryOp.UPDATE_DELETE, EntryOp.UPDATE_INSERT]
        for op in ops:
            entries.append(Entry(epoch, seq, 0, op))
            seq += 1
    pieces = list(cut(entries, max_rows))
    assert [e for p in pieces for e in p] == entries
    assert all(p[-1].op is not EntryOp.UPDATE_DELETE for p in pieces)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), max_size=30), st.integers(1, 6), st.data())
def test_vnodes_are_aligned_on_barriers(written: list[tuple[int, int]], last: int, data: st.DataObject) -> None:
    starts = [data.draw(st.integers(1, last)) for _ in range(4)]
    closed = [data.draw(st.integers(s - 1, last)) for s in starts]
    logs: list[list[Entry]] = []
    for vnode in range(4):
        mine = sorted(e for e, v in written if v == vnode and e >= starts[vnode])
        log: list[Entry] = []
        for epoch in range(starts[vnode], last + 1):
            log += [Entry(epoch, i, vnode, EntryOp.INSERT) for i in range(mine.count(epoch))]
            if epoch > closed[vnode]:
                break
            log.append(Entry(epoch, None, vnode, EntryOp.CHECKPOINT_BARRIER))
        logs.append(log)
    for epoch, entries in aligned(logs):
        assert all(closed[v] >= epoch for v in range(4) if logs[v] and logs[v][0].epoch <= epoch)
        rows_of_epoch = [e for log in logs for e in log if e.epoch == epoch and e.seq_id is not None]
        assert entries == sorted(rows_of_epoch, key=lambda e: e.order)


vnode_sets = st.frozensets(st.integers(0, 7), min_size=1)


@settings(deadline=None)
@given(st.data())
def test_a_vnode_change_loses_nothing_and_repeats_nothing(data: st.DataObject) -> None:
    every = frozenset(range(8))
    owned = data.draw(vnode_sets)
    somewhere = offsets.filter(lambda o: o.epoch > 0)
    parts = [(owned, data.draw(somewhere)), (every - owned, data.draw(somewhere))]
    states = [(v, LogStoreState(o)) for v, o in parts]
    mine = data.draw(vnode_sets)
    state = LogStoreState.from_dict(reassign(states, mine).as_dict())
    meta = Meta(committed_to=9)
    meta.epochs = [
        LogEpoch(e, tuple(ChunkRef(e, i, i, 1, 1, ("s",), chunk_id=i) for i in range(4))) for e in range(1, 7)
    ]
    buffer = LogBuffer(9)
    batch = LogStoreReader(state, MetaHistory(meta), buffer, vnodes=mine).next_batch(10_000, 10_000)
    assert batch is not None
    got = {(r.epoch, r.chunk_id, v) for r in batch.refs for v in r.vnodes or ()}
    owner = {v: o for vs, o in parts for v in vs}
    wanted = {
        (e.epoch, c.chunk_id, v)
        for e in meta.epochs
        for c in e.chunks
        for v in mine
        if TruncateOffset.chunk(e.epoch, c.chunk_id) > owner[v]
    }
    assert got == wanted
