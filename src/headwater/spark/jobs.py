"""Running Spark work from the event loop: in threads, in a scheduler pool, counted by the jobs that Spark ran."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from pyspark.sql import SparkSession

from headwater.errors import DefiniteError

T = TypeVar("T")

# Threads per pool bound how much of it runs at once: a big copy must not starve the live stream. Sinks have more,
# because theirs mostly wait for a target, and one that does not answer must not hold the others up. Each reader of a
# copy has jobs of its own; how many there are is bounded by Spark's slots (`runtime/reads.py`: `ReadSlots`).
POOLS: Final[dict[str, int]] = {"capture": 2, "view": 4, "sink": 24, "backfill": 32, "compaction": 1, "query": 8}
OUT_OF_MEMORY: Final = 52  # the exit code that Spark gives to a JVM which it ends for that


class JobRunner:
    """Runs functions that use the session; `count(stage, jobs)` is told how many Spark jobs each one was."""

    def __init__(self, spark: SparkSession, count: Callable[[str, int], None]) -> None:
        self.spark = spark
        self._count = count
        self._ids = itertools.count(1)
        self._threads = {name: ThreadPoolExecutor(size, thread_name_prefix=name) for name, size in POOLS.items()}
        self._running: set[str] = set()

    async def run(self, pool: str, stage: str, work: Callable[[], T], *, subject: int | None = None) -> T:
        """`subject`: whose work it is, for `cancel`; not counted apart, or every table would be a metric of its own."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads[pool], self.run_blocking, pool, stage, work, subject)

    def run_blocking(self, pool: str, stage: str, work: Callable[[], T], subject: int | None = None) -> T:
        of = "" if subject is None else f"{subject}-"
        group = f"headwater-{stage}-{of}{next(self._ids)}"
        context = self._context()
        if context is not None:
            context.setJobGroup(group, stage, interruptOnCancel=True)
            context.setLocalProperty("spark.scheduler.pool", pool)
            # Without these Spark walks the stack for every RDD that it makes, a third of the start of a small job.
            context.setLocalProperty("callSite.short", stage)
            context.setLocalProperty("callSite.long", stage)
        self._running.add(group)
        try:
            return work()
        finally:
            self._running.discard(group)
            self._count(stage, self._jobs_of(group))

    def _context(self) -> Any:
        """The SparkContext, where the session has one (Spark Connect has not)."""
        return getattr(self.spark, "_sc", None)

    def _jobs_of(self, group: str) -> int:
        context = self._context()
        if context is None:
            return 1
        try:
            return len(context.statusTracker().getJobIdsForGroup(group))
        except Exception:  # Spark itself is gone: whoever runs work next is told
            return 0

    def cancel(self, prefix: str, *, but: tuple[str, ...] = ()) -> None:
        """Cancel what runs for a stage, or for one subject of it (`stage-subject-`); not for the stages of `but`."""
        context = self._context()
        for group in list(self._running):
            kept = group.startswith(tuple(f"headwater-{stage}-" for stage in but))
            if context is not None and group.startswith(f"headwater-{prefix}") and not kept:
                context.cancelJobGroup(group)

    def alive(self) -> bool:
        """Whether the driver's JVM still answers."""
        return self._exit_code() is None

    def lost(self) -> DefiniteError:
        """What there is to say of a driver's JVM that is gone."""
        if self._exit_code() == OUT_OF_MEMORY:
            return DefiniteError(
                "SPARK_OUT_OF_MEMORY",
                "Spark's driver process had too little memory and has ended",
                hint="start the engine again with more: HEADWATER_DRIVER_MEMORY=4g; nothing that was committed is lost",
            )
        return DefiniteError("SPARK_LOST", "Spark's driver process is gone", hint="start the engine again")

    def _exit_code(self) -> int | None:
        context = self._context()
        process = getattr(context._gateway, "proc", None) if context is not None else None
        code: int | None = process.poll() if process is not None else None
        return code

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
