"""One lane's coordinator: injects barriers, completes them in epoch order, commits, recovers.

    request ─┐
    timer ───┴─► inject ─► actors ─► collect ─► commit (one transaction) ─► on_committed, waiters
                              └─ failure ─► suspend ─► root cause ─► discard staged ─► back-off ─► rebuild

The coordinator knows no tables and no Spark: it asks its `LaneHost` for actors and for the commit. Everything here runs
on the event loop and takes its time from it, so that a virtual clock can drive it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from headwater.barrier.manager import BarrierReceiver, InFlight, LocalBarrierManager, Progress
from headwater.barrier.recovery import ROOT_CAUSE_WINDOW_S, ROOT_SCORE, ActorFailure, backoff_s, root_cause, score
from headwater.barrier.request import REQUEST_TRIES, Request, acknowledge, fail, is_hopeless
from headwater.barrier.state import LANE_TRANSITIONS, LaneEvent, LaneState, step
from headwater.errors import HeadwaterError, TransientError
from headwater.model.barrier import Barrier, BarrierKind, Mutation, MutationKind
from headwater.model.epoch import EpochClock, EpochPair
from headwater.storage.checkpoint import Contribution

# One commits, or is being staged, while the next is staged or waits. Every further one would stand in a queue, and what
# rides on a barrier (FLUSH, DDL, PAUSE) behind it, for as long as an epoch takes under load.
MAX_BARRIERS_IN_FLIGHT: Final = 2

log = logging.getLogger(__name__)

__all__ = ["MAX_BARRIERS_IN_FLIGHT", "REQUEST_TRIES", "Actor", "Lane", "LaneHost", "LaneParameters", "Request"]


class Actor(Protocol):
    """One source, table, view or sink at work in a lane.

    `run` handles barriers in order and collects each exactly once; it returns when the receiver ends. An exception
    fails the lane. `on_committed` is called in order after each checkpoint, and must not block. `close` frees what the
    actor holds; it is called once, also after a failure.
    """

    name: str
    job_id: int

    async def run(self, barriers: BarrierReceiver, manager: LocalBarrierManager) -> None: ...

    def on_committed(self, epoch: int) -> None: ...

    async def close(self) -> None: ...


class LaneHost(Protocol):
    """What a lane needs of the engine. All state that must survive is behind `commit`."""

    def committed_epoch(self, lane: str) -> int: ...

    async def build(self, lane: str) -> Sequence[Actor]:
        """Actors from committed state; whatever was staged and not committed is gone before it returns (I8).

        It begins with `MetaStore.settle`: a commit of unknown outcome may still land, and an engine that was fenced
        must delete nothing. Files of `Lane.staged_paths` stay: requests that ride again refer to them.
        """

    async def commit(self, lane: str, epoch: int, contribution: Contribution) -> None:
        """Durable when it returns. A commit of unknown outcome is read back in here.

        Whatever it raises, the lane looks at `committed_epoch` after the next `build` before it sends a request again.
        """

    def failed(self, lane: str, failure: ActorFailure) -> None:
        """Called once per recovery with the root cause; may mark a job as failed so that `build` leaves it out."""

    def barrier_completed(self, lane: str, barrier: Barrier, seconds: float) -> None: ...

    def progress(self, lane: str, reports: Sequence[Progress]) -> None: ...


@dataclass(slots=True)
class LaneParameters:
    """Changed live by `ALTER SYSTEM SET`."""

    barrier_interval_s: float = 1.0
    checkpoint_frequency: int = 1


@dataclass(slots=True)
class _Generation:
    """Everything that dies with a recovery."""

    manager: LocalBarrierManager = field(default_factory=LocalBarrierManager)
    actors: dict[str, Actor] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    requests: dict[int, list[Request]] = field(default_factory=dict)
    injected_at: dict[int, float] = field(default_factory=dict)
    closing: list[asyncio.Task[None]] = field(default_factory=list)
    pending: Contribution = field(default_factory=Contribution)
    committing: int = 0
    disposed: bool = False
    curr: int = 0
    since_checkpoint: int = 0


class _ActorsFailed(Exception):
    pass


class Lane:
    """See the head of this module."""

    def __init__(
        self,
        name: str,
        host: LaneHost,
        clock: EpochClock,
        parameters: LaneParameters,
        rng: random.Random,
        *,
        paused: bool = False,
    ) -> None:
        self.name = name
        self.host = host
        self.clock = clock
        self.parameters = parameters
        self.rng = rng
        self.paused = paused
        self.state = LaneState.STARTING
        self.last_failure: ActorFailure | None = None
        self.recoveries = 0
        self.started: asyncio.Event = asyncio.Event()
        self._requests: list[Request] = []
        self._unknown: list[tuple[Request, ActorFailure]] = []  # their commit failed; the next build tells
        self._paused_for_good = paused  # as of the last checkpoint
        self._wake = asyncio.Event()
        self._generation: _Generation | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._backoff = backoff_s(rng)

    # -- for the engine ---------------------------------------------------------------------------------------------

    def start(self) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._run(), name=f"lane {self.name}")
        return self._task

    async def checkpoint(self) -> int:
        """Force a checkpoint of everything that was handed to the actors before; gives its epoch."""
        return await self.request()

    async def request(
        self,
        mutation: Mutation | None = None,
        contribution: Contribution | None = None,
        new_actors: Callable[[], Sequence[Actor]] | None = None,
        drop_actors: Sequence[str] = (),
    ) -> int:
        """Let something ride on the next barrier, made a checkpoint; gives the epoch with which it was committed."""
        if self._stopping or self.state is LaneState.STOPPED:
            raise TransientError("ENGINE_STOPPING", "the engine is stopping", hint="start it again")
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._requests.append(Request(done, mutation, contribution, new_actors, drop_actors))
        self._wake.set()
        return await done

    async def recover(self) -> None:
        """The user's RECOVER: rebuild from committed state."""
        if self._generation is not None:
            error = TransientError("RECOVER_REQUESTED", "recovery was asked for")
            self._generation.manager.notify_failure("user", 0, error)

    async def stop(self, *, final_checkpoint: bool = True, timeout_s: float = 8.0) -> None:
        if final_checkpoint and self.state is LaneState.RUNNING:
            with contextlib.suppress(HeadwaterError, TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.checkpoint()
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, HeadwaterError):
                await self._task
        self._refuse_requests()

    def staged_paths(self) -> set[str]:
        """Files of requests that are not committed yet; a recovery must leave them alone."""
        waiting = [*self._requests, *(request for request, _ in self._unknown)]
        if self._generation is not None:
            waiting += [r for group in self._generation.requests.values() for r in group]
        return {s.path for r in waiting if r.contribution is not None for s in r.contribution.segments_added}

    @property
    def is_committing(self) -> bool:
        """A commit is under way: what is waited for is the meta store."""
        return self._generation is not None and bool(self._generation.committing)

    def waiting_for(self) -> list[str]:
        return self._generation.manager.waiting_for() if self._generation else []

    def actor(self, name: str) -> Actor | None:
        return self._generation.actors.get(name) if self._generation else None

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while not self._stopping:
                await self._run_generation()
        finally:
            if self.state is not LaneState.STOPPED:
                self.state = step(LANE_TRANSITIONS, self.state, LaneEvent.STOP)
            self._refuse_requests()

    async def _run_generation(self) -> None:
        generation = self._generation = _Generation()
        try:
            await self._build(generation)
            await self._serve(generation)
        except asyncio.CancelledError:
            await self._dispose(generation)
            raise
        except _ActorsFailed:
            await self._suspend(generation)
        except Exception as error:
            generation.manager.notify_failure("coordinator", 0, error)
            await self._suspend(generation)

    async def _build(self, generation: _Generation) -> None:
        for actor in await self.host.build(self.name):
            self._add_actor(generation, actor)
        committed = self.host.committed_epoch(self.name)
        self._decide_unknown(committed)
        self.clock.last = max(self.clock.last, type(self.clock.last)(committed))
        prev = type(self.clock.last)(committed)
        pair = EpochPair(prev, self.clock.next())
        self._send(generation, Barrier(pair, BarrierKind.INITIAL, paused=self.paused), [])
        self.state = step(LANE_TRANSITIONS, self.state, LaneEvent.BUILT)

    def _add_actor(self, generation: _Generation, actor: Actor) -> None:
        receiver = generation.manager.subscribe_barrier(actor.name)
        generation.actors[actor.name] = actor
        task = asyncio.create_task(actor.run(receiver, generation.manager), name=f"actor {actor.name}")
        generation.tasks[actor.name] = task

        def report(done: asyncio.Task[None]) -> None:
            error = None if done.cancelled() else done.exception()
            if generation.disposed or generation.actors.get(actor.name) is not actor:
                return  # it was told to end
            if error is None:  # nobody would ever collect its barriers
                error = TransientError("ACTOR_ENDED", f"actor {actor.name} ended before its barriers did")
            generation.manager.notify_failure(actor.name, actor.job_id, error)

        task.add_done_callback(report)

    async def _serve(self, generation: _Generation) -> None:
        injecting = asyncio.create_task(self._inject_loop(generation))
        completing = asyncio.create_task(self._complete_loop(generation))
        try:
            done, _ = await asyncio.wait({injecting, completing}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (injecting, completing):
                task.cancel()
            await asyncio.gather(injecting, completing, return_exceptions=True)

    # -- injecting --------------------------------------------------------------------------------------------------

    async def _inject_loop(self, generation: _Generation) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await self._wait_turn(generation, last)
            last = loop.time()
            self._inject(generation)

    async def _wait_turn(self, generation: _Generation, last: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            room = generation.manager.in_flight < MAX_BARRIERS_IN_FLIGHT
            left = last + self.parameters.barrier_interval_s - loop.time()
            if room and (self._requests or left <= 0):
                return
            self._wake.clear()
            # Not wait_for: before Python 3.12 it swallows a cancellation that comes together with the wake-up.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(left, 0.001) if room else None):
                    await self._wake.wait()

    def _inject(self, generation: _Generation) -> None:
        requests = [r for r in self._requests if not r.done.cancelled()]
        self._requests = []
        mutations = tuple(r.mutation for r in requests if r.mutation is not None)
        for mutation in mutations:
            if mutation.kind in (MutationKind.PAUSE, MutationKind.RESUME):
                self.paused = mutation.kind is MutationKind.PAUSE
        generation.since_checkpoint += 1
        forced = bool(requests) or generation.since_checkpoint >= self.parameters.checkpoint_frequency
        kind = BarrierKind.CHECKPOINT if forced else BarrierKind.BARRIER
        if forced:
            generation.since_checkpoint = 0
        pair = EpochPair(type(self.clock.last)(generation.curr), self.clock.next())
        self._send(generation, Barrier(pair, kind, mutations, self.paused), requests)

    def _send(self, generation: _Generation, barrier: Barrier, requests: list[Request]) -> None:
        prev = barrier.epoch.prev
        generation.curr = barrier.epoch.curr
        generation.requests[prev] = requests
        generation.injected_at[prev] = asyncio.get_running_loop().time()
        for request in requests:
            request.tries += 1
            request.epoch = prev
            for actor in request.new_actors() if request.new_actors else ():
                self._add_actor(generation, actor)
        generation.manager.send(barrier, set(generation.actors))

    # -- completing -------------------------------------------------------------------------------------------------

    async def _complete_loop(self, generation: _Generation) -> None:
        manager = generation.manager
        while True:
            await manager.changed.wait()
            manager.changed.clear()
            if reports := manager.drain_progress():
                self.host.progress(self.name, reports)
            if manager.failures:
                raise _ActorsFailed
            while not manager.failures and (collected := manager.next_collected()) is not None:
                await self._complete(generation, collected)

    async def _complete(self, generation: _Generation, collected: InFlight) -> None:
        barrier = collected.barrier
        epoch = barrier.epoch.prev
        requests = generation.requests.pop(epoch)
        if barrier.kind is not BarrierKind.INITIAL:
            # What the actors did comes after what was asked for: a view may fail in the barrier that makes it live.
            for request in requests:
                if request.contribution is not None:
                    generation.pending.merge(request.contribution)
            generation.pending.merge(collected.contribution())
        if barrier.is_checkpoint:
            generation.requests[epoch] = requests  # a failing commit must find them for the next try
            await self._commit(generation, epoch)
            del generation.requests[epoch]
            generation.pending = Contribution()
            self._paused_for_good = barrier.paused
            self._backoff = backoff_s(self.rng)
        generation.manager.complete(collected)
        seconds = asyncio.get_running_loop().time() - generation.injected_at.pop(epoch)
        self._after_commit(generation, barrier, requests)
        self.host.barrier_completed(self.name, barrier, seconds)
        self._wake.set()

    async def _commit(self, generation: _Generation, epoch: int) -> None:
        """Run the host's commit to its end, whatever happens to us: what it may still make visible must stay."""
        generation.committing = epoch
        commit = asyncio.ensure_future(self.host.commit(self.name, epoch, generation.pending))
        try:
            await asyncio.shield(commit)
        except asyncio.CancelledError:
            if not commit.done():
                await asyncio.wait({commit})
            if commit.cancelled():
                raise TransientError("COMMIT_CANCELLED", f"the commit of epoch {epoch} was cancelled") from None
            if commit.exception() is None:
                for request in generation.requests[epoch]:
                    acknowledge(request, epoch)
            raise
        generation.committing = 0

    def _after_commit(self, generation: _Generation, barrier: Barrier, requests: list[Request]) -> None:
        if barrier.kind is BarrierKind.INITIAL:
            self.started.set()
        if barrier.is_checkpoint:
            for actor in generation.actors.values():
                try:
                    actor.on_committed(barrier.epoch.prev)
                except Exception as error:  # the checkpoint stands, and the others must hear of it
                    generation.manager.notify_failure(actor.name, actor.job_id, error)
        for request in requests:
            for name in request.drop_actors:
                self._drop_actor(generation, name)
            acknowledge(request, barrier.epoch.prev)

    def _drop_actor(self, generation: _Generation, name: str) -> None:
        generation.manager.drop_actor(name)
        if (actor := generation.actors.pop(name, None)) is not None:
            task = generation.tasks.pop(name)
            task.cancel()

            async def close() -> None:
                await asyncio.gather(task, return_exceptions=True)
                await _close(actor)

            generation.closing = [t for t in generation.closing if not t.done()]
            generation.closing.append(asyncio.create_task(close()))

    # -- recovery ---------------------------------------------------------------------------------------------------

    async def _suspend(self, generation: _Generation) -> None:
        manager = generation.manager
        self.state = step(LANE_TRANSITIONS, self.state, LaneEvent.ACTOR_FAILED)
        try:
            if max(score(f.error) for f in manager.failures) < ROOT_SCORE:
                await asyncio.sleep(ROOT_CAUSE_WINDOW_S)
            cause = self.last_failure = root_cause(manager.failures)
        finally:
            await self._dispose(generation)
        self.recoveries += 1
        self.paused = self._paused_for_good
        self._keep_requests(generation, cause)
        self.state = step(LANE_TRANSITIONS, self.state, LaneEvent.CAUSE_KNOWN)
        try:
            self.host.failed(self.name, cause)
        except Exception as error:  # it writes to the meta store, which may be what failed
            log.warning("the failure of lane %s could not be recorded: %s", self.name, type(error).__name__)
        if any(_is_fenced(failure.error) for failure in manager.failures):
            self._stopping = True  # for good (I9): the newer engine goes on
            return
        await asyncio.sleep(next(self._backoff))
        self.state = step(LANE_TRANSITIONS, self.state, LaneEvent.BACKED_OFF)

    def _keep_requests(self, generation: _Generation, cause: ActorFailure) -> None:
        """Requests whose barrier was lost ride again, before newer ones; those of a failed commit wait for build."""
        lost = [request for _, group in sorted(generation.requests.items()) for request in group]
        generation.requests.clear()
        self._unknown += [(r, cause) for r in lost if r.epoch == generation.committing]
        self._send_again([(r, cause) for r in lost if r.epoch != generation.committing])

    def _decide_unknown(self, committed: int) -> None:
        """Committed state is known again, and with it whether the commit that failed has landed after all."""
        unknown, self._unknown = self._unknown, []
        for request, _ in unknown:
            if request.epoch <= committed:
                if request.mutation is not None and request.mutation.kind in (MutationKind.PAUSE, MutationKind.RESUME):
                    self.paused = self._paused_for_good = request.mutation.kind is MutationKind.PAUSE
                acknowledge(request, request.epoch)
        self._send_again([(r, cause) for r, cause in unknown if r.epoch > committed])

    def _send_again(self, lost: list[tuple[Request, ActorFailure]]) -> None:
        kept = []
        for request, cause in lost:
            if is_hopeless(request, cause):
                fail(request, cause.error)
            else:
                kept.append(request)
        self._requests[:0] = kept

    async def _dispose(self, generation: _Generation) -> None:
        generation.disposed = True
        generation.manager.close()
        for task in generation.tasks.values():
            task.cancel()
        await asyncio.gather(*generation.tasks.values(), *generation.closing, return_exceptions=True)
        while generation.actors:
            await _close(generation.actors.popitem()[1])

    def _refuse_requests(self) -> None:
        requests = [request for request, _ in self._unknown] + self._requests
        if self._generation is not None:
            requests = [r for group in self._generation.requests.values() for r in group] + requests
        self._requests, self._unknown = [], []
        for request in requests:
            fail(request, TransientError("ENGINE_STOPPING", "the engine is stopping", hint="start it again"))


async def _close(actor: Actor) -> None:
    try:
        await actor.close()
    except Exception as error:  # the others must be closed too, and the lane must go on
        log.warning("actor %s could not be closed: %s", actor.name, type(error).__name__)


def _is_fenced(error: BaseException) -> bool:
    return isinstance(error, HeadwaterError) and error.code == "ENGINE_FENCED"
