"""Whether the engine does what it is there for: epochs become complete. Asked by `/healthz`, from another thread.

    what stands still                              unhealthy after
    the engine's event loop                        LOOP_S
    Spark's driver (stopped, or out of memory)     SPARK_S without an answer to a question of ours
    the main lane: no barrier was completed        BARRIER_S and two barrier intervals
    the main lane: no checkpoint was committed     BARRIER_S and two checkpoint intervals

An epoch may take longer than that: a large refresh is one Spark job. As long as tasks of the lane's jobs come to their
end, it goes on, and that counts as if a barrier had been completed. It does not count once the lane has recovered since
its last checkpoint: a lane that tries the same again and again runs tasks, too. The first barrier after a recovery
seals nothing and counts for nothing.

Everything here is a number or a text that one thread writes and another reads; nobody waits for anybody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container
from typing import Final, Protocol

from headwater.barrier.coordinator import LaneParameters
from headwater.model.barrier import BarrierKind

BARRIER_S: Final = 30.0
LOOP_S: Final = 15.0
SPARK_S: Final = 30.0
BEAT_S: Final = 1.0
PROBE_S: Final = 3.0
LANE_POOLS: Final = frozenset({"capture", "view"})  # of the Spark jobs that an epoch of the main lane waits for


class Tasks(Protocol):
    """Of `spark/jobs.py`: JobRunner."""

    def tasks_done(self, pools: Container[str]) -> int: ...


class Health:
    """See the head of this module. `is_committing`: whether the lane waits for the meta store at the moment."""

    def __init__(
        self,
        parameters: LaneParameters,
        is_committing: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parameters = parameters
        self._is_committing = is_committing
        self._clock = clock
        self._stopping = threading.Event()
        self._beat = self._answered = self._progress = self._barrier = self._checkpoint = clock()
        self._tasks = 0
        self._recovers_from = ""

    # -- told by the engine's loop ------------------------------------------------------------------------------------

    def beat(self) -> None:
        self._beat = self._clock()

    def completed(self, kind: BarrierKind) -> None:
        """A barrier of the main lane."""
        if kind is BarrierKind.INITIAL:
            return
        self._barrier = self._clock()
        if kind is BarrierKind.CHECKPOINT:
            self._checkpoint = self._barrier
            self._recovers_from = ""

    def failed(self, code: str) -> None:
        """The main lane recovers."""
        self._recovers_from = code

    # -- asking Spark, in a thread of its own: it hangs when Spark does ------------------------------------------------

    def watch(self, jobs: Tasks) -> None:
        threading.Thread(target=self._watch, args=(jobs,), name="health", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def _watch(self, jobs: Tasks) -> None:
        while not self._stopping.wait(PROBE_S):
            try:
                self.answered(jobs.tasks_done(LANE_POOLS))
            except Exception:  # no answer is what this is about
                continue

    def answered(self, tasks: int) -> None:
        """Spark's driver has answered; `tasks` of the lane's running jobs have ended."""
        self._answered = self._clock()
        if tasks != self._tasks:
            self._tasks, self._progress = tasks, self._answered

    # -- asked ---------------------------------------------------------------------------------------------------------

    def problem(self) -> str | None:
        now = self._clock()
        if now - self._beat > LOOP_S:
            return f"the engine's event loop has not moved for {now - self._beat:.0f} s"
        if now - self._answered > SPARK_S:
            return f"Spark's driver process has not answered for {now - self._answered:.0f} s"
        interval = self._parameters.barrier_interval_s
        barrier = max(self._barrier, self._progress_since())
        if now - barrier > BARRIER_S + 2 * interval:
            return f"no epoch was completed for {now - self._barrier:.0f} s{self._why()}"
        checkpoint = max(self._checkpoint, self._progress_since())
        if now - checkpoint > BARRIER_S + 2 * interval * self._parameters.checkpoint_frequency:
            return f"no checkpoint was committed for {now - self._checkpoint:.0f} s{self._why()}"
        return None

    def _progress_since(self) -> float:
        return 0.0 if self._recovers_from else self._progress

    def _why(self) -> str:
        if self._is_committing():
            return ": the meta store does not take the commit"
        return f": the main lane recovers from [{self._recovers_from}]" if self._recovers_from else ""
