"""The spool: our own durable copy of a change stream, raw, in commit order, cut at transaction ends.

`SpoolWriter` is used by the one process that receives the stream (a connector's `reader.py`), `SpoolReader` by the
engine and by Spark tasks. The files are described in `spool_format.py`. What the messages mean is left to the
connector: the spool only knows transactions, and that some messages describe tables and must be known to whoever
decodes what follows.

    begin(xid) → append … append → commit(end_lsn)     one transaction; its bytes go to disk while they arrive
    advance(lsn)                                        nothing ends in (last commit, lsn]: the position may move
    sync()                                              data, relations, index, position: in this order, each with fsync
    rollback()                                          the connection was lost inside a transaction

A position counts (is reported, acknowledged) only after `sync` has returned it. The order inside `sync` gives the rule
that a reader relies on: an index record that survives a crash has its data and its relations.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from headwater.capture import spool_format as fmt
from headwater.capture.spool_format import IndexArray, RelationRecord, SpoolRange
from headwater.errors import DefiniteError, HeadwaterError, TransientError
from headwater.storage.private import FILE, make_directory

__all__ = ["IndexArray", "RelationRecord", "SpoolRange", "SpoolReader", "SpoolWriter"]

TARGET_FILE_BYTES: Final = 32 << 20  # small enough to free space soon, large enough that files are few
BUFFER_BYTES: Final = 1 << 20  # frames gathered in memory before a write
RELATION: Final = ord("R")
FIRST_FILE: Final = 1
CACHED_INDEXES: Final = 8  # closed index files kept in memory by a reader; one has at most about 10 MB


class SpoolWriter:
    """The only writer of a spool directory. Opening it repairs what a crash left behind."""

    def __init__(self, directory: Path | str, *, target_bytes: int = TARGET_FILE_BYTES, complete_to: int = 0) -> None:
        """`complete_to`: what was reported as durable before. A spool that is damaged before it is refused."""
        self.directory = Path(directory)
        make_directory(self.directory)
        self._complete_to = complete_to
        self._target = target_bytes
        self._lock = _lock(self.directory / "lock")
        self._parts: list[bytes | memoryview] = []
        self._buffered = 0
        self._index_pending = bytearray()
        self._relations_pending: list[RelationRecord] = []  # complete, not yet written
        self._relations_open: list[RelationRecord] = []  # of the transaction that is being written
        self._known: dict[tuple[int, int], bytes] = {}
        self._in_transaction = False
        self._xid = 0
        self._crc = 0  # of the open transaction's frames that are joined
        self._fresh: list[bytes | memoryview] = []  # of the open transaction, not joined yet
        self.bytes_written = 0
        try:
            self._open_files()
        except HeadwaterError:
            os.close(self._lock)
            raise

    # -- opening ----------------------------------------------------------------------------------------------------

    def _open_files(self) -> None:
        numbers = fmt.file_numbers(self.directory)
        self._file = numbers[-1] if numbers else FIRST_FILE
        if numbers:
            require_all(numbers)
        elif fmt.read_position(self.directory / "position") is not None:
            raise missing(0)  # it had begun, and its files are made before its position
        for orphan in sorted(set(fmt.file_numbers(self.directory, "spool")) - set(numbers)):
            path = fmt.data_path(self.directory, orphan)
            if orphan >= self._file and path.stat().st_size:  # an index is made before anything is written
                raise missing(orphan)
            path.unlink()
        self._open_pair()
        stored = fmt.read_index(fmt.index_path(self.directory, self._file))
        index = fmt.valid_prefix(stored)
        index = index[index["end"] <= os.fstat(self._data).st_size]
        if len(index) < len(stored) and (int(index["end_lsn"][-1]) if len(index) else 0) < self._complete_to:
            raise corrupt(f"file {self._file} has lost transactions that were durable")
        self._committed = int(index["end"][-1]) if len(index) else 0
        self._end = self._committed
        os.ftruncate(self._data, self._committed)
        os.ftruncate(self._index, len(index) * fmt.INDEX_DTYPE.itemsize)
        self._open_relations()
        self.last_xid: int | None = int(index["xid"][-1]) if len(index) else None  # None: not known
        self._open_position(numbers, index)
        for fd in (self._data, self._relations, self._index, self._position):
            os.fsync(fd)
        _fsync_directory(self.directory)

    def _open_pair(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._data = os.open(fmt.data_path(self.directory, self._file), flags, 0o600)
        self._index = os.open(fmt.index_path(self.directory, self._file), flags, 0o600)

    def _open_relations(self) -> None:
        path = self.directory / "relations"
        raw = path.read_bytes() if path.exists() else b""
        end = 0
        for after, record in fmt.parse_relations(raw):
            if (record.file, record.offset) > (self._file, self._committed):
                break
            self._known[record.kind, record.oid] = record.message
            end = after
        self._relations = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(self._relations, end)

    def _open_position(self, numbers: list[int], last: IndexArray) -> None:
        stored = fmt.read_position(self.directory / "position")
        self._position = os.open(self.directory / "position", os.O_RDWR | os.O_CREAT, 0o600)
        self._sequence = stored[1] if stored else 0
        candidates = [stored[0]] if stored else []
        if len(last):
            candidates.append(int(last["end_lsn"][-1]))
        elif len(numbers) > 1:
            before = fmt.read_index(fmt.index_path(self.directory, numbers[-2]))
            candidates.append(int(before["end_lsn"][-1]))
        self.durable_lsn: int | None = max(candidates, default=None)
        self._written_lsn = self.durable_lsn or 0
        self._advanced_lsn = 0

    def initialise(self, lsn: int) -> None:
        """Give a new spool its start: everything that ends at or before `lsn` is not part of it."""
        if self.durable_lsn is not None:
            raise DefiniteError("SPOOL_NOT_EMPTY", "the spool has a position already")
        self._write_position(lsn)
        self.durable_lsn = self._written_lsn = lsn

    # -- writing ----------------------------------------------------------------------------------------------------

    @property
    def in_transaction(self) -> bool:
        return self._in_transaction

    def begin(self, xid: int) -> None:
        if self._in_transaction:
            raise DefiniteError("SPOOL_ORDER", "a transaction begins inside another one")
        if self._end >= self._target:
            self._roll()
        self._in_transaction = True
        self._xid = xid

    def append(self, lsn: int, message: bytes | memoryview) -> None:
        """One message of the open transaction."""
        size = len(message)
        self._fresh.append(fmt.FRAME.pack(size, lsn))
        self._fresh.append(message)
        self._end += fmt.FRAME.size + size
        self._buffered += fmt.FRAME.size + size
        if self._buffered >= BUFFER_BYTES:
            self._flush_data()

    def describe(self, kind: int, oid: int, lsn: int, message: bytes) -> None:
        """Remember a message that describes a table. Inside a transaction it counts from here on if that commits."""
        if self._in_transaction:
            self._relations_open.append(RelationRecord(kind, oid, self._file, self._end, lsn, message))
        else:
            self._remember(RelationRecord(kind, oid, self._file, self._committed, lsn, message))

    def _remember(self, record: RelationRecord) -> None:
        # A new session describes every table again: only what differs is news.
        if self._known.get((record.kind, record.oid)) != record.message:
            self._known[record.kind, record.oid] = record.message
            self._relations_pending.append(record)

    def commit(self, end_lsn: int, commit_us: int) -> None:
        """The open transaction is complete; it counts after the next `sync`."""
        if not self._in_transaction or end_lsn <= self._written_lsn:
            raise DefiniteError("SPOOL_ORDER", "a transaction does not follow the one before it")
        self._join()
        record = fmt.index_record(
            xid=self._xid,
            file=self._file,
            end_lsn=end_lsn,
            start=self._committed,
            end=self._end,
            commit_us=commit_us,
            data_crc=self._crc,
        )
        self._crc = 0
        self._index_pending += record
        for relation in self._relations_open:
            self._remember(relation)
        self._relations_open.clear()
        self._committed = self._end
        self._written_lsn = end_lsn
        self._in_transaction = False
        self.last_xid = self._xid

    def advance(self, lsn: int) -> None:
        """No transaction that ends at or before `lsn` is still to come. Counts after the next `sync`."""
        if self._in_transaction:
            raise DefiniteError("SPOOL_ORDER", "the position cannot move inside a transaction")
        self._advanced_lsn = max(self._advanced_lsn, lsn)
        self._written_lsn = max(self._written_lsn, lsn)

    def rollback(self) -> None:
        """Forget the open transaction: it will be sent again."""
        self._flush_data()
        self._crc = 0
        os.ftruncate(self._data, self._committed)
        self._end = self._committed
        self._relations_open.clear()
        self._in_transaction = False

    @property
    def written_lsn(self) -> int:
        """Up to where the stream is complete here, durable or not."""
        return self._written_lsn

    @property
    def dirty(self) -> bool:
        return self._written_lsn > (self.durable_lsn or 0) or bool(self._index_pending)

    def sync(self) -> int:
        """Make everything committed and advanced durable; gives the position that now counts."""
        if self._index_pending:
            self._flush_data()
            os.fdatasync(self._data)
        if self._relations_pending:
            _write_all(self._relations, b"".join(fmt.relation_record(r) for r in self._relations_pending))
            self._relations_pending.clear()
            os.fdatasync(self._relations)
        if self._index_pending:
            _write_all(self._index, self._index_pending)
            self._index_pending.clear()
            os.fdatasync(self._index)
        if self._advanced_lsn and self._advanced_lsn >= self._written_lsn > (self.durable_lsn or 0):
            self._write_position(self._advanced_lsn)
        self.durable_lsn = self._written_lsn
        return self._written_lsn

    def close(self) -> None:
        """Release the directory. What was not synced is cut off by the next writer."""
        for fd in (self._data, self._index, self._relations, self._position, self._lock):
            os.close(fd)

    def _roll(self) -> None:
        self.sync()
        # The new file is empty until its first transaction is durable, and the old one may be truncated before that:
        # then only the position file knows how far we are.
        self._write_position(self._written_lsn)
        os.close(self._data)
        os.close(self._index)
        self._file += 1
        self._end = self._committed = 0
        self._open_pair()
        _fsync_directory(self.directory)

    def _join(self) -> None:
        """One checksum for the frames of the open transaction, over what many small appends brought."""
        if self._fresh:
            joined = b"".join(self._fresh)
            self._crc = zlib.crc32(joined, self._crc)
            self._parts.append(joined)
            self._fresh.clear()

    def _flush_data(self) -> None:
        self._join()
        if self._parts:
            _write_all(self._data, b"".join(self._parts))
            self.bytes_written += self._buffered
            self._parts.clear()
            self._buffered = 0

    def _write_position(self, lsn: int) -> None:
        self._sequence += 1
        record, at = fmt.position_slot(lsn, self._sequence)
        os.pwrite(self._position, record, at)
        os.fdatasync(self._position)

    # -- whose stream -----------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any] | None:
        path = self.directory / "identity.json"
        return json.loads(path.read_text()) if path.exists() else None

    def set_identity(self, identity: dict[str, Any]) -> None:
        temporary = self.directory / "identity.json.tmp"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE), "w") as file:
            json.dump(identity, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.directory / "identity.json")
        _fsync_directory(self.directory)


class _Extent(NamedTuple):
    """What a closed file holds: the ends of its first and last transaction, and the bytes of all of them."""

    first_lsn: int
    last_lsn: int
    size: int

    def meets(self, after_lsn: int, upto_lsn: int) -> bool:
        return self.last_lsn > after_lsn and self.first_lsn <= upto_lsn and self.size > 0

    def within(self, after_lsn: int, upto_lsn: int) -> bool:
        return self.first_lsn > after_lsn and self.last_lsn <= upto_lsn and self.size > 0


NO_TRANSACTION: Final = _Extent(0, 0, 0)


class SpoolReader:
    """Reads a spool beside its writer. Ask only up to a position that the writer has reported as durable."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._closed: dict[int, IndexArray] = {}
        self._extents: dict[int, _Extent] = {}  # of closed files; none of those without a transaction
        self._tail: tuple[int, IndexArray] = (0, np.empty(0, fmt.INDEX_DTYPE))
        self._relations: tuple[tuple[int, int], list[RelationRecord]] = ((0, 0), [])
        self._files = threading.Lock()  # an engine asks from several threads, and truncates from another

    def durable_lsn(self) -> int | None:
        """The position that the files show; the writer may be about to report a later one."""
        stored = fmt.read_position(self.directory / "position")
        found = [stored[0]] if stored else []
        for number in reversed(fmt.file_numbers(self.directory)):
            index = fmt.read_index(fmt.index_path(self.directory, number))
            if len(index):
                found.append(int(index["end_lsn"][-1]))
                break
        return max(found, default=None)

    def transactions(self, after_lsn: int, upto_lsn: int) -> IndexArray:
        """The index records of all transactions whose commit ends in (after_lsn, upto_lsn], in order."""
        with self._files:
            return self._transactions(after_lsn, upto_lsn)

    def first_transactions(self, after_lsn: int, upto_lsn: int, max_bytes: int) -> tuple[IndexArray, bool]:
        """Of those the first ones that have at most `max_bytes` together, or one; and whether there are more.

        It looks at no file beyond them: a backlog of any length costs no more than what is taken of it.
        """
        found: list[IndexArray] = []
        left = max_bytes
        with self._files:
            for index in self._parts(after_lsn, upto_lsn):
                sizes = np.cumsum((index["end"] - index["start"]).astype(np.int64))
                count = int(np.searchsorted(sizes, left, side="right"))
                if count < len(index):
                    count = max(count, 0 if found else 1)
                    found.append(index[:count])
                    return np.concatenate(found), count < len(index) or self._more(int(index["end_lsn"][-1]), upto_lsn)
                found.append(index)
                left -= int(sizes[-1])
        return np.concatenate(found) if found else np.empty(0, fmt.INDEX_DTYPE), False

    def newest_transactions(self, after_lsn: int, upto_lsn: int) -> tuple[IndexArray, bool]:
        """Those of (after_lsn, upto_lsn] that are still here, and whether these are all that there were.

        It goes from the newest file backwards: a spool of any length costs no more than what is asked for.
        """
        found: list[IndexArray] = []
        with self._files:
            numbers = fmt.file_numbers(self.directory)
            for number in reversed(numbers):
                index = checked(fmt.read_index(fmt.index_path(self.directory, number)), number)
                found.insert(0, index[(index["end_lsn"] > after_lsn) & (index["end_lsn"] <= upto_lsn)])
                if len(index) and int(index["end_lsn"][0]) <= after_lsn:
                    return np.concatenate(found), True
        whole = not numbers or numbers[0] == FIRST_FILE
        return np.concatenate(found) if found else np.empty(0, fmt.INDEX_DTYPE), whole

    def _more(self, after_lsn: int, upto_lsn: int) -> bool:
        return next(self._parts(after_lsn, upto_lsn), None) is not None

    def _transactions(self, after_lsn: int, upto_lsn: int) -> IndexArray:
        found = list(self._parts(after_lsn, upto_lsn))
        return np.concatenate(found) if found else np.empty(0, fmt.INDEX_DTYPE)

    def _parts(self, after_lsn: int, upto_lsn: int) -> Iterator[IndexArray]:
        """The same file by file; none is empty."""
        numbers = fmt.file_numbers(self.directory) if self.directory.exists() else []
        if after_lsn < upto_lsn:
            require_all(numbers)
        for number in numbers:
            closed = number != numbers[-1]
            if closed and not self._extent(number).meets(after_lsn, upto_lsn):
                continue
            index = self._closed_index(number) if closed else self._tail_index(number, upto_lsn)
            low, high = np.searchsorted(index["end_lsn"], np.array([after_lsn, upto_lsn], np.uint64), side="right")
            if high > low:
                yield index[low:high]

    def bytes_between(self, after_lsn: int, upto_lsn: int) -> int:
        """How many bytes the transactions of (after_lsn, upto_lsn] have: the only distance that two positions have.

        Of the files in between only the extents are looked at: a backlog of any length costs next to nothing.
        """
        total = 0
        with self._files:
            numbers = fmt.file_numbers(self.directory) if self.directory.exists() else []
            for number in numbers:
                closed = number != numbers[-1]
                extent = self._extent(number) if closed else NO_TRANSACTION
                if extent.within(after_lsn, upto_lsn):
                    total += extent.size
                elif not closed or extent.meets(after_lsn, upto_lsn):
                    index = self._closed_index(number) if closed else self._tail_index(number, upto_lsn)
                    bounds = np.array([after_lsn, upto_lsn], np.uint64)
                    low, high = np.searchsorted(index["end_lsn"], bounds, side="right")
                    total += int((index["end"][low:high] - index["start"][low:high]).sum())
        return total

    def _extent(self, number: int) -> _Extent:
        """Of a file that is closed; it is read once."""
        found = self._extents.get(number)
        if found is None:
            ends = checked(fmt.index_ends(fmt.index_path(self.directory, number)), number)
            if not len(ends):
                return NO_TRANSACTION
            found = _Extent(int(ends["end_lsn"][0]), int(ends["end_lsn"][-1]), int(ends["end"][-1]))
            self._extents[number] = found
        return found

    def _closed_index(self, number: int) -> IndexArray:
        index = self._closed.pop(number, None)
        if index is None:
            index = checked(fmt.read_index(fmt.index_path(self.directory, number)), number)
        self._closed[number] = index  # the most recently used is last
        while len(self._closed) > CACHED_INDEXES:
            self._closed.pop(next(iter(self._closed)))
        return index

    def _tail_index(self, number: int, upto_lsn: int) -> IndexArray:
        """Of the file that is being written only durable records are kept: later ones may still be cut off."""
        known = self._tail[1] if self._tail[0] == number else np.empty(0, fmt.INDEX_DTYPE)
        fresh = fmt.read_index(fmt.index_path(self.directory, number), skip=len(known))
        fresh = checked(fresh[fresh["end_lsn"] <= np.uint64(upto_lsn)], number)
        known = np.concatenate([known, fresh]) if len(fresh) else known
        self._tail = (number, known)
        return known

    def ranges(self, after_lsn: int, upto_lsn: int, max_bytes: int) -> list[SpoolRange]:
        """The transactions of (after_lsn, upto_lsn] as ranges of at most `max_bytes`, or of one transaction."""
        index = self.transactions(after_lsn, upto_lsn)
        result: list[SpoolRange] = []
        at = 0
        while at < len(index):
            first = index[at]
            file_end = at + int(np.searchsorted(index["file"][at:], first["file"], side="right"))
            limit = first["start"] + np.uint64(max_bytes)
            stop = at + max(1, int(np.searchsorted(index["end"][at:file_end], limit, side="right")))
            last = index[stop - 1]
            result.append(
                SpoolRange(
                    file=int(first["file"]),
                    start=int(first["start"]),
                    end=int(last["end"]),
                    first_lsn=int(first["end_lsn"]),
                    last_lsn=int(last["end_lsn"]),
                )
            )
            at = stop
        return result

    def read(self, range_: SpoolRange) -> bytes:
        """The frames of a range, as they were written."""
        try:
            with open(fmt.data_path(self.directory, range_.file), "rb") as file:
                file.seek(range_.start)
                data = file.read(range_.size)
        except FileNotFoundError:
            raise missing(range_.file) from None
        if len(data) != range_.size:
            raise DefiniteError("SPOOL_DAMAGED", f"spool file {range_.file} does not hold bytes that its index names")
        index = fmt.read_index(fmt.index_path(self.directory, range_.file))
        index = index[(index["start"] >= range_.start) & (index["end"] <= range_.end)]
        if fmt.first_damaged(index, data, range_.start) is not None:
            raise DefiniteError("SPOOL_DAMAGED", f"spool file {range_.file} does not hold what was written to it")
        return data

    def relations_at(self, range_: SpoolRange, *, kind: int = RELATION) -> dict[int, bytes]:
        """By table: the description message that is valid where the range begins. Later ones are inside the range."""
        valid: dict[int, bytes] = {}
        for record in self._relation_records():
            if record.kind == kind and (record.file, record.offset) <= (range_.file, range_.start):
                valid[record.oid] = record.message
        return valid

    def _relation_records(self) -> list[RelationRecord]:
        path = self.directory / "relations"
        try:
            version = (path.stat().st_size, path.stat().st_mtime_ns)
        except FileNotFoundError:
            return []
        if version != self._relations[0]:
            self._relations = (version, [record for _, record in fmt.parse_relations(path.read_bytes())])
        return self._relations[1]

    def truncate_before(self, lsn: int) -> int:
        """Delete the files of which every transaction ends at or before `lsn`; gives the number of bytes freed.

        The newest file stays: it belongs to the writer, and its number must not be used again.
        """
        with self._files:
            return self._truncate_before(lsn)

    def _truncate_before(self, lsn: int) -> int:
        freed = 0
        for number in fmt.file_numbers(self.directory)[:-1]:
            extent = self._extent(number)
            if extent is NO_TRANSACTION or extent.last_lsn > lsn:
                break
            path = fmt.data_path(self.directory, number)
            freed += path.stat().st_size if path.exists() else 0
            # The index goes first: data without an index is an orphan that the next writer removes.
            fmt.index_path(self.directory, number).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            self._extents.pop(number, None)
            self._closed.pop(number, None)
        return freed

    def retained_bytes(self) -> int:
        if not self.directory.exists():
            return 0
        with self._files:
            return sum(entry.stat().st_size for entry in os.scandir(self.directory) if entry.name.endswith(".spool"))


def corrupt(what: str) -> DefiniteError:
    return DefiniteError(
        "SPOOL_CORRUPT", f"the spool cannot be read: {what}", hint="its tables are copied again; look at the disk"
    )


def require_all(numbers: list[int]) -> None:
    """Files are numbered one by one, and leave from the first one on."""
    if not numbers:
        raise missing(0)
    for before, after in itertools.pairwise(numbers):
        if after != before + 1:
            raise missing(before + 1)


def missing(number: int) -> TransientError:
    """What is not there may come back (a disk that is not mounted): it is no reason to give the stream up."""
    return TransientError(
        "SPOOL_MISSING",
        f"spool file {number} is not there" if number else "the spool is not there",
        hint="put it back (is the disk mounted?); if it is lost for good, DROP SOURCE … CASCADE and create it again",
    )


def checked(index: IndexArray, number: int) -> IndexArray:
    """Records of an index that were durable: all of them must be what was written."""
    if len(fmt.valid_prefix(index)) < len(index):
        raise corrupt(f"a record of index {number} is damaged")
    return index


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise TransientError("SPOOL_IN_USE", "another process writes this spool") from None
    return fd


def _write_all(fd: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _fsync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
