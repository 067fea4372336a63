"""Log-store entries and their two formats.

    v2   key  = vnode u16 | epoch i64, sign flipped | seq flag u8, seq u32 | vnode u16         value = op u8 | vnode
    u16 | payload v1   key  = vnode u16 | epoch i64, sign flipped | seq flag u8, seq u32                     value =
    op u8 | payload

All numbers big endian, so that the byte order of keys is the order of entries. The seq flag is 0 for a row (its seq
follows) and 1 for a barrier (seq 0): barriers have no seq and come last in their epoch. Each key begins with the
vnode that it is stored under. v1 does not say which vnode a *row* belongs to, so one key may stand for a row of any
vnode; v2 repeats it behind the seq. v1 is read and migrated; only v2 is written. A payload is opaque: a row's
encoding, or for `CHUNK` the JSON of a reference to change-log segments (`chunk.py`).

A change that replaces a row is a pair UPDATE_DELETE, UPDATE_INSERT with neighbouring seqs of one epoch and vnode;
`cut` never separates the two.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

_V1_KEY: Final = struct.Struct(">HQBI")
_V2_KEY: Final = struct.Struct(">HQBIH")
_SIGN: Final = 1 << 63
_MAX_SEQ: Final = (1 << 31) - 1  # v1 and v2 store 31 bits; more rows in an epoch go by reference


class EntryOp(IntEnum):
    INSERT = 1
    DELETE = 2
    UPDATE_INSERT = 3
    UPDATE_DELETE = 4
    BARRIER = 5
    CHECKPOINT_BARRIER = 6
    CHUNK = 7  # v2 only: rows by reference


BARRIERS: Final = frozenset({EntryOp.BARRIER, EntryOp.CHECKPOINT_BARRIER})


@dataclass(frozen=True, slots=True)
class Entry:
    """One row, one reference, or one barrier of a vnode. `seq_id` is None exactly for barriers."""

    epoch: int
    seq_id: int | None
    vnode: int
    op: EntryOp
    payload: bytes = b""

    def __post_init__(self) -> None:
        if (self.seq_id is None) != (self.op in BARRIERS):
            raise ValueError(f"{self.op.name} with seq {self.seq_id}: barriers, and only they, have no seq")
        if self.seq_id is not None and not 0 <= self.seq_id <= _MAX_SEQ:
            raise ValueError(f"seq {self.seq_id} does not fit the format")

    @property
    def order(self) -> tuple[int, bool, int, int]:
        """Order over all vnodes: epoch, then seq with barriers last, then vnode."""
        return (self.epoch, self.seq_id is None, self.seq_id or 0, self.vnode)


def encode(entry: Entry) -> tuple[bytes, bytes]:
    """Key and value in format v2."""
    key = _V2_KEY.pack(entry.vnode, entry.epoch ^ _SIGN, entry.seq_id is None, entry.seq_id or 0, entry.vnode)
    return key, struct.pack(">BH", entry.op, entry.vnode) + entry.payload


def decode(key: bytes, value: bytes) -> Entry:
    """An entry of format v2."""
    stored, epoch, no_seq, seq, vnode = _V2_KEY.unpack(key)
    op, repeated = struct.unpack_from(">BH", value)
    if stored != vnode or repeated != vnode:
        raise ValueError("a v2 entry that names two vnodes")
    return Entry(epoch ^ _SIGN, None if no_seq else seq, vnode, EntryOp(op), value[3:])


def encode_v1(entry: Entry) -> tuple[bytes, bytes]:
    """Key and value in format v1, for tests and for going back to an older release."""
    if entry.op is EntryOp.CHUNK:
        raise ValueError("format v1 has no references")
    key = _V1_KEY.pack(entry.vnode, entry.epoch ^ _SIGN, entry.seq_id is None, entry.seq_id or 0)
    return key, bytes([entry.op]) + entry.payload


def decode_v1(key: bytes, value: bytes, vnode_of: Callable[[bytes], int] | None = None) -> Entry:
    """An entry of format v1. `vnode_of` finds a row's vnode from its payload; without it the stored-under vnode is
    taken.
    """
    stored, epoch, no_seq, seq = _V1_KEY.unpack(key)
    entry = Entry(epoch ^ _SIGN, None if no_seq else seq, stored, EntryOp(value[0]), value[1:])
    if vnode_of is None or entry.op in BARRIERS:
        return entry
    return replace(entry, vnode=vnode_of(entry.payload))


def format_of(key: bytes) -> int:
    """1 or 2, by the length of the key."""
    if len(key) == _V2_KEY.size:
        return 2
    if len(key) == _V1_KEY.size:
        return 1
    raise ValueError("not a key of a log-store entry")


def read_any(key: bytes, value: bytes, vnode_of: Callable[[bytes], int] | None = None) -> Entry:
    """An entry of either format."""
    return decode(key, value) if format_of(key) == 2 else decode_v1(key, value, vnode_of)


def migrate(
    stored: Iterable[tuple[bytes, bytes]], vnode_of: Callable[[bytes], int] | None = None
) -> Iterator[tuple[bytes, bytes]]:
    """Entries of either format as v2. Entries that are v2 already pass unchanged, so an interrupted migration goes
    on.
    """
    for key, value in stored:
        yield (key, value) if format_of(key) == 2 else encode(decode_v1(key, value, vnode_of))


def cut(entries: Sequence[Entry], max_rows: int) -> Iterator[Sequence[Entry]]:
    """Pieces of about `max_rows` entries: an update pair and an epoch's barrier rows stay with what they follow."""
    start = 0
    while start < len(entries):
        end = min(len(entries), start + max(1, max_rows))
        while end < len(entries) and _belongs(entries[end - 1], entries[end]):
            end += 1
        yield entries[start:end]
        start = end


def _belongs(left: Entry, right: Entry) -> bool:
    if right.op in BARRIERS and right.epoch == left.epoch:
        return True
    return left.op is EntryOp.UPDATE_DELETE and right.op is EntryOp.UPDATE_INSERT and left.epoch == right.epoch


def aligned(per_vnode: Sequence[Sequence[Entry]]) -> Iterator[tuple[int, list[Entry]]]:
    """Merge the vnodes' entries epoch by epoch: an epoch is given when the barrier of every started vnode is there.

    A vnode whose first entry is of a later epoch has not started yet and is not waited for. An epoch that some vnode
    has not closed ends the iteration: what follows is not complete yet.
    """
    cursors = [0] * len(per_vnode)
    while True:
        heads = [v[c].epoch for v, c in zip(per_vnode, cursors, strict=True) if c < len(v)]
        if not heads:
            return
        epoch = min(heads)
        rows: list[Entry] = []
        for i, entries in enumerate(per_vnode):
            end = cursors[i]
            while end < len(entries) and entries[end].epoch == epoch:
                end += 1
            taken = entries[cursors[i] : end]
            started = cursors[i] > 0 or bool(taken)
            if started and not (taken and taken[-1].op in BARRIERS):
                return
            rows += [e for e in taken if e.op not in BARRIERS]
            cursors[i] = end
        rows.sort(key=lambda e: e.order)
        yield epoch, rows
