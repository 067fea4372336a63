"""Reads of many small tables are one job; each fails, or is given up, by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.backfill.cdc.notes import Notes
from headwater.errors import DefiniteError, TransientError
from headwater.runtime.reads import Reads, ReadSlots
from headwater.spark.tasks import Task, run_guarded
from headwater.storage.files import DataDir


@dataclass(frozen=True)
class FakeRead:
    subject: int
    outcome: str = "rows"
    host: str = "db"

    @property
    def config(self) -> Any:
        return SimpleNamespace(hostname=self.host, port=5432)

    def run(self) -> Iterator[dict[str, Any]]:
        match self.outcome:
            case "definite":
                raise DefiniteError("VALUE_MALFORMED", "what")
            case "unreachable":
                error = TransientError("SOURCE_UNREACHABLE", "what")
                yield {"subject": self.subject, "transient": True, "error": error.as_dict()}
            case "crash":
                raise MemoryError
            case _:
                yield {"subject": self.subject, "segment": {"path": f"{self.subject}.parquet"}}


class World:
    """An engine of two slots, so one for reads; a job takes a turn of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[list[int]] = []
        self.forgotten: list[str] = []
        self.may_run = asyncio.Event()
        self.may_run.set()
        core: Any = SimpleNamespace(
            slots=2, spark=None, jobs=SimpleNamespace(run=self.run), forget_files=self.forgotten.extend
        )
        self.reads = Reads(core)
        monkeypatch.setattr("headwater.spark.tasks.run_tasks", self.run_tasks)

    async def run(self, pool: str, stage: str, work: Callable[[], Any], *, subject: int | None = None) -> Any:
        await self.may_run.wait()
        return work()

    def run_tasks(self, spark: object, groups: Sequence[Sequence[Task]]) -> list[dict[str, Any]]:
        tasks = [task for group in groups for task in group]
        self.jobs.append([r.subject for t in tasks for r in getattr(t, "reads", [t])])
        return [result for task in tasks for result in run_guarded(task)]

    async def read(self, *reads: FakeRead) -> list[Any]:
        asked = [self.reads.run_small(r.subject, [r]) for r in reads]
        return list(await asyncio.gather(*asked, return_exceptions=True))


def test_reads_of_many_small_tables_are_few_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        world = World(monkeypatch)
        found = await world.read(*(FakeRead(i) for i in range(100)))
        assert [r[0]["subject"] for r in found] == list(range(100))
        assert [len(job) for job in world.jobs] == [64, 36]

    asyncio.run(story())


def test_read_that_fails_fails_alone_also_if_it_takes_the_job_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        world = World(monkeypatch)
        found = await world.read(FakeRead(1), FakeRead(2, "definite"), FakeRead(3))
        assert isinstance(found[1], DefiniteError) and found[0] and found[2]
        assert len(world.jobs) == 1
        found = await world.read(FakeRead(1), FakeRead(2, "crash"), FakeRead(3))
        assert isinstance(found[1], Exception) and found[0][0]["subject"] == 1 and found[2][0]["subject"] == 3

    asyncio.run(story())


def test_source_that_one_read_could_not_reach_is_not_tried_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        world = World(monkeypatch)
        found = await world.read(FakeRead(1, "unreachable"), FakeRead(2), FakeRead(3, host="other"))
        assert isinstance(found[0], TransientError) and isinstance(found[1], TransientError)
        assert found[2][0]["subject"] == 3

    asyncio.run(story())


def test_read_that_nobody_waits_for_any_more_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        world = World(monkeypatch)
        world.may_run.clear()
        asked = [asyncio.create_task(world.reads.run_small(i, [FakeRead(i)])) for i in (1, 2)]
        await asyncio.sleep(0.01)
        asked[0].cancel()
        world.may_run.set()
        assert (await asked[1])[0]["subject"] == 2
        assert world.forgotten == ["1.parquet"]

    asyncio.run(story())


