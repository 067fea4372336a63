"""The replication connection: opening it, checking that the slot still fits our spool, putting messages into the spool.

`reader.py` runs this in its own process and decides when to read, sync and answer. Here is what the bytes mean, as far
as transactions go: Begin, Commit, Relation, keep-alive. Columns are decoded much later, by Spark tasks.

Why the position may move on a keep-alive. A logical walsender decodes the log record by record. At a commit record it
sends the whole transaction, and only then moves its "sent" pointer to the end of that record; a keep-alive carries that
pointer, over the same ordered connection. So a keep-alive W that arrives between two transactions says: every
transaction whose commit record ends at or before W has been sent before it. Inside a transaction it says nothing new,
and is not used. It becomes our position only by the `sync` that also makes all transactions before it durable.

Why nothing is doubled or missed on reconnecting. We have all up to D, the durable position, which is the end of a log
record. The server sends the transactions whose commit record starts at or after the slot's confirmed flush;
`check_slot` refuses a slot whose confirmed flush lies after D, since then transactions between the two would be missing
without a word. A transaction with a commit record before D is compared with what we have (`history.py`) and skipped
(its table descriptions are still noted).
"""

from __future__ import annotations

import json
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final

from psycopg import pq

from headwater.capture.spool import RELATION, SpoolWriter
from headwater.connectors.postgres.client import classify, format_lsn, main_line, parse_lsn, protocol_error
from headwater.connectors.postgres.history import ALL_COPIED_AGAIN, History, restored
from headwater.errors import HeadwaterError, SourceError, TransientError

PG_EPOCH_US: Final = 946_684_800_000_000  # 2000-01-01 in Unix microseconds
MESSAGE_PREFIX: Final = "headwater"
TYPE: Final = ord("Y")
_W, _K = ord("w"), ord("k")
_BEGIN, _COMMIT, _MESSAGE, _ORIGIN = ord("B"), ord("C"), ord("M"), ord("O")
_U64: Final = struct.Struct(">Q")
_U32: Final = struct.Struct(">I")
_BEGIN_BODY: Final = struct.Struct(">QqI")  # final LSN, commit time, xid
_COMMIT_BODY: Final = struct.Struct(">BQQq")  # flags, commit LSN, end LSN, commit time
_STATUS: Final = struct.Struct(">cQQQqB")
_HEADER: Final = 25  # of an XLogData message: 'w', start, end, time
_LEAST_MESSAGE: Final = 7  # bytes: no message that pgoutput sends is shorter
_LEAST_DATA: Final = _HEADER + _LEAST_MESSAGE
_CHANGES: Final = b"IUDTRYMO"  # what may stand inside of a transaction
# A server that shuts down waits for clients that have not confirmed everything, and asks again after every answer. In
# all other cases it asks at most twice per wal_sender_timeout.
SHUTDOWN_REQUESTS: Final = 10
SHUTDOWN_WINDOW_S: Final = 3.0


class Place(Enum):
    """Where in the stream we are. Set by `Assembler` only; never stored."""

    OUTSIDE = "between two transactions"
    HELD = "after a Begin that is not written yet: most transactions of other tables end here"
    WRITING = "inside a transaction that goes to the spool"
    SKIPPING = "inside a transaction that the spool already has"


