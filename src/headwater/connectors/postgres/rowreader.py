"""A statement's rows, from the connection: a COPY's in blocks of whole lines, or messages that stay where they came.

What to read, in which transaction, and what an error means for the table is the caller's; `copytext.py` and
`wirerows.py` decode.

Two ways from the server. Where the connection's bytes can be had (`wire.py`), the statement is written and its answer
read past libpq, in large pieces, and compiled code finds the frames with rows; libpq, which would allocate every row,
is idle meanwhile and finds the protocol at rest again. Elsewhere libpq's `get_copy_data` is used. In both, the
server's errors are psycopg's (with `sqlstate`), and the connection is usable afterwards, unless it was lost.

Lengths are the server's word, or that of whoever stands between: each is checked before anything is read or written by
it. After one that cannot be, nothing can be understood: the connection is given up.

Rows of a SELECT look like those of a binary COPY, and each column may have the form, text or binary, that costs the
server less (`wirerows.forms`). libpq knows no such mixture: that is for the first way.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from headwater.connectors.postgres.client import protocol_error
from headwater.connectors.postgres.rowscan import find_messages
from headwater.connectors.postgres.textscan import Bytes, Longs
from headwater.connectors.postgres.wire import PlainWire, open_wire, reachable
from headwater.storage.compiled import compiled

if TYPE_CHECKING:
    import psycopg

BLOCK_BYTES: Final = 4 << 20
"""Large enough that fixed costs per block (some 50 µs) vanish, small enough for a core's caches and a task's memory."""

_COPY_DATA: Final = ord("d")
_DATA_ROW: Final = ord("D")
_PATIENT_BYTES: Final = 256 << 10
"""Once a copy proves large, be woken for this much and not for each of the server's 8 KiB: a third of the CPU."""
_PATIENT_AFTER: Final = 512 << 10
_PATIENT_MS: Final = 4  # but at the latest after this: the end of the copy is smaller
_USUAL_MESSAGE: Final = 64  # bytes; of shorter ones more are found room for
_LEAST_ROOM: Final = 64 << 10  # for a read from the socket
_LENGTH: Final = 4  # bytes that a frame's length takes, and counts
MOST_FRAME_BYTES: Final = 1 << 30  # Postgres makes each message in one piece of memory, which is never larger
STALLED_S: Final = 300.0  # nothing has come inside of a frame: its length was wrong, or its server is gone
REST_S: Final = 30.0  # how long the server may take to end what was cancelled


@dataclass(frozen=True, slots=True)
class Messages:
    """The payloads `data[start:end]` of messages: rows of a SELECT, or of a binary COPY, with its ends."""

    data: Bytes
    starts: Longs
    ends: Longs
    last: bool
    """No further messages of the copy follow."""


def _not_counted(_: int) -> None:
    return None


class RowReader:
    """Iterate over the blocks of a COPY statement: uint8 arrays of whole lines, `block_bytes` or more but for the last.

    With `forms` (of each column 0 for text, 1 for binary) the statement is a SELECT, read by `messages`.
    The connection must be in autocommit mode or inside of a transaction: no BEGIN is sent. Closing the iterator early
    cancels the statement (inside of a transaction that fails the transaction, as any cancelled statement does).
    `raw` None: past libpq if that is possible.
    """

    def __init__(
        self,
        conn: psycopg.Connection[Any],
        statement: str | bytes,
        *,
        block_bytes: int = BLOCK_BYTES,
        raw: bool | None = None,
        forms: Sequence[int] | None = None,
    ) -> None:
        self._conn = conn
        self._statement = statement.encode() if isinstance(statement, str) else statement
        self._block_bytes = block_bytes
        self._forms = forms
        self.raw = reachable(conn) if raw is None else raw

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        return self._raw_blocks() if self.raw else self._libpq_blocks()

    def messages(self, *, most_bytes: int, count: Callable[[int], None] = _not_counted) -> Generator[Messages]:
        """The same as messages, in pieces of about `most_bytes`; one at least, and one that is the last.

        `count` is told, every `block_bytes` or so, how many messages have come since; it may wait, and it may raise.
        """
        if self.raw:
            return self._raw_messages(most_bytes, count)
        return self._libpq_messages(most_bytes, count)

    def _libpq_blocks(self) -> Iterator[NDArray[np.uint8]]:
        for parts in self._libpq_parts():
            yield np.frombuffer(b"".join(parts), np.uint8)

    def _libpq_parts(self) -> Iterator[list[bytes]]:
        with self._conn.cursor() as cursor, cursor.copy(self._statement) as copy:
            parts: list[bytes] = []
            size = 0
            for part in copy:
                parts.append(bytes(part))
                size += len(part)
                if size >= self._block_bytes:
                    yield parts
                    parts, size = [], 0
            if parts:
                yield parts

    def _libpq_messages(self, most_bytes: int, count: Callable[[int], None]) -> Generator[Messages]:
        blocks: list[bytes] = []
        sizes: list[Longs] = []
        for parts in self._libpq_parts():
            blocks.append(b"".join(parts))
            sizes.append(np.fromiter(map(len, parts), np.int64, len(parts)))
            count(len(parts))
            if sum(map(len, blocks)) >= most_bytes:
                yield _joined(blocks, sizes, last=False)
                blocks, sizes = [], []
        yield _joined(blocks, sizes, last=True)

    def _raw_blocks(self) -> Iterator[NDArray[np.uint8]]:
        wire = _RawRows(self._conn, self._block_bytes, _COPY_DATA)
        try:
            wire.send(_simple_query(self._statement))
            while (block := wire.next_block()) is not None:
                yield block
        finally:
            wire.close()

    def _raw_messages(self, most_bytes: int, count: Callable[[int], None]) -> Generator[Messages]:
        block_bytes = min(self._block_bytes, most_bytes)
        wire = _RawRows(self._conn, block_bytes, _COPY_DATA if self._forms is None else _DATA_ROW)
        try:
            query = self._statement
            wire.send(_simple_query(query) if self._forms is None else _extended_query(query, self._forms))
            while True:
                messages = wire.next_messages(most_bytes, count)
                yield messages
                if messages.last:
                    return
        finally:
            wire.close()


