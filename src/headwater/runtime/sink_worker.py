"""One sink at work: a task outside the lanes, from the committed change log to the target.

The log store (`logstore/`) says what is owed, `sink/delivery.py` delivers a batch, `replay.py` what was refused.
What a checkpoint has to store is handed over at the next barrier (`contribute`), never waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from headwater.config import resolve_secret
from headwater.errors import DefiniteError, HeadwaterError, TransientError, UsageError
from headwater.logstore.backoff import Backoff
from headwater.logstore.buffer import LogBuffer
from headwater.logstore.chunk import LogBatch
from headwater.logstore.reader import LogStoreReader
from headwater.logstore.state import LogStoreState
from headwater.logstore.writer import LogStoreWriter
from headwater.runtime.dead_letters import PendingDeadLetters, held, letter_rows
from headwater.runtime.registry import schema_of
from headwater.runtime.replay import Replay, letters_of, replay_letters, settle_replay
from headwater.runtime.rewind import ask_rewind, do_rewind
from headwater.runtime.sink_batches import changes_between, changes_of, snapshot_of
from headwater.runtime.sink_log import ChangeLog, log_store_row
from headwater.runtime.sink_rows import SinkRows
from headwater.sink.batch import not_append_only
from headwater.sink.delivery import Delivered, DeliveryLoop, went_back
from headwater.sink.registry import open_sink, sink_options
from headwater.sink.sink import Token
from headwater.storage.checkpoint import Contribution, JobRow

if TYPE_CHECKING:
    from headwater.engine import EngineCore

log = logging.getLogger(__name__)
IDLE_S: Final = 0.5  # a sink without news looks again this often, for PAUSE, limits and a lost wake-up
CREATE_OPTIONS: Final = ("create_table_if_not_exists", "create_topic_if_not_exists")
STAGING: Final = "staging.path"  # of connectors that have rows lie somewhere between two of their jobs
NOTED_WITHIN_S: Final = 60.0  # a checkpoint takes a second; a lane that recovers a few
WHOLE: Final = 1 << 62  # no bound: a range that must be delivered as it was is not cut


def raw_options(core: EngineCore, job: JobRow) -> dict[str, str]:
    """A sink's options as they were written; dead letters and staging get folders of the data directory."""
    options = dict(job.spec["options"])
    known = sink_options(options, resolve_secret=resolve_secret)
    if "dead_letters.path" not in options and known.dead_letters:
        options["dead_letters.path"] = core.data_dir.url("dead-letters")
    if known.values.get(STAGING, "") is None and core.data_dir.is_local:
        options[STAGING] = str(core.local_dir / "staging" / "sinks")
    return options


def target_gone(sink: str, error: HeadwaterError) -> DefiniteError:
    return DefiniteError(
        "SINK_TARGET_MISSING",
        f"the target of sink {sink} is gone, with what was delivered to it",
        detail=error.message,
        hint="put it back as it was, or drop the sink and create it again: it then begins with a snapshot",
    )


