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
  size again and again, and keeps what it had, for all of its threads, until its task ends: a worker between two tasks
  keeps no more than its share of what all of them may keep (docs/operating.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import zipimport
from collections.abc import Callable
from typing import Any, Final

from headwater.storage.private import WORKERS_UMASK

_M_TRIM_THRESHOLD: Final = -1  # as <malloc.h> has them
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_KEPT_BYTES: Final = 256 << 20  # during a task
_FOR_ALL_WORKERS: Final = 32  # of the machine's memory a 32nd is kept by all workers together between tasks
_LEAST_SHARE: Final = 16 << 20  # as much as small tasks need: giving it back would cost each of them more than it saves
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def most_idle_workers() -> int:
    """Of one machine. A task may have two at once: one that reads, and one that writes what Spark made of it."""
    return 2 * ((os.cpu_count() or 2) + 2)


def share() -> int:
    """Bytes that a worker keeps between two tasks, beside what it has in common with the others."""
    return max(_LEAST_SHARE, min(_KEPT_BYTES, machine_memory() // _FOR_ALL_WORKERS // most_idle_workers()))


def machine_memory() -> int:
    """The machine's, or what a container may have of it."""
    memory = os.sysconf("SC_PHYS_PAGES") * _PAGE
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max") as limit:
        memory = min(memory, int(limit.read()))
    return memory


def sparing(worker: Callable[[Any, bool], int]) -> Callable[[Any, bool], int]:
    """PySpark's function for one task, after which a worker gives back what is beyond its share.

    Only then: the answer is with Spark already, and nobody waits.
    """
    libc, limit, before = ctypes.CDLL(None), share(), -1

    def spare(sock: Any, authenticated: bool) -> int:
        nonlocal before
        if before < 0:  # after the fork
            before = _own_memory()
        code = worker(sock, authenticated)
        if _own_memory() - before > limit:
            _give_back(libc)
        return code

    return spare


def _own_memory() -> int:
    """Resident and not a file's."""
    with open("/proc/self/statm", "rb") as statm:
        _, resident, shared, *_ = statm.read().split()
    return (int(resident) - int(shared)) * _PAGE


def _give_back(libc: Any) -> None:
    import pyarrow as pa

    gc.collect()  # what the task left in cycles holds memory, too
    pa.default_memory_pool().release_unused()
    libc.malloc_trim(0)


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
    from headwater.model.crc32 import add_slices, initial
    from headwater.storage import parquet

    parquet.prepare()
    scan_copy_text(b"1\n", 1)
    add_slices(initial(1), -1, np.zeros(1, np.uint8), np.zeros(2, np.int32))


if __name__ == "__main__":
    from pyspark import daemon

    prepare()
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        setattr(daemon, "worker", sparing(daemon.worker))  # noqa: B010 - mypy's stub knows no assignment
    daemon.manager()
