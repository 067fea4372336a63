"""How much of a source's backlog one epoch takes: so much that the epoch is over in a few seconds.

After a pause, an absence or a burst the spool holds more than an epoch should; and when a copy is fast, or an engine
comes back, more rows wait to be handed over than the views behind them take in one refresh. What an epoch of a given
size takes is not known beforehand (views, other work, the machine), so each tells the size of the next.
`source_runtime.py` asks at every barrier, `dataflow.py` tells how long it took.

    more came in than it took           ─► the next is larger, however long it takes: else the backlog would only grow
    much slower, by bytes a second,
    than epochs of another size         ─► towards that size
    over in half of GOAL_S              ─► larger, unless that is known to be slower
    longer than GOAL_S                  ─► smaller, unless that is known to be much slower: most of an epoch may be a
                                           fixed cost, of which small ones only pay more. Then larger, to see
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

# What rides on a barrier (PAUSE, FLUSH, DDL) waits for the epoch before it, and nobody sees the rows of an epoch
# sooner than its end.
GOAL_S: Final = 3.0
# Bytes of the spool; a small row has some 130. The largest is what a task's memory is made for.
SIZES: Final = tuple(megabytes << 20 for megabytes in (4, 8, 16, 32, 64))
FIRST: Final = 2  # of the sizes
# Rows that are handed over. The first ones are within what a view's kept plan takes (`spark/view_fetched.py`).
ROW_SIZES: Final = (75_000, 150_000, 300_000, 600_000, 1_200_000, 2_400_000)
FIRST_ROWS: Final = 1
WORTH: Final = 0.7  # so much of the best speed an epoch must have to be preferred for being short
REMEMBERED: Final = 10  # epochs: what is known of a size is soon out of date, most of all while the JVM is cold


@dataclass(slots=True)
class EpochSize:
    """See the head of this module; bytes of the spool, or what `sizes` counts."""

    sizes: tuple[int, ...] | None = None
    _at: int = FIRST
    _came: int = 0
    _taken: int = 0
    _rest: bool = False
    _epochs: int = 0
    _speeds: dict[int, tuple[float, int]] = field(default_factory=dict)  # of a size: bytes a second, and when

    @property
    def limit(self) -> int:
        """What the next epoch takes at the most, or one transaction, or one split."""
        return (self.sizes or SIZES)[self._at]

    def record_arrived(self, came: int) -> None:
        """A barrier, also one at which nothing is taken: this much has come in since the last one."""
        self._came = came
        self._taken = 0
        self._rest = False

    def record_taken(self, size: int, *, rest: bool) -> None:
        """The epoch takes this many bytes; `rest`: there is more."""
        self._taken, self._rest = size, rest

    def fit(self, sizes: Iterable[int]) -> int:
        """How many of these the epoch takes beside what it has taken already."""
        count = 0
        for size in sizes:
            if self._taken and self._taken + size > self.limit:
                self._rest = True
                break
            self._taken += size
            count += 1
        return count

    def record_duration(self, seconds: float) -> None:
        """The epoch's work is done. One that took all there was says nothing about its size."""
        if not self._rest:
            return
        self._epochs += 1
        self._speeds[self._at] = (self._taken / max(seconds, 0.001), self._epochs)
        known = {at: speed for at, (speed, when) in self._speeds.items() if self._epochs - when < REMEMBERED}
        self._at = self._next(seconds, known)

    def _next(self, seconds: float, known: dict[int, float]) -> int:
        at, up, down = self._at, min(self._at + 1, len(self.sizes or SIZES) - 1), max(self._at - 1, 0)
        if self._came > self._taken:
            return up
        best = max(known, key=lambda size: known[size])
        if known[at] < WORTH * known[best]:
            return up if best > at else down
        if seconds < GOAL_S / 2:
            return up if known.get(up, known[at]) >= known[at] else at
        if seconds > GOAL_S:
            if down != at and known.get(down, known[best]) >= WORTH * known[best]:
                return down
            return at if up in known else up
        return at
