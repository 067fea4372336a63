"""What Spark's Python workers are forked from."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from headwater.spark import daemon

PROGRAM = """
import gc, importlib, sys, zipimport
from headwater.spark.daemon import prepare
sys.path.append(sys.argv[1])
import inside
before = zipimport._zip_directory_cache[sys.argv[1]]
prepare()
importlib.invalidate_caches()
assert zipimport._zip_directory_cache[sys.argv[1]] is before, "the archive was read again"
assert gc.get_freeze_count() > 10_000
assert "headwater.spark.capture" in sys.modules
sys.path.append(sys.argv[2])
import later
"""


def test_archives_are_not_read_again_for_each_task_but_new_ones_are_found(tmp_path: Path) -> None:
    for name in ("inside", "later"):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            archive.writestr(f"{name}.py", "")
    archives = [str(tmp_path / f"{name}.zip") for name in ("inside", "later")]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *archives], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


KEEPS = """
import sys
import pyarrow as pa
from headwater.spark import daemon
daemon.prepare()

def task(sock, authenticated):
    blocks = [pa.allocate_buffer(1 << 20) for _ in range(250)]
    for block in blocks:  # touched, as a task's are
        memoryview(block).cast("B")[:] = bytes(1 << 20)
    return 0

before = daemon._own_memory()
daemon.sparing(task)(None, True)
spared = daemon._own_memory() - before
task(None, True)
kept = daemon._own_memory() - before
print(kept >> 20, spared >> 20, daemon.share() >> 20)
"""


def test_a_worker_keeps_no_more_than_its_share_between_two_tasks() -> None:
    done = subprocess.run([sys.executable, "-c", KEEPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept, spared, share = map(int, done.stdout.split())
    assert kept > 200  # what the allocator keeps by itself, for the rest of a task
    assert spared <= share


def test_all_workers_together_keep_a_32nd_of_the_machine_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for memory in (8 << 30, 64 << 30):
        monkeypatch.setattr(daemon, "machine_memory", lambda size=memory: size)
        assert daemon.share() * daemon.most_idle_workers() <= max(memory // 32, daemon.most_idle_workers() * (16 << 20))
