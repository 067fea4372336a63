"""Epochs: the engine's logical time, (milliseconds since 2021-04-01T00:00Z) << 16, strictly increasing.

`EpochClock` makes them from any clock; it never goes back, whatever the wall clock does.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

EPOCH_ZERO_UNIX_MS: Final = 1_617_235_200_000  # 2021-04-01T00:00:00Z
PHYSICAL_SHIFT: Final = 16
INVALID_EPOCH: Final = 0
MAX_EPOCH: Final = (1 << 63) - 1


class Epoch(int):
    """One moment of the engine. An int that knows its wall-clock time."""

    @classmethod
    def at_unix_ms(cls, unix_ms: int) -> Epoch:
        return cls(max(0, unix_ms - EPOCH_ZERO_UNIX_MS) << PHYSICAL_SHIFT)

    @property
    def unix_ms(self) -> int:
        return (int(self) >> PHYSICAL_SHIFT) + EPOCH_ZERO_UNIX_MS

    @property
    def timestamp(self) -> dt.datetime:
        return dt.datetime.fromtimestamp(self.unix_ms / 1000, tz=dt.UTC)


@dataclass(frozen=True, slots=True, order=True)
class EpochPair:
    """A barrier closes `prev` and opens `curr`."""

    prev: Epoch
    curr: Epoch

    def __post_init__(self) -> None:
        if self.curr <= self.prev:
            raise ValueError(f"epoch {self.curr} does not follow {self.prev}")


class EpochClock:
    """Gives strictly increasing epochs; `last` may be set from committed state."""

    def __init__(self, now_s: Callable[[], float] = time.time, last: int = INVALID_EPOCH) -> None:
        self._now_s = now_s
        self.last = Epoch(last)

    def next(self) -> Epoch:
        candidate = Epoch.at_unix_ms(int(self._now_s() * 1000))
        if candidate <= self.last:
            # The low 16 bits belong to the millisecond: step to the next one.
            candidate = Epoch(((int(self.last) >> PHYSICAL_SHIFT) + 1) << PHYSICAL_SHIFT)
        self.last = candidate
        return candidate
