"""The change stream's format: pgoutput, protocol version 1, values as text; from spool bytes to Arrow.

A spool holds frames, little endian: `u32 length of the message | u64 LSN of the message | message`, whole transactions
one after the other. A message (big endian) begins with its kind:

    B  begin: final LSN, commit time, xid       R  relation: oid, schema, name, replica identity, columns
    C  commit: flags, LSN, end LSN, time        I  insert: oid, N tuple
    T  truncate: count, options, oids           U  update: oid, [K or O tuple], N tuple
    M, O, Y  message, origin, type: ignored     D  delete: oid, K or O tuple

A K tuple has the columns of the replica identity, an O tuple all (REPLICA IDENTITY FULL). A value is NULL, unchanged
TOAST (not sent), or text, which `columns.py` decodes exactly as that of the snapshot.

`scan_frames` finds frames and transactions, `decode_events` decodes the rows of one relation (`decode_range` all of
them, over changes of the table's shape, in bounded batches), `StreamScanner` tells the reader of a slot where
transactions end, without looking at rows. Filling unchanged TOAST values from our own table, and what an event means
for a split, are the callers'.

A Relation message comes once per session, before the first change of its table, and again after a change of the table's
shape. So a piece of the spool need not contain it: the reader keeps it (`StreamScanner.relations`), and the caller of
`decode_events` says which one was in force at the beginning. `layouts` cuts a piece where the shape changes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.connectors.postgres import tuplescan as scan
from headwater.connectors.postgres.columns import decode_column
from headwater.connectors.postgres.rowhash import row_ids
from headwater.connectors.postgres.shape import (
    Relation,
    bind,
    identity_missing,
    parse_relation,
    shape_changed,
)
from headwater.connectors.postgres.textscan import Bytes, Longs
from headwater.connectors.postgres.tuplescan import ABSENT, PG_EPOCH_MICROS, UNCHANGED
from headwater.connectors.postgres.types import ColumnPlan
from headwater.errors import DefiniteError
from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, ROW_ID

FRAME_HEADER: Final = struct.Struct("<IQ")
INSERT: Final = ord("I")
UPDATE: Final = ord("U")
DELETE: Final = ord("D")
_BEGIN: Final = struct.Struct("!cQqI")
_COMMIT: Final = struct.Struct("!cBQQq")

ORDER: Final = "_hw_order"
XID: Final = "_hw_xid"
COMMIT_END_LSN: Final = "_hw_commit_end_lsn"
SIGN: Final = "_hw_sign"

WINDOW_BYTES: Final = 64 << 20
"""How much of a piece `decode_range` decodes at once: bounds a task's memory, and keeps 32-bit offsets in reach."""


def spool_frame(lsn: int, message: bytes) -> bytes:
    """One frame of the spool."""
    return FRAME_HEADER.pack(len(message), lsn) + message


