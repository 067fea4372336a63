"""Who holds a lock: the living process, and whether it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.errors import HeadwaterError, TransientError, UsageError
from headwater.server.endpoint import Endpoint, lock_directory, write_endpoint
from headwater.storage import connection
from headwater.storage.holders import living, lock_holder
from headwater.storage.location import claim_meta_store
from headwater.storage.meta import MetaStore

LOCK = """
import sys
from pathlib import Path
from headwater.server.endpoint import lock_directory
kept = lock_directory(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""
WRITE = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1] + "/meta.db", isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")


class Other:
    """A process that holds something of a directory until it is ended."""

    def __init__(self, program: str, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "locked\n"

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def other(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Other]:
    found = Other(request.param, tmp_path)
    yield found
    found.end()


@pytest.mark.parametrize("other", [LOCK], indirect=True)
def test_a_second_engine_is_told_the_living_process_that_holds_the_directory(tmp_path: Path, other: Other) -> None:
    # A file that a killed engine left, with the number of a process that is gone: the one that ends here.
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write_endpoint(tmp_path, Endpoint("http://127.0.0.1:1", "t", gone.pid, 1))
    with pytest.raises(UsageError, match="ENGINE_RUNNING") as caught:
        lock_directory(tmp_path)
    assert f"process {other.pid} (python" in caught.value.detail and "stopped" not in caught.value.detail
    os.kill(other.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, other.pid, os.WSTOPPED)
    with pytest.raises(UsageError, match="ENGINE_RUNNING") as caught:
        lock_directory(tmp_path)
    assert "stopped" in caught.value.detail and f"kill -CONT {other.pid}" in caught.value.hint


@pytest.mark.parametrize("other", [LOCK], indirect=True)
def test_the_locks_file_names_the_holder_where_the_system_cannot_be_asked(
    tmp_path: Path, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.storage.holders.LOCKS", tmp_path / "none")
    with pytest.raises(UsageError, match="ENGINE_RUNNING") as caught:
        lock_directory(tmp_path)
    assert f"process {other.pid}" in caught.value.detail
    (tmp_path / "engine.lock").write_text("far-away 4711\n")
    with pytest.raises(UsageError, match="ENGINE_RUNNING") as caught:
        lock_directory(tmp_path)
    assert caught.value.detail == "process 4711 on host far-away"


def test_a_process_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, done.pid, os.WEXITED | os.WNOWAIT)
    assert living(done.pid) is None  # it has ended, and nobody has asked how
    done.wait()
    assert living(done.pid) is None
    (tmp_path / "engine.lock").touch()
    assert lock_holder(tmp_path / "engine.lock", tmp_path / "none") is None


@pytest.mark.parametrize("stopped", [False, True])
def test_a_meta_store_that_another_process_holds_says_so_and_which(
    tmp_path: Path, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BUSY_S", 0.2)
    store = MetaStore(claim_meta_store(tmp_path, None))
    other = Other(WRITE, tmp_path)
    try:
        if stopped:
            os.kill(other.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, other.pid, os.WSTOPPED)
        with pytest.raises(HeadwaterError) as caught:
            store.acquire()
    finally:
        other.end()
    assert isinstance(caught.value, TransientError) and caught.value.code == "META_STORE_LOCKED"
    assert f"process {other.pid}" in caught.value.detail and "disk" not in caught.value.render()
    assert (f"kill -CONT {other.pid}" in caught.value.hint) is stopped
    store.acquire()
    store.close()