class Assembler:
    """Turns copy messages of the walsender into whole transactions of the spool."""

    def __init__(self, writer: SpoolWriter, history: History) -> None:
        self._writer = writer
        self.history = history
        self._place = Place.OUTSIDE
        self._has_rows = False  # a transaction that is skipped
        self._held: list[tuple[int, memoryview]] = []
        self._xid = 0
        self._have = writer.durable_lsn or 0
        self.received = self._have
        self.reply_requested = False
        self._asked_at = 0
        self._asked: deque[float] = deque(maxlen=SHUTDOWN_REQUESTS)

    @property
    def outside(self) -> bool:
        return self._place is Place.OUTSIDE

    def drain(self, conn: pq.abc.PGconn) -> int:
        """Take what libpq has buffered; gives the number of messages. DoneStreaming if the server ended the stream."""
        with understood():
            return self._drain(conn)

    def _drain(self, conn: pq.abc.PGconn) -> int:
        count = 0
        get, append, u64 = conn.get_copy_data, self._writer.append, _U64.unpack_from
        while True:
            size, data = get(1)
            if size <= 0:
                break
            count += 1
            kind = data[0]
            if kind == _W:
                if size < _LEAST_DATA:
                    raise protocol_error("a message of the stream is cut off")
                # `take`, written out: this is the hot path.
                if self._place is Place.WRITING and data[_HEADER] in b"IUD":
                    append(u64(data, 1)[0], data[_HEADER:])
                else:
                    self._message(u64(data, 1)[0], data[_HEADER:])
            elif kind == _K:
                self._keepalive(u64(data, 1)[0], bool(data[17]))
            else:
                raise protocol_error("a message of the stream is of no kind that we know")
        if size == -1:
            raise DoneStreaming
        return count

    def take(self, lsn: int, message: memoryview) -> None:
        """One message of the stream."""
        if len(message) < _LEAST_MESSAGE:
            raise protocol_error("a message of the stream is cut off")
        # Inside a transaction that is written, rows need no look at all.
        if self._place is Place.WRITING and message[0] in b"IUD":
            self._writer.append(lsn, message)
        else:
            self._message(lsn, message)

    def _keepalive(self, wal_end: int, reply: bool) -> None:
        if reply:
            self._asked_for_reply(wal_end)
        if self._place is Place.OUTSIDE:
            self._advance(wal_end)

    def _asked_for_reply(self, wal_end: int) -> None:
        """The same question again and again: the server wants to shut down, and would wait for us without an end.

        We acknowledge only what a checkpoint has committed (I3), so we let go instead, and come back when it is up.
        """
        self.reply_requested = True
        if wal_end != self._asked_at:
            self._asked.clear()
            self._asked_at = wal_end
        self._asked.append(time.monotonic())
        if len(self._asked) == SHUTDOWN_REQUESTS and self._asked[-1] - self._asked[0] < SHUTDOWN_WINDOW_S:
            raise TransientError("SOURCE_UNREACHABLE", "the server is shutting down")

    def _advance(self, lsn: int) -> None:
        self.history.reached(lsn)
        if lsn > self._writer.written_lsn:
            self._writer.advance(lsn)
        self.received = max(self.received, lsn)

    def _message(self, lsn: int, message: memoryview) -> None:
        kind = message[0]
        if kind == _BEGIN:
            self._begin(lsn, message)
        elif kind == _COMMIT:
            self._commit(lsn, message)
        elif kind not in _CHANGES:
            raise protocol_error("a message of the stream is of no kind that we know")
        elif self._place is Place.OUTSIDE:
            # A logical message outside of transactions: it was decoded after all that ended before it.
            self._advance(lsn)
        elif self._place is Place.SKIPPING:
            self._has_rows |= kind not in (_MESSAGE, _ORIGIN)
            if kind in (RELATION, TYPE):
                self._writer.describe(kind, _U32.unpack_from(message, 1)[0], lsn, bytes(message))
        elif kind == _MESSAGE:
            return  # other people's messages, and our heartbeat: no row of any table
        elif kind == _ORIGIN and self._place is Place.HELD:
            self._held.append((lsn, message))
        else:
            self._change(kind, lsn, message)

    def _begin(self, lsn: int, message: memoryview) -> None:
        if self._place is not Place.OUTSIDE:
            raise protocol_error("a transaction begins inside another one")
        final_lsn, _, self._xid = _BEGIN_BODY.unpack_from(message, 1)
        # Both are ends or starts of log records: a commit record that starts before D also ends there at the latest.
        if final_lsn < self._have:
            self._place, self._has_rows = Place.SKIPPING, False
        else:
            self.history.reached(final_lsn)
            self._place = Place.HELD
            self._held = [(lsn, message)]

    def _change(self, kind: int, lsn: int, message: memoryview) -> None:
        if self._place is Place.HELD:
            self._writer.begin(self._xid)
            for held in self._held:
                self._writer.append(*held)
            self._place = Place.WRITING
        if kind in (RELATION, TYPE):
            self._writer.describe(kind, _U32.unpack_from(message, 1)[0], lsn, bytes(message))
        self._writer.append(lsn, message)

    def _commit(self, lsn: int, message: memoryview) -> None:
        _, _, end_lsn, commit_time = _COMMIT_BODY.unpack_from(message, 1)
        place, self._place = self._place, Place.OUTSIDE
        self._held = []
        if place is Place.WRITING:
            self._writer.append(lsn, message)
            self._writer.commit(end_lsn, commit_time + PG_EPOCH_US)
            self.received = end_lsn
        elif place is Place.HELD:
            self._advance(end_lsn)
        elif place is Place.SKIPPING and self._has_rows:
            self.history.sent_again(end_lsn, self._xid, commit_time + PG_EPOCH_US)
        elif place is Place.OUTSIDE:
            raise protocol_error("a commit does not match its begin")