def _joined(blocks: list[bytes], sizes: list[Longs], *, last: bool) -> Messages:
    size = np.concatenate([np.zeros(0, np.int64), *sizes])
    ends = np.cumsum(size)
    return Messages(np.frombuffer(b"".join(blocks), np.uint8), ends - size, ends, last)


def _simple_query(statement: bytes) -> bytes:
    return _message(b"Q", statement + b"\0")


def _extended_query(statement: bytes, forms: Sequence[int]) -> bytes:
    """Parse, Bind, Execute, Sync, all at once: whatever fails, the answer ends with ReadyForQuery."""
    results = struct.pack(f"!h{len(forms)}h", len(forms), *forms)
    return b"".join(
        (
            _message(b"P", b"\0" + statement + b"\0" + struct.pack("!h", 0)),
            _message(b"B", b"\0\0" + struct.pack("!hh", 0, 0) + results),
            _message(b"E", b"\0" + struct.pack("!i", 0)),
            _message(b"S", b""),
        )
    )


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


class _RawRows:
    """One statement spoken past libpq; its rows are frames of type `frame`.

    `_done` becomes true with ReadyForQuery: then the server has nothing more to say, and libpq may go on. Other frames
    are few (at the beginning and the end, and notices), so they are handled in Python.
    """

    def __init__(
        self, conn: psycopg.Connection[Any], block_bytes: int, frame: int, wire: PlainWire | None = None
    ) -> None:
        self._conn = conn
        self._frame = frame
        self._block_bytes = block_bytes
        self._wire = open_wire(conn) if wire is None else wire
        self._buffer = np.empty(block_bytes + _LEAST_ROOM, np.uint8)
        self._received = 0
        self._used = 0  # buffer[:used] holds bytes that were received
        self._at = 0  # of which buffer[:at] have been handled
        self._error: Exception | None = None
        self._closing = False
        self._sent = False
        self._done = False
        self._lost = False

    def send(self, request: bytes) -> None:
        self._sent = True
        self._wire.send(request)

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
        self._at, filled = _strip_frames(self._buffer, self._at, self._used, self._frame, out, filled)
        if not self._handle_other():
            self._make_room_in_front()
            self._receive()
        return out, filled

    def _handle_other(self) -> bool:
        """Handle one whole frame that has no row; False where the next frame is incomplete."""
        needed = self._needed()
        end = self._at + needed
        kind = int(self._buffer[self._at]) if needed else self._frame
        if kind == self._frame or end > self._used:
            return False
        body = self._buffer[self._at + 5 : end].tobytes()
        self._at = end
        match chr(kind):
            case "E":
                self._error = self._error or _server_error(body)
            case "Z":
                self._done = True
            case "G":  # COPY … FROM STDIN is not for us: CopyFail, and the server answers with an error
                self._wire.send(b"f" + struct.pack("!I", 5) + b"\0")
            case _:  # begin, completion and end of a copy or a query, notices, parameters: nothing to do
                pass
        return True

    def next_messages(self, most_bytes: int, count: Callable[[int], None]) -> Messages:
        """The messages of the next `most_bytes`, or of what is left; raises what the server said, at the end."""
        starts, ends = np.empty((2, self._buffer.size // _USUAL_MESSAGE), np.int64)
        found, told, told_at = 0, 0, 0
        while not self._done:
            self._at, found = find_messages(self._buffer, self._at, self._used, self._frame, starts, ends, found)
            if found == starts.size:
                starts, ends = _doubled(starts), _doubled(ends)
                continue
            if self._used - told_at >= self._block_bytes:
                count(found - told)
                told, told_at = found, self._used
            if self._handle_other():
                continue
            if found and self._at >= most_bytes:
                break
            self._make_room_behind()
            self._receive()
        if self._error is not None:
            raise self._error
        count(found - told)
        data = self._buffer[: self._at]
        if not self._done:
            self._begin_anew(self._block_bytes + _LEAST_ROOM)
        return Messages(data, starts[:found], ends[:found], self._done)

    def _make_room_behind(self) -> None:
        """Room for the frame that is incomplete, or for more of them; what has come stays where it is."""
        needed = max(self._at + self._needed(), self._used + _LEAST_ROOM)
        if needed > self._buffer.size:
            larger = np.empty(max(needed, 2 * self._buffer.size), np.uint8)
            larger[: self._used] = self._buffer[: self._used]
            self._buffer = larger

    def _make_room_in_front(self) -> None:
        """The incomplete frame moves to the front of the buffer; a large one gets a larger buffer."""
        rest = self._buffer[self._at : self._used].copy()
        needed = self._needed()
        if needed > self._buffer.size:
            self._buffer = np.empty(needed + self._block_bytes, np.uint8)
        self._buffer[: rest.size] = rest
        self._at, self._used = 0, rest.size

    def _begin_anew(self, size: int) -> None:
        """Another buffer, which begins with the incomplete frame: somebody has the messages before it."""
        rest = self._buffer[self._at : self._used]
        self._buffer = np.empty(max(size, self._needed()), np.uint8)
        self._buffer[: rest.size] = rest
        self._at, self._used = 0, rest.size

    def _needed(self) -> int:
        """The size of the frame that has begun to come; 0 if that is not known yet, an error if it cannot be."""
        head = self._buffer[self._at : min(self._at + 5, self._used)].tobytes()
        if len(head) < 5:
            return 0
        length = int.from_bytes(head[1:], "big")
        if not _LENGTH <= length <= MOST_FRAME_BYTES:
            self._give_up()
            raise protocol_error(f"a message says that it has {length} bytes")
        return length + 1

    def _give_up(self) -> None:
        """What comes by the connection is of no use to anybody."""
        self._done = self._lost = True
        self._wire.give_up()

    def _receive(self) -> None:
        """Get more bytes behind those that are there; not more than a block, since whoever counts may want to wait."""
        room = memoryview(self._buffer.data)[self._used : self._used + self._block_bytes]
        inside = self._at < self._used  # of a frame: between two the server may take as long as it likes
        try:
            got = self._wire.receive(room, _PATIENT_MS, REST_S if self._closing else STALLED_S if inside else math.inf)
        except TimeoutError:
            self._give_up()
            raise self._error or protocol_error("the rest of a message does not come") from None
        except OSError:
            got = 0
        if got == 0:
            self._done = self._lost = True
            raise self._error or _connection_lost()
        was, self._received = self._received, self._received + got
        self._used += got
        if was < _PATIENT_AFTER <= self._received:
            self._wire.wake_for(_PATIENT_BYTES)

    def close(self) -> None:
        """Leave the protocol at rest: cancel what still runs; let libpq see a failed transaction, a lost connection."""
        import psycopg

        disturbed = self._error is not None or not self._done or self._lost
        self._closing = True
        try:
            if self._sent and not self._done:
                self._conn.cancel_safe()
                scratch = np.empty(self._block_bytes, np.uint8)
                while not self._done:
                    scratch, _ = self._step(scratch, 0)
        finally:
            self._wire.close()
            if disturbed:
                with contextlib.suppress(psycopg.Error):  # libpq says in its own words what we know already
                    self._conn.pgconn.exec_(b"")


def _doubled(numbers: Longs) -> Longs:
    larger = np.empty(2 * numbers.size + 1, np.int64)
    larger[: numbers.size] = numbers
    return larger


@compiled
def _strip_frames(data: Bytes, at: int, used: int, frame: int, out: Bytes, filled: int) -> tuple[int, int]:
    """Append the payloads of the frames of this type from `at` on to `out`; stop at an incomplete or another one."""
    while used - at >= 5 and data[at] == frame:
        length = data[at + 1] * 16777216 + data[at + 2] * 65536 + data[at + 3] * 256 + data[at + 4]
        if length < 4 or used - at < length + 1:  # less than its own four bytes: `_needed` says so
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
