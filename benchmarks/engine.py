"""The engine itself: barrier latency, tables against plain Parquet, the cost of a point change, memory.

Everything goes through `headwater.Engine`, as a user's program would; the references use the engine's own Spark
session, so that both sides have the same settings.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from benchmarks.figures import Benchmarks, Figure, Scale, percentile
from headwater import Engine
from headwater.runtime.maintenance import FOLD_FLOOR_BYTES

COLUMNS = "id BIGINT PRIMARY KEY, a INT, b STRING, c DOUBLE, d TIMESTAMP"
ROWS = """SELECT id, CAST(id % 1000 AS INT) AS a, concat('row number ', id) AS b, CAST(id * 1.5 AS DOUBLE) AS c,
                 timestamp_micros(id * 1000) AS d FROM range({rows})"""
QUESTION = "count(*) AS n, sum(a) AS a, max(b) AS b, sum(c) AS c, max(d) AS d"
REPEATS = 3


@contextmanager
def engine(scale: Scale, **settings: str) -> Iterator[Engine]:
    with Engine(scale.folder / "data", settings=settings) as found:
        yield found


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def fill(running: Engine, name: str, rows: int) -> None:
    """A table of that many rows, all of them in its base."""
    running.execute(f"CREATE TABLE {name} ({COLUMNS})")
    running.execute(f"INSERT INTO {name} {ROWS.format(rows=rows)}")
    running.execute("FLUSH")
    settled(running, name)


def settled(running: Engine, name: str) -> None:
    """Wait for compaction, so that a figure does not hold its cost by chance."""
    core = running.core
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        segments = core.meta.segments_at(core.registry.find(name, "table").id, core.meta.committed_epoch())
        if not core.dataflow.swaps and sum(s.bytes for s in segments if s.kind == "delta") <= FOLD_FLOOR_BYTES:
            return
        time.sleep(0.5)


def latencies(running: Engine, for_s: float) -> list[float]:
    """The milliseconds of the barriers that completed during this time."""
    seen: dict[int, float] = {}
    first = running.status()["committed_epoch"]
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        time.sleep(1)
        seen.update({b["epoch"]: b["ms"] for b in running.status()["barriers"] if b["epoch"] >= first})
    return list(seen.values())


def barriers(scale: Scale) -> Iterator[Figure]:
    """Ten tables; idle, then with writes to all of them."""
    with engine(scale, barrier_interval_ms="250") as running:
        names = [f"t{i}" for i in range(10)]
        for name in names:
            running.execute(f"CREATE TABLE {name} (id BIGINT PRIMARY KEY, v STRING)")
            running.execute(f"INSERT INTO {name} VALUES (0, 'warm')")
        running.execute("FLUSH")
        idle = latencies(running, scale.seconds(20))
        yield Figure("barrier latency, idle, p50", percentile(idle, 0.5), "ms")
        yield Figure("barrier latency, idle, p99", percentile(idle, 0.99), "ms")
        stop = threading.Event()
        writers = [threading.Thread(target=_write, args=(running, name, stop)) for name in names[:4]]
        for writer in writers:
            writer.start()
        time.sleep(5)
        busy = latencies(running, scale.seconds(30))
        stop.set()
        for writer in writers:
            writer.join()
        yield Figure("barrier latency, 4 writers, p50", percentile(busy, 0.5), "ms")
        yield Figure("barrier latency, 4 writers, p99", percentile(busy, 0.99), "ms")


def _write(running: Engine, name: str, stop: threading.Event) -> None:
    number = 1
    while not stop.is_set():
        values = ", ".join(f"({number + i}, 'value {number + i}')" for i in range(100))
        running.execute(f"INSERT INTO {name} VALUES {values}")
        number += 100


def throughput(scale: Scale) -> Iterator[Figure]:
    """A bulk write and a full read, against Spark's own Parquet writer and reader."""
    rows = scale.rows(5_000_000)
    with engine(scale) as running:
        spark = running.core.spark
        plain = str(scale.folder / "plain")
        query = ROWS.format(rows=rows)
        spark.sql(ROWS.format(rows=1000)).write.mode("overwrite").parquet(plain)  # both sides start warm
        fill(running, "warm", 1000)
        ours, theirs = [], []
        for i in range(REPEATS):
            theirs.append(seconds(lambda: spark.sql(query).write.mode("overwrite").parquet(plain)))
            running.execute(f"CREATE TABLE t{i} ({COLUMNS})")
            ours.append(seconds(lambda i=i: running.execute(f"INSERT INTO t{i} {query}; FLUSH")))  # type: ignore[misc]
            settled(running, f"t{i}")
        yield _against("bulk write", rows, ours, theirs, "Spark writes the same rows to Parquet")
        ours, theirs = [], []
        for i in range(REPEATS):
            theirs.append(seconds(lambda: spark.sql(f"SELECT {QUESTION} FROM parquet.`{plain}`").collect()))
            ours.append(seconds(lambda i=i: running.execute(f"SELECT {QUESTION} FROM t{i}")))  # type: ignore[misc]
        yield _against("full read", rows, ours, theirs, "Spark reads the same rows from Parquet")


