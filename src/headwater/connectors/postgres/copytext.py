r"""The snapshot's format: `COPY … TO STDOUT (FORMAT text)`, from the connection to Arrow.

A line is one row: fields separated by a tab, NULL as `\N`, and a backslash before every tab, newline, carriage return
and backslash of the data. So a raw newline always ends a row, and blocks can be cut anywhere.

`CopyReader` brings large blocks of whole lines; `scan_copy_text` finds the fields; `decode_copy` decodes them with
`columns.py`. What to read, in which transaction, and what an error means for the table is the caller's.

Two ways from the server. Without encryption, the statement is written to and its answer read from the connection's
socket itself, in large pieces, and the CopyData frames are stripped by compiled code; libpq, which would allocate every
row, is idle meanwhile and finds the protocol at rest again. With TLS or GSS, libpq's `get_copy_data` is used. In both,
the server's errors are psycopg's (with `sqlstate`), and the connection is usable afterwards, unless it was lost.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.connectors.postgres.columns import decode_column
from headwater.connectors.postgres.rowhash import row_ids
from headwater.connectors.postgres.textscan import Bytes, Longs, compiled
from headwater.connectors.postgres.types import ColumnPlan
from headwater.errors import DefiniteError
from headwater.model.schema import ROW_ID

if TYPE_CHECKING:
    import psycopg

BLOCK_BYTES: Final = 4 << 20
"""Large enough that fixed costs per block (some 50 µs) vanish, small enough for a core's caches and a task's memory."""

_COPY_DATA: Final = ord("d")
_POLL_S: Final = 1.0  # how long a write waits before it tries again
_PATIENT_BYTES: Final = 64 << 10
"""Once a copy proves large, be woken for this much and not for each of the server's 8 KiB: a third of the CPU."""
_PATIENT_AFTER: Final = 256 << 10
_PATIENT_MS: Final = 10  # but at the latest after this: the end of the copy is smaller
_ESCAPED: Final = np.arange(256, dtype=np.uint8)
for _letter, _byte in zip(b"bfnrtv", b"\b\f\n\r\t\v", strict=True):
    _ESCAPED[_letter] = _byte


@dataclass(frozen=True, slots=True)
class CopyScan:
    """Where the fields of whole lines are: `data[starts[r, c] :][: lengths[r, c]]`, unescaped; length -1 is NULL."""

    starts: Longs
    lengths: Longs
    data: Bytes
    consumed: int

    @property
    def rows(self) -> int:
        return int(self.starts.shape[0])


def scan_copy_text(block: Any, ncols: int) -> CopyScan:
    """Find the fields of all whole lines of a block; `consumed` says where the first incomplete line begins."""
    source = np.frombuffer(block, np.uint8)
    rows = int(np.count_nonzero(source == 10))
    data = source.copy()  # fields are unescaped in place: they only become shorter
    starts = np.empty((ncols, rows), np.int64)
    lengths = np.empty((ncols, rows), np.int64)
    consumed = _scan_lines(data, rows, _ESCAPED, starts, lengths)
    if consumed < 0:
        raise DefiniteError(
            "COPY_MALFORMED",
            f"a line of the copy does not have {ncols} fields",
            hint="the table's columns changed while it was being read; the read has to be repeated",
        )
    return CopyScan(starts.T, lengths.T, data, consumed)


@compiled
def _scan_lines(data: Bytes, rows: int, escaped: Bytes, starts: Longs, lengths: Longs) -> int:
    """Fill starts and lengths (column, row) of `rows` lines; the end of the last one, or -1 for a wrong field count."""
    ncols = starts.shape[0]
    one = np.uint64(1)  # positions are unsigned, since an index that may be negative is tested for each byte
    p = np.uint64(0)
    for row in range(rows):
        for col in range(ncols):
            start = p
            c = data[p]
            while c != 9 and c != 10 and c != 92:
                p += one
                c = data[p]
            length = np.int64(p - start)
            if c == 92:
                if length == 0 and data[p + one] == 78:
                    length = np.int64(-1)
                    p += np.uint64(2)
                else:
                    to = p
                    while c != 9 and c != 10:
                        if c == 92:
                            p += one
                            if data[p] == 10:  # a raw newline ends a row, always: going on could leave the block
                                return -1
                            c = escaped[data[p]]
                        data[to] = c
                        to += one
                        p += one
                        c = data[p]
                    length = np.int64(to - start)
                c = data[p]
            starts[col, row] = start
            lengths[col, row] = length
            if c != (10 if col == ncols - 1 else 9):
                return -1
            p += one
    consumed: int = np.int64(p)  # type: ignore[assignment]
    return consumed


