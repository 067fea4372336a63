"""One real Postgres and one engine that captures from it, for tests that need both."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest

import headwater
from headwater.testing.servers import PostgresServer
from postgres_versions import USUAL

SOURCE = (
    "CREATE SOURCE shop WITH (connector='postgres-cdc', hostname='{server.host}', port='{server.port}', "
    "username='{server.user}', password='${{HW_TEST_PASSWORD}}', database.name='{server.database}', "
    "slot.name='headwater', heartbeat.interval.ms='1000'{options})"
)


class World:
    """One source and one engine for all cases; each case has tables of its own."""

    def __init__(self, server: PostgresServer, engine: headwater.Engine) -> None:
        self.server, self.engine = server, engine
        self.data = engine.core.local_dir
        self.db = server.connect()

    def sql(self, text: str) -> None:
        self.db.execute(text.encode())

    def capture(self, table: str, name: str, options: str = "") -> None:
        self.engine.execute(
            f"CREATE TABLE {name} (*) FROM shop TABLE '{table}'" + (f" WITH ({options})" * bool(options))
        )

    def state(self, name: str) -> str:
        return next(str(j["state"]) for j in self.engine.status()["jobs"] if j["name"] == name)

    def splits(self, name: str) -> list[dict[str, Any]]:
        rows = self.engine.execute("SELECT * FROM hw_catalog.hw_splits")[0]
        assert rows is not None
        return [r for r in rows.rows if r["table_name"] == name]

    def until(self, condition: Callable[[], bool], seconds: float = 300) -> None:
        self.until_engine(self.engine, condition, seconds)

    @staticmethod
    def until_engine(engine: headwater.Engine, condition: Callable[[], bool], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert engine.fatal is None
            assert time.monotonic() < deadline, engine.status()["errors"][-3:]
            time.sleep(0.2)

    def live(self, *names: str) -> None:
        self.until(lambda: all(self.state(n) == "live" for n in names))

    def end(self) -> int:
        """Where the source's log ends now."""
        row = self.db.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        assert row is not None
        return lsn(row[0])

    def settle(self) -> None:
        """The tables hold what the source has by now."""
        end = self.end()
        self.until(lambda: lsn(self.engine.status()["sources"][0]["position"]) >= end)

    def rows(self, name: str) -> list[tuple[Any, ...]]:
        found = self.engine.table(name).df().toArrow()
        return sorted(zip(*(c.to_pylist() for c in found.columns), strict=True), key=repr)

    def source_rows(self, table: str) -> list[tuple[Any, ...]]:
        return sorted(self.db.execute(f"SELECT * FROM {table}".encode()).fetchall(), key=repr)

    def segments(self, name: str) -> dict[str, dict[str, Any]]:
        """The files that the table consists of, by path."""
        rows = self.engine.execute("SELECT * FROM hw_catalog.hw_segments")[0]
        assert rows is not None
        return {r["path"]: r for r in rows.rows if r["table_name"] == name and r["removed_epoch"] is None}

    def halve(self, name: str) -> None:
        """The largest file of the table loses every second row."""
        base = max((r for r in self.segments(name).values() if r["kind"] == "base"), key=lambda r: r["rows"])
        rows = pq.read_table(self.data / base["path"], partitioning=None)
        pq.write_table(rows.take(list(range(0, rows.num_rows, 2))), self.data / base["path"])

    def assert_equal(self, table: str, name: str) -> None:
        self.settle()
        assert self.rows(name) == self.source_rows(table)


def lsn(text: str) -> int:
    high, low = text.split("/")
    return int(high, 16) << 32 | int(low, 16)


@contextmanager
def open_world(
    data: Path,
    version: str = USUAL,
    *,
    options: str = "",
    prepare: Callable[[PostgresServer], None] | None = None,
) -> Iterator[World]:
    """Skips the test where there is no such Postgres.

    `options` are more options of the source; `prepare` may change the server before the engine sees it.
    """
    if not PostgresServer.available(version):
        pytest.skip(f"no binaries of Postgres {version} on this machine")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(PostgresServer(version))
        if prepare is not None:
            prepare(server)
        yield stack.enter_context(_engine_on(server, data, options))


@contextmanager
def _engine_on(server: PostgresServer, data: Path, options: str) -> Iterator[World]:
    """With three slots: two readers beside the stream, so that reads are at once."""
    with (
        mock.patch.dict(os.environ, {"HW_TEST_PASSWORD": server.password}),
        headwater.Engine(data, master="local[3]", settings={"barrier_interval_ms": "300"}) as engine,
    ):
        engine.execute(SOURCE.format(server=server, options=options))
        yield World(server, engine)
