"""The process that Spark forks its Python workers from: `pyspark.daemon`, with what makes a task cheap.

Named by `spark.python.daemon.module`, so it runs wherever executors do. Three things cost more than most of our tasks
(measured: 0.28 s of CPU for a task that does nothing, 0.02 s with this):

- Before each task PySpark invalidates the import caches, and Python then reads the directory of every archive on the
  path again; Spark puts a jar with thousands of entries there. Archives do not change under us, and new ones are
  opened afresh, so theirs need no reading.
- After each task it collects garbage, over all modules that were ever imported. What is imported here is frozen.
- Each worker would import the same modules by itself, and half a second of CPU goes into the first call of compiled
  code, whichever it is. What is imported and called here is there after the fork.
"""

from __future__ import annotations

import gc
import zipimport


def prepare() -> None:
    setattr(zipimport.zipimporter, "invalidate_caches", _unchanged)  # noqa: B010 - mypy's stub knows no assignment
    _import_common()
    gc.collect()
    gc.freeze()


def _unchanged(_: zipimport.zipimporter) -> None:
    return None


def _import_common() -> None:
    """What tasks use. None of it starts a thread: those would not survive the fork."""
    import pyspark.worker  # noqa: F401

    import headwater.connectors.postgres.copytext
    import headwater.connectors.postgres.pgoutput
    import headwater.connectors.postgres.planner
    import headwater.spark.backfill
    import headwater.spark.capture
    import headwater.spark.write_rows

    headwater.connectors.postgres.copytext.scan_copy_text(b"1\n", 1)


if __name__ == "__main__":
    from pyspark.daemon import manager

    prepare()
    manager()
