"""The state of tables and views between two barriers: what is visible, what waits, what views have not yet seen."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.model.schema import Schema
from headwater.storage.checkpoint import JobRow, NewSegment, Segment, States

AnySegment = Segment | NewSegment


@dataclass(frozen=True, slots=True)
class Batch:
    """An acknowledged write that no barrier has taken yet: rows in an Arrow file, or segments that are ready.

    `ticket` numbers acknowledged writes; a read waits until its newest one is committed. `seq_base` is the first `_seq`
    of the rows, taken when the write was acknowledged. `states` of jobs are committed with the rows.
    """

    ticket: int
    seq_base: int = 0
    ipc_path: str | None = None
    rows: int = 0
    kind: str = "delta"
    segments: tuple[NewSegment, ...] = ()
    states: States = field(default_factory=dict)


@dataclass(slots=True)
class TableState:
    """One table or view. `segments` is what the last staged barrier made visible, in no order."""

    job: JobRow
    schema: Schema
    segments: list[AnySegment] = field(default_factory=list)
    pending: list[Batch] = field(default_factory=list)
    written: int = 0  # rows that statements have changed in all

    def replace(self, removed: set[str], added: list[AnySegment]) -> bool:
        """Swap segments (compaction); False, and nothing happens, if one of the removed ones is gone already."""
        if not removed <= {s.path for s in self.segments}:
            return False
        self.segments = [s for s in self.segments if s.path not in removed] + added
        return True


@dataclass(slots=True)
class InputLog:
    """What a view has not yet consumed of one input: the segments it last saw, and the changes since."""

    seen: list[AnySegment] = field(default_factory=list)
    log: list[AnySegment] = field(default_factory=list)
    reset: bool = False

    @property
    def changed(self) -> bool:
        return bool(self.log) or self.reset


@dataclass(slots=True)
class ViewState(TableState):
    """A view in the main lane; `inputs` by job id."""

    inputs: dict[int, InputLog] = field(default_factory=dict)
    failed: bool = False
    retry_at: float = 0.0
    consumed_epoch: int = 0


@dataclass(slots=True)
class Swap:
    """A compaction's result, waiting for a barrier: these segments for those. `new_files`: not the same files again."""

    table_id: int
    removed: dict[str, int]  # path → segment id
    added: list[NewSegment]
    new_files: bool = True


@dataclass(slots=True)
class Staged:
    """What this barrier staged, by table."""

    segments: dict[int, list[NewSegment]] = field(default_factory=dict)
    resets: set[int] = field(default_factory=set)

    def add(self, segment: NewSegment) -> None:
        self.segments.setdefault(segment.table_id, []).append(segment)


@dataclass(slots=True)
class Taken:
    """The acknowledged writes that a barrier took; kept until they are committed: a recovery stages them again."""

    epoch: int
    batches: dict[int, list[Batch]]


class SequenceAllocator:
    """Blocks of `_seq` numbers. Its high-water mark is part of every checkpoint, so a restart never reuses one."""

    def __init__(self, high: int) -> None:
        self.high = high

    def take(self, count: int) -> int:
        """The first of `count` fresh numbers."""
        first = self.high + 1
        self.high += max(1, count)
        return first
