"""The control plane in virtual time: real lanes and a real meta store, scripted actors, crashes at every step.

    World      what outlives a process, and the invariants over it (`simulated_world.py`)
    Process    one engine: owner of the store, a main lane, a lane for a view in creation, a client, a garbage collector
    faults     drawn from the seed at named points (`World.point`); a process may be killed, or stopped and woken later

The source's log gives change n to one of two tables. Tables stage files, the view `sums` is a function of both, `copy`
is created while all goes on, `notes` is written by clients. `World.check` compares what is committed with what
DESIGN.md section 2 demands; it runs after every event.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import random
import shutil
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from headwater.barrier.coordinator import Actor, Lane, LaneParameters
from headwater.barrier.manager import BarrierReceiver, LocalBarrierManager, Progress
from headwater.barrier.progress import JobProgress
from headwater.barrier.recovery import ActorFailure
from headwater.errors import DefiniteError, HeadwaterError, IndeterminateError, TransientError
from headwater.model.barrier import Barrier, BarrierKind, Mutation, MutationKind
from headwater.model.epoch import MAX_EPOCH, Epoch, EpochClock
from headwater.storage import tables
from headwater.storage.checkpoint import Contribution, JobRow, NewSegment, SplitRow
from headwater.storage.meta import MAIN_LANE, MetaStore
from headwater.testing.simulated_world import (
    CALM_S,
    CHAOS_S,
    COPY,
    COPY_LANE,
    FAULT_RATE,
    NOTES,
    RETENTION_S,
    SOURCE,
    SPLITS,
    SUMS,
    TABLES,
    Rows,
    World,
    copy_of,
    demand,
    fold,
    sums_of,
    table_at,
)
from headwater.testing.virtual_clock import VirtualClockLoop, in_process, run


class Process:
    """One engine; as a LaneHost it does what the engine does, with files that are dicts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.name = f"engine {len(world.processes) + 1}"
        self.meta = copy.copy(_store())
        self.meta.now_s = world.now_s
        self.rng = random.Random(world.rng.random())
        self.lanes: dict[str, Lane] = {}
        self.builds: dict[str, int] = {}
        self.stages: dict[int, dict[str, asyncio.Future[Any]]] = {}
        self.progress_of = JobProgress(TABLES[1], "t3", total=SPLITS)
        self.ended = False
        world.processes.append(self)

    # -- life -------------------------------------------------------------------------------------------------------

    async def main(self) -> None:
        await self.world.point(self, "start")
        self.meta.acquire()
        self._restore_progress()
        self.clock = EpochClock(self.world.now_s, self.meta.last_epoch_of_all())
        self._add_lane(MAIN_LANE)
        await asyncio.gather(self._clients(), self._collect_garbage(), self._create_copy(), self._watch())

    def _add_lane(self, name: str) -> Lane:
        parameters = LaneParameters(checkpoint_frequency=1 + self.world.seed % 3)
        lane = self.lanes[name] = Lane(name, self, self.clock, parameters, self.rng)
        lane.start()
        return lane

    async def _watch(self) -> None:
        while not self.ended:
            await asyncio.sleep(0.7)
            self.world.show(self, self.progress_of)

    async def _clients(self) -> None:
        """Write rows, each acknowledged once its checkpoint is there; sometimes force a checkpoint or pause."""
        main = self.lanes[MAIN_LANE]
        await main.started.wait()
        if not any(j.id == NOTES for j in self.meta.job_rows()):
            await self._quietly(main.request(contribution=Contribution(jobs_added=_jobs())))
        while not self.ended:
            await asyncio.sleep(self.rng.uniform(0.2, 3.0))
            number = self.world.offered = self.world.offered + 1
            added = [self.stage(NOTES, "sql", 0, {number: number})]
            if await self._quietly(main.request(contribution=Contribution(segments_added=added))):
                self.world.acknowledged.add(number)
                self.world.check("acknowledgement")
            if self.rng.random() < 0.2:
                for kind in (MutationKind.PAUSE, MutationKind.RESUME):
                    await self._quietly(main.request(Mutation(kind)))

    async def _quietly(self, request: Any) -> bool:
        try:
            await request
        except HeadwaterError as error:
            self.ended = self.ended or error.code in ("ENGINE_FENCED", "ENGINE_STOPPING")
            return False
        return True

    async def _collect_garbage(self) -> None:
        while not self.ended:
            await asyncio.sleep(self.rng.uniform(1.0, 4.0))
            horizon = Epoch.at_unix_ms(int((self.world.now_s() - RETENTION_S) * 1000))
            try:
                paths = self.meta.expire(horizon)
            except DefiniteError:
                return
            await self.world.point(self, "expiry")
            self.delete(paths)
            if self.rng.random() < 0.4:
                await self._compact(self.rng.choice(TABLES))

    async def _compact(self, table: int) -> None:
        """Fold the segments of a table into one; epochs before the commit still see the old ones."""
        old = self.meta.segments_at(table, self.meta.committed_epoch())
        if len(old) < 2:
            return
        rows: Rows = {}
        for segment in old:
            fold(rows, self.world.files[segment.path])
        new = replace(self.stage(table, "sql", 0, rows), kind="base", is_change=False)
        removed = [segment.id for segment in old]
        contribution = Contribution(segments_added=[new], segments_removed=removed)
        await self._quietly(self.lanes[MAIN_LANE].request(contribution=contribution))

    async def _create_copy(self) -> None:
        """Create a view in a lane of its own, then let it join the main one."""
        main = self.lanes[MAIN_LANE]
        await main.started.wait()
        await asyncio.sleep(3.0)
        while not self.ended:
            job = next((j for j in self.meta.job_rows() if j.id == COPY), None)
            if job is None:
                job = JobRow(COPY, "copy", "view", "creating", COPY_LANE, "", {})
                pin = {f"job:{COPY}": self.meta.committed_epoch()}
                await self._quietly(main.request(contribution=Contribution(jobs_added=[job], pins=pin)))
            elif job.lane == MAIN_LANE:
                return
            elif COPY_LANE not in self.lanes:
                self._add_lane(COPY_LANE)
            elif (self.meta.state(COPY, "upto") or 0) > job.created_epoch:
                await self._join(main)
            await asyncio.sleep(1.0)

    async def _join(self, main: Lane) -> None:
        await self.lanes.pop(COPY_LANE).stop()
        live = Contribution(
            job_updates={COPY: {"state": "live", "lane": MAIN_LANE, "became_live": True}}, pins_dropped=[f"job:{COPY}"]
        )
        mutation = Mutation(MutationKind.ADD, COPY)
        await self._quietly(main.request(mutation, live, lambda: [ScriptedActor(self, COPY, MAIN_LANE)]))

    # -- files ------------------------------------------------------------------------------------------------------

    def stage(self, table: int, lane: str, build: int, rows: Rows) -> NewSegment:
        path = f"{self.meta.generation}/{lane}/{build}/{uuid.UUID(int=self.rng.getrandbits(128)).hex}"
        self.world.files[path] = rows
        return NewSegment(table, path, "delta", len(rows), 8 * len(rows))

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.world.deleted += self.world.files.pop(path, None) is not None

    def staged_paths(self) -> set[str]:
        return {path for lane in self.lanes.values() for path in lane.staged_paths()}

    def discard_staged(self, lane: str) -> None:
        """Delete what was staged and is not committed, of this lane and of all older engines (I8)."""
        spared = self.meta.segment_paths() | self.staged_paths()
        for path in sorted(self.world.files.keys() - spared):
            generation, owner = path.split("/")[:2]
            if int(generation) < self.meta.generation or (int(generation) == self.meta.generation and owner == lane):
                self.delete([path])

    # -- LaneHost ---------------------------------------------------------------------------------------------------

    def committed_epoch(self, lane: str) -> int:
        return self.meta.committed_epoch(lane)

    async def build(self, lane: str) -> Sequence[Actor]:
        await self.world.point(self, "build")
        if self.world.draw("build failed"):
            raise TransientError("SIMULATED", "cannot build")
        self.meta.settle()
        self.discard_staged(lane)
        build = self.builds[lane] = self.builds.get(lane, 0) + 1
        self.world.check_no_leftovers(self, lane, build)
        self._restore_progress()
        await self.world.point(self, "built")
        if lane == COPY_LANE:
            return [CopyActor(self)]
        self.stages.clear()
        jobs = [SOURCE, *TABLES, SUMS]
        if any(j.id == COPY and j.lane == MAIN_LANE for j in self.meta.job_rows()):
            jobs.append(COPY)
        return [ScriptedActor(self, job, lane) for job in jobs]

    async def commit(self, lane: str, epoch: int, contribution: Contribution) -> None:
        await self.world.point(self, "before commit")
        if self.world.draw("commit slow"):
            await asyncio.sleep(2.5)  # the next epochs pile up behind it
        if self.world.draw("commit failed"):
            raise TransientError("SIMULATED", "did not land")
        self.meta.commit_checkpoint(lane, epoch, contribution, seq_high=0)
        current = self.world.processes[-1].meta.generation
        world = self.world
        world.demand(self.meta.generation >= current, "I9", f"{self.name} committed after it was fenced")
        world.demand((self.name, lane, epoch) not in world.poisoned, "I6", "a failed actor's epoch was committed")
        self.world.check("commit")
        if self.world.draw("commit unknown"):
            raise IndeterminateError("COMMIT_UNKNOWN", "landed, but nobody knows")
        await self.world.point(self, "after commit")

    def failed(self, lane: str, failure: ActorFailure) -> None:
        fenced = isinstance(failure.error, HeadwaterError) and failure.error.code == "ENGINE_FENCED"
        self.ended = self.ended or fenced
        if self.world.draw("failure not recorded"):
            raise TransientError("SIMULATED", "no room for an error")

    def barrier_completed(self, lane: str, barrier: Barrier, seconds: float) -> None:
        self.world.check(f"{barrier.kind} barrier")

    def progress(self, lane: str, reports: Sequence[Progress]) -> None:
        for report in reports:
            self.progress_of.report(now_s=self.world.now_s(), generation=report.generation, done=report.value)
            self.world.show(self, self.progress_of)

    def _restore_progress(self) -> None:
        done = self.world.splits_done()
        self.progress_of.report(now_s=self.world.now_s(), done=done)

    def stage_value(self, epoch: int, part: str) -> asyncio.Future[Any]:
        """What one actor tells the others about an epoch: the source its position, tables their rows."""
        parts = self.stages.setdefault(epoch, {})
        if part not in parts:
            parts[part] = asyncio.get_running_loop().create_future()
        return parts[part]