@contextmanager
def understood() -> Iterator[None]:
    """A message that ends before what it must have: the connection is made again, and the spool has whole ones only."""
    try:
        yield
    except (IndexError, struct.error):
        raise protocol_error("a message of the stream is cut off") from None


class DoneStreaming(Exception):
    """The server ended the copy; its result says why."""


def open_connection(conninfo: dict[str, str], application: str) -> pq.abc.PGconn:
    """A logical replication connection, which also takes plain SQL until the stream starts."""
    parts = {**conninfo, "replication": "database", "application_name": application}
    text = " ".join(f"{name}='{_escaped(value)}'" for name, value in parts.items())
    conn = pq.PGconn.connect(text.encode())
    if conn.status != pq.ConnStatus.OK:
        message = main_line(conn.get_error_message())
        conn.finish()
        # For a source that exists already even a refused log-in may heal: passwords are rotated, servers restart.
        raise TransientError("SOURCE_UNREACHABLE", _without(message, conninfo))
    if conn.parameter_status(b"server_encoding") == b"SQL_ASCII":
        # Any bytes may be in there. What is not UTF-8 stops its table when it is decoded; the server, were it asked for
        # UTF-8, would stop the stream of all tables there, and for ever.
        rows(conn, "SET client_encoding = 'SQL_ASCII'")
    return conn


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "\\'")


def _without(message: str, conninfo: dict[str, str]) -> str:
    secret = conninfo.get("password")
    return message.replace(secret, "…") if secret else message


def rows(conn: pq.abc.PGconn, command: str) -> list[list[str | None]]:
    """The result of a replication command or a simple query, as text."""
    result = conn.exec_(command.encode())
    if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
        raise result_error(result, conn)
    return [[_text(result.get_value(row, col)) for col in range(result.nfields)] for row in range(result.ntuples)]


def _text(value: bytes | None) -> str | None:
    return None if value is None else bytes(value).decode("utf-8", "replace")


# Up to Postgres 15, and since 16.
_UNREADABLE: Final = ("could not map filenode ", "could not map filenumber ")


def result_error(result: pq.abc.PGresult | None, conn: pq.abc.PGconn) -> HeadwaterError:
    """Why the server refused or ended the stream; what cannot be told apart is transient: the stream exists already."""
    state = _field(result, pq.DiagnosticField.SQLSTATE)
    message = _field(result, pq.DiagnosticField.MESSAGE_PRIMARY) or "the server closed the connection"
    if "publication" in message and state == "42704":
        return SourceError("SOURCE_PUBLICATION_LOST", message, hint=ALL_COPIED_AGAIN)
    if "wal_level" in message:
        return SourceError("SOURCE_WAL_LEVEL", message, hint="ALTER SYSTEM SET wal_level = 'logical'; then restart")
    if state in ("42704", "55000", "58P01"):
        return slot_lost(message)
    if message.startswith(_UNREADABLE):
        # A fault of the server's: a slot that was made while a table was being truncated may not know its new file.
        # Decoding stops at the same place whenever it is tried.
        return SourceError("SOURCE_SLOT_UNREADABLE", message, hint=f"a new slot is made, and {ALL_COPIED_AGAIN}")
    error = classify(state or "08006", message, "replication")
    if error.code == "SOURCE_SLOT_IN_USE":
        return TransientError(error.code, message, hint=error.hint)
    return TransientError(error.code, error.message, detail=error.detail, hint=error.hint)


