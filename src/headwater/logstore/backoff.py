"""How long to wait before the next attempt after a failure: 1, 2, 4 … 30 s with jitter, fresh again after 60 s of
running.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

FIRST_S: Final = 1.0
FACTOR: Final = 2.0
LONGEST_S: Final = 30.0
RESET_AFTER_S: Final = 60.0


class Backoff:
    """Counts failures in a row. Jitter takes up to half of a delay away, so that sinks do not come back all at once."""

    def __init__(self, clock: Callable[[], float], rng: random.Random | None = None) -> None:
        self._clock = clock
        self._rng = rng or random.Random()
        self._failures = 0
        self._running_since: float | None = None

    def started(self) -> None:
        """An attempt begins to run."""
        if self._running_since is None:
            self._running_since = self._clock()

    def failed(self) -> float:
        """An attempt failed: the seconds to wait before the next."""
        if self._running_since is not None and self._clock() - self._running_since >= RESET_AFTER_S:
            self._failures = 0
        self._running_since = None
        delay = min(LONGEST_S, FIRST_S * FACTOR ** min(self._failures, 10))
        self._failures += 1
        return delay * (1.0 - self._rng.random() / 2)
