"""The Postgres sink against a real server: types, keys, targets that do not fit, a connection lost in the commit."""

from __future__ import annotations

import datetime as dt
import os
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headwater.connectors.postgres import sink as pg_sink
from headwater.errors import DefiniteError, IndeterminateError, TransientError
from headwater.model.schema import Column
from headwater.sink.delivery import DeliveryLoop
from headwater.sink.registry import open_sink
from sink_world import SinkWorld

pytestmark = [pytest.mark.spark, pytest.mark.postgres]


@pytest.fixture
def port(sink_world: SinkWorld) -> int:
    return sink_world.postgres_port


@pytest.fixture
def sql(sink_world: SinkWorld) -> Any:
    return sink_world.postgres


def opened(port: int, table: str, columns: Any, key: Any, **more: str) -> Any:
    options = {"connector": "postgres", "hostname": "127.0.0.1", "port": str(port), "username": "postgres"}
    options |= {"database.name": "postgres", "table.name": table, **more}
    return open_sink(table, options, columns, key, 1, os.path.expandvars)


def started(sink: Any) -> DeliveryLoop:
    sink.validate(sink.columns, sink.key)
    loop = DeliveryLoop(sink)
    loop.start(None)
    return loop


def test_every_type_arrives_as_it_was(spark: Any, port: int, sql: Any) -> None:
    columns = [
        *(Column("id", "BIGINT", nullable=False), Column("b", "BOOLEAN"), Column("n", "DECIMAL(38,10)")),
        *(Column("d", "DATE"), Column("t", "TIMESTAMP"), Column("l", "TIMESTAMP_NTZ"), Column("x", "BINARY")),
        *(Column("a", "ARRAY<STRING>"), Column("m", "MAP<STRING,INT>"), Column("f", "DOUBLE"), Column("y", "TINYINT")),
    ]
    ddl = ", ".join(f"{c.name} {c.type}" for c in columns) + ", _op TINYINT"
    row = (
        *(1, True, Decimal("-0.0000000001"), dt.date(1582, 10, 4), dt.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=dt.UTC)),
        *(dt.datetime(1, 1, 1, 0, 0, 0, 1), b"\x00\xff", ["a,b", None, '"'], {"k": 1}, float("inf"), -128, 1),
    )
    empty = (2, *([None] * 10), 1)
    started(opened(port, "types", columns, ("id",))).deliver(0, 1, lambda: spark.createDataFrame([row, empty], ddl))
    found = sql("SELECT * FROM types ORDER BY id")
    assert found[0] == row[:-1]
    assert found[1] == empty[:-1]


COLUMNS = (Column("k", "STRING"), Column("v", "INT"))
DDL = "k STRING, v INT, _op TINYINT"


def test_a_key_that_is_null_is_updated_and_deleted_like_any_other(spark: Any, port: int, sql: Any) -> None:
    loop = started(opened(port, "null_keys", COLUMNS, ("k",)))
    loop.deliver(0, 1, lambda: spark.createDataFrame([(None, 1, 1), ("a", 1, 1)], DDL))
    loop.deliver(1, 2, lambda: spark.createDataFrame([(None, 2, 1), ("a", None, 2)], DDL))
    assert sql("SELECT k, v FROM null_keys") == [(None, 2)]
    loop.deliver(2, 3, lambda: spark.createDataFrame([(None, None, 2)], DDL))
    assert sql("SELECT k, v FROM null_keys") == []


@pytest.mark.parametrize("merge_from", [pg_sink.MERGE_FROM_VERSION, 1_000_000], ids=["merge", "older server"])
def test_one_batch_inserts_updates_and_deletes(
    spark: Any, port: int, sql: Any, monkeypatch: pytest.MonkeyPatch, merge_from: int
) -> None:
    monkeypatch.setattr(pg_sink, "MERGE_FROM_VERSION", merge_from)
    columns = (Column("k", "STRING", nullable=False), Column("v", "INT"))
    loop = started(opened(port, f"mixed_{merge_from}", columns, ("k",)))
    loop.deliver(0, 1, lambda: spark.createDataFrame([("a", 1, 1), ("b", 1, 1), ("c", 1, 1), ("x", None, 2)], DDL))
    loop.deliver(1, 2, lambda: spark.createDataFrame([("a", None, 2), ("b", 2, 1), ("d", 2, 1)], DDL))
    assert sql(f"SELECT k, v FROM mixed_{merge_from} ORDER BY k") == [("b", 2), ("c", 1), ("d", 2)]


