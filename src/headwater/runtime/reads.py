"""Reads at the source as Spark jobs: how many run at once, and small ones of many tables together in one job.

    reads of a large table ─► a job for each of its readers, which take from the same splits
    reads of whole small tables ─► gather while the slots are taken ─► one job for all of them

A job costs Spark as much as reading 100,000 rows. Fifty tables of a few rows are one job, and one connection at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headwater.backfill.cdc.state import ReadPaused
from headwater.errors import DefiniteError, HeadwaterError, TransientError

if TYPE_CHECKING:
    from headwater.backfill.cdc.notes import Notes
    from headwater.engine import EngineCore
    from headwater.spark.backfill import ReadInTurn

Result = dict[str, Any]

# A job has its slot to itself until it ends: other tables, and another parallelism, wait so long at the most.
JOB_S: Final = 10.0
SMALL_BYTES: Final = 1 << 20  # of a table that shares its job: some 10,000 rows, read in a tenth of a second
MOST_HELPED: Final = 64  # splits of others that a reader is told of: it is told of them with its own, in each job
MOST_TOGETHER: Final = 64  # reads of one job: their results come at its end, after a few seconds
SMALL_IN_TURN: Final = 8  # reads that one Spark task makes one after the other before another task is worth its start


class ReadSlots:
    """How many reads may be in Spark's workers at once, over all tables: always one less than it has slots.

    A read that is held up by a rate limit sits in its slot. The live stream of all tables needs one that is free.
    """

    def __init__(self, slots: int) -> None:
        self.total = max(1, slots - 1)
        self._free = self.total
        self._waiting = 0
        self._changed = asyncio.Condition()
        self._waking: asyncio.Future[None] | None = None

    def resize(self, slots: int) -> None:
        """Spark has that many now. Reads that are under way keep theirs: of fewer there may be less than none free."""
        total = max(1, slots - 1)
        self._free += total - self.total
        self.total = total
        self._waking = asyncio.ensure_future(self._wake())

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    @property
    def wanted(self) -> bool:
        """Somebody waits for a slot: whoever has had one for long does not take it again at once."""
        return self._waiting > 0

    @property
    def spare(self) -> bool:
        """More than one slot is free, for whoever has just given one back."""
        return self._free > 1 and not self.wanted

    def at_once(self, wanted: int) -> int:
        """How many readers are begun: one in any case, others only if they need not wait, since one that waits would
        hold up those that are done."""
        return max(1, min(wanted, 0 if self.wanted else self._free))

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[None]:
        taken = 0
        self._waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._free >= min(count, self.total))
                taken = min(count, self.total)
                self._free -= taken
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._free += taken
            async with self._changed:
                self._changed.notify_all()


@dataclass(slots=True)
class _Small:
    """The reads of one small table, which wait for a job; whoever asked may have gone meanwhile."""

    table_id: int
    tasks: list[Any]
    done: asyncio.Future[list[Result]]


class Reads:
    """All reads of an engine. Whoever is cancelled while it waits gets nothing, and leaves no file."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.slots = ReadSlots(core.slots)
        self._small: list[_Small] = []
        self._serving: asyncio.Task[None] | None = None

    async def run_small(self, table_id: int, tasks: list[Any]) -> list[Result]:
        """The results of a small table's reads, in a job with those of others."""
        return self._checked([await self._with_others(table_id, tasks)], noted=False)

    async def run(
        self,
        table_id: int,
        tasks: list[Any],
        *,
        at_once: int = 1,
        notes: Notes | None = None,
        go_on: Callable[[], bool] = lambda: True,
    ) -> list[Result]:
        """The results of one table's reads, by up to that many readers `at_once`; an error is raised as what it is, one
        that will not pass by itself before others.

        With `notes` a reader has one job after the other, as long as it is to `go_on`, nobody waits for a slot, none
        that was not to be had becomes free, and no reader has failed. Then all end with their jobs, and some reads are
        left out: whoever asks for them has other readers. Those before an error are in the notes.
        """
        enough = asyncio.Event()

        async def reader(turn: ReadInTurn) -> list[Result]:
            results: list[Result] = []
            try:
                while True:
                    results += await self._job([[turn]], subject=table_id)
                    failed = any("error" in result for result in results)
                    too_few = len(turns) < at_once and self.slots.spare
                    if failed or too_few or self.slots.wanted or not go_on():
                        enough.set()
                    if notes is None or enough.is_set():
                        return results
                    begun = await asyncio.to_thread(notes.begun)
                    if all(read.split.split_id in begun for read in turn.reads):
                        return results
            except BaseException:
                enough.set()
                raise

        at_once = min(at_once, self.slots.total, len(tasks))
        turns = in_turns(tasks, self.slots.at_once(at_once), notes)
        ends = await asyncio.gather(*map(reader, turns), return_exceptions=True)
        return self._checked(ends, noted=notes is not None)

    def _checked(self, ends: Sequence[list[Result] | BaseException], *, noted: bool) -> list[Result]:
        results = [result for end in ends if not isinstance(end, BaseException) for result in end]
        faults = [end for end in ends if isinstance(end, BaseException)]
        faults += [_as_error(result) for result in results if "error" in result]
        if faults:
            if not noted:
                self.core.forget_files(r["segment"]["path"] for r in results if r.get("segment"))
            raise min(faults, key=lambda fault: isinstance(fault, TransientError | ReadPaused))
        return results

    async def _job(self, groups: list[list[Any]], *, subject: int | None = None) -> list[Result]:
        from headwater.spark.query import explained
        from headwater.spark.tasks import run_tasks

        def work() -> list[Result]:
            with explained("BACKFILL_FAILED"):
                return run_tasks(self.core.spark, groups)

        async with self.slots.take(len(groups)):
            return await self.core.jobs.run("backfill", "backfill", work, subject=subject)

    # -- small ones -------------------------------------------------------------------------------------------------

    async def _with_others(self, table_id: int, tasks: list[Any]) -> list[Result]:
        request = _Small(table_id, tasks, asyncio.get_running_loop().create_future())
        self._small.append(request)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve(), name="reads of small tables")
        return await request.done

    async def _serve(self) -> None:
        while self._small:
            async with self.slots.take(1):
                pass  # while none is free, more gather
            batch = [r for r in self._small[:MOST_TOGETHER] if not r.done.done()]
            del self._small[:MOST_TOGETHER]
            await self._together(batch)

    async def _together(self, batch: list[_Small]) -> None:
        """One job for all; if it fails as a whole, each by itself, so that the one at fault fails alone."""
        from headwater.spark.reads import InTurn

        tasks = [task for request in batch for task in request.tasks]
        count = min(self.slots.total, -(-len(tasks) // SMALL_IN_TURN))
        try:
            results = await self._job([[InTurn(tuple(tasks[i::count]))] for i in range(count)]) if tasks else []
        except Exception as error:
            if len(batch) == 1:
                _fail(batch[0], error)
                return
            for request in batch:
                await self._together([request])
            return
        for request in batch:
            self._deliver(request, [r for r in results if r["subject"] == request.table_id])

    def _deliver(self, request: _Small, results: list[Result]) -> None:
        if request.done.done():  # cancelled meanwhile: nobody will ever hand these files over
            self.core.forget_files(r["segment"]["path"] for r in results if r.get("segment"))
        else:
            request.done.set_result(results)

    async def stop(self) -> None:
        task, self._serving = self._serving, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def in_turns(tasks: Sequence[Any], readers: int, notes: Notes | None) -> list[ReadInTurn]:
    """What each of the readers is told to read: its share, every n-th split, for neighbours are alike in size.
    Where splits can be claimed, then those of the others, from their end on: whoever is done first helps the rest."""
    from headwater.spark.backfill import ReadInTurn

    readers = min(readers, len(tasks))
    shares = [tuple(tasks[i::readers]) for i in range(readers)]
    if notes is None:
        return [ReadInTurn(share) for share in shares]
    turns = []
    for reader, share in enumerate(shares):
        others = [t for i, t in enumerate(tasks) if i % readers != reader][::-1][:MOST_HELPED]
        turns.append(ReadInTurn((*share, *others) if notes.can_claim else share, notes, JOB_S, reader))
    return turns


def _fail(request: _Small, error: Exception) -> None:
    if not request.done.done():
        request.done.set_exception(error)


def _as_error(result: Result) -> HeadwaterError:
    error = result["error"]
    if error["code"] == ReadPaused.CODE:
        return ReadPaused(error["code"], error["message"])
    kind = TransientError if result.get("transient") else DefiniteError
    return kind(error["code"], error["message"], detail=error["detail"], hint=error["hint"])
