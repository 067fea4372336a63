"""Random views on an engine that is killed at random moments, while they are created and while they are live.

At every committed epoch in hw_epochs a view VERSION AS OF it equals its query over its inputs VERSION AS OF it.
Queries, changes and moments come from a seed, which a failing test prints; HEADWATER_KILL_SEED plays it again.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import time
from collections import Counter
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_process import EngineProcess, SqlError, wait_until
from view_grammar import MAKE, Grammar

pytestmark = pytest.mark.spark
TABLES = {
    "t": "id INT PRIMARY KEY, k INT, v BIGINT, p DECIMAL(8,2)",
    "u": "k INT, s STRING, f DOUBLE",
    "w": "k INT, s STRING, v BIGINT, d DECIMAL(10,4), ts TIMESTAMP, PRIMARY KEY (k, s)",
}
PATIENCE_S = 600.0
# Five levels: a join of an aggregate with the rows that it is made of, an aggregate of that, a window, a join with all.
DEEP = {
    "rows_1": "select id, k, v, p from t where v is not null",
    "sums_1": "select k, count(*) as n, sum(v) as v, max(p) as p from t group by k",
    "both_2": "select a.id, a.k, a.v, b.v as of_all, b.n from rows_1 a join sums_1 b on a.k = b.k",
    "kinds_3": "select w.s, count(distinct b.id) as n, sum(b.v * b.n) as v from both_2 b left join w on b.k = w.k "
    "group by w.s",
    "ranks_4": "select s, n, rank() over (partition by n > 2 order by v, s) as r from kinds_3",
    "all_5": "select r.s, r.r, u.f, x.n from ranks_4 r full join u on r.s = u.s left join sums_1 x on x.k = u.k",
    "ends_5": "select s, r from ranks_4 where r = 1 union select s, cast(count(*) as int) from u group by s",
}


class World:
    """Tables, views with their queries, and an engine that comes and goes."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.engine = EngineProcess(folder, "--set", "barrier_interval_ms=300")
        self.queries: dict[str, str] = {}

    def sql(self, statement: str) -> list[dict[str, Any]]:
        return self.engine.sql(statement)

    def changes(self, rounds: int) -> None:
        """Some statements; the last of them may be cut off by a kill."""
        for _ in range(rounds):
            name = self.random.choice(sorted(TABLES))
            if name != "u" and self.random.random() < 0.35:
                self.sql(
                    f"DELETE FROM {name} WHERE k = {self.random.randint(1, 4)} AND v = {self.random.randint(1, 5)}"
                )
            elif self.random.random() < 0.2:
                self.sql(f"UPDATE t SET v = v + 1, k = {self.random.randint(1, 4)} WHERE id % 3 = 0")
            else:
                self.insert(name, self.random.randint(1, 4))
            if self.random.random() < 0.5:
                self.sql("FLUSH")

    def insert(self, name: str, count: int) -> None:
        rows = [MAKE[name](self.random) for _ in range(count)]
        values = ", ".join(
            "(" + ", ".join(literal(v) for c, v in row.items() if not c.startswith("_")) + ")" for row in rows
        )
        self.sql(f"INSERT INTO {name} VALUES {values}")

    def create(self, count: int) -> None:
        for _ in range(count):
            name, query = f"v{len(self.queries)}", Grammar(self.random).query()
            self.queries[name] = query
            self.sql(f"CREATE MATERIALIZED VIEW {name} AS {query}")

    def killed_during(self, work: Any, *arguments: Any) -> None:
        """Run something, kill the engine at a random moment of it, start it again."""
        thread = threading.Thread(target=quietly, args=(work, *arguments))
        thread.start()
        time.sleep(self.random.uniform(0.2, 6))
        self.engine.kill()
        thread.join(timeout=60)
        self.engine.start()

    def check(self, epochs: int) -> int:
        """Compare the views at the newest epochs, and at some older ones; how many comparisons."""
        listed = sorted(r["epoch"] for r in self.sql("SELECT DISTINCT epoch FROM hw_catalog.hw_epochs"))
        older = self.random.sample(listed[:-1], min(len(listed) - 1, epochs - 1))
        done = 0
        for epoch in [*older, listed[-1]]:
            for name, query in self.queries.items():
                try:
                    stored = self.sql(f"SELECT * FROM {name} VERSION AS OF {epoch}")
                except SqlError as error:
                    if error.code in ("EPOCH_NOT_AVAILABLE", "UNKNOWN_TABLE", "VIEW_CREATING"):
                        continue  # the view was not live yet
                    raise
                names = "|".join([*TABLES, *self.queries])
                fresh = self.sql(re.sub(rf"\b(from|join) ({names})\b", rf"\1 \2 version as of {epoch}", query))
                assert bag(stored) == bag(fresh), f"{name} at epoch {epoch}: {query}"
                done += 1
        return done


