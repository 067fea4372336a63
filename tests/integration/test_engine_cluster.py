"""The same pipeline on a real standalone cluster: two workers on loopback, one executor killed in the middle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster import Cluster
from engine_process import running, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
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
