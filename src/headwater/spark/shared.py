"""Asks Spark's executors whether they share the data directory: one job, a task for each of their slots.

A task reads the file that the engine has written and writes one that the engine reads (`storage/shared.py`), and then
keeps its slot for a moment, so that the others go to the other executors. Nothing of Spark's public interface lists
executors; with all slots free Spark gives a task to each at once.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from headwater.spark.tasks import run_tasks
from headwater.storage.files import DataDir
from headwater.storage.shared import answer, not_shared, take_answer

HOLD_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class SeeDirectory:
    """Without a marked `DataDir`, which would refuse itself: this task is to tell what it sees."""

    root: str
    mark: str
    name: str
    subject: int = 0

    def run(self) -> Iterator[dict[str, Any]]:
        why = ""
        try:
            answer(self.root, self.mark, self.name)
        except OSError as error:
            why = os.strerror(error.errno or 0).lower()
        except ValueError:
            why = "it has the mark of another engine"
        time.sleep(HOLD_S)
        yield {"host": socket.gethostname(), "name": self.name, "why": why}


def require_shared(spark: SparkSession, data_dir: DataDir, slots: int) -> None:
    """TransientError DATA_DIRECTORY_NOT_SHARED with the first host that does not."""
    tasks = [SeeDirectory(data_dir.root, data_dir.mark, uuid.uuid4().hex) for _ in range(slots)]
    seen = run_tasks(spark, [[task] for task in tasks])
    arrived = {r["name"]: take_answer(Path(data_dir.root), data_dir.mark, r["name"]) for r in seen}
    for result in seen:
        if result["why"] or not arrived[result["name"]]:
            why = result["why"] or "what it writes there does not arrive at the engine"
            raise not_shared(result["host"], data_dir.root, why)
