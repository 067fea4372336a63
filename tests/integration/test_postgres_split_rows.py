"""A split's rows by each of the ways in which they can be read, on real servers: the same rows, by the way meant."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from headwater.capture.splits import Split
from headwater.connectors.postgres import splitrows
from headwater.connectors.postgres.catalogue import TableInfo, describe
from headwater.connectors.postgres.client import PostgresConfig, connect
from headwater.connectors.postgres.dense import dense_part, missing_query
from headwater.connectors.postgres.planner import marked_read, plan_splits, prefer_index, split_query
from headwater.connectors.postgres.splitrows import SplitRows
from headwater.connectors.postgres.types import plan_columns
from headwater.testing.servers import PostgresServer
from postgres_versions import SERVERS

pytestmark = pytest.mark.postgres

FILL = "INSERT INTO t SELECT g, 'row ' || g, repeat('x', 60) FROM generate_series(1, 20000) g"


@dataclass
class Db:
    conn: psycopg.Connection[Any]

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.conn.execute(statement.encode())

    def table(self) -> TableInfo:
        return describe(self.conn, "public", "t")

    def plan(self, query: Any) -> str:
        return "\n".join(r[0] for r in self.conn.execute(b"EXPLAIN " + query.as_bytes(self.conn)))

    def rows(self, split: Split | None = None) -> list[tuple[Any, ...]]:
        query = split_query(self.table(), ["id", "v"], split or Split(1, None, None))
        return sorted(self.conn.execute(query).fetchall())


@pytest.fixture(params=SERVERS)
def db(request: pytest.FixtureRequest) -> Iterator[Db]:
    server: PostgresServer = request.getfixturevalue(request.param)
    name = f"rows_{time.time_ns()}"
    server.create_database(name)
    options = {"hostname": server.host, "port": str(server.port), "username": server.user, "database.name": name}
    with connect(PostgresConfig.from_options({**options, "password": server.password})) as conn:
        yield Db(conn)


@dataclass
class Reading:
    rows: list[tuple[Any, ...]]
    statements: list[str]
    dense: bool


def read(db: Db, split: Split, monkeypatch: pytest.MonkeyPatch, *, dense: bool = True) -> Reading:
    """As a task reads it; which statements it took."""
    statements: list[str] = []

    class Watched(splitrows.RowReader):
        def __init__(self, conn: Any, statement: str, **options: Any) -> None:
            statements.append(statement)
            super().__init__(conn, statement, **options)

    table = db.table()
    plans = plan_columns(table.columns)
    with monkeypatch.context() as patched, marked_read(db.conn, table):
        patched.setattr(splitrows, "RowReader", Watched)
        prefer_index(db.conn)
        rows, again = SplitRows(db.conn, table, plans, lambda _: None, 1 << 20).read(split, dense=dense)
    assert isinstance(rows, pa.Table)
    found = zip(rows.column("id").to_pylist(), rows.column("v").to_pylist(), strict=True)
    return Reading(sorted(found), statements, again)


def splits_of(db: Db) -> list[Split]:
    return plan_splits(db.conn, db.table(), rows_per_split=2000)


CHANGES = {
    "nothing": "",
    "rows that are gone": "DELETE FROM t WHERE id % 1500 = 7",
    "a range that is gone": "DELETE FROM t WHERE id BETWEEN 5000 AND 5400",
    "rows that moved": "UPDATE t SET filler = repeat('y', 900) WHERE id % 1500 IN (3, 4)",
    "rows that moved to places of others": "DELETE FROM t WHERE id < 200; VACUUM t; "
    "UPDATE t SET filler = repeat('y', 90) WHERE id % 1000 = 3",
    "keys that changed": "UPDATE t SET id = -id WHERE id = 9000; UPDATE t SET id = 20000 + id WHERE id = 12000",
}


@pytest.mark.parametrize(
    ("kind", "change"),
    [*(("bigint", change) for change in CHANGES), ("int", "rows that moved"), ("smallint", "keys that changed")],
)
def test_pages_and_what_is_missing_from_them_are_the_split(
    db: Db, kind: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.run(f"CREATE TABLE t (id {kind} PRIMARY KEY, v text, filler text) WITH (autovacuum_enabled = off)", FILL)
    db.run("VACUUM ANALYZE t", *filter(None, CHANGES[change].split("; ")))
    splits = splits_of(db)
    readings = [read(db, split, monkeypatch) for split in splits]
    assert [r.rows for r in readings] == [db.rows(split) for split in splits]
    assert sorted(row for r in readings for row in r.rows) == db.rows()
    by_pages = [r for r in readings if "ctid" in r.statements[0]]
    assert len(by_pages) >= len(splits) // 2 and all(r.dense for r in by_pages)
    looked_up = [r for r in by_pages if len(r.statements) == 2]
    assert bool(looked_up) == (change != "nothing")
    assert "ctid" not in readings[0].statements[0] + readings[-1].statements[0], "who knows what is beyond"


def test_too_many_keys_that_are_missing_are_seen_before_the_pages_are_read(
    db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY, v text, filler text) WITH (autovacuum_enabled = off)", FILL)
    db.run("ANALYZE t", "DELETE FROM t WHERE id % 30 = 0")
    for split in splits_of(db):
        found = read(db, split, monkeypatch)
        assert len(found.statements) == 1 and "ctid" not in found.statements[0] and found.rows == db.rows(split)


def test_too_many_keys_that_are_missing_nevertheless_end_the_attempt(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    db.run(
        "CREATE TABLE t (id int PRIMARY KEY, v text, filler text) WITH (autovacuum_enabled = off)", FILL, "ANALYZE t"
    )
    split = splits_of(db)[3]
    assert split.left is not None
    begin = int(split.left[0])  # the middle, which is looked at, is as it was
    db.run(f"DELETE FROM t WHERE id % 10 = 0 AND id BETWEEN {begin + 100} AND {begin + 700}")
    tried = read(db, split, monkeypatch)
    assert len(tried.statements) == 2 and not tried.dense and tried.rows == db.rows(split)
    after = read(db, split, monkeypatch, dense=tried.dense)
    assert len(after.statements) == 1 and not after.dense and after.rows == tried.rows


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("id bigint PRIMARY KEY", "g * 3"),  # too few of the numbers are keys
        ("id bigint PRIMARY KEY", "g * 7919 % 20011"),  # not in the order of the keys
        ("id numeric PRIMARY KEY", "g"),
        ('id text COLLATE "C" PRIMARY KEY', "to_char(g, '00000')"),
    ],
)
def test_other_tables_are_read_by_their_index(db: Db, key: str, values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    db.run(f"CREATE TABLE t ({key}, v text, filler text)", FILL.replace("SELECT g,", f"SELECT {values},"), "ANALYZE t")
    for split in splits_of(db)[1:-1]:
        found = read(db, split, monkeypatch)
        assert len(found.statements) == 1 and "ctid" not in found.statements[0] and found.dense
        assert sorted(v for _, v in found.rows) == sorted(v for _, v in db.rows(split))


def test_a_first_row_that_lies_elsewhere_does_not_lead_to_other_pages(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    db.run(
        "CREATE TABLE t (id int PRIMARY KEY, v text, filler text) WITH (autovacuum_enabled = off)", FILL, "ANALYZE t"
    )
    split = splits_of(db)[3]
    assert split.left is not None
    db.run(f"UPDATE t SET filler = repeat('y', 900) WHERE id = {split.left[0]}")
    found = read(db, split, monkeypatch)
    assert len(found.statements) == 1 and "ctid" not in found.statements[0]
    assert found.dense and found.rows == db.rows(split), "the next split is tried again"


def test_rows_that_others_write_meanwhile_are_none_of_the_snapshots(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was looked up would otherwise be newer than what the pages had."""
    db.run("CREATE TABLE t (id int PRIMARY KEY, v text, filler text) WITH (autovacuum_enabled = off)", FILL)
    db.run("ANALYZE t", "DELETE FROM t WHERE id = 7000")
    split = next(s for s in splits_of(db) if s.left and s.right and int(s.left[0]) <= 7000 < int(s.right[0]))
    before = db.rows(split)
    plain = splitrows.missing_query
    with psycopg.connect(db.conn.info.dsn, password=db.conn.info.password, autocommit=True) as other:

        def meanwhile(*given: Any) -> Any:
            other.execute("INSERT INTO t VALUES (7000, 'new', '')")
            return plain(*given)

        monkeypatch.setattr(splitrows, "missing_query", meanwhile)
        found = read(db, split, monkeypatch)
    assert len(found.statements) == 2 and found.rows == before != db.rows(split)


def test_the_server_scans_pages_and_looks_up_by_the_index(db: Db) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY, v text, filler text)", FILL, "ANALYZE t")
    table, split = db.table(), splits_of(db)[3]
    with db.conn.transaction():
        prefer_index(db.conn)
        part = dense_part(db.conn, table, split)
        assert part is not None
        assert "Tid Range Scan" in db.plan(split_query(table, ["id", "v"], part.pages))
        looked_up = db.plan(missing_query(table, ["id", "v"], [(5000, 5001), (6000, 6100)]))
        assert "Index Cond" in looked_up and "Seq Scan" not in looked_up, looked_up
