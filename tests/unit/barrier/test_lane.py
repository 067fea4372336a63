"""One lane in virtual time: what is injected, what is committed, what is sent again, what is told to whom."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from headwater.barrier.coordinator import MAX_BARRIERS_IN_FLIGHT, Actor, Lane, LaneParameters
from headwater.barrier.manager import BarrierReceiver, LocalBarrierManager, Progress
from headwater.barrier.recovery import ActorFailure
from headwater.barrier.state import LaneState
from headwater.errors import DefiniteError, HeadwaterError, IndeterminateError, TransientError
from headwater.model.barrier import Barrier, BarrierKind, Mutation, MutationKind
from headwater.model.epoch import EpochClock
from headwater.storage.checkpoint import Contribution, NewSegment
from headwater.testing.virtual_clock import run

Script = Callable[[Barrier], Awaitable[Contribution | None]]


async def nothing(_barrier: Barrier) -> Contribution | None:
    return None


class Scripted:
    def __init__(self, name: str = "a", job_id: int = 1, script: Script = nothing) -> None:
        self.name, self.job_id, self.script = name, job_id, script
        self.seen: list[Barrier] = []
        self.committed: list[int] = []
        self.closed = 0

    async def run(self, barriers: BarrierReceiver, manager: LocalBarrierManager) -> None:
        async for barrier in barriers:
            self.seen.append(barrier)
            manager.collect(self.name, barrier, await self.script(barrier))

    def on_committed(self, epoch: int) -> None:
        self.committed.append(epoch)

    async def close(self) -> None:
        self.closed += 1


class Host:
    def __init__(self, make: Callable[[], Sequence[Actor]]) -> None:
        self.make = make
        self.commits: list[tuple[int, Contribution]] = []
        self.failures: list[ActorFailure] = []
        self.kinds: list[BarrierKind] = []
        self.builds = 0
        self.before_commit: Callable[[int], Awaitable[None]] | None = None
        self.after_commit: Callable[[int], Awaitable[None]] | None = None
        self.staged: list[set[str]] = []
        self.lane: Lane

    def committed_epoch(self, lane: str) -> int:
        return self.commits[-1][0] if self.commits else 0

    async def build(self, lane: str) -> Sequence[Actor]:
        self.builds += 1
        self.staged.append(self.lane.staged_paths())
        return self.make()

    async def commit(self, lane: str, epoch: int, contribution: Contribution) -> None:
        if self.before_commit is not None:
            await self.before_commit(epoch)
        self.commits.append((epoch, contribution))
        if self.after_commit is not None:
            await self.after_commit(epoch)

    def failed(self, lane: str, failure: ActorFailure) -> None:
        self.failures.append(failure)

    def barrier_completed(self, lane: str, barrier: Barrier, seconds: float) -> None:
        self.kinds.append(barrier.kind)

    def progress(self, lane: str, reports: Sequence[Progress]) -> None: ...


def in_lane(
    test: Callable[[Lane, Host], Awaitable[None]],
    make: Callable[[], Sequence[Actor]] = lambda: [Scripted()],
    *,
    frequency: int = 1,
) -> Host:
    host = Host(make)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        clock = EpochClock(lambda: 1_790_000_000 + loop.time())
        lane = host.lane = Lane("main", host, clock, LaneParameters(1.0, frequency), random.Random(1))
        lane.start()
        await test(lane, host)
        await lane.stop(final_checkpoint=False)
        assert lane.state is LaneState.STOPPED

    run(main(), seed=1)
    return host


def once(action: Callable[[], Any]) -> Callable[[Any], Awaitable[None]]:
    """An action for the first call only."""
    calls: list[Any] = []

    async def act(what: Any) -> None:
        calls.append(what)
        if len(calls) == 1:
            result = action()
            if isinstance(result, BaseException):
                raise result

    return act


def segment(path: str) -> Contribution:
    return Contribution(segments_added=[NewSegment(1, path, "delta", 1, 1)])


def paths(host: Host) -> list[str]:
    return [s.path for _, c in host.commits for s in c.segments_added]


# -- injecting --------------------------------------------------------------------------------------------------------


def test_every_nth_barrier_is_a_checkpoint() -> None:
    async def test(lane: Lane, host: Host) -> None:
        await asyncio.sleep(9.5)

    host = in_lane(test, frequency=3)
    plain, checkpoint = BarrierKind.BARRIER, BarrierKind.CHECKPOINT
    assert host.kinds == [BarrierKind.INITIAL, *[plain, plain, checkpoint] * 3]


def test_what_plain_barriers_staged_is_committed_by_the_next_checkpoint() -> None:
    async def stage(barrier: Barrier) -> Contribution:
        return segment(f"{barrier.kind}")

    async def test(lane: Lane, host: Host) -> None:
        await asyncio.sleep(3.5)

    host = in_lane(test, lambda: [Scripted(script=stage)], frequency=3)
    assert len(host.commits) == 1 and paths(host) == ["barrier", "barrier", "checkpoint"]


def test_a_request_forces_a_checkpoint_at_once() -> None:
    async def test(lane: Lane, host: Host) -> None:
        await lane.started.wait()
        before = asyncio.get_running_loop().time()
        epoch = await lane.checkpoint()
        assert asyncio.get_running_loop().time() - before < 0.1
        assert epoch == host.commits[-1][0]

    in_lane(test, frequency=1000)


def test_barriers_in_flight_are_bounded_while_an_actor_is_stuck() -> None:
    actor = Scripted()
    stuck = asyncio.Event()

    async def wait(barrier: Barrier) -> None:
        if barrier.kind is not BarrierKind.INITIAL:
            await stuck.wait()

    actor.script = wait

    async def test(lane: Lane, host: Host) -> None:
        await asyncio.sleep(100)
        assert lane._generation is not None
        assert lane._generation.manager.in_flight == MAX_BARRIERS_IN_FLIGHT
        assert lane.waiting_for() == ["a"] and not host.commits
        stuck.set()
        await asyncio.sleep(10)
        assert len(host.commits) > MAX_BARRIERS_IN_FLIGHT

    in_lane(test, lambda: [actor])


def test_a_request_waits_for_the_epoch_under_way_and_one_more_when_epochs_take_longer_than_the_interval() -> None:
    epoch_s = 3.0  # at an interval of 1 s
    actor = Scripted()

    async def slowly(barrier: Barrier) -> None:
        if barrier.kind is not BarrierKind.INITIAL:
            await asyncio.sleep(epoch_s)

    actor.script = slowly

    async def test(lane: Lane, host: Host) -> None:
        await asyncio.sleep(100)
        before = asyncio.get_running_loop().time()
        await lane.checkpoint()
        assert asyncio.get_running_loop().time() - before <= 3 * epoch_s + 0.1

    in_lane(test, lambda: [actor])


def test_pausing_is_in_force_after_its_barrier_and_survives_recovery() -> None:
    actors: list[Scripted] = []

    def make() -> list[Scripted]:
        actors.append(Scripted())
        return [actors[-1]]

    async def test(lane: Lane, host: Host) -> None:
        await lane.request(Mutation(MutationKind.PAUSE))
        await lane.recover()
        await asyncio.sleep(1)
        assert len(actors) == 2 and actors[1].seen[0].paused and lane.paused
        await lane.request(Mutation(MutationKind.RESUME))
        assert not actors[1].seen[-1].paused

    in_lane(test, make)


def test_actors_come_and_go_with_requests() -> None:
    first, second = Scripted("a"), Scripted("b", 2)

    async def test(lane: Lane, host: Host) -> None:
        await lane.request(Mutation(MutationKind.ADD, 2), new_actors=lambda: [second])
        assert lane.actor("b") is second and second.seen[0].mutations[0].kind is MutationKind.ADD
        await lane.request(Mutation(MutationKind.DROP, 1), drop_actors=["a"])
        await asyncio.sleep(3)
        assert lane.actor("a") is None and first.closed == 1 and host.builds == 1
        assert second.committed[-1] == host.commits[-1][0]

    in_lane(test, lambda: [first])


# -- failing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [RuntimeError("x"), TransientError("T", "x"), DefiniteError("D", "x"), asyncio.CancelledError(), None]
)
def test_the_epoch_of_a_failed_actor_is_never_committed_and_the_lane_goes_on(error: BaseException | None) -> None:
    failed: list[int] = []

    class Failing(Scripted):
        async def run(self, barriers: BarrierReceiver, manager: LocalBarrierManager) -> None:
            async for barrier in barriers:
                if len(host_commits()) == 2 and not failed:
                    failed.append(barrier.epoch.prev)
                    if error is not None:
                        raise error
                    return
                manager.collect(self.name, barrier)

    hosts: list[Host] = []

    def host_commits() -> list[Any]:
        return hosts[0].commits

    async def test(lane: Lane, host: Host) -> None:
        hosts.append(host)
        await asyncio.sleep(20)
        assert lane.state is LaneState.RUNNING and lane.recoveries == 1

    host = in_lane(test, lambda: [Failing(), Scripted("b", 2)])
    committed = [epoch for epoch, _ in host.commits]
    assert failed and failed[0] not in committed and committed == sorted(set(committed)) and len(committed) > 10
    assert host.failures[0].actor == "a" and host.builds == 2


def test_other_actors_errors_are_awaited_and_the_root_cause_is_reported() -> None:
    tries: list[int] = []

    async def lose(barrier: Barrier) -> None:
        if len(tries) < 2:
            tries.append(1)
            raise ConnectionResetError

    async def cause(barrier: Barrier) -> None:
        if len(tries) < 2:
            tries.append(2)
            await asyncio.sleep(1.5)
            raise DefiniteError("ROOT", "the cause")

    async def test(lane: Lane, host: Host) -> None:
        await asyncio.sleep(1.0)
        assert lane.state is LaneState.SUSPENDED
        await asyncio.sleep(4.0)
        assert lane.state is LaneState.RUNNING

    host = in_lane(test, lambda: [Scripted("a", 1, lose), Scripted("b", 2, cause)])
    assert [f.actor for f in host.failures] == ["b"]


def test_requests_of_a_lost_barrier_ride_again_in_their_order() -> None:
    async def test(lane: Lane, host: Host) -> None:
        host.before_commit = once(lambda: TransientError("T", "did not land"))
        first = asyncio.create_task(lane.request(contribution=segment("1")))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(lane.request(contribution=segment("2")))
        await asyncio.gather(first, second)

    host = in_lane(test)
    assert paths(host) == ["1", "2"] and host.builds == 2
    assert "1" in host.staged[1]  # the recovery was told to spare it


def test_a_request_whose_commit_landed_unknown_is_acknowledged_and_not_sent_again() -> None:
    async def test(lane: Lane, host: Host) -> None:
        await lane.started.wait()
        host.after_commit = once(lambda: IndeterminateError("COMMIT_UNKNOWN", "who knows"))
        epoch = await lane.request(Mutation(MutationKind.PAUSE), segment("1"))
        assert epoch == host.commits[0][0] and lane.paused
        await asyncio.sleep(5)

    host = in_lane(test)
    assert paths(host) == ["1"] and host.builds == 2


def test_a_request_fails_after_a_definite_error_of_its_job_but_not_of_another() -> None:
    bad = [3]

    async def script(barrier: Barrier) -> None:
        if barrier.mutations and bad:
            bad.pop()
            raise DefiniteError("BAD", "cannot")

    async def test(lane: Lane, host: Host) -> None:
        with pytest.raises(DefiniteError, match="cannot"):
            await lane.request(Mutation(MutationKind.THROTTLE, 1))
        for mutation in (Mutation(MutationKind.THROTTLE, 9), Mutation(MutationKind.PAUSE)):
            bad.append(1)
            assert await lane.request(mutation) == host.commits[-1][0]

    in_lane(test, lambda: [Scripted(script=script)])


def test_a_request_is_given_up_after_three_tries() -> None:
    async def test(lane: Lane, host: Host) -> None:
        async def refuse(epoch: int) -> None:
            raise RuntimeError("never")

        host.before_commit = refuse
        with pytest.raises(TransientError) as raised:
            await lane.request()
        assert raised.value.code == "EPOCH_FAILED"
        host.before_commit = None
        await lane.checkpoint()
        assert lane.recoveries >= 3

    in_lane(test)


def test_a_request_that_nobody_waits_for_any_more_is_not_sent() -> None:
    async def test(lane: Lane, host: Host) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(lane.request(contribution=segment("late")), 0)
        await asyncio.sleep(3)

    assert paths(in_lane(test)) == []


def test_faults_in_callbacks_do_not_stop_the_lane_or_lose_a_request() -> None:
    class Clumsy(Scripted):
        def on_committed(self, epoch: int) -> None:
            raise RuntimeError("on_committed")

        async def close(self) -> None:
            raise RuntimeError("close")

    async def test(lane: Lane, host: Host) -> None:
        def failed(lane: str, failure: ActorFailure) -> None:
            raise TransientError("META_STORE_UNAVAILABLE", "cannot record")

        host.failed = failed  # type: ignore[method-assign]
        for _ in range(3):
            await lane.checkpoint()
        await asyncio.sleep(10)
        assert lane.recoveries > 2

    assert len(in_lane(test, lambda: [Clumsy(), Scripted("b")]).commits) > 3


def test_a_build_that_fails_is_tried_again_with_back_off() -> None:
    attempts: list[float] = []

    def make() -> list[Scripted]:
        attempts.append(asyncio.get_running_loop().time())
        if len(attempts) < 6:
            raise TransientError("T", "not yet")
        return [Scripted()]

    async def test(lane: Lane, host: Host) -> None:
        await lane.started.wait()

    in_lane(test, make)
    gaps = [b - a for a, b in itertools.pairwise(attempts)]
    assert gaps == sorted(gaps) and gaps[0] <= 0.02 and gaps[-1] <= 5.0


def test_a_fenced_lane_stops_for_good() -> None:
    async def test(lane: Lane, host: Host) -> None:
        async def refuse(epoch: int) -> None:
            raise DefiniteError("ENGINE_FENCED", "another engine")

        host.before_commit = refuse
        with pytest.raises(HeadwaterError):
            await lane.checkpoint()
        await asyncio.sleep(60)
        assert lane.state is LaneState.STOPPED and host.builds == 1
        with pytest.raises(TransientError, match="stopping"):
            await lane.checkpoint()

    in_lane(test)


# -- stopping ---------------------------------------------------------------------------------------------------------


def test_a_commit_that_is_under_way_is_waited_out_when_the_lane_stops() -> None:
    async def test(lane: Lane, host: Host) -> None:
        async def slowly(epoch: int) -> None:
            await asyncio.sleep(2)

        host.before_commit = slowly
        request = asyncio.create_task(lane.request(contribution=segment("1")))
        await asyncio.sleep(1)
        await lane.stop(final_checkpoint=False)
        assert await request == host.commits[-1][0] and paths(host) == ["1"]

    in_lane(test)


def test_stopping_ends_with_a_checkpoint_and_refuses_what_comes_later() -> None:
    actor = Scripted()

    async def test(lane: Lane, host: Host) -> None:
        await lane.started.wait()
        await lane.stop()
        assert len(host.commits) == 1 and actor.closed == 1
        with pytest.raises(TransientError, match="stopping"):
            await lane.request()

    in_lane(test, lambda: [actor])


def test_a_lane_that_is_stopped_while_it_is_suspended_closes_its_actors() -> None:
    actor = Scripted()

    async def fail(barrier: Barrier) -> None:
        raise ConnectionResetError

    actor.script = fail

    async def test(lane: Lane, host: Host) -> None:
        request = asyncio.create_task(lane.request())
        await asyncio.sleep(1)
        assert lane.state is LaneState.SUSPENDED
        await lane.stop()
        assert actor.closed == 1
        with pytest.raises(TransientError, match="stopping"):
            await request

    in_lane(test, lambda: [actor])
