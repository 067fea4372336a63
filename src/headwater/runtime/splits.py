"""A captured table's splits in memory, and its part of one epoch as decided at the barrier. Used by `backfill.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headwater.backfill.cdc.state import SplitState
from headwater.capture.splits import Split, SplitKind, bound_from_json, bound_json
from headwater.storage.checkpoint import NewSegment, SplitRow

if TYPE_CHECKING:
    from headwater.runtime.backfill import TableBackfill


@dataclass(slots=True)
class SplitInfo:
    """One split in memory; `row` is what is, or will be, stored. `low_lsn`: nothing up to it is unseen by its read;
    while the read is under way, a position that is certainly not later."""

    row: SplitRow
    state: SplitState
    segment: NewSegment | None = None
    low_lsn: int = 0

    @property
    def high(self) -> int:
        from headwater.connectors.postgres.client import parse_lsn

        return parse_lsn(self.row.offset_high) if self.row.offset_high else 0

    def had_seen(self, xid: int) -> bool:
        """Whether the split's read had seen a transaction of the stream."""
        import numpy as np

        from headwater.connectors.postgres.planner import visible

        return bool(visible(self.row.offset_low or "", np.array([xid], np.uint32))[0])


@dataclass(slots=True)
class Prepared:
    """A difference that was made outside the lane: what turns the table of an epoch into the source of its position.

    A barrier applies it: first these segments, then all events after `position` once more, on top of them. So it does
    not matter how many epochs have passed meanwhile, nor what they did to the same rows. `base`: the table's files at
    that epoch; `copy`: files that nobody needs afterwards.
    """

    position: int
    segments: list[NewSegment]
    base: tuple[str, ...]
    copy: tuple[str, ...]
    applied: int = 0  # the epoch that has it
    lost: bool = False  # a recovery, or a newer copy, has dropped it


@dataclass(slots=True)
class EpochPart:
    """A table's part of one epoch. `replaces`: what is handed over takes the place of all that the table holds."""

    backfill: TableBackfill
    last_lsn: int
    first_lsn: int
    bounds: tuple[tuple[str, ...], ...]
    after: tuple[int, ...]
    snapshots: tuple[str | None, ...]
    handing: list[SplitInfo] = field(default_factory=list)
    replaces: bool = False
    prepared: Prepared | None = None

    def captured(self, seq_base: int, copy: tuple[str, ...] = ()) -> Any:
        """The work of the task that decodes this table's events; `copy`: more files to look unchanged values up in."""
        from headwater.spark.capture import DecodeSpec

        backfill = self.backfill
        paths = [*copy, *(s.segment.path for s in self.handing if s.segment is not None)]
        if self.prepared is not None:
            paths = [*self.prepared.base, *(s.path for s in self.prepared.segments)]
        elif not self.replaces:
            state = backfill.core.dataflow.tables.get(backfill.table_id)
            paths += [s.path for s in state.segments] if state else []
        shape = backfill.next_shape if self.replaces else backfill.shape
        return DecodeSpec(
            backfill.table_id,
            backfill.oid if self.replaces else backfill.followed_oid,
            shape.schema,
            shape.plans,
            self.bounds,
            self.after,
            self.snapshots,
            self.first_lsn,
            tuple(paths),
            seq_base,
            policy=backfill.policy,
            follows=shape.follows,
            widens=backfill.widens,
            complete=bool(backfill.captured["snapshot"] or backfill.splits),
        )

    def handed_segments(self, truncate: list[int] | None) -> list[NewSegment]:
        """The staged files that become visible; a TRUNCATE that a read had not seen empties what it read."""
        if self.prepared is not None:
            emptied = truncate is not None and truncate[0] > self.prepared.position
            return [] if emptied else list(self.prepared.segments)
        found = []
        for split in self.handing:
            emptied = truncate is not None and truncate[0] > split.low_lsn and not split.had_seen(truncate[1])
            if split.segment is not None and not emptied:
                found.append(split.segment)
        return found


def in_order(rows: Iterable[SplitRow]) -> list[SplitRow]:
    """The splits of a table in the order of their ranges: each begins where the one before it ends."""
    begins = {row.left: row for row in rows}
    found: list[SplitRow] = []
    while begins:
        found.append(begins.pop(found[-1].right if found else None))
    return found


def bounds_of(split: Split) -> tuple[str | None, str | None]:
    return bound_json(split.left), bound_json(split.right)


def split_of(row: SplitRow, kind: SplitKind) -> Split:
    return Split(row.split_id, bound_from_json(row.left), bound_from_json(row.right), kind)
