"""Which epochs are being read: the sweep leaves what they need.

    a reader    takes a Hold (at the last committed epoch), tells it how far back it reads, then looks up segments
    the sweep   works out its horizon and forgets the segments before it, as one step under `gate`

A hold moves back under the same gate. So a reader is before a sweep, which then respects it, or after: it finds that
the epoch is no longer retained, and says so.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

# A DataFrame that was made of another (`df.filter(…)`) does not keep that one alive: so long it has to begin to read.
LEASE_S: Final = 60.0


class Reading:
    """See the head of this module. `epochs` is what is held, by ticket."""

    def __init__(self, committed_epoch: Callable[[], int]) -> None:
        self.gate = threading.RLock()
        self.epochs: dict[int, int] = {}
        self._committed_epoch = committed_epoch
        self._tickets = itertools.count(1)
        self._leases: deque[tuple[float, int]] = deque()  # until when, and the ticket

    def hold(self) -> Hold:
        """What the last committed epoch needs stays until the hold is released."""
        with self.gate:
            ticket, epoch = next(self._tickets), self._committed_epoch()
            self.epochs[ticket] = epoch
        return Hold(self, ticket, epoch)

    def held(self) -> list[int]:
        with self.gate:
            while self._leases and self._leases[0][0] < time.monotonic():
                self.epochs.pop(self._leases.popleft()[1], None)
            return list(self.epochs.values())

    def lease(self, ticket: int) -> None:
        """Without the gate: the garbage collector calls it, wherever a thread just is."""
        self._leases.append((time.monotonic() + LEASE_S, ticket))


@dataclass(frozen=True, slots=True)
class Hold:
    """One reader. `epoch` is the last committed one when it began."""

    reading: Reading
    ticket: int
    epoch: int

    def back_to(self, epoch: int) -> None:
        """It reads this epoch, too: said before anything of it is looked up."""
        with self.reading.gate:
            self.reading.epochs[self.ticket] = min(self.reading.epochs[self.ticket], epoch)

    def follow(self, frame: Any) -> None:
        """Hold on as long as a DataFrame lives, for it reads when somebody wants its rows; and a little longer."""
        weakref.finalize(frame, self.reading.lease, self.ticket).atexit = False

    def release(self) -> None:
        with self.reading.gate:
            self.reading.epochs.pop(self.ticket, None)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