def decode_copy(block: Any, plans: Sequence[ColumnPlan], *, row_id: bool = False) -> pa.RecordBatch:
    """The rows of a block of whole lines; `plans` are the statement's columns in order.

    With `row_id` the last column says what each row is (`rowhash.py`), for tables without a key.
    """
    scan = scan_copy_text(block, len(plans))
    if scan.consumed != len(scan.data):
        raise DefiniteError("COPY_MALFORMED", "a block of the copy ends inside of a line")
    arrays = [decode_column(plan, scan.data, scan.starts[:, i], scan.lengths[:, i]) for i, plan in enumerate(plans)]
    names = [plan.name for plan in plans]
    if row_id:
        arrays.append(row_ids(scan.data, list(scan.starts.T), list(scan.lengths.T), scan.rows))
        names.append(ROW_ID)
    return pa.RecordBatch.from_arrays(arrays, names=names)


class CopyReader:
    """Iterate over the blocks of a COPY statement: uint8 arrays of whole lines, `block_bytes` or more but for the last.

    The connection must be in autocommit mode or inside of a transaction: no BEGIN is sent. Closing the iterator early
    cancels the statement (inside of a transaction that fails the transaction, as any cancelled statement does).
    `raw` None chooses by the connection's encryption.
    """

    def __init__(
        self,
        conn: psycopg.Connection[Any],
        statement: str | bytes,
        *,
        block_bytes: int = BLOCK_BYTES,
        raw: bool | None = None,
    ) -> None:
        self._conn = conn
        self._statement = statement.encode() if isinstance(statement, str) else statement
        self._block_bytes = block_bytes
        self.raw = _is_plain(conn) if raw is None else raw

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        return self._raw_blocks() if self.raw else self._libpq_blocks()

    def _libpq_blocks(self) -> Iterator[NDArray[np.uint8]]:
        with self._conn.cursor() as cursor, cursor.copy(self._statement) as copy:
            parts: list[bytes] = []
            size = 0
            for part in copy:
                parts.append(bytes(part))
                size += len(part)
                if size >= self._block_bytes:
                    yield np.frombuffer(b"".join(parts), np.uint8)
                    parts, size = [], 0
            if parts:
                yield np.frombuffer(b"".join(parts), np.uint8)

    def _raw_blocks(self) -> Iterator[NDArray[np.uint8]]:
        wire = _RawCopy(self._conn, self._block_bytes)
        try:
            wire.send(self._statement)
            while (block := wire.next_block()) is not None:
                yield block
        finally:
            wire.close()


def _is_plain(conn: psycopg.Connection[Any]) -> bool:
    """Whether the bytes on the socket are the protocol's own. Where libpq cannot say, they are taken as encrypted."""
    import psycopg

    try:
        return not conn.pgconn.ssl_in_use and not conn.pgconn.used_gssapi
    except (psycopg.NotSupportedError, AttributeError):
        return False


