"""Kill -9 while tables follow a change of their source's columns: nothing is lost, doubled or half changed."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine_process import EngineProcess, wait_until
from headwater.testing.servers import PostgresServer
from postgres_versions import USUAL

pytestmark = [pytest.mark.postgres, pytest.mark.spark]
SOURCE = """
CREATE SOURCE shop WITH (connector='postgres-cdc', hostname='{host}', port='{port}', username='{user}',
    password='${{HW_TEST_PASSWORD}}', database.name='{database}', heartbeat.interval.ms='1000');
CREATE TABLE keyed (*) FROM shop TABLE 'public.keyed' WITH (schema.change.behavior='evolve');
CREATE TABLE bag (*) FROM shop TABLE 'public.bag';
CREATE MATERIALIZED VIEW whole AS SELECT * FROM keyed;
"""


def write(server: PostgresServer, stopping: threading.Event) -> None:
    number = 0
    with server.connect() as c:
        while not stopping.wait(0.02):
            number += 1
            c.execute("UPDATE keyed SET a = a + 1 WHERE id = %s", (number % 500,))
            c.execute("INSERT INTO keyed (id, a) VALUES (%s, 0)", (1000 + number,))
            c.execute("INSERT INTO bag (a) VALUES (%s)", (number % 5,))
            c.execute("DELETE FROM bag WHERE ctid = (SELECT ctid FROM bag WHERE a = %s LIMIT 1)", (number % 7,))


def rows(engine: EngineProcess, table: str, columns: str) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(r.values()) for r in engine.sql(f"SELECT {columns} FROM {table}"))


def states(engine: EngineProcess) -> set[str]:
    return {r["state"] for r in engine.sql("SELECT state FROM hw_catalog.hw_jobs")}


def columns(engine: EngineProcess, table: str) -> list[str]:
    return [r["column"] for r in engine.sql(f"DESCRIBE {table}")]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 4])
def test_an_engine_killed_during_a_change_of_columns_ends_with_the_new_ones_and_every_row(
    tmp_path: Path, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not PostgresServer.available(USUAL):
        pytest.skip(f"no binaries of Postgres {USUAL} on this machine")
    seed = int(os.environ.get("HW_TEST_SEED", random.randrange(1 << 30)))
    print(f"seed {seed}")
    with PostgresServer(USUAL) as server:
        monkeypatch.setenv("HW_TEST_PASSWORD", server.password)
        db = server.connect()
        db.execute("CREATE TABLE keyed (id int PRIMARY KEY, a int, b text)")
        db.execute("INSERT INTO keyed SELECT i, 0, 'b' FROM generate_series(1, 500) i")
        db.execute("CREATE TABLE bag (a int, b text)")
        db.execute("ALTER TABLE bag REPLICA IDENTITY FULL")
        db.execute("INSERT INTO bag SELECT i % 7, 'b' FROM generate_series(1, 500) i")
        pipeline = tmp_path / "pipeline.sql"
        where = {"host": server.host, "port": server.port, "user": server.user, "database": server.database}
        pipeline.write_text(SOURCE.format(**where))
        engine = EngineProcess(tmp_path / "data", "--set", "barrier_interval_ms=300", file=pipeline)
        engine.start()
        stopping = threading.Event()
        writer = threading.Thread(target=write, args=(server, stopping))
        try:
            wait_until(lambda: states(engine) == {"live"}, 180)
            writer.start()
            for statement in ("ADD c float8 DEFAULT random()", "DROP b"):
                db.execute(f"ALTER TABLE keyed {statement}".encode())
                db.execute(f"ALTER TABLE bag {statement.replace('random()', '0.5')}".encode())
                time.sleep(0.5)
            for n in range(kills):
                time.sleep(random.Random(seed + n).uniform(0, 3))
                engine.kill()
                engine.start()
            wait_until(lambda: "c" in columns(engine, "keyed") and "c" in columns(engine, "bag"), 180)
            wait_until(lambda: states(engine) == {"live"}, 180)
            stopping.set()
            writer.join()
            check(engine, db)
        finally:
            stopping.set()
            engine.stop()


def check(engine: EngineProcess, db: Any) -> None:
    for table, names in (("keyed", "id, a, c"), ("bag", "a, c")):
        expected = Counter(db.execute(f"SELECT {names} FROM {table}".encode()).fetchall())
        wait_until(lambda t=table, n=names, e=expected: rows(engine, t, n) == e, 60, f"{table} like the source")
    # A view reads the table, so the dropped column stays, with NULLs; and the view has the columns of its birth.
    assert columns(engine, "whole") == ["id", "a", "b"]
    expected = Counter((i, a, None) for i, a in db.execute("SELECT id, a FROM keyed").fetchall())
    assert rows(engine, "keyed", "id, a, b") == rows(engine, "whole", "id, a, b") == expected
    assert rows(engine, "bag", "b").keys() == {(None,)}
