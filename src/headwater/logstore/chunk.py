"""What a log holds: references to change-log segments, grouped by epoch. Rows are never copied into the log."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """The rows of one epoch that some segments of a table's or view's change log hold.

    `first_seq` and `last_seq` bound the rows' `_seq`; `vnodes` says whose rows are meant (None: all that the segments
    hold, which is what `rows` and `bytes` count).
    """

    epoch: int
    first_seq: int
    last_seq: int
    rows: int
    bytes: int
    segments: tuple[str, ...]
    vnodes: frozenset[int] | None = None
    chunk_id: int = 0

    def __post_init__(self) -> None:
        if self.last_seq < self.first_seq:
            raise ValueError(f"a chunk ends after it begins, not at {self.last_seq} from {self.first_seq}")

    def only(self, vnodes: frozenset[int]) -> ChunkRef | None:
        """The part of the chunk that belongs to some vnodes; None for none."""
        return replace(self, vnodes=vnodes) if vnodes else None


@dataclass(frozen=True, slots=True)
class LogEpoch:
    """One epoch of the log, closed by its barrier."""

    epoch: int
    chunks: tuple[ChunkRef, ...] = ()
    checkpoint: bool = True

    @property
    def rows(self) -> int:
        return sum(c.rows for c in self.chunks)

    @property
    def bytes(self) -> int:
        return sum(c.bytes for c in self.chunks)


@dataclass(frozen=True, slots=True)
class LogBatch:
    """Whole epochs to deliver together: the changes of `(from_epoch, to_epoch]`. Without refs there is nothing to
    write. All refs mean the same vnodes.
    """

    from_epoch: int
    to_epoch: int
    refs: tuple[ChunkRef, ...]

    @property
    def rows(self) -> int:
        return sum(r.rows for r in self.refs)

    @property
    def bytes(self) -> int:
        return sum(r.bytes for r in self.refs)

    @property
    def empty(self) -> bool:
        return not self.refs

    @property
    def vnodes(self) -> frozenset[int] | None:
        """Whose changes are meant; None: everybody's."""
        return self.refs[0].vnodes if self.refs else None


@dataclass(frozen=True, slots=True)
class Backlog:
    """What has been committed and not yet delivered."""

    rows: int = 0
    bytes: int = 0
    epochs: int = 0

    def __add__(self, other: Backlog) -> Backlog:
        return Backlog(self.rows + other.rows, self.bytes + other.bytes, self.epochs + other.epochs)
