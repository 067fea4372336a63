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
    rows_as: Callable[[Any], list[Row]]  # of an upsert target, for the columns that are given
    not_in_names: str = ""
    holds_nul: bool = True

    def under_test(self, spark: Any, *, append_only: bool = False) -> SinkUnderTest:
        def reopen(generation: int) -> Any:
            return self.open(generation, append_only=append_only)

        def open_as(generation: int, columns: Any, key: Any) -> Any:
            return self.open(generation, columns=columns, key=key)

        return SinkUnderTest(
            spark=spark,
            open=reopen,
            rows=lambda: self.rows(append_only),
            append_only=append_only,
            open_as=open_as,
            rows_as=self.rows_as,
            not_in_names=self.not_in_names,
            holds_nul=self.holds_nul,
        )

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

    def target(self, kind: str, name: str = "") -> Target:
        """A fresh target of a kind: one of `KINDS`; of a name, if one is given."""
        target: Target = getattr(self, f"_{kind.replace('-', '_')}")(name or f"target_{next(_numbers)}")
        return target

    def _postgres(self, name: str) -> Target:
        options = {"connector": "postgres", **self.postgres_login(), "table.name": name}
        options |= {} if name.startswith("target_") else {"schema.name": name}

        def rows_as(columns: Any) -> list[Row]:
            place = ".".join(_quoted(p) for p in (options.get("schema.name", "public"), name))
            return self.postgres(f"SELECT {', '.join(_quoted(c.name) for c in columns)} FROM {place}")

        return Target(name, options, lambda _: rows_as(COLUMNS), rows_as, holds_nul=False)

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
        database = "shop" if name.startswith("target_") else name
        self.mariadb(f"CREATE DATABASE IF NOT EXISTS {_quoted(database, '`')}")
        options |= {"database.name": database, "table.name": name}

        def rows_as(columns: Any) -> list[Row]:
            place = f"{_quoted(database, '`')}.{_quoted(name, '`')}"
            return self.mariadb(f"SELECT {', '.join(_quoted(c.name, '`') for c in columns)} FROM {place}")

        return Target(name, options, lambda _: rows_as(COLUMNS), rows_as)

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

        def rows_as(columns: Any) -> list[Row]:
            values = [json.loads(v) for v in dict(read_topic(self.bootstrap, name)).values() if v is not None]
            return [tuple(v[c.name] for c in columns) for v in values]

        options = {"connector": "kafka", "properties.bootstrap.server": self.bootstrap, "topic": name}
        options |= {"topic.partitions": "3", "staging.path": str(self.folder / name)}
        return Target(name, options, rows, rows_as)

    def _kafka_parallel(self, name: str) -> Target:
        target = self._kafka(name)
        target.options.update({"producers": "2", "atomic": "false"})
        return target

    def _delta(self, name: str) -> Target:
        from deltalake import DeltaTable

        path = str(self.folder / name)

        def rows(_: bool) -> list[Row]:
            return [tuple(r.values()) for r in DeltaTable(path).to_pyarrow_table().to_pylist()]

        def rows_as(columns: Any) -> list[Row]:
            return _tuples(DeltaTable(path).to_pyarrow_table(), columns)

        return Target(name, {"connector": "delta", "path": path}, rows, rows_as, not_in_names=" ,;{}()\n\t=")

    def _iceberg(self, name: str) -> Target:
        from pyiceberg.catalog import load_catalog

        database = "shop" if name.startswith("target_") else name
        folder = self.folder / f"iceberg_{next(_numbers)}"
        folder.mkdir()
        catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}

        def rows(_: bool) -> list[Row]:
            return rows_as(COLUMNS)

        def rows_as(columns: Any) -> list[Row]:
            table = load_catalog("default", **catalog).load_table((database, name))
            return _tuples(table.scan().to_arrow(), columns)

        options = {"connector": "iceberg", **{f"catalog.{k}": v for k, v in catalog.items()}}
        return Target(name, {**options, "database.name": database, "table.name": name}, rows, rows_as)

    def _files(self, name: str) -> Target:
        from headwater.connectors.files.sink import read_table

        path = self.folder / name
        return Target(
            name,
            {"connector": "files", "path": str(path)},
            lambda _: [tuple(r.values()) for r in read_table(path).to_pylist()],
            lambda columns: _tuples(read_table(path), columns),
        )

    def _python(self, name: str) -> Target:
        import sqlite3

        path = self.folder / f"{name}.db"

        def rows(_: bool) -> list[Row]:
            with sqlite3.connect(path) as db:
                found = [json.loads(row) for (row,) in db.execute("SELECT row FROM target")]
            return [(v["id"], v["name"], v["amount"] and Decimal(v["amount"])) for v in found]

        def rows_as(columns: Any) -> list[Row]:
            with sqlite3.connect(path) as db:
                found = [json.loads(row) for (row,) in db.execute("SELECT row FROM target")]
            return [tuple(v[c.name] for c in columns) for v in found]

        options = {"connector": "python", "class": "headwater.testing.example_sink:SqliteSink"}
        return Target(name, {**options, "python.path": str(path)}, rows, rows_as)


def _quoted(name: str, quote: str = '"') -> str:
    return quote + name.replace(quote, 2 * quote) + quote


def _tuples(table: Any, columns: Any) -> list[Row]:
    return list(zip(*[table.column(table.schema.get_field_index(c.name)).to_pylist() for c in columns], strict=True))


KINDS = ("postgres", "mariadb", "kafka", "kafka-parallel", "delta", "iceberg", "files", "python")
