"""What happens to an engine when something under it dies: Spark's workers, its driver, the meta store's server."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine_process import EngineProcess, SqlError, wait_until
from headwater.testing.servers import PostgresServer

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def meta_server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def shared(meta_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a meta store on a server, its password by reference."""
    monkeypatch.setenv("HW_META_PASSWORD", meta_server.password)
    meta_server.create_database("meta")
    return f"postgresql://postgres:${{HW_META_PASSWORD}}@{meta_server.host}:{meta_server.port}/meta"


def numbers(engine: EngineProcess) -> list[int]:
    return [int(r["id"]) for r in engine.sql("SELECT id FROM t ORDER BY id")]


def python_workers(engine: EngineProcess) -> list[psutil.Process]:
    found = []
    for child in engine.children():
        with contextlib.suppress(psutil.Error):
            if "headwater.spark.daemon" in child.cmdline():
                found.append(child)
    return found


@pytest.mark.slow
def test_spark_s_workers_its_driver_and_the_meta_store_s_server_die_and_nothing_is_lost(
    tmp_path: Path, shared: str, meta_server: PostgresServer
) -> None:
    engine = EngineProcess(tmp_path / "data", "--meta-store", shared)
    written: list[int] = []
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            number = len(written) + 1
            with contextlib.suppress(SqlError, OSError):  # a write that was refused is tried again
                engine.sql(f"INSERT INTO t VALUES ({number}, 'x'); FLUSH")
                written.append(number)

    with engine:
        assert meta_server.password not in (engine.data_dir / "meta-store.url").read_text()
        engine.sql("CREATE TABLE t (id INT PRIMARY KEY, v STRING)")
        engine.sql("CREATE MATERIALIZED VIEW w AS SELECT count(*) AS n FROM t")
        writer = threading.Thread(target=write)
        writer.start()
        try:
            wait_until(lambda: len(written) >= 2, timeout=240, what="two writes")
            for worker in python_workers(engine):
                with contextlib.suppress(psutil.Error):
                    worker.kill()
            before = len(written)
            wait_until(lambda: len(written) >= before + 2, timeout=240, what="writes after the death of all workers")
            meta_server.restart("immediate")
            before = len(written)
            wait_until(lambda: len(written) >= before + 2, timeout=240, what="writes after a crash of the meta store")
        finally:
            stop.set()
            writer.join()
        assert numbers(engine) == written
        assert engine.sql("SELECT n FROM w") == [{"n": len(written)}]

        (java,) = engine.java
        os.kill(java, signal.SIGKILL)
        assert engine.process is not None
        begin = time.monotonic()
        assert engine.process.wait(60) == 1
        assert "[SPARK_LOST]" in engine.output()
        assert "Exception in thread" not in engine.output()
        assert time.monotonic() - begin < 60

    with EngineProcess(tmp_path / "data") as again:  # it finds its meta store by itself
        assert numbers(again) == written
        assert again.sql("SELECT n FROM w") == [{"n": len(written)}]


def test_statement_that_runs_when_the_driver_s_jvm_dies_is_told_so_in_the_form_of_all_errors(tmp_path: Path) -> None:
    found: dict[str, SqlError] = {}
    endless = "SELECT count(*) AS n FROM range(10000000000) CROSS JOIN range(1000)"
    asked = {
        "query": endless,
        "write": f"INSERT INTO t {endless}",
        "wait": "CREATE MATERIALIZED VIEW v AS SELECT count(*) AS n FROM t a, t b, t c, t d; WAIT",
    }
    later = {"query after it": "SELECT * FROM t", "flush after it": "INSERT INTO t VALUES (-1); FLUSH"}

    def ask(kind: str) -> None:
        try:
            engine.sql({**asked, **later}[kind])
        except SqlError as error:  # any other answer is no JSON, or not of this form, and ends the thread
            found[kind] = error

    engine = EngineProcess(tmp_path / "data")
    with engine:
        engine.sql("CREATE TABLE t (id BIGINT PRIMARY KEY); INSERT INTO t SELECT id FROM range(2000); FLUSH")
        threads = {kind: threading.Thread(target=ask, args=(kind,), daemon=True) for kind in (*asked, *later)}
        for kind in asked:
            threads[kind].start()
        time.sleep(3)
        (java,) = engine.java
        os.kill(java, signal.SIGKILL)
        for kind in later:
            threads[kind].start()
        for thread in threads.values():
            thread.join(60)
        assert engine.process is not None and engine.process.wait(60) == 1
    assert {kind: error.code for kind, error in found.items() if kind in asked} == dict.fromkeys(asked, "SPARK_LOST")
    # These may meet an engine that is about to stop, or none.
    assert {error.code for kind, error in found.items() if kind in later} <= {"SPARK_LOST", "ENGINE_STOPPING"}


def test_sigterm_ends_an_engine_with_an_endless_statement_within_10_s(tmp_path: Path) -> None:
    engine = EngineProcess(tmp_path / "data", "--set", "barrier_interval_ms=200")
    with engine:
        engine.sql("CREATE TABLE kept (id INT PRIMARY KEY); INSERT INTO kept VALUES (1); FLUSH")
        endless = "INSERT INTO kept SELECT count(*) FROM range(10000000000) CROSS JOIN range(1000)"
        busy = threading.Thread(target=_ignore, args=(engine, endless))
        busy.start()
        time.sleep(2)
        assert engine.process is not None
        family = engine.children()
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(10) == 0
        wait_until(lambda: not [p for p in family if _alive(p)], timeout=10, what="the end of all processes")
        busy.join()


def _ignore(engine: EngineProcess, statement: str) -> None:
    with contextlib.suppress(Exception):
        engine.sql(statement)


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