@dataclass(frozen=True, slots=True)
class Transactions:
    """The transactions of a piece of the spool, in commit order; `first` and `last` are frames, half open."""

    xid: NDArray[np.uint32]
    commit_end_lsn: NDArray[np.uint64]
    commit_micros: NDArray[np.int64]
    first: Longs
    last: Longs


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a piece of the spool: where each message is, its kind, its relation (0: none), its transaction.

    `transaction` is an index into `transactions`, -1 for a frame outside of any (a Relation that the reader put first).
    """

    data: Bytes
    starts: Longs
    lengths: Longs
    lsns: NDArray[np.uint64]
    kinds: NDArray[np.uint8]
    relations: NDArray[np.uint32]
    transaction: Longs
    transactions: Transactions

    def message(self, frame: int) -> bytes:
        start = int(self.starts[frame])
        return bytes(self.data[start : start + int(self.lengths[frame])])


def scan_frames(buf: Any) -> Frames:
    """Find all frames and transactions of a piece of the spool, which must hold whole transactions."""
    data = np.frombuffer(buf, np.uint8)
    data.flags.writeable = False  # as in `decode_column`
    count, commits = scan.count_frames(data)
    if count < 0:
        raise _corrupt("a frame is cut off")
    starts, lengths, lsns, relations, transaction = (np.zeros(count, np.int64) for _ in range(5))
    kinds = np.zeros(count, np.uint8)
    tx = np.zeros((5, commits), np.int64)
    fault = scan.fill_frames(data, starts, lengths, lsns, kinds, relations, transaction, tx)
    if fault == 1:
        raise _corrupt("a transaction is cut off")
    if fault == 2:
        raise _corrupt("a message has an unknown kind or is too short")
    transactions = Transactions(tx[0].astype(np.uint32), tx[1].view(np.uint64), tx[2], tx[3], tx[4])
    return Frames(
        data, starts, lengths, lsns.view(np.uint64), kinds, relations.astype(np.uint32), transaction, transactions
    )


def _corrupt(what: str) -> DefiniteError:
    return DefiniteError(
        "SPOOL_CORRUPT",
        f"the spool cannot be read: {what}",
        hint="its tables are copied anew; look at the disk",
    )


def layouts(frames: Frames, initial: Relation) -> list[tuple[Relation, int, int]]:
    """The shapes of one table over a piece of the spool: (relation, first frame, last frame exclusive)."""
    here = (frames.kinds == ord("R")) & (frames.relations == initial.oid)
    cuts: list[tuple[Relation, int]] = [(initial, 0)]
    for frame in np.flatnonzero(here):
        relation = parse_relation(frames.message(int(frame)))
        if relation != cuts[-1][0]:
            cuts.append((relation, int(frame)))
    ends = [start for _, start in cuts[1:]] + [int(frames.kinds.size)]
    return [(relation, start, end) for (relation, start), end in zip(cuts, ends, strict=True) if start < end]


@dataclass(frozen=True, slots=True)
class Truncates:
    """The TRUNCATEs of one relation."""

    order: Longs
    xid: NDArray[np.uint32]
    commit_end_lsn: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The row events of one relation, in order.

    `order` is twice the frame's number in its piece (so that both halves of a change of key have their own), and that
    of `truncates` likewise. `new` has NULLs for a delete and for a value that was not sent (`unchanged` says which).
    `old` has the key columns in key order as they were before the event, or all columns of a table without a key;
    NULL where the stream has no old tuple, that is for inserts, and for updates that did not change the key.
    """

    op: NDArray[np.uint8]
    new: pa.RecordBatch
    old: pa.RecordBatch
    key_changed: NDArray[np.bool_]
    unchanged: dict[str, NDArray[np.bool_]]
    order: Longs
    xid: NDArray[np.uint32]
    commit_end_lsn: NDArray[np.uint64]
    truncates: Truncates
    row_ids: tuple[pa.Array, pa.Array] | None = None
    """Of a table without a key: what each row is after the event and before it (`rowhash.py`)."""

    def __len__(self) -> int:
        return int(self.op.size)

    def changes(self) -> Changes:
        """Upserts and deletes; an update that changed the key is a delete of the old and an upsert of the new one."""
        upserts = np.flatnonzero(self.op != DELETE)
        deletes = np.flatnonzero((self.op == DELETE) | self.key_changed)
        order = np.concatenate([self.order[deletes], self.order[upserts] + self.key_changed[upserts]])
        place = np.argsort(order, kind="stable")
        source = np.concatenate([deletes, upserts])[place]
        is_delete = (np.arange(place.size) < deletes.size)[place]
        new, old = self.new.take(pa.array(source)), self.old.take(pa.array(source))
        from_old = pa.array(is_delete)
        was = pa.array(is_delete | self.key_changed[source])
        columns = {
            name: pc.if_else(from_old, old.column(name) if name in old.schema.names else None, new.column(name))
            for name in new.schema.names
        }
        columns[OP] = pa.array(np.where(is_delete, OP_DELETE, OP_UPSERT).astype(np.int8))
        columns[ORDER] = pa.array(order[place])
        columns[XID] = pa.array(self.xid[source].astype(np.int64))
        columns[COMMIT_END_LSN] = pa.array(self.commit_end_lsn[source].astype(np.int64))
        before = {name: pc.if_else(was, old.column(name), new.column(name)) for name in old.schema.names}
        unchanged = {name: mask[source] & ~is_delete for name, mask in self.unchanged.items()}
        return Changes(pa.RecordBatch.from_pydict(columns), unchanged, pa.RecordBatch.from_pydict(before))

    def arrivals(self) -> pa.RecordBatch:
        """Of a table without a key: a row for each that came (`_hw_sign` 1) and each that went (-1, only its id)."""
        assert self.row_ids is not None
        came, went = np.flatnonzero(self.op != DELETE), np.flatnonzero(self.op != INSERT)
        source = np.concatenate([came, went])
        is_new = pa.array(np.arange(source.size) < came.size)
        new = self.new.take(pa.array(source))
        columns = {name: pc.if_else(is_new, new.column(name), None) for name in new.schema.names}
        columns[ROW_ID] = pa.concat_arrays([self.row_ids[0].take(pa.array(came)), self.row_ids[1].take(pa.array(went))])
        columns[SIGN] = pa.array(np.repeat(np.array([1, -1], np.int64), [came.size, went.size]))
        columns[ORDER] = pa.array(self.order[source])
        columns[XID] = pa.array(self.xid[source].astype(np.int64))
        columns[COMMIT_END_LSN] = pa.array(self.commit_end_lsn[source].astype(np.int64))
        return pa.RecordBatch.from_pydict(columns)


