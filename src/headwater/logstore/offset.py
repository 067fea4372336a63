"""Positions in a log: after a chunk of an epoch, or after the whole epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import total_ordering


@total_ordering
@dataclass(frozen=True, slots=True)
class TruncateOffset:
    """Everything up to and including this may be forgotten. `chunk_id` None is the barrier, behind all chunks."""

    epoch: int
    chunk_id: int | None = None

    @classmethod
    def chunk(cls, epoch: int, chunk_id: int) -> TruncateOffset:
        return cls(epoch, chunk_id)

    @classmethod
    def barrier(cls, epoch: int) -> TruncateOffset:
        return cls(epoch, None)

    @property
    def is_barrier(self) -> bool:
        return self.chunk_id is None

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, TruncateOffset):
            return NotImplemented
        if self.epoch != other.epoch:
            return self.epoch < other.epoch
        if self.chunk_id is None:
            return False
        return other.chunk_id is None or self.chunk_id < other.chunk_id

    def as_json(self) -> list[int | None]:
        return [self.epoch, self.chunk_id]

    @classmethod
    def from_json(cls, data: Sequence[int | None]) -> TruncateOffset:
        epoch, chunk_id = data
        if epoch is None:
            raise ValueError("a truncate offset has an epoch")
        return cls(epoch, chunk_id)
