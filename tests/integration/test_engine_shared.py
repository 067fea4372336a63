"""An engine on a cluster whose hosts may not see its data directory, and may not be there at all."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster, Hosts, no_namespaces
from engine_process import EngineProcess, running, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces() or "-")]


def known(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)


def exit_code(engine: EngineProcess, timeout: float = 60) -> int:
    assert engine.process is not None
    return engine.process.wait(timeout)


def waiting_for(engine: EngineProcess) -> Any:
    return engine.http.get("/status").json()["engine"]["waiting_for"]


def segments(data: Path) -> list[str]:
    with sqlite3.connect(f"file:{data}/meta.db?mode=ro", uri=True) as meta:
        return [row[0] for row in meta.execute("SELECT path FROM segments")]


def test_an_engine_waits_for_workers_and_ends_when_one_joins_that_has_another_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    with Cluster(tmp_path / "cluster", workers=0, hidden={1: data}) as cluster, ThreadPoolExecutor() as threads:
        known(cluster, monkeypatch)
        with running(data, "--set", "barrier_interval_ms=300", master=cluster.url) as engine:
            assert "start workers of" in waiting_for(engine)
            made = threads.submit(engine.sql, "CREATE TABLE t (id BIGINT PRIMARY KEY, v BIGINT)")
            assert not engine.sql("SHOW JOBS")
            cluster.start_worker(0)
            made.result(60)
            engine.sql("INSERT INTO t SELECT id, 0 FROM range(0, 2000, 1, 4); FLUSH")
            wait_until(lambda: waiting_for(engine) is None, 20, "an end of the waiting")
            cluster.start_worker(1)
            assert exit_code(engine) == 1
            assert "[DATA_DIRECTORY_NOT_SHARED] host hidden1 does not see" in engine.output()
            assert "Traceback" not in engine.output()
        assert segments(data)
        assert all((data / path).exists() for path in segments(data))
        assert cluster.secret not in engine.output()


@pytest.mark.slow
def test_an_engine_without_workers_stops_within_ten_seconds_and_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    with Cluster(tmp_path / "cluster", workers=2) as cluster:
        known(cluster, monkeypatch)
        with running(data, "--set", "barrier_interval_ms=300", master=cluster.url) as engine:
            engine.sql("CREATE TABLE t (id BIGINT PRIMARY KEY); INSERT INTO t SELECT id FROM range(100); FLUSH")
            wait_until(lambda: engine.http.get("/status").json()["engine"]["slots"] == 2, 30, "two slots")
            cluster.stop_worker(0)
            cluster.stop_worker(1)
            engine.sql("INSERT INTO t VALUES (1000)")
            wait_until(lambda: "no executors" in (waiting_for(engine) or ""), 60, "the word that it waits")
            (row,) = engine.sql("SELECT name, waiting_for FROM hw_catalog.hw_progress")
            assert "no executors" in row["waiting_for"]
            assert engine.process is not None
            begin = time.monotonic()
            engine.process.send_signal(signal.SIGTERM)
            assert exit_code(engine) == 0
            assert time.monotonic() - begin < 10
            assert "Traceback" not in engine.output()


@pytest.mark.slow
def test_hosts_that_share_nothing_are_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    data = disk / "data"
    data.mkdir(parents=True)
    with Hosts(tmp_path / "cluster", workers=1, hide=disk, bound={1: data}) as cluster:
        known(cluster, monkeypatch)
        monkeypatch.setenv("SPARK_LOCAL_IP", cluster.address)
        file = tmp_path / "pipeline.sql"
        file.write_text("CREATE TABLE t (id BIGINT PRIMARY KEY);")
        engine = EngineProcess(data, file=file, master=cluster.url)
        with contextlib.suppress(AssertionError):  # on a slow machine the executor joins after the start
            engine.start()
        assert exit_code(engine) == 1
        assert "host hwhost0 does not see the engine's data directory" in engine.output()
        assert {p.name for p in data.iterdir()}.isdisjoint({"tables", "spool", "staging"})
        cluster.stop_worker(0)
        cluster.start_worker(1)  # this host has the directory
        with running(data, file=file, master=cluster.url) as engine:
            wait_until(lambda: engine.sql("SHOW JOBS"), 60, "the table")
            engine.sql("INSERT INTO t SELECT id FROM range(1000); FLUSH")
            assert engine.sql("SELECT count(*) AS n FROM t") == [{"n": 1000}]
