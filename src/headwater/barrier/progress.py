"""Progress of jobs: totals derived from committed state, so that they never decrease and survive recovery (I7).

`JobProgress` is one job's row of hw_progress. Rates come from the totals of the last seconds, those of a live job from
its changes; a report of an older generation (before a rescale or resync) is ignored.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

RATE_WINDOW_S: Final = 10.0
STEPS_TO_STAND: Final = 2.0  # that many steps without rows, and a copy is taken to stand still
CAP_PERCENT: Final = 99.99  # until the job is published


def percent_of(
    *, done: int = 0, total: int = 0, rows: int = 0, total_rows: int = 0, least_percent: float = 0.0, **_: Any
) -> float:
    """By rows where their number is known, else by parts. `least_percent` was shown before, and parts may be cut."""
    whole, part = (total_rows, rows) if total_rows else (total, done)
    share = 100.0 * part / whole if whole > 0 else 0.0
    return min(CAP_PERCENT, max(least_percent, round(share, 2)))


@dataclass(slots=True)
class JobProgress:
    """One job's progress. `done` and `total` count splits, vnodes or epochs, whatever the phase says."""

    job_id: int
    name: str
    phase: str = "created"
    done: int = 0
    total: int = 0
    rows: int = 0
    total_rows: int = 0
    bytes: int = 0
    least_percent: float = 0.0
    waiting_for: str = ""
    finished: bool = False
    generation: int = 0
    _samples: deque[tuple[float, int]] = field(default_factory=deque)
    _changes: deque[tuple[float, int]] = field(default_factory=deque)

    def report(
        self,
        *,
        now_s: float,
        generation: int = 0,
        phase: str | None = None,
        done: int | None = None,
        total: int | None = None,
        rows: int | None = None,
        total_rows: int | None = None,
        bytes: int | None = None,
        least_percent: float | None = None,
        waiting_for: str | None = None,
    ) -> bool:
        """Take a report; False if it is stale."""
        if generation < self.generation:
            return False
        if generation > self.generation:
            self._restart(generation)
        if phase is not None:
            self.phase = phase
        if total is not None:
            self.total = total
        if total_rows is not None:
            self.total_rows = total_rows
        self.least_percent = max(self.least_percent, least_percent or 0.0)
        self.done = max(self.done, done or 0)
        self.bytes = max(self.bytes, bytes or 0)
        if rows is not None and rows >= self.rows:
            self.rows = rows
            self._sample(now_s)
        if waiting_for is not None:
            self.waiting_for = waiting_for
        return True

    def _restart(self, generation: int) -> None:
        self.generation = generation
        self.done = self.rows = self.bytes = 0
        self.least_percent = 0.0
        self.finished = False
        self._samples.clear()

    def _sample(self, now_s: float) -> None:
        if self._samples and self._samples[-1][1] == self.rows:
            return
        self._samples.append((now_s, self.rows))
        while len(self._samples) > 2 and now_s - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()

    def changed(self, now_s: float, rows: int) -> None:
        """So many rows were changed: what a live job does all the time, and no total tells."""
        self._changes.append((now_s, rows))
        while now_s - self._changes[0][0] > RATE_WINDOW_S:
            self._changes.popleft()

    def totals(self) -> dict[str, int]:
        """What a checkpoint stores, so that a restart goes on from there."""
        return {n: getattr(self, n) for n in ("generation", "done", "total", "rows", "total_rows", "bytes")}

    @classmethod
    def restored(cls, job_id: int, name: str, state: str, stored: dict[str, Any] | None) -> JobProgress:
        """As the last checkpoint has it; a job that is live is done."""
        progress = cls(job_id, name, **(stored or {}))
        if state == "live":
            progress.finish()
        return progress

    def finish(self, phase: str = "live") -> None:
        self.finished, self.phase, self.waiting_for = True, phase, ""
        self.done = max(self.done, self.total)

    def rows_per_s(self, now_s: float) -> float:
        if self.finished and self._changes:
            return sum(rows for at, rows in self._changes if now_s - at <= RATE_WINDOW_S) / RATE_WINDOW_S
        if len(self._samples) < 2:
            return 0.0
        (t0, r0), (t1, r1) = self._samples[0], self._samples[-1]
        # A slow copy is seen in steps that may be further apart than the window: another one is waited for.
        stands = now_s - t1 > max(RATE_WINDOW_S, STEPS_TO_STAND * (t1 - self._samples[-2][0]))
        return (r1 - r0) / (t1 - t0) if t1 > t0 and not stands else 0.0

    @property
    def percent(self) -> float:
        if self.finished:
            return 100.0
        return percent_of(
            done=self.done,
            total=self.total,
            rows=self.rows,
            total_rows=self.total_rows,
            least_percent=self.least_percent,
        )

    def eta_s(self, now_s: float) -> float | None:
        rate = self.rows_per_s(now_s)
        # Where the source has no statistics, the parts that are to come are taken to be like those that are done.
        expected = self.total_rows or (self.rows * self.total / self.done if self.done else 0)
        if self.finished or rate <= 0 or expected <= self.rows:
            return 0.0 if self.finished else None
        return round((expected - self.rows) / rate, 1)

    def text(self) -> str:
        """`12.34% (n/m)`, at most 99.99% until done."""
        if self.finished:
            return "100%"
        return f"{self.percent:.2f}% ({self.rows if self.total_rows else self.done}/{self.total_rows or self.total})"

    def row(self, now_s: float) -> dict[str, object]:
        """The job's row of hw_progress."""
        return {
            "job_id": self.job_id,
            "name": self.name,
            "phase": self.phase,
            "done": self.done,
            "total": self.total,
            "percent": self.percent,
            "rows": self.rows,
            "bytes": self.bytes,
            "rows_per_s": round(self.rows_per_s(now_s), 1),
            "eta_s": self.eta_s(now_s),
            "waiting_for": self.waiting_for or None,
        }