def quietly(work: Any, *arguments: Any) -> None:
    with contextlib.suppress(httpx.HTTPError, SqlError):  # the engine is gone: that is the point
        work(*arguments)


def literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return f"'{value}'"
    if isinstance(value, datetime):
        return f"TIMESTAMP '{value:%Y-%m-%d %H:%M:%S} UTC'"
    if isinstance(value, Decimal):
        return f"CAST('{value}' AS DECIMAL(10,4))"
    return "double('NaN')" if value != value else str(value) + ("D" if isinstance(value, float) else "")


def bag(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(repr(list(row.values())) for row in rows)


def run(folder: Path, *, views: int, kills: int, epochs: int) -> None:
    seed = int(os.environ.get("HEADWATER_KILL_SEED") or random.SystemRandom().randrange(10**6))
    print(f"HEADWATER_KILL_SEED={seed}")
    world = World(folder / "data", seed)
    try:
        world.engine.start()
        for name, columns in TABLES.items():
            world.sql(f"CREATE TABLE {name} ({columns})")
            world.insert(name, 12)
        world.sql("FLUSH")
        world.killed_during(world.create, views)
        known = {r["name"] for r in world.sql("SELECT name FROM hw_catalog.hw_jobs")}
        world.queries = {name: query for name, query in world.queries.items() if name in known}
        world.create(views - len(world.queries))
        for _ in range(kills):
            world.killed_during(world.changes, 8)
        wait_until(lambda: states(world) == {"live"}, PATIENCE_S, "every view live")
        world.changes(3)
        world.sql("FLUSH")
        assert world.check(epochs) >= len(world.queries)
    finally:
        world.engine.stop()


def run_deep(folder: Path, *, kills: int, epochs: int) -> None:
    seed = int(os.environ.get("HEADWATER_KILL_SEED") or random.SystemRandom().randrange(10**6))
    print(f"HEADWATER_KILL_SEED={seed}")
    world = World(folder / "data", seed)
    try:
        world.engine.start()
        for name, columns in TABLES.items():
            world.sql(f"CREATE TABLE {name} ({columns})")
            world.insert(name, 12)
        for name, query in DEEP.items():
            world.queries[name] = query
            world.sql(f"CREATE MATERIALIZED VIEW {name} AS {query}")
        wait_until(lambda: states(world) == {"live"}, PATIENCE_S, "every view live")
        for _ in range(kills):
            world.changes(4)
            world.killed_during(world.changes, 8)
        world.changes(3)
        world.sql("FLUSH")
        assert states(world) == {"live"}
        assert world.check(epochs) >= len(DEEP)
    finally:
        world.engine.stop()


def states(world: World) -> set[str]:
    return {r["state"] for r in world.sql("SELECT state FROM hw_catalog.hw_jobs")}


@pytest.mark.slow
def test_views_equal_their_queries_at_every_epoch_across_a_kill(tmp_path: Path) -> None:
    run(tmp_path, views=2, kills=1, epochs=2)


@pytest.mark.slow
def test_many_random_views_equal_their_queries_at_every_epoch_across_kills(tmp_path: Path) -> None:
    run(tmp_path, views=6, kills=4, epochs=8)


@pytest.mark.slow
def test_views_on_views_five_levels_deep_equal_their_queries_at_every_epoch_across_kills(tmp_path: Path) -> None:
    run_deep(tmp_path, kills=3, epochs=12)
