"""Tables and views of this engine as upstreams of a view that is being created (contract: `UpstreamTable`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.errors import DefiniteError
from headwater.runtime.registry import schema_of
from headwater.runtime.tables import AnySegment, InputLog, TableState
from headwater.storage.checkpoint import JobRow

if TYPE_CHECKING:
    from headwater.engine import EngineCore


@dataclass(frozen=True, slots=True)
class StoredUpstream:
    """One input. `hold` is the job's pin, which its lane's checkpoints move: nothing is to be done here."""

    core: EngineCore
    job_id: int
    reader: str  # the name of the job that reads it

    @property
    def job(self) -> JobRow:
        found = self.core.registry.by_id.get(self.job_id)
        if found is None:
            raise DefiniteError(
                "UPSTREAM_DROPPED",
                f"an input of {self.reader} was dropped",
                hint=f"DROP MATERIALIZED VIEW {self.reader}",
            )
        return found

    def latest_epoch(self) -> int:
        return self.core.meta.committed_epoch()

    def epochs(self, after: int, upto: int) -> Sequence[tuple[int, int]]:
        changed: dict[int, int] = {}
        for segment in self.core.meta.change_segments(self.job_id, after, upto):
            changed[segment.added_epoch] = changed.get(segment.added_epoch, 0) + segment.rows
        for epoch in self.core.meta.reset_epochs(self.job_id, after, upto):
            changed.setdefault(epoch, 1)
        return sorted(changed.items())

    def snapshot(self, epoch: int) -> TableState:
        return TableState(self.job, schema_of(self.job), self._segments(epoch))

    def change_log(self, after: int, upto: int) -> InputLog:
        return InputLog(
            seen=self._segments(after),
            log=list(self.core.meta.change_segments(self.job_id, after, upto)),
            reset=self.core.meta.was_reset(self.job_id, after, upto),
        )

    def hold(self, epoch: int) -> None:
        """See the class."""

    def _segments(self, epoch: int) -> list[AnySegment]:
        return list(self.core.meta.segments_at(self.job_id, epoch))
