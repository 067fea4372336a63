"""The engine: connects the parts, decides nothing. `api.py` has the blocking face that users see.

api.Engine (any thread) ──► event loop thread: EngineCore
                          ├── Lane main ── Dataflow actor (tables, views)
                          ├── a Lane for each view that is being created
                          ├── Writes, Queries, Catalogue, Capture, Delivery, Maintenance
                          └── HTTP endpoint
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import os
import random
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from headwater.barrier.coordinator import Actor, Lane
from headwater.barrier.manager import Progress
from headwater.barrier.progress import JobProgress
from headwater.barrier.recovery import ActorFailure
from headwater.config import check_master
from headwater.errors import (
    HeadwaterError,
    IndeterminateError,
    TransientError,
    disk_full,
    is_disk_full,
    place_of,
)
from headwater.limits import require_open_files
from headwater.model.barrier import Barrier
from headwater.model.epoch import EpochClock
from headwater.model.schema import Schema
from headwater.model.trust import Trust
from headwater.runtime.applied import AppliedStatements
from headwater.runtime.capture import Capture
from headwater.runtime.catalogue import Catalogue
from headwater.runtime.commands import Commands
from headwater.runtime.creating import Creating
from headwater.runtime.dataflow import Dataflow
from headwater.runtime.delivery import Delivery
from headwater.runtime.error_ends import is_over
from headwater.runtime.error_log import ErrorLog
from headwater.runtime.executors import Executors
from headwater.runtime.followed import Followed
from headwater.runtime.functions import Functions
from headwater.runtime.health import BEAT_S, Health
from headwater.runtime.maintenance import Maintenance
from headwater.runtime.owner_watch import OwnerWatch
from headwater.runtime.parameters import Parameters
from headwater.runtime.queries import Queries
from headwater.runtime.registry import Registry
from headwater.runtime.row_counts import RowCounts
from headwater.runtime.status import progress_rows, status_of
from headwater.runtime.tables import SequenceAllocator
from headwater.runtime.writes import Writes
from headwater.server.endpoint import (
    Endpoint,
    lock_directory,
    new_token,
    remove_endpoint,
    write_endpoint,
)
from headwater.server.metrics import Metrics
from headwater.spark.options import checked_settings
from headwater.spark.security import check_secret
from headwater.storage.checkpoint import Contribution
from headwater.storage.files import DataDir
from headwater.storage.location import claim_meta_store, data_directory
from headwater.storage.meta import MAIN_LANE, MetaStore
from headwater.storage.shared import NOT_SHARED, write_mark
from headwater.storage.sweep import AT_A_TIME, AT_ONCE, Sweep

log = logging.getLogger("headwater")
T = TypeVar("T")
READ_BACK_S: Final = 0.5  # between two attempts to learn a commit's outcome
SPARK_WATCH_S: Final = 2.0
GONE_S: Final = 0.5  # by when a process has ended of which the connections have
# A stop ends within 10 s: by when its parts are over, and how long a small one may take.
LAST_DELIVERY_S: Final = 2.0
LAST_CHECKPOINT_S: Final = 7.0
STEP_S: Final = 0.8
OF_EPOCHS: Final = ("table", "view")  # the stages of Spark jobs that a checkpoint waits for


class EngineCore:
    """Everything of one running engine. Made and used on the event loop; implements LaneHost and the HTTP Backend."""

    def __init__(
        self,
        data_dir: str,
        *,
        master: str | None,
        settings: Mapping[str, str],
        meta_url: str | None,
        spark_conf: Mapping[str, str] | None = None,
        allow_python: bool = False,
    ) -> None:
        self.allow_python = allow_python  # from holders of the admin token (`runtime/trust.py`)
        self.local_dir = data_directory(data_dir)
        self.master = master or default_master()
        check_master(self.master)
        require_open_files()
        check_secret(self.master)
        self.spark_conf = checked_settings(spark_conf or {})
        self._lock = lock_directory(self.local_dir)
        try:
            self.data_dir = DataDir(str(self.local_dir), write_mark(self.local_dir))
            self.meta = MetaStore(claim_meta_store(self.local_dir, meta_url))
            self.generation = self.meta.acquire()
        except BaseException:
            os.close(self._lock)
            raise
        self.counters = Metrics()
        self.errors = ErrorLog(self.meta)
        self.registry = Registry(self.meta.job_rows())
        self.parameters = Parameters(self.meta, settings)
        self.vnode_count = self.parameters["vnode_count"]
        self.sequence = SequenceAllocator(self.meta.seq_high)
        self.clock = EpochClock(last=self.meta.last_epoch_of_all())
        self.rng = random.Random()
        self.started_at = time.time()
        self.job_progress: dict[int, JobProgress] = {}
        self.barriers: deque[dict[str, Any]] = deque(maxlen=120)
        self.fatal: asyncio.Future[HeadwaterError] = asyncio.get_running_loop().create_future()
        self.begun = asyncio.Event()  # sources, tables and views are in being
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.stopping = False
        loop = asyncio.get_running_loop()
        self.owner = OwnerWatch(self.meta, lambda error: loop.call_soon_threadsafe(self.die, error))

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self, *, http_host: str = "127.0.0.1", http_port: int = 0) -> None:
        await asyncio.to_thread(self._start_spark)
        self.executors = Executors(self)
        shared = await self.executors.first()
        sweep = await asyncio.to_thread(self._sweep)
        self.writes = Writes(self)
        self.queries = Queries(self)
        self.catalogue = Catalogue(self)
        self.commands = Commands(self)
        self.applied = AppliedStatements(self)
        self.capture = Capture(self)
        self.creating = Creating(self)
        self.delivery = Delivery(self)
        self.row_counts = RowCounts(self)
        self._goals: dict[int, int] | None = None  # of caught_up: the sources' positions, then the epoch that has them
        self._goal_epoch = 0
        self.functions = Functions(self)
        self.followed = Followed(self)
        await asyncio.to_thread(self.functions.load)
        self.dataflow = Dataflow(self)
        self.maintenance = Maintenance(self)
        self.main = Lane(
            MAIN_LANE, self, self.clock, self.parameters.of_lanes, self.rng, paused=self.meta.setting("paused") == "1"
        )
        self.health = Health(self.parameters.of_lanes, lambda: self.main.is_committing)
        if shared:
            await self._begin()
        await self._serve(http_host, http_port)
        if shared:
            self._resume()
        else:
            self.background(self._begin_late())
        self.background(_finish_sweep(sweep))
        self.background(self.executors.watch())
        self.background(self._watch_spark())

    async def _begin(self) -> None:
        """Sources, tables and views go on from their committed state."""
        await self.capture.start()
        self._lane_task = self.main.start()
        self._watch(self._lane_task)
        await self.main.started.wait()
        self.begun.set()

    def _resume(self) -> None:
        self.creating.resume()
        self.delivery.start()
        self.followed.resume()
        self.background(self.maintenance.run())

    async def _begin_late(self) -> None:
        """Spark had no executor yet. Until one is known to share the data directory nothing is made, nor resumed."""
        await self.executors.arrived()
        await self._begin()
        self._resume()

    async def _beat(self) -> None:
        while True:
            self.health.beat()
            await asyncio.sleep(BEAT_S)

    def _start_spark(self) -> None:
        from headwater.spark.jobs import JobRunner
        from headwater.spark.session import make_session

        self.spark = make_session(self.master, self.spark_conf)
        self.jobs = JobRunner(self.spark, self.counters.spark_job, self._spark_failed)

    def _sweep(self) -> Sweep:
        """Remove what an earlier engine staged and did not commit (I8); gives what is left of it to remove."""
        known = self.meta.segment_paths() | {s.staged_path for s in self.meta.split_rows() if s.staged_path}
        sweep = Sweep(self.data_dir, known, {job.id for job in self.meta.job_rows(dropped=True)})
        sweep.some(AT_ONCE)
        return sweep

    async def _serve(self, host: str, port: int) -> None:
        from headwater.server.http import ServerThread, make_app

        token, read_token, loop = new_token(), new_token(), asyncio.get_running_loop()
        self.health.watch(self.jobs)
        self.background(self._beat())
        self.server = ServerThread(
            lambda: make_app(self, token, read_token=read_token, host=host, loop=loop), host, port
        )
        port = (await self.server.start()).port
        self.endpoint = Endpoint(f"http://{host}:{port}", token, os.getpid(), self.generation, read_token)
        write_endpoint(self.local_dir, self.endpoint)

    async def stop(self) -> None:
        """In order: no new work, a last checkpoint, then everything down; also of an engine that is only half up.

        A stop may take 10 s, and the last checkpoint gets all of it that the other steps do not need. What does not
        end in time is left to the next start.
        """
        began = time.monotonic()
        self.stopping = True
        if hasattr(self, "delivery"):
            await _within(LAST_DELIVERY_S, asyncio.gather(self.delivery.stop(), self.creating.stop()))
        lane = getattr(self, "_lane_task", None)
        for task in list(self._tasks):
            if task is not lane:  # the lane ends by itself, after its last checkpoint
                task.cancel()
        if hasattr(self, "jobs"):
            self.jobs.cancel("", but=OF_EPOCHS)  # it has all of Spark for itself, and the time is short
        if lane is not None:
            await self.main.stop(timeout_s=LAST_CHECKPOINT_S - (time.monotonic() - began))
            if self.dataflow.waits(self.writes.acknowledged):
                log.error("the last checkpoint did not end in time: what was written and not flushed may be lost")
        if hasattr(self, "executors"):
            await _within(STEP_S, self.executors.stop())
        if hasattr(self, "jobs"):
            self.jobs.cancel("")
        ends = [self.capture.stop()] if hasattr(self, "capture") else []
        if hasattr(self, "health"):
            self.health.stop()
        if hasattr(self, "server"):
            remove_endpoint(self.local_dir, self.generation)
            ends.append(self.server.stop())
        await _within(STEP_S, asyncio.gather(*ends))
        if hasattr(self, "jobs"):
            from headwater.spark.session import stop_session

            self.jobs.close()
            await _within(STEP_S, asyncio.to_thread(stop_session, self.spark))
        self.close()

    def close(self) -> None:
        self.owner.stop()
        self.meta.close()
        os.close(self._lock)

    def background(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._watch(task)
        return task

    def _watch(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)

        def done(finished: asyncio.Task[Any]) -> None:
            self._tasks.discard(finished)
            if not finished.cancelled() and (error := finished.exception()) is not None:
                log.error("a part of the engine failed", exc_info=error)
                self.die(error)

        task.add_done_callback(done)

    def die(self, error: BaseException) -> None:
        """Something that the engine cannot recover from: it ends, and can be started again."""
        if not isinstance(error, HeadwaterError):
            error = TransientError("ENGINE_FAILED", f"the engine failed: {type(error).__name__}", hint="start it again")
        if not self.fatal.done():
            self.fatal.set_result(error)

    @property
    def slots(self) -> int:
        """How many tasks Spark runs at once, now."""
        return self.executors.slots

    @property
    def waiting_for(self) -> str:
        """What the whole engine waits for; empty while it goes on."""
        return self.executors.waiting_for

    def slots_changed(self) -> None:
        if hasattr(self, "capture"):
            self.capture.reads.slots.resize(self.slots)

    def _spark_failed(self, error: BaseException) -> None:
        """In any thread. A host without our data directory is nothing that passes, and nothing to go on beside."""
        from headwater.spark.query import translate

        found = error if isinstance(error, HeadwaterError) else translate(error)
        if found.code == NOT_SHARED:
            self._loop.call_soon_threadsafe(self.die, found)

    async def _watch_spark(self) -> None:
        while self.jobs.alive():
            await asyncio.sleep(SPARK_WATCH_S)
        self.die(self.jobs.lost())

    # -- LaneHost ---------------------------------------------------------------------------------------------------

    def committed_epoch(self, lane: str) -> int:
        return self.meta.committed_epoch(lane)

    async def build(self, lane: str) -> Sequence[Actor]:
        if lane != MAIN_LANE:
            return self.creating.build(lane)
        await asyncio.to_thread(self.meta.settle)
        old = self.dataflow
        spared = set(self.main.staged_paths())
        self.forget_files(p for p in old.abandoned_files() if p not in spared)
        self.registry.load(self.meta.job_rows())
        self.sequence.high = max(self.sequence.high, self.meta.seq_high)
        old.on_committed(self.meta.committed_epoch())  # a commit may have landed without our hearing of it
        self.dataflow = Dataflow(self)
        self.dataflow.rebuild(old.unfinished())
        await self.capture.rebuild()
        self.delivery.recovered()
        return [self.dataflow]

    async def commit(self, lane: str, epoch: int, contribution: Contribution) -> None:
        while True:
            try:
                await asyncio.to_thread(
                    self.meta.commit_checkpoint, lane, epoch, contribution, seq_high=self.sequence.high
                )
                break
            except IndeterminateError:
                await asyncio.sleep(READ_BACK_S)
                with contextlib.suppress(HeadwaterError):
                    if await asyncio.to_thread(self.meta.is_committed, lane, epoch):
                        break
        if contribution.jobs_added or contribution.jobs_dropped or contribution.job_updates:
            self.registry.load(self.meta.job_rows())
            self.dataflow.sync()
        if lane == MAIN_LANE:
            self.counters.committed(epoch)
            self.errors.store()  # of those that could not be, while there was no room for them
            self.errors.end(lambda kind, at: is_over(self, kind, at))
            self.capture.committed(epoch, contribution)
            self.delivery.committed(epoch)

    def failed(self, lane: str, failure: ActorFailure) -> None:
        error = as_headwater_error(failure.error)
        if error.code == "RECOVER_REQUESTED":  # nothing went wrong
            log.info("lane %s recovers: it was asked to", lane)
            return
        log.warning("lane %s recovers: %s", lane, error, exc_info=failure.error)
        if lane == MAIN_LANE:
            self.health.failed(error.code)
        if error.code == "ENGINE_FENCED":
            self.die(error)
        job = self.registry.by_id.get(failure.job_id)
        self.record_error(job.id if job else None, job.name if job else lane, error, retrying=True)

    def barrier_completed(self, lane: str, barrier: Barrier, seconds: float) -> None:
        if lane == MAIN_LANE:
            self.health.completed(barrier.kind)
            self.counters.barrier(seconds)
            at = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
            self.barriers.append({"epoch": int(barrier.epoch.prev), "ms": round(seconds * 1000, 2), "at": at})

    def progress_of(self, job_id: int) -> JobProgress:
        if job_id not in self.job_progress:
            job = self.registry.by_id.get(job_id)
            stored = self.meta.state(job_id, "progress")
            self.job_progress[job_id] = JobProgress.restored(
                job_id, job.name if job else "?", job.state if job else "", stored
            )
        return self.job_progress[job_id]

    def report_progress(self, job_id: int, **report: Any) -> None:
        self.progress_of(job_id).report(now_s=time.monotonic(), **report)

    def progress(self, lane: str, reports: Sequence[Progress]) -> None:
        for report in reports:
            self.report_progress(report.job_id, generation=report.generation, **report.value)

    # -- helpers of the parts ---------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        return self.main.paused

    def reader(self, schema: Schema, *, wide: bool = False) -> Any:
        """Of a table's segments; `wide` (`spark/width.py`) where its rows go to Python and may be."""
        from headwater.spark.session import careful_session
        from headwater.spark.table import TableReader

        spark = careful_session(self.spark) if wide else self.spark
        return TableReader(spark, self.data_dir, schema, self.vnode_count)

    def forget_files(self, paths: Iterable[str | None]) -> None:
        """Delete files that nobody refers to, in the background."""
        names = [p for p in paths if p]
        if names:
            self.background(asyncio.to_thread(self.data_dir.delete, names))

    def count_rows(self, segments: Mapping[int, Sequence[Any]]) -> None:
        for job_id, group in segments.items():
            rows = sum(s.rows for s in group)
            job = self.registry.by_id.get(job_id)
            if job is not None and rows:
                self.counters.rows(job.name, rows)
                self.progress_of(job_id).changed(time.monotonic(), rows)

    def record_error(self, job_id: int | None, name: str, error: HeadwaterError, *, retrying: bool) -> None:
        if error.code == NOT_SHARED:
            self.die(error)
        self.counters.error(error.code)
        self.errors.record(job_id, name, error, retrying=retrying)

    def job_failed(
        self, job_id: int, error: HeadwaterError, contribution: Contribution, *, retrying: bool = False
    ) -> None:
        """A definite error of one job: it stops and says so; the others go on (I10)."""
        job = self.registry.by_id.get(job_id)
        if job is None:
            return
        contribution.job_updates.setdefault(job_id, {})["state"] = "failed"
        self.record_error(job_id, job.name, error, retrying=retrying)

    def settings_changed(self, job_id: int) -> None:
        """A rate limit, a parallelism or PAUSE changed: whoever waits looks again."""
        self.capture.settings_changed(job_id)
        self.creating.settings_changed(job_id)

    def progress_rows(self) -> list[dict[str, Any]]:
        return progress_rows(self)

    def caught_up(self) -> bool:
        """Every job live, every source's committed changes in the tables, every sink with what is committed.

        Under load there is always something newer. So the goal is set when the jobs are live (what the sources have
        then), and stays until it is reached and delivered; the next call after that sets another one.
        """
        if any(j.state != "live" for j in self.registry.by_id.values()):
            self._goals, self._goal_epoch = None, 0
            return False
        if self._goals is None:
            self._goals = self.capture.goals()
        if not self._goal_epoch:
            waits = self._goals is None or self.dataflow.waits(self.writes.acknowledged)
            if waits or not self.capture.reached(self._goals or {}):
                return False
            self._goal_epoch = self.meta.committed_epoch()
        if not self.delivery.delivered(self._goal_epoch):
            return False
        self._goals, self._goal_epoch = None, 0
        return True

    def given_up(self) -> bool:
        """A job has failed, and will not go on by itself."""
        return any(j.state == "failed" and not self.capture.healing.heals(j.id) for j in self.registry.by_id.values())

    # -- HTTP backend -----------------------------------------------------------------------------------------------

    async def sql(self, statement: str, trust: Trust = Trust.ADMIN) -> Any:
        from headwater.server.http import SqlResult

        try:
            results = await self.commands.execute(statement, trust=trust)
        except HeadwaterError as error:
            if error.code == "SPARK_FAILED" and not await self._spark_is_there():
                raise self.jobs.lost() from error
            raise
        except asyncio.CancelledError:
            if self.fatal.done():  # why the statement does not come to its end
                raise self.fatal.result() from None
            raise
        except Exception as error:
            if await self._spark_is_there():
                raise
            raise self.jobs.lost() from error
        last = next((r for r in reversed(results) if r is not None), None)
        if last is None:
            return SqlResult([], [], self.meta.committed_epoch())
        return SqlResult(last.columns, last.found, last.epoch)

    async def _spark_is_there(self) -> bool:
        """Asked when it has failed: its connections end a moment before its process does."""
        await asyncio.sleep(GONE_S)
        return self.jobs.alive()

    def ended_by(self) -> HeadwaterError | None:
        return self.fatal.result() if self.fatal.done() else None

    def status(self) -> dict[str, Any]:
        return status_of(self)

    def metrics(self) -> bytes:
        for row in self.delivery.log_store_rows():
            self.counters.log_store_backlog(row["sink"], row["backlog_rows"])
        return self.counters.render()

    def problem(self) -> str | None:
        """Why the engine is not healthy; called by the server's thread."""
        if self.fatal.done():
            return f"the engine ends: [{self.fatal.result().code}]"
        if not self.jobs.alive():
            return "Spark's driver process is gone"
        return self.waiting_for or self.health.problem()


async def _finish_sweep(sweep: Sweep) -> None:
    """A part at a time: an engine that stops does not wait for the rest."""
    while await asyncio.to_thread(sweep.some, AT_A_TIME):
        pass


async def _within(limit_s: float, work: Any) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(work, limit_s)


def default_master() -> str:
    """All cores, and two slots more: a reader of a table mostly waits for its server, or for its rate limit."""
    return f"local[{(os.cpu_count() or 2) + 2}]"


def as_headwater_error(error: BaseException) -> HeadwaterError:
    if isinstance(error, HeadwaterError):
        return error
    if is_disk_full(error):
        return disk_full()
    return TransientError("EPOCH_FAILED", f"an epoch failed: {place_of(error)}", hint="it is tried again")
