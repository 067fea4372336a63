"""Every sink with its real target, for the contract and the integration tests: servers start on first use, once."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headwater.sink.registry import open_sink
from headwater.testing.check_sink import COLUMNS, KEY, SinkUnderTest
from sink_targets import (
    KAFKA_JARS,
    MARIADB,
    POSTGRES_BIN,
    kafka_broker,
    mariadb_server,
    postgres_server,
    read_topic,
)

# Executors inherit it: a task resolves the reference for itself.
os.environ["HEADWATER_TEST_PASSWORD"] = "a password with ' and \\"
Row = tuple[Any, ...]
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Target:
    """A fresh target: the options of a sink into it, and how to read it (columns id, name, amount)."""

    name: str
    options: dict[str, str]
    rows: Callable[[bool], list[Row]]

    def under_test(self, spark: Any, *, append_only: bool) -> SinkUnderTest:
        def reopen(generation: int) -> Any:
            return self.open(generation, append_only=append_only)

        return SinkUnderTest(spark=spark, open=reopen, rows=lambda: self.rows(append_only), append_only=append_only)

    def open(self, generation: int, *, append_only: bool = False, columns: Any = COLUMNS, key: Any = KEY) -> Any:
        options = {**self.options, "type": "append-only" if append_only else "upsert"}
        key = () if append_only else key
        return open_sink(self.name, options, columns, key, generation, os.path.expandvars)


class SinkWorld:
    """The servers, and targets in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._running: dict[str, Any] = {}

    def close(self) -> None:
        self._stack.close()

    def _server(self, name: str, there: bool, start: Callable[[], Any]) -> Any:
        if not there:
            pytest.skip(f"no {name} here")
        if name not in self._running:
            self._running[name] = self._stack.enter_context(start())
        return self._running[name]

    @property
    def postgres_port(self) -> int:
        return int(self._server("Postgres 15", POSTGRES_BIN.exists(), postgres_server))

    @property
    def mariadb_port(self) -> int:
        return int(self._server("MariaDB", MARIADB.exists(), mariadb_server))

    @property
    def bootstrap(self) -> str:
        return str(self._server("Kafka jars", bool(list(KAFKA_JARS.glob("kafka_2.13-*.jar"))), kafka_broker))

    def target(self, kind: str) -> Target:
        """A fresh target of a kind: one of `KINDS`."""
        target: Target = getattr(self, f"_{kind.replace('-', '_')}")(f"target_{next(_numbers)}")
        return target

    def _postgres(self, name: str) -> Target:
        options = {"connector": "postgres", **self.postgres_login(), "table.name": name}
        return Target(name, options, lambda _: self.postgres(f"SELECT id, name, amount FROM {name}"))

    def postgres_login(self) -> dict[str, str]:
        login = {"hostname": "127.0.0.1", "port": str(self.postgres_port), "username": "postgres"}
        return {**login, "database.name": "postgres"}

    def postgres(self, statement: str) -> list[Row]:
        login = f"host=127.0.0.1 port={self.postgres_port} user=postgres dbname=postgres"
        with psycopg.connect(login, autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def _mariadb(self, name: str) -> Target:
        login = {"hostname": "127.0.0.1", "port": str(self.mariadb_port), "username": "headwater"}
        options = {"connector": "mysql", **login, "password": "${HEADWATER_TEST_PASSWORD}"}
        options |= {"database.name": "shop", "table.name": name}
        return Target(name, options, lambda _: self.mariadb(f"SELECT id, name, amount FROM shop.{name}"))

    def mariadb(self, statement: str) -> list[Row]:
        import pymysql

        login = {"host": "127.0.0.1", "port": self.mariadb_port, "user": "headwater", "autocommit": True}
        with (
            pymysql.connect(password=os.environ["HEADWATER_TEST_PASSWORD"], **login) as connection,  # type: ignore[arg-type]
            connection.cursor() as cursor,
        ):
            cursor.execute(statement)
            return list(cursor.fetchall())

    def _kafka(self, name: str) -> Target:
        def rows(append_only: bool) -> list[Row]:
            messages = read_topic(self.bootstrap, name)
            if not append_only:
                messages = list(dict(messages).items())
            values = [json.loads(v) for _, v in messages if v is not None]
            return [(v["id"], v["name"], v["amount"] and Decimal(v["amount"])) for v in values]

        options = {"connector": "kafka", "properties.bootstrap.server": self.bootstrap, "topic": name}
        options |= {"topic.partitions": "3", "staging.path": str(self.folder / name)}
        return Target(name, options, rows)

    def _kafka_parallel(self, name: str) -> Target:
        target = self._kafka(name)
        target.options.update({"producers": "2", "atomic": "false"})
        return target

    def _delta(self, name: str) -> Target:
        from deltalake import DeltaTable

        path = str(self.folder / name)

        def rows(_: bool) -> list[Row]:
            return [tuple(r.values()) for r in DeltaTable(path).to_pyarrow_table().to_pylist()]

        return Target(name, {"connector": "delta", "path": path}, rows)

    def _iceberg(self, name: str) -> Target:
        from pyiceberg.catalog import load_catalog

        folder = self.folder / name
        folder.mkdir()
        catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}

        def rows(_: bool) -> list[Row]:
            table = load_catalog("default", **catalog).load_table(("shop", name))
            return [tuple(r.values()) for r in table.scan().to_arrow().to_pylist()]

        options = {"connector": "iceberg", **{f"catalog.{k}": v for k, v in catalog.items()}}
        return Target(name, {**options, "database.name": "shop", "table.name": name}, rows)

    def _files(self, name: str) -> Target:
        from headwater.connectors.files.sink import read_table

        path = self.folder / name
        return Target(
            name,
            {"connector": "files", "path": str(path)},
            lambda _: [tuple(r.values()) for r in read_table(path).to_pylist()],
        )

    def _python(self, name: str) -> Target:
        import sqlite3

        path = self.folder / f"{name}.db"

        def rows(_: bool) -> list[Row]:
            with sqlite3.connect(path) as db:
                found = [json.loads(row) for (row,) in db.execute("SELECT row FROM target")]
            return [(v["id"], v["name"], v["amount"] and Decimal(v["amount"])) for v in found]

        options = {"connector": "python", "class": "headwater.testing.example_sink:SqliteSink"}
        return Target(name, {**options, "python.path": str(path)}, rows)


KINDS = ("postgres", "mariadb", "kafka", "kafka-parallel", "delta", "iceberg", "files", "python")
