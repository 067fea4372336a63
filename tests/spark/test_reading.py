"""What reading and writing cost in Spark jobs and shuffles, and the data source `headwater` from another session."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine_process import EngineProcess, running, wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with running(tmp_path_factory.mktemp("reading") / "data", "--set", "barrier_interval_ms=200") as found:
        yield found


@pytest.fixture(scope="module")
def orders(engine: EngineProcess) -> str:
    """50,000 rows in bulk, then small changes of every kind."""
    engine.sql("CREATE TABLE orders (id BIGINT PRIMARY KEY, v STRING, tags ARRAY<STRING>)")
    engine.sql("INSERT INTO orders SELECT id, concat('v', id), array('a') FROM range(50000); FLUSH")
    engine.sql("INSERT INTO orders VALUES (1, 'new', NULL), (50001, 'more', array('b')); FLUSH")
    engine.sql("DELETE FROM orders WHERE id = 2; UPDATE orders SET id = 60000 WHERE id = 3; FLUSH")
    return "orders"


# -- jobs ------------------------------------------------------------------------------------------------------------


def test_an_idle_engine_with_ten_tables_completes_barriers_without_a_spark_job(engine: EngineProcess) -> None:
    for i in range(10):
        engine.sql(f"CREATE TABLE idle{i} (id INT PRIMARY KEY)")
    before, first = engine.all_spark_jobs(), engine.http.get("/status").json()["committed_epoch"]
    time.sleep(2)
    assert engine.http.get("/status").json()["committed_epoch"] > first
    assert engine.all_spark_jobs() == before


def test_an_epoch_with_changes_in_k_tables_is_one_spark_job(engine: EngineProcess) -> None:
    names = [f"many{i}" for i in range(6)]
    engine.sql("; ".join(f"CREATE TABLE {n} (id INT PRIMARY KEY, v STRING)" for n in names))
    engine.sql("ALTER SYSTEM SET barrier_interval_ms = 600000; FLUSH")
    try:
        before = engine.spark_jobs("table")
        engine.sql("; ".join(f"INSERT INTO {n} VALUES (1, 'x'), (2, 'y')" for n in names))
        engine.sql("FLUSH")
        assert engine.spark_jobs("table") - before == 1
    finally:
        engine.sql("ALTER SYSTEM SET barrier_interval_ms = 200; FLUSH")
    assert [engine.sql(f"SELECT count(*) AS n FROM {n}")[0]["n"] for n in names] == [2] * 6


@pytest.mark.slow
def test_views_that_do_not_read_each_other_are_refreshed_by_one_spark_job(engine: EngineProcess) -> None:
    engine.sql("CREATE TABLE sold (id INT PRIMARY KEY, k INT, v DECIMAL(9,2), at TIMESTAMP, tags ARRAY<STRING>)")
    engine.sql("INSERT INTO sold VALUES (1, 1, 2.50, TIMESTAMP '2026-01-01 00:00:00', array('a')); FLUSH")
    queries = {
        "sold_rows": "SELECT id, v * 2 AS twice, at, tags FROM sold WHERE v > 1",
        "sold_sums": "SELECT k, sum(v) AS total, count(*) AS n FROM sold GROUP BY k",
        "sold_kinds": "SELECT DISTINCT k, at FROM sold",
        "sold_pairs": "SELECT a.id, b.id AS other, struct(a.v, b.at) AS both FROM sold a JOIN sold b ON a.k = b.k",
    }
    engine.sql("; ".join(f"CREATE MATERIALIZED VIEW {name} AS {query}" for name, query in queries.items()))
    engine.sql("WAIT; ALTER SYSTEM SET barrier_interval_ms = 600000; FLUSH")
    try:
        before = engine.spark_jobs("view")
        old = "(3, NULL, 7, TIMESTAMP '1969-07-20 20:17:40.1', array())"
        engine.sql(f"INSERT INTO sold VALUES (1, 1, 3, NULL, NULL), (2, 1, 0.50, NULL, NULL), {old}; FLUSH")
        assert engine.spark_jobs("view") - before == 1
    finally:
        engine.sql("ALTER SYSTEM SET barrier_interval_ms = 200; FLUSH")
    for name, query in queries.items():
        stored, fresh = engine.sql(f"SELECT * FROM {name}"), engine.sql(query)
        assert sorted(map(repr, stored)) == sorted(map(repr, fresh)), name


def test_views_of_large_tables_are_one_spark_job_for_each_level_epoch_after_epoch(engine: EngineProcess) -> None:
    engine.sql("CREATE TABLE sales (id BIGINT PRIMARY KEY, buyer BIGINT, amount DECIMAL(9,2))")
    engine.sql("CREATE TABLE buyers (buyer BIGINT PRIMARY KEY, country STRING)")
    engine.sql("INSERT INTO buyers SELECT id, concat('C', id % 7) FROM range(11000); FLUSH")
    engine.sql("INSERT INTO sales SELECT id, id % 11000, id % 100 FROM range(30000); FLUSH")
    joined = "FROM sales s JOIN buyers b ON s.buyer = b.buyer"
    queries = {
        "sale_sums": f"SELECT country, sum(amount) AS total, max(amount) AS most {joined} GROUP BY country",
        "sale_rows": f"SELECT s.id, s.amount, b.country {joined}",
        "sale_kinds": "SELECT buyer, count(DISTINCT amount) AS n FROM sales GROUP BY buyer",
        "sale_best": "SELECT id, buyer FROM (SELECT *, row_number() OVER (PARTITION BY buyer ORDER BY amount DESC, id) "
        "AS place FROM sales) WHERE place = 1",
        "sale_total": "SELECT sum(total) AS total FROM sale_sums",
    }
    engine.sql("; ".join(f"CREATE MATERIALIZED VIEW {name} AS {query}" for name, query in queries.items()))
    engine.sql("WAIT; ALTER SYSTEM SET barrier_interval_ms = 600000; FLUSH")
    try:
        for change in (
            "UPDATE sales SET amount = amount + 1 WHERE id % 100 = 3",
            "DELETE FROM sales WHERE id % 500 = 99",
            "INSERT INTO sales VALUES (30001, 5, 1000), (30002, NULL, 1)",
            "UPDATE sales SET buyer = 7 WHERE id < 10 OR id = 30001",
        ):
            before = engine.spark_jobs("view")
            engine.sql(f"{change}; FLUSH")
            assert engine.spark_jobs("view") - before == 2, change
        for name, query in queries.items():
            difference = (
                f"(SELECT * FROM {name} EXCEPT ALL {query}) UNION ALL ({query} EXCEPT ALL SELECT * FROM {name})"
            )
            assert engine.sql(f"SELECT count(*) AS n FROM ({difference})") == [{"n": 0}], name
    finally:
        engine.sql("ALTER SYSTEM SET barrier_interval_ms = 200; FLUSH")


def test_the_catalogue_and_constants_cost_no_stage_of_an_epoch(engine: EngineProcess) -> None:
    before = engine.spark_jobs("table")
    engine.sql("SELECT * FROM hw_catalog.hw_jobs")
    engine.sql("SELECT 1")
    assert engine.spark_jobs("table") == before


# -- plans -----------------------------------------------------------------------------------------------------------


def test_reading_a_table_is_a_scan_without_a_shuffle_while_deltas_are_small(engine: EngineProcess, orders: str) -> None:
    plan = engine.plan(f"SELECT * FROM {orders}")
    assert "Scan parquet" in plan
    assert not re.search(r"Exchange(?! SinglePartition)|hashpartitioning|rangepartitioning", _without_broadcast(plan))
    assert engine.sql(f"SELECT count(*) AS n, max(id) AS top FROM {orders}") == [{"n": 50000, "top": 60000}]


def test_reading_one_key_pushes_it_into_the_files(engine: EngineProcess, orders: str) -> None:
    plan = engine.plan(f"SELECT v FROM {orders} WHERE id = 4711")
    filters = re.findall(r"PushedFilters: \[(.*)\]", plan)
    assert filters
    assert all("EqualTo(id,4711)" in f and "EqualTo(_vnode," in f for f in filters), filters
    assert not re.search(r"hashpartitioning", plan)
    assert engine.sql(f"SELECT v FROM {orders} WHERE id = 4711") == [{"v": "v4711"}]


def test_keys_given_as_constants_find_their_rows_whatever_their_spelling(engine: EngineProcess) -> None:
    engine.sql("CREATE TABLE points (a STRING, b INT, v INT, PRIMARY KEY (a, b))")
    engine.sql("INSERT INTO points SELECT concat('0', id % 10), id, id FROM range(1000); FLUSH")
    count = "SELECT count(*) AS n FROM points WHERE"
    assert engine.sql(f"{count} a = '07' AND b IN (7, 17, 18)") == [{"n": 2}]
    assert engine.sql(f"{count} a = 7 AND b = 7") == [{"n": 1}]  # as a number, '07' is 7
    assert engine.sql(f"{count} a = '07' AND b = '0017'") == [{"n": 1}]
    engine.sql("UPDATE points SET v = -1 WHERE a = '07' AND b = 7; DELETE FROM points WHERE a = '08' AND b = 8")
    assert engine.sql("SELECT sum(v) AS s, count(*) AS n FROM points") == [{"s": 499500 - 7 - 1 - 8, "n": 999}]


def test_a_bulk_write_over_the_same_keys_is_folded_as_small_ones_are(engine: EngineProcess) -> None:
    engine.sql("CREATE TABLE bulk (id BIGINT PRIMARY KEY, v BIGINT)")
    engine.sql("INSERT INTO bulk SELECT id % 150000, id FROM range(300000); FLUSH")
    engine.sql("INSERT INTO bulk SELECT id, -id FROM range(10); DELETE FROM bulk WHERE id >= 149990; FLUSH")
    expected = [{"n": 149990, "low": -9, "high": 299989}]
    assert engine.sql("SELECT count(*) AS n, min(v) AS low, max(v) AS high FROM bulk") == expected


def test_bulk_inserts_of_new_keys_become_base_as_they_are_and_others_are_folded(engine: EngineProcess) -> None:
    visible = "SELECT path, kind FROM hw_catalog.hw_segments WHERE table_name = 'appended' AND removed_epoch IS NULL"

    def in_base() -> set[str]:
        wait_until(lambda: {r["kind"] for r in engine.sql(visible)} == {"base"}, 120, "compaction")
        return {r["path"] for r in engine.sql(visible)}

    insert = "INSERT INTO appended SELECT id, sha2(CAST(id AS STRING), 256) FROM range({}); FLUSH"
    engine.sql("CREATE TABLE appended (id BIGINT PRIMARY KEY, v STRING)")
    engine.sql(insert.format(150000))
    first, written = engine.epoch(), {r["path"] for r in engine.sql(visible)}
    assert in_base() == written
    engine.sql(insert.format("150000, 300000"))
    assert written < in_base()
    engine.sql("UPDATE appended SET v = 'x' WHERE id IN (7, 200007); DELETE FROM appended WHERE id = 8; FLUSH")
    found = "SELECT count(*) AS n, count(DISTINCT id) AS ids, count_if(v = 'x') AS x FROM appended"
    assert engine.sql(found) == [{"n": 299999, "ids": 299999, "x": 2}]
    assert engine.sql(f"{found} VERSION AS OF {first}") == [{"n": 150000, "ids": 150000, "x": 0}]
    changes = f"SELECT _change_type, count(*) AS n FROM table_changes('appended', {first}, {engine.epoch()}) GROUP BY 1"
    assert {r["_change_type"]: r["n"] for r in engine.sql(changes)} == {
        "insert": 150000,
        "update_preimage": 2,
        "update_postimage": 2,
        "delete": 1,
    }
    engine.sql(insert.format(200000))
    assert written.isdisjoint(in_base())
    assert engine.sql(found) == [{"n": 300000, "ids": 300000, "x": 1}]


def test_columns_that_are_not_asked_for_are_not_read_from_the_base(engine: EngineProcess) -> None:
    engine.sql("CREATE TABLE wide AS SELECT id, concat('v', id) AS v, array(id) AS tags FROM range(100); FLUSH")
    schemas = re.findall(r"ReadSchema: (.*)", engine.plan("SELECT id FROM wide"))
    assert schemas == ["struct<id:bigint>"]


def _without_broadcast(plan: str) -> str:
    return plan.replace("BroadcastExchange", "Broadcast")


# -- the data source -------------------------------------------------------------------------------------------------


def snapshot(spark: SparkSession, engine: EngineProcess, table: str, **options: Any) -> DataFrame:
    reader = spark.read.format("headwater").option("path", str(engine.data_dir)).option("table", table)
    return reader.options(**options).load()


def test_another_session_reads_the_same_rows_while_the_engine_runs(
    spark: SparkSession, engine: EngineProcess, orders: str
) -> None:
    rows = snapshot(spark, engine, orders, changeColumns=False)
    assert rows.columns == ["id", "v", "tags"]
    assert rows.count() == 50000
    few = rows.where("id IN (1, 2, 3, 60000, 50001)").orderBy("id").collect()
    assert [(r.id, r.v, r.tags) for r in few] == [
        (1, "new", None),
        (50001, "more", ["b"]),
        (60000, "v3", ["a"]),
    ]


def test_another_session_reads_a_past_epoch(spark: SparkSession, engine: EngineProcess) -> None:
    engine.sql(
        "CREATE TABLE past (id INT PRIMARY KEY, at TIMESTAMP, n DECIMAL(20,4));"
        "INSERT INTO past VALUES (1, TIMESTAMP '2026-01-01 00:00:00.000001', 1.5); FLUSH"
    )
    epoch = engine.epoch()
    engine.sql("DELETE FROM past; FLUSH")
    (row,) = snapshot(spark, engine, "past", epoch=epoch).collect()
    assert (row.id, str(row.n), row._change_type, row._commit_version) == (1, "1.5000", "insert", epoch)
    assert snapshot(spark, engine, "past").count() == 0


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"table": "nosuch"}, "UNKNOWN_TABLE"),
        ({"table": "orders", "epoch": "5"}, "EPOCH_NOT_AVAILABLE"),
        ({"table": "orders", "path": "/nonexistent"}, "NO_DATA_DIRECTORY"),
        ({}, "OPTION_MISSING"),
    ],
)
def test_a_wrong_option_of_the_source_says_so(
    spark: SparkSession, engine: EngineProcess, orders: str, options: dict[str, str], code: str
) -> None:
    reader = spark.read.format("headwater").options(**{"path": str(engine.data_dir), **options})
    with pytest.raises(Exception, match=code):
        reader.load().collect()


class Collector:
    """A streaming query that keeps what it was given, and can be started again from its checkpoint."""

    def __init__(self, spark: SparkSession, engine: EngineProcess, table: str, place: Path) -> None:
        self.spark, self.engine, self.table, self.place = spark, engine, table, place
        self.rows: list[Any] = []

    def run(self, **options: Any) -> list[Any]:
        """Everything that is there and was not delivered yet."""
        self.rows = []
        stream = self.spark.readStream.format("headwater").option("path", str(self.engine.data_dir))
        query = (
            stream.option("table", self.table)
            .options(**options)
            .load()
            .writeStream.option("checkpointLocation", str(self.place))
            .trigger(availableNow=True)
            .foreachBatch(lambda batch, _: self.rows.extend(batch.collect()))
            .start()
        )
        query.awaitTermination(300)
        return self.rows


def test_a_stream_follows_the_change_log_and_goes_on_from_its_checkpoint(
    spark: SparkSession, engine: EngineProcess, tmp_path: Path
) -> None:
    engine.sql(
        "CREATE TABLE followed (id INT PRIMARY KEY, v STRING); INSERT INTO followed VALUES (1, 'a'), (2, 'b'); FLUSH"
    )
    stream = Collector(spark, engine, "followed", tmp_path / "checkpoint")
    first = stream.run()
    assert sorted((r.id, r.v, r._change_type) for r in first) == [(1, "a", "insert"), (2, "b", "insert")]
    start = first[0]._commit_version
    engine.sql("INSERT INTO followed VALUES (1, 'A'), (3, 'c'); FLUSH")
    engine.sql("DELETE FROM followed WHERE id = 2; FLUSH")
    second = stream.run()
    assert sorted((r._change_type, r.id, r.v) for r in second) == [
        ("delete", 2, "b"),
        ("insert", 3, "c"),
        ("update_postimage", 1, "A"),
        ("update_preimage", 1, "a"),
    ]
    assert all(r._commit_version > start and r._commit_timestamp.year >= 2026 for r in second)
    assert stream.run() == []
    from_epoch = Collector(spark, engine, "followed", tmp_path / "other").run(startingEpoch=start)
    assert sorted(from_epoch) == sorted(second)
    in_sql = engine.sql(f"SELECT _change_type, id, v FROM table_changes('followed', {start}, {engine.epoch()})")
    assert sorted((r["_change_type"], r["id"], r["v"]) for r in in_sql) == sorted(
        (r._change_type, r.id, r.v) for r in second
    )


def test_compaction_changes_neither_rows_nor_the_past_nor_the_change_log(
    spark: SparkSession, engine: EngineProcess, tmp_path: Path
) -> None:
    engine.sql(
        "CREATE TABLE packed (id INT PRIMARY KEY, v INT); INSERT INTO packed SELECT id, 0 FROM range(100); FLUSH"
    )
    start = engine.epoch()
    for i in range(20):
        engine.sql(f"INSERT INTO packed VALUES ({i}, 1), (100, {i}); FLUSH")
    removed = (
        "SELECT count(*) AS n FROM hw_catalog.hw_segments WHERE table_name = 'packed' AND removed_epoch IS NOT NULL"
    )
    wait_until(lambda: engine.sql(removed)[0]["n"] > 0, 120, "compaction")
    assert engine.sql("SELECT count(*) AS n, sum(v) AS s FROM packed") == [{"n": 101, "s": 39}]
    assert engine.sql(f"SELECT count(*) AS n, sum(v) AS s FROM packed VERSION AS OF {start}") == [{"n": 100, "s": 0}]
    changes = Collector(spark, engine, "packed", tmp_path / "checkpoint").run(startingEpoch=start)
    kinds = [r._change_type for r in changes]
    assert {k: kinds.count(k) for k in set(kinds)} == {"update_preimage": 39, "update_postimage": 39, "insert": 1}
