"""The servers that other tests stand on: start, stop, crash, and a network that fails on demand."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from headwater.errors import UsageError
from headwater.testing import servers
from headwater.testing.servers import PostgresServer, TcpProxy
from postgres_versions import EVERY_SERVER


@pytest.fixture(params=["15", "embedded"])
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A server of our own, to stop and kill."""
    if not PostgresServer.available(request.param):
        pytest.skip(f"no binaries of Postgres {request.param} on this machine")
    with PostgresServer(request.param) as running:
        yield running


def _one(server: PostgresServer, query: str) -> object:
    with server.connect() as connection:
        row = connection.execute(query.encode()).fetchone()
        assert row is not None
        return row[0]


def test_server_is_ready_for_logical_decoding(server: PostgresServer) -> None:
    assert _one(server, "SHOW wal_level") == "logical"
    slot = "SELECT slot_name::text FROM pg_create_logical_replication_slot('s', 'pgoutput')"
    assert _one(server, slot) == "s"


@pytest.mark.parametrize("name", EVERY_SERVER)
def test_versions_are_what_they_are_called(name: str, request: pytest.FixtureRequest) -> None:
    server: PostgresServer = request.getfixturevalue(name)
    assert str(_one(server, "SHOW server_version")).startswith(name.removeprefix("postgres") + ".")


def test_server_process_does_not_run_as_root(server: PostgresServer) -> None:
    assert server.pid is not None
    assert psutil.Process(server.pid).uids().effective != 0


def test_wrong_password_is_refused(server: PostgresServer) -> None:
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(server.dsn, password="wrong")


@pytest.mark.parametrize("how", ["fast", "immediate", "kill"])
def test_committed_rows_survive_every_way_of_stopping(server: PostgresServer, how: str) -> None:
    server.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t SELECT generate_series(1, 1000)")
    port = server.port
    if how == "kill":
        server.kill()
    else:
        server.stop(how)  # type: ignore[arg-type]
    assert not server.running
    with pytest.raises(psycopg.OperationalError):
        server.connect()
    server.start()
    assert server.port == port
    assert _one(server, "SELECT count(*) FROM t") == 1000


def test_restart_takes_new_settings(server: PostgresServer) -> None:
    server.restart(settings={"work_mem": "7MB"})
    assert _one(server, "SHOW work_mem") == "7MB"


def test_bad_setting_is_reported_with_what_the_server_said() -> None:
    server = PostgresServer(settings={"wal_level": "nonsense"})
    with pytest.raises(UsageError) as caught, server:
        pass
    assert caught.value.code == "POSTGRES_NOT_STARTED"
    assert "wal_level" in caught.value.detail


def test_exit_leaves_neither_process_nor_directory() -> None:
    with PostgresServer() as server:
        pid, directory = server.pid, server.directory
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert not directory.exists()


def test_cluster_in_a_given_directory_is_kept_and_opened_again() -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o711)
        directory = Path(place) / "cluster"
        with PostgresServer(directory=directory) as first:
            first.execute("CREATE TABLE t AS SELECT 42 AS x")
            dsn = first.dsn
        with PostgresServer(directory=directory) as second:
            assert second.dsn == dsn
            assert _one(second, "SELECT x FROM t") == 42
        assert stat.S_IMODE((directory / "identity").stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as somebody else")
def test_binaries_in_a_directory_that_only_root_may_enter_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = servers._binaries("embedded")
    assert found is not None
    package = found.parents[1]
    closed = tmp_path / "closed"
    for part in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(part, closed / part.name, symlinks=True)
    closed.chmod(0o700)
    monkeypatch.setattr(servers, "_binaries", lambda version: closed / found.relative_to(package.parent))
    with PostgresServer() as server:
        assert (server.directory / "server").is_dir()
        assert _one(server, "SELECT 1") == 1


def test_each_database_is_reached_by_its_own_text(postgres18: PostgresServer) -> None:
    dsn = postgres18.create_database("servers test")
    with psycopg.connect(dsn) as connection:
        assert connection.info.dbname == "servers test"


@pytest.fixture
def proxy(postgres18: PostgresServer) -> Iterator[TcpProxy]:
    with TcpProxy(postgres18.port) as between:
        yield between


@pytest.fixture
def through(postgres18: PostgresServer, proxy: TcpProxy) -> Callable[[], psycopg.Connection]:
    dsn = postgres18.dsn_for("postgres", port=proxy.port)
    return lambda: psycopg.connect(dsn, autocommit=True, connect_timeout=5)


Connect = Callable[[], psycopg.Connection]


def test_proxy_carries_queries_and_large_answers(proxy: TcpProxy, through: Connect) -> None:
    with through() as connection:
        row = connection.execute("SELECT repeat('x', 5000000)").fetchone()
    assert row is not None and len(row[0]) == 5_000_000
    assert proxy.bytes_from_target > 5_000_000


def test_cut_breaks_open_connections_and_takes_new_ones(proxy: TcpProxy, through: Connect) -> None:
    connection = through()
    proxy.cut()
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")
    with through() as again:
        again.execute("SELECT 1")
    assert proxy.connections_made == 2


def test_refused_port_takes_nobody_until_accepted_again(proxy: TcpProxy, through: Connect) -> None:
    before = through()
    proxy.refuse()
    with pytest.raises(psycopg.OperationalError):
        through()
    before.execute("SELECT 1")
    proxy.accept()
    with through() as after:
        after.execute("SELECT 1")


def test_delay_holds_answers_back(proxy: TcpProxy, through: Connect) -> None:
    with through() as connection:
        proxy.delay(0.2)
        begin = time.monotonic()
        connection.execute("SELECT 1")
        assert time.monotonic() - begin >= 0.4
        proxy.delay(0)


def test_stalled_bytes_arrive_once_they_flow_again(proxy: TcpProxy, through: Connect) -> None:
    with through() as connection:
        proxy.stall()
        threading.Timer(0.3, proxy.flow).start()
        begin = time.monotonic()
        connection.execute("SELECT 1")
        assert time.monotonic() - begin >= 0.25


def test_connection_is_cut_in_the_middle_of_an_answer(proxy: TcpProxy, through: Connect) -> None:
    connection = through()
    proxy.cut_after(100_000)
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT repeat('x', 50000000)")