def test_a_key_that_someone_else_inserts_meanwhile_is_updated(spark: Any, port: int, sql: Any) -> None:
    columns = (Column("k", "STRING", nullable=False), Column("v", "INT"))
    loop = started(opened(port, "raced", columns, ("k",)))
    other = psycopg.connect(f"host=127.0.0.1 port={port} user=postgres dbname=postgres")
    other.execute("INSERT INTO raced VALUES ('a', 100)")
    rows = spark.createDataFrame([("a", 1, 1), ("b", 1, 1)], DDL)
    # The merge has looked, and waits for the other's insert to end.
    lands = threading.Timer(0.0, lambda: _once_waiting(sql, other))
    loop.deliver(0, 1, lambda: (lands.start(), rows)[1])
    lands.join()
    assert sql("SELECT k, v FROM raced ORDER BY k") == [("a", 1), ("b", 1)]


def _once_waiting(sql: Any, other: Any) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not sql("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
        time.sleep(0.05)
    other.commit()
    other.close()


def test_a_target_that_takes_two_keys_as_one_is_refused(port: int, sql: Any) -> None:
    sql("CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level1', deterministic = false)")
    sql("CREATE TABLE loose_keys (k text COLLATE loose PRIMARY KEY, v int)")
    with pytest.raises(DefiniteError) as caught:
        started(opened(port, "loose_keys", COLUMNS, ("k",)))
    assert caught.value.code == "SINK_TARGET_MISMATCH" and "column k" in caught.value.message
    started(opened(port, "loose_keys", COLUMNS, (), type="append-only"))


def test_a_target_of_the_users_own_types_without_a_key_is_kept_right(spark: Any, port: int, sql: Any) -> None:
    sql("CREATE TABLE own (note text DEFAULT 'kept', k varchar(10), v bigint NOT NULL)")
    loop = started(opened(port, "own", COLUMNS, ("k",)))
    loop.deliver(0, 1, lambda: spark.createDataFrame([("a", 1, 1), ("b", 1, 1)], DDL))
    loop.deliver(1, 2, lambda: spark.createDataFrame([("a", 2, 1), ("b", None, 2)], DDL))
    assert sql("SELECT note, k, v FROM own") == [("kept", "a", 2)]


def test_a_column_dropped_under_the_sink_is_a_clear_state(spark: Any, port: int, sql: Any) -> None:
    loop = started(opened(port, "dropped", COLUMNS, ("k",)))
    sql("ALTER TABLE dropped DROP COLUMN v")
    with pytest.raises(DefiniteError, match="SINK_TARGET_MISMATCH"):
        loop.deliver(0, 1, lambda: spark.createDataFrame([("a", 1, 1)], DDL))


def test_a_refused_row_is_not_quoted_in_the_error(spark: Any, port: int, sql: Any) -> None:
    sql("CREATE TABLE refused (k text PRIMARY KEY, v int CHECK (v < 10))")
    loop = started(opened(port, "refused", COLUMNS, ("k",)))
    with pytest.raises(DefiniteError, match="SINK_ROW_REFUSED") as caught:
        loop.deliver(0, 1, lambda: spark.createDataFrame([("secret-key", 4242, 1)], DDL))
    assert "4242" not in caught.value.render() and "secret-key" not in caught.value.render()
    assert sql("SELECT * FROM refused") == []


def test_rows_that_the_target_refuses_become_dead_letters(spark: Any, port: int, sql: Any, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    sql("CREATE TABLE letters (k int PRIMARY KEY, v int NOT NULL CHECK (v <> 13))")
    loop = started(opened(port, "letters", COLUMNS, ("k",), **{"dead_letters.path": str(tmp_path)}))
    rows: list[Any] = [(str(i) if i % 7 else f"not {i}", i, 1) for i in range(20)]
    rows += [("100", None, 1), ("101", None, 2)]  # an upsert without a value, and a delete, which has only its key
    delivered = loop.deliver(0, 1, lambda: spark.createDataFrame(rows, DDL))
    assert (delivered.rows, delivered.refused) == (17, 5)
    assert sql("SELECT count(*) FROM letters") == [(16,)]
    letters = [r["k"] for path, _ in delivered.dead_letters for r in pq.read_table(path).to_pylist()]
    assert sorted(letters) == ["100", "13", "not 0", "not 14", "not 7"]
    assert sum(rows for _, rows in delivered.dead_letters) == 5


def test_mariadb_has_dead_letters_too(spark: Any, sink_world: SinkWorld, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    sink_world.mariadb("CREATE TABLE shop.letters (k INT PRIMARY KEY, v INT NOT NULL)")
    target = sink_world.target("mariadb")
    target.options.update({"table.name": "letters", "dead_letters.path": str(tmp_path)})
    loop = started(target.open(1, columns=COLUMNS, key=("k",)))
    rows: list[Any] = [(str(i) if i % 7 else f"not {i}", i, 1) for i in range(20)]
    rows += [("100", None, 1), ("101", None, 2)]
    delivered = loop.deliver(0, 1, lambda: spark.createDataFrame(rows, DDL))
    assert (delivered.rows, delivered.refused) == (18, 4)
    assert sink_world.mariadb("SELECT count(*) FROM shop.letters") == [(17,)]
    letters = [r["k"] for path, _ in delivered.dead_letters for r in pq.read_table(path).to_pylist()]
    assert sorted(letters) == ["100", "not 0", "not 14", "not 7"]


@pytest.mark.parametrize("lands", [True, False])
def test_a_connection_lost_while_committing_is_resolved_by_asking(
    spark: Any, port: int, sql: Any, monkeypatch: pytest.MonkeyPatch, lands: bool
) -> None:
    table = f"lost_{lands}".lower()
    sink = opened(port, table, COLUMNS, ("k",), type="append-only")
    loop = started(sink)
    real = psycopg.Connection.commit
    seen: list[type] = []

    def cut(connection: Any) -> None:
        """The backend is ended from outside, before or after the commit has reached it."""
        monkeypatch.setattr(psycopg.Connection, "commit", real)
        if lands:
            real(connection)
        sql(f"SELECT pg_terminate_backend({connection.info.backend_pid}, 5000)")
        real(connection) if not lands else connection.execute("SELECT 1")

    commit = sink.commit

    def watched(token: Any) -> None:
        monkeypatch.setattr(psycopg.Connection, "commit", cut)
        try:
            commit(token)
        except Exception as error:
            seen.append(type(error))
            raise

    sink.commit = watched
    batch = lambda: spark.createDataFrame([("a", 1, 1)], DDL)  # noqa: E731
    if lands:
        loop.deliver(0, 1, batch)
    else:
        with pytest.raises(Exception, match="SINK_COMMIT_LOST"):
            loop.deliver(0, 1, batch)
        sink.commit = commit
        loop.deliver(0, 1, batch)
    assert seen == [IndeterminateError]
    assert sql(f"SELECT k FROM {table}") == [("a",)]


def test_staging_tables_of_dead_attempts_are_removed(spark: Any, port: int, sql: Any) -> None:
    sink = opened(port, "stale", COLUMNS, ("k",))
    loop = started(sink)
    sink.prepare(0, 1)
    loop.deliver(0, 1, lambda: spark.createDataFrame([("a", 1, 1)], DDL))
    assert sql("SELECT 1 FROM pg_class WHERE relname LIKE '\\_headwater%' AND relkind = 'r'") == []


def test_an_append_only_target_takes_every_version_of_a_key(spark: Any, port: int, sql: Any) -> None:
    columns = [Column("k", "STRING", nullable=False), Column("v", "INT")]
    loop = started(opened(port, "versions", columns, ("k",), type="append-only", force_append_only="true"))
    for epoch, value in enumerate((10, 20)):
        frame = spark.createDataFrame([("a", value, 1)], "k STRING, v INT, _op TINYINT")
        loop.deliver(epoch, epoch + 1, lambda frame=frame: frame)
    assert sql("SELECT k, v FROM versions ORDER BY v") == [("a", 10), ("a", 20)]


def test_an_engine_that_stopped_inside_its_commit_cannot_hold_its_successor_up(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pg_sink, "PREDECESSOR_WAIT_S", 1)
    old, other = (opened(port, name, COLUMNS, ("k",)) for name in ("held", "other"))
    for sink in (old, other):
        sink.validate(COLUMNS, ("k",))
        sink.claim()
        sink._lock_progress(sink._connect().cursor())  # and here it stops
    successor = opened(port, "held", COLUMNS, ("k",))
    successor.generation = 2
    successor.claim()
    with pytest.raises(TransientError):
        old.claim()  # its session is gone, and with it what it had not committed
    with pytest.raises(DefiniteError, match="SINK_FENCED"):
        old.claim()
    other._connect().commit()  # another sink's session is none of our business


def test_a_role_with_rights_on_the_schema_alone_is_enough(port: int, sql: Any) -> None:
    sql("CREATE SCHEMA app; CREATE ROLE app LOGIN; GRANT USAGE, CREATE ON SCHEMA app TO app")
    sink = opened(port, "mine", COLUMNS, ("k",), **{"username": "app", "schema.name": "app"})
    sink.validate(COLUMNS, ("k",))
    sink.claim()
    sink.abort(sink.prepare(1, 2))
    assert sql("SELECT count(*) FROM app.mine") == [(0,)]
