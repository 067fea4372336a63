"""Reading rows from a real Postgres, past libpq (with TLS and without) and by it: whole, bounded, and with the connection usable afterwards."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from headwater.connectors.postgres import wire
from headwater.connectors.postgres.rowreader import RowReader
from headwater.testing.servers import PostgresServer
from postgres_versions import SERVERS

pytestmark = pytest.mark.postgres
Connection = psycopg.Connection[Any]


@pytest.fixture(scope="module")
def encrypted() -> Iterator[PostgresServer]:
    if shutil.which("openssl") is None or not PostgresServer.available("15"):
        pytest.skip("needs openssl and a server that has TLS")
    with PostgresServer("15") as server:
        server.offer_tls()
        yield server


@pytest.fixture(params=[*SERVERS, "encrypted"])
def conn(request: pytest.FixtureRequest) -> Iterator[Connection]:
    server: PostgresServer = request.getfixturevalue(request.param)
    with server.connect() as made:
        yield made


@pytest.mark.parametrize("raw", [True, False])
def test_copy_gives_all_rows_in_blocks_of_whole_lines(conn: Connection, raw: bool) -> None:
    reader = RowReader(
        conn,
        "COPY (SELECT i, repeat('x', i % 97) FROM generate_series(1, 50000) i) TO STDOUT",
        block_bytes=1 << 16,
        raw=raw,
    )
    blocks = list(reader)
    assert len(blocks) > 10 and all(block[-1] == 10 for block in blocks)
    lines = b"".join(block.tobytes() for block in blocks).splitlines()
    assert lines == [f"{i}\t{'x' * (i % 97)}".encode() for i in range(1, 50001)]


@pytest.mark.parametrize("raw", [True, False])
def test_copy_of_a_row_larger_than_a_block_is_whole(conn: Connection, raw: bool) -> None:
    statement = "COPY (SELECT repeat('x', 3000000) UNION ALL SELECT 'y') TO STDOUT"
    got = b"".join(b.tobytes() for b in RowReader(conn, statement, block_bytes=1 << 12, raw=raw))
    assert got == b"x" * 3000000 + b"\ny\n"


@pytest.mark.parametrize("most_bytes", [1 << 14, 1 << 30])
@pytest.mark.parametrize("raw", [True, False])
def test_copy_as_messages_has_one_for_each_row_and_every_piece_but_the_last_is_full(
    conn: Connection, raw: bool, most_bytes: int
) -> None:
    """Rows of a few bytes, so that their number is not foreseen, and one that is larger than any buffer."""
    query = "SELECT CASE i WHEN 777 THEN repeat('x', 300000) ELSE i::text END FROM generate_series(1, 20000) i"
    told: list[int] = []
    reader = RowReader(conn, f"COPY ({query}) TO STDOUT", block_bytes=1 << 12, raw=raw)
    pieces = list(reader.messages(most_bytes=most_bytes, count=told.append))
    got = [p.data[a:b].tobytes() for p in pieces for a, b in zip(p.starts, p.ends, strict=True)]
    assert got == [b"x" * 300000 + b"\n" if i == 777 else b"%d\n" % i for i in range(1, 20001)]
    assert [p.last for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert (len(pieces) > 1) == (most_bytes < 1 << 20) and all(p.data.size >= most_bytes for p in pieces[:-1])
    assert sum(told) == 20000 and len(told) > 20
    (empty,) = RowReader(conn, "COPY (SELECT 1 WHERE false) TO STDOUT", raw=raw).messages(most_bytes=1 << 14)
    assert empty.last and empty.starts.size == empty.ends.size == 0
    assert conn.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("raw", [True, False])
def test_messages_of_a_failed_copy_or_one_that_is_given_up_leave_the_connection_usable(
    conn: Connection, raw: bool
) -> None:
    failing = "COPY (SELECT 1 / (200000 - i) FROM generate_series(1, 300000) i) TO STDOUT (FORMAT binary)"
    with pytest.raises(psycopg.errors.DivisionByZero):
        list(RowReader(conn, failing, raw=raw).messages(most_bytes=1 << 16))
    assert conn.execute("SELECT 1").fetchone() == (1,)

    def held(_: int) -> None:
        raise TimeoutError

    endless = RowReader(conn, "COPY (SELECT generate_series(1, 30000000)) TO STDOUT", block_bytes=1 << 14, raw=raw)
    with pytest.raises(TimeoutError):
        list(endless.messages(most_bytes=1 << 20, count=held))
    assert conn.execute("SELECT 1").fetchone() == (1,)


def test_rows_of_a_select_come_in_the_forms_that_were_asked_for(conn: Connection) -> None:
    query = "SELECT i, i, CASE i WHEN 777 THEN repeat('x', 300000) END FROM generate_series(1, 20000) i"
    told: list[int] = []
    reader = RowReader(conn, query, block_bytes=1 << 12, forms=(0, 1, 1))
    pieces = list(reader.messages(most_bytes=1 << 14, count=told.append))
    got = [p.data[a:b].tobytes() for p in pieces for a, b in zip(p.starts, p.ends, strict=True)]
    assert len(got) == sum(told) == 20000 and len(pieces) > 1
    for i, row in enumerate(got, 1):
        text = struct.pack("!i", 300000) + b"x" * 300000 if i == 777 else b"\xff" * 4
        assert row == struct.pack("!hi", 3, len(str(i))) + b"%d" % i + struct.pack("!ii", 4, i) + text
    (empty,) = RowReader(conn, "SELECT 1 WHERE false", forms=(0,)).messages(most_bytes=1 << 14)
    assert empty.last and empty.starts.size == 0
    assert conn.execute("SELECT 1").fetchone() == (1,)


def test_select_that_fails_or_is_given_up_leaves_the_connection_usable(conn: Connection) -> None:
    failing = "SELECT 1 / (200000 - i) FROM generate_series(1, 300000) i"
    for query, error in ((failing, psycopg.errors.DivisionByZero), ("SELECT nonsense", psycopg.errors.UndefinedColumn)):
        with pytest.raises(error):
            list(RowReader(conn, query, forms=(1,)).messages(most_bytes=1 << 16))
        assert conn.execute("SELECT 1").fetchone() == (1,)
    with pytest.raises(psycopg.errors.DivisionByZero), conn.transaction():
        try:
            list(RowReader(conn, failing, forms=(1,)).messages(most_bytes=1 << 16))
        finally:
            assert conn.info.transaction_status == psycopg.pq.TransactionStatus.INERROR
    pieces = RowReader(conn, "SELECT generate_series(1, 30000000)", block_bytes=1 << 14, forms=(0,))
    given_up = pieces.messages(most_bytes=1 << 14)
    assert next(given_up).starts.size > 100
    given_up.close()
    assert conn.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("raw", [True, False])
def test_error_in_the_middle_of_a_copy_has_its_sqlstate_and_the_connection_goes_on(conn: Connection, raw: bool) -> None:
    statement = "COPY (SELECT 1 / (200000 - i) FROM generate_series(1, 300000) i) TO STDOUT"
    seen = 0
    with pytest.raises(psycopg.errors.DivisionByZero) as caught:
        for block in RowReader(conn, statement, block_bytes=1 << 14, raw=raw):
            seen += len(block)
    assert seen > 0 and caught.value.sqlstate == "22012"
    assert conn.execute("SELECT 1").fetchone() == (1,)
    with pytest.raises(psycopg.errors.SyntaxError):
        list(RowReader(conn, "COPY nonsense", raw=raw))
    assert conn.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("raw", [True, False])
def test_copy_that_is_not_read_to_its_end_is_cancelled(conn: Connection, raw: bool) -> None:
    statement = "COPY (SELECT generate_series(1, 30000000)) TO STDOUT"
    blocks = iter(RowReader(conn, statement, block_bytes=1 << 14, raw=raw))
    assert len(next(blocks)) >= 1 << 14
    blocks.close()  # type: ignore[attr-defined]
    assert conn.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("raw", [True, False])
def test_error_inside_of_a_transaction_fails_the_transaction_and_libpq_knows(conn: Connection, raw: bool) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero), conn.transaction():
        conn.execute("SELECT 1")
        try:
            list(RowReader(conn, "COPY (SELECT 1 / 0) TO STDOUT", raw=raw))
        finally:
            assert conn.info.transaction_status == psycopg.pq.TransactionStatus.INERROR
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


@pytest.mark.parametrize("raw", [True, False])
def test_connection_lost_during_a_copy_is_an_operational_error(conn: Connection, raw: bool) -> None:
    doomed = psycopg.connect(conn.info.dsn, password=conn.info.password, autocommit=True)
    blocks = iter(
        RowReader(doomed, "COPY (SELECT generate_series(1, 30000000)) TO STDOUT", block_bytes=1 << 14, raw=raw)
    )
    next(blocks)
    conn.execute("SELECT pg_terminate_backend(%s)", [doomed.info.backend_pid])
    with pytest.raises(psycopg.OperationalError):
        for _ in blocks:
            pass
    with pytest.raises(psycopg.OperationalError):
        doomed.execute("SELECT 1")
    assert doomed.broken


def test_connection_with_tls_is_read_past_libpq_and_says_the_same(encrypted: PostgresServer) -> None:
    """More than the socket holds at once, so that reader and server wait for each other."""
    query = "SELECT i, repeat(md5(i::text), 30) FROM generate_series(1, 30000) i"
    got = {}
    for mode in ("require", "disable"):
        with encrypted.connect(sslmode=mode) as conn:
            assert conn.pgconn.ssl_in_use == (mode == "require")
            reader = RowReader(conn, query, block_bytes=1 << 16, forms=(1, 0))
            assert reader.raw
            pieces = list(reader.messages(most_bytes=1 << 20))
            got[mode] = b"".join(p.data[a:b].tobytes() for p in pieces for a, b in zip(p.starts, p.ends, strict=True))
            assert conn.execute("SELECT count(*) FROM pg_stat_ssl WHERE pid = pg_backend_pid() AND ssl").fetchone() == (
                mode == "require",
            )
    assert got["require"] == got["disable"] and len(got["require"]) > 28_000_000


def test_libpq_that_cannot_be_reached_is_used_as_it_is(
    encrypted: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_libpq", lambda: None)
    for mode, raw in (("require", False), ("disable", True)):
        with encrypted.connect(sslmode=mode) as conn:
            reader = RowReader(conn, "COPY (SELECT generate_series(1, 1000)) TO STDOUT")
            assert reader.raw is raw
            if not raw:
                with pytest.raises(ValueError, match="not reachable"):
                    list(RowReader(conn, "COPY (SELECT 1) TO STDOUT", raw=True))
            assert b"".join(b.tobytes() for b in reader) == b"".join(b"%d\n" % i for i in range(1, 1001))


# ruff: noqa: E501, PT012
