"""Views on a running engine: several levels at one epoch, failures of one view alone, Python functions, rules."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import shutil
import signal
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deltalake
import httpx
import pyarrow as pa
import pytest
from py4j.finalizer import ThreadSafeFinalizer

from headwater import Engine
from headwater.cli.statements import apply_file
from headwater.errors import TransientError, UsageError
from headwater.runtime.view_creator import ViewCreator
from headwater.spark import view_fetched

pytestmark = pytest.mark.spark
PATIENCE_S = 240.0
FUNCTION = """
def tier(amount):
    if amount is None:
        raise ValueError("an amount is missing")
    if amount < 0:
        raise ValueError(f"negative: {amount}")
    return "large" if amount >= 100 else "small"
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(
        tmp_path_factory.mktemp("views"), settings={"barrier_interval_ms": "200", "vnode_count": "4"}
    ) as engine:
        engine.sql("CREATE TABLE o (id BIGINT PRIMARY KEY, c BIGINT, amount BIGINT)")
        engine.sql("CREATE TABLE c (c BIGINT PRIMARY KEY, country STRING, rate BIGINT)")
        engine.sql("INSERT INTO c VALUES (1, 'DE', 2), (2, 'FR', 4), (3, 'FR', 5)")
        engine.sql("INSERT INTO o VALUES (1, 1, 10), (2, 2, 200), (3, 2, 30), (4, 3, 400)")
        yield engine


def rows(engine: Engine, query: str) -> list[tuple[Any, ...]]:
    return sorted((tuple(r) for r in engine.sql(query).collect()), key=repr)


