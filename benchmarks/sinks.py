"""Sinks: rows a second into real targets, each against the plain way to bring the same rows there, in the same run.

The rows are 5 columns, about 60 bytes: an id, a text, an amount, an instant, a flag. Each figure is the best of `RUNS`
deliveries of one batch by a session that has done one before (a session's first job is Spark's start, not a sink's
speed); the reference is measured in the same way, and the two take turns.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Scale

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the same private servers as the tests have

RUNS = 3
GOAL = 0.5
DDL = "id BIGINT, name STRING, amount DECIMAL(10,2), at TIMESTAMP, flag BOOLEAN"


@contextmanager
def session() -> Iterator[Any]:
    from headwater.spark.session import make_session

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = make_session("local[*]")
    try:
        yield spark
    finally:
        spark.stop()


def batch(spark: Any, folder: Path, rows: int) -> Any:
    """The rows as a sink gets them: read from Parquet, as segments are."""
    path = folder / f"rows-{rows}"
    if not path.exists():
        spark.range(0, rows, 1, 2).selectExpr(
            "id",
            "concat('customer number ', id % 100000) AS name",
            "CAST(id % 100000 / 100 AS DECIMAL(10,2)) AS amount",
            "timestamp_micros(1700000000000000 + id * 1000) AS at",
            "id % 3 = 0 AS flag",
        ).write.parquet(str(path))
    return spark.read.parquet(str(path))


def delivery(name: str, connector: dict[str, str], *, append_only: bool = True) -> Callable[[Any], float]:
    """A function that delivers a batch to a fresh sink object and gives the seconds that it took.

    `name` is the sink's own: its progress is kept by name, and what it has delivered is not delivered again.
    """
    from headwater.model.schema import Column
    from headwater.sink.delivery import DeliveryLoop
    from headwater.sink.registry import open_sink

    columns = [Column(*c.split(" ")) for c in DDL.split(", ")]
    kind = {"type": "append-only" if append_only else "upsert"}
    sink = open_sink(name, {**connector, **kind}, columns, () if append_only else ("id",), 1, os.path.expandvars)
    sink.validate(columns, sink.key)
    loop = DeliveryLoop(sink)
    loop.start(None)
    epochs = iter(range(1, 1_000))

    def run(df: Any) -> float:
        epoch = next(epochs)
        before = sink.last_committed()
        begin = time.perf_counter()
        loop.deliver(epoch, epoch + 1, lambda: df)
        took = time.perf_counter() - begin
        assert (before or 0) <= epoch and sink.last_committed() == epoch + 1, "the batch was there already"
        return took

    return run


def compared(name: str, rows: int, ours: Callable[[], float], theirs: Callable[[], float], what: str) -> Figure:
    """Take turns, the first of each not counted; the best of each."""
    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(RUNS)]
    mine, other = rows / min(a for a, _ in pairs), rows / min(b for _, b in pairs)
    ratio = mine / other
    reference = f"{what}: {other:,.0f} rows/s"
    return Figure(name, mine, "rows/s", reference, ratio, f"≥ {GOAL}", ratio >= GOAL)


def with_op(df: Any) -> Any:
    from pyspark.sql import functions as F

    return df.withColumn("_op", F.lit(1).cast("tinyint"))


def postgres(scale: Scale) -> Iterator[Figure]:
    """A batch into Postgres by the sink, against COPY of the same rows as a CSV file by one client."""
    import psycopg

    from sink_targets import postgres_server

    rows = scale.rows(1_000_000)
    with session() as spark, postgres_server() as port:
        df = batch(spark, scale.folder, rows)
        login = f"host=127.0.0.1 port={port} user=postgres dbname=postgres"
        file = scale.folder / "rows.csv"
        df.toPandas().to_csv(file, index=False, header=False)
        options = {"connector": "postgres", "hostname": "127.0.0.1", "port": str(port), "username": "postgres"}
        options |= {"database.name": "postgres"}
        kinds = {"append-only": True, "upsert, all keys new": False}
        for label, append_only in kinds.items():
            table = f"ours_{'a' if append_only else 'u'}"
            deliver = delivery(table, {**options, "table.name": table}, append_only=append_only)

            def ours(deliver: Any = deliver, table: str = table) -> float:
                with psycopg.connect(login, autocommit=True) as connection:
                    connection.execute(f"TRUNCATE {table}")  # type: ignore[arg-type]
                    took = float(deliver(with_op(df)))
                    (count,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()  # type: ignore
                assert count == rows, f"{count} rows of {rows} have arrived"
                return took

            def theirs(table: str = table) -> float:
                return _copy(login, table, file)

            yield compared(f"sink Postgres, {label}", rows, ours, theirs, "COPY into a table of the same shape")


def _copy(login: str, like: str, file: Path) -> float:
    import psycopg

    with psycopg.connect(login, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS plain")
        connection.execute(f"CREATE TABLE plain (LIKE {like} INCLUDING ALL)")  # type: ignore[arg-type]
        begin = time.perf_counter()
        statement = "COPY plain FROM STDIN (FORMAT csv)"
        with file.open("rb") as source, connection.cursor() as cursor, cursor.copy(statement) as copy:
            while block := source.read(1 << 20):
                copy.write(block)
        return time.perf_counter() - begin


def kafka(scale: Scale) -> Iterator[Figure]:
    """A batch into a topic, against a plain producer with the same settings that sends the same messages."""
    from sink_targets import kafka_broker

    rows = scale.rows(1_000_000)
    with session() as spark, kafka_broker() as bootstrap:
        df = batch(spark, scale.folder, rows)
        values = [json.dumps(r, default=str).encode() for r in df.limit(100_000).toPandas().to_dict("records")]
        messages = [values[i % len(values)] for i in range(rows)]
        options = {"connector": "kafka", "properties.bootstrap.server": bootstrap, "topic.partitions": "4"}
        options["staging.path"] = str(scale.folder / "staging")
        for label, more in {"one transaction": {}, "4 producers": {"atomic": "false"}}.items():
            topic = f"ours-{len(more)}"
            deliver = delivery(topic, {**options, **more, "topic": topic})
            yield compared(
                f"sink Kafka, {label}",
                rows,
                lambda deliver=deliver: deliver(with_op(df)),
                lambda: _produce(bootstrap, messages),
                "plain confluent-kafka producer, encoded before, same settings",
            )


def _produce(bootstrap: str, messages: list[bytes]) -> float:
    from confluent_kafka import Producer

    settings = {"bootstrap.servers": bootstrap, "linger.ms": 20, "compression.type": "lz4", "enable.idempotence": True}
    producer = Producer(settings)
    begin = time.perf_counter()
    for value in messages:
        while True:
            try:
                producer.produce("plain", value=value)
                break
            except BufferError:
                producer.poll(0.05)
    producer.flush()
    return time.perf_counter() - begin


def delta(scale: Scale) -> Iterator[Figure]:
    """A batch appended to a Delta table, against Spark appending the same rows to a directory of Parquet files."""
    yield from _lake(scale, "delta", lambda folder: {"path": str(folder / "delta")})


def iceberg(scale: Scale) -> Iterator[Figure]:
    """The same for Iceberg, with a SQLite catalog."""

    def options(folder: Path) -> dict[str, str]:
        catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
        return {**{f"catalog.{k}": v for k, v in catalog.items()}, "database.name": "shop", "table.name": "rows"}

    yield from _lake(scale, "iceberg", options)


def _lake(scale: Scale, connector: str, options: Callable[[Path], dict[str, str]]) -> Iterator[Figure]:
    rows, few = scale.rows(2_000_000), scale.rows(10_000, least=100)
    with session() as spark:
        df = batch(spark, scale.folder, rows)
        deliver = delivery("appended", {"connector": connector, **options(scale.folder)})

        def plain() -> float:
            begin = time.perf_counter()
            df.write.mode("append").parquet(str(scale.folder / "plain"))
            return time.perf_counter() - begin

        name = connector.capitalize()
        yield compared(f"sink {name}, append", rows, lambda: deliver(with_op(df)), plain, "plain Spark Parquet append")
        merged = scale.folder / "merged"
        merged.mkdir()
        upserted = {"connector": connector, **options(merged)} | _path(connector, merged)
        upsert = delivery("upserted", upserted, append_only=False)
        upsert(with_op(df))
        seconds = min(upsert(with_op(df.where(f"id % {max(1, rows // few)} = 0"))) for _ in range(RUNS))
        yield Figure(f"sink {name}, upsert of {few:,} keys into {rows:,} rows", seconds, "s", "keys in every file")


def _path(connector: str, folder: Path) -> dict[str, str]:
    return {"path": str(folder / "delta")} if connector == "delta" else {}


def logstore(scale: Scale) -> Iterator[Figure]:
    """What an epoch costs the log of a sink: references only, whatever the epoch holds."""
    from headwater.logstore import ChunkRef, LogBuffer, LogStoreWriter

    epochs = scale.rows(100_000)
    results = {}
    for rows in (1, 1_000_000):
        buffer = LogBuffer(0)
        writer = LogStoreWriter(buffer, 0)
        begin = time.perf_counter()
        for epoch in range(1, epochs + 1):
            writer.write_chunk(ChunkRef(epoch, 0, rows, rows, rows * 60, ("segment",)))
            writer.flush(epoch)
        results[rows] = (time.perf_counter() - begin) / epochs * 1e6
        assert buffer.resident_rows == 0, "the log has copied rows"
    same = results[1_000_000] < 2 * results[1] + 5
    yield Figure(
        "log store, append of an epoch of 1,000,000 rows",
        results[1_000_000],
        "µs",
        f"an epoch of 1 row: {results[1]:.1f} µs; rows held in memory: 0",
        None,
        "no copy of rows",
        same,
    )


BENCHMARKS = {"postgres": postgres, "kafka": kafka, "delta": delta, "iceberg": iceberg, "logstore": logstore}
