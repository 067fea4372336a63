"""Capture from Postgres: the first copy, the stream, freshness, what they cost. Each against a plain reference.

The server is one of its own on the same machine, started for the run. References read the same table, or the same
log, and throw it away; so they are what no copy could beat.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figures import Benchmarks, Figure, Scale, percentile
from benchmarks.rivals import Measured, Rivals, claim_memory
from benchmarks.tables import FILL_WIDE, Table, lineitem, strewn, wide
from headwater import Engine
from headwater.connectors.postgres.client import parse_lsn
from headwater.testing.servers import PostgresServer, TcpProxy

READERS = 2
TRIES = (
    5  # of a copy, ours and others' by turns; the best counts: on a machine with neighbours they differ by a quarter
)
STREAM_TRIES = 3  # of a backlog, by turns too
SOURCE = """CREATE SOURCE shop WITH (connector='postgres-cdc', hostname='{host}', port='{port}', username='{user}',
    password='${{file:{secret}}}', database.name='{database}', slot.name='headwater')"""


@dataclass
class Bench:
    """A server with a table, an engine beside it, and the path between them."""

    server: PostgresServer
    proxy: TcpProxy
    engine: Engine
    db: Any
    table: Table
    rows: int
    highest: int
    """The largest value of the key's first column."""
    order: str = "key"
    """In which the table is read."""
    best: float = float("nan")
    """Seconds of the best first copy."""

    def capture(self, rows_per_split: int) -> None:
        name = self.table.name
        self.engine.execute(
            f"CREATE TABLE {name} (*) FROM shop TABLE 'public.{name}' WITH (backfill.parallelism='{READERS}', "
            f"backfill.num_rows_per_split='{rows_per_split}', backfill.order='{self.order}')"
        )

    def live(self) -> None:
        while any(j["state"] != "live" for j in self.engine.status()["jobs"]):
            time.sleep(0.05)

    def end_of_log(self) -> int:
        return parse_lsn(self.db.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()[0])

    def reached(self, lsn: int) -> None:
        while parse_lsn(self.engine.status()["sources"][0]["position"]) < lsn:
            time.sleep(0.05)


@contextlib.contextmanager
def bench(
    scale: Scale,
    rows: int,
    *,
    table: Table = wide,
    interval_ms: int = 1000,
    proxied: bool = False,
    encrypted: bool = False,
) -> Iterator[Bench]:
    version = "15" if PostgresServer.available("15") else "embedded"
    settings = {"shared_buffers": "256MB", "max_wal_size": "4GB", "wal_keep_size": "0"}
    with PostgresServer(version, settings=settings) as server:
        if encrypted:
            server.offer_tls()
        # In a file: Spark's workers have the environment of the first benchmark of this process.
        secret = scale.folder / f"password-{server.port}"
        secret.write_text(server.password)
        with server.connect() as db:
            db.execute(table.ddl.encode())
            table.fill(db, rows)
            db.execute(f"VACUUM ANALYZE {table.name}".encode())
            found = db.execute(f"SELECT count(*), max({table.key}) FROM {table.name}".encode()).fetchone()
            assert found is not None
            settled(db)
            folder = scale.folder / f"data-{time.time_ns()}"
            # One slot more than readers: the live stream needs one.
            engine = Engine(folder, master=f"local[{READERS + 1}]", settings={"barrier_interval_ms": str(interval_ms)})
            with TcpProxy(server.port) as proxy, engine:
                way: Any = proxy if proxied else server
                engine.execute(
                    SOURCE.format(
                        host=way.host, port=way.port, user=server.user, database=server.database, secret=secret
                    )
                )
                yield Bench(server, proxy, engine, db, table, *found)


def settled(db: Any) -> None:
    """What was written is on disk: neither the server nor the kernel writes it behind while something is measured."""
    db.execute("CHECKPOINT")
    os.sync()
    claim_memory()


# -- what it costs --------------------------------------------------------------------------------------------------


@dataclass
class Usage:
    """CPU seconds of the engine's processes during a block, and the largest memory if `watched`: to look takes CPU."""

    watched: bool = False
    cpu_s: float = 0.0
    peak_bytes: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def _family(self) -> list[psutil.Process]:
        """The engine is in this process: its JVM, workers and readers are children; the server is not ours."""
        me = psutil.Process()
        return [me, *(p for p in me.children(recursive=True) if "postgres" not in _name(p))]

    def _cpu(self) -> dict[int, float]:
        found = {}
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                found[process.pid] = times.user + times.system
        return found

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            total = 0
            for process in self._family():
                with contextlib.suppress(psutil.Error):
                    total += process.memory_info().rss
            self.peak_bytes = max(self.peak_bytes, total)

    def __enter__(self) -> Usage:
        self._before = self._cpu()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if self.watched:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self.watched:
            self._thread.join(5)
        after = self._cpu()
        self.cpu_s = sum(after[p] - self._before.get(p, 0.0) for p in after)


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.name()
    return ""


