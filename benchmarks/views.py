"""Views: how fresh they are under load, and what a refresh costs beside a full recomputation by plain Spark.

`freshness` and `creating` run an engine: batches of changes are acknowledged ten times a second, and a batch is fresh
in the view when the checkpoint that contains it is committed (every live view is at that epoch then). `cost` and
`flat` time refreshes alone, over segments that are written here, without an engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.figures import Benchmark, Figure, Scale, percentile

CHANGES_PER_S = 5_000
BATCHES_PER_S = 10
COUNTRIES = 50
JOIN = (
    "SELECT c.country, sum(o.amount) AS total, count(*) AS orders "
    "FROM orders o JOIN customers c ON o.customer_id = c.customer_id GROUP BY c.country"
)
GROUPED = "SELECT customer_id % 100 AS bucket, sum(amount) AS total, count(*) AS orders FROM orders GROUP BY 1"
ROWWISE = "SELECT id, amount * 2 AS twice FROM orders WHERE amount > 10"
ORDERS = "CREATE TABLE orders (id BIGINT PRIMARY KEY, customer_id BIGINT, amount DECIMAL(12,2), note STRING)"
CUSTOMERS = "CREATE TABLE customers (customer_id BIGINT PRIMARY KEY, country STRING, name STRING)"


# -- rows


@dataclass
class Rows:
    """Makes orders and customers: 10 orders for each customer."""

    orders: int
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    @property
    def customers(self) -> int:
        return max(1, self.orders // 10)

    def order_rows(self, ids: np.ndarray[Any, Any]) -> pa.Table:
        size = len(ids)
        amounts = pc.cast(pa.array(self.rng.integers(0, 1000, size)), pa.decimal128(19, 0))
        return pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "customer_id": pa.array(self.rng.integers(0, self.customers, size), pa.int64()),
                "amount": pc.cast(amounts, pa.decimal128(12, 2)),
                "note": pa.array(np.char.add("note ", ids.astype(str))),
                "_op": pa.array(np.ones(size, np.int8)),
            }
        )

    def customer_rows(self, ids: np.ndarray[Any, Any]) -> pa.Table:
        return pa.table(
            {
                "customer_id": pa.array(ids, pa.int64()),
                "country": pa.array(np.char.add("C", (ids % COUNTRIES).astype(str))),
                "name": pa.array(np.char.add("name ", ids.astype(str))),
                "_op": pa.array(np.ones(len(ids), np.int8)),
            }
        )

    def changes(self, size: int) -> pa.Table:
        """New values for orders that exist."""
        return self.order_rows(self.rng.choice(self.orders, min(size, self.orders), replace=False))


# -- with an engine


class Load:
    """Changes at a steady rate, and how long each batch took until a checkpoint held it."""

    def __init__(self, engine: Any, rows: Rows, changes_per_s: int = CHANGES_PER_S) -> None:
        self.engine, self.rows = engine, rows
        self.batch = changes_per_s // BATCHES_PER_S
        self.seconds: list[float] = []
        self._stop = threading.Event()

    def run(self, seconds: float) -> list[float]:
        """Write for so long; the waits of all batches, those included that are committed afterwards."""
        self.seconds = []
        self._stop.clear()
        waiting: list[tuple[int, float]] = []
        watcher = threading.Thread(target=self._watch, args=(waiting,), daemon=True)
        watcher.start()
        begin = time.monotonic()
        for number in count(1):
            rows = self.rows.changes(self.batch)
            waiting.append((self.engine.call(self._stage(rows)), time.monotonic()))
            due = begin + number / BATCHES_PER_S
            if due - begin > seconds:
                break
            time.sleep(max(0.0, due - time.monotonic()))
        self._stop.set()
        watcher.join()
        return self.seconds

    async def _stage(self, rows: pa.Table) -> int:
        from headwater.runtime.registry import schema_of

        core = self.engine.core
        job = core.registry.find("orders", "table")
        await core.writes.stage(job.id, schema_of(job), rows, {})
        return int(core.writes.acknowledged)

    async def _committed(self, ticket: int) -> bool:
        return not self.engine.core.dataflow.waits(ticket)

    def _watch(self, waiting: list[tuple[int, float]]) -> None:
        done = 0
        while not self._stop.is_set() or done < len(waiting):
            while done < len(waiting) and self.engine.call(self._committed(waiting[done][0])):
                self.seconds.append(time.monotonic() - waiting[done][1])
                done += 1
            time.sleep(0.01)


def _loaded(engine: Any, rows: Rows) -> None:
    engine.sql(ORDERS)
    engine.sql(CUSTOMERS)
    engine.sql(
        f"INSERT INTO customers SELECT id, concat('C', id % {COUNTRIES}), concat('name ', id) "
        f"FROM range({rows.customers})"
    )
    engine.sql(
        f"INSERT INTO orders SELECT id, id % {rows.customers}, CAST(id % 1000 AS DECIMAL(12,2)), concat('note ', id) "
        f"FROM range({rows.orders})"
    )
    engine.sql("FLUSH")


def freshness(scale: Scale) -> Iterator[Figure]:
    """A join + aggregate view at 1 s barriers under 5,000 changes/s on 1 M rows."""
    from headwater import Engine

    rows = Rows(scale.rows(1_000_000, least=10_000))
    with Engine(scale.folder / "data") as engine:
        _loaded(engine, rows)
        engine.sql(f"CREATE MATERIALIZED VIEW revenue AS {JOIN}")
        engine.sql("WAIT")
        load = Load(engine, rows)
        load.run(scale.seconds(15))  # the JVM compiles its hot paths
        waits = load.run(scale.seconds(40))
        engine.sql("FLUSH")
        _same(engine, "revenue", JOIN)
    name = f"freshness of a join + aggregate view, {CHANGES_PER_S:,} changes/s on {rows.orders:,} rows"
    yield Figure(f"{name}, p50", percentile(waits, 0.5), "s", "barriers every 1 s")
    p99 = percentile(waits, 0.99)
    yield Figure(f"{name}, p99", p99, "s", "barriers every 1 s", 2 / p99, "< 2 s", p99 < 2)


def creating(scale: Scale) -> Iterator[Figure]:
    """What the creation of a view over 5 M rows does to the freshness of another one."""
    from headwater import Engine

    rows = Rows(scale.rows(200_000, least=10_000))
    large = scale.rows(5_000_000, least=100_000)
    with Engine(scale.folder / "data") as engine:
        _loaded(engine, rows)
        engine.sql("CREATE TABLE facts (id BIGINT PRIMARY KEY, grp BIGINT, amount BIGINT)")
        engine.sql(f"INSERT INTO facts SELECT id, id % 1000, id % 97 FROM range({large})")
        engine.sql("FLUSH")
        engine.sql(f"CREATE MATERIALIZED VIEW revenue AS {JOIN}")
        engine.sql("WAIT")
        load = Load(engine, rows)
        load.run(scale.seconds(10))
        alone = load.run(scale.seconds(20))
        query = "SELECT id, grp, amount * 2 AS twice FROM facts WHERE amount > 3"
        creation = threading.Thread(target=engine.sql, args=(f"CREATE MATERIALIZED VIEW copied AS {query}",))
        creation.start()
        beside = load.run(scale.seconds(20))
        creation.join()
        engine.sql("WAIT")
    before, during = percentile(alone, 0.99), percentile(beside, 0.99)
    yield Figure(
        f"freshness p99 of a view while another is created over {large:,} rows",
        during,
        "s",
        f"{before:.2f} s without",
        before / during,
        "≤ 1.5 ×",
        during <= 1.5 * before,
    )


MANY: tuple[tuple[str, str], ...] = (
    ("revenue", JOIN),
    ("buckets", GROUPED),
    ("large", ROWWISE),
    ("named", "SELECT o.id, o.amount, c.country FROM orders o JOIN customers c ON o.customer_id = c.customer_id"),
    ("highest", "SELECT country, max(amount) AS most, count(*) AS orders FROM named GROUP BY country"),
    ("amounts", "SELECT customer_id, count(DISTINCT amount) AS amounts FROM orders GROUP BY customer_id"),
    (
        "best",
        "SELECT id, customer_id, amount FROM (SELECT *, row_number() OVER (PARTITION BY customer_id "
        "ORDER BY amount DESC, id) AS place FROM orders) WHERE place <= 2",
    ),
    ("totals", "SELECT sum(total) AS total, sum(orders) AS orders FROM revenue"),
)


def many(scale: Scale) -> Iterator[Figure]:
    """How fresh views are when there are several, of all strategies and on each other, under 1,000 changes/s."""
    from headwater import Engine

    rows = Rows(scale.rows(200_000, least=10_000))
    with Engine(scale.folder / "data") as engine:
        _loaded(engine, rows)
        load = Load(engine, rows, 1_000)
        there = 0
        for number in (1, 4, 8):
            for name, query in MANY[there:number]:
                engine.sql(f"CREATE MATERIALIZED VIEW {name} AS {query}")
            engine.sql("WAIT")
            there = number
            load.run(scale.seconds(40))  # the JVM compiles its hot paths, of each view others
            waits = load.run(scale.seconds(30))
            what = f"freshness with {number} views, 1,000 changes/s on {rows.orders:,} rows, p50"
            yield Figure(what, percentile(waits, 0.5), "s", f"p99 {percentile(waits, 0.99):.2f} s")
        engine.sql("FLUSH")
        _same(engine, "revenue", JOIN)


def _same(engine: Any, view: str, query: str) -> None:
    columns = "country, total, orders"
    stored = engine.execute(f"SELECT {columns} FROM {view} ORDER BY country")[0].rows
    fresh = engine.execute(f"SELECT {columns} FROM ({query}) ORDER BY country")[0].rows
    if stored != fresh:
        raise AssertionError(f"view {view} is not its query")


# -- without an engine


class World:
    """Tables as segments, and a view over them, refreshed by hand: what `spark/view_job.py` does, timed."""

    slots = 2
    vnode_count = 256

    def __init__(self, scale: Scale, orders: int) -> None:
        from headwater.model.schema import Column, keyed
        from headwater.runtime.tables import SequenceAllocator
        from headwater.spark.session import make_session
        from headwater.storage.files import DataDir

        self.spark = make_session(None)
        self.spark.sparkContext.setJobGroup("refresh", "refresh")  # as the engine gives each
        (scale.folder / f"world-{orders}").mkdir()
        self.data_dir = DataDir(str(scale.folder / f"world-{orders}"))
        self.sequence = SequenceAllocator(0)
        self.rows = Rows(orders)
        self.schemas = {
            "orders": keyed(
                [
                    Column("id", "BIGINT", False),
                    Column("customer_id", "BIGINT"),
                    Column("amount", "DECIMAL(12,2)"),
                    Column("note", "STRING"),
                ],
                ["id"],
            ),
            "customers": keyed(
                [Column("customer_id", "BIGINT", False), Column("country", "STRING"), Column("name", "STRING")],
                ["customer_id"],
            ),
        }
        ids = np.arange(orders)
        self.segments = {
            "orders": [
                self._segment("orders", self.rows.order_rows(ids[i : i + 1_000_000]), "base")
                for i in range(0, orders, 1_000_000)
            ],
            "customers": [self._segment("customers", self.rows.customer_rows(np.arange(self.rows.customers)), "base")],
        }

    def reader(self, schema: Any) -> Any:
        from headwater.spark.table import TableReader

        return TableReader(self.spark, self.data_dir, schema, self.vnode_count)

    def _segment(self, table: str, rows: pa.Table, kind: str) -> Any:
        from headwater.storage.segments import write_segment

        first = self.sequence.take(rows.num_rows)
        rows = rows.append_column("_seq", pa.array(np.arange(first, first + rows.num_rows)))
        number = 1 if table == "orders" else 2
        return write_segment(self.data_dir, number, self.schemas[table], rows, kind=kind, vnode_count=self.vnode_count)

    def view(self, query: str) -> View:
        return View(self, query)


class View:
    """One view of a world."""

    def __init__(self, world: World, query: str) -> None:
        from headwater.runtime.tables import InputLog, TableState, ViewState
        from headwater.spark.view import storage_schema
        from headwater.spark.view_job import initial_segments
        from headwater.storage.checkpoint import JobRow
        from headwater.view.analyse import analyse

        self.world, self.query = world, query
        used = {name: schema for name, schema in world.schemas.items() if name in query}
        plan = analyse(query, used)
        schema = storage_schema(world.spark, plan, used)
        job = JobRow(10, "v", "view", "live", "main", "", {"plan": plan.as_dict()})
        self.state = ViewState(job, schema)
        self.tables = {
            name: TableState(JobRow(i, name, "table", "live", "main", "", {}), used[name], list(world.segments[name]))
            for i, name in enumerate(used)
        }
        self.state.segments = [
            *initial_segments(world, self.state, {n: (t, InputLog()) for n, t in self.tables.items()})
        ]

    def refresh(self, changes: int) -> float:
        """Change that many orders and refresh; seconds of the refresh."""
        from headwater.runtime.tables import InputLog
        from headwater.spark.view_job import refresh_together

        orders = self.tables["orders"]
        seen = list(self.world.segments["orders"])
        delta = self.world._segment("orders", self.world.rows.changes(changes), "delta")
        orders.segments = [*seen, delta]
        logs = {n: (t, InputLog(seen=list(t.segments))) for n, t in self.tables.items() if n != "orders"}
        begin = time.perf_counter()
        refresh_together(self.world, [(self.state, {"orders": (orders, InputLog(seen, [delta])), **logs})])
        return time.perf_counter() - begin

    def full(self) -> float:
        """Seconds of the query by plain Spark over the same files, its result written to nowhere."""
        for name, table in self.tables.items():
            self.world.reader(table.schema).snapshot(table.segments).createOrReplaceTempView(name)
        begin = time.perf_counter()
        self.world.spark.sql(self.query).write.format("noop").mode("append").save()
        return time.perf_counter() - begin


def cost(scale: Scale) -> Iterator[Figure]:
    """A refresh against a recomputation by plain Spark on the same data."""
    rows = scale.rows(5_000_000, least=50_000)
    world = World(scale, rows)
    for name, query in (("join + aggregate", JOIN), ("group by", GROUPED), ("filter", ROWWISE)):
        view = world.view(query)
        for _ in range(6):
            view.refresh(1000)
        ours = percentile([view.refresh(1000) for _ in range(7)], 0.5)
        for _ in range(2):
            view.full()
        plain = percentile([view.full() for _ in range(5)], 0.5)
        what = f"refresh of a {name} view, 1,000 changes on {rows:,} rows"
        yield Figure(what, ours, "s", f"{plain:.2f} s full recomputation", plain / ours, "> 1 ×", ours < plain)


def flat(scale: Scale) -> Iterator[Figure]:
    """The same 1,000 changes on 100 k, 1 M and 10 M rows."""
    sizes = [scale.rows(size, least=2000) for size in (100_000, 1_000_000, 10_000_000)]
    found: dict[str, list[float]] = {"rowwise": [], "algebraic": []}
    for number, size in enumerate(sizes):
        world = World(scale, size)
        for name, query in (("rowwise", ROWWISE), ("algebraic", GROUPED)):
            view = world.view(query)
            for _ in range(5 if number else 20):  # the JVM compiles its hot paths: the first size would look slow
                view.refresh(1000)
            found[name].append(percentile([view.refresh(1000) for _ in range(7)], 0.5))
    for name, seconds in found.items():
        yield Figure(
            f"{name} refresh of 1,000 changes on {sizes[-1]:,} rows",
            seconds[-1],
            "s",
            f"{seconds[0]:.2f} s on {sizes[0]:,}, {seconds[1]:.2f} s on {sizes[1]:,}",
            seconds[0] / seconds[-1],
            "≥ 0.67 × (flat)",
            seconds[0] / seconds[-1] >= 0.67,
        )


BENCHMARKS: dict[str, Benchmark] = {
    "freshness": freshness,
    "many": many,
    "cost": cost,
    "flat": flat,
    "creating": creating,
}
