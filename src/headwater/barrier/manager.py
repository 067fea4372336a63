"""LocalBarrierManager: the only way from an actor to its coordinator. Events, fire and forget.

    coordinator ── send(barrier) ──► BarrierReceiver of each actor
    actor ── collect / notify_failure / report_… ──► `events`, read by the coordinator alone

A manager lives for one generation of a lane: recovery makes a new one, and what a stale actor still says to the old one
reaches nobody. Unknown or duplicate collection is a bug and raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from headwater.barrier.recovery import ActorFailure
from headwater.barrier.state import EPOCH_TRANSITIONS, EpochEvent, EpochState, IllegalTransition, step
from headwater.model.barrier import Barrier
from headwater.storage.checkpoint import Contribution, merged


@dataclass(slots=True)
class InFlight:
    """One barrier on its way: who has not collected it, and what the others contributed."""

    barrier: Barrier
    remaining: set[str]
    state: EpochState = EpochState.ISSUED
    contributions: list[Contribution] = field(default_factory=list)

    def contribution(self) -> Contribution:
        return merged(self.contributions)


class BarrierReceiver:
    """One actor's end: an async iterator over its barriers, in epoch order."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Barrier | None] = asyncio.Queue()
        self.last_epoch = 0

    def put(self, barrier: Barrier) -> None:
        if barrier.epoch.curr <= self.last_epoch:
            raise IllegalTransition(f"barrier {barrier.epoch.curr} sent after {self.last_epoch}")
        self.last_epoch = barrier.epoch.curr
        self._queue.put_nowait(barrier)

    def close(self) -> None:
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Barrier]:
        while (barrier := await self._queue.get()) is not None:
            yield barrier


@dataclass(frozen=True, slots=True)
class Progress:
    """A progress report of one job; `kind` is `mview`, `cdc` or `source`. Interpreted by `progress.py`."""

    kind: str
    job_id: int
    generation: int
    value: Any


class LocalBarrierManager:
    """See the head of this module."""

    def __init__(self) -> None:
        self._receivers: dict[str, BarrierReceiver] = {}
        self._in_flight: dict[int, InFlight] = {}
        self.changed = asyncio.Event()
        self.failures: list[ActorFailure] = []
        self.progress: list[Progress] = []

    # -- for actors -------------------------------------------------------------------------------------------------

    def subscribe_barrier(self, actor: str) -> BarrierReceiver:
        """Give the actor its barriers; a late one also gets those in flight that wait for it."""
        if actor in self._receivers:
            raise IllegalTransition(f"actor {actor} subscribed twice")
        receiver = self._receivers[actor] = BarrierReceiver()
        for epoch in sorted(self._in_flight):
            in_flight = self._in_flight[epoch]
            if actor in in_flight.remaining:
                receiver.put(in_flight.barrier)
        return receiver

    def collect(self, actor: str, barrier: Barrier, contribution: Contribution | None = None) -> None:
        """The actor has staged all of the closed epoch."""
        in_flight = self._in_flight.get(barrier.epoch.prev)
        if in_flight is None or actor not in in_flight.remaining:
            raise IllegalTransition(f"actor {actor} collected epoch {barrier.epoch.prev}, which does not wait for it")
        in_flight.remaining.discard(actor)
        if contribution is not None:
            in_flight.contributions.append(contribution)
        if not in_flight.remaining:
            in_flight.state = step(EPOCH_TRANSITIONS, in_flight.state, EpochEvent.LAST_ACTOR_COLLECTED)
        self.changed.set()

    def notify_failure(self, actor: str, job_id: int, error: BaseException) -> None:
        self.failures.append(ActorFailure(actor, job_id, error))
        self.changed.set()

    def report_create_mview_progress(self, job_id: int, value: Any, generation: int = 0) -> None:
        self._report(Progress("mview", job_id, generation, value))

    def report_cdc_table_backfill_progress(self, job_id: int, value: Any, generation: int = 0) -> None:
        self._report(Progress("cdc", job_id, generation, value))

    def report_source_offset(self, job_id: int, value: Any) -> None:
        self._report(Progress("source", job_id, 0, value))

    def _report(self, progress: Progress) -> None:
        self.progress.append(progress)
        self.changed.set()

    # -- for the coordinator ----------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def send(self, barrier: Barrier, actors: set[str]) -> None:
        """Issue a barrier to these actors; one that subscribes later still gets it."""
        if barrier.epoch.prev in self._in_flight:
            raise IllegalTransition(f"epoch {barrier.epoch.prev} issued twice")
        in_flight = InFlight(barrier, set(actors))
        self._in_flight[barrier.epoch.prev] = in_flight
        if not actors:
            in_flight.state = step(EPOCH_TRANSITIONS, in_flight.state, EpochEvent.LAST_ACTOR_COLLECTED)
        for actor in sorted(actors):  # in an order that a seed can repeat
            if (receiver := self._receivers.get(actor)) is not None:
                receiver.put(barrier)
        self.changed.set()

    def next_collected(self) -> InFlight | None:
        """The oldest epoch, if every actor has collected it (I6: never a later one before it)."""
        if not self._in_flight:
            return None
        oldest = self._in_flight[min(self._in_flight)]
        return oldest if oldest.state is EpochState.COLLECTED else None

    def complete(self, in_flight: InFlight) -> None:
        if self.next_collected() is not in_flight:
            raise IllegalTransition(f"epoch {in_flight.barrier.epoch.prev} completed out of order")
        in_flight.state = step(EPOCH_TRANSITIONS, in_flight.state, EpochEvent.COMMIT_LANDED)
        del self._in_flight[in_flight.barrier.epoch.prev]

    def drop_actor(self, actor: str) -> None:
        """A dropped job's actor: no barrier waits for it any more."""
        if (receiver := self._receivers.pop(actor, None)) is not None:
            receiver.close()
        for in_flight in self._in_flight.values():
            if actor in in_flight.remaining:
                in_flight.remaining.discard(actor)
                if not in_flight.remaining:
                    in_flight.state = step(EPOCH_TRANSITIONS, in_flight.state, EpochEvent.LAST_ACTOR_COLLECTED)
        self.changed.set()

    def drain_progress(self) -> list[Progress]:
        reports, self.progress = self.progress, []
        return reports

    def waiting_for(self) -> list[str]:
        """The actors that the oldest epoch waits for."""
        return sorted(self._in_flight[min(self._in_flight)].remaining) if self._in_flight else []

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
