"""A data directory whose segments are of format v1 (no `_vnode`): all is right, and compaction makes v2 of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from engine_process import EngineProcess, running, wait_until
from headwater.connectors.files.sink import read_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]
ROWS = "SELECT name, day, n FROM t ORDER BY ALL"
TOTALS = "SELECT day, count(*) AS c, sum(n) AS s FROM t GROUP BY day"
VIEW = "SELECT day, c, s FROM totals ORDER BY day"


def as_format_1(data_dir: Path) -> int:
    """Rewrite every segment without the column; gives how many there were."""
    found = [p for p in data_dir.rglob("*.parquet") if "_vnode" in pq.read_schema(p).names]
    for path in found:
        rows = pq.read_table(path, partitioning=None).drop_columns(["_vnode"])
        pq.write_table(rows, path, row_group_size=100)
    return len(found)


def formats(engine: EngineProcess) -> Counter[bool]:
    """The visible segments of the table, by whether they have the column."""
    visible = "SELECT path FROM hw_catalog.hw_segments WHERE table_name = 't' AND removed_epoch IS NULL"
    paths = [engine.data_dir / r["path"] for r in engine.sql(visible)]
    return Counter("_vnode" in pq.read_schema(p).names for p in paths)


def backlog(engine: EngineProcess) -> int:
    return int(engine.sql("SELECT backlog_epochs AS n FROM hw_catalog.hw_log_stores WHERE sink = 'out'")[0]["n"])


def delivered(path: Path) -> list[Any]:
    return sorted((r["name"], str(r["day"]), r["n"]) for r in read_table(path).to_pylist())


def held(engine: EngineProcess) -> list[Any]:
    return sorted((r["name"], r["day"], r["n"]) for r in engine.sql("SELECT * FROM t"))


def test_segments_of_format_1_are_read_everywhere_and_migrated_by_compaction(
    spark: SparkSession, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    with running(tmp_path / "data") as engine:
        engine.sql("CREATE TABLE t (name STRING, day DATE, n BIGINT, PRIMARY KEY (name, day))")
        engine.sql("INSERT INTO t SELECT concat('a', id), DATE '2026-01-01' + CAST(id % 7 AS INT), id FROM range(3000)")
        engine.sql(f"CREATE MATERIALIZED VIEW totals AS {TOTALS}")
        engine.sql(f"CREATE SINK out FROM t WITH (connector='files', path='{target}'); WAIT; FLUSH")
        wait_until(lambda: target.exists() and delivered(target) == held(engine), 120, "the snapshot")
        engine.sql("ALTER SINK out SET SINK_RATE_LIMIT = 0")
        start = engine.epoch()
        engine.sql("UPDATE t SET n = -n WHERE n % 5 = 0; FLUSH; DELETE FROM t WHERE n % 7 = 1; FLUSH")
        engine.sql("INSERT INTO t VALUES ('new', DATE '2026-02-02', 1), ('a3', DATE '2026-02-02', 2); FLUSH")
        end = engine.epoch()
        changes = f"SELECT * FROM table_changes('t', {start}, {end}) ORDER BY ALL"
        wanted = [engine.sql(q) for q in (ROWS, VIEW, changes)]
        assert backlog(engine) >= 3
    assert as_format_1(tmp_path / "data") >= 5
    with running(tmp_path / "data") as engine:
        assert formats(engine).keys() == {False}
        assert [engine.sql(q) for q in (ROWS, VIEW, changes)] == wanted
        assert engine.sql(f"SELECT count(*) AS n FROM t VERSION AS OF {start}") == [{"n": 3000}]
        assert engine.sql("SELECT n FROM t WHERE name = 'a3' AND day = DATE '2026-02-02'") == [{"n": 2}]
        # What was owed before, and what comes now on top of it.
        engine.sql("ALTER SINK out SET SINK_RATE_LIMIT = DEFAULT")
        engine.sql("UPDATE t SET n = 0 WHERE name IN ('new', 'a4'); DELETE FROM t WHERE name = 'a6'; FLUSH")
        wait_until(lambda: delivered(target) == held(engine), 120, "the sink")
        fresh = [{"day": r["day"], "c": r["c"], "s": r["s"]} for r in engine.sql(f"{TOTALS} ORDER BY day")]
        assert engine.sql(VIEW) == fresh
        # A view that is created now reads the old segments in chunks of vnodes.
        engine.sql("CREATE MATERIALIZED VIEW later AS SELECT name, day, n + 1 AS m FROM t; WAIT; FLUSH")
        later = "SELECT name, day, m - 1 AS n FROM later ORDER BY ALL"
        assert engine.sql(later) == engine.sql(ROWS)
        source = spark.read.format("headwater").option("path", str(engine.data_dir)).option("table", "t")
        assert sorted((r.name, str(r.day), r.n) for r in source.load().collect()) == held(engine)
        # Compaction is due: what it writes is of format v2.
        engine.sql("INSERT INTO t SELECT concat('b', id), DATE '2026-03-03', id FROM range(60000); FLUSH")
        wait_until(lambda: formats(engine).keys() == {True}, 180, "compaction")
        assert engine.sql(later) == engine.sql(ROWS)
        assert engine.sql(changes) == wanted[2]
        wait_until(lambda: delivered(target) == held(engine), 120, "the sink after compaction")