class _RawCopy:
    """One COPY statement spoken on a connection's socket while libpq is idle.

    `_done` becomes true with ReadyForQuery: then the server has nothing more to say, and libpq may go on. Frames that
    are not CopyData are few (at the beginning and the end, and notices), so they are handled in Python.
    """

    def __init__(self, conn: psycopg.Connection[Any], block_bytes: int) -> None:
        self._conn = conn
        self._block_bytes = block_bytes
        # A second descriptor of the same socket: libpq keeps its own.
        self._socket = socket.socket(fileno=os.dup(conn.pgconn.socket))
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._buffer = np.empty(block_bytes, np.uint8)
        self._received = 0
        self._used = 0  # buffer[:used] holds bytes that were received
        self._at = 0  # of which buffer[:at] have been handled
        self._error: Exception | None = None
        self._sent = False
        self._done = False
        self._lost = False

    def send(self, statement: bytes) -> None:
        self._sent = True
        message = memoryview(b"Q" + struct.pack("!I", len(statement) + 5) + statement + b"\0")
        while message:
            try:
                message = message[self._socket.send(message) :]
            except BlockingIOError:
                select.select([], [self._socket], [], _POLL_S)

    def next_block(self) -> NDArray[np.uint8] | None:
        """The next block, or None at the end; raises what the server said once the protocol is at rest."""
        out, filled = np.empty(self._block_bytes * 2, np.uint8), 0
        while not self._done and filled < self._block_bytes:
            out, filled = self._step(out, filled)
        if self._error is not None:
            # The rows so far are those of a failed statement: worth nothing.
            raise self._error
        return out[:filled] if filled else None

    def _step(self, out: Bytes, filled: int) -> tuple[Bytes, int]:
        """Append the rows at hand to `out`, then handle one other frame or get more bytes."""
        if out.size - filled < self._used - self._at:
            out = np.concatenate([out[:filled], np.empty(self._used - self._at, np.uint8)])
        self._at, filled = _strip_copy_data(self._buffer, self._at, self._used, out, filled)
        if not self._handle_other():
            self._receive()
        return out, filled

    def _handle_other(self) -> bool:
        """Handle one whole frame that is not CopyData; False where the next frame is incomplete."""
        head = self._buffer[self._at : min(self._at + 5, self._used)].tobytes()
        if len(head) < 5 or head[0] == _COPY_DATA:
            return False
        end = self._at + 1 + int.from_bytes(head[1:], "big")
        if end > self._used:
            return False
        body = self._buffer[self._at + 5 : end].tobytes()
        self._at = end
        match chr(head[0]):
            case "E":
                self._error = self._error or _server_error(body)
            case "Z":
                self._done = True
            case "G":  # COPY … FROM STDIN is not for us: CopyFail, and the server answers with an error
                self._socket.send(b"f" + struct.pack("!I", 5) + b"\0")
            case _:  # CopyOutResponse, CopyDone, CommandComplete, notices, parameters: nothing to do
                pass
        return True

    def _receive(self) -> None:
        """Get more bytes behind the incomplete frame at `at`, which moves to the front; make room for a large one."""
        rest = self._buffer[self._at : self._used].copy()
        needed = int.from_bytes(rest[1:5].tobytes(), "big") + 1 if rest.size >= 5 else 0
        if needed > self._buffer.size:
            self._buffer = np.empty(needed + self._block_bytes, np.uint8)
        self._buffer[: rest.size] = rest
        self._at, self._used = 0, rest.size
        while self._used == rest.size:
            try:
                got = self._socket.recv_into(memoryview(self._buffer.data)[self._used :])
            except BlockingIOError:
                self._poll.poll(_PATIENT_MS)
                continue
            except OSError:
                got = 0
            if got == 0:
                self._done = self._lost = True
                raise self._error or _connection_lost()
            self._used += got
            self._be_patient(got)

    def _be_patient(self, got: int) -> None:
        was, self._received = self._received, self._received + got
        if was < _PATIENT_AFTER <= self._received:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _PATIENT_BYTES)

    def close(self) -> None:
        """Leave the protocol at rest: cancel what still runs; let libpq see a failed transaction, a lost connection."""
        disturbed = self._error is not None or not self._done or self._lost
        try:
            if self._sent and not self._done:
                self._conn.cancel_safe()
                scratch = np.empty(self._block_bytes, np.uint8)
                while not self._done:
                    scratch, _ = self._step(scratch, 0)
        finally:
            # An option of the socket, not of our descriptor: libpq would wait for ever for a short answer.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self._socket.close()
        if disturbed:
            self._conn.pgconn.exec_(b"")


@compiled
def _strip_copy_data(data: Bytes, at: int, used: int, out: Bytes, filled: int) -> tuple[int, int]:
    """Append the payloads of the CopyData frames from `at` on to `out`; stop at an incomplete or another frame."""
    while used - at >= 5 and data[at] == 100:
        length = data[at + 1] * 16777216 + data[at + 2] * 65536 + data[at + 3] * 256 + data[at + 4]
        if used - at < length + 1:
            break
        # Unsigned, since an index that may be negative is tested for each byte: eight times slower.
        start = np.uint64(at + 5)
        to = np.uint64(filled)
        for k in range(np.uint64(length - 4)):
            out[to + k] = data[start + k]
        filled += length - 4
        at += length + 1
    return at, filled


def _server_error(body: bytes) -> Exception:
    """An ErrorResponse as the exception that psycopg would have raised."""
    import psycopg

    fields = {part[:1]: part[1:].decode("utf-8", "replace") for part in body.split(b"\0") if part}
    sqlstate = fields.get(b"C", "XX000")
    try:
        kind: type[psycopg.Error] = psycopg.errors.lookup(sqlstate)
    except KeyError:
        kind = psycopg.DatabaseError
    error = kind(fields.get(b"M", "the server failed without a message"))
    error.sqlstate = sqlstate
    return error


def _connection_lost() -> Exception:
    import psycopg

    return psycopg.OperationalError("the connection was lost during a copy")
