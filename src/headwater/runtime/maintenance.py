"""House-keeping beside the lanes: compaction of deltas, and garbage collection of what no epoch can see any more.

Compaction reads what is committed, writes new segments, and hands them to the dataflow, which swaps them in at a
barrier if what they replace is still there. Removed segments stay for retention, pins and running queries.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from headwater.errors import HeadwaterError
from headwater.model.epoch import Epoch
from headwater.runtime.dataflow import Swap
from headwater.runtime.tables import TableState
from headwater.storage.checkpoint import NewSegment, Segment

if TYPE_CHECKING:
    from headwater.engine import EngineCore

log = logging.getLogger(__name__)
ROUND_S: Final = 1.0
# More small files than this make every read slower than folding them does.
MAX_DELTAS: Final = 16
# Deltas beyond this part of the base are folded into it; below a floor a table is too small to care.
FOLD_FRACTION: Final = 0.25
FOLD_FLOOR_BYTES: Final = 4 * 1024 * 1024


class Maintenance:
    """See the head of this module."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.expired_at = 0.0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            try:
                await self.collect_garbage()
                for state in [*self.core.dataflow.tables.values(), *self.core.dataflow.views.values()]:
                    await self.compact(state)
            except HeadwaterError as error:
                log.warning("house-keeping failed: %s", error)
                self.core.record_error(None, "maintenance", error, retrying=True)
                await asyncio.sleep(5)

    # -- garbage ----------------------------------------------------------------------------------------------------

    async def collect_garbage(self) -> None:
        horizon = await asyncio.to_thread(self.horizon)
        if horizon:
            paths = await asyncio.to_thread(self.core.meta.expire, horizon)
            await asyncio.to_thread(self.core.data_dir.delete, paths)

    def horizon(self) -> int:
        """The oldest epoch that must stay readable."""
        committed = self.core.meta.committed_epoch()
        kept_ms = int((time.time() - self.core.parameters["retention_s"]) * 1000)
        epochs = [int(Epoch.at_unix_ms(kept_ms)), committed]
        epochs += self.core.queries.reading.values()
        epochs += self.core.meta.pin_rows().values()
        epochs += [v.consumed_epoch for v in self.core.dataflow.views.values()]
        oldest = min(epochs)
        # An epoch that falls between two committed ones keeps the earlier one readable.
        earlier = self.core.meta.last_epoch_before(oldest)
        return min(oldest, earlier) if earlier else 0

    # -- compaction -------------------------------------------------------------------------------------------------

    async def compact(self, state: TableState) -> None:
        if any(s.table_id == state.job.id for s in self.core.dataflow.swaps):
            return
        segments = await asyncio.to_thread(self.core.meta.segments_at, state.job.id, self.core.meta.committed_epoch())
        base = [s for s in segments if s.kind == "base"]
        deltas = [s for s in segments if s.kind == "delta"]
        delta_bytes, base_bytes = sum(s.bytes for s in deltas), sum(s.bytes for s in base)
        if deltas and delta_bytes > max(FOLD_FLOOR_BYTES, FOLD_FRACTION * base_bytes):
            await self._fold(state, segments)
        elif len(deltas) > MAX_DELTAS:
            await self._merge(state, sorted(deltas, key=lambda s: s.bytes)[: len(deltas) - 1])
        elif len(base) > 4 * MAX_DELTAS and _small(base):
            await self._fold(state, segments)

    async def _fold(self, state: TableState, segments: list[Segment]) -> None:
        """Everything into a new base: one Spark job."""

        def work() -> list[NewSegment]:
            from headwater.spark.query import explained
            from headwater.spark.segment import write_frame

            with explained("COMPACTION_FAILED"):
                frame = self.core.reader(state.schema).snapshot(segments)
                parts = max(1, sum(s.bytes for s in segments) // (64 * 1024 * 1024))
                return write_frame(
                    frame.coalesce(int(parts)),
                    self.core.data_dir,
                    state.job.id,
                    state.schema,
                    kind="base",
                    vnode_count=self.core.vnode_count,
                    seq_base=0,
                    is_change=False,
                )

        added = await self.core.jobs.run("compaction", "compaction", work)
        self.core.dataflow.swaps.append(Swap(state.job.id, {s.path: s.id for s in segments}, added))

    async def _merge(self, state: TableState, deltas: list[Segment]) -> None:
        """Many small deltas into one, newest change per key."""

        def work() -> list[NewSegment]:
            from headwater.spark.merge import MergeDeltas
            from headwater.spark.tasks import run_tasks

            task = MergeDeltas(
                self.core.data_dir, state.job.id, state.schema, tuple(s.path for s in deltas), self.core.vnode_count
            )
            return [NewSegment(**r["segment"]) for r in run_tasks(self.core.spark, [[task]])]

        added = await self.core.jobs.run("compaction", "compaction", work)
        self.core.dataflow.swaps.append(Swap(state.job.id, {s.path: s.id for s in deltas}, added))


def _small(segments: list[Segment]) -> bool:
    return sum(s.bytes for s in segments) / len(segments) < 1024 * 1024
