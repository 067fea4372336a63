"""Tables that are plain Python dictionaries, with epochs of changes, for the tests of view refresh.

`Live` holds a view's stored rows as a dictionary by `_key`, applies what `refresh` returns, and compares with a
fresh query.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import sqlglot

from headwater.model.schema import Schema
from headwater.model.types import arrow_type

Row = dict[str, Any]


@contextmanager
def interpreted(spark: Any) -> Iterator[Any]:
    """Without code generation: for a few rows, compiling a plan takes longer than running it."""
    settings = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield spark
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)


def frame(spark: Any, columns: list[tuple[str, str]], rows: list[Row]) -> Any:
    """A DataFrame of a list of dictionaries."""
    fields = [pa.field(name, arrow_type(ddl)) for name, ddl in columns]
    arrays = [pa.array([row.get(f.name) for row in rows], type=f.type) for f in fields]
    table = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
    return spark.createDataFrame(table, ", ".join(f"`{name}` {ddl}" for name, ddl in columns))


class MemoryTable:
    """A table in memory; implements `ViewInput` for the changes since `begin`."""

    def __init__(self, spark: Any, schema: Schema, rows: list[Row]) -> None:
        self.spark = spark
        self.schema = schema
        self.rows = {self.key(row): row for row in rows}
        self.begin()

    def key(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[k] for k in self.schema.key)

    def begin(self) -> None:
        self._before = {key: dict(row) for key, row in self.rows.items()}

    def put(self, row: Row) -> None:
        self.rows[self.key(row)] = row

    def remove(self, key: tuple[Any, ...]) -> None:
        self.rows.pop(key, None)

    def _frame(self, rows: list[Row], *, op: bool = False) -> Any:
        columns = [(c.name, c.type) for c in self.schema.columns] + ([("_op", "TINYINT")] if op else [])
        return frame(self.spark, columns, rows)

    def _touched(self) -> list[tuple[Any, ...]]:
        keys = dict.fromkeys([*self._before, *self.rows])
        return [k for k in keys if repr(self._before.get(k)) != repr(self.rows.get(k))]

    @property
    def changed(self) -> bool:
        return bool(self._touched())

    def before(self) -> Any:
        return self._frame(list(self._before.values()))

    def after(self) -> Any:
        return self._frame(list(self.rows.values()))

    def net(self) -> list[Row]:
        """One row per touched key, with `_op`; a delete has only its key filled."""
        rows = []
        for key in self._touched():
            if key in self.rows:
                rows.append({**self.rows[key], "_op": 1})
            else:
                rows.append({**dict(zip(self.schema.key, key, strict=True)), "_op": 2})
        return rows

    def changes(self) -> Any:
        return self._frame(self.net(), op=True)

    def changes_with_old(self) -> Any:
        rows = []
        for key in self._touched():
            if key in self._before:
                rows.append({**self._before[key], "_op": 2})
            if key in self.rows:
                rows.append({**self.rows[key], "_op": 1})
        return self._frame(rows, op=True)


def random_changes(
    rng: random.Random,
    tables: Mapping[str, MemoryTable],
    make: Mapping[str, Callable[[random.Random], Row]],
    *,
    most: int = 4,
) -> None:
    """An epoch of inserts, updates, deletes and key changes on some of the tables, at most that many on each."""
    for table in tables.values():
        table.begin()
    names = sorted(tables)
    for name in rng.sample(names, rng.randint(1, len(names))):
        table = tables[name]
        for _ in range(rng.randint(1, most)):
            keys = list(table.rows)
            action = rng.random()
            if keys and action < 0.35:
                table.remove(rng.choice(keys))
            elif keys and action < 0.75:
                row = dict(table.rows[rng.choice(keys)])
                fresh = make[name](rng)
                changed = [c for c in fresh if c not in table.schema.key]
                for column in rng.sample(changed, min(len(changed), rng.randint(1, 2))):
                    row[column] = fresh[column]
                table.put(row)
            else:
                table.put(make[name](rng))


class Live:
    """A view under test."""

    def __init__(self, spark: Any, sql: str, tables: Mapping[str, MemoryTable]) -> None:
        from headwater.spark import view
        from headwater.view.analyse import analyse

        self.spark, self.sql, self.tables = spark, sql, tables
        self.plan = analyse(sql, {name: table.schema for name, table in tables.items()})
        self.schema = view.storage_schema(spark, self.plan, {n: t.schema for n, t in tables.items()})
        self.rows: dict[str, Row] = {}
        self.refreshes = 0
        for row in view.initial(spark, self.plan, self._inputs()).collect():
            assert row["_key"] not in self.rows, "two rows of one _key"
            self.rows[row["_key"]] = row.asDict()

    def _inputs(self) -> dict[str, MemoryTable]:
        return {name: self.tables[name] for name in self.plan.inputs}

    def refresh(self, *, broadcast: bool = True) -> int:
        """Apply one refresh, each second one in one task; the number of rows that it gave."""
        from headwater.spark import view

        one_task = broadcast and self.refreshes % 2 == 0
        self.refreshes += 1

        current = frame(self.spark, [(c.name, c.type) for c in self.schema.columns], list(self.rows.values()))
        changes = view.refresh(self.spark, self.plan, self._inputs(), current, broadcast=broadcast, one_task=one_task)
        found = changes.collect()
        assert len({row["_key"] for row in found}) == len(found), "two changes of one _key"
        rowwise = self.plan.strategy == "rowwise"
        for row in found:
            if row["_op"] == 2:
                assert rowwise or row["_key"] in self.rows, "delete of a row that is not there"
                self.rows.pop(row["_key"], None)
            else:
                data = {k: v for k, v in row.asDict().items() if k != "_op"}
                assert rowwise or repr(self.rows.get(row["_key"])) != repr(data), "unchanged row"
                self.rows[row["_key"]] = data
        return len(found)

    def fresh(self) -> Counter[str]:
        """The query as a user would run it, over the visible columns."""
        bound = {n: t.after().select(*(c.name for c in t.schema.visible)) for n, t in self.tables.items()}
        for name, df in bound.items():
            df.createOrReplaceTempView(name)
        # Spark before 4.2 has no QUALIFY: sqlglot writes it as a subquery.
        text = sqlglot.transpile(self.sql, read="spark", write="spark")[0] if "qualify" in self.sql else self.sql
        return Counter(repr(tuple(row)) for row in self.spark.sql(text).collect())

    def stored(self) -> Counter[str]:
        return Counter(repr(tuple(row[name] for name in self.plan.columns)) for row in self.rows.values())

    def check(self) -> None:
        stored, fresh = self.stored(), self.fresh()
        assert stored == fresh, (
            f"{self.plan.strategy}: {self.sql}\n too many {stored - fresh}\n missing {fresh - stored}"
        )