def until(what: Callable[[], bool], why: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < end, why
        time.sleep(0.2)


def state(engine: Engine, name: str) -> str:
    return str(rows(engine, f"SELECT state FROM hw_catalog.hw_jobs WHERE name = '{name}'")[0][0])


def messages(engine: Engine, name: str) -> list[str]:
    return [r[0] for r in rows(engine, f"SELECT message FROM hw_catalog.hw_errors WHERE name = '{name}'")]


def errors(engine: Engine, name: str) -> list[tuple[Any, ...]]:
    return rows(engine, f"SELECT code, message FROM hw_catalog.hw_errors WHERE name = '{name}'")


def at_epoch(engine: Engine, name: str, epoch: int) -> list[tuple[Any, ...]] | None:
    """A view's rows; None before it was live."""
    try:
        return rows(engine, f"SELECT * FROM {name} VERSION AS OF {epoch}")
    except UsageError as error:
        if error.code != "EPOCH_NOT_AVAILABLE":
            raise
        return None


def created(engine: Engine, name: str, query: str) -> None:
    engine.sql(f"CREATE MATERIALIZED VIEW {name} AS {query}")
    engine.sql("WAIT")


LEVELS = {
    "per_customer": "SELECT c, sum(amount) AS total, count(*) AS n FROM o GROUP BY c",
    "per_country": "SELECT c.country, sum(p.total) AS total FROM per_customer p JOIN c ON p.c = c.c GROUP BY c.country",
    "best": "SELECT country, total FROM per_country WHERE total > 100",
    "ranked": "SELECT country, rank() OVER (PARTITION BY total > 300 ORDER BY total DESC, country) AS r FROM best",
}


def test_views_on_views_equal_their_queries_at_every_epoch(engine: Engine) -> None:
    for name, query in LEVELS.items():
        created(engine, name, query)
    for change in (
        "INSERT INTO o VALUES (5, 1, 500), (6, NULL, 7)",
        "UPDATE o SET amount = amount + 1 WHERE id <= 3",
        "UPDATE c SET country = 'IT' WHERE c = 2",
        "DELETE FROM o WHERE id = 4",
    ):
        engine.sql(change)
        engine.sql("FLUSH")
    epochs = [r[0] for r in rows(engine, "SELECT DISTINCT epoch FROM hw_catalog.hw_epochs")][-3:]
    checked = 0
    for epoch in epochs:
        for name, query in LEVELS.items():
            at = query
            for source in (" o ", " c ", " per_customer ", " per_country ", " best"):
                at = at.replace(f"FROM{source}", f"FROM{source.rstrip()} VERSION AS OF {epoch} ")
                at = at.replace(f"JOIN{source}", f"JOIN{source.rstrip()} VERSION AS OF {epoch} ")
            stored = at_epoch(engine, name, epoch)
            if stored is None:
                continue
            assert stored == rows(engine, at), (name, epoch)
            checked += 1
    assert checked == 3 * len(LEVELS)


@pytest.mark.slow
def test_division_by_zero_stops_one_view_alone_names_the_key_and_heals_when_the_data_changes(engine: Engine) -> None:
    created(engine, "beside", "SELECT c, count(*) AS n FROM o GROUP BY c")
    created(engine, "ratio", "SELECT o.id, o.amount / c.rate AS r FROM o LEFT JOIN c ON o.c = c.c")
    engine.sql("INSERT INTO c VALUES (9, 'XX', 0); FLUSH")  # before the row that fails with it: that one is named
    engine.sql("INSERT INTO o VALUES (90, 9, 1), (91, 1, 8)")
    until(lambda: state(engine, "ratio") == "failed", "the view should stop")
    assert state(engine, "beside") == "live"
    assert (9, 1) in rows(engine, "SELECT c, n FROM beside"), "other views go on"
    until(lambda: any("id = 90" in m for m in messages(engine, "ratio")), "hw_errors should name the key")
    assert any("division by zero" in m for m in messages(engine, "ratio"))
    engine.sql("UPDATE c SET rate = 1 WHERE c = 9")
    until(lambda: state(engine, "ratio") == "live", "the view should heal")
    assert rows(engine, "SELECT * FROM ratio") == rows(
        engine, "SELECT o.id, o.amount / c.rate AS r FROM o LEFT JOIN c ON o.c = c.c"
    )


def test_a_python_function_of_a_file_is_usable_fails_alone_and_resumes(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTION)
    target = tmp_path / "functions.py"
    engine.sql(f"CREATE FUNCTION tier(amount BIGINT) RETURNS STRING LANGUAGE PYTHON AS '{target}:tier'")
    created(engine, "tiers", "SELECT id, tier(amount) AS tier FROM o WHERE amount IS NOT NULL")
    engine.sql("DELETE FROM o WHERE id = 1")  # a row that is gone has no amount: the function must not see it
    engine.sql("INSERT INTO o VALUES (7, 1, NULL)")
    engine.sql("FLUSH")
    assert state(engine, "tiers") == "live"
    fresh = "SELECT id, CASE WHEN amount >= 100 THEN 'large' ELSE 'small' END AS t FROM o WHERE amount IS NOT NULL"
    assert rows(engine, "SELECT * FROM tiers") == rows(engine, fresh)
    engine.sql("INSERT INTO o VALUES (66, 1, -5)")
    until(lambda: state(engine, "tiers") == "failed", "the view should stop")
    assert rows(engine, "SELECT phase FROM hw_catalog.hw_progress WHERE name = 'tiers'") == [("failed",)]
    until(lambda: any("o.id = 66" in m for m in messages(engine, "tiers")), "hw_errors should name the key")
    assert all("negative" not in m and "-5" not in m for m in messages(engine, "tiers")), "never a value of the row"
    assert any("ValueError" in m for m in messages(engine, "tiers"))
    engine.sql("UPDATE o SET amount = 5 WHERE id = 66")
    engine.sql("RECOVER")
    until(lambda: state(engine, "tiers") == "live", "the view should resume")
    assert rows(engine, "SELECT * FROM tiers") == rows(engine, fresh)
    with pytest.raises(UsageError, match="is used by tiers"):
        engine.sql("DROP FUNCTION tier")


def test_a_function_that_raises_is_replaced_and_the_view_that_it_stopped_goes_on(
    engine: Engine, tmp_path: Path
) -> None:
    file = tmp_path / "roots.py"
    make = f"FUNCTION root(n BIGINT) RETURNS DOUBLE LANGUAGE PYTHON AS '{file}:root'"
    file.write_text("def root(n):\n    if n < 0: raise ValueError(n)\n    return float(n)\n")
    engine.sql(f"CREATE {make}; CREATE TABLE signed (id INT PRIMARY KEY, n BIGINT)")
    engine.sql("INSERT INTO signed VALUES (1, 4), (2, -9); FLUSH")
    engine.sql("CREATE MATERIALIZED VIEW roots AS SELECT id, root(n) AS r FROM signed")
    until(lambda: any("at signed.id = 2" in m for m in messages(engine, "roots")), "its key should be named")
    assert not any("-9" in m for m in messages(engine, "roots")), "never a value of the row"
    file.write_text("def root(n):\n    return float(abs(n))\n")
    with pytest.raises(UsageError, match="gives DOUBLE"):
        engine.sql("CREATE OR REPLACE " + make.replace("DOUBLE", "STRING"))
    engine.sql(f"CREATE OR REPLACE {make}")
    until(lambda: state(engine, "roots") == "live", "the view should go on")
    assert rows(engine, "SELECT * FROM roots") == [(1, 4.0), (2, 9.0)]
    engine.sql("DROP TABLE signed CASCADE")


def test_what_a_view_uses_is_dropped_only_with_cascade(engine: Engine) -> None:
    engine.sql("CREATE TABLE gone (id BIGINT PRIMARY KEY, v DOUBLE)")
    created(engine, "gone_1", "SELECT id, v FROM gone WHERE v IS NOT NULL")
    created(engine, "gone_2", "SELECT count(*) AS n FROM gone_1")
    with pytest.raises(UsageError) as caught:
        engine.sql("DROP TABLE gone")
    assert caught.value.code == "DEPENDANTS_EXIST"
    assert "CASCADE" in caught.value.hint
    engine.sql("DROP TABLE gone CASCADE")
    left = [r[0] for r in rows(engine, "SELECT name FROM hw_catalog.hw_jobs")]
    assert not {"gone", "gone_1", "gone_2"} & set(left)


@pytest.mark.slow
def test_a_limited_creation_reads_parts_of_vnodes_never_goes_back_and_ends_right(engine: Engine) -> None:
    engine.sql("CREATE TABLE many (id BIGINT PRIMARY KEY, v BIGINT)")
    engine.sql("INSERT INTO many SELECT id, id * 7 FROM range(48)")
    engine.sql("FLUSH")
    queries = {"slow": "SELECT id, v * 2 AS d FROM many", "sums": "SELECT v % 3 AS g, sum(v) AS s FROM many GROUP BY 1"}
    for name, query in queries.items():
        make = f"CREATE MATERIALIZED VIEW {name} WITH (backfill.rate_limit = 5) AS {query}"
        creation = threading.Thread(target=engine.sql, args=(make,))
        creation.start()
        seen: list[int] = []
        parts: list[str] = []

        def some_rows(name: str = name, seen: list[int] = seen, parts: list[str] = parts) -> bool:
            found = rows(engine, f"SELECT rows, phase FROM hw_catalog.hw_progress WHERE name = '{name}'")
            seen.extend(r[0] for r in found)
            parts.extend(r[1] for r in found)
            return bool(seen) and seen[-1] >= 5

        until(some_rows, "the snapshot should begin")
        engine.sql("INSERT INTO many VALUES (1, -1), (100, 5)")
        engine.sql("DELETE FROM many WHERE id = 2")
        engine.sql(f"ALTER MATERIALIZED VIEW {name} SET BACKFILL_RATE_LIMIT = 100000")
        engine.sql("WAIT")
        creation.join()
        assert seen == sorted(seen)
        assert any(re.match(r"Snapshot \[\d/4 vnodes, \d+/\d+ rows\]", p) for p in parts), parts
        assert rows(engine, f"SELECT * FROM {name}") == rows(engine, query)


def test_a_creation_that_stands_still_says_why_and_can_be_dropped(engine: Engine) -> None:
    engine.sql("CREATE MATERIALIZED VIEW held WITH (backfill.rate_limit = 0) AS SELECT id FROM o")
    waiting = "SELECT waiting_for FROM hw_catalog.hw_progress WHERE name = 'held'"
    until(lambda: "rate limit is 0" in repr(rows(engine, waiting)), "it should say what it waits for")
    with pytest.raises(UsageError, match="VIEW_CREATING"):
        engine.table("held").df()
    engine.sql("DROP MATERIALIZED VIEW held")
    assert rows(engine, waiting) == []


def test_a_creation_that_fails_says_why_and_goes_on_when_the_data_changes(engine: Engine) -> None:
    engine.sql("CREATE TABLE Zeros (id INT PRIMARY KEY, n INT); INSERT INTO zeros VALUES (1, 0), (2, 5); FLUSH")
    engine.sql("CREATE MATERIALIZED VIEW tenths AS SELECT id, 10 / n AS q FROM zeros")
    waiting = "SELECT waiting_for FROM hw_catalog.hw_progress WHERE name = 'tenths'"
    until(lambda: "division by zero, at Zeros.id = 1" in repr(rows(engine, waiting)), "it should say what went wrong")
    assert any("at Zeros.id = 1" in m for m in messages(engine, "tenths"))
    engine.sql("UPDATE zeros SET n = 2 WHERE n = 0; FLUSH; RECOVER")
    state = "SELECT state FROM hw_catalog.hw_jobs WHERE name = 'tenths'"
    until(lambda: "live" in repr(rows(engine, state)), "the epoch that it reads should move on")
    assert rows(engine, "SELECT * FROM tenths") == rows(engine, "SELECT id, 10 / n AS q FROM zeros")
    engine.sql("DROP TABLE zeros CASCADE")


def test_a_view_that_fails_in_the_barrier_that_makes_it_live_has_failed_and_heals(engine: Engine) -> None:
    engine.sql("CREATE TABLE late (id INT PRIMARY KEY, n INT); INSERT INTO late VALUES (1, 5); FLUSH")
    engine.sql("CREATE MATERIALIZED VIEW parts WITH (backfill.rate_limit = 0) AS SELECT id, 10 / n AS q FROM late")
    # The snapshot has not seen the second row, and its log is so short that the main lane takes it over.
    engine.sql("INSERT INTO late VALUES (2, 0); FLUSH; ALTER MATERIALIZED VIEW parts SET BACKFILL_RATE_LIMIT = 1000")
    until(lambda: state(engine, "parts") != "creating", "the view should enter the main lane")
    assert state(engine, "parts") == "failed"
    assert f"job:{engine.core.registry.find('parts').id}" in engine.core.meta.pin_rows(), "what it has to read is kept"
    engine.sql("RECOVER; INSERT INTO late VALUES (3, 2); UPDATE late SET n = 1 WHERE id = 2; FLUSH; RECOVER")
    until(lambda: state(engine, "parts") == "live", "the view should heal")
    assert rows(engine, "SELECT * FROM parts") == rows(engine, "SELECT id, 10 / n AS q FROM late")
    engine.sql("DROP TABLE late CASCADE")


def test_the_epochs_at_which_a_view_had_stopped_cannot_be_read(engine: Engine) -> None:
    engine.sql("CREATE TABLE stop (id INT PRIMARY KEY, n INT); INSERT INTO stop VALUES (1, 5); FLUSH")
    created(engine, "go", "SELECT id, 10 / n AS q FROM stop")
    engine.sql("INSERT INTO stop VALUES (2, 2); FLUSH")
    before = engine.core.meta.committed_epoch()
    engine.sql("INSERT INTO stop VALUES (3, 0); FLUSH")
    until(lambda: state(engine, "go") == "failed", "the view should stop")
    stopped = engine.core.meta.committed_epoch()

    def refused() -> bool:
        with pytest.raises(UsageError) as caught:
            rows(engine, f"SELECT * FROM go VERSION AS OF {stopped}")
        return caught.value.code == "EPOCH_NOT_AVAILABLE"

    assert refused()
    engine.sql("DELETE FROM stop WHERE id = 3; INSERT INTO stop VALUES (4, 1); FLUSH; RECOVER")
    until(lambda: state(engine, "go") == "live", "the view should heal")
    assert refused()
    now = engine.core.meta.committed_epoch()
    for epoch in (before, now):
        found = rows(engine, f"SELECT * FROM go VERSION AS OF {epoch}")
        assert found == rows(engine, f"SELECT id, 10 / n AS q FROM stop VERSION AS OF {epoch}")
    engine.sql("DROP TABLE stop CASCADE")


def test_views_on_a_view_that_has_stopped_stop_and_resume_with_it(engine: Engine) -> None:
    engine.sql("CREATE TABLE below (id INT PRIMARY KEY, n INT); INSERT INTO below VALUES (1, 5); FLUSH")
    levels = {"mid": "SELECT id, 10 / n AS q FROM below", "top": "SELECT count(*) AS n FROM mid"}
    levels["peak"] = "SELECT n, (SELECT count(*) FROM below) AS every FROM top"
    for name, query in levels.items():
        created(engine, name, query)
    before = engine.core.meta.committed_epoch()
    engine.sql("INSERT INTO below VALUES (2, 0), (3, 2); FLUSH")
    until(lambda: all(state(engine, name) == "failed" for name in levels), "all of them should stop")
    assert all("INPUT_FAILED" in repr(errors(engine, name)) for name in ("top", "peak"))
    stopped = engine.core.meta.committed_epoch()
    engine.sql("DELETE FROM below WHERE id = 2; FLUSH; RECOVER")
    until(lambda: state(engine, "mid") == "live", "the cause is gone")
    gaps = [engine.core.meta.state(engine.core.registry.find(name).id, "gaps") for name in levels]
    assert gaps[0] == gaps[1] == gaps[2], "at each epoch all three can be read, or none"
    assert at_epoch(engine, "top", stopped) is None
    assert at_epoch(engine, "top", before) == [(1,)]
    assert rows(engine, "SELECT * FROM peak") == [(2, 2)]
    assert all(state(engine, name) == "live" for name in levels)
    engine.sql("DROP TABLE below CASCADE")


@pytest.mark.slow
def test_a_failure_that_takes_several_rows_names_no_key(engine: Engine) -> None:
    large = 2**62
    engine.sql(f"CREATE TABLE heap (id INT PRIMARY KEY, n BIGINT); INSERT INTO heap VALUES (1, {large}), (2, {large})")
    engine.sql("CREATE MATERIALIZED VIEW height AS SELECT sum(n) AS s FROM heap")
    until(lambda: any("too large" in m for m in messages(engine, "height")), "the sum should overflow")
    creator = engine.core.creating.lanes[engine.core.registry.find("height").id].actor("creating height")
    assert isinstance(creator, ViewCreator) and creator.diagnosis is not None and creator.diagnosis() is None
    engine.sql("DELETE FROM heap WHERE id = 2; FLUSH; RECOVER; WAIT")
    assert rows(engine, "SELECT * FROM height") == [(large,)]
    engine.sql("DROP TABLE heap CASCADE")


def test_a_delta_table_is_followed_and_feeds_a_view(engine: Engine, tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")

    def write(ids: list[int], **more: Any) -> None:
        deltalake.write_deltalake(lake, pa.table({"id": ids, "v": [i * 10 for i in ids]}), **more)

    write([1, 2, 3], configuration={"delta.enableChangeDataFeed": "true"})
    engine.sql(f"CREATE TABLE lake (id BIGINT PRIMARY KEY, v BIGINT) WITH (connector = 'delta', path = '{lake}')")
    created(engine, "lake_sum", "SELECT count(*) AS n, sum(v) AS s FROM lake")
    until(lambda: rows(engine, "SELECT * FROM lake_sum") == [(3, 60)], "the copy should arrive")
    write([4], mode="append")
    deltalake.DeltaTable(lake).delete("id = 1")
    deltalake.DeltaTable(lake).update(updates={"v": "0"}, predicate="id = 2")
    until(lambda: rows(engine, "SELECT * FROM lake_sum") == [(3, 70)], "the changes should arrive")
    with pytest.raises(UsageError, match="follows another table"):
        engine.sql("INSERT INTO lake VALUES (9, 9)")
    shutil.rmtree(lake)
    until(lambda: state(engine, "lake") == "failed", "a table that is gone is a clear state")
    assert "UPSTREAM_DROPPED" in repr(rows(engine, "SELECT code FROM hw_catalog.hw_errors WHERE name = 'lake'"))


@pytest.mark.slow
def test_odd_values_are_grouped_as_in_a_fresh_query(engine: Engine) -> None:
    engine.sql("CREATE TABLE odd (id BIGINT PRIMARY KEY, f DOUBLE, d DECIMAL(10,2), ts TIMESTAMP, s STRING)")
    query = "SELECT f, s, count(*) AS n, avg(d) AS mean, max(ts) AS latest FROM odd GROUP BY f, s"
    created(engine, "odds", query)
    engine.sql(
        "INSERT INTO odd VALUES (1, 0.0D, 1.00, TIMESTAMP '2026-03-29 01:30:00 Europe/Berlin', NULL), "
        "(2, -0.0D, 2.00, TIMESTAMP '2026-03-29 01:30:00 UTC', NULL), (3, double('NaN'), -0.05, NULL, 'x'), "
        "(4, double('NaN'), -0.06, NULL, 'x'), (5, NULL, NULL, NULL, 'N'), (6, NULL, 9.99, NULL, 'N')"
    )
    assert repr(rows(engine, "SELECT * FROM odds")) == repr(rows(engine, query))  # NaN is not equal to itself
    engine.sql("UPDATE odd SET d = d + 0.01 WHERE id IN (2, 4)")
    engine.sql("DELETE FROM odd WHERE id = 1")
    assert repr(rows(engine, "SELECT * FROM odds")) == repr(rows(engine, query))
    text = rows(engine, f"EXPLAIN CREATE MATERIALIZED VIEW again AS {query}")
    assert "algebraic" in repr(text)


@pytest.mark.slow
def test_snapshot_that_fails_after_some_chunks_begins_anew_when_the_row_is_mended(engine: Engine) -> None:
    engine.sql("CREATE TABLE text (id INT PRIMARY KEY, t STRING); INSERT INTO text SELECT id, id FROM range(40)")
    last = max(range(40), key=lambda i: (zlib.crc32(str(i).encode()) % 4, i))  # in the last chunk
    engine.sql(f"UPDATE text SET t = 'bad' WHERE id = {last}; FLUSH")
    query = "SELECT id, CAST(t AS INT) AS n FROM text"
    engine.sql(f"CREATE MATERIALIZED VIEW numbers WITH (backfill.rate_limit = '10') AS {query}")
    until(lambda: bool(messages(engine, "numbers")), "the bad row was not found")
    until(lambda: any(f"at text.id = {last}" in m for m in messages(engine, "numbers")), "its key was not named")
    assert not any("bad" in m for m in messages(engine, "numbers")), "never a value of the row"
    kept = "SELECT path FROM hw_catalog.hw_segments WHERE table_name = 'numbers' AND removed_epoch IS NULL"
    assert rows(engine, kept), "nothing was kept before it failed: this tests nothing"
    engine.sql(f"UPDATE text SET t = '-1' WHERE id = {last}; DELETE FROM text WHERE id < 3; FLUSH; RECOVER")
    until(lambda: state(engine, "numbers") == "live", "the view did not start over")
    assert rows(engine, "SELECT * FROM numbers") == rows(engine, query)
    engine.sql("DROP TABLE text CASCADE")


def test_each_input_of_a_union_is_read_once_however_many_chunks_there_are(engine: Engine) -> None:
    engine.sql("CREATE TABLE long (id INT PRIMARY KEY, t STRING); CREATE TABLE short (id INT PRIMARY KEY, t STRING)")
    engine.sql("INSERT INTO long SELECT id, id FROM range(40); INSERT INTO short VALUES (1, 'a'), (2, 'b'); FLUSH")
    query = "SELECT id, t FROM long UNION ALL SELECT id, t FROM short"
    engine.sql(f"CREATE MATERIALIZED VIEW both WITH (backfill.rate_limit = '15') AS {query}")
    until(lambda: state(engine, "both") == "live", "the view should become live")
    assert rows(engine, "SELECT * FROM both") == rows(engine, query)
    engine.sql("UPDATE short SET t = 'c' WHERE id = 1; DELETE FROM short WHERE id = 2; FLUSH")
    assert rows(engine, "SELECT * FROM both") == rows(engine, query)
    engine.sql("DROP TABLE long CASCADE; DROP TABLE short CASCADE")


def test_plans_that_are_done_with_are_released_without_the_collector_being_due(engine: Engine) -> None:
    engine.sql("CREATE TABLE plans (id INT PRIMARY KEY, v INT); INSERT INTO plans SELECT id, id FROM range(100)")
    engine.sql("CREATE MATERIALIZED VIEW ranks AS SELECT id, rank() OVER (ORDER BY v) AS r FROM plans; FLUSH")

    def held() -> int:
        """Java objects that Python keeps for Spark."""
        return len(ThreadSafeFinalizer.finalizers)

    gc.collect()
    gc.disable()
    try:
        before = held()
        for i in range(4):
            engine.sql(f"INSERT INTO plans VALUES ({1000 + i}, 5); FLUSH")
        until(lambda: held() < before + 50, "plans of refreshes should be released")
        assert len(rows(engine, "SELECT * FROM ranks")) == 104
        until(lambda: held() < before + 50, "a query's plan should be released")
    finally:
        gc.enable()
    view = next(j["id"] for j in engine.status()["jobs"] if j["name"] == "ranks")
    engine.sql("DROP TABLE plans CASCADE")
    assert str(view) not in {str(shape[0]) for p in view_fetched._plans.values() for key in p for shape in key[2:]}  # type: ignore


def test_refreshes_folds_and_drops_leave_no_folder_behind(engine: Engine) -> None:
    root = Path(engine.status()["engine"]["data_dir"])
    known = {j["id"] for j in engine.status()["jobs"]}
    engine.sql("CREATE TABLE brief (id INT PRIMARY KEY); CREATE TABLE kept (id INT PRIMARY KEY)")
    engine.sql("CREATE MATERIALIZED VIEW seen AS SELECT id FROM brief UNION ALL SELECT id FROM kept")
    engine.sql("CREATE MATERIALIZED VIEW firsts AS SELECT min(id) AS id, count(*) AS n FROM kept")
    for i in range(3):
        engine.sql(f"INSERT INTO brief VALUES ({i}); INSERT INTO kept VALUES ({i}); FLUSH")
    engine.sql("DROP TABLE brief CASCADE; ALTER SYSTEM SET retention_s = 0")
    kept = {j["id"]: j["name"] for j in engine.status()["jobs"] if j["id"] not in known}
    assert sorted(kept.values()) == ["firsts", "kept"]

    def left() -> list[str]:
        found = [(Path(p), folders, files) for p, folders, files in os.walk(root / "tables")]
        empty = [p for p, folders, files in found[1:] if not folders and not files]
        gone = [p for p, *_ in found if p.parent == root / "tables" and int(p.name) not in known | kept.keys()]
        return [str(p) for p in [*empty, *gone]]

    until(lambda: not left(), f"these should be gone: {left()}")
    lanes = "SELECT DISTINCT lane FROM epochs"
    with contextlib.closing(sqlite3.connect(root / "meta.db")) as db:
        until(lambda: db.execute(lanes).fetchall() == [("main",)], "lanes of views that have joined should be gone")
    engine.sql("ALTER SYSTEM SET retention_s = 3600; DROP TABLE kept CASCADE")


def test_rows_are_those_that_a_table_or_view_holds_now(engine: Engine) -> None:
    held = "SELECT name, rows FROM hw_catalog.hw_progress WHERE name LIKE 'counted%' ORDER BY name"
    engine.sql("CREATE TABLE counted (id INT PRIMARY KEY, g INT); INSERT INTO counted VALUES (1, 1), (2, 2), (3, 2)")
    engine.sql("CREATE MATERIALIZED VIEW counted_by AS SELECT g, count(*) AS n FROM counted GROUP BY g; FLUSH")
    until(lambda: rows(engine, held) == [("counted", 3), ("counted_by", 2)], "the rows should be counted")
    engine.sql("UPDATE counted SET g = 2; DELETE FROM counted WHERE id = 9; INSERT INTO counted VALUES (3, 2); FLUSH")
    until(lambda: rows(engine, held) == [("counted", 3), ("counted_by", 1)], "an update adds no row")
    epoch = engine.status()["committed_epoch"]
    jobs = {j["name"]: j for j in engine.status()["jobs"]}
    assert jobs["counted"]["rows"] == 3 and 0 < jobs["counted"]["rows_epoch"] <= epoch
    engine.sql("DELETE FROM counted; FLUSH; RECOVER")
    until(lambda: rows(engine, held) == [("counted", 0), ("counted_by", 0)], "nothing is left of them")
    engine.sql("DROP TABLE counted CASCADE")


def test_a_statement_of_a_file_whose_mark_was_not_awaited_has_run_if_what_it_changed_is_there(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(_states: object) -> None:
        raise TransientError("ENGINE_GONE", "a crash before the mark")

    engine.sql("CREATE TABLE once (id BIGINT); CREATE TABLE away (id BIGINT)")
    file = "INSERT INTO once VALUES (1); INSERT INTO once SELECT 2; DELETE FROM once WHERE id = 2; DROP TABLE away"
    for _ in file.split(";"):  # each run gets one statement further, and loses the engine behind it
        with monkeypatch.context() as patch:
            patch.setattr(engine.core.applied, "settle", gone)
            with pytest.raises(TransientError, match="before the mark"):
                apply_file(engine, file)
        engine.sql("FLUSH")
    apply_file(engine, file)
    assert rows(engine, "SELECT * FROM once") == [(1,)]
    engine.sql("DROP TABLE once")


# -- health, and clients that leave -----------------------------------------------------------------------------------


def health(engine: Engine) -> tuple[int, str]:
    answer = httpx.get(f"{engine.core.endpoint.url}/healthz", trust_env=False, timeout=5)
    return answer.status_code, answer.json().get("reason", "")


def test_health_ends_with_the_epochs_and_says_why_and_comes_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("SPARK_S", 2.0), ("BARRIER_S", 2.0), ("PROBE_S", 0.3)):
        monkeypatch.setattr(f"headwater.runtime.health.{name}", seconds)
    until(lambda: health(engine) == (200, ""), "healthy at first")

    java = engine.core.spark.sparkContext._gateway.proc.pid
    os.kill(java, signal.SIGSTOP)
    try:
        until(lambda: health(engine)[0] == 503, "a stopped JVM")
        assert "Spark's driver process has not answered" in health(engine)[1]
    finally:
        os.kill(java, signal.SIGCONT)
    until(lambda: health(engine) == (200, ""), "healthy again")

    commit, hangs = engine.core.meta.commit_checkpoint, threading.Event()

    def hung(*arguments: Any, **named: Any) -> Any:
        hangs.wait(60)
        return commit(*arguments, **named)

    monkeypatch.setattr(engine.core.meta, "commit_checkpoint", hung)
    until(lambda: health(engine)[0] == 503, "a hung meta store")
    assert "the meta store does not take the commit" in health(engine)[1]
    hangs.set()
    until(lambda: health(engine) == (200, ""), "healthy again")

    def broken(*arguments: Any, **named: Any) -> Any:
        raise TransientError("TEST_LOST", "the meta store is away")

    monkeypatch.setattr(engine.core.meta, "commit_checkpoint", broken)
    until(lambda: "recovers from [TEST_LOST]" in health(engine)[1], "a lane that keeps recovering")
    monkeypatch.setattr(engine.core.meta, "commit_checkpoint", commit)
    until(lambda: health(engine) == (200, ""), "healthy again")


def test_a_write_goes_on_to_its_end_without_its_client_and_what_follows_it_does_not_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.sql("CREATE TABLE w (id BIGINT PRIMARY KEY)")
    insert, begun = engine.core.writes.insert, list[Any]()

    async def slowly(statement: Any, states: Any) -> None:
        begun.append(statement)
        await asyncio.sleep(2)
        await insert(statement, states)

    monkeypatch.setattr(engine.core.writes, "insert", slowly)
    asked = {"statement": "INSERT INTO w SELECT id FROM range(1000); INSERT INTO w VALUES (-1)"}
    token = {"Authorization": f"Bearer {engine.core.endpoint.token}"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{engine.core.endpoint.url}/sql", json=asked, headers=token, timeout=1, trust_env=False)
    until(lambda: rows(engine, "SELECT count(*), min(id) FROM w") == [(1000, 0)], "the write is whole")
    time.sleep(0.5)
    assert len(begun) == 1
    engine.sql("DROP TABLE w")
