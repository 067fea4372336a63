"""Running Spark work from the event loop: in threads, in a scheduler pool, counted by the jobs that Spark ran."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Container
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, Final, TypeVar

from pyspark.sql import SparkSession

from headwater.errors import DefiniteError
from headwater.spark.release import Release

T = TypeVar("T")

# Threads per pool bound how much of it runs at once: a big copy must not starve the live stream. Sinks have more,
# because theirs mostly wait for a target, and one that does not answer must not hold the others up. Each reader of a
# copy has jobs of its own; how many there are is bounded by Spark's slots (`runtime/reads.py`: `ReadSlots`).
POOLS: Final[dict[str, int]] = {"capture": 2, "view": 4, "sink": 24, "backfill": 32, "compaction": 1, "query": 8}
CANCEL_AGAIN_S: Final = 0.5
OUT_OF_MEMORY: Final = 52  # the exit code that Spark gives to a JVM which it ends for that


class JobRunner:
    """Runs functions that use the session; `count(stage, jobs)` is told how many Spark jobs each one was."""

    def __init__(
        self,
        spark: SparkSession,
        count: Callable[[str, int], None],
        failed: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        """`failed`: told of each error, in whichever thread it was met."""
        self.spark = spark
        self._count = count
        self._failed = failed
        self._ids = itertools.count(1)
        self._threads = {name: ThreadPoolExecutor(size, thread_name_prefix=name) for name, size in POOLS.items()}
        self._running: dict[str, str] = {}  # groups and their pools
        self.release = Release()

    async def run(
        self, pool: str, stage: str, work: Callable[[], T], *, subject: int | None = None, ends: bool = False
    ) -> T:
        """`subject`: whose work it is, for `cancel`; not counted apart, or every table would be a metric of its own.
        `ends`: with whoever waits for it, if that is cancelled; else the work goes on without them."""
        group, left = self._group(stage, subject), threading.Event()
        loop = asyncio.get_running_loop()
        waiting = loop.run_in_executor(self._threads[pool], self._run, pool, stage, work, group, left)
        try:
            return await waiting
        except asyncio.CancelledError:
            if ends:
                left.set()
                threading.Thread(target=self._end, args=(group,), name=f"end {group}", daemon=True).start()
            raise

    def run_blocking(self, pool: str, stage: str, work: Callable[[], T], subject: int | None = None) -> T:
        return self._run(pool, stage, work, self._group(stage, subject), threading.Event())

    def _group(self, stage: str, subject: int | None) -> str:
        of = "" if subject is None else f"{subject}-"
        return f"headwater-{stage}-{of}{next(self._ids)}"

    def _end(self, group: str) -> None:
        """Cancels what a group runs until it runs nothing: it may be between two jobs, or about to begin its first."""
        context = self._context()
        while context is not None and group in self._running:
            with contextlib.suppress(Exception):  # Spark itself is gone: then so is the job
                context.cancelJobGroup(group)
            time.sleep(CANCEL_AGAIN_S)

    def _run(self, pool: str, stage: str, work: Callable[[], T], group: str, left: threading.Event) -> T:
        """`left`: whoever wanted it has gone before it began."""
        self._running[group] = pool
        try:
            if left.is_set():
                raise CancelledError
            self._join_group(group, pool, stage)
            return work()
        except Exception as error:
            self._failed(error)
            raise
        finally:
            del self._running[group]
            self._count(stage, self._jobs_of(group))
            self.release.job_ended()

    def _join_group(self, group: str, pool: str, stage: str) -> None:
        context = self._context()
        if context is not None:
            context.setJobGroup(group, stage, interruptOnCancel=True)
            context.setLocalProperty("spark.scheduler.pool", pool)
            # Without these Spark walks the stack for every RDD that it makes, a third of the start of a small job.
            context.setLocalProperty("callSite.short", stage)
            context.setLocalProperty("callSite.long", stage)

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

    def slots(self) -> int:
        """How many tasks run at once: on a cluster the cores of the executors that there are, and 2 while there are
        none or one."""
        context = self._context()
        return max(1, context.defaultParallelism) if context is not None else 2

    def executors(self) -> frozenset[str]:
        """The driver and the executors that there are, by the addresses of their blocks.

        Spark has no public way to learn of them from Python: its status tracker does not list them, and of none, one or
        two cores `defaultParallelism` says 2. So this one question goes to the JVM's own context.
        """
        context = self._context()
        if context is None:
            return frozenset()
        return frozenset(str(context._jsc.sc().getExecutorMemoryStatus().keys().mkString(" ")).split())

    def tasks_done(self, pools: Container[str]) -> int:
        """How many tasks of the jobs that run in these pools have come to their end. It asks the JVM, and so may hang
        with it."""
        context = self._context()
        if context is None:
            return 0
        tracker = context.statusTracker()
        stages = set[int]()
        for group in [group for group, pool in list(self._running.items()) if pool in pools]:
            infos = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
            stages.update(stage for info in infos if info is not None for stage in info.stageIds)
        tracker.getActiveJobsIds()  # so that the JVM is asked in any case
        found = [tracker.getStageInfo(stage) for stage in stages]
        return sum(info.numCompletedTasks for info in found if info is not None)

    def alive(self) -> bool:
        """Whether the driver's JVM is there; it may have been stopped, and then does not answer."""
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