# -- the first copy -------------------------------------------------------------------------------------------------


def snapshot(scale: Scale) -> Iterator[Figure]:
    """A table into a committed one, against COPY to nowhere, Spark's JDBC source, and the Debezium engine."""
    with bench(scale, scale.rows(10_000_000, least=10_000)) as b:
        yield from compared(b, scale, "snapshot")
        debezium = rivals(b, scale).debezium()
        yield against("snapshot against the Debezium engine, events dropped", b.rows / b.best, debezium, 5)


def tpch(scale: Scale) -> Iterator[Figure]:
    """TPC-H's lineitem: 16 columns, a key of two."""
    with bench(scale, scale.rows(6_000_000, least=10_000), table=lineitem) as b:
        yield from compared(b, scale, "snapshot of lineitem")


def tls(scale: Scale) -> Iterator[Figure]:
    """The same from a server that offers TLS, as Debian's and most hosted ones do: all who read prefer it then."""
    with bench(scale, scale.rows(10_000_000, least=10_000), encrypted=True) as b:
        yield from compared(b, scale, "snapshot over TLS")


def uuid(scale: Scale) -> Iterator[Figure]:
    """A key of random uuids, whose order says nothing of where a row lies: read by key, and in physical order."""
    with bench(scale, scale.rows(4_000_000, least=10_000), table=strewn) as b:
        warm_up(b)
        by_key, *_ = min(first_copy(b) for _ in range(TRIES))
        yield Figure("snapshot of random uuids, by key", b.rows / by_key, "rows/s")
        b.order = "physical"
        reference = f"by key: {b.rows / by_key:,.0f} rows/s"
        physical, *_ = min(first_copy(b) for _ in range(TRIES))
        yield Figure("snapshot of random uuids, physical", b.rows / physical, "rows/s", reference, by_key / physical)


def compared(b: Bench, scale: Scale, name: str) -> Iterator[Figure]:
    warm_up(b)
    plains, copies, jdbcs = [], [], []
    with rivals(b, scale).spark_jdbc() as try_jdbc:
        for _ in range(TRIES):  # by turns, so that all have the machine's better and worse moments
            plains.append(copy_to_nowhere(b))
            copies.append(first_copy(b))
            jdbcs += [try_jdbc()] if try_jdbc else []
    plain, (ours, cpu_s, server_s) = min(plains), min(copies)
    jdbc = max(jdbcs, key=lambda tried: tried.rows_per_s) if jdbcs else None
    b.best = ours
    reference = f"COPY (FORMAT binary) to /dev/null, {READERS} backends: {b.rows / plain:,.0f} rows/s"
    yield Figure(name, b.rows / ours, "rows/s", reference, plain / ours, "≥ 0.5", plain / ours >= 0.5)
    yield cpu_against(name, cpu_s, jdbc, b.rows)
    yield server_share(name, server_s, jdbc, b.rows)
    yield against(f"{name} against Spark's JDBC source into Parquet", b.rows / ours, jdbc, 3)
    if jdbcs:  # a JVM that has copied a thousand rows, as most that are started to copy a table have
        first, reference = b.rows / copies[0][0], f"{jdbcs[0].rows_per_s:,.0f} rows/s"
        yield Figure(f"{name}, the first try of both", first, "rows/s", reference, first / jdbcs[0].rows_per_s)


def rivals(b: Bench, scale: Scale) -> Rivals:
    return Rivals(b.server, b.table, b.rows, b.highest, READERS, scale.folder)


