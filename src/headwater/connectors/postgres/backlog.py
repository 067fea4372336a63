"""The faster way through a backlog: the slot's SQL function, read with COPY before the stream starts.

A walsender sends each message by itself and waits for the socket; the function decodes at full speed, and COPY packs
what it found: about three times the rate. The price: the server keeps the whole answer aside (in temporary files)
before the first row, and decodes from the slot's restart position at each call. So it is used once per connection, for
a bounded piece, and only where the log between the restart position and what is new is short: that is, while no old
transaction is open at the source, and what we have is nearly acknowledged.

The call only peeks: the slot stays where it is, and is moved by our acknowledgements alone (I3). The messages are those
of the stream, in its order. It stops after the first record that ends at or behind `upto`, and the stream goes on
behind the last transaction that we have.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from psycopg import pq

from headwater.connectors.postgres.client import format_lsn, parse_lsn, protocol_error
from headwater.connectors.postgres.replication import (
    Assembler,
    DoneStreaming,
    result_error,
    stream_options,
    understood,
)

LEAST_BYTES: Final = 16 << 20  # of the source's log: less is read by the stream in a moment
MOST_BYTES: Final = 512 << 20  # what the server has to keep aside is of this order
AGAIN_BYTES: Final = 64 << 20  # what we accept to be decoded in vain

_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
_PREAMBLE: Final = len(_SIGNATURE) + 8  # flags and the length of an extension, both 0
_ROW: Final = struct.Struct(">hiQi")  # two fields: the LSN with its length, the message's length; then the message
_LSN_BYTES: Final = 8
_END: Final = b"\xff\xff"  # instead of a number of fields


def bulk_end(slot: dict[str, Any], have: int, flushed: int) -> int | None:
    """Up to where the backlog is worth a call; None: the stream is as good, or cheaper."""
    restart = parse_lsn(slot.get("restart_lsn") or "0/0")
    if flushed - have < LEAST_BYTES or have - restart > AGAIN_BYTES:
        return None
    return min(flushed, have + MOST_BYTES)


def begin(conn: pq.abc.PGconn, slot: str, publication: str, upto: int) -> None:
    options = ", ".join(f"'{name}', '{value}'" for name, value in stream_options(publication))
    call = f"pg_catalog.pg_logical_slot_peek_binary_changes('{slot}', '{format_lsn(upto)}', NULL, {options})"
    result = conn.exec_(f"COPY (SELECT lsn, data FROM {call}) TO STDOUT (FORMAT binary)".encode())
    if result.status != pq.ExecStatus.COPY_OUT:
        raise result_error(result, conn)


def drain(conn: pq.abc.PGconn, assembler: Assembler) -> int:
    """Take what libpq has buffered; gives the number of messages. DoneStreaming at the end of the answer."""
    count = 0
    while True:
        size, data = conn.get_copy_data(1)
        if size <= 0:
            break
        if bytes(data[: len(_SIGNATURE)]) == _SIGNATURE:
            if any(data[len(_SIGNATURE) : _PREAMBLE]) or size < _PREAMBLE:
                raise protocol_error("the head of the backlog is not that of a copy")
            data = data[_PREAMBLE:]
        if bytes(data[:2]) != _END and len(data):
            _take(data, assembler)
            count += 1
    if size == -1:
        raise DoneStreaming
    return count


def _take(row: memoryview, assembler: Assembler) -> None:
    size = len(row) - _ROW.size
    if size < 1:
        raise protocol_error("a row of the backlog is cut off")
    fields, width, lsn, length = _ROW.unpack_from(row)
    if (fields, width, length) != (2, _LSN_BYTES, size):
        raise protocol_error("a row of the backlog is not a position and a message")
    with understood():
        assembler.take(lsn, row[_ROW.size :])


def end(conn: pq.abc.PGconn) -> None:
    """What the server said after the last row; the connection is free for the stream then."""
    while (result := conn.get_result()) is not None:
        if result.status != pq.ExecStatus.COMMAND_OK:
            raise result_error(result, conn)
