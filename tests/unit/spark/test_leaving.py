"""Work for Spark ends with whoever waits for it, if it is of that kind, and goes on without them if not."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from headwater.spark.jobs import POOLS, JobRunner


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