def test_further_readers_of_a_table_are_begun_only_where_they_need_not_wait() -> None:
    async def story() -> None:
        slots = ReadSlots(4)
        assert [slots.at_once(n) for n in (1, 2, 5)] == [1, 2, 3]
        async with slots.take(2):
            assert [slots.at_once(n) for n in (1, 2)] == [1, 1]
            async with slots.take(1):
                assert slots.at_once(2) == 1
        assert slots.at_once(2) == 2

    asyncio.run(story())


def test_of_several_faults_one_that_will_not_pass_by_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        world = World(monkeypatch)
        world.reads.slots = ReadSlots(3)
        monkeypatch.setattr("headwater.spark.backfill.ReadInTurn", lambda share, *_: share[0])
        with pytest.raises(DefiniteError):
            await world.reads.run(1, [FakeRead(1, "unreachable"), FakeRead(1, "definite")], at_once=2)
        with pytest.raises(TransientError):
            await world.reads.run(1, [FakeRead(1), FakeRead(1, "unreachable")], at_once=2)
        assert world.forgotten == ["1.parquet"]

    asyncio.run(story())


class Turns(World):
    """Jobs that get to one split each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        super().__init__(monkeypatch)
        self.reads.slots = ReadSlots(3)
        self.notes = Notes.fresh(DataDir(str(folder)))
        self.fails_at = 0

    def run_tasks(self, spark: object, groups: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        ((turn,),) = groups
        noted = turn.notes.read()
        for number in (read.split.split_id for read in turn.reads):
            if number not in noted and turn.notes.claim(number, turn.reader):
                self.jobs.append([number])
                if number == self.fails_at:
                    raise MemoryError
                turn.notes.write(number, {"split_id": number})
                break
        return []

    async def run_turns(self, splits: int, **more: Any) -> None:
        tasks = [SimpleNamespace(split=SimpleNamespace(split_id=n)) for n in range(1, splits + 1)]
        await self.reads.run(1, tasks, at_once=2, notes=self.notes, **more)


def test_a_reader_has_jobs_until_every_split_is_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def story() -> None:
        world = Turns(monkeypatch, tmp_path)
        await world.run_turns(7)
        assert sorted(n for job in world.jobs for n in job) == [1, 2, 3, 4, 5, 6, 7]
        assert sorted(world.notes.read()) == [1, 2, 3, 4, 5, 6, 7]

    asyncio.run(story())


def test_a_reader_ends_with_its_job_if_it_is_told_to_or_another_failed_or_somebody_waits_for_its_slot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def story() -> None:
        world = Turns(monkeypatch, tmp_path)
        await world.run_turns(7, go_on=lambda: False)
        assert len(world.jobs) == 2

        world = Turns(monkeypatch, tmp_path)
        world.fails_at = 2
        with pytest.raises(TransientError):
            await world.run_turns(50)
        assert len(world.jobs) < 5

        world = Turns(monkeypatch, tmp_path)
        async with world.reads.slots.take(1):
            running = asyncio.create_task(world.run_turns(40))
            while len(world.jobs) < 5:
                await asyncio.sleep(0.001)
        await running  # with one reader, where there may be two now
        assert 5 <= len(world.jobs) < 40

        world = Turns(monkeypatch, tmp_path)
        world.may_run.clear()
        running = asyncio.create_task(world.run_turns(7))
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(world.reads.slots.take(2).__aenter__())
        await asyncio.sleep(0.01)
        world.may_run.set()
        await running
        assert len(world.jobs) == 2 and await asyncio.wait_for(waiting, 1) is None

    asyncio.run(story())


async def _resized() -> None:
    slots = ReadSlots(3)
    async with slots.take(2):
        waiting = asyncio.ensure_future(_taken(slots, 2))
        await asyncio.sleep(0)
        assert not waiting.done()
        slots.resize(5)  # two executors more
        assert await asyncio.wait_for(waiting, 5) == 4
        slots.resize(2)  # and they are gone, with what ran there still to be given back
        assert slots.total == 1
        assert slots.at_once(9) == 1
    async with slots.take(9):
        assert not slots.spare
    assert slots._free == slots.total == 1


async def _taken(slots: ReadSlots, count: int) -> int:
    async with slots.take(count):
        return slots.total


def test_reads_follow_the_slots_that_come_and_go() -> None:
    asyncio.run(_resized())
