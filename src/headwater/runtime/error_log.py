"""What went wrong, for hw_errors, `status` and the page: in the meta store, and in memory while that cannot be written.

The disk may be full, or the meta store's server away: then the error that matters most is the one that cannot be
stored. It is shown all the same, and stored with its own time as soon as something can be written again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from headwater.errors import HeadwaterError
from headwater.storage.meta import MetaStore

# One error a lane and back-off step: of an outage of minutes the last ones are enough.
MAX_WAITING: Final = 50


@dataclass(frozen=True, slots=True)
class _Waiting:
    at: float
    job_id: int | None
    name: str
    error: HeadwaterError
    retrying: bool

    def row(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "job_id": self.job_id,
            "name": self.name,
            "code": self.error.code,
            "message": self.error.message + (f" ({self.error.detail})" if self.error.detail else ""),
            "hint": self.error.hint,
            "retrying": self.retrying,
        }


class ErrorLog:
    """Of one engine. An error that comes again while it waits replaces the earlier one."""

    def __init__(self, meta: MetaStore) -> None:
        self._meta = meta
        self._waiting: deque[_Waiting] = deque(maxlen=MAX_WAITING)
        self._lock = threading.Lock()

    def record(self, job_id: int | None, name: str, error: HeadwaterError, *, retrying: bool) -> None:
        with self._lock:
            for old in [w for w in self._waiting if (w.job_id, w.name, w.error.code) == (job_id, name, error.code)]:
                self._waiting.remove(old)
            self._waiting.append(_Waiting(time.time(), job_id, name, error, retrying))
        self.store()

    def store(self) -> None:
        """Store what waits, oldest first; what the meta store does not take goes on waiting."""
        with self._lock, contextlib.suppress(HeadwaterError):
            while self._waiting:
                first = self._waiting[0]
                self._meta.record_error(first.job_id, first.name, first.error, retrying=first.retrying, at_s=first.at)
                self._waiting.popleft()

    def rows(self) -> list[dict[str, Any]]:
        """In the order in which they happened."""
        with self._lock:  # what is being stored is there once
            stored, waiting = self._meta.error_rows(), [w.row() for w in self._waiting]
        for row in stored:
            row.pop("id")
        return stored + waiting
