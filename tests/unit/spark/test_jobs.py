"""What runs on Spark is counted by stage and cancelled by stage and subject."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.spark.jobs import POOLS, JobRunner


def test_reads_of_all_tables_are_one_stage_and_those_of_one_can_be_cancelled() -> None:
    counted: list[tuple[str, int]] = []
    cancelled: list[str] = []
    context = SimpleNamespace(
        setJobGroup=lambda *_, **__: None,
        setLocalProperty=lambda *_: None,
        cancelJobGroup=cancelled.append,
        statusTracker=lambda: SimpleNamespace(getJobIdsForGroup=lambda _: [1]),
    )
    spark: Any = SimpleNamespace(_sc=context)
    runner = JobRunner(spark, lambda stage, jobs: counted.append((stage, jobs)))

    def inside() -> None:
        runner.cancel("backfill-7-")

    runner.run_blocking("backfill", "backfill", inside, 7)
    runner.run_blocking("backfill", "backfill", inside, 71)
    for stage in ("table", "view", "tables", "query"):
        runner.run_blocking("query", stage, lambda: runner.cancel("", but=("table", "view")))
    runner.close()
    assert cancelled == ["headwater-backfill-7-1", "headwater-tables-5", "headwater-query-6"]
    assert counted[:2] == [("backfill", 1), ("backfill", 1)]


@pytest.mark.parametrize(("exit_code", "code"), [(52, "SPARK_OUT_OF_MEMORY"), (-9, "SPARK_LOST"), (1, "SPARK_LOST")])
def test_a_driver_that_had_too_little_memory_is_told_from_one_that_is_gone(exit_code: int, code: str) -> None:
    codes: list[int | None] = [None, exit_code, exit_code]
    process = SimpleNamespace(poll=lambda: codes.pop(0))
    spark: Any = SimpleNamespace(_sc=SimpleNamespace(_gateway=SimpleNamespace(proc=process)))
    runner = JobRunner(spark, lambda *_: None)
    assert runner.alive()
    assert not runner.alive()
    assert runner.lost().code == code
    runner.close()


class Context:
    """As much of a SparkContext as a JobRunner uses; a group that is cancelled ends its jobs."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def setJobGroup(self, group: str, stage: str, interruptOnCancel: bool) -> None:
        assert interruptOnCancel

    def setLocalProperty(self, name: str, value: str) -> None: ...

    def cancelJobGroup(self, group: str) -> None:
        assert group.startswith("headwater-query-")
        self.cancelled.set()

    def statusTracker(self) -> Any:
        raise RuntimeError("not asked for here")


class Session:
    def __init__(self) -> None:
        self._sc = Context()


def _runner() -> tuple[JobRunner, Context]:
    session = Session()
    return JobRunner(session, lambda stage, count: None), session._sc  # type: ignore[arg-type]


async def _until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("ends", [True, False])
def test_only_work_that_ends_with_its_caller_is_cancelled(ends: bool) -> None:
    async def body() -> None:
        runner, context = _runner()
        done = threading.Event()

        def work() -> None:
            context.cancelled.wait(1.5)
            done.set()

        waiting = asyncio.create_task(runner.run("query", "query", work, ends=ends))
        await _until(lambda: runner._running)
        waiting.cancel()
        begin = time.monotonic()
        await _until(done.is_set)
        assert context.cancelled.is_set() is ends
        assert (time.monotonic() - begin < 1) is ends
        await _until(lambda: not runner._running)

    asyncio.run(body())


def test_work_that_waits_for_its_turn_never_begins_without_its_caller() -> None:
    async def body() -> None:
        runner, context = _runner()
        begun = list[int]()

        def work(number: int) -> None:
            begun.append(number)
            context.cancelled.wait(5)

        size = POOLS["query"]
        tasks = [asyncio.create_task(runner.run("query", "query", lambda n=n: work(n), ends=True)) for n in range(size)]
        await _until(lambda: len(begun) == size)
        last = asyncio.create_task(runner.run("query", "query", lambda: work(size), ends=True))
        await asyncio.sleep(0.05)
        last.cancel()
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await _until(lambda: not runner._running)
        assert size not in begun

    asyncio.run(body())