def _field(result: pq.abc.PGresult | None, field: pq.DiagnosticField) -> str:
    value = result.error_field(field) if result is not None else None
    return bytes(value).decode("utf-8", "replace") if value else ""


def slot_lost(message: str) -> SourceError:
    return SourceError(
        "SOURCE_SLOT_LOST", message, hint=f"the changes since then are gone: a new slot is made, and {ALL_COPIED_AGAIN}"
    )


def identify(conn: pq.abc.PGconn) -> dict[str, Any]:
    system_id, timeline, flushed, database = rows(conn, "IDENTIFY_SYSTEM")[0][:4]
    return {
        "system_id": system_id,
        "timeline": int(timeline or 0),
        "flushed": parse_lsn(flushed or "0/0"),
        "database": database,
    }


def in_recovery(conn: pq.abc.PGconn) -> bool:
    """Whether the server replays its log, as a standby does, or one that ends a recovery and lets sessions read."""
    return rows(conn, "SELECT pg_is_in_recovery()") == [["t"]]


def slot_status(conn: pq.abc.PGconn, slot: str) -> dict[str, Any]:
    """The slot's row in pg_replication_slots, whatever columns this version has; SOURCE_SLOT_LOST if there is none."""
    query = f"SELECT to_jsonb(s) FROM pg_catalog.pg_replication_slots s WHERE slot_name = '{slot}'"
    found = rows(conn, query)
    if not found:
        raise slot_lost(f"replication slot {slot} does not exist")
    status: dict[str, Any] = json.loads(found[0][0] or "{}")
    return status


def check_slot(status: dict[str, Any], have_lsn: int | None) -> int:
    """The slot's confirmed position, if the slot can still give everything after `have_lsn`."""
    name = status["slot_name"]
    reason = status.get("invalidation_reason") or ("conflict" if status.get("conflicting") else "")
    if status.get("wal_status") == "lost" or reason:
        raise slot_lost(f"replication slot {name} was invalidated ({reason or 'its log was removed'})")
    if status.get("plugin") != "pgoutput" or not status.get("confirmed_flush_lsn"):
        raise slot_lost(f"replication slot {name} is not a pgoutput slot")
    confirmed = parse_lsn(status["confirmed_flush_lsn"])
    if have_lsn is not None and confirmed > have_lsn:
        raise SourceError(
            "SOURCE_SLOT_AHEAD",
            f"replication slot {name} was moved to {format_lsn(confirmed)}, we have the log to {format_lsn(have_lsn)}",
            hint=f"somebody else has read from the slot, or our data directory is an older copy; {ALL_COPIED_AGAIN}",
        )
    return confirmed


def check_identity(
    conn: pq.abc.PGconn, known: dict[str, Any] | None, now: dict[str, Any], have_lsn: int | None
) -> None:
    """Refuse a server whose log is not the continuation of what we have."""
    if known is not None and known["system_id"] != now["system_id"]:
        raise restored("the server is another cluster than before")
    if have_lsn is None:
        return
    if now["flushed"] < have_lsn:
        raise restored(f"the server's log ends at {format_lsn(now['flushed'])}, before our {format_lsn(have_lsn)}")
    if known is None or known["timeline"] == now["timeline"]:
        return
    fork = _fork_point(conn, known["timeline"], now["timeline"])
    if fork is None or fork < have_lsn:
        raise restored(f"the server's timeline {now['timeline']} left ours before {format_lsn(have_lsn)}")


