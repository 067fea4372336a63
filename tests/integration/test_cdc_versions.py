"""Postgres versions beside Debian's 15 and the embedded 18: one engine with a source on each, under load, with a crash.

What every version must do alike in full is `test_cdc_exactness.py` (slow for these) and `test_postgres_types.py`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import headwater
from cdc_load import LOST
from cdc_world import SOURCE, World, lsn
from headwater.testing.servers import PostgresServer
from postgres_versions import OTHERS

pytestmark = [pytest.mark.postgres, pytest.mark.spark]
SCHEMA = """
CREATE TABLE acc (id bigint PRIMARY KEY, val int, big text);
ALTER TABLE acc ALTER big SET STORAGE EXTERNAL;
CREATE TABLE nat (name text COLLATE "und-x-icu" PRIMARY KEY, val int, twice int GENERATED ALWAYS AS (val * 2) STORED);
CREATE TABLE bag (a int, b text);
ALTER TABLE bag REPLICA IDENTITY FULL;
INSERT INTO acc SELECT i, 0, repeat(md5(i::text), 100) FROM generate_series(1, 2000) i;
INSERT INTO nat SELECT (ARRAY['a','B','ä','Z'])[i % 4 + 1] || i, 0 FROM generate_series(1, 1000) i;
INSERT INTO bag SELECT i % 5, 'x' FROM generate_series(1, 500) i;
ANALYZE;
"""
TABLES = {"acc": "*", "nat": "name, val", "bag": "*"}  # before 18 generated columns are not in the stream


class Load:
    """One writer: every transaction is over all three tables, and it lives through a crash of the server."""

    def __init__(self, server: PostgresServer) -> None:
        self.server, self.committed = server, 0
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(60)
        assert not self.thread.is_alive()

    def _run(self) -> None:
        while not self.stopping.is_set():
            with contextlib.suppress(*LOST), self.server.connect() as connection:
                while not self.stopping.wait(0.01):
                    self._write(connection)

    def _write(self, c: psycopg.Connection) -> None:
        n = self.committed
        with c.transaction():
            c.execute("UPDATE acc SET val = val + 1 WHERE id IN (%s, %s)", (n * 7 % 2000, n % 2000))
            c.execute("UPDATE acc SET id = -id WHERE id = %s", (n * 11 % 2000,))
            c.execute("INSERT INTO acc VALUES (%s, 1, NULL) ON CONFLICT DO NOTHING", (10_000 + n,))
            with contextlib.suppress(psycopg.Rollback), c.transaction():
                c.execute("DELETE FROM acc WHERE id < 1000")
                raise psycopg.Rollback
            c.execute("UPDATE nat SET name = name || '!' WHERE name = %s", (f"B{n % 1000}",))
            c.execute("DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag)")
            c.execute("INSERT INTO bag VALUES (%s, 'y'), (%s, NULL)", (n % 3, n % 3))
        self.committed += 1


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[World]]:
    versions = [v for v in OTHERS if PostgresServer.available(v)]
    if not versions:
        pytest.skip(f"no binaries of Postgres {', '.join(OTHERS)} on this machine")
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(PostgresServer(v)) for v in versions]
        for server in servers:  # before Spark starts: its workers have the environment of then
            monkeypatch.setenv(f"HW_TEST_PASSWORD_{server.version}", server.password)
        settings = {"barrier_interval_ms": "300"}
        engine = stack.enter_context(headwater.Engine(tmp_path / "data", master="local[2]", settings=settings))
        yield [World(server, engine) for server in servers]


@pytest.mark.slow
def test_every_version_is_copied_under_load_and_through_a_crash_and_ends_equal(worlds: list[World]) -> None:
    loads = []
    for world in worlds:
        world.sql(SCHEMA)
        loads.append(Load(world.server))
        create(world)
    for world in worlds:
        world.until(lambda world=world: any(s["state"] == "HANDED_OVER" for s in world.splits(name(world, "acc"))))  # type: ignore[misc]
        world.server.kill()
        world.server.start()
        world.db = world.server.connect()
    for world, load in zip(worlds, loads, strict=True):
        world.engine.execute(f"ALTER TABLE {name(world, 'acc')} SET BACKFILL_RATE_LIMIT = DEFAULT")
        world.live(*(name(world, t) for t in TABLES))
        before = load.committed
        world.until(lambda load=load, before=before: load.committed > before + 20)  # type: ignore[misc]
        load.stop()
    for world in worlds:
        settle(world)
        for table, columns in TABLES.items():
            expected = world.db.execute(f"SELECT {columns} FROM {table}".encode()).fetchall()
            assert world.rows(name(world, table)) == sorted(expected, key=repr), (world.server.version, table)


def name(world: World, table: str) -> str:
    return f"{table}_{world.server.version}"


def create(world: World) -> None:
    version = world.server.version
    text = SOURCE.format(server=world.server, options="").replace("CREATE SOURCE shop", f"CREATE SOURCE shop_{version}")
    world.engine.execute(text.replace("HW_TEST_PASSWORD", f"HW_TEST_PASSWORD_{version}"))
    for table in TABLES:
        options = "backfill.num_rows_per_split='200'" + ", backfill.rate_limit='400'" * (table == "acc")
        world.engine.execute(
            f"CREATE TABLE {name(world, table)} (*) FROM shop_{version} TABLE 'public.{table}' WITH ({options})"
        )


def settle(world: World) -> None:
    row = world.db.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
    assert row is not None
    source = f"shop_{world.server.version}"
    world.until(
        lambda: any(s["name"] == source and lsn(s["position"]) >= lsn(row[0]) for s in world.engine.status()["sources"])
    )
