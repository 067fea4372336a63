"""A view that is being created over a table under writes, slowly enough to meet each of its phases; black-box."""

from __future__ import annotations

import bisect
import contextlib
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx

from engine_process import EngineProcess, SqlError, wait_until

ROWS: Final = 480  # in four vnodes: at some tens of rows per second each phase lasts some seconds
PATIENCE_S: Final = 300.0
PAUSE_S: Final = 0.2  # between two statements of the writer: on a loaded machine a view must still catch up
QUERIES: Final = {
    "rowwise": "SELECT id, g, v * 2 AS d FROM many WHERE v % 5 <> 0",
    "algebraic": "SELECT g, count(*) AS n, sum(v) AS s, max(v) AS m FROM many GROUP BY g",
}
QUERIES["affected"] = (
    "SELECT m.g, x.name, count(DISTINCT m.v) AS n FROM many m LEFT JOIN names x ON m.g = x.g GROUP BY m.g, x.name"
)


class CreationWorld:
    """Two tables, writers, and an engine that comes and goes."""

    def __init__(self, folder: Path, seed: int, *settings: str) -> None:
        self.random = random.Random(seed)
        given = ["barrier_interval_ms=200", "vnode_count=4", *settings]
        options = [part for text in given for part in ("--set", text)]
        self.engine = EngineProcess(folder / "data", "--allow-python", *options)
        self.engine.start()
        self.sql("CREATE TABLE many (id BIGINT PRIMARY KEY, g INT, v BIGINT)")
        self.sql("CREATE TABLE names (g INT PRIMARY KEY, name STRING)")
        self.sql(f"INSERT INTO many SELECT id, CAST(id % 7 AS INT), id * 3 FROM range({ROWS})")
        self.sql("INSERT INTO names VALUES (0, 'a'), (1, 'b'), (2, 'a'), (8, 'z'); FLUSH")

    def sql(self, statement: str) -> list[dict[str, Any]]:
        return self.engine.sql(statement)

    # -- writers ----------------------------------------------------------------------------------------------------

    def change(self) -> None:
        """One statement: an insert, an update (of the group too), a delete, a change of key."""
        pick, some = self.random.random(), self.random.randrange(ROWS)
        if pick < 0.4:
            first = 10_000 + self.random.randrange(10**6) * 10
            rows = ", ".join(f"({first + i}, {self.random.randrange(9)}, {some + i})" for i in range(10))
            self.sql(f"INSERT INTO many VALUES {rows}")
        elif pick < 0.7:
            self.sql(f"UPDATE many SET v = v + 1, g = {self.random.randrange(9)} WHERE id % 31 = {some % 31}")
        elif pick < 0.8:
            self.sql(f"UPDATE names SET name = '{self.random.choice('abc')}' WHERE g = {self.random.randrange(3)}")
        elif pick < 0.9:
            self.sql(f"DELETE FROM many WHERE id % 89 = {some % 89}")
        else:
            self.sql(f"DELETE FROM many WHERE id = {some}; INSERT INTO many VALUES ({some + 50_000_000}, 3, {some})")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Statements one after the other, until the block ends or the engine is gone."""
        over = threading.Event()

        def write() -> None:
            with contextlib.suppress(httpx.HTTPError, SqlError):
                while not over.wait(PAUSE_S):
                    self.change()

        thread = threading.Thread(target=write)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(timeout=60)

    # -- creation ---------------------------------------------------------------------------------------------------

    def create(self, name: str, query: str, rate: int | None) -> None:
        option = f" WITH (backfill.rate_limit = {rate})" if rate is not None else ""
        statement = f"CREATE MATERIALIZED VIEW {name}{option} AS {query}"

        def submit() -> None:
            with contextlib.suppress(httpx.HTTPError, SqlError):
                self.sql(statement)

        threading.Thread(target=submit, daemon=True).start()
        wait_until(lambda: self.state(name) is not None, PATIENCE_S, f"{name} is registered")

    def state(self, name: str) -> str | None:
        found = self.sql(f"SELECT state FROM hw_catalog.hw_jobs WHERE name = '{name}'")
        return str(found[0]["state"]) if found else None

    def progress(self, name: str) -> dict[str, Any]:
        found = self.sql(f"SELECT * FROM hw_catalog.hw_progress WHERE name = '{name}'")
        return found[0] if found else {"phase": "", "rows": 0, "waiting_for": ""}

    def until_phase(self, name: str, phase: str) -> dict[str, Any]:
        """Wait for a phase, a pattern; AssertionError if the view is live before."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            found = self.progress(name)
            if re.search(phase, str(found["phase"])):
                return found
            assert self.state(name) == "creating", f"{name} is past {phase}: {found}"
            time.sleep(0.02)
        raise AssertionError(f"{name} did not reach {phase}: {self.progress(name)}")

    def until_live(self, name: str) -> None:
        self.sql(f"ALTER MATERIALIZED VIEW {name} SET BACKFILL_RATE_LIMIT = 1000000")
        wait_until(lambda: self.state(name) == "live", PATIENCE_S, f"{name} live: {self.progress(name)}")

    # -- what must be ------------------------------------------------------------------------------------------------

    def check(self, name: str, query: str, epochs: int = 4) -> int:
        """At committed epochs since it is live the view equals its query at that epoch; how many were compared."""
        self.sql("FLUSH")
        listed = sorted(r["epoch"] for r in self.sql("SELECT DISTINCT epoch FROM hw_catalog.hw_epochs"))
        first = bisect.bisect_left(listed, True, key=lambda epoch: self.readable(name, epoch))
        live = listed[first:]
        chosen = sorted({live[0], live[-1], *self.random.sample(live, min(epochs, len(live)))})
        for epoch in chosen:
            fresh = re.sub(r"\b(FROM|JOIN) (\w+)", rf"\1 \2 VERSION AS OF {epoch}", query)
            stored = self.sql(f"SELECT * FROM {name} VERSION AS OF {epoch}")
            assert bag(stored) == bag(self.sql(fresh)), f"{name} at epoch {epoch}"
        return len(chosen)

    def readable(self, name: str, epoch: int) -> bool:
        try:
            self.sql(f"SELECT 1 FROM {name} VERSION AS OF {epoch} LIMIT 0")
        except SqlError as error:
            if error.code not in ("EPOCH_NOT_AVAILABLE", "VIEW_CREATING"):
                raise
            return False
        return True


def bag(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(repr(list(row.values())) for row in rows)