def first_copy(b: Bench) -> tuple[float, float, float]:
    """Seconds until the table is live, the engine's CPU for it and the server's; then the table is gone again."""
    settled(b.db)
    server_s = server_cpu(b.server)
    with Usage() as usage:
        begin = time.perf_counter()
        b.capture(max(1000, b.rows // 50))
        b.engine.execute("WAIT")
        seconds = time.perf_counter() - begin
    b.engine.execute(f"DROP TABLE {b.table.name}")
    return seconds, usage.cpu_s, server_cpu(b.server) - server_s


def server_cpu(server: PostgresServer) -> float:
    """CPU seconds of the server and of all its backends that have ended: those of a copy end with it."""
    assert server._process is not None
    times = psutil.Process(server._process.pid).cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def cpu_against(name: str, ours_s: float, theirs: Measured | None, rows: int) -> Figure:
    """Without the server's: what is left to compare where the database is on a machine of its own."""
    name, value = f"{name}, CPU of the engine", ours_s / rows * 1e6
    if theirs is None:
        return Figure(name, value, "µs/row")
    return Figure(name, value, "µs/row", f"JDBC: {theirs.cpu_s / rows * 1e6:.2f} µs/row", theirs.cpu_s / ours_s)


def server_share(name: str, server_s: float, theirs: Measured | None, rows: int) -> Figure:
    """What the server takes for a row of our copy, beside all that a row may take at three times the speed of JDBC."""
    name, value = f"{name}, CPU of the server", server_s / rows * 1e6
    if theirs is None:
        return Figure(name, value, "µs/row")
    budget = (os.cpu_count() or 1) / (3 * theirs.rows_per_s) * 1e6
    return Figure(name, value, "µs/row", f"all cores' time for a row at 3 × JDBC: {budget:.2f} µs/row", budget / value)


def against(name: str, ours: float, theirs: Measured | None, goal: int) -> Figure:
    if theirs is None:
        return Figure(name, float("nan"), "", "could not be fetched on this machine: not measured")
    ratio = ours / theirs.rows_per_s
    return Figure(name, ours, "rows/s", f"{theirs.rows_per_s:,.0f} rows/s", ratio, f"≥ {goal}", ratio >= goal)


def warm_up(b: Bench) -> None:
    """Workers are started and the scanners compiled before anything is measured."""
    name, key = b.table.name, b.table.key
    b.db.execute(f"CREATE TABLE warm (LIKE {name} INCLUDING ALL)".encode())
    b.db.execute(f"INSERT INTO warm SELECT * FROM {name} LIMIT 1000".encode())
    b.engine.execute("CREATE TABLE warm (*) FROM shop TABLE 'public.warm' WITH (backfill.num_rows_per_split='300')")
    b.live()
    b.db.execute(f"DELETE FROM warm WHERE {key} = (SELECT min({key}) FROM warm)".encode())
    b.reached(b.end_of_log())


def copy_to_nowhere(b: Bench) -> float:
    step = -(-b.highest // READERS)
    name, key = b.table.name, b.table.key
    program = b.server._bin / "psql" if b.server._bin is not None else Path("psql")
    environment = {**os.environ, "PGPASSWORD": b.server.password}
    begin = time.perf_counter()
    running = [
        subprocess.Popen(
            [
                program,
                *("-h", b.server.host, "-p", str(b.server.port), "-U", b.server.user, "-d", b.server.database, "-qc"),
                f"\\copy (SELECT * FROM {name} WHERE {key} > {i * step} AND {key} <= {(i + 1) * step}) "
                "TO '/dev/null' (FORMAT binary)",
            ],
            env=environment,
        )
        for i in range(READERS)
    ]
    assert all(p.wait() == 0 for p in running)
    return time.perf_counter() - begin


def memory(scale: Scale) -> Iterator[Figure]:
    """The largest memory of all of the engine's processes while tables of two sizes are copied."""
    peaks = []
    for rows in (scale.rows(1_000_000), scale.rows(10_000_000, least=10_000)):
        with bench(scale, rows) as b:
            warm_up(b)
            with Usage(watched=True) as usage:
                b.capture(100_000)
                b.live()
            peaks.append(usage.peak_bytes)
            yield Figure(f"memory, copy of {rows:,} rows", usage.peak_bytes / (1 << 20), "MB")
    growth = peaks[1] / peaks[0]
    yield Figure("memory, ten times the rows", growth, "times", "flat is 1", 1 / growth, "≤ 1.3 times", growth <= 1.3)


# -- the stream -----------------------------------------------------------------------------------------------------


def stream(scale: Scale) -> Iterator[Figure]:
    """A backlog of changes into a committed table, against pg_recvlogical to nowhere; both through the same proxy."""
    changes = scale.rows(500_000, least=5000)
    with bench(scale, 1000, interval_ms=250, proxied=True) as b:
        warm_up(b)
        b.capture(100_000)
        b.live()
        tries = [one_backlog(b, 1001 + number * changes, changes) for number in range(STREAM_TRIES)]
        plain, (ours, cpu_s) = min(plain for plain, _ in tries), min(ours for _, ours in tries)
        reference = f"pg_recvlogical to /dev/null: {changes / plain:,.0f} changes/s"
        ratio = plain / ours
        yield Figure("stream", changes / ours, "changes/s", reference, ratio, "≥ 0.9", ratio >= 0.9)
        yield Figure("stream, CPU of the engine", cpu_s / changes * 1e6, "µs/change")


def one_backlog(b: Bench, first: int, changes: int) -> tuple[float, tuple[float, float]]:
    """Seconds of pg_recvlogical for a backlog, and ours for the same one, with the engine's CPU."""
    b.db.execute("SELECT pg_create_logical_replication_slot('bench', 'pgoutput')")
    b.proxy.refuse()
    b.proxy.cut()
    for low in range(first, first + changes, 5000):
        b.db.execute(FILL_WIDE.format(low=low, high=min(low + 5000, first + changes) - 1).encode())
    end = b.end_of_log()
    plain = receive_to_nowhere(b, end)
    b.db.execute("SELECT pg_drop_replication_slot('bench')")
    with Usage() as usage:
        begin = connected(b)
        b.reached(end)
        ours = time.perf_counter() - begin
    return plain, (ours, usage.cpu_s)


def connected(b: Bench) -> float:
    """Let the engine's reader come back; gives the moment when it is there."""
    (source,) = b.engine.core.capture.sources.values()
    while source.reader.connected:
        time.sleep(0.01)
    b.proxy.accept()
    while not source.reader.connected:
        time.sleep(0.005)
    return time.perf_counter()


def receive_to_nowhere(b: Bench, end: int) -> float:
    program = b.server._bin / "pg_recvlogical" if b.server._bin is not None else Path("pg_recvlogical")
    with TcpProxy(b.server.port) as other:
        begin = time.perf_counter()
        subprocess.run(
            [
                program,
                *("-h", other.host, "-p", str(other.port), "-U", b.server.user, "-d", b.server.database),
                *("-S", "bench", "--start", "-f", "/dev/null", "-n", "-o", "proto_version=1"),
                *("-o", "publication_names=headwater", f"--endpos={end >> 32:X}/{end & 0xFFFFFFFF:X}"),
            ],
            env={**os.environ, "PGPASSWORD": b.server.password},
            check=True,
            timeout=600,
        )
        return time.perf_counter() - begin


def freshness(scale: Scale) -> Iterator[Figure]:
    """From a commit at the source to the checkpoint that makes it readable, at 1 s barriers, 5,000 changes/s."""
    with bench(scale, 10_000) as b:
        warm_up(b)
        b.capture(100_000)
        b.live()
        commits = steady_load(b, scale.seconds(30), per_s=5000)
        b.reached(commits[-1][0])
        result = b.engine.execute("SELECT position, committed_at FROM hw_catalog.hw_epochs WHERE position IS NOT NULL")
        assert result[0] is not None
        epochs = sorted((parse_lsn(r["position"]), moment(r["committed_at"])) for r in result[0].rows)
        delays, at = [], 0
        for lsn, committed in commits:
            while epochs[at][0] < lsn:
                at += 1
            delays.append(epochs[at][1] - committed)
        late = percentile(delays, 0.99)
        yield Figure("freshness, p50", percentile(delays, 0.5), "s")
        yield Figure("freshness, p99", late, "s", "5,000 changes/s, 1 s barriers", None, "< 2 s", late < 2)


def moment(text: str) -> float:
    return dt.datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()


def steady_load(b: Bench, for_s: float, per_s: int) -> list[tuple[int, float]]:
    """Updates in transactions of 50 rows; gives where each commit ended in the log, and when."""
    commits = []
    with b.server.connect() as db:
        begin = time.perf_counter()
        number = 0
        while (elapsed := time.perf_counter() - begin) < for_s:
            if number * 50 > elapsed * per_s:
                time.sleep(0.002)
                continue
            low = number * 50 % 9000
            db.execute("UPDATE wide SET a = a + 1 WHERE id BETWEEN %s AND %s", (low + 1, low + 50))
            row = db.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
            assert row is not None
            commits.append((parse_lsn(row[0]), time.time()))
            number += 1
    return commits


BENCHMARKS: Benchmarks = {
    "snapshot": snapshot,
    "tpch": tpch,
    "tls": tls,
    "uuid": uuid,
    "stream": stream,
    "freshness": freshness,
    "memory": memory,
}
