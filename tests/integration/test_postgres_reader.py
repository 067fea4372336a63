"""The reader process against real servers: the spool holds every transaction exactly once, in commit order."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headwater.capture.source import ChangeStream
from headwater.capture.spool import SpoolReader, SpoolWriter
from headwater.connectors.postgres import replication, slots
from headwater.connectors.postgres.catalogue import describe
from headwater.connectors.postgres.client import PostgresConfig, format_lsn, parse_lsn
from headwater.connectors.postgres.reader_process import ReaderProcess
from headwater.errors import HeadwaterError, SourceError, TransientError
from headwater.testing.proxy import TcpProxy
from headwater.testing.servers import PostgresServer
from postgres_versions import NEWEST

pytestmark = pytest.mark.postgres
PEEK = (
    "SELECT xid::text, data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, "
    "'proto_version', '1', 'publication_names', 'pub')"
)
KILLS = 5
CONFIRMED = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = 's'"
TABLES = """
CREATE TABLE a (id bigint PRIMARY KEY, v text);
CREATE TABLE b (id bigint PRIMARY KEY, v text);
CREATE TABLE other (id bigint PRIMARY KEY, v text);
CREATE PUBLICATION pub FOR TABLE a, b;
"""


@dataclass
class Place:
    """A database with two tables, a publication and two slots: `s` for the reader, `peek` to compare with."""

    server: PostgresServer
    name: str
    spool: Path
    options: dict[str, str] = field(default_factory=dict)

    def config(self, **options: str) -> PostgresConfig:
        base = {
            "hostname": self.server.host,
            "port": str(self.server.port),
            "username": self.server.user,
            "password": self.server.password,
            "database.name": self.name,
            "slot.name": "s",
            "publication.name": "pub",
        }
        return PostgresConfig.from_options({**base, **self.options, **options})

    def connect(self) -> psycopg.Connection[Any]:
        return self.server.connect(self.name)

    def execute(self, *statements: str) -> None:
        self.server.execute(*statements, database=self.name)

    def one(self, query: str) -> Any:
        with self.connect() as conn:
            row = conn.execute(query.encode()).fetchone()
            return row[0] if row else None

    def current(self) -> int:
        return parse_lsn(self.one("SELECT pg_current_wal_insert_lsn()::text"))


@pytest.fixture(scope="module", params=NEWEST)
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    if not PostgresServer.available(request.param):
        pytest.skip(f"no binaries of Postgres {request.param} on this machine")
    with PostgresServer(request.param) as running:
        yield running


@pytest.fixture
def place(server: PostgresServer, tmp_path: Path) -> Iterator[Place]:
    name = f"db_{time.time_ns()}"
    server.create_database(name)
    server.execute(*[s for s in TABLES.split(";") if s.strip()], database=name)
    for slot in ("s", "peek"):
        server.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')", database=name)
    yield Place(server, name, tmp_path / "spool")
    for slot in ("s", "peek"):
        drop = f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = '{slot}'"
        _eventually(partial(_quietly, server, drop))


def _quietly(server: PostgresServer, statement: str) -> bool:
    try:
        server.execute(statement)
    except psycopg.Error:
        return False
    return True


def _eventually(condition: Callable[[], bool], seconds: float = 20.0, pause: float = 0.05) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(pause)


def _spooled(spool: Path, upto: int = (1 << 63) - 1) -> list[tuple[int, list[bytes]]]:
    """(xid, messages without descriptions) of every transaction; every change has its table described before it."""
    reader = SpoolReader(spool)
    result = []
    for range_ in reader.ranges(0, upto, 64 << 10):
        known = set(reader.relations_at(range_))
        data, at = reader.read(range_), 0
        while at < len(data):
            size, _ = struct.unpack_from("<IQ", data, at)
            message = data[at + 12 : at + 12 + size]
            at += 12 + size
            if message[:1] == b"B":
                result.append((struct.unpack_from(">I", message, 17)[0], [message]))
            elif message[:1] == b"R":
                known.add(struct.unpack_from(">I", message, 1)[0])
            else:
                if message[:1] in b"IUD":
                    assert struct.unpack_from(">I", message, 1)[0] in known
                result[-1][1].append(message)
    return result


def _peeked(place: Place) -> list[tuple[int, list[bytes]]]:
    result: list[tuple[int, list[bytes]]] = []
    with place.connect() as conn, conn.cursor(binary=True) as cursor:
        for xid, data in cursor.execute(PEEK, ("peek",)):
            if data[:1] == b"B":
                result.append((int(xid), [data]))
            elif data[:1] not in (b"R", b"Y"):
                result[-1][1].append(data)
    # A transaction without changes has only its begin and commit (sent by old versions): the spool leaves it out.
    return [t for t in result if len(t[1]) > 2]


class Writers:
    """Sessions that write small and middle transactions until stopped; they survive restarts of the server."""

    def __init__(self, place: Place, count: int = 3) -> None:
        self._place = place
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(i,)) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _write(self, seed: int) -> None:
        rng = random.Random(seed)
        key = seed * 1_000_000_000
        while not self._stop.is_set():
            try:
                with self._place.server.connect(self._place.name, autocommit=False) as conn:
                    while not self._stop.is_set():
                        key += 1
                        rows = rng.choice([1, 2, 50])
                        for table in ("a", "b", "other"):
                            insert = (
                                f"INSERT INTO {table} SELECT %s + g, repeat('x', 100) FROM generate_series(1, %s) g"
                            )
                            conn.execute(insert.encode(), (key, rows))
                        conn.execute(b"UPDATE a SET v = 'y' WHERE id = %s", (key + rng.randint(0, 40),))
                        key += rows
                        conn.rollback() if rng.random() < 0.1 else conn.commit()
            except psycopg.Error:
                time.sleep(0.1)
                key += 10_000

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def _run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 240))  # a guard, not a measure: machines are busy


@pytest.mark.parametrize("truncating", [pytest.param(False, marks=pytest.mark.slow), True])
def test_spool_holds_every_transaction_once_in_order_although_the_reader_is_killed(
    place: Place, truncating: bool
) -> None:
    rng = random.Random(7)
    kills = 0

    async def scenario() -> None:
        nonlocal kills
        # Small files, so that the reader is also killed while it begins another one.
        reader = ReaderProcess(place.config(), place.spool, file_bytes=300_000)
        await reader.start()
        writers = await asyncio.to_thread(Writers, place)
        dead = None
        try:
            for _ in range(KILLS):
                while not reader.connected or reader.pid in (dead, None):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(rng.uniform(0.0, 0.8))
                if (dead := reader.pid) is not None:
                    os.kill(dead, signal.SIGKILL)
                    kills += 1
                reader.ack(reader.position)
                if truncating:
                    SpoolReader(place.spool).truncate_before(reader.position)
        finally:
            await asyncio.to_thread(writers.stop)
        await reader.wait_for(place.current())
        assert reader.last_error is None
        await reader.stop()

    _run(scenario())
    spooled, peeked = _spooled(place.spool), _peeked(place)
    assert kills == KILLS and len(peeked) > 20 and spooled
    assert spooled == peeked[-len(spooled) :]
    assert truncating or len(spooled) == len(peeked)


def test_whoever_waits_for_a_reader_that_is_stopped_is_told(place: Place) -> None:
    async def scenario() -> None:
        reader = ReaderProcess(place.config(), place.spool)
        assert isinstance(reader, ChangeStream)
        await reader.start()
        waiting = asyncio.create_task(reader.wait_for((1 << 62) - 1))
        await reader.wait_for(place.current())
        await reader.stop()
        with pytest.raises(TransientError, match="READER_STOPPED"):
            await waiting

    _run(scenario())


def _backlog(place: Place) -> None:
    """About 30 MB of the log: large, small, rolled back and nested transactions, and one that is not for us."""
    rows = "INSERT INTO {table} SELECT g, repeat('x', 200) FROM generate_series({low}, {high}) g"
    with place.server.connect(place.name, autocommit=False) as conn:
        for i in range(20):
            for table in ("a", "b", "other"):
                conn.execute(rows.format(table=table, low=i * 2000, high=i * 2000 + 1999).encode())
            conn.execute(b"SAVEPOINT x")
            conn.execute(b"DELETE FROM a WHERE id % 7 = 0")
            conn.execute(b"ROLLBACK TO x" if i % 2 else b"RELEASE x")
            conn.rollback() if i % 5 == 4 else conn.commit()
        for i in range(200):
            conn.execute(b"UPDATE b SET v = 'y' WHERE id = %s", (i,))
            conn.commit()


def test_a_large_backlog_is_read_in_bulk_and_the_same_as_the_stream(place: Place) -> None:
    _backlog(place)
    received = 0

    async def scenario() -> None:
        nonlocal received
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        await reader.wait_for(place.current())
        received = reader.bulk_messages
        await asyncio.to_thread(place.execute, "INSERT INTO a VALUES (-1, '')")
        await reader.wait_for(place.current())
        await reader.stop()

    _run(scenario())
    spooled = _spooled(place.spool)
    assert received > 60_000
    assert spooled == _peeked(place)


def test_a_backlog_far_behind_the_slots_restart_is_left_to_the_stream(place: Place) -> None:
    """So it is while an old transaction is open at the source, or a checkpoint of ours is long in coming."""

    async def scenario() -> None:
        reader = ReaderProcess(place.config(), place.spool)  # it gets no acknowledgement
        await reader.start()
        for _ in range(3):
            await asyncio.to_thread(_backlog, place)
            await asyncio.to_thread(place.execute, "TRUNCATE a, b, other")
        await reader.wait_for(place.current())
        await reader.stop()
        await asyncio.to_thread(_backlog, place)
        again = ReaderProcess(place.config(), place.spool)
        await again.start()
        await again.wait_for(place.current())
        assert again.bulk_messages == 0 and again.connected
        await again.stop()

    begin = place.current()
    _run(scenario())
    assert place.current() - begin > 100 << 20
    assert _spooled(place.spool) == _peeked(place)


def test_a_bulk_read_that_is_refused_is_left_to_the_stream(place: Place) -> None:
    _backlog(place)

    async def scenario() -> None:
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        await reader.wait_for(place.current())
        assert reader.bulk_messages == 0 and reader.connected
        await reader.stop()

    place.execute("ALTER SYSTEM SET temp_file_limit = '1MB'", "SELECT pg_reload_conf()")
    try:
        _run(scenario())
    finally:
        place.execute("ALTER SYSTEM RESET temp_file_limit", "SELECT pg_reload_conf()")
    assert _spooled(place.spool) == _peeked(place)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_reader_goes_on_after_a_restart_of_the_server(place: Place, mode: Any) -> None:
    async def scenario() -> None:
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        writers = await asyncio.to_thread(Writers, place)
        try:
            await asyncio.sleep(1.0)
            pid = reader.pid
            await asyncio.to_thread(place.server.restart, mode)
            await asyncio.sleep(1.0)
            assert reader.pid == pid, "the same process reconnects"
        finally:
            await asyncio.to_thread(writers.stop)
        await reader.wait_for(place.current())
        assert reader.connected and reader.last_error is None
        await reader.stop()

    _run(scenario())
    assert _spooled(place.spool) == _peeked(place)


def test_server_can_shut_down_although_not_everything_is_acknowledged(place: Place) -> None:
    async def scenario() -> None:
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        await asyncio.to_thread(place.execute, "INSERT INTO a VALUES (1, '')", "INSERT INTO a VALUES (2, '')")
        await reader.wait_for(place.current())
        first = int(SpoolReader(place.spool).transactions(0, reader.position)["end_lsn"][0])
        reader.ack(first)
        await asyncio.to_thread(_eventually, lambda: parse_lsn(place.one(CONFIRMED)) == first)
        started = time.monotonic()
        await asyncio.to_thread(place.server.stop, "fast")
        assert time.monotonic() - started < 15, "the walsender waits for its client"
        await asyncio.to_thread(place.server.start)
        await asyncio.to_thread(place.execute, "INSERT INTO a VALUES (3, '')")
        await reader.wait_for(place.current())
        await asyncio.to_thread(_eventually, lambda: parse_lsn(place.one(CONFIRMED)) == first)
        await reader.stop()

    _run(scenario())
    assert len(_spooled(place.spool)) == 3


def test_reader_goes_on_after_the_connection_is_cut_inside_a_large_transaction(place: Place) -> None:
    async def scenario() -> None:
        with TcpProxy(place.server.port) as proxy:
            place.options["port"] = str(proxy.port)
            reader = ReaderProcess(place.config(), place.spool)
            await reader.start()
            await reader.wait_for(place.current())
            insert = "INSERT INTO a SELECT g, repeat('z', 200) FROM generate_series(1, 100000) g"
            await asyncio.to_thread(place.execute, insert)
            size = place.spool / "000000000001.spool"
            await asyncio.to_thread(_eventually, lambda: size.stat().st_size > 2 << 20, pause=0.005)
            await asyncio.to_thread(proxy.cut)
            await reader.wait_for(place.current())
            await reader.stop()

    _run(scenario())
    spooled = _spooled(place.spool)
    assert [len(messages) for _, messages in spooled] == [100_002]
    assert spooled == _peeked(place)


def test_transaction_of_200k_rows_is_one_whole_range(place: Place) -> None:
    async def scenario() -> None:
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        await asyncio.to_thread(
            place.execute,
            "INSERT INTO a SELECT g, repeat('z', 300) FROM generate_series(1, 200000) g",
            "INSERT INTO b VALUES (1, 'after')",
        )
        await reader.wait_for(place.current())
        await reader.stop()

    _run(scenario())
    ranges = SpoolReader(place.spool).ranges(0, (1 << 63) - 1, 1 << 20)
    assert [r.file for r in ranges] == [1, 2], "the file ends after the transaction that made it large"
    assert ranges[0].size > 60_000_000
    assert _spooled(place.spool) == _peeked(place)


def test_position_follows_the_servers_log_when_no_table_of_ours_changes(place: Place) -> None:
    async def scenario() -> None:
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        await reader.wait_for(place.current())
        await asyncio.to_thread(place.execute, "INSERT INTO other SELECT g, '' FROM generate_series(1, 1000) g")
        want = parse_lsn(place.one("SELECT pg_current_wal_flush_lsn()::text"))
        started = time.monotonic()
        while reader.position < want:  # no nudge: by keep-alives alone
            assert time.monotonic() - started < 5
            await asyncio.sleep(0.02)
        await reader.stop()

    _run(scenario())
    assert _spooled(place.spool) == []


def test_wait_for_the_current_position_of_an_idle_server_ends_within_two_seconds(place: Place) -> None:
    async def scenario() -> None:
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        await reader.wait_for(place.current())
        for _ in range(3):
            started = time.monotonic()
            await reader.wait_for(place.current() + 1)
            assert time.monotonic() - started < 2
        await reader.stop()

    _run(scenario())


def test_idle_database_gets_no_heartbeats(place: Place) -> None:
    async def scenario() -> None:
        reader = ReaderProcess(place.config(**{"heartbeat.interval.ms": "200"}), place.spool)
        await reader.start()
        await reader.wait_for(place.current())
        await asyncio.sleep(2)
        before = place.current()
        await asyncio.sleep(3)
        # Postgres itself writes a record about running transactions now and then.
        assert place.current() - before < 1000
        await reader.stop()

    _run(scenario())


def test_server_may_forget_only_what_was_acknowledged(place: Place) -> None:
    async def scenario() -> None:
        start = parse_lsn(place.one(CONFIRMED))
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        await asyncio.to_thread(place.execute, "INSERT INTO a VALUES (1, '')", "INSERT INTO a VALUES (2, '')")
        await reader.wait_for(place.current())
        await asyncio.sleep(1.5)
        assert parse_lsn(place.one(CONFIRMED)) == start
        first = int(SpoolReader(place.spool).transactions(0, reader.position)["end_lsn"][0])
        reader.ack(first)
        for _ in range(100):
            if parse_lsn(place.one(CONFIRMED)) == first:
                break
            await asyncio.sleep(0.05)
        assert parse_lsn(place.one(CONFIRMED)) == first
        await reader.stop()

    _run(scenario())


def test_table_that_changes_its_columns_is_decoded_with_the_version_valid_at_each_place(place: Place) -> None:
    async def scenario() -> None:
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        await asyncio.to_thread(
            place.execute,
            "INSERT INTO a VALUES (1, '')",
            "INSERT INTO a VALUES (2, '')",
            "ALTER TABLE a ADD COLUMN w int",
            "INSERT INTO a VALUES (3, '', 3)",
            "INSERT INTO a VALUES (4, '', 4)",
        )
        await reader.wait_for(place.current())
        await reader.stop()

    _run(scenario())
    spool = SpoolReader(place.spool)
    found = [[m.count(b"\x00w\x00") for m in spool.relations_at(r).values()] for r in spool.ranges(0, 1 << 62, 1)]
    assert found == [[], [0], [0], [1]]


def _definite_error(place: Place, spool: Path | None = None) -> str:
    async def scenario() -> str:
        reader = ReaderProcess(place.config(), spool or place.spool)
        await reader.start()
        try:
            with pytest.raises(SourceError) as raised:
                await asyncio.wait_for(reader.wait_for((1 << 62) - 1), 20)
            assert raised.value.hint
            return raised.value.code
        finally:
            await reader.stop()

    return asyncio.run(scenario())


def test_slot_that_was_dropped_is_a_definite_error(place: Place) -> None:
    async def scenario() -> None:
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        await reader.wait_for(place.current())
        drop = (
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = 's'",
            "SELECT pg_drop_replication_slot('s')",
        )
        await asyncio.to_thread(_eventually, lambda: all(_quietly_in(place, s) for s in drop))
        with pytest.raises(SourceError, match="SOURCE_SLOT_LOST"):
            await asyncio.wait_for(reader.wait_for((1 << 62) - 1), 20)
        await reader.stop()

    _run(scenario())


def _quietly_in(place: Place, statement: str) -> bool:
    try:
        place.execute(statement)
    except psycopg.Error:
        return False
    return True


@pytest.mark.parametrize("again", [False, True])
def test_publication_that_was_dropped_is_a_definite_error_also_if_it_was_made_again(place: Place, again: bool) -> None:
    async def scenario() -> None:
        reader = ReaderProcess(place.config(**{"heartbeat.interval.ms": "300"}), place.spool)
        await reader.start()
        await reader.wait_for(place.current())
        await asyncio.to_thread(place.execute, "DROP PUBLICATION pub", "INSERT INTO a VALUES (1, '')")
        if again:
            await asyncio.to_thread(place.execute, "CREATE PUBLICATION pub FOR TABLE a, b")
        with pytest.raises(SourceError, match="SOURCE_PUBLICATION_LOST"):
            await asyncio.wait_for(reader.wait_for((1 << 62) - 1), 20)
        await reader.stop()

    _run(scenario())


def test_table_taken_out_of_the_publication_and_put_in_again_is_noticed(place: Place) -> None:
    async def scenario() -> None:
        table = int(place.one("SELECT 'a'::regclass::oid::int8"))
        reader = ReaderProcess(place.config(**{"heartbeat.interval.ms": "200"}), place.spool)
        await reader.start()
        await reader.wait_for(place.current())
        with place.connect() as conn:
            before = slots.membership(conn, "pub", describe(conn, "public", "a"))
        assert before is not None and reader.membership(table) == before
        place.execute("ALTER PUBLICATION pub DROP TABLE a", "ALTER PUBLICATION pub ADD TABLE a")
        await asyncio.to_thread(_eventually, lambda: reader.membership(table) not in (before, None))
        await reader.stop()

    _run(scenario())


def test_reader_follows_a_server_to_a_new_timeline(server: PostgresServer, place: Place) -> None:
    async def scenario() -> None:
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        await asyncio.to_thread(place.execute, "INSERT INTO a VALUES (1, '')")
        await reader.wait_for(place.current())
        await asyncio.to_thread(_new_timeline, server)
        await asyncio.to_thread(place.execute, "INSERT INTO a VALUES (2, '')")
        await reader.wait_for(place.current())
        await reader.stop()

    before = place.one("SELECT timeline_id FROM pg_control_checkpoint()")
    _run(scenario())
    assert place.one("SELECT timeline_id FROM pg_control_checkpoint()") > before
    assert len(_spooled(place.spool)) == 2


def test_reader_waits_for_a_server_that_is_promoted_only_later(server: PostgresServer, place: Place) -> None:
    """Newer servers decode on a standby too, and go on after a promotion: the position would be beyond the timeline."""

    async def scenario() -> None:
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        await asyncio.to_thread(place.execute, "INSERT INTO a VALUES (1, '')")
        await reader.wait_for(place.current())
        await asyncio.to_thread(_as_standby, server, "standby.signal")
        async with asyncio.timeout(60):
            while reader.last_error is None or "in recovery" not in reader.last_error.message:
                await asyncio.sleep(0.05)
        assert await asyncio.to_thread(place.one, "SELECT pg_promote()")
        for n in (2, 3):
            await asyncio.to_thread(place.execute, f"INSERT INTO a VALUES ({n}, '')")
            await reader.wait_for(place.current())
            await asyncio.to_thread(place.one, "SELECT bool_and(pg_terminate_backend(pid)) FROM pg_stat_replication")
        await reader.stop()

    _run(scenario())
    assert len(_spooled(place.spool)) == 3


def _new_timeline(server: PostgresServer) -> None:
    """As a promotion does: archive recovery that ends at the end of the log."""
    _as_standby(server, "recovery.signal")
    # Read-only sessions are let in before the recovery has ended.
    _eventually(lambda: _quietly(server, "CREATE TEMPORARY TABLE writable (id int)"))


def _as_standby(server: PostgresServer, signal_name: str) -> None:
    """Start the server again in recovery: one that ends at the end of the log, or one that waits for a promotion."""
    server.stop("fast")
    signal_file = server.data / signal_name
    signal_file.touch()
    os.chown(signal_file, server.data.stat().st_uid, server.data.stat().st_gid)
    server.settings["restore_command"] = "false"
    server._write_settings()
    server.start()


def test_slot_that_somebody_else_has_read_from_is_a_definite_error(place: Place) -> None:
    async def scenario() -> None:
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        await reader.wait_for(place.current())
        await reader.stop()

    _run(scenario())
    place.execute("INSERT INTO a VALUES (1, '')")
    _eventually(lambda: _quietly_in(place, "SELECT pg_replication_slot_advance('s', pg_current_wal_lsn())"))
    assert _definite_error(place) == "SOURCE_SLOT_AHEAD"


def test_server_put_back_to_an_earlier_state_and_written_to_since_is_a_definite_error(
    place: Place, tmp_path: Path
) -> None:
    """Its log is longer than ours by then, and has a transaction of every number that we know."""

    async def follow(count: int) -> None:
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        for _ in range(count):
            await asyncio.to_thread(place.execute, "INSERT INTO a SELECT coalesce(max(id), 0) + 1, 'ours' FROM a")
        await reader.wait_for(place.current())
        reader.ack(reader.position)
        await asyncio.to_thread(_eventually, lambda: parse_lsn(place.one(CONFIRMED)) >= reader.position)
        await reader.stop()

    _run(follow(1))
    place.server.stop()
    shutil.copytree(place.server.data, tmp_path / "backup", symlinks=True)
    place.server.start()
    _run(follow(3))
    _put_back(place.server, tmp_path / "backup")
    place.execute(*["INSERT INTO a SELECT max(id) + 1, 'another' FROM a"] * 10)
    assert place.current() > (SpoolReader(place.spool).durable_lsn() or 0)
    assert _definite_error(place) == "SOURCE_RESTORED"
    assert _definite_error(place) == "SOURCE_RESTORED", "the first look has not moved the slot"
    assert len(_spooled(place.spool)) == 4


def _put_back(server: PostgresServer, backup: Path) -> None:
    server.stop()
    owner = server.data.stat()
    shutil.rmtree(server.data)
    shutil.copytree(backup, server.data, symlinks=True)
    for path in [server.data, *server.data.rglob("*")]:
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
    server.data.chmod(0o700)
    server.start()


def test_what_the_server_sends_again_is_compared_and_not_written_twice(place: Place) -> None:
    """Nothing was acknowledged, so the server sends everything again; by the stream, and as a backlog."""

    async def follow() -> None:
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        await reader.wait_for(place.current())
        await reader.stop()

    for number in range(3):
        place.execute(f"INSERT INTO a VALUES ({number}, 'x')", f"INSERT INTO other VALUES ({number}, 'x')")
        place.execute("ALTER TABLE a ADD w text" if number == 1 else "SELECT 1")
        _run(follow())
    place.execute("INSERT INTO a SELECT i, repeat('y', 1000) FROM generate_series(10, 20000) i")
    _run(follow())
    _run(follow())
    assert [len(messages) for _, messages in _spooled(place.spool)] == [3, 3, 3, 19_993]


def test_server_whose_log_ends_before_ours_is_a_definite_error(place: Place) -> None:
    writer = SpoolWriter(place.spool)
    writer.initialise(place.current() + (1 << 30))
    writer.close()
    assert _definite_error(place) == "SOURCE_RESTORED"


def test_another_cluster_in_the_place_of_ours_is_a_definite_error(place: Place) -> None:
    writer = SpoolWriter(place.spool)
    writer.initialise(parse_lsn(place.one("SELECT pg_current_wal_flush_lsn()::text")))
    writer.set_identity({"system_id": "1", "timeline": 1, "slot": "s"})
    writer.close()
    assert _definite_error(place) == "SOURCE_RESTORED"


def test_slot_held_by_another_connection_is_retried_until_it_is_free(place: Place) -> None:
    async def scenario() -> None:
        first = ReaderProcess(place.config(), place.spool.with_name("first"))
        await first.start()
        await first.wait_for(place.current())
        second = ReaderProcess(place.config(), place.spool)
        await second.start()
        await asyncio.to_thread(_eventually, lambda: second.last_error is not None)
        assert second.last_error is not None and second.last_error.code == "SOURCE_SLOT_IN_USE" and not second.failed
        await first.stop()
        await second.wait_for(place.current())
        assert second.last_error is None
        await second.stop()

    _run(scenario())


def test_reader_ends_when_its_engine_is_gone(place: Place) -> None:
    async def scenario() -> int:
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        await reader.wait_for(place.current())
        assert reader._process is not None and reader._process.stdin is not None
        reader._stopping = True
        reader._process.stdin.close()
        return await reader._process.wait()

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == 0


def test_password_is_neither_in_the_command_line_nor_in_the_environment(place: Place) -> None:
    async def scenario() -> None:
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        await reader.wait_for(place.current())
        for part in ("cmdline", "environ"):
            content = await asyncio.to_thread(Path(f"/proc/{reader.pid}/{part}").read_bytes)
            assert place.server.password.encode() not in content
        await reader.stop()

    _run(scenario())


def test_new_spool_begins_where_the_slot_stands(place: Place) -> None:
    confirmed = place.one(CONFIRMED)
    place.execute("INSERT INTO a VALUES (1, '')")

    async def scenario() -> None:
        reader = ReaderProcess(place.config(), place.spool)
        await reader.start()
        await reader.wait_for(place.current())
        await reader.stop()

    _run(scenario())
    assert format_lsn(parse_lsn(confirmed)) == confirmed
    assert len(_spooled(place.spool)) == 1


def test_server_that_does_not_have_our_last_transaction_is_refused(server: PostgresServer) -> None:
    place = {"host": server.host, "port": str(server.port), "user": server.user, "password": server.password}
    conn = replication.open_connection({**place, "dbname": server.database}, "test")
    with server.connect(autocommit=False) as db:
        db.execute("CREATE TABLE IF NOT EXISTS marks (id int)")
        db.execute("INSERT INTO marks VALUES (1)")
        (committed,) = db.execute("SELECT pg_current_xact_id()::text::int8").fetchone() or (0,)
        db.commit()
        db.execute("INSERT INTO marks VALUES (2)")
        (rolled_back,) = db.execute("SELECT pg_current_xact_id()::text::int8").fetchone() or (0,)
        replication.check_transactions(conn, rolled_back)  # it runs: a commit may be in the stream before it is visible
        db.rollback()
    replication.check_transactions(conn, committed)
    replication.check_transactions(conn, None)
    for xid in (rolled_back, rolled_back + 1000):
        with pytest.raises(HeadwaterError, match="SOURCE_RESTORED"):
            replication.check_transactions(conn, xid)
    conn.finish()
