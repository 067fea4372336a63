"""The spool's files: their layout, and the small functions that write and read one record of each.

    <directory>/
    ├── lock               held (flock) by the one writer
    ├── identity.json      whose stream this is (written by the connector's reader; system id, timeline, slot …)
    ├── position           the position up to which the stream is durable here, two alternating slots
    ├── relations          what describes tables in the stream, with the place from which each version is valid
    ├── 000000000001.spool frames of whole transactions, in commit order
    └── 000000000001.index one fixed-width record per transaction of that file

All numbers are little endian.

    frame     u32 length of the message | u64 LSN of the message | message
    index     u32 xid | u32 file | u64 commit end LSN | u64 start byte | u64 end byte | i64 commit time, µs since 1970
              | u32 crc32 of the 40 bytes before | u32 crc32 of the transaction's frames, 0: not known  = 48 bytes
    position  2 × ( u64 LSN | u64 sequence | u32 crc32 | 12 zero bytes )   the valid one with the higher sequence holds
    relations u32 length of the message | u32 kind | u32 oid | u32 file | u64 byte offset | u64 LSN | u32 crc32 of the
              32 bytes before and the message | message

A crash can leave bytes after the last record of an index, frames after the last indexed transaction, and relation
records behind it; the writer cuts all of them off when it opens the spool. Nothing before them is ever changed.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

FRAME: Final = struct.Struct("<IQ")
INDEX_DTYPE: Final = np.dtype(
    [
        ("xid", "<u4"),
        ("file", "<u4"),
        ("end_lsn", "<u8"),
        ("start", "<u8"),
        ("end", "<u8"),
        ("commit_us", "<i8"),
        ("crc", "<u4"),
        ("data_crc", "<u4"),
    ]
)
INDEX_BODY: Final = struct.Struct("<IIQQQq")
INDEX_TAIL: Final = struct.Struct("<II")
_POSITION: Final = struct.Struct("<QQI12x")
_RELATION: Final = struct.Struct("<IIIIQQ")
_CRC: Final = struct.Struct("<I")

IndexArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, order=True)
class SpoolRange:
    """Bytes `[start, end)` of one spool file: whole transactions, the first and last of which end at these LSNs."""

    file: int
    start: int
    end: int
    first_lsn: int
    last_lsn: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class RelationRecord:
    """One description message and the place in the spool from which it is valid."""

    kind: int
    oid: int
    file: int
    offset: int
    lsn: int
    message: bytes


def data_path(directory: Path, number: int) -> Path:
    return directory / f"{number:012d}.spool"


def index_path(directory: Path, number: int) -> Path:
    return directory / f"{number:012d}.index"


def file_numbers(directory: Path, suffix: str = "index") -> list[int]:
    names = (entry.name for entry in os.scandir(directory))
    return sorted(int(n[:12]) for n in names if n.endswith("." + suffix) and n[:12].isdigit())


def index_record(
    *, xid: int, file: int, end_lsn: int, start: int, end: int, commit_us: int, data_crc: int = 0
) -> bytes:
    body = INDEX_BODY.pack(xid, file, end_lsn, start, end, commit_us)
    return body + INDEX_TAIL.pack(zlib.crc32(body), data_crc)


def read_index(path: Path, *, skip: int = 0) -> IndexArray:
    """The whole records of an index file from record `skip` on; a torn last record is left out."""
    try:
        count = path.stat().st_size // INDEX_DTYPE.itemsize - skip
        if count <= 0:
            return np.empty(0, INDEX_DTYPE)
        return np.fromfile(path, INDEX_DTYPE, count=count, offset=skip * INDEX_DTYPE.itemsize)
    except FileNotFoundError:
        return np.empty(0, INDEX_DTYPE)


def index_ends(path: Path) -> IndexArray:
    """The first and the last whole record of an index file, or nothing."""
    try:
        with path.open("rb") as file:
            count = os.fstat(file.fileno()).st_size // INDEX_DTYPE.itemsize
            if not count:
                return np.empty(0, INDEX_DTYPE)
            first = file.read(INDEX_DTYPE.itemsize)
            file.seek((count - 1) * INDEX_DTYPE.itemsize)
            return np.frombuffer(first + file.read(INDEX_DTYPE.itemsize), INDEX_DTYPE)
    except FileNotFoundError:
        return np.empty(0, INDEX_DTYPE)


def valid_prefix(index: IndexArray) -> IndexArray:
    """The records before the first one whose checksum is wrong."""
    raw = memoryview(index.tobytes())
    size, body = INDEX_DTYPE.itemsize, INDEX_BODY.size
    for i, crc in enumerate(index["crc"].tolist()):
        if zlib.crc32(raw[i * size : i * size + body]) != crc:
            return index[:i]
    return index


def first_damaged(index: IndexArray, data: bytes, base: int) -> int | None:
    """The number of the first transaction whose frames (`data` begins at byte `base`) are not those that were written.

    A record without a checksum of its frames is of an older spool, and is taken as it is.
    """
    view = memoryview(data)
    for i, (start, end, crc) in enumerate(
        zip(index["start"].tolist(), index["end"].tolist(), index["data_crc"].tolist(), strict=True)
    ):
        if crc and zlib.crc32(view[start - base : end - base]) != crc:
            return i
    return None


def position_slot(lsn: int, sequence: int) -> tuple[bytes, int]:
    """The bytes of a position record, and where in the file they go."""
    crc = zlib.crc32(struct.pack("<QQ", lsn, sequence))
    return _POSITION.pack(lsn, sequence, crc), (sequence % 2) * _POSITION.size


def read_position(path: Path) -> tuple[int, int] | None:
    """(LSN, sequence) of the newest valid slot, None where there is none."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    best: tuple[int, int] | None = None
    for at in range(0, len(raw) - _POSITION.size + 1, _POSITION.size):
        lsn, sequence, crc = _POSITION.unpack_from(raw, at)
        if crc == zlib.crc32(raw[at : at + 16]) and (best is None or sequence > best[1]):
            best = (lsn, sequence)
    return best


def relation_record(record: RelationRecord) -> bytes:
    head = _RELATION.pack(len(record.message), record.kind, record.oid, record.file, record.offset, record.lsn)
    return head + _CRC.pack(zlib.crc32(record.message, zlib.crc32(head))) + record.message


def parse_relations(raw: bytes) -> Iterator[tuple[int, RelationRecord]]:
    """(end byte, record) of every valid record, up to the first torn one."""
    at = 0
    while at + _RELATION.size + _CRC.size <= len(raw):
        length, kind, oid, file, offset, lsn = _RELATION.unpack_from(raw, at)
        body = at + _RELATION.size + _CRC.size
        message = raw[body : body + length]
        (crc,) = _CRC.unpack_from(raw, at + _RELATION.size)
        if len(message) < length or crc != zlib.crc32(message, zlib.crc32(raw[at : at + _RELATION.size])):
            return
        at = body + length
        yield at, RelationRecord(kind, oid, file, offset, lsn, message)