def _jobs() -> list[JobRow]:
    names = {SOURCE: "source", TABLES[0]: "table", TABLES[1]: "table", NOTES: "table", SUMS: "view"}
    return [JobRow(i, f"j{i}", kind, "live", MAIN_LANE, "", {}) for i, kind in names.items()]


class ScriptedActor:
    """A source, a table or a view in the main lane."""

    def __init__(self, process: Process, job_id: int, lane: str) -> None:
        self.process, self.world, self.job_id, self.lane = process, process.world, job_id, lane
        self.name = f"{lane} {job_id}"
        self.build = process.builds[lane]
        self.stages = process.stages
        self.position = process.world.position_at(MAX_EPOCH)
        self.fresh = True
        self.manager: LocalBarrierManager | None = None

    async def run(self, barriers: BarrierReceiver, manager: LocalBarrierManager) -> None:
        self.manager = manager
        async for barrier in barriers:
            await self.world.point(self.process, "barrier")
            self._maybe_fail(barrier)
            contribution = Contribution()
            if barrier.kind is not BarrierKind.INITIAL:
                contribution = await self._stage(barrier)
            self._maybe_fail(barrier)
            manager.collect(self.name, barrier, contribution)

    def _maybe_fail(self, barrier: Barrier) -> None:
        kinds: dict[str, Callable[[], BaseException]] = {
            "definite": lambda: DefiniteError("SIMULATED", "bad row"),
            "transient": lambda: TransientError("SIMULATED", "lost connection"),
            "plain": lambda: ConnectionError("reset"),
            "cancelled": asyncio.CancelledError,
        }
        if self.world.draw("actor failed"):
            self.world.poisoned.add((self.process.name, self.lane, barrier.epoch.prev))
            raise kinds[self.world.rng.choice(sorted(kinds))]()

    async def _stage(self, barrier: Barrier) -> Contribution:
        epoch = barrier.epoch.prev
        if self.job_id == SOURCE:
            position = self.world.log_length()
            self.process.stage_value(epoch, "position").set_result(position)
            return Contribution(positions={SOURCE: str(position)})
        position = await self.process.stage_value(epoch, "position")
        before, self.position = self.position, position
        await asyncio.sleep(self.world.rng.choice((0.0, 0.01, 0.3)))
        full = self.fresh and self.job_id == COPY
        self.fresh = False
        contribution = Contribution(resets=[COPY] if full else [])
        rows = _changed({} if full else self._content(before), self._content(position))
        if rows:
            contribution.segments_added.append(self.process.stage(self.job_id, self.lane, self.build, rows))
        if self.job_id == TABLES[1]:
            contribution.splits = self._next_split()
        return contribution

    def _content(self, position: int) -> Rows:
        if self.job_id == SUMS:
            return sums_of([table_at(t, position) for t in TABLES])
        return copy_of(table_at(TABLES[0], position)) if self.job_id == COPY else table_at(self.job_id, position)

    def _next_split(self) -> list[SplitRow]:
        done = self.world.splits_done()
        if done >= SPLITS or self.world.rng.random() < 0.7:
            return []
        return [SplitRow(TABLES[1], 0, done, None, None, "HANDED_OVER")]

    def on_committed(self, epoch: int) -> None:
        if self.job_id == TABLES[1] and self.manager is not None:
            done = self.world.splits_done()
            self.manager.report_cdc_table_backfill_progress(TABLES[1], done)
        if self.world.draw("on_committed failed"):
            raise RuntimeError("an actor's fault after the commit")

    async def close(self) -> None:
        if self.world.draw("close failed"):
            raise RuntimeError("cannot close")