class SinkWorker:
    """One sink: its log store and its delivery loop."""

    def __init__(self, core: EngineCore, job: JobRow) -> None:
        self.core = core
        self.job_id = job.id
        self.name = job.name
        self.source_id = int(job.spec["inputs"][0])
        stored = core.meta.state(job.id, "log")
        self.fresh = stored is None
        state = LogStoreState.from_dict(stored) if stored else LogStoreState.starting_at(0)
        self.buffer = LogBuffer(core.meta.committed_epoch())
        self.writer = LogStoreWriter(self.buffer, self.buffer.complete_after)
        log = ChangeLog(core, self.source_id)
        self.reader = LogStoreReader(state, log, self.buffer, vnode_count=core.vnode_count)
        self.reader.committed(self.buffer.complete_after)
        self.rows = SinkRows(core, self.source_id, self.buffer)
        self.backoff = Backoff(time.monotonic, core.rng)
        self.task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._dirty = False
        self._letters: list[dict[str, Any]] = []
        self._handed_over: list[dict[str, Any]] = []  # letters in a checkpoint that has not committed yet
        self._held = PendingDeadLetters.from_dict(core.meta.state(job.id, "letters"))
        self.noted_rewind: int | None = (core.meta.state(job.id, "rewind") or {}).get("epoch")
        self.rewinding = self.noted_rewind  # set once the note is durable
        self.rewindable = True  # what its class says, once that is loaded
        self._waiting: list[asyncio.Future[None]] = []  # who wants to know how the next attempt ends
        self._hurry = False
        self._replay: asyncio.Future[int] | None = None
        self.replaying = Replay.from_dict(core.meta.state(job.id, "replay"))
        self._must_reach: int | None = None  # a range that is partly in the target ends here and is not cut
        self._next_at = 0.0
        self._stopping = False
        self._given_up = False  # what a thread of ours still does must not be published
        self.failed = False
        self.well_at = 0.0  # when it last delivered, or had nothing to deliver
        self._state = job.state

    @property
    def job(self) -> JobRow | None:
        return self.core.registry.by_id.get(self.job_id)

    def delivered(self, epoch: int) -> bool:
        """The target has what was committed up to the epoch."""
        if self.fresh or self.failed:
            return False
        return self.reader.state.truncated_to.epoch >= epoch or self.reader.backlog().epochs == 0

    # -- the log ----------------------------------------------------------------------------------------------------

    def committed(self, epoch: int) -> None:
        last = self.reader.committed_to
        for one in ChangeLog(self.core, self.source_id).epochs(last, epoch, 1 << 20):
            if one.epoch > self.writer.sealed_to:
                for chunk in one.chunks:
                    self.writer.write_chunk(chunk)
                self.writer.flush(one.epoch)
        self.reader.committed(epoch)
        if self._handed_over:
            self._handed_over = self._unsaved()
        self._wake.set()

    def _unsaved(self) -> list[dict[str, Any]]:
        paths = [letter["path"] for letter in self._handed_over]
        saved = {str(r["path"]) for r in self.core.meta.dead_letter_rows(self.job_id, paths)}
        return [letter for letter in self._handed_over if letter["path"] not in saved]

    def recovered(self) -> None:
        """What was handed over and did not commit goes with the next checkpoint."""
        self._letters = [*self._unsaved(), *self._letters]
        self._handed_over = []
        self._dirty = True

    def contribute(self, contribution: Contribution) -> None:
        if (job := self.job) is not None and job.state != self._state:
            contribution.job_updates.setdefault(self.job_id, {})["state"] = self._state
        if not self._dirty and not self._letters:
            return
        contribution.states[(self.job_id, "letters")] = self._held.as_dict()
        if self.fresh:
            return
        self._dirty = False
        letters, self._letters = self._letters, []
        self._handed_over += letters
        contribution.dead_letters += letters
        contribution.states[(self.job_id, "log")] = self.reader.state.as_dict()
        contribution.states[(self.job_id, "replay")] = self.replaying.as_dict()
        contribution.states[(self.job_id, "rewind")] = {"epoch": self.noted_rewind}
        contribution.states[(self.job_id, "progress")] = self.core.progress_of(self.job_id).totals()  # I7
        needed = self.reader.state.truncated_to.epoch
        contribution.pins[f"sink:{self.job_id}"] = min(needed, self.noted_rewind or needed)
        self.reader.forget(self.reader.state)

    def row(self) -> dict[str, Any]:
        return log_store_row(self.name, self.reader.backlog(), self.reader.state)

    # -- delivering -------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self.task is not None:
            # A delivery under way is let finish: cutting it would only mean doing it again.
            done, _ = await asyncio.wait({self.task}, timeout=5.0)
            if not done:
                self._given_up = True
                self.core.jobs.cancel(f"sink-{self.job_id}-")
                self.task.cancel()
                await asyncio.gather(self.task, return_exceptions=True)
        self._answer(TransientError("SINK_FAILED", f"sink {self.name} stops before it could do that"))

    async def rewind_to(self, epoch: int) -> None:
        await ask_rewind(self, epoch)

    async def replay(self) -> int:
        """Deliver the dead letters again, now or not at all; gives how many rows they were."""
        if not letters_of(self):
            return 0
        if reason := self._held_by(self._limit(sink_options(self.raw(), resolve_secret=resolve_secret))):
            raise UsageError("PAUSED", f"sink {self.name} does not deliver now: {reason}")
        if self._replay is None:
            self._replay = asyncio.get_running_loop().create_future()
        self._look_now()
        return await self._replay

    async def attempt(self) -> None:
        """Wait until the sink has done what it was asked for, or has failed to."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        self._look_now()
        await done

    def _look_now(self) -> None:
        self._hurry = True
        self._wake.set()

    def _answer(self, error: HeadwaterError | None) -> None:
        """Tell those who wait how it ended."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_exception(error) if error is not None else one.set_result(None)
        if error is not None and self._replay is not None and not self._replay.done():
            self._replay.set_exception(error)
            self._replay = None

    def raw(self) -> dict[str, str]:
        job = self.job
        return raw_options(self.core, job) if job is not None else {}

    async def run(self) -> None:
        self._events = asyncio.get_running_loop()
        while not self._stopping:
            try:
                await self._deliver_all()
            except HeadwaterError as error:
                await self._wait_after(error)
            except Exception as error:
                await self._wait_after(self._explained(error))

    def _explained(self, error: Exception) -> HeadwaterError:
        if "SINK_NOT_APPEND_ONLY" in str(error):
            return not_append_only(self.name)
        log.warning("sink %s failed", self.name, exc_info=error)
        return TransientError("SINK_FAILED", f"sink {self.name} failed: {type(error).__name__}", hint="it is retried")

    async def _wait_after(self, error: HeadwaterError) -> None:
        self.failed = True
        self._state = "failed" if isinstance(error, DefiniteError) else "live"
        self.core.record_error(self.job_id, self.name, error, retrying=True)
        self.reader.rewind()
        delay = self.backoff.failed()
        back = "" if self.noted_rewind is None else f" (then it goes back to epoch {self.noted_rewind})"
        self.core.report_progress(self.job_id, phase="waiting", waiting_for=f"{error}{back}")
        self._hurry = False
        self._answer(error)
        end = time.monotonic() + delay
        while not self._stopping and not self._hurry and (left := end - time.monotonic()) > 0:
            self._wake.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()

    def source(self) -> JobRow:
        """What the sink reads, with the columns that it had when the sink was created."""
        source = self.core.registry.by_id[self.source_id]
        columns = self.job.spec.get("columns") if self.job else None
        schema = schema_of(source).restricted(columns)
        return dataclasses.replace(source, spec={**source.spec, "schema": schema.as_dict()})

    async def _deliver_all(self) -> None:
        """Open the target and deliver until something fails or the engine stops."""
        job = self.job
        if job is None:
            await asyncio.sleep(IDLE_S)
            return
        source = self.source()
        if not await self._input_ready():
            return
        columns, key = schema_of(source).visible, schema_of(source).key
        raw = self.raw()
        options = sink_options(raw, resolve_secret=resolve_secret)
        if not self.fresh:
            # A target that was there and is gone took what was delivered with it: an empty one would hide that.
            raw |= {name: "false" for name in CREATE_OPTIONS if name in options.values}
        sink = await self.in_thread(
            lambda: open_sink(self.name, raw, columns, key, self.core.generation, resolve_secret)
        )
        self.rewindable = sink.rewindable
        loop = DeliveryLoop(sink, rate_limit=options.rate_limit)
        try:
            found = await self.in_thread(lambda: self._claim(loop, columns, job))
            self.backoff.started()
            await self._begin(loop, found, options)
            while not self._stopping:
                await self._step(loop, options)
        finally:
            await self.in_thread(sink.close)

    def _claim(self, loop: DeliveryLoop, columns: Any, job: JobRow) -> int | None:
        try:
            loop.sink.validate(columns, job.spec["key"])
        except HeadwaterError as error:
            if error.code == "SINK_TARGET_MISSING" and not self.fresh:
                raise target_gone(self.name, error) from error
            raise
        return loop.start(None if self.rewinding is not None else self.reader.state.delivered_to)

    async def in_thread(self, work: Any) -> Any:
        return await self.core.jobs.run("sink", "sink", work, subject=self.job_id)

    async def _input_ready(self) -> bool:
        source = self.core.registry.by_id.get(self.source_id)
        if source is not None and (source.kind == "table" or source.state == "live"):
            return True
        self.core.report_progress(self.job_id, phase="waiting", waiting_for=f"view {source.name if source else ''}")
        await asyncio.sleep(IDLE_S / 5)
        return False

    async def _begin(self, loop: DeliveryLoop, found: int | None, options: Any) -> None:
        """First delivery: the snapshot as of now, then the log from there on. Later ones: from where the target is."""
        begun = await self.in_thread(loop.unfinished)
        job = self.job
        assert job is not None
        if self.fresh and max(found or 0, begun[1] if begun else 0) < job.created_epoch:
            # A sink of this name that was dropped left it: it says nothing about our input, or about what was
            # changed since. What this sink delivered itself is of its own creation's epoch or later.
            if found is not None or begun is not None:
                await self.in_thread(lambda: loop.sink.reset(None))
            found = begun = None
        self._must_reach = begun[1] if begun is not None else None
        landed = await self._landed(loop, begun, options)
        refused = self._settle_letters(found)
        if found is not None:
            await self._count_landed(found, options, refused)
        if not self.fresh:
            self.reader.start_from(found)  # at once: what was counted must not be counted again
            self._note_part(begun, landed, found)
            if self.rewinding is not None:
                await self._do_rewind(loop)
                found = None
            await settle_replay(self, loop, options, found)
            return
        if begun is not None and begun[0] == 0:
            self.reader.set_partial(begun[1], landed)
            await self._deliver_snapshot(loop, options, begun[1])
        elif found is not None:
            self._restart_at(found)
        elif not options.snapshot:
            self._restart_at(job.created_epoch)
        else:
            await self._deliver_snapshot(loop, options)
        self.fresh = False
        self._dirty = True

    async def _landed(self, loop: DeliveryLoop, begun: tuple[int, int] | None, options: Any) -> frozenset[int]:
        """The vnodes that the target has of the batch under way.

        Rows that were refused are known of a batch that is written whole: with dead letters all of it is.
        """
        if begun is None or options.dead_letters:
            return frozenset()
        landed: frozenset[int] = await self.in_thread(lambda: loop.landed(self.core.vnode_count))
        return landed

    def _note_part(self, begun: tuple[int, int] | None, landed: frozenset[int], found: int | None) -> None:
        known = self.reader.state.per_vnode or ()
        if self.rewinding is None and not {v for v, _ in known} <= landed:
            raise went_back(self.name, f"delivered {len(known)} vnodes up to epoch {known[0][1].epoch}", found)
        self.reader.set_partial(begun[1] if begun is not None else 0, landed)
        self._dirty = True

    def _settle_letters(self, found: int | None) -> int:
        """Letters of a commit whose end was not seen count if the target has the batch; gives how many rows."""
        last, self._held = self._held, PendingDeadLetters()
        if not last.epoch:
            return 0
        self._dirty = True
        if found is None or found < last.epoch:
            return 0
        self._letters += letter_rows(self.job_id, last.letters)
        return last.rows

    async def _count_landed(self, found: int, options: Any, refused: int) -> None:
        """The target is ahead of our checkpoint: the rows that it got meanwhile are part of the total (I7)."""
        job = self.job
        assert job is not None
        after = job.created_epoch if self.fresh else self.reader.state.truncated_to.epoch
        whole = self.fresh and options.snapshot
        if not whole and not self.core.meta.change_epochs(self.source_id, after, found, 1):
            return

        made = snapshot_of(self, None, found, options) if whole else changes_between(self, None, after, found, options)
        self._count(await self.in_thread(made.count) - refused)

    def _count(self, rows: int) -> None:
        self.core.report_progress(self.job_id, rows=self.core.progress_of(self.job_id).rows + max(0, rows))
        self._dirty = True

    def _restart_at(self, epoch: int) -> None:
        self.reader.state = LogStoreState.starting_at(epoch)
        self.reader.rewind()

    async def _deliver_snapshot(self, loop: DeliveryLoop, options: Any, epoch: int | None = None) -> None:
        while reason := self._held_by(self._limit(options)):
            self.core.report_progress(self.job_id, phase="waiting", waiting_for=reason)
            if self._stopping:
                raise TransientError("SINK_FAILED", f"sink {self.name} stops before its snapshot")
            await asyncio.sleep(IDLE_S)
        epoch = epoch or self.core.meta.committed_epoch()
        total = sum(x.rows for x in self.core.meta.segments_at(self.source_id, epoch))
        self.core.report_progress(self.job_id, phase="snapshot", total_rows=total, rows=0, waiting_for="")
        made = snapshot_of(self, loop.sink, epoch, options)
        delivered = await self.in_thread(lambda: loop.deliver(0, epoch, made, self.hold))
        self._count(made.there)
        self.reader.state = LogStoreState.starting_at(epoch).delivered(epoch)
        self.reader.rewind()
        self._must_reach = None
        self.note(delivered)

    def key(self) -> tuple[str, ...]:
        job = self.job
        return tuple(job.spec["key"]) if job else ()

    def _limit(self, options: Any) -> int | None:
        job = self.job
        settings = job.spec.get("settings", {}) if job else {}
        limit = settings.get("sink_rate_limit", options.rate_limit)
        return None if limit is None else int(limit)

    def _held_by(self, limit: int | None) -> str:
        """What the user has to do before anything is delivered, if anything."""
        if self.core.paused:
            return "RESUME: the engine is paused"
        return "the rate limit is 0" if limit == 0 else ""

    async def _step(self, loop: DeliveryLoop, options: Any) -> None:
        if self.rewinding is not None:
            await self._do_rewind(loop)
        if self._replay is not None and not self.core.paused:
            await self._do_replay(loop, options)
        loop.pace.limit = self._limit(options)
        wait = max(loop.pace.owed_s, self._next_at - time.monotonic())
        batch = None
        if reason := self._held_by(loop.pace.limit):
            self.core.report_progress(self.job_id, waiting_for=reason)
        else:
            await self._hold_rows(loop, options)
            batch = self._next_batch(options, loop.pace.limit) if wait <= 0 else None
        if batch is None:
            self._wake.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(min(IDLE_S, wait) if wait > 0 else IDLE_S):
                    await self._wake.wait()
            return
        if not batch.empty:
            await self._deliver(loop, batch, options)
            self._next_at = time.monotonic() + options.interval_s
        self.reader.delivered(batch)
        self._must_reach = None
        self._dirty = True
        self.failed = False
        self.well_at = time.time()
        self._state = "live"
        self.core.report_progress(self.job_id, phase="live", waiting_for="")
        self.core.progress_of(self.job_id).finish()

    def _next_batch(self, options: Any, limit: int | None) -> LogBatch | None:
        """Small epochs are delivered together. Under a rate limit a batch is about a second's worth."""
        if self._must_reach is not None:
            return self.reader.next_batch(WHOLE, WHOLE, self._must_reach)
        rows = options.batch_max_rows if limit is None else min(options.batch_max_rows, limit)
        return self.reader.next_batch(rows, options.batch_max_epochs)

    async def _hold_rows(self, loop: DeliveryLoop, options: Any) -> None:
        """Have the rows of new small epochs in memory, where the sink can take them from there."""
        source = self.source()
        if not self.rows.suits(loop.sink, source, options, self.key()):
            return
        if chunks := self.rows.unread(self.reader.committed_to):
            self.rows.keep(await self.in_thread(lambda: self.rows.read(source, chunks)))

    async def _deliver(self, loop: DeliveryLoop, batch: LogBatch, options: Any) -> None:
        # A range that is partly in the target is cut into slices as it was, by Spark.
        made = changes_of(self, loop.sink, batch, options, in_memory=self._must_reach is None)
        delivered = await self.in_thread(lambda: loop.deliver(batch.from_epoch, batch.to_epoch, made, self.hold))
        self._count(made.there)
        self.note(delivered)

    def hold(self, token: Token) -> None:
        """Called by the delivering thread before a commit: a batch with letters is noted with a checkpoint first."""
        if self._given_up:
            raise TransientError("SINK_FAILED", f"sink {self.name} has stopped")
        letters = token.payload.get("dead_letters")
        if letters:
            noted = asyncio.run_coroutine_threadsafe(self._hold(held(token.to_epoch, letters)), self._events)
            noted.result(NOTED_WITHIN_S)

    async def _hold(self, letters: PendingDeadLetters) -> None:
        self._held = letters
        await self.save()

    def note(self, delivered: Delivered) -> None:
        self._count(delivered.rows)
        self.core.counters.rows(self.name, delivered.rows)
        self._held = PendingDeadLetters()
        self._letters += letter_rows(self.job_id, delivered.dead_letters)

    async def save(self) -> None:
        """Wait until a checkpoint has what is to be stored."""
        self._dirty = True
        await self.core.main.checkpoint()

    async def _do_replay(self, loop: DeliveryLoop, options: Any) -> None:
        assert self._replay is not None
        done, self._replay = self._replay, None
        try:
            done.set_result(await replay_letters(self, loop, options))
        except BaseException as error:
            # The caller is told; whoever runs this sink decides what happens next.
            done.set_exception(error if isinstance(error, HeadwaterError) else TransientError("SINK_FAILED", "stopped"))
            raise

    async def _do_rewind(self, loop: DeliveryLoop) -> None:
        await do_rewind(self, loop)
        self._must_reach = None
        self._answer(None)