@dataclass(frozen=True, slots=True)
class Changes:
    """`rows`: the columns and `_op`, `_hw_order`, `_hw_xid`, `_hw_commit_end_lsn`; a delete has its key only.

    `unchanged` says which values of an upsert must be taken from the row as it was, which is found under `before`.
    """

    rows: pa.RecordBatch
    unchanged: dict[str, NDArray[np.bool_]]
    before: pa.RecordBatch


def decode_events(
    buf: Any,
    relation: Relation,
    plans: Sequence[ColumnPlan],
    *,
    frames: Frames | None = None,
    first: int = 0,
    last: int | None = None,
    row_id: bool = False,
    tolerant: bool = False,
    wanted: NDArray[np.bool_] | None = None,
) -> EventBatch:
    """Decode the events of one relation in the frames `[first, last)` of a piece of the spool.

    `relation` is the shape in force; a piece in which it changes must be cut (`layouts`). `plans` are the columns
    wanted, by name, the key columns with their `key_position`. `frames` saves scanning a piece once for each table.
    `tolerant`: a column that the shape does not have is NULL, unless it is part of the key. `wanted` says of each
    transaction whether its events are. With `row_id`, for a table without a key, rows are identified instead of decoded
    as they were (`arrivals`).
    """
    frames = scan_frames(buf) if frames is None else frames
    last = int(frames.kinds.size) if last is None else last
    window = np.arange(first, last)
    kinds = frames.kinds[first:last]
    mine = frames.relations[first:last] == relation.oid
    _check_shape(frames, relation, window[mine & (kinds == ord("R"))])
    events = window[mine & ((kinds == INSERT) | (kinds == UPDATE) | (kinds == DELETE))]
    if wanted is not None:
        events = events[wanted[frames.transaction[events]]]
    ops = frames.kinds[events]
    # A shape without events binds nobody: it may be an old one, of before the table was captured.
    changing = bool((ops != INSERT).any())
    slots = bind(relation, plans, changing=changing, tolerant=tolerant) if events.size else np.empty(0, np.int64)
    keys = sorted((p for p in plans if p.key_position is not None), key=lambda p: p.key_position or 0)
    is_key = np.array([p.key_position is not None or not keys for p in plans], np.bool_)
    rows = _Rows.empty(len(plans), events.size)
    key_changed = _scan(frames, events, relation, slots, is_key, bool(keys), rows)
    new = [decode_column(p, frames.data, rows.new_starts[i], rows.new_lengths[i]) for i, p in enumerate(plans)]
    index = {p.name: i for i, p in enumerate(plans)}
    old_plans = keys or ([] if row_id else list(plans))
    old = [
        decode_column(p, frames.data, rows.old_starts[index[p.name]], rows.old_lengths[index[p.name]])
        for p in old_plans
    ]
    tx = frames.transaction[events]
    return EventBatch(
        op=ops,
        new=pa.RecordBatch.from_arrays(new, names=[p.name for p in plans]),
        old=pa.RecordBatch.from_arrays(old, names=[p.name for p in old_plans]),
        key_changed=key_changed,
        unchanged={p.name: rows.new_lengths[i] == UNCHANGED for i, p in enumerate(plans)},
        order=events * 2,
        xid=frames.transactions.xid[tx],
        commit_end_lsn=frames.transactions.commit_end_lsn[tx],
        truncates=_truncates(frames, relation.oid, window[kinds == ord("T")]),
        row_ids=_row_ids(frames, rows) if row_id else None,
    )


def _row_ids(frames: Frames, rows: _Rows) -> tuple[pa.Array, pa.Array]:
    count = rows.new_starts.shape[1]
    after = row_ids(frames.data, list(rows.new_starts), list(rows.new_lengths), count)
    return after, row_ids(frames.data, list(rows.old_starts), list(rows.old_lengths), count)


def decode_range(
    frames: Frames, oid: int, plans: Sequence[ColumnPlan], *, initial: bytes | None, window_bytes: int = WINDOW_BYTES
) -> Iterator[EventBatch]:
    """Decode all events of one table in a piece of the spool, in order, in batches of bounded size.

    `initial` is the table's Relation message in force where the piece begins, None if there was none yet. A change of
    shape that leaves the wanted columns as they are (a new column) is followed; any other is an error. `order` counts
    over the whole piece, so batches of all tables can be merged by it.
    """
    here = np.flatnonzero((frames.kinds == ord("R")) & (frames.relations == oid))
    if initial is None and not here.size:
        return
    relation = parse_relation(frames.message(int(here[0])) if initial is None else initial)
    for shape, first, last in layouts(frames, relation):
        while first < last:
            cut = int(np.searchsorted(frames.starts, frames.starts[first] + window_bytes))
            end = min(max(cut, first + 1), last)
            batch = decode_events(None, shape, plans, frames=frames, first=first, last=end)
            if len(batch) or batch.truncates.order.size:
                yield batch
            first = end


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where the values of each plan's column are, (column, event); lengths may be UNCHANGED or ABSENT."""

    new_starts: Longs
    new_lengths: Longs
    old_starts: Longs
    old_lengths: Longs

    @classmethod
    def empty(cls, columns: int, events: int) -> _Rows:
        starts = [np.zeros((columns, events), np.int64) for _ in range(2)]
        lengths = [np.full((columns, events), ABSENT, np.int64) for _ in range(2)]
        return cls(starts[0], lengths[0], starts[1], lengths[1])


