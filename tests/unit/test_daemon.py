"""What Spark's Python workers are forked from."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

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