def _changed(before: Rows, after: Rows) -> Rows:
    return {k: v for k, v in after.items() if before.get(k) != v}


class CopyActor(ScriptedActor):
    """The view in creation: at every barrier of its lane it takes over the table as of the main lane's last epoch."""

    def __init__(self, process: Process) -> None:
        super().__init__(process, COPY, COPY_LANE)
        self.rows = process.world.rows_at(COPY, process.meta.committed_epoch(COPY_LANE))

    async def _stage(self, barrier: Barrier) -> Contribution:
        pinned = self.process.meta.pin_rows()[f"job:{COPY}"]
        upto = self.process.meta.committed_epoch()
        # What is pinned must be readable as long as we are.
        then = self.world.rows_at(TABLES[0], pinned)
        known = self.world.history.get(pinned)
        self.world.demand(known is None or known[1][0] == then, "I8", "a pinned epoch was given up")
        after = copy_of(self.world.rows_at(TABLES[0], upto))
        changed, self.rows = _changed(self.rows, after), after
        added = [self.process.stage(COPY, self.lane, self.build, changed)] if changed else []
        pins = {f"job:{COPY}": upto}
        return Contribution(segments_added=added, states={(COPY, "upto"): upto}, pins=pins)


# -- running -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _store() -> MetaStore:
    """One real store for all runs; processes have copies that differ by their generation.

    SQLAlchemy compiles each statement once per engine: with a store per process that would be most of the time.
    """
    directory = tempfile.mkdtemp(prefix="headwater-simulation-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    store = MetaStore(f"sqlite:///{directory}/meta.db")
    store.engine.dispose()
    sa.event.listen(store.engine, "connect", _without_sync)
    return store


def _without_sync(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA synchronous=OFF")  # power does not fail in a simulation


def _empty(store: MetaStore) -> None:
    with store.write() as db:
        for table in reversed(tables.metadata.sorted_tables):
            db.execute(table.delete())
        db.execute(tables.settings.insert().values(name="schema_version", value=str(tables.SCHEMA_VERSION)))
        db.execute(tables.owner.insert().values(id=1, generation=0, owner=""))


async def _supervise(world: World, until_s: float, done: Callable[[], bool] = lambda: False) -> None:
    """Start a new engine whenever the last one is dead, stopped, or, now and then, for no reason at all."""
    current: asyncio.Task[None] | None = None
    while world.loop.time() < until_s and not done():
        latest = world.processes[-1] if world.processes else None
        gone = latest is None or world.loop.is_frozen(latest.name) or current is None or current.done()
        if gone or (not world.over and world.rng.random() < 0.01):
            process = Process(world)
            current = in_process(process.name, process.main())
        await asyncio.sleep(world.rng.uniform(0.3, 1.5))
        world.check("time")


async def _simulate(world: World) -> None:
    await _supervise(world, CHAOS_S)
    world.over = True
    target = world.log_length()

    def caught_up() -> bool:
        return world.position_at(MAX_EPOCH) >= target

    def created() -> bool:
        return bool(world.query("SELECT 1 FROM jobs WHERE id = ? AND lane = ?", COPY, MAIN_LANE))

    await _supervise(world, CHAOS_S + CALM_S, lambda: caught_up() and created())
    demand(caught_up(), "liveness", f"the source was at {target}, and nothing got there")
    demand(created(), "liveness", "the view was never created")
    world.check("end")


def simulate(seed: int, *, fault_rate: float = FAULT_RATE) -> World:
    """One life of a system, the same for the same seed; raises Violated."""
    worlds: list[World] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        _empty(_store())
        world = World(seed, random.Random(seed), loop, _store().url, fault_rate)
        worlds.append(world)
        try:
            await _simulate(world)
        finally:
            world.over = True
            world.rng = random.Random(seed)
            for process in world.processes:
                process.meta.generation = -1  # whatever its tasks do while they are ended, they commit nothing
                process.ended = True

    try:
        run(main(), seed=seed)
    finally:
        for world in worlds:
            world.close()
    return worlds[0]