def _check_shape(frames: Frames, relation: Relation, announced: Longs) -> None:
    for frame in announced:
        if parse_relation(frames.message(int(frame))) != relation:
            raise shape_changed(relation, "its definition changes inside of this piece of the stream")


def _scan(
    frames: Frames, events: Longs, relation: Relation, slots: Longs, is_key: NDArray[np.bool_], keyed: bool, rows: _Rows
) -> NDArray[np.bool_]:
    """Find the values of all events; whether each changed its row's key."""
    old_kinds = np.zeros(events.size, np.uint8)
    starts, ends = frames.starts[events], frames.starts[events] + frames.lengths[events]
    bad = scan.scan_rows(
        frames.data,
        starts,
        ends,
        slots,
        rows.new_starts,
        rows.new_lengths,
        rows.old_starts,
        rows.old_lengths,
        old_kinds,
    )
    if bad == -2:
        raise shape_changed(relation, "its number of columns is another")
    if bad >= 0:
        raise _corrupt("a row's message is malformed")
    changed = np.zeros(events.size, np.bool_)
    lost = scan.settle_rows(
        frames.data, frames.kinds[events], old_kinds, is_key, keyed,
        rows.new_starts, rows.new_lengths, rows.old_starts, rows.old_lengths, changed,
    )  # fmt: skip
    if lost >= 0:
        raise identity_missing(relation, keyed=keyed)
    return changed


def _truncates(frames: Frames, oid: int, at: Longs) -> Truncates:
    """Which of the truncates at these frames name the relation. They are rare: plain Python."""
    wanted = struct.pack("!I", oid)
    hits = []
    for frame in at:
        oids = frames.message(int(frame))[6:]
        if wanted in (oids[i : i + 4] for i in range(0, len(oids), 4)):
            hits.append(int(frame))
    found = np.array(hits, np.int64)
    tx = frames.transaction[found]
    return Truncates(found * 2, frames.transactions.xid[tx], frames.transactions.commit_end_lsn[tx])


@dataclass(frozen=True, slots=True)
class TransactionBegin:
    """`final_lsn` is where the commit record begins."""

    xid: int
    final_lsn: int


@dataclass(frozen=True, slots=True)
class TransactionEnd:
    """`end_lsn` is where the commit record ends: the position that covers this transaction."""

    xid: int
    commit_lsn: int
    end_lsn: int
    commit_micros: int


@dataclass(slots=True)
class StreamScanner:
    """Follows the transactions of a live stream for the slot's reader; it never looks at rows.

    `relations` has the last Relation message of every table, by oid, for the reader to put at the head of a spool file.
    """

    open: TransactionBegin | None = None
    relations: dict[int, bytes] = field(default_factory=dict)

    def feed(self, message: bytes) -> TransactionBegin | TransactionEnd | None:
        """One message (the payload of an XLogData); what it begins or ends, if anything."""
        match message[0]:
            case 66:  # B
                if self.open is not None:
                    raise _protocol("a transaction begins inside of another")
                _, final_lsn, _, xid = _BEGIN.unpack_from(message)
                self.open = TransactionBegin(xid, final_lsn)
                return self.open
            case 67:  # C
                if self.open is None:
                    raise _protocol("a commit without its begin")
                _, _, commit_lsn, end_lsn, micros = _COMMIT.unpack_from(message)
                xid, self.open = self.open.xid, None
                return TransactionEnd(xid, commit_lsn, end_lsn, micros + PG_EPOCH_MICROS)
            case 82:  # R
                self.relations[int.from_bytes(message[1:5], "big")] = bytes(message)
        return None

    def feed_many(
        self, data: Bytes, starts: Longs, lengths: Longs
    ) -> list[tuple[int, TransactionBegin | TransactionEnd]]:
        """Messages `data[start : start + length]` in order; the numbers of those that begin or end a transaction."""
        kinds = data[starts]
        found = []
        for i in np.flatnonzero((kinds == 66) | (kinds == 67) | (kinds == 82)):
            event = self.feed(data[starts[i] : starts[i] + lengths[i]].tobytes())
            if event is not None:
                found.append((int(i), event))
        return found


def _protocol(what: str) -> DefiniteError:
    return DefiniteError("STREAM_PROTOCOL", f"the change stream is not as expected: {what}")
