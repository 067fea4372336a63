"""What users do with sinks, on one engine with real targets: rewind, dead letters, limits, outages, schema changes."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from engine_process import EngineProcess, SqlError, headwater
from headwater.connectors.files.sink import read_table
from headwater.testing.servers import PostgresServer

pytestmark = [pytest.mark.spark, pytest.mark.postgres]
PATIENCE_S = 240.0


def eventually(check: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < end, what
        time.sleep(0.3)


@pytest.fixture(scope="module")
def target() -> Iterator[PostgresServer]:
    version = "15" if PostgresServer.available("15") else "embedded"
    with PostgresServer(version) as server:
        os.environ["SINK_TEST_PASSWORD"] = server.password
        yield server


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, target: PostgresServer) -> Iterator[EngineProcess]:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with EngineProcess(tmp_path_factory.mktemp("sinks") / "data", "--allow-python") as running:
        running.sql("CREATE TABLE k (id BIGINT PRIMARY KEY, country STRING, amount INT)")
        running.sql("INSERT INTO k SELECT id, concat('c', id % 3), CAST(id AS INT) FROM range(30)")
        yield running


def into(target: PostgresServer, table: str, **more: str) -> str:
    options = {"connector": "postgres", "hostname": target.host, "port": str(target.port), "username": target.user}
    options |= {"password": "${SINK_TEST_PASSWORD}", "database.name": "postgres", "table.name": table, **more}
    return "WITH (" + ", ".join(f"{k}='{v}'" for k, v in options.items()) + ")"


def rows(target: PostgresServer, query: str) -> list[Any]:
    with target.connect() as connection:
        try:
            return connection.execute(query).fetchall()  # type: ignore[arg-type]
        except psycopg.errors.UndefinedTable:
            return []


def ids(target: PostgresServer, table: str) -> set[int]:
    return {r[0] for r in rows(target, f"SELECT id FROM {table}")}


def log_store(engine: EngineProcess, sink: str) -> dict[str, Any]:
    return engine.sql(f"SELECT * FROM hw_catalog.hw_log_stores WHERE sink = '{sink}'")[0]


def letters(engine: EngineProcess, sink: str) -> list[dict[str, Any]]:
    return [r for r in engine.sql("SHOW DEAD LETTERS") if r["sink"] == sink and not r["replayed"]]


def state(engine: EngineProcess, sink: str) -> str:
    return str(engine.sql(f"SELECT state FROM hw_catalog.hw_jobs WHERE name = '{sink}'")[0]["state"])


def test_sink_without_snapshot_gets_only_what_changes_later(engine: EngineProcess, target: PostgresServer) -> None:
    engine.sql(f"CREATE SINK news FROM k {into(target, 'news', snapshot='false')}")
    engine.sql("INSERT INTO k VALUES (1000, 'x', 1); FLUSH")
    eventually(lambda: ids(target, "news") == {1000}, "the change did not arrive")
    engine.sql("DROP SINK news; DELETE FROM k WHERE id = 1000")


def test_sink_over_a_query_leaves_nothing_behind(engine: EngineProcess, target: PostgresServer) -> None:
    engine.sql(
        "CREATE SINK per_country AS SELECT country, count(*) AS n FROM k GROUP BY country "
        + into(target, "per_country", primary_key="country")
    )
    wanted = {"c0": 10, "c1": 10, "c2": 10}
    eventually(lambda: dict(rows(target, "SELECT country, n FROM per_country")) == wanted, "the query did not arrive")
    with pytest.raises(SqlError):
        engine.sql("CREATE SINK bad AS SELECT id FROM k " + into(target, "bad", primary_key="nothing"))
    engine.sql("DROP SINK per_country")
    names = {r["name"] for r in engine.sql("SELECT name FROM hw_catalog.hw_jobs")}
    assert names == {"k"}


def test_small_epochs_are_delivered_together_and_a_limit_of_zero_pauses(
    engine: EngineProcess, target: PostgresServer
) -> None:
    engine.sql(f"CREATE SINK limited FROM k {into(target, 'limited')}")
    eventually(lambda: len(ids(target, "limited")) == 30, "the snapshot did not arrive")
    engine.sql("ALTER SINK limited SET SINK_RATE_LIMIT = 0")
    for i in range(4):
        engine.sql(f"INSERT INTO k VALUES ({2000 + i}, 'x', 1); FLUSH")
    assert log_store(engine, "limited")["backlog_epochs"] >= 4
    assert 'headwater_log_store_backlog_rows{sink="limited"} 4.0' in engine.http.get("/metrics").text
    waiting = "SELECT waiting_for AS w FROM hw_catalog.hw_progress WHERE name = 'limited'"
    eventually(lambda: engine.sql(waiting) == [{"w": "the rate limit is 0"}], "it is not said what the sink waits for")
    assert len(ids(target, "limited")) == 30
    engine.sql("ALTER SINK limited SET SINK_RATE_LIMIT = DEFAULT")
    eventually(lambda: len(ids(target, "limited")) == 34, "the sink did not go on")
    transactions = rows(target, "SELECT count(DISTINCT xmin::text) FROM limited WHERE id >= 2000")
    assert transactions == [(1,)], "four small epochs were not one batch"
    engine.sql("DROP SINK limited; DELETE FROM k WHERE id >= 2000")


TYPES = {
    "t": "STRING",
    "d": "DECIMAL(12,3)",
    "at": "TIMESTAMP",
    "l": "TIMESTAMP_NTZ",
    "day": "DATE",
    "f": "DOUBLE",
    "b": "BOOLEAN",
    "x": "BINARY",
    "xs": "ARRAY<STRING>",
    "s": "STRUCT<a: INT, b: STRING>",
    "m": "SMALLINT",
}
VALUES = (
    "concat('ü \"', id), id / 8, timestamp_micros(1700000000000001 + id), TIMESTAMP_NTZ '2026-02-03 04:05:06.7',"
    " DATE '1999-12-31', CAST('NaN' AS DOUBLE), id % 2 = 0, unhex('00ff'), array('a', NULL, '{\"'),"
    " named_struct('a', 1, 'b', NULL), CAST(id % 100 AS SMALLINT)"
)


def test_small_changes_cost_no_spark_job_and_arrive_as_large_ones_do(
    engine: EngineProcess, target: PostgresServer
) -> None:
    columns = ", ".join(f"{name} {kind}" for name, kind in TYPES.items())
    engine.sql(f"CREATE TABLE typed (id BIGINT PRIMARY KEY, {columns})")
    engine.sql(f"CREATE SINK held FROM typed {into(target, 'held')}")
    engine.sql(f"INSERT INTO typed SELECT id, {VALUES} FROM range(3); FLUSH")
    eventually(lambda: len(ids(target, "held")) == 3, "the first rows did not arrive")
    jobs = engine.spark_jobs("sink")
    engine.sql(f"INSERT INTO typed SELECT id, {VALUES} FROM range(3, 40); FLUSH")
    eventually(lambda: len(ids(target, "held")) == 40, "the small change did not arrive")
    engine.sql("UPDATE typed SET t = 'changed', d = NULL WHERE id < 5; DELETE FROM typed WHERE id > 35; FLUSH")
    eventually(lambda: ids(target, "held") == set(range(36)), "the deletes did not arrive")
    eventually(lambda: rows(target, "SELECT count(*) FROM held WHERE t = 'changed'") == [(5,)], "no update")
    assert engine.spark_jobs("sink") == jobs, "a small change of the sink's own key cost a Spark job"
    assert log_store(engine, "held")["backlog_rows"] == 0
    engine.sql(f"INSERT INTO typed SELECT id, {VALUES} FROM range(100, 12200); FLUSH")
    eventually(lambda: len(ids(target, "held")) == 12136, "the large change did not arrive")
    assert engine.spark_jobs("sink") > jobs, "more rows than the engine should hold were not left to Spark"
    engine.sql(f"CREATE SINK copied FROM typed {into(target, 'copied')}")
    eventually(lambda: len(ids(target, "copied")) == 12136, "the snapshot did not arrive")
    both = [rows(target, f"SELECT {table}::text FROM {table} ORDER BY id") for table in ("held", "copied")]
    assert both[0] == both[1]
    engine.sql("DROP SINK held; DROP SINK copied; DROP TABLE typed")


def test_append_only_sink_refuses_a_delete_that_is_held_in_memory(
    engine: EngineProcess, target: PostgresServer
) -> None:
    engine.sql("CREATE TABLE log (id BIGINT PRIMARY KEY, n INT); INSERT INTO log VALUES (1, 1)")
    engine.sql(f"CREATE SINK log_out FROM log {into(target, 'log_out', type='append-only')}")
    dropping = into(target, "log_forced", type="append-only", force_append_only="true")
    engine.sql(f"CREATE SINK log_forced FROM log {dropping}")
    eventually(lambda: ids(target, "log_out") == ids(target, "log_forced") == {1}, "the snapshots did not arrive")
    engine.sql("INSERT INTO log VALUES (2, 2); FLUSH; DELETE FROM log WHERE id = 1; FLUSH")
    code = "SELECT code FROM hw_catalog.hw_errors WHERE name = 'log_out'"
    eventually(lambda: {"code": "SINK_NOT_APPEND_ONLY"} in engine.sql(code), "the delete was not refused")
    eventually(lambda: state(engine, "log_out") == "failed", "the sink does not say that it has failed")
    engine.sql("INSERT INTO log VALUES (3, 3); FLUSH")
    eventually(lambda: ids(target, "log_forced") == {1, 2, 3}, "deletes were not dropped")
    engine.sql("DROP SINK log_out; DROP SINK log_forced; DROP TABLE log")


def test_rewind_delivers_again_from_an_epoch(engine: EngineProcess, target: PostgresServer) -> None:
    engine.sql(f"CREATE SINK again FROM k {into(target, 'again')}")
    eventually(lambda: len(ids(target, "again")) == 30, "the snapshot did not arrive")
    engine.sql("FLUSH")
    epoch = engine.epoch()
    engine.sql("INSERT INTO k VALUES (3000, 'x', 1); FLUSH")
    eventually(lambda: 3000 in ids(target, "again"), "the change did not arrive")
    rows_before = rows(target, "SELECT count(*) FROM again")
    with target.connect() as connection:
        connection.execute("DELETE FROM again WHERE id = 3000")
    done = headwater("rewind", "again", "--to-epoch", str(epoch), data_dir=engine.data_dir)
    assert done.returncode == 0, done.stderr
    eventually(lambda: 3000 in ids(target, "again"), "the change did not come again")
    assert rows(target, "SELECT count(*) FROM again") == rows_before
    wrong = headwater("rewind", "again", "--to-epoch", "1", data_dir=engine.data_dir)
    assert wrong.returncode == 2 and "EPOCH" in wrong.stderr
    engine.sql("DROP SINK again; DELETE FROM k WHERE id = 3000")


def test_refused_rows_are_dead_letters_and_are_replayed_as_they_are_now(
    engine: EngineProcess, target: PostgresServer
) -> None:
    with target.connect() as connection:
        connection.execute("CREATE TABLE strict (id bigint PRIMARY KEY, country text, amount int CHECK (amount < 100))")
    engine.sql(f"CREATE SINK strict FROM k {into(target, 'strict', dead_letters='true')}")
    engine.sql("INSERT INTO k VALUES (4000, 'x', 500), (4001, 'x', 600), (4002, 'x', 50); FLUSH")
    eventually(lambda: 4002 in ids(target, "strict"), "the good row did not arrive")
    assert ids(target, "strict") & {4000, 4001} == set()
    eventually(lambda: bool(engine.sql("SHOW DEAD LETTERS")), "the letters are not listed")
    letters = [r for r in engine.sql("SHOW DEAD LETTERS") if r["sink"] == "strict"]
    assert sum(int(r["rows"]) for r in letters) == 2 and not any(r["replayed"] for r in letters)
    assert all(dt.datetime.fromisoformat(r["at"]).tzinfo is dt.UTC for r in letters)
    engine.sql("UPDATE k SET amount = 60 WHERE id = 4000; DELETE FROM k WHERE id = 4001; FLUSH")
    eventually(lambda: 4000 in ids(target, "strict"), "the corrected row did not arrive")
    done = headwater("dead-letters", "strict", "--replay", "--format", "json", data_dir=engine.data_dir)
    assert done.returncode == 0, done.stderr
    assert rows(target, "SELECT amount FROM strict WHERE id = 4000") == [(60,)], "a replay brought back an old value"
    assert 4001 not in ids(target, "strict")
    assert all(r["replayed"] for r in engine.sql("SHOW DEAD LETTERS") if r["sink"] == "strict")
    with target.connect() as connection:
        connection.execute("DELETE FROM strict WHERE id = 4000")
    engine.sql("INSERT INTO k VALUES (4003, 'x', 700); FLUSH")
    eventually(lambda: any(not r["replayed"] for r in engine.sql("SHOW DEAD LETTERS")), "no new letter")
    with target.connect() as connection:
        connection.execute("ALTER TABLE strict DROP CONSTRAINT strict_amount_check")
    assert engine.sql("REPLAY strict") == [{"rows": 1}]
    assert 4003 in ids(target, "strict")
    engine.sql("INSERT INTO k VALUES (4004, 'x', 1); FLUSH")
    eventually(lambda: 4004 in ids(target, "strict"), "the sink did not go on after a replay")
    engine.sql("DROP SINK strict; DELETE FROM k WHERE id >= 4000")


@pytest.mark.slow
def test_change_of_the_targets_schema_is_a_clear_state_and_heals(engine: EngineProcess, target: PostgresServer) -> None:
    engine.sql(f"CREATE SINK shape FROM k {into(target, 'shape')}")
    eventually(lambda: len(ids(target, "shape")) == 30, "the snapshot did not arrive")
    with target.connect() as connection:
        connection.execute("ALTER TABLE shape RENAME COLUMN amount TO other")
    engine.sql("INSERT INTO k VALUES (5000, 'x', 1); FLUSH")
    eventually(lambda: state(engine, "shape") == "failed", "the state is not shown")
    errors = engine.sql("SELECT code, hint FROM hw_catalog.hw_errors WHERE name = 'shape'")
    assert {e["code"] for e in errors} == {"SINK_TARGET_MISMATCH"} and all(e["hint"] for e in errors)
    with target.connect() as connection:
        connection.execute("ALTER TABLE shape RENAME COLUMN other TO amount")
    eventually(lambda: 5000 in ids(target, "shape") and state(engine, "shape") == "live", "the sink did not heal")
    with target.connect() as connection:
        connection.execute("ALTER TABLE shape RENAME TO shape_away")
    engine.sql("INSERT INTO k VALUES (5001, 'x', 1); FLUSH")
    gone = "SELECT 1 FROM hw_catalog.hw_errors WHERE name = 'shape' AND code = 'SINK_TARGET_MISSING'"
    eventually(lambda: bool(engine.sql(gone)), "a target that is gone is not shown")
    assert rows(target, "SELECT to_regclass('shape')") == [(None,)], "an empty target was made"
    with target.connect() as connection:
        connection.execute("ALTER TABLE shape_away RENAME TO shape")
    eventually(lambda: 5001 in ids(target, "shape") and state(engine, "shape") == "live", "the sink did not heal")
    engine.sql("DROP SINK shape; DELETE FROM k WHERE id >= 5000")


def test_sink_that_is_down_slows_nothing_and_catches_up_in_one_batch(
    engine: EngineProcess, target: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    with target.connect() as connection:
        connection.execute("CREATE TABLE down (id bigint PRIMARY KEY, country text, amount int CHECK (amount < 100))")
    engine.sql(f"CREATE SINK down FROM k {into(target, 'down', dead_letters='true')}")
    engine.sql(f"CREATE SINK up FROM k WITH (connector='files', path='{folder}')")
    eventually(lambda: len(ids(target, "down")) == 30, "the snapshot did not arrive")
    engine.sql("FLUSH")
    epoch = engine.epoch()
    engine.sql("INSERT INTO k VALUES (5998, 'x', 500), (5999, 'x', 1); FLUSH")
    eventually(lambda: 5999 in ids(target, "down"), "the change did not arrive")
    eventually(lambda: bool(letters(engine, "down")), "the refused row is not listed")
    with target.connect() as connection:
        connection.execute("DELETE FROM down WHERE id = 5999")
    target.stop("immediate")
    try:
        for i in range(5):
            engine.sql(f"INSERT INTO k VALUES ({6000 + i}, 'down', 1); FLUSH")
        eventually(lambda: log_store(engine, "up")["backlog_epochs"] == 0, "the other sink is held up")
        behind = log_store(engine, "down")
        assert behind["backlog_rows"] >= 5 and behind["backlog_epochs"] >= 5 and behind["backlog_bytes"] > 0
        assert behind["truncated_to"] < log_store(engine, "up")["truncated_to"], "the two truncate together"
        text = headwater("status", "--json", data_dir=engine.data_dir).stdout
        assert '"down"' in text and "backlog" in text
        code = "SELECT max(code) AS c FROM hw_catalog.hw_errors WHERE name = 'down'"
        eventually(lambda: engine.sql(code) == [{"c": "SINK_UNREACHABLE"}], "the outage is not shown")
        assert state(engine, "down") == "live", "a target that is down needs no person"
        assert engine.sql("SELECT count(*) AS n FROM k WHERE country = 'down'") == [{"n": 5}]
        told = headwater("rewind", "down", "--to-epoch", str(epoch), data_dir=engine.data_dir)
        assert told.returncode == 1 and "SINK_REWIND_WAITS" in told.stderr and "SINK_UNREACHABLE" in told.stderr
        waiting = "SELECT waiting_for FROM hw_catalog.hw_progress WHERE name = 'down'"
        assert f"goes back to epoch {epoch}" in engine.sql(waiting)[0]["waiting_for"]
        with pytest.raises(SqlError, match="SINK_UNREACHABLE"):
            engine.sql("REPLAY down")
        tries = "SELECT count(*) AS n FROM hw_catalog.hw_errors WHERE name = 'down'"
        before = engine.sql(tries)[0]["n"]
        time.sleep(1)
        assert engine.sql(tries)[0]["n"] <= before + 2, "a rewind that waits takes the back-off away"
    finally:
        target.start()
    eventually(lambda: len(ids(target, "down")) == 36, "the sink did not go back and catch up")
    assert rows(target, "SELECT count(DISTINCT xmin::text) FROM down WHERE id >= 6000") == [(1,)]
    delivered = read_table(folder)  # the snapshot and five batches
    assert sorted(delivered["id"].to_pylist()) == sorted(ids(target, "down") | {5998})
    engine.sql("DROP SINK down; DROP SINK up; DELETE FROM k WHERE id >= 5998")


def test_transaction_over_two_rows_is_never_half_in_the_target(engine: EngineProcess, target: PostgresServer) -> None:
    with target.connect() as connection:
        connection.execute("CREATE TABLE account (id bigint PRIMARY KEY, balance bigint NOT NULL)")
        connection.execute("INSERT INTO account SELECT i, 100 FROM generate_series(1, 20) i")
    engine.sql(
        f"CREATE SOURCE bank WITH (connector='postgres-cdc', hostname='{target.host}', port='{target.port}', "
        f"username='{target.user}', password='${{SINK_TEST_PASSWORD}}', database.name='postgres', "
        "slot.name='sinks_bank', publication.name='sinks_bank')"
    )
    engine.sql("CREATE TABLE account (*) FROM bank TABLE 'public.account'; WAIT")
    engine.sql(f"CREATE SINK copied FROM account {into(target, 'account_copy')}")
    eventually(lambda: len(ids(target, "account_copy")) == 20, "the snapshot did not arrive")
    stop = threading.Event()

    def transfer() -> None:
        with target.connect() as connection:
            connection.autocommit = True
            for i in range(10_000):
                if stop.is_set():
                    return
                give, take = 1 + i % 20, 1 + (7 * i + 3) % 20
                with connection.transaction():
                    connection.execute("UPDATE account SET balance = balance - 1 WHERE id = %s", (give,))
                    connection.execute("UPDATE account SET balance = balance + 1 WHERE id = %s", (take,))
                time.sleep(0.002)

    load = threading.Thread(target=transfer)
    load.start()
    seen = set()
    try:
        end = time.monotonic() + 15
        while time.monotonic() < end or len(seen) < 3:
            assert time.monotonic() < end + PATIENCE_S, "nothing was delivered"
            total, state_now = rows(
                target, "SELECT sum(balance), md5(string_agg(balance::text, ',' ORDER BY id)) FROM account_copy"
            )[0]
            assert total == 2000, "half a transaction is in the target"
            seen.add(state_now)
            time.sleep(0.05)
    finally:
        stop.set()
        load.join()
    final = "SELECT id, balance FROM {} ORDER BY id"
    wanted = rows(target, final.format("account"))
    eventually(lambda: rows(target, final.format("account_copy")) == wanted, "the target does not hold the source")
    engine.sql("DROP SINK copied")


def test_sink_that_is_dropped_in_the_middle_of_its_commit_leaves_nothing(
    engine: EngineProcess, target: PostgresServer
) -> None:
    staging = "SELECT count(*) FROM pg_class WHERE relname LIKE '\\_headwater\\_%' AND relkind = 'r'"
    engine.sql(f"CREATE SINK gone FROM k {into(target, 'gone')}")
    eventually(lambda: len(ids(target, "gone")) == 30, "the snapshot did not arrive")
    with target.connect() as holder:
        holder.autocommit = False
        holder.execute("LOCK TABLE gone IN SHARE MODE")  # rows may be read and staged, but not merged
        engine.sql("INSERT INTO k VALUES (8000, 'x', 1); FLUSH")
        eventually(lambda: rows(target, "SELECT 1 FROM pg_locks WHERE NOT granted") != [], "the merge does not wait")
        before = time.monotonic()
        engine.sql("DROP SINK gone")
        assert time.monotonic() - before < 30
        holder.rollback()
    eventually(lambda: rows(target, staging) == [(0,)], "staging is left behind")
    assert 8000 not in ids(target, "gone"), "a dropped sink has delivered"
    engine.sql(f"CREATE SINK gone FROM k {into(target, 'gone')}")
    eventually(lambda: 8000 in ids(target, "gone"), "the sink that was created again does not deliver")
    engine.sql("DROP SINK gone; DELETE FROM k WHERE id = 8000")


def test_sink_of_a_name_that_was_used_before_begins_anew(engine: EngineProcess, target: PostgresServer) -> None:
    """Its predecessor left its progress in the target: that says nothing about another input."""
    engine.sql(f"CREATE SINK reused FROM k {into(target, 'reused_first')}")
    eventually(lambda: 0 in ids(target, "reused_first"), "the first snapshot did not arrive")
    engine.sql("DROP SINK reused; CREATE TABLE other (id BIGINT PRIMARY KEY); INSERT INTO other VALUES (1), (2)")
    engine.sql(f"CREATE SINK reused FROM other {into(target, 'reused_second')}")
    eventually(lambda: ids(target, "reused_second") == {1, 2}, "the second sink has no snapshot")
    engine.sql("INSERT INTO other VALUES (3); FLUSH")
    eventually(lambda: ids(target, "reused_second") == {1, 2, 3}, "the second sink does not go on")
    engine.sql("DROP SINK reused; DROP TABLE other")


def test_literal_password_is_refused_with_a_hint(engine: EngineProcess) -> None:
    with pytest.raises(SqlError) as caught:
        engine.sql("CREATE SINK bad FROM k WITH (connector='postgres', hostname='127.0.0.1', password='hunter2')")
    assert caught.value.code == "LITERAL_SECRET"
    assert "hunter2" not in caught.value.message + caught.value.hint + caught.value.detail


def test_view_equals_its_query_at_the_same_epoch(engine: EngineProcess) -> None:
    query = "SELECT country, sum(amount) AS total, count(*) AS n FROM k GROUP BY country"
    engine.sql(f"CREATE MATERIALIZED VIEW v AS {query}")
    engine.sql("UPDATE k SET country = 'moved' WHERE id < 5; DELETE FROM k WHERE id BETWEEN 10 AND 12; FLUSH")
    assert engine.sql("SELECT * FROM v ORDER BY country") == engine.sql(f"{query} ORDER BY country")


def test_view_that_fails_stops_alone_and_goes_on_when_the_cause_is_gone(engine: EngineProcess) -> None:
    engine.sql("CREATE TABLE d (id BIGINT PRIMARY KEY, x INT); INSERT INTO d VALUES (1, 1), (2, 2); FLUSH")
    engine.sql("CREATE MATERIALIZED VIEW q AS SELECT id, 10 / x AS y FROM d")
    assert len(engine.sql("SELECT * FROM q")) == 2
    engine.sql("INSERT INTO d VALUES (3, 0); FLUSH")
    with pytest.raises(SqlError) as caught:
        engine.sql("SELECT * FROM q")
    assert caught.value.code == "VIEW_FAILED"
    codes = engine.sql("SELECT code, message FROM hw_catalog.hw_errors WHERE name = 'q'")
    assert any("division by zero" in r["message"] for r in codes)
    engine.sql("DELETE FROM d WHERE id = 3; FLUSH")
    eventually(lambda: state(engine, "q") == "live", "the view did not recover")
    assert {r["id"] for r in engine.sql("SELECT * FROM q")} == {1, 2}


def test_engine_that_was_replaced_ends_within_30_s_whatever_its_sinks_do(engine: EngineProcess) -> None:
    """Uses up the module's engine. Sinks that hang in all tasks keep its epochs from a commit."""
    assert engine.process is not None
    for where in ("claim", "write", "retry", "tasks"):
        options = f"connector='python', class='hanging_sink:HangingSink', python.where='{where}'"
        engine.sql(f"CREATE SINK hangs_in_{where} FROM k WITH ({options})")
    eventually(lambda: "SINK_UNREACHABLE" in engine.output(), "the sinks did not begin")
    time.sleep(2)
    waiting = threading.Thread(target=_until_refused, args=(engine, "INSERT INTO k VALUES (1000, 'x', 1); FLUSH"))
    waiting.start()
    time.sleep(2)
    with sqlite3.connect(engine.data_dir / "meta.db", timeout=30) as meta:  # as another engine does when it starts
        meta.execute("UPDATE owner SET generation = generation + 1")
    begun = time.monotonic()
    assert engine.process.wait(60) == 1
    assert time.monotonic() - begun < 30
    assert "error: [ENGINE_FENCED]" in engine.output()
    waiting.join()


def _until_refused(engine: EngineProcess, statement: str) -> None:
    with contextlib.suppress(SqlError, httpx.HTTPError):
        engine.sql(statement)
