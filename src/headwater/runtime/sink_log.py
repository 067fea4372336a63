"""The log of a sink as the meta store has it: references to the change-log segments of the sink's input.

Nothing is copied: the input is pinned at the truncated epoch, so no segment that is still owed is ever removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwater.logstore.chunk import Backlog, ChunkRef, LogEpoch
from headwater.logstore.state import LogStoreState
from headwater.storage.checkpoint import JobRow, Segment


class ChangeLog:
    """The committed change log of a sink's input, as the meta store knows it: the log store's history."""

    def __init__(self, core: Any, table_id: int) -> None:
        self.core = core
        self.table_id = table_id

    def epochs(self, after: int, up_to: int, limit: int) -> Sequence[LogEpoch]:
        """A page at a time: a sink that was down for a month has millions of them."""
        meta = self.core.meta
        found = {*meta.change_epochs(self.table_id, after, up_to, limit)}
        found |= {*meta.reset_epochs(self.table_id, after, up_to)}
        groups: dict[int, list[Segment]] = {epoch: [] for epoch in sorted(found)[:limit]}
        for segment in meta.change_segments(self.table_id, after, max(groups, default=after)):
            groups[segment.added_epoch].append(segment)
        return [log_epoch(epoch, segments) for epoch, segments in groups.items()]

    def backlog(self, after: int, up_to: int) -> Backlog:
        meta = self.core.meta
        rows, size, epochs = meta.change_totals(self.table_id, after, up_to)
        emptied = [
            epoch
            for epoch in meta.reset_epochs(self.table_id, after, up_to)
            if not meta.change_epochs(self.table_id, epoch - 1, epoch, 1)
        ]
        return Backlog(rows, size, epochs + len(emptied))


def log_epoch(epoch: int, segments: Sequence[Segment]) -> LogEpoch:
    rows, size = sum(x.rows for x in segments), sum(x.bytes for x in segments)
    chunk = ChunkRef(epoch, 0, max(0, rows), rows, size, tuple(x.path for x in segments))
    return LogEpoch(epoch, (chunk,))


def stored_row(core: Any, job: JobRow) -> dict[str, Any]:
    """A sink's row of hw_log_stores from what is committed alone."""
    stored = core.meta.state(job.id, "log")
    state = LogStoreState.from_dict(stored) if stored else LogStoreState.starting_at(0)
    log = ChangeLog(core, int(job.spec["inputs"][0]))
    backlog = log.backlog(state.truncated_to.epoch, core.meta.committed_epoch())
    return log_store_row(job.name, backlog, state)


def log_store_row(name: str, backlog: Backlog, state: LogStoreState) -> dict[str, Any]:
    """`delivered_to` moves over epochs without changes too: `delivered_to >= E` says that the target has E."""
    truncated = state.truncated_to
    whole = truncated.epoch if truncated.is_barrier else 0
    return {
        "sink": name,
        "backlog_rows": backlog.rows,
        "backlog_bytes": backlog.bytes,
        "backlog_epochs": backlog.epochs,
        "truncated_to": truncated.epoch,
        "delivered_to": max(state.delivered_to or 0, whole) or None,
    }
