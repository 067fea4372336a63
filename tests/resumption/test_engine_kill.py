"""kill -9 of the engine at random moments under load, and a full disk: what FLUSH acknowledged is there.

The moments come from a seed, which a failing test prints; HEADWATER_KILL_SEED plays it again.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from engine_process import EngineProcess, SqlError, running, wait_until

pytestmark = pytest.mark.spark
ROWS_PER_INSERT = 3
JAVA_GONE_S = 30.0


class Writer(threading.Thread):
    """INSERTs of three rows each into two tables, and a FLUSH now and then; keeps account of what was acknowledged."""

    def __init__(self, engine: EngineProcess, seed: int, first: int) -> None:
        super().__init__(daemon=True)
        self.engine, self.random, self.number = engine, random.Random(seed), first
        self.tried: list[int] = []
        self.flushed: list[int] = []
        self.stopping = threading.Event()

    def run(self) -> None:
        with contextlib.suppress(httpx.HTTPError):  # the engine is gone: that is the point
            while not self.stopping.is_set():
                done = []
                for _ in range(self.random.randint(1, 4)):
                    self.number += 1
                    self.tried.append(self.number)
                    self._insert(self.number)
                    done.append(self.number)
                self.engine.sql("FLUSH")
                self.flushed += done

    def _insert(self, n: int) -> None:
        rows = ", ".join(f"({n * 10 + i}, {n})" for i in range(ROWS_PER_INSERT))
        self.engine.sql(f"INSERT INTO keyed VALUES {rows}")
        if n % 5 == 0:
            self.engine.sql(f"INSERT INTO plain SELECT {n * 10} + id, {n} FROM range({ROWS_PER_INSERT})")
        else:
            self.engine.sql(f"INSERT INTO plain VALUES {rows}")


def check(engine: EngineProcess, flushed: set[int], tried: set[int]) -> None:
    """Every flushed INSERT is there, once; every other one is there as a whole or not at all."""
    for table in ("keyed", "plain"):
        rows = engine.sql(f"SELECT id, batch FROM {table}")
        assert len({r["id"] for r in rows}) == len(rows), f"{table} has a row twice"
        sizes = Counter(r["batch"] for r in rows)
        assert set(sizes.values()) <= {ROWS_PER_INSERT}, f"{table} has half an INSERT"
        assert flushed <= set(sizes), f"{table} lost what FLUSH had acknowledged"
        assert set(sizes) <= tried


def check_files(engine: EngineProcess) -> None:
    """No file that no epoch refers to."""
    known = {r["path"] for r in engine.sql("SELECT path FROM hw_catalog.hw_segments")}
    tables = engine.data_dir / "tables"
    found = {str(p.relative_to(engine.data_dir)) for p in tables.rglob("*") if p.is_file()}
    assert found - known == set()


def test_kill_9_under_load_loses_nothing_that_flush_acknowledged_and_leaves_nothing_half(tmp_path: Path) -> None:
    seed = int(os.environ.get("HEADWATER_KILL_SEED") or random.SystemRandom().randrange(10**6))
    print(f"HEADWATER_KILL_SEED={seed}")
    moments = random.Random(seed)
    engine = EngineProcess(tmp_path / "data", "--set", "barrier_interval_ms=50").start()
    flushed: set[int] = set()
    tried: set[int] = set()
    try:
        engine.sql(
            "CREATE TABLE keyed (id BIGINT PRIMARY KEY, batch BIGINT); CREATE TABLE plain (id BIGINT, batch BIGINT)"
        )
        for round_ in range(2):
            writer = Writer(engine, seed + round_, max(tried, default=0))
            writer.start()
            wait_until(lambda w=writer: len(w.flushed) >= 3, 120, "the first flushes")
            time.sleep(moments.uniform(0, 3))
            java = engine.java
            assert java
            engine.kill()
            writer.join(30)
            flushed |= set(writer.flushed)
            tried |= set(writer.tried)
            wait_until(lambda j=java: not _alive(j), JAVA_GONE_S, "the end of Java")
            engine.start()
            check(engine, flushed, tried)
            check_files(engine)
        engine.sql("INSERT INTO keyed VALUES (1, 0), (2, 0), (3, 0); FLUSH")
        assert engine.sql("SELECT count(*) AS n FROM keyed WHERE batch = 0") == [{"n": 3}]
    finally:
        engine.stop()


def _alive(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
    return found


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a file system of its own needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_named_and_when_there_is_room_again_nothing_is_lost(small_disk: Path) -> None:
    with running(small_disk / "data", "--set", "barrier_interval_ms=200") as engine:
        engine.sql("CREATE TABLE kept (id BIGINT PRIMARY KEY, body STRING)")
        engine.sql("INSERT INTO kept SELECT id, 'before' FROM range(100); FLUSH")
        filler = small_disk / "filler"
        fill(filler)
        with pytest.raises(SqlError) as caught:
            write_until_refused(engine)
        assert caught.value.code == "DISK_FULL"
        assert "space" in caught.value.hint
        assert engine.http.get("/healthz").status_code == 200
        # Nothing can be written, not even this error: it is seen all the same.
        wait_until(lambda: "DISK_FULL" in shown_errors(engine), 60, "DISK_FULL in status")
        hints = engine.sql("SELECT DISTINCT hint FROM hw_catalog.hw_errors WHERE code = 'DISK_FULL'")
        assert all("space" in row["hint"] for row in hints) and hints
        filler.unlink()
        deadline = time.monotonic() + 60
        while True:
            try:
                engine.sql("INSERT INTO kept VALUES (-1, 'after'); FLUSH")
                break
            except SqlError:
                assert time.monotonic() < deadline
                time.sleep(0.5)
        assert engine.sql("SELECT count(*) AS n FROM kept WHERE body IN ('before', 'after')") == [{"n": 101}]
        assert engine.sql("SELECT count(*) AS n FROM hw_catalog.hw_errors WHERE code <> 'DISK_FULL'") == [{"n": 0}]
        check_files_settle(engine)


def shown_errors(engine: EngineProcess) -> set[str]:
    return {error["code"] for error in engine.http.get("/status").json()["errors"]}


def write_until_refused(engine: EngineProcess) -> None:
    for i in range(1, 50):
        engine.sql(f"INSERT INTO kept SELECT {1000 * i} + id, uuid() FROM range(500); FLUSH")


def check_files_settle(engine: EngineProcess) -> None:
    """What the failed writes left behind goes away."""

    def clean() -> bool:
        try:
            check_files(engine)
        except AssertionError:
            return False
        return True

    wait_until(clean, 30, "the removal of orphans")


def fill(filler: Path) -> None:
    """Take all the room."""
    block = b"\0" * 65536
    with filler.open("wb", buffering=0) as out, contextlib.suppress(OSError):
        while True:
            out.write(block)
