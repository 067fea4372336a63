"""One source at work: its reader process and spool, the position of every epoch, its tables' part of each barrier.

    reader process ─► spool ─► (barrier N) P(N) ─► one task per group of tables ─► segments ─► commit ─► acknowledge

`capture.py` has all sources of an engine, `backfill.py` each table.

P(N) lies between two transactions and is one for all tables of a source (I2). Acknowledged to the source is what a
checkpoint knows to be durable in the spool (I3), so its log does not grow because of a backfill or a pause. The spool
keeps what a read that is not handed over may still need (`floor`).

An epoch that needs a large value which neither the stream nor our table has is held back: the position stays where it
is until the value is read at the source and the stream has reached that read (`Held`; the rule is `spark/toast.py`).

A stream that cannot be continued (slot lost or moved, server restored) is given up: a new slot, a new spool, and a
resync of every table, during which the tables stand still (`heal`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headwater.errors import DefiniteError, HeadwaterError, TransientError
from headwater.model.barrier import Barrier
from headwater.runtime import source_setup as setup
from headwater.runtime.backfill import TableBackfill
from headwater.runtime.epoch_size import FIRST_ROWS, ROW_SIZES, EpochSize
from headwater.runtime.splits import EpochPart
from headwater.sql import statements as s
from headwater.storage.checkpoint import Contribution, JobRow, NewSegment
from headwater.storage.private import make_directory

if TYPE_CHECKING:
    from headwater.capture.spool import SpoolReader
    from headwater.connectors.postgres.client import PostgresConfig
    from headwater.connectors.postgres.reader_process import ReaderProcess
    from headwater.engine import EngineCore
    from headwater.runtime.tables import Staged

PIECE_BYTES: Final = 32 << 20  # of the spool that a task holds at a time, unless one transaction alone is larger
HELD_TRIES: Final = 100  # reads for one epoch's large values before its table is given up and copied again
HELD_RETRY_S: Final = 2.0  # after a read at the source that failed
HEAL_RETRY_S: Final = 10.0


@dataclass(slots=True)
class Held:
    """An epoch up to `target` that waits for large values; `high`: where the stream must be to try it again."""

    target: int
    high: int
    patches: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    tries: int = 0
    not_before: float = 0.0

    def patches_of(self, table_id: int) -> tuple[Any, ...]:
        from headwater.spark.toast import Patch

        return tuple(Patch(p["path"], p["snapshot"]) for p in self.patches.get(table_id, []))

    @property
    def files(self) -> list[str]:
        return [p["path"] for patches in self.patches.values() for p in patches]


class SourceRuntime:
    """One source: its reader, its position, its tables."""

    def __init__(self, core: EngineCore, job: JobRow) -> None:
        from headwater.capture.spool import SpoolReader
        from headwater.connectors.postgres.client import PostgresConfig

        self.core = core
        self.job_id = job.id
        self.name = job.name
        self.job = job
        self.config: PostgresConfig = PostgresConfig.from_options(job.spec["options"])
        self.directory = Path(core.local_dir) / "spool" / str(job.id)
        self.start_lsn = int(job.spec["start_lsn"])
        self.spool = SpoolReader(self.directory)
        self.reader: ReaderProcess | None = None
        self.healing = False
        self.lost: DefiniteError | None = None  # our own copy of the stream cannot be read
        self.position = 0  # of the last barrier, committed or not
        self.committed_position = 0
        self.spooled = 0
        self.tables: dict[int, TableBackfill] = {}
        self._results: dict[int, dict[str, Any]] = {}
        self._handing: dict[int, EpochPart] = {}
        self._working: set[int] = set()
        self._holds: dict[object, int] = {}
        self._obsolete: list[tuple[int, str]] = []
        self.size = EpochSize()
        self._came_to = 0
        self.handed_rows = EpochSize(ROW_SIZES, FIRST_ROWS)
        self.frozen = 0  # by how many it is asked to stand still at its position
        self._held: Held | None = None
        self._last = 0
        self._epoch = 0
        self._heal_at = 0.0

    @property
    def durable(self) -> int:
        """Up to where the spool is complete."""
        return max(self.position, self.spooled, self.reader.position if self.reader else 0)

    @property
    def failed(self) -> bool:
        return self.error is not None and isinstance(self.error, DefiniteError)

    @property
    def error(self) -> HeadwaterError | None:
        """What stands in the way of the stream."""
        return self.lost or (self.reader.last_error if self.reader is not None else None)

    @property
    def connected(self) -> bool:
        return self.reader is not None and self.reader.connected

    def goal(self) -> int | None:
        """What the server has by now, as far as we have heard; None while it is not heard of."""
        if self.reader is None or not self.reader.connected:
            return None
        wanted = max(self.reader.server_lsn, self.reader.position)
        self.reader.nudge(wanted)
        return wanted

    # -- life -------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Committed state: the last position and the tables' splits."""
        from headwater.connectors.postgres.client import parse_lsn

        self._follow_spool(self.core.meta.state(self.job_id, "stream") or {})
        stored = self.core.meta.position(self.job_id)
        self.position = self.committed_position = parse_lsn(stored) if stored else self.start_lsn
        self.spooled = int(self.core.meta.state(self.job_id, "spooled") or self.position)
        self._obsolete = []
        self._held = None
        known = self.tables
        self.tables = {}
        for job in self.core.registry.of_kind("table"):
            if job.spec.get("captured") and self.core.registry.depends_on(job) == [self.job_id]:
                self.tables[job.id] = known.get(job.id) or TableBackfill(self.core, self, job)
                self.tables[job.id].load()

    def _follow_spool(self, stream: dict[str, Any]) -> None:
        """The spool of the present stream: a healed source has another one than the first."""
        from headwater.capture.spool import SpoolReader

        name = str(stream.get("spool") or self.job_id)
        self.start_lsn = int(stream.get("start_lsn") or self.job.spec["start_lsn"])
        if name != self.directory.name:
            self.directory = self.directory.with_name(name)
            self.spool = SpoolReader(self.directory)

    async def start_reader(self) -> None:
        from headwater.connectors.postgres.reader_process import ReaderProcess

        if self.reader is None:
            make_directory(self.directory)
            self.reader = ReaderProcess(
                self.config,
                self.directory,
                start_lsn=self.start_lsn,
                acknowledged=self.spooled,
            )
        await self.reader.start()

    def start_backfills(self) -> None:
        for backfill in self.tables.values():
            backfill.start()

    async def pause_backfills(self) -> None:
        await asyncio.gather(*(t.stop() for t in self.tables.values()))

    async def stop(self) -> None:
        await self.pause_backfills()
        if self.reader is not None:
            await self.reader.stop()

    async def enter(self, table: Any, statement: s.CreateTableFrom) -> dict[str, Any]:
        """Let the table enter the stream; gives what is to be remembered of it."""
        with self.holding() as floor:
            state = await asyncio.to_thread(setup.enter, self.config, table)
            self._holds[state["mark"]] = floor  # until the table itself holds it
            # Published for another one that we capture of it: whichever is dropped last takes it out again.
            state["published"]["added"] |= any(self._published(t.captured) for t in self._others_of(state["oid"]))
            await self.start_reader()
        return {**state, "floor": floor, "snapshot": table.snapshot}

    @contextmanager
    def holding(self) -> Iterator[int]:
        """A position from which on the spool is kept meanwhile.

        It is taken before an entry mark: what ended up to it has a smaller transaction number than the mark, so the
        first read waits until it is visible.
        """
        holder, floor = object(), self.durable
        self._holds[holder] = min([self.position, *self._holds.values()])
        try:
            yield floor
        finally:
            del self._holds[holder]

    def release(self, holder: object) -> None:
        """The spool need not be kept for this table any more: it keeps what it needs itself, or was not made."""
        self._holds.pop(holder, None)

    def enter_again(self, backfill: TableBackfill) -> dict[str, Any]:
        """Mark the table's entry again, and see which columns it has now; SourceError where its policy says stop."""
        info, streamed, mark = setup.enter_again(self.config, list(backfill.captured["external"]))
        shape = backfill.reshaped(info, streamed)
        return {**mark, "shape": shape.as_dict()} if shape else mark

    def add_table(self, job: JobRow) -> None:
        backfill = self.tables[job.id] = TableBackfill(self.core, self, job)
        backfill.load()
        backfill.start()

    async def remove_table(self, job_id: int) -> int | None:
        """Follow it no more; gives its number at the source if it is published because of us, and for no other one."""
        table = self.tables.pop(job_id)
        await table.stop()
        return table.oid if self._published(table.captured) and not self._others_of(table.oid) else None

    def _others_of(self, oid: int) -> list[TableBackfill]:
        return [t for t in self.tables.values() if t.oid == oid]

    @staticmethod
    def _published(captured: dict[str, Any]) -> bool:
        return bool(captured.get("published", {}).get("added"))

    async def resync(self, job: JobRow) -> None:
        await self.tables[job.id].resync()

    # -- one barrier ------------------------------------------------------------------------------------------------

    async def prepare(self, barrier: Barrier, contribution: Contribution) -> list[tuple[int, Any]]:
        self._results.clear()
        self._handing.clear()
        self._working.clear()
        self._epoch = int(barrier.epoch.prev)
        if self.healing:
            return []
        try:
            return await self._prepare(barrier, contribution)
        except DefiniteError as error:
            if not error.code.startswith("SPOOL_"):
                raise
            self.stream_lost(error)
            return []

    def stream_lost(self, error: DefiniteError) -> None:
        """The spool does not hold what it should: the position stands still until `heal` has begun another stream."""
        self.lost = error
        self.position = self._last

    async def _prepare(self, barrier: Barrier, contribution: Contribution) -> list[tuple[int, Any]]:
        from headwater.connectors.postgres.client import format_lsn

        durable = self.durable
        self._last = last = self.position  # before anything can go wrong: the position stands still here then
        self.size.record_arrived(await asyncio.to_thread(self._came, durable))
        self.handed_rows.record_arrived(0)
        paused = barrier.at_rest or self.lost is not None
        target = last if paused else await asyncio.to_thread(self._target, last, durable)
        self.position = target
        contribution.positions[self.job_id] = format_lsn(target)
        if durable > self.spooled:
            self.spooled = durable
            contribution.states[(self.job_id, "spooled")] = durable
        return await asyncio.to_thread(self._tasks, last, target, contribution, paused)

    def _came(self, durable: int) -> int:
        """Bytes that the spool has got since the last barrier; of the first one after a start none are known."""
        before, self._came_to = self._came_to or durable, durable
        return self.spool.bytes_between(before, durable) if self.lost is None else 0

    def _target(self, last: int, durable: int) -> int:
        """The end of the epoch: all that is durable, or as many whole transactions as stay within bounds."""
        if self.frozen:
            return last
        if self._held is not None:
            ready = durable >= self._held.high and time.monotonic() >= self._held.not_before
            return self._held.target if ready else last
        index, more = self.spool.first_transactions(last, durable, self.size.limit)
        target = int(index["end_lsn"][-1]) if more else durable
        self.size.record_taken(int((index["end"] - index["start"]).sum()), rest=more)
        return target

    def _tasks(self, last: int, target: int, contribution: Contribution, paused: bool) -> list[tuple[int, Any]]:
        from headwater.spark.capture import DecodeTables

        work = []
        for table_id, backfill in list(self.tables.items()):  # we are in a thread: others come and go meanwhile
            state = backfill.at_barrier(last, target, contribution, paused)
            if state is None:
                continue
            self._handing[table_id] = state
            if state.first_lsn < target:
                work.append(state)
        if not work:
            return []
        first = min(w.first_lsn for w in work)
        ranges = tuple(self.spool.ranges(first, target, PIECE_BYTES))
        size = sum(r.end - r.start for r in ranges)
        if not ranges:
            return []
        self._working = {w.backfill.table_id for w in work}
        ahead = tuple(self.spool.ranges(target, self._held.high, PIECE_BYTES)) if self._held else ()
        count = max(1, min(self.core.slots, len(work)))
        groups = [work[i::count] for i in range(count)]
        tasks: list[tuple[int, Any]] = []
        for group in groups:
            tables = tuple(self._part(w, size) for w in group)
            task = DecodeTables(self.core.data_dir, str(self.directory), ranges, tables, self.core.vnode_count, ahead)
            tasks.append((size, task))
        return tasks

    def _part(self, work: EpochPart, size: int) -> Any:
        from headwater.spark.toast import Origin

        table = work.backfill
        return dataclasses.replace(
            work.captured(self.core.sequence.take(size)),
            origin=Origin(self.config, *table.captured["external"]),
            patches=self._held.patches_of(table.table_id) if self._held else (),
        )

    def take_result(self, result: dict[str, Any]) -> None:
        self._results[result["subject"]] = result

    async def finish(self, contribution: Contribution, staged: Staged) -> None:
        """Put together what the tasks found: hand-overs, deltas, TRUNCATEs."""
        if self.healing:
            return  # the position is that of the stream which is about to begin
        if self.lost is not None:
            self._stand_still(contribution)
        elif any("held" in result for result in self._results.values()):
            self._hold_back(contribution)
        elif self._held is not None and self.position >= self._held.target:
            self.core.forget_files(self._held.files)
            self._held = None
        for table_id, state in self._handing.items():
            failed = contribution.job_updates.get(table_id, {}).get("state") == "failed"
            if table_id not in self.tables or failed:
                continue  # a failed table stays as it is
            if table_id in self._working and table_id not in self._results:
                raise RuntimeError(f"no task has answered for table {table_id}")
            result = self._results.get(table_id, {})
            truncate = result.get("truncate")
            segments = state.handed_segments(truncate)
            segments += [NewSegment(**segment) for segment in result.get("segments", ())]
            since = state.last_lsn if state.prepared is None else state.prepared.position
            if truncate is not None and truncate[0] > since:
                staged.resets.add(table_id)
            if state.prepared is not None:
                state.prepared.applied = self._epoch
                self._obsolete += [(self._epoch, path) for path in state.prepared.copy]
            for segment in segments:
                staged.add(segment)
            self.tables[table_id].handed_over(state, contribution)
        for table in self.tables.values():
            table.contribute_progress(contribution)
        if self.job_id in contribution.positions:
            contribution.states[(self.job_id, "keep")] = self._keep()

    def _hold_back(self, contribution: Contribution) -> None:
        """Large values are missing: this epoch does not move the source on. What its tasks wrote is written again."""
        held = self._held or Held(self.position, self.position)
        held.tries += 1
        for table_id, result in self._results.items():
            found = result.get("held", {})
            if "path" in found:
                held.patches.setdefault(table_id, []).append(found)
                held.high = max(held.high, found["high"])
            elif "overtaken" in found:
                held.target = held.high
            elif "error" in found:
                error = TransientError(**{k: found["error"][k] for k in ("code", "message", "detail", "hint")})
                self.core.record_error(table_id, self.tables[table_id].name, error, retrying=True)
                held.not_before = time.monotonic() + HELD_RETRY_S
            if found and held.tries > HELD_TRIES:
                heals = self.core.capture.healing.table_failed(self.tables[table_id], _given_up())
                self.core.job_failed(table_id, _given_up(), contribution, retrying=heals)
            self.core.forget_files(result.get("abandoned", [s["path"] for s in result.get("segments", ())]))
        self._held = held if held.tries <= HELD_TRIES else None
        if self.reader is not None:
            self.reader.nudge(held.high)
        self._stand_still(contribution)

    def _stand_still(self, contribution: Contribution) -> None:
        from headwater.connectors.postgres.client import format_lsn

        self.position = self._last
        contribution.positions[self.job_id] = format_lsn(self._last)
        self._handing.clear()

    def _keep(self) -> int:
        """From where on the spool is needed once this barrier is committed, also after a restart."""
        tables = [t.floor for t in self.tables.values() if t.unfinished and not t.failed]
        return min([self.position, *tables, *self._holds.values()])

    def committed(self, epoch: int, contribution: Contribution) -> None:
        from headwater.connectors.postgres.client import parse_lsn

        done = [path for e, path in self._obsolete if e <= epoch]
        self._obsolete = [(e, path) for e, path in self._obsolete if e > epoch]
        self.core.forget_files(done)
        for table_id, table in self.tables.items():
            if table_id in self.core.registry.by_id:
                table.progress_committed(contribution.states.get((table_id, "progress")))
        if self.job_id in contribution.positions:
            self.committed_position = parse_lsn(contribution.positions[self.job_id])
        stored = contribution.states.get((self.job_id, "spooled"))
        if self.reader is not None and stored is not None:
            self.reader.ack(int(stored))
        keep = contribution.states.get((self.job_id, "keep"))
        if keep is not None:
            floor = min([int(keep), *self._holds.values()])
            self.core.background(asyncio.to_thread(_truncate, self.spool, floor))

    # -- a stream that cannot be continued --------------------------------------------------------------------------

    async def heal(self) -> None:
        """Give the stream up and begin another one; every table is copied again, and stands still until then."""
        if time.monotonic() < self._heal_at:
            return
        self._heal_at = time.monotonic() + HEAL_RETRY_S
        self.healing = True
        try:
            await self._begin_stream()
        except HeadwaterError as error:
            self.core.record_error(self.job_id, self.name, error, retrying=True)
        finally:
            self.healing = False
            self.start_backfills()

    async def _begin_stream(self) -> None:
        from headwater.connectors.postgres.client import format_lsn

        await self.pause_backfills()
        ours = bool(self.job.spec.get("slot_created"))
        error = self.reader.last_error if self.reader else None
        code = error.code if error is not None else ""
        if self.reader is not None:
            await self.reader.stop()  # it must not move the slot any more
        start = await asyncio.to_thread(
            functools.partial(
                setup.new_slot,
                self.config,
                ours=ours,
                publication_lost=code == "SOURCE_PUBLICATION_LOST",
                unreadable=code == "SOURCE_SLOT_UNREADABLE",
            )
        )
        stream = {"spool": f"{self.job_id}-{time.time_ns()}", "start_lsn": start}
        contribution = Contribution(
            positions={self.job_id: format_lsn(start)},
            states={(self.job_id, "stream"): stream, (self.job_id, "spooled"): start},
        )
        for table in list(self.tables.values()):
            try:
                mark = await asyncio.to_thread(self.enter_again, table)
            except DefiniteError as error:  # the table is gone, or not ours any more: the others go on without it
                self.core.job_failed(table.table_id, error, contribution)
            else:
                table.contribute_resync(contribution, mark, start, follow=False)
        abandoned = self.directory
        await self.core.main.request(contribution=contribution)
        self.reader, self.lost = None, None
        for table in self.tables.values():
            self.core.capture.healing.forget(table)
        self.load()
        self.core.forget_files([f"spool/{abandoned.name}"])
        await self.start_reader()

    # -- what is shown ----------------------------------------------------------------------------------------------

    def lag_bytes(self) -> int | None:
        """What waits in the spool, and what the server says that it has and we do not; None: it cannot be told."""
        if self.reader is None:
            return 0
        try:
            spooled = self.spool.bytes_between(self.committed_position, self.reader.position)
        except (HeadwaterError, OSError):  # whoever needs what is in it says so
            return None
        return spooled + self.reader.unread_bytes

    def lag_s(self) -> float | None:
        """How long the oldest change waits that is not committed here."""
        newest = max(self.committed_position, self.reader.position if self.reader else 0)
        try:
            index, _ = self.spool.first_transactions(self.committed_position, newest, 1)
        except (HeadwaterError, OSError):
            return None
        return max(0.0, time.time() - float(index["commit_us"][0]) / 1e6) if len(index) else 0.0

    def row(self) -> dict[str, Any]:
        from headwater.connectors.postgres.client import format_lsn

        lag_s = self.lag_s()
        return {
            "name": self.name,
            "connector": self.job.spec["options"]["connector"],
            "position": format_lsn(self.committed_position),
            "acknowledged": format_lsn(self.reader.acknowledged if self.reader else self.spooled),
            "lag_bytes": self.lag_bytes(),
            "lag_s": None if lag_s is None else round(lag_s, 3),
            "retained_bytes": self.spool.retained_bytes(),
        }


def _given_up() -> DefiniteError:
    return DefiniteError("TOAST_VALUE_UNKNOWN", "a large value is overwritten at the source faster than it can be read")


def _truncate(spool: SpoolReader, floor: int) -> None:
    # There is no spool before the first table, and a healed source has just left its old one.
    with contextlib.suppress(FileNotFoundError):
        spool.truncate_before(floor)
