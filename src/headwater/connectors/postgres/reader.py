"""The reader of one slot: its own process, from the walsender into the spool.

`python -m headwater.connectors.postgres.reader`, with both pipes to the engine:

    stdin   first line: the configuration as JSON (with the password: never in argv or the environment), then commands
            {"ack": lsn}    a checkpoint has made everything up to lsn durable: the server may forget it (I3)
            {"nudge": lsn}  somebody waits for the position to reach lsn: make the server write something if need be
            {"stop": true}  end in order; the end of stdin (the engine is gone) means the same
    stdout  events as JSON lines: connected, position, server (the end of its log), error, publication (it has changed),
            backlog (one was read in bulk: `backlog.py`)
    exit    0 stopped, 3 definite error (the last error event says which), 1 anything else: start it again

`replication.py` knows the protocol, `capture/spool.py` the files, `reader_process.py` is the other end of the pipes.

A walsender gives many small segments; waking up for each costs ten times the work per change. So under load we sleep
READ_PAUSE_S between reads and let the kernel gather, and one sync (fsync) serves everything since the last one.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import pq

from headwater.capture.spool import TARGET_FILE_BYTES, SpoolWriter, missing
from headwater.connectors.postgres import backlog, replication
from headwater.connectors.postgres.client import main_line, parse_lsn, reader_name
from headwater.connectors.postgres.history import History
from headwater.errors import DefiniteError, HeadwaterError, TransientError

READ_PAUSE_S: Final = 0.005
BUSY_MESSAGES: Final = 200  # a read that found more than this is followed by a pause
SYNC_INTERVAL_S: Final = 0.05  # at most 20 syncs, and position events, per second
STATUS_INTERVAL_S: Final = 1.0
PING_AFTER_S: Final = 10.0  # without a word from the server we ask for one
SILENCE_LIMIT_S: Final = 60.0  # as Postgres' own wal_receiver_timeout
BACKOFF_S: Final = (0.1, 5.0)
LOCK_WAIT_S: Final = 10.0  # an older reader ends within milliseconds of its engine
EXIT_DEFINITE: Final = 3
# Written to the log by a session of ours; flushed at once, and not held up by a synchronous standby.
_EMIT: Final = f"SELECT pg_logical_emit_message(true, '{replication.MESSAGE_PREFIX}', '')::text"
_CURRENT: Final = "SELECT pg_current_wal_flush_lsn()::text"


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    """What the process is told on its first line of stdin."""

    conninfo: dict[str, str]
    slot: str
    publication: str
    directory: str
    start_lsn: int | None = None  # where a new spool begins; None: where the slot stands
    acknowledged: int = 0
    heartbeat_s: float = 10.0
    file_bytes: int = TARGET_FILE_BYTES

    def __repr__(self) -> str:
        return f"ReaderConfig(slot={self.slot!r})"


class Stop(Exception):
    """We were asked to end, or the engine is gone."""


class Control:
    """Both pipes to the engine. Commands are taken by the main thread; events may come from any."""

    def __init__(self) -> None:
        self._buffer = b""
        self._lock = threading.Lock()
        os.set_blocking(0, False)

    def first_line(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            select.select([0], [], [])
            self._fill()
        line, _, self._buffer = self._buffer.partition(b"\n")
        config: dict[str, Any] = json.loads(line)
        return config

    def commands(self) -> list[dict[str, Any]]:
        """What has arrived; Stop at the end of stdin."""
        if select.select([0], [], [], 0)[0]:
            self._fill()
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines if line.strip()]

    def _fill(self) -> None:
        try:
            chunk = os.read(0, 65_536)
        except BlockingIOError:
            return
        if not chunk:
            raise Stop
        self._buffer += chunk

    def emit(self, event: str, **fields: Any) -> None:
        data = json.dumps({"event": event, **fields}).encode() + b"\n"
        with self._lock:
            try:
                while data:
                    data = data[os.write(1, data) :]
            except BrokenPipeError:
                raise Stop from None

    def error(self, error: HeadwaterError) -> None:
        transient = not isinstance(error, DefiniteError)
        self.emit("error", code=error.code, message=error.message, hint=error.hint, transient=transient)


class Pulse(threading.Thread):
    """Writes a message into the server's log when somebody waits for a position that an idle server would never reach.

    A nudge asks for it at once. Besides, every `interval_s`: only if the log has grown and our position has not moved
    since the last look. Keep-alives normally move it, so an idle database gets no message and its log does not grow.
    """

    def __init__(self, config: ReaderConfig, control: Control, position: int) -> None:
        super().__init__(name="pulse", daemon=True)
        self._conninfo: dict[str, Any] = {**config.conninfo, "application_name": "headwater heartbeat"}
        self._publication = config.publication
        self._interval_s = config.heartbeat_s
        self._control = control
        self._content: dict[str, Any] = {}
        self._wake = threading.Event()
        self._wanted = 0
        self._emitted = 0
        self._conn: psycopg.Connection[Any] | None = None
        self.position = position
        self.publication_oid: int | None = None  # set by the main thread once it is connected
        self.problem: DefiniteError | None = None  # taken by the main thread

    def nudge(self, lsn: int) -> None:
        self._wanted = max(self._wanted, lsn)
        self._wake.set()

    def run(self) -> None:
        last_position, next_look = -1, time.monotonic() + self._interval_s
        while True:
            waiting = self._wanted > max(self.position, self._emitted)
            self._wake.wait(1.0 if waiting else max(0.0, next_look - time.monotonic()))
            self._wake.clear()
            try:
                if self._wanted > max(self.position, self._emitted):
                    self._emitted = parse_lsn(self._ask(_EMIT))
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + self._interval_s
                    current = parse_lsn(self._ask(_CURRENT))
                    self._control.emit("server", lsn=current)
                    if self.position == last_position and current > self.position:
                        self._emitted = parse_lsn(self._ask(_EMIT))
                    last_position = self.position
                self._look_at_publication()
            except DefiniteError as error:
                self.problem = error
                return
            except (psycopg.Error, HeadwaterError):
                self._drop()  # the main thread has the same trouble, and reports it
            except Stop:
                return  # the engine is gone: the main thread notices by itself

    def _look_at_publication(self) -> None:
        if self.publication_oid is None or self._conn is None:
            return
        query = replication.publication_query(self._publication, self._conn.info.server_version)
        row = self._conn.execute(query.encode()).fetchone()
        content = replication.check_publication(self._publication, row[0] if row else None, self.publication_oid)
        if content != self._content:
            self._content = content
            self._control.emit("publication", **content)

    def _ask(self, query: str) -> str:
        if self._conn is None:
            self._conn = psycopg.connect("", autocommit=True, **self._conninfo)
            self._conn.execute("SET synchronous_commit = local")
        row = self._conn.execute(query.encode()).fetchone()
        return str(row[0]) if row else "0/0"

    def _drop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()
        time.sleep(0.2)


class Reader:
    """The main thread: connections one after the other, each feeding the same spool."""

    def __init__(self, config: ReaderConfig, control: Control, writer: SpoolWriter) -> None:
        self._config = config
        self._control = control
        self._writer = writer
        self._acknowledged = config.acknowledged
        self._pulse = Pulse(config, control, writer.durable_lsn or 0)
        self._last_sync = 0.0
        self._last_status = 0.0
        self._last_heard = 0.0
        self._status_due = False
        self._failures = 0
        self._bulk = True  # a backlog may be read by backlog.py
        self._server_lsn = 0  # the end of the server's log when we connected

    def run(self) -> None:
        """Until stopped, or until a definite error."""
        self._pulse.start()
        while True:
            try:
                self._connection()
            except TransientError as error:
                self._control.error(error)
            except psycopg.Error as error:
                self._control.error(TransientError("SOURCE_UNREACHABLE", main_line(str(error))))
            self._back_off()

    def _back_off(self) -> None:
        low, high = BACKOFF_S
        pause = min(high, low * 2 ** min(self._failures, 10)) * random.uniform(0.5, 1.0)
        self._failures += 1
        deadline = time.monotonic() + pause
        while (left := deadline - time.monotonic()) > 0:
            select.select([0], [], [], left)
            self._obey()

    def _connection(self) -> None:
        conn = replication.open_connection(self._config.conninfo, reader_name(self._config.slot))
        try:
            self._stream(conn, self._begin(conn))
        finally:
            conn.finish()
            if self._writer.in_transaction:
                self._writer.rollback()

    def _begin(self, conn: pq.abc.PGconn) -> History:
        """Start the stream so that it goes on where we left off, or where a bulk read of a large backlog ended."""
        if replication.in_recovery(conn):
            # It may not have replayed yet what we have. And a newer server would stream on the timeline that ends with
            # its recovery, and go on with the next without a word: what we have would then look like another server's.
            raise TransientError("SOURCE_UNREACHABLE", "the server is in recovery", hint="it is waited for")
        confirmed, bulk_end = self._prepare(conn)
        history = self._history(confirmed)
        if bulk_end is not None:
            self._read_backlog(conn, bulk_end, history)
            # The call has sent again what the stream would: all of it, if it went beyond what we had.
            history = self._history(self._writer.sync() if history.is_ours else confirmed)
        replication.start_streaming(conn, self._config.slot, self._config.publication, history.start)
        self._control.emit("connected", start_lsn=history.have, server_lsn=self._server_lsn)
        self._report()
        return history

    def _history(self, confirmed: int) -> History:
        begin = self._config.start_lsn or 0
        return History.of_spool(self._config.directory, self._writer.sync(), confirmed=confirmed, begin=begin)

    def _prepare(self, conn: pq.abc.PGconn) -> tuple[int, int | None]:
        """Check that this server and slot continue what we have; gives where the slot stands, and `bulk_end`."""
        now = replication.identify(conn)
        self._server_lsn = now["flushed"]
        if self._writer.durable_lsn is None and self._config.acknowledged > (self._config.start_lsn or 0):
            raise missing(0)  # the server has forgotten what was in it, on our word
        have = self._writer.durable_lsn if self._writer.durable_lsn is not None else self._config.start_lsn
        replication.check_identity(conn, self._writer.identity(), now, have)
        replication.check_transactions(conn, self._writer.last_xid)
        status = replication.slot_status(conn, self._config.slot)
        confirmed = replication.check_slot(status, have)
        if self._writer.durable_lsn is None:
            self._writer.initialise(have if have is not None else confirmed)
        self._know(conn, now)
        have = self._writer.sync()
        return confirmed, backlog.bulk_end(status, have, now["flushed"]) if self._bulk else None

    def _read_backlog(self, conn: pq.abc.PGconn, upto: int, history: History) -> None:
        """Whatever goes wrong here (rights, room for temporary files, the connection): the next try is the stream."""
        self._bulk = False
        backlog.begin(conn, self._config.slot, self._config.publication, upto)
        self._control.emit("connected", start_lsn=self._writer.durable_lsn, server_lsn=self._server_lsn)
        assembler = replication.Assembler(self._writer, history)
        poll = select.poll()
        poll.register(conn.socket, select.POLLIN)
        poll.register(0, select.POLLIN)
        messages = 0
        while True:
            if any(fd == 0 for fd, _ in poll.poll(1000 * STATUS_INTERVAL_S)):
                self._obey()
            conn.consume_input()
            try:
                messages += backlog.drain(conn, assembler)
            except replication.DoneStreaming:
                break
            now = time.monotonic()
            if self._writer.dirty and now - self._last_sync >= SYNC_INTERVAL_S:
                self._sync(now)
        backlog.end(conn)
        self._control.emit("backlog", messages=messages, upto=upto)
        self._bulk = True

    def _know(self, conn: pq.abc.PGconn, now: dict[str, Any]) -> None:
        """Note whose stream this is, for the next connection to compare with."""
        name, before = self._config.publication, self._writer.identity() or {}
        found = replication.rows(conn, replication.publication_query(name, conn.server_version))
        oid = before.get("publication_oid") if before.get("publication") == name else None
        content = replication.check_publication(name, found[0][0] if found else None, oid)
        known = {
            "system_id": now["system_id"],
            "timeline": now["timeline"],
            "slot": self._config.slot,
            "publication": name,
            "publication_oid": content["oid"],
        }
        if before != known:
            self._writer.set_identity(known)
        self._pulse.publication_oid = content["oid"]
        self._control.emit("publication", **content)

    def _stream(self, conn: pq.abc.PGconn, history: History) -> None:
        assembler = replication.Assembler(self._writer, history)
        poll = select.poll()
        poll.register(conn.socket, select.POLLIN)
        poll.register(0, select.POLLIN)
        self._last_heard = time.monotonic()
        self._status_due = True
        was_ours = history.is_ours
        while True:
            ready = poll.poll(1000 * self._pause())
            if any(fd == 0 for fd, _ in ready):
                self._obey()
            conn.consume_input()
            try:
                count = assembler.drain(conn)
            except replication.DoneStreaming:
                raise replication.result_error(conn.get_result(), conn) from None
            if self._pulse.problem is not None:
                raise self._pulse.problem
            if history.is_ours and not was_ours:
                was_ours = self._status_due = True  # what was held back until now is acknowledged
            now = time.monotonic()
            if count:
                self._last_heard, self._failures = now, 0
            if self._writer.dirty and now - self._last_sync >= SYNC_INTERVAL_S:
                self._sync(now)
            self._answer(conn, assembler, now)
            if count > BUSY_MESSAGES:
                time.sleep(READ_PAUSE_S)

    def _pause(self) -> float:
        """How long we may sleep if nothing arrives."""
        if self._writer.dirty:
            return max(0.0, self._last_sync + SYNC_INTERVAL_S - time.monotonic())
        return STATUS_INTERVAL_S

    def _sync(self, now: float) -> None:
        self._pulse.position = self._writer.sync()
        self._last_sync = now
        self._report()

    def _report(self) -> None:
        writer = self._writer
        self._control.emit(
            "position", durable_lsn=writer.durable_lsn, received=writer.written_lsn, bytes=writer.bytes_written
        )

    def _answer(self, conn: pq.abc.PGconn, assembler: replication.Assembler, now: float) -> None:
        """Standby status when it is asked for, after an acknowledgement, and once a second."""
        quiet = now - self._last_heard
        if quiet > SILENCE_LIMIT_S:
            raise TransientError("SOURCE_UNREACHABLE", f"no word from the server for {SILENCE_LIMIT_S:.0f} s")
        due = self._status_due or assembler.reply_requested or now - self._last_status >= STATUS_INTERVAL_S
        if due:
            is_ours = assembler.history.is_ours
            update = replication.status_update(
                received=assembler.received,
                acknowledged=self._acknowledged if is_ours else 0,  # 0 says nothing
                now_us=time.time_ns() // 1000,
                want_reply=quiet > PING_AFTER_S or not is_ours,
            )
            conn.put_copy_data(update)
            assembler.reply_requested = self._status_due = False
            self._last_status = now
        conn.flush()

    def _obey(self) -> None:
        for command in self._control.commands():
            if command.get("stop"):
                raise Stop
            if "ack" in command:
                # Never beyond what is durable here, whatever we are told.
                lsn = min(int(command["ack"]), self._writer.durable_lsn or 0)
                self._acknowledged = max(self._acknowledged, lsn)
                self._status_due = True
            if "nudge" in command:
                self._pulse.nudge(int(command["nudge"]))


def _open_spool(config: ReaderConfig) -> SpoolWriter:
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return SpoolWriter(config.directory, target_bytes=config.file_bytes, complete_to=config.acknowledged)
        except TransientError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main() -> int:
    control = Control()
    try:
        config = ReaderConfig(**control.first_line())
        Reader(config, control, _open_spool(config)).run()
    except Stop:
        return 0
    except HeadwaterError as error:
        control.error(error)
        return EXIT_DEFINITE if isinstance(error, DefiniteError) else 1
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else "input or output error"
        control.error(TransientError("SPOOL_WRITE_FAILED", f"the spool cannot be written: {reason}"))
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the pulse thread may hang in a connection attempt: nothing of it needs an orderly end