def check_transactions(conn: pq.abc.PGconn, last_xid: int | None) -> None:
    """Refuse a server that does not know the last transaction that we have, or knows that it was rolled back."""
    if last_xid is None:
        return
    (found,) = rows(conn, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text")
    near = int(found[0] or 0)
    # 32 bits of it are in the stream: of two that fit, the nearer one. It may be above xmax, while it still waits for a
    # standby.
    xid = near + ((last_xid - near + (1 << 31)) % (1 << 32)) - (1 << 31)
    result = conn.exec_(f"SELECT pg_xact_status('{xid}'::xid8)".encode())
    unknown = _field(result, pq.DiagnosticField.SQLSTATE) == "22023"  # it is in the future
    if unknown or (result.status == pq.ExecStatus.TUPLES_OK and _text(result.get_value(0, 0)) == "aborted"):
        raise restored("the server does not have the last transaction that we have")


def _fork_point(conn: pq.abc.PGconn, ours: int, theirs: int) -> int | None:
    """Where the server's history left our timeline; None if ours is no part of it."""
    if theirs < ours:
        return None
    (found,) = rows(conn, f"TIMELINE_HISTORY {theirs}")
    for line in (found[1] or "").splitlines():
        parts = line.split("\t")
        if len(parts) >= 2 and parts[0].strip() == str(ours):
            return parse_lsn(parts[1].strip())
    return None


def publication_query(publication: str, server_version: int) -> str:
    """One JSON: the publication's number and version, and the numbers of its entries for tables and schemas.

    A table or publication that was dropped and made again has another number, and changes in between were not sent:
    old servers fail at them, newer ones (18) leave them out without a word. The version (the transaction that wrote
    its row) changes with its options: `publish = 'insert'` leaves updates out without a word in every version. A
    partition of another entry is left out: its changes come under that one's name (`slots.require_own_name`).
    """
    schemas = "'{}'::jsonb"
    if server_version >= 150_000:
        schemas = "(SELECT jsonb_object_agg(pnnspid, oid::int8) FROM pg_publication_namespace WHERE pnpubid = p.oid)"
    above = (
        "(p.pubviaroot AND EXISTS (SELECT FROM pg_publication_rel other WHERE other.prpubid = p.oid AND "
        "other.prrelid <> own.prrelid AND other.prrelid IN (SELECT relid FROM pg_partition_ancestors(own.prrelid))))"
    )
    name = publication.replace("'", "''")
    return (
        "SELECT jsonb_build_object('oid', p.oid::int8, 'version', p.xmin::text, 'all', p.puballtables, 'tables', "
        "(SELECT jsonb_object_agg(prrelid, oid::int8) FROM pg_publication_rel own "
        f"WHERE prpubid = p.oid AND NOT {above}), "
        f"'schemas', {schemas})::text FROM pg_catalog.pg_publication p WHERE pubname = '{name}'"
    )


def check_publication(publication: str, found: str | None, known_oid: int | None) -> dict[str, Any]:
    """The answer to `publication_query`, if it is still the publication that we began with."""
    hint = f"changes made meanwhile were not sent: it is made again if we may, and {ALL_COPIED_AGAIN}"
    if found is None:
        raise SourceError("SOURCE_PUBLICATION_LOST", f"publication {publication} does not exist", hint=hint)
    content: dict[str, Any] = json.loads(found)
    if known_oid is not None and content["oid"] != known_oid:
        raise SourceError("SOURCE_PUBLICATION_LOST", f"publication {publication} was dropped and made again", hint=hint)
    return content


def stream_options(publication: str) -> tuple[tuple[str, str], ...]:
    """What we ask of pgoutput; quotes in the values are doubled, as in a literal."""
    quoted = '"' + publication.replace('"', '""') + '"'
    return (("proto_version", "1"), ("publication_names", quoted.replace("'", "''")), ("messages", "true"))


def start_streaming(conn: pq.abc.PGconn, slot: str, publication: str, lsn: int) -> None:
    options = ", ".join(f"{name} '{value}'" for name, value in stream_options(publication))
    command = f'START_REPLICATION SLOT "{slot}" LOGICAL {format_lsn(lsn)} ({options})'
    result = conn.exec_(command.encode())
    if result.status != pq.ExecStatus.COPY_BOTH:
        raise result_error(result, conn)
    conn.nonblocking = 1


def status_update(*, received: int, acknowledged: int, now_us: int, want_reply: bool) -> bytes:
    """Standby status: written = received; flushed and applied = what a checkpoint has acknowledged, no more (I3)."""
    return _STATUS.pack(b"r", received, acknowledged, acknowledged, now_us - PG_EPOCH_US, want_reply)
