"""The process that Spark forks its Python workers from: `pyspark.daemon`, with what makes a task cheap.

Named by `spark.python.daemon.module`, so it runs wherever executors do. The first three cost more than most of our
tasks (measured: 0.28 s of CPU for a task that does nothing, 0.02 s with this), the last a tenth of a copy:

- Before each task PySpark invalidates the import caches, and Python then reads the directory of every archive on the
  path again; Spark puts a jar with thousands of entries there. Archives do not change under us, and new ones are
  opened afresh, so theirs need no reading.
- After each task it collects garbage, over all modules that were ever imported. What is imported here is frozen.
- Each worker would import the same modules by itself, and half a second of CPU goes into the first call of compiled
  code, whichever it is. What is imported and called here is there after the fork.
- Memory that is given back comes back as pages that the kernel clears one by one. A worker works in blocks of the same
  size again and again, and keeps what it had, for all of its threads.
"""

from __future__ import annotations

import ctypes
import gc
import os
import zipimport
from typing import Final

from headwater.storage.private import WORKERS_UMASK

_M_TRIM_THRESHOLD: Final = -1  # as <malloc.h> has them
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_KEPT_BYTES: Final = 256 << 20


def prepare() -> None:
    if (umask := os.environ.get(WORKERS_UMASK)) is not None:
        os.umask(int(umask, 8))
    _keep_memory()
    setattr(zipimport.zipimporter, "invalidate_caches", _unchanged)  # noqa: B010 - mypy's stub knows no assignment
    _import_common()
    gc.collect()
    gc.freeze()


def _keep_memory() -> None:
    """Before Arrow is imported, since it chooses its allocator then. Elsewhere than with glibc all stays as it is."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    libc.mallopt(_M_ARENA_MAX, 1)


def _unchanged(_: zipimport.zipimporter) -> None:
    return None


def _import_common() -> None:
    """What tasks use. None of it starts a thread: those would not survive the fork."""
    import numpy as np
    import pandas  # noqa: F401 - by pyarrow, when it first sees an array of numpy's
    import pyspark.worker  # noqa: F401

    import headwater.connectors.postgres.pgoutput
    import headwater.connectors.postgres.planner
    import headwater.model.fnv
    import headwater.spark.backfill
    import headwater.spark.capture
    import headwater.spark.compaction
    import headwater.spark.fetch
    import headwater.spark.row_writer
    import headwater.spark.write_rows  # noqa: F401
    from headwater.connectors.postgres.copytext import scan_copy_text
    from headwater.model.crc32 import add_slices, begun
    from headwater.storage import parquet

    parquet.prepare()
    scan_copy_text(b"1\n", 1)
    add_slices(begun(1), -1, np.zeros(1, np.uint8), np.zeros(2, np.int32))


if __name__ == "__main__":
    from pyspark.daemon import manager

    prepare()
    manager()
