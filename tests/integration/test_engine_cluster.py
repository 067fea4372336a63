"""The same pipeline on a real standalone cluster: two workers on loopback, one executor killed in the middle."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine_process import running, wait_until
from headwater.testing.servers import free_port

pytestmark = [pytest.mark.spark, pytest.mark.slow]


class Cluster:
    """A master and two workers of one core each, from the pyspark package itself."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    def _launch(self, name: str, *arguments: str) -> None:
        import pyspark

        from headwater.spark.java import find_java

        home = Path(pyspark.__file__).parent
        environment = {
            **os.environ,
            **find_java(),
            "SPARK_HOME": str(home),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_WORKER_DIR": str(self.place / name),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        with (self.place / f"{name}.log").open("wb") as out:
            command = [str(home / "bin" / "spark-class"), *arguments]
            self.processes.append(
                subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
            )

    def __enter__(self) -> Cluster:
        package = "org.apache.spark.deploy"
        self._launch(
            "master", f"{package}.master.Master", "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", "0"
        )
        wait_until(lambda: "Starting Spark master" in self.log("master"), 90, "the master's start")
        for i in range(2):
            self._launch(
                f"worker{i}", f"{package}.worker.Worker", "--host", "127.0.0.1", "-c", "1", "-m", "1g",
                "--webui-port", "0", self.url,
            )  # fmt: skip
        for i in range(2):
            wait_until(
                lambda n=i: "Successfully registered with master" in self.log(f"worker{n}"), 90, "the worker's start"
            )
        return self

    def log(self, name: str) -> str:
        return (self.place / f"{name}.log").read_text(errors="replace")

    def executors(self) -> list[psutil.Process]:
        found = []
        for process in self.processes[1:]:
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # a Python worker that has just ended
                    if "CoarseGrainedExecutorBackend" in " ".join(child.cmdline()):
                        found.append(child)
        return found

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                family: list[Any] = [*psutil.Process(process.pid).children(recursive=True), process]
                for one in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            process.wait(30)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    place = tmp_path / "cluster"
    place.mkdir()
    with Cluster(place) as found:
        yield found


VIEWS = {
    "joined": "SELECT a.v, count(*) AS n, sum(b.v) AS s FROM a JOIN b ON a.id = b.id GROUP BY a.v",
    "newest": "SELECT id, v FROM (SELECT *, row_number() OVER (PARTITION BY id ORDER BY v DESC) AS place FROM b) "
    "WHERE place = 1",
    "above": "SELECT count(*) AS n, max(v) AS most FROM newest",
}


def test_tables_and_views_on_two_workers_survive_the_loss_of_an_executor(cluster: Cluster, tmp_path: Path) -> None:
    with running(tmp_path / "data", "--set", "barrier_interval_ms=300", master=cluster.url) as engine:
        engine.sql("CREATE TABLE a (id BIGINT PRIMARY KEY, v BIGINT); CREATE TABLE b (id BIGINT, v BIGINT)")
        engine.sql("INSERT INTO a SELECT id, 0 FROM range(0, 20000, 1, 4); FLUSH")
        for name, query in VIEWS.items():
            engine.sql(f"CREATE MATERIALIZED VIEW {name} AS {query}")
        wait_until(lambda: len(cluster.executors()) == 2, 60, "two executors")
        victim = cluster.executors()[0]
        for i in range(12):
            engine.sql(f"INSERT INTO a VALUES ({i}, 1); INSERT INTO b VALUES ({i}, {i}), ({i}, {i})")
            if i == 4:
                victim.kill()
            if i % 3 == 2:
                engine.sql("FLUSH")
        engine.sql("UPDATE a SET v = v + 1 WHERE id < 100; FLUSH")
        assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE
        assert engine.sql("SELECT count(*) AS n, sum(v) AS s FROM a") == [{"n": 20000, "s": 112}]
        assert engine.sql("SELECT count(*) AS n, sum(v) AS s FROM b") == [{"n": 24, "s": 132}]
        for name, query in VIEWS.items():
            stored = engine.sql(f"SELECT * FROM {name} ORDER BY ALL")
            assert stored
            assert stored == engine.sql(f"SELECT * FROM ({query}) ORDER BY ALL"), name
        assert not engine.sql("SELECT * FROM hw_catalog.hw_errors")
        begin = time.monotonic()
        assert engine.stop() == 0
        assert time.monotonic() - begin < 20
