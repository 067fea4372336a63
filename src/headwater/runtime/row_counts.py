"""How many rows each table and view holds now, for status, hw_progress and the page.

A checkpoint knows how many rows an epoch wrote, not how many of them were new, and to find out in the epoch would make
it longer. So it is counted outside the lanes: at once where a table has no deltas (its base's rows are known), else by
a job over keys alone, when a table has not changed for a moment, or was not counted for long. What is shown is thus
exact as of the epoch that is kept with it, and that is the present one as soon as the table is quiet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headwater.errors import HeadwaterError
from headwater.runtime.registry import schema_of
from headwater.runtime.tables import AnySegment, TableState
from headwater.storage.checkpoint import Contribution, JobRow
from headwater.storage.files import DataDir
from headwater.storage.meta import MetaStore

if TYPE_CHECKING:
    from headwater.engine import EngineCore

STATE: Final = "rows"  # {"rows": n, "epoch": e}, committed with some later epoch
QUIET_S: Final = 2.0  # a table that is written to all the time is not counted all the time
STALE_S: Final = 30.0  # but so often; a job of some tenths of a second for all of them
# What takes longer than this is left alone for that many times as long afterwards.
LONG_S: Final = 1.0
REST: Final = 5
OFFLINE_ROWS: Final = 5_000_000  # the keys of that many are read in about a second


@dataclass(frozen=True, slots=True)
class RowCount:
    """Exact as of an epoch; as of none (0) it is what is known without counting."""

    rows: int
    epoch: int


@dataclass(slots=True)
class _Watched:
    """One table: the segments that it was last seen with, since when, and what was counted."""

    segments: list[AnySegment] | None = None
    since: float = 0.0
    counted: list[AnySegment] | None = None  # the segments that the count is of
    not_before: float = 0.0
    counted_at: float = 0.0


class RowCounts:
    """See the head of this module. `Maintenance` calls `update` each round."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._counts: dict[int, RowCount] = {}
        self._watched: dict[int, _Watched] = {}
        self._unsaved: set[int] = set()

    def of(self, job: JobRow) -> RowCount:
        if job.id not in self._counts:
            self._counts[job.id] = stored_count(self.core.meta, job.id)
        return self._counts[job.id]

    def contribute(self, contribution: Contribution) -> None:
        """Kept for the next start, and for those who look while no engine runs."""
        for table_id in self._unsaved & self.core.registry.by_id.keys():
            count = self._counts[table_id]
            contribution.states[(table_id, STATE)] = {"rows": count.rows, "epoch": count.epoch}
        self._unsaved.clear()

    async def update(self) -> None:
        """Count what is due; one Spark job at most for all tables whose keys workers can compare."""
        states = {s.job.id: s for s in self.core.dataflow.states()}
        for table_id in [i for i in self._counts.keys() | self._watched.keys() if i not in self.core.registry.by_id]:
            self._counts.pop(table_id, None)
            self._watched.pop(table_id, None)
        now = time.monotonic()
        due = [state for state in states.values() if self._is_due(state, now)]
        if due:
            await self._count(due)

    def _is_due(self, state: TableState, now: float) -> bool:
        """A table's list of segments is another one after each change of it."""
        watched = self._watched.setdefault(state.job.id, _Watched())
        if watched.segments is not state.segments:
            watched.segments, watched.since = state.segments, now
        if watched.counted is state.segments or self._waits_for_commit(state):
            return False
        if not _deltas(state.segments):
            return True
        quiet = now - watched.since >= QUIET_S
        return now >= watched.not_before and (quiet or now - watched.counted_at >= STALE_S)

    def _waits_for_commit(self, state: TableState) -> bool:
        return any(s.table_id == state.job.id for _, s in self.core.dataflow.uncommitted)

    async def _count(self, due: Sequence[TableState]) -> None:
        """Nothing of them waits for its commit, so the last committed epoch shows the lists that they have now."""
        epoch = self.core.meta.committed_epoch()
        lists = {state.job.id: state.segments for state in due}
        for state in due:
            if not _deltas(state.segments):
                self._take(state.job.id, lists[state.job.id], RowCount(_rows(state.segments), epoch))
        tables = {s.job.id: (s.schema, list(lists[s.job.id])) for s in due if _deltas(s.segments)}
        if not tables:
            return
        began = time.monotonic()

        def work() -> dict[int, int]:
            from headwater.spark.query import explained
            from headwater.spark.row_count import count_rows

            with explained("COMPACTION_FAILED"):
                return count_rows(self.core, tables)

        try:
            found = await self.core.jobs.run("compaction", "count", work)
        except HeadwaterError:
            found = {}  # files that compaction has just replaced, or Spark is in trouble: whoever needs them says so
        ended = time.monotonic()
        for table_id in tables:
            watched = self._watched.get(table_id)
            if watched is None:
                continue  # dropped meanwhile
            watched.not_before = ended + REST * max(0.0, ended - began - LONG_S)
            watched.counted_at = ended
            if table_id in found:
                self._take(table_id, lists[table_id], RowCount(found[table_id], epoch))

    def _take(self, table_id: int, segments: list[AnySegment], count: RowCount) -> None:
        self._watched[table_id].counted = segments
        before, self._counts[table_id] = self._counts.get(table_id), count
        if _deltas(segments) and (before is None or before.rows != count.rows):
            self._unsaved.add(table_id)


def stored_count(meta: MetaStore, table_id: int) -> RowCount:
    """From what is committed alone: exact where there are no deltas, else as last counted; epoch 0: never counted."""
    epoch = meta.committed_epoch()
    segments = meta.segments_at(table_id, epoch)
    if not _deltas(segments):
        return RowCount(_rows(segments), epoch)
    stored: dict[str, Any] | None = meta.state(table_id, STATE)
    if stored:
        return RowCount(int(stored["rows"]), int(stored["epoch"]))
    return RowCount(_rows([s for s in segments if s.kind == "base"]), 0)


def offline_count(meta: MetaStore, data_dir: DataDir, job: JobRow, vnode_count: int) -> RowCount:
    """While no engine runs, nobody will count what the last one did not: done here, unless the table is large."""
    found, epoch = stored_count(meta, job.id), meta.committed_epoch()
    segments, schema = meta.segments_at(job.id, epoch), schema_of(job)
    inexact = any(c.type.upper() in ("FLOAT", "DOUBLE", "REAL") for c in schema.key_columns)
    if inexact or _rows(segments) > OFFLINE_ROWS or meta.changed_epoch(job.id) <= found.epoch:
        return found
    from headwater.storage.row_count import more_rows

    base = [s for s in segments if s.kind == "base"]
    deltas = [s.path for s in segments if s.kind == "delta"]
    try:
        more = more_rows(data_dir, schema, [s.path for s in base], deltas, vnode_count)
    except OSError:  # whoever reads the table is told
        return found
    return RowCount(_rows(base) + more, epoch)


def _deltas(segments: Sequence[AnySegment]) -> bool:
    return any(s.kind == "delta" for s in segments)


def _rows(segments: Sequence[AnySegment]) -> int:
    return sum(s.rows for s in segments)
