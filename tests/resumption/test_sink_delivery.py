"""Sinks of a whole engine under `kill -9` at each step of delivery: each change is in the target once (I5).

The target of the first sink is a Postgres table, of the second a Kafka topic, append-only: there a change that is
delivered twice stays visible for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_process import EngineProcess
from sink_targets import read_topic
from sink_world import SinkWorld

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.kafka]
PATIENCE_S = 240.0
STEPS = ("before prepare", "after prepare", "before write", "after write", "before commit", "after commit")


def eventually(check: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < end, what
        time.sleep(0.3)


@pytest.fixture(scope="module")
def kill_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kill") / "step"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, sink_world: SinkWorld, kill_file: Path) -> Iterator[EngineProcess]:
    # Beside what is there: the engine must run the same tree as the test.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    killing = f"connector='python', class='killing_sink:KillingSink', python.kill_file='{kill_file}'"
    login = ", ".join(f"python.{k}='{v}'" for k, v in sink_world.postgres_login().items())
    broker = (
        f"python.connector='kafka', python.properties.bootstrap.server='{sink_world.bootstrap}', python.topic='log'"
    )
    with EngineProcess(tmp_path_factory.mktemp("delivery") / "data", "--allow-python") as running:
        running.sql("CREATE TABLE t (id BIGINT PRIMARY KEY, country STRING, amount BIGINT)")
        running.sql("INSERT INTO t SELECT id, concat('c', id % 3), id FROM range(300)")
        running.sql("CREATE TABLE e (id BIGINT PRIMARY KEY, n INT); INSERT INTO e SELECT id, 0 FROM range(100)")
        running.sql(
            "CREATE SINK totals AS SELECT country, sum(amount) AS total, count(*) AS n FROM t GROUP BY country "
            f"WITH ({killing}, python.connector='postgres', {login}, python.table.name='totals', primary_key='country')"
        )
        running.sql(
            f"CREATE SINK events FROM e WITH ({killing}, {broker}, python.topic.partitions='2', "
            f"python.staging.path='{kill_file.parent}/staging', type='append-only')"
        )
        sink_world.postgres("CREATE TABLE picky (id bigint PRIMARY KEY, n int CHECK (n < 100))")
        picky = killing.replace(str(kill_file), f"{kill_file}-picky")
        running.sql(
            f"CREATE SINK picky FROM e WITH ({picky}, python.connector='postgres', {login}, python.table.name='picky', "
            f"python.dead_letters='true', python.dead_letters.path='file://{kill_file.parent}/letters')"
        )
        yield running


def target_totals(world: SinkWorld) -> list[Any]:
    return sorted((str(c), int(t), int(n)) for c, t, n in world.postgres("SELECT country, total, n FROM totals"))


def wanted_totals(engine: EngineProcess) -> list[Any]:
    found = engine.sql("SELECT country, sum(amount) AS total, count(*) AS n FROM t GROUP BY country")
    return sorted((r["country"], int(r["total"]), int(r["n"])) for r in found)


def messages(world: SinkWorld) -> Counter[int]:
    return Counter(json.loads(v or b"")["id"] for _, v in read_topic(world.bootstrap, "log"))


def settled(engine: EngineProcess, world: SinkWorld) -> None:
    """Both targets hold exactly what the engine holds, and stay so."""
    ids = Counter({r["id"]: 1 for r in engine.sql("SELECT id FROM e")})
    wanted = wanted_totals(engine)
    eventually(lambda: target_totals(world) == wanted, "the Postgres target never held the view")
    eventually(lambda: messages(world).keys() >= ids.keys(), "the topic never held the table")
    assert messages(world) == ids, "a change is in the topic more than once"


def quiet(engine: EngineProcess) -> None:
    def owed() -> int:
        return sum(int(r["backlog_epochs"]) for r in engine.sql("SELECT * FROM hw_catalog.hw_log_stores"))

    eventually(lambda: owed() == 0, "the sinks do not catch up")


def delivered_rows(engine: EngineProcess) -> dict[str, int]:
    found = engine.sql("SELECT name, rows FROM hw_catalog.hw_progress")
    return {r["name"]: int(r["rows"]) for r in found}


def test_targets_hold_the_snapshot(engine: EngineProcess, sink_world: SinkWorld) -> None:
    settled(engine, sink_world)


# The view's sink is written to by Spark; 50 rows of the table are delivered from memory, 12,000 by Spark.
@pytest.mark.parametrize(
    ("table", "rows", "step"),
    [
        pytest.param(t, n, s, marks=[] if (t, n, s) == ("t", 50, "after commit") else [pytest.mark.slow])
        for t, n in (("t", 50), ("e", 50), ("e", 12_000))
        for s in STEPS
    ],
)
def test_each_change_is_there_once_after_a_kill(
    engine: EngineProcess, sink_world: SinkWorld, kill_file: Path, table: str, rows: int, step: str
) -> None:
    first = 20_000 * (2 + STEPS.index(step)) + (500_000 if table == "e" else 0) + (1_000_000 if rows > 50 else 0)
    row = "id, 'new', 1" if table == "t" else "id, 1"
    quiet(engine)  # so the delivery that is killed is the one of the change below
    engine.sql("FLUSH")
    counted = delivered_rows(engine)
    kill_file.write_text(step)
    with contextlib.suppress(Exception):  # the engine may die before it has answered
        engine.sql(f"INSERT INTO {table} SELECT {row} FROM range({first}, {first + rows}); FLUSH")
    assert engine.process is not None
    eventually(lambda: engine.process is not None and engine.process.poll() is not None, "the engine was not killed")
    assert not kill_file.exists()
    engine.start()
    now = delivered_rows(engine)
    assert all(now[name] >= rows for name, rows in counted.items()), "I7: a counter fell over a restart"
    found = engine.sql(f"SELECT count(*) AS n FROM {table} WHERE id >= {first} AND id < {first + rows}")
    assert found == [{"n": rows}], "what was being delivered was not committed"
    settled(engine, sink_world)
    counts = engine.sql("SELECT count(*) AS n FROM e")
    eventually(lambda: delivered_rows(engine)["events"] == counts[0]["n"], "I7: the sink's rows are not counted")
    # An ordinary change goes through afterwards.
    engine.sql(f"INSERT INTO {table} SELECT {row} FROM range({first + rows}, {first + rows + 10}); FLUSH")
    settled(engine, sink_world)


def test_rows_that_were_refused_are_listed_after_a_kill_at_the_commit(
    engine: EngineProcess, sink_world: SinkWorld, kill_file: Path
) -> None:
    quiet(engine)
    kill_file.with_name(f"{kill_file.name}-picky").write_text("after commit")
    with contextlib.suppress(Exception):
        engine.sql("INSERT INTO e VALUES (900001, 1), (900002, 500); FLUSH")
    eventually(lambda: engine.process is not None and engine.process.poll() is not None, "the engine was not killed")
    engine.start()
    eventually(lambda: engine.sql("SHOW DEAD LETTERS") != [], "the refused row is nowhere")
    assert [(r["sink"], r["rows"]) for r in engine.sql("SHOW DEAD LETTERS")] == [("picky", 1)]
    assert sink_world.postgres("SELECT id FROM picky WHERE id > 900000") == [(900001,)]
    count = engine.sql("SELECT count(*) AS n FROM e")[0]["n"]
    eventually(lambda: delivered_rows(engine)["picky"] == count - 1, "I7: the sink's rows are not counted")