def _against(name: str, rows: int, ours: list[float], theirs: list[float], reference: str) -> Figure:
    mine, other = statistics.median(ours), statistics.median(theirs)
    return Figure(
        f"{name} of {rows:,} rows",
        rows / mine,
        "rows/s",
        reference=f"{reference}: {rows / other:,.0f} rows/s",
        ratio=other / mine,
        goal="≥ 0.67 (within 1.5 ×)",
        met=other / mine >= 1 / 1.5,
    )


def point(scale: Scale) -> Iterator[Figure]:
    """One changed row and FLUSH, in tables of three sizes."""
    sizes = [scale.rows(n) for n in (100_000, 1_000_000, 10_000_000)]
    found: dict[str, list[float]] = {"upsert": [], "update": []}
    with engine(scale, barrier_interval_ms="60000") as running:
        for size in sizes:
            name = f"t{size}"
            running.execute("ALTER SYSTEM SET barrier_interval_ms = 1000")
            fill(running, name, size)
            running.execute("ALTER SYSTEM SET barrier_interval_ms = 60000; FLUSH")
            statements = {
                "upsert": lambda k, n=name: f"INSERT INTO {n} VALUES ({k}, 1, 'x', 2.0, NULL); FLUSH",
                "update": lambda k, n=name: f"UPDATE {n} SET a = a + 1 WHERE id = {k}; FLUSH",
            }
            for kind, statement in statements.items():
                times = []
                for k in range(13):
                    text = statement(k * 7 + 1)
                    times.append(seconds(lambda text=text: running.execute(text)))  # type: ignore[misc]
                found[kind].append(statistics.median(times[3:]))  # the first ones warm the plans up
    for kind, times in found.items():
        for size, value in zip(sizes, times, strict=True):
            last = size == sizes[-1]
            yield Figure(
                f"one {kind} + FLUSH, {size:,} rows",
                value * 1000,
                "ms",
                reference=f"the same on {sizes[0]:,} rows" if last else "",
                ratio=times[0] / value if last else None,
                goal="flat (≥ 0.5)" if last else "",
                met=times[0] / value >= 0.5 if last else None,
            )


def memory(scale: Scale) -> Iterator[Figure]:
    """What the engine's own process holds after tables of two sizes were written and read."""
    sizes = [scale.rows(n) for n in (1_000_000, 10_000_000)]
    held = []
    with engine(scale) as running:
        fill(running, "warm", 1000)
        for size in sizes:
            fill(running, f"t{size}", size)
            running.execute(f"SELECT {QUESTION} FROM t{size}")
            held.append(psutil.Process().memory_info().rss / 2**20)
    yield Figure(f"engine process after {sizes[0]:,} rows", held[0], "MiB")
    yield Figure(
        f"engine process after {sizes[1]:,} rows",
        held[1],
        "MiB",
        reference="the figure above",
        ratio=held[0] / held[1],
        goal="flat (≥ 0.9)",
        met=held[0] / held[1] >= 0.9,
    )


BENCHMARKS: Benchmarks = {"barriers": barriers, "throughput": throughput, "point": point, "memory": memory}
