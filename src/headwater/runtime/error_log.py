"""What went wrong, for hw_errors, `status` and the page: in the meta store, and in memory while that cannot be written.

The disk may be full, or the meta store's server away: then the error that matters most is the one that cannot be
stored. It is shown all the same, and stored with its own time as soon as something can be written again.

An error is open until it ends; `error_ends.py` says when. Which are open is known here without a look into the store.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from headwater.errors import HeadwaterError
from headwater.storage.meta import MetaStore

# One error a lane and back-off step: of an outage of minutes the last ones are enough.
MAX_WAITING: Final = 50


@dataclass(frozen=True, slots=True)
class Kind:
    """Errors of one kind come again and end together."""

    job_id: int | None
    name: str
    code: str


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
            "ended_at": None,
        }


class ErrorLog:
    """Of one engine. An error that comes again while it waits replaces the earlier one."""

    def __init__(self, meta: MetaStore) -> None:
        self._meta = meta
        self._waiting: deque[_Waiting] = deque(maxlen=MAX_WAITING)
        self._lock = threading.Lock()
        rows = meta.error_rows()
        self._open = {Kind(r["job_id"], r["name"], r["code"]): float(r["at"]) for r in rows if r["ended_at"] is None}

    def record(self, job_id: int | None, name: str, error: HeadwaterError, *, retrying: bool) -> None:
        with self._lock:
            for old in [w for w in self._waiting if (w.job_id, w.name, w.error.code) == (job_id, name, error.code)]:
                self._waiting.remove(old)
            self._waiting.append(_Waiting(time.time(), job_id, name, error, retrying))
            self._open[Kind(job_id, name, error.code)] = self._waiting[-1].at
        self.store()

    def end(self, is_over: Callable[[Kind, float], bool]) -> None:
        """End the open errors of the kinds that are over; `is_over` is told when such an error was last met."""
        with self._lock:
            over = {kind: at for kind, at in self._open.items() if is_over(kind, at)}
        if not over:
            return
        self.store()
        with self._lock, contextlib.suppress(HeadwaterError):
            waiting = {Kind(w.job_id, w.name, w.error.code) for w in self._waiting}
            for kind, at in over.items():
                if kind not in waiting and self._open.get(kind) == at:  # else it is not stored, or was met again
                    self._meta.end_errors(kind.job_id, kind.name, kind.code, upto_s=at)
                    del self._open[kind]

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
