"""What outlives a simulated process: the files, the source's log, what clients were told; and the invariants over it.

`simulation.py` has the processes. What is committed is read here with plain SQL, not through the code under test.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from headwater.barrier.progress import JobProgress
from headwater.storage.meta import MAIN_LANE
from headwater.testing.virtual_clock import VirtualClockLoop

if TYPE_CHECKING:
    from headwater.testing.simulation import Process

SOURCE: Final = 1
TABLES: Final = (2, 3)
NOTES: Final = 4
SUMS: Final = 5
COPY: Final = 6
COPY_LANE: Final = "copy"
SPLITS: Final = 5
KEYS: Final = 4
CHANGES_PER_S: Final = 4.0
RETENTION_S: Final = 6.0
START_UNIX_S: Final = 1_790_000_000.0
CHAOS_S: Final = 12.0
CALM_S: Final = 20.0  # more than the longest chain of back-offs, so that everything must be well at the end
FAULT_RATE: Final = 0.03
# Points are passed by every actor at every barrier, commits once: without weights hardly any commit would be reached.
WEIGHTS: Final = {
    "killed": 0.2,
    "stopped": 0.2,
    "actor failed": 0.3,
    "commit failed": 3.0,
    "commit unknown": 3.0,
    "commit slow": 4.0,
    "build failed": 4.0,
}

Rows = dict[int, int]


class Violated(AssertionError):
    """An invariant does not hold."""


def demand(condition: bool, invariant: str, what: str) -> None:
    if not condition:
        raise Violated(f"{invariant}: {what}")


def fold(rows: Rows, changes: Rows) -> None:
    """Newer values are greater ones here, in all tables, as `_seq` is in real ones."""
    for key, value in changes.items():
        rows[key] = max(value, rows.get(key, value))


def table_at(table: int, position: int) -> Rows:
    """What the source's table is after `position` changes: the oracle."""
    rows: Rows = {}
    for n in range(position):
        if TABLES[n % 2] == table:
            rows[n // 2 % KEYS] = n
    return rows


def sums_of(tables: Sequence[Rows]) -> Rows:
    return {k: sum(t.get(k, 0) for t in tables) for k in range(KEYS) if any(k in t for t in tables)}


def copy_of(rows: Rows) -> Rows:
    return {k: v * 10 for k, v in rows.items()}


@dataclass
class World:
    """See the head of this module."""

    seed: int
    rng: random.Random
    loop: VirtualClockLoop
    url: str
    fault_rate: float = FAULT_RATE
    files: dict[str, Rows] = field(default_factory=dict)
    acknowledged: set[int] = field(default_factory=set)
    offered: int = 0
    poisoned: set[tuple[str, str, int]] = field(default_factory=set)
    shown: dict[int, int] = field(default_factory=dict)
    splits_seen: int = 0
    last_epoch: dict[str, int] = field(default_factory=dict)
    history: dict[int, tuple[int, tuple[Rows, ...]]] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    broken: Violated | None = None
    events: int = 0
    trace: int = 0  # of all events and their times: equal for equal runs
    faults: dict[str, int] = field(default_factory=dict)
    over: bool = False
    deleted: int = 0

    def __post_init__(self) -> None:
        self._raw = sqlite3.connect(self.url.removeprefix("sqlite:///"))
        self._seen: tuple[Any, ...] = ()

    def close(self) -> None:
        self._raw.close()

    def now_s(self) -> float:
        return START_UNIX_S + self.loop.time()

    def log_length(self) -> int:
        return int(self.loop.time() * CHANGES_PER_S)

    # -- what is committed, read without the code under test --------------------------------------------------------

    def query(self, sql: str, *arguments: object) -> list[Any]:
        return self._raw.execute(sql, arguments).fetchall()

    def committed_epoch(self, lane: str) -> int:
        ((epoch,),) = self.query("SELECT max(epoch) FROM epochs WHERE lane = ?", lane)
        return epoch or 0

    def position_at(self, epoch: int) -> int:
        query = "SELECT position FROM positions WHERE source_id = ? AND epoch <= ? ORDER BY epoch DESC LIMIT 1"
        return next((int(position) for (position,) in self.query(query, SOURCE, epoch)), 0)

    def splits_done(self) -> int:
        ((done,),) = self.query("SELECT count(*) FROM splits WHERE state = 'HANDED_OVER'")
        return int(done)

    # -- faults -----------------------------------------------------------------------------------------------------

    def draw(self, fault: str) -> bool:
        hit = not self.over and self.rng.random() < self.fault_rate * WEIGHTS.get(fault, 1.0)
        if hit:
            self.faults[fault] = self.faults.get(fault, 0) + 1
        return hit

    async def point(self, process: Process, label: str) -> None:
        """A named step at which a process may die, stop for a while, or just be slow."""
        self.check(label)
        if self.draw("killed"):
            self.loop.freeze(process.name)
        elif self.draw("stopped"):
            self.loop.freeze(process.name)
            self.loop.call_later(self.rng.uniform(0.5, 6.0), self.loop.thaw, process.name)
        await asyncio.sleep(self.rng.choice((0.0, 0.0, 0.001, 0.05, 0.4)))

    # -- invariants -------------------------------------------------------------------------------------------------

    def check(self, event: str) -> None:
        """All invariants, on committed state as another process would see it."""
        self.events += 1
        self.trace = zlib.crc32(f"{self.loop.time():.6f} {event}".encode(), self.trace)
        if self.broken is None:
            try:
                if (now := self._fingerprint()) != self._seen:
                    self._check()
                    self._seen = now
            except Violated as violated:
                self.broken = Violated(f"{violated} (after {event}, at {self.loop.time():.3f} s)")
        if self.broken is not None:
            raise self.broken

    def _fingerprint(self) -> tuple[Any, ...]:
        """Changes with everything that `_check` looks at; so an event that changed nothing costs next to nothing."""
        if not self.query("SELECT 1 FROM sqlite_master WHERE name = 'epochs'"):
            return ()
        segments = "SELECT count(*), total(id), total(removed_epoch / 65536) FROM segments"
        epochs = "SELECT count(*), max(epoch), total(epoch / 65536) FROM epochs"
        others = "SELECT count(*), (SELECT total(live_epoch / 65536) FROM jobs) FROM positions"
        splits = "SELECT count(*) FROM splits"
        rows = [self.query(query)[0] for query in (segments, epochs, others, splits)]
        return (*rows, self.deleted, len(self.acknowledged))

    def _check(self) -> None:
        epoch = self.committed_epoch(MAIN_LANE)
        self._check_order(MAIN_LANE, epoch)
        if self.query("SELECT 1 FROM jobs WHERE id = ? AND lane = ?", COPY, COPY_LANE):  # else it may be forgotten
            self._check_order(COPY_LANE, self.committed_epoch(COPY_LANE))
        self._check_contents(epoch)
        self._check_notes(epoch)
        self._check_progress()

    def _check_order(self, lane: str, epoch: int) -> None:
        last = self.last_epoch.get(lane, 0)
        demand(epoch >= last, "I6", f"lane {lane} went back from {last} to {epoch}")
        self.last_epoch[lane] = epoch

    def rows_at(self, table: int, epoch: int) -> Rows:
        rows: Rows = {}
        query = "SELECT path FROM segments WHERE table_id = ? AND added_epoch <= ? AND removed_epoch > ? ORDER BY id"
        for (path,) in self.query(query, table, epoch, epoch):
            demand(path in self.files, "I8", f"table {table} at {epoch} has lost a file that is visible")
            demand(table != NOTES or not rows.keys() & self.files[path].keys(), "I1", "a write was committed twice")
            fold(rows, self.files[path])
        return rows

    def _check_contents(self, epoch: int) -> None:
        if epoch in self.history:
            ((oldest,),) = self.query("SELECT min(epoch) FROM epochs WHERE lane = ?", MAIN_LANE)
            epoch = self.rng.choice([e for e in self.history if e >= oldest])
        elif epoch == 0:
            return
        position = self.position_at(epoch)
        tables = tuple(self.rows_at(t, epoch) for t in TABLES)
        for table, rows in zip(TABLES, tables, strict=True):
            demand(rows == table_at(table, position), "I1", f"table {table} at {epoch} is not what {position} says")
        demand(self.rows_at(SUMS, epoch) == sums_of(tables), "I1", f"the view at {epoch} is not its query")
        self._check_copy(epoch, tables[0])
        known = self.history.setdefault(epoch, (position, tables))
        demand(known == (position, tables), "I1", f"epoch {epoch} has changed after its commit")

    def _check_copy(self, epoch: int, source: Rows) -> None:
        if self.query("SELECT 1 FROM jobs WHERE id = ? AND live_epoch <= ?", COPY, epoch):
            demand(self.rows_at(COPY, epoch) == copy_of(source), "I1", f"the created view at {epoch} is not its query")

    def _check_notes(self, epoch: int) -> None:
        found = self.rows_at(NOTES, epoch).keys()
        demand(self.acknowledged <= found, "I1", "an acknowledged write is not there")

    def _check_progress(self) -> None:
        done = self.splits_done()
        demand(done >= self.splits_seen, "I7", "committed progress went back")
        self.splits_seen = done

    def demand(self, condition: bool, invariant: str, what: str) -> None:
        """As `demand`, in a task whose exceptions go elsewhere."""
        if not condition:
            self.broken = self.broken or Violated(f"{invariant}: {what} (at {self.loop.time():.3f} s)")
            raise self.broken

    def show(self, process: Process, progress: JobProgress) -> None:
        """A user looks at the progress of a job, at the newest engine: a fenced one may show what it last knew."""
        if process is not self.processes[-1]:
            return
        self.demand(progress.done >= self.shown.get(progress.job_id, 0), "I7", "shown progress went back")
        self.demand(progress.done <= self.splits_seen, "I7", "progress was shown that is not committed")
        self.shown[progress.job_id] = progress.done

    def check_no_leftovers(self, process: Process, lane: str, build: int) -> None:
        """After a recovery nothing of earlier lives of this lane is left (I8)."""
        spared = {path for (path,) in self.query("SELECT path FROM segments")} | process.staged_paths()
        for path in self.files.keys() - spared:
            generation, owner, born = path.split("/")[:3]
            older = int(generation) < process.meta.generation
            same = int(generation) == process.meta.generation and owner == lane and int(born) < build
            self.demand(not (older or same), "I8", "a staged file has outlived its recovery")
