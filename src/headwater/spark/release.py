"""Plans that are done with, released in time: in Python, so that Spark's JVM may forget them and their broadcasts.

Each Java object that Python has called is part of a cycle (py4j keeps its methods, and these know it), so only the
cyclic collector frees it. That one runs by the number of Python objects: a plan is a few of them, and holds megabytes
on the other side. So it is asked to run soon after jobs, no more often than its own cost allows.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Final

LEAST_S: Final = 2.0
SHARE: Final = 50  # at most this part of the time goes into it: of 20 ms, once a second


class Release:
    """Of one engine; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs = 0  # since the last collection
        self._not_before = 0.0

    def job_ended(self) -> None:
        self._jobs += 1
        self.collect()

    def collect(self) -> None:
        """If jobs have ended since, and the last time is long enough ago."""
        if not self._jobs or time.monotonic() < self._not_before or not self._lock.acquire(blocking=False):
            return
        try:
            self._jobs, began = 0, time.monotonic()
            gc.collect()
            ended = time.monotonic()
            self._not_before = ended + max(LEAST_S, SHARE * (ended - began))
        finally:
            self._lock.release()
