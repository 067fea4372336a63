"""Transactions and backlogs that do not fit: bounded memory here, and no log kept at the source."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cdc_world import SOURCE, World, lsn, open_world
from engine_process import EngineProcess, running, wait_until
from headwater.testing.servers import PostgresServer
from postgres_versions import USUAL

pytestmark = [pytest.mark.postgres, pytest.mark.spark]
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("large") / "data") as found:
        yield found


class Memory:
    """The largest memory of each kind of process of the engine during a block."""

    def __init__(self) -> None:
        self.peak: dict[str, int] = {}
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.thread.join(5)

    def _watch(self) -> None:
        while not self.stopping.wait(0.2):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    line = " ".join(process.cmdline())
                    kinds = [k for k in ("postgres.reader", "headwater.spark.daemon") if k in line]
                    if kinds:
                        self.peak[kinds[0]] = max(self.peak.get(kinds[0], 0), process.memory_info().rss)


@pytest.mark.slow
def test_a_transaction_of_a_million_rows_takes_bounded_memory(world: World) -> None:
    world.sql("CREATE TABLE huge (id bigint PRIMARY KEY, a int, b text)")
    world.capture("public.huge", "huge")
    world.live("huge")
    with Memory() as memory:
        world.sql("INSERT INTO huge SELECT i, i % 100, md5(i::text) FROM generate_series(1, 1000000) i")
        world.settle()
    print("peak RSS", {kind: f"{size // MEGABYTE} MB" for kind, size in memory.peak.items()})
    count = world.engine.execute("SELECT count(*) AS n, sum(id) AS s, count(DISTINCT b) AS d FROM huge")[0]
    assert count is not None and count.rows == [{"n": 1_000_000, "s": 500_000_500_000, "d": 1_000_000}]
    assert memory.peak["postgres.reader"] < 400 * MEGABYTE
    assert memory.peak["headwater.spark.daemon"] < 1500 * MEGABYTE


def retained(world: World) -> int:
    """How much of its log the source keeps because of us."""
    row = world.db.execute(
        "SELECT pg_current_wal_lsn() - confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'headwater'"
    ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.slow
def test_the_source_keeps_no_log_for_us_while_a_long_copy_runs(world: World) -> None:
    world.sql("CREATE TABLE slow (id int PRIMARY KEY, v text); CREATE TABLE busy (id bigserial PRIMARY KEY, v text)")
    world.sql("INSERT INTO slow SELECT i, 'x' FROM generate_series(1, 2000) i; ANALYZE slow")
    world.capture("public.busy", "busy")
    world.capture("public.slow", "slow", "backfill.num_rows_per_split='100', backfill.rate_limit='50'")
    world.until(lambda: any(s["state"] == "HANDED_OVER" for s in world.splits("slow")))
    written = 0
    for _ in range(20):
        world.sql("INSERT INTO busy (v) SELECT repeat('x', 500) FROM generate_series(1, 1000)")
        written += 500_000
    world.until(lambda: retained(world) < MEGABYTE, 60)
    assert world.state("slow") == "creating" and written > 8 * MEGABYTE
    world.engine.execute("ALTER TABLE slow SET BACKFILL_RATE_LIMIT = 1000000")
    world.live("slow")
    world.assert_equal("slow", "slow")


@pytest.mark.slow
def test_rows_of_tens_of_megabytes_need_a_jvm_of_one_gigabyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied, streamed, left out unchanged, verified, and a view reads them; `running` gives Spark 1 GB."""
    if not PostgresServer.available(USUAL):
        pytest.skip(f"no binaries of Postgres {USUAL} on this machine")
    with PostgresServer(USUAL) as server, server.connect() as db:
        monkeypatch.setenv("HW_TEST_PASSWORD", server.password)
        db.execute("CREATE TABLE big (id int PRIMARY KEY, n int, body bytea)")
        db.execute("ALTER TABLE big ALTER body SET STORAGE EXTERNAL")
        for i in range(8):
            db.execute("INSERT INTO big VALUES (%s, %s, %s)", (i, i, os.urandom((20 + 2 * i) * MEGABYTE)))
        with running(tmp_path / "data") as engine:
            engine.sql(SOURCE.format(server=server, options=""))
            engine.sql("CREATE TABLE big (*) FROM shop TABLE 'public.big'; WAIT")
            db.execute("UPDATE big SET n = n + 100")
            db.execute("INSERT INTO big VALUES (50, 50, %s)", (os.urandom(40 * MEGABYTE),))
            row = db.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
            assert row is not None
            wait_until(lambda: lsn(position(engine)) >= lsn(row[0]), 120, "the changes")
            assert all(r["equal"] for r in engine.sql("VERIFY big"))
            found = [tuple(r.values()) for r in engine.sql("SELECT id, n, md5(body) FROM big ORDER BY id")]
            assert found == db.execute("SELECT id, n, md5(body) FROM big ORDER BY id").fetchall()
            query = "SELECT id % 2 AS g, sum(length(body)) AS b FROM big GROUP BY id % 2"
            engine.sql(f"CREATE MATERIALIZED VIEW sizes AS {query}; WAIT")
            found = [tuple(r.values()) for r in engine.sql("SELECT g, b FROM sizes ORDER BY g")]
            assert found == db.execute(f"{query} ORDER BY g".encode()).fetchall()


def position(engine: EngineProcess) -> str:
    return str(engine.sql("SELECT position FROM hw_catalog.hw_sources")[0]["position"])
