"""What actors contribute to an epoch, and how contributions add up to one commit. Values; `meta.py` writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

PIN_THIS_EPOCH: Final = -1  # as a pin's epoch: the one that the contribution is committed with
States = Mapping[tuple[int, str], Any]  # (job, part) → value
NO_STATES: Final[States] = {}


@dataclass(frozen=True, slots=True)
class NewSegment:
    """A staged Parquet file; `path` is relative to the data directory."""

    table_id: int
    path: str
    kind: str
    rows: int
    bytes: int
    is_change: bool = True

    def as_dict(self) -> dict[str, Any]:
        """How a task tells the engine of it; `NewSegment(**…)` is the way back."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as the meta store knows it."""

    id: int
    table_id: int
    path: str
    kind: str
    is_change: bool
    rows: int
    bytes: int
    added_epoch: int
    removed_epoch: int


@dataclass(frozen=True, slots=True)
class JobRow:
    """One source, table, view or sink."""

    id: int
    name: str
    kind: str
    state: str
    lane: str
    definition: str
    spec: dict[str, Any]
    created_epoch: int = 0
    live_epoch: int = 0
    dropped_epoch: int = 0


@dataclass(frozen=True, slots=True)
class SplitRow:
    """One split of a captured table (state schema v2). Bounds are JSON arrays of the key columns' text, None = open."""

    table_id: int
    generation: int
    split_id: int
    left: str | None
    right: str | None
    state: str
    row_count: int = 0
    bytes: int = 0
    offset_low: str | None = None
    offset_high: str | None = None
    staged_path: str | None = None
    handed_over_epoch: int | None = None


@dataclass(slots=True)
class Contribution:
    """What one actor adds to an epoch. Merged over actors and barriers, committed in one transaction (I1)."""

    segments_added: list[NewSegment] = field(default_factory=list)
    segments_removed: list[int] = field(default_factory=list)
    resets: list[int] = field(default_factory=list)
    jobs_added: list[JobRow] = field(default_factory=list)
    jobs_dropped: list[int] = field(default_factory=list)
    job_updates: dict[int, dict[str, Any]] = field(default_factory=dict)
    positions: dict[int, str] = field(default_factory=dict)
    splits: list[SplitRow] = field(default_factory=list)
    splits_cleared: list[tuple[int, int]] = field(default_factory=list)
    states: dict[tuple[int, str], Any] = field(default_factory=dict)
    states_cleared: list[int] = field(default_factory=list)
    pins: dict[str, int] = field(default_factory=dict)
    pins_dropped: list[str] = field(default_factory=list)
    dead_letters: list[dict[str, Any]] = field(default_factory=list)

    def merge(self, other: Contribution) -> None:
        """Add what another actor, or a later barrier, contributes; later values of the same thing win.

        A commit clears before it writes. So what `other` clears goes from here too; a segment that a later reset hides
        was never visible, and its file is an orphan.
        """
        gone = set(other.resets)
        self.segments_added = [s for s in self.segments_added if s.table_id not in gone] + other.segments_added
        self.segments_removed += other.segments_removed
        self.resets += other.resets
        self.jobs_added += other.jobs_added
        self.jobs_dropped += other.jobs_dropped
        for job_id, changes in other.job_updates.items():
            mine = self.job_updates.setdefault(job_id, {})
            patch = {**mine.get("spec_patch", {}), **changes.get("spec_patch", {})}
            mine.update(changes | ({"spec_patch": patch} if patch else {}))
        self.positions.update(other.positions)
        self.splits += other.splits
        self.splits_cleared += other.splits_cleared
        cleared = set(other.states_cleared)
        self.states = {key: value for key, value in self.states.items() if key[0] not in cleared} | other.states
        self.states_cleared += other.states_cleared
        self.pins = {holder: e for holder, e in self.pins.items() if holder not in other.pins_dropped} | other.pins
        self.pins_dropped += other.pins_dropped
        self.dead_letters += other.dead_letters

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.segments_added)


def merged(contributions: Iterable[Contribution]) -> Contribution:
    total = Contribution()
    for contribution in contributions:
        total.merge(contribution)
    return total
