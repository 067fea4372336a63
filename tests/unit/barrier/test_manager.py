from __future__ import annotations

import pytest

from headwater.barrier.manager import BarrierReceiver, LocalBarrierManager
from headwater.barrier.state import EpochState, IllegalTransition
from headwater.model.barrier import Barrier, BarrierKind
from headwater.model.epoch import Epoch, EpochPair
from headwater.storage.checkpoint import Contribution
from headwater.testing.virtual_clock import run


def barrier(prev: int, curr: int) -> Barrier:
    return Barrier(EpochPair(Epoch(prev), Epoch(curr)), BarrierKind.CHECKPOINT)


async def received(receiver: BarrierReceiver) -> list[int]:
    receiver.close()
    return [b.epoch.prev async for b in receiver]


def test_an_epoch_is_collected_when_its_last_actor_has() -> None:
    manager = LocalBarrierManager()
    manager.send(barrier(1, 2), {"a", "b"})
    manager.collect("a", barrier(1, 2), Contribution(positions={1: "x"}))
    assert manager.next_collected() is None and manager.waiting_for() == ["b"]
    manager.collect("b", barrier(1, 2), Contribution(positions={2: "y"}))
    collected = manager.next_collected()
    assert collected is not None and collected.contribution().positions == {1: "x", 2: "y"}
    manager.complete(collected)
    assert collected.state is EpochState.COMMITTED and manager.in_flight == 0 and manager.waiting_for() == []


def test_duplicate_and_unknown_collections_raise_and_change_nothing() -> None:
    manager = LocalBarrierManager()
    manager.send(barrier(1, 2), {"a", "b"})
    manager.collect("a", barrier(1, 2))
    for actor, what in (("a", barrier(1, 2)), ("c", barrier(1, 2)), ("b", barrier(2, 3))):
        with pytest.raises(IllegalTransition):
            manager.collect(actor, what, Contribution(positions={1: "wrong"}))
    assert manager.waiting_for() == ["b"]
    manager.collect("b", barrier(1, 2))
    collected = manager.next_collected()
    assert collected is not None and collected.contribution() == Contribution()


def test_a_later_epoch_never_completes_before_an_earlier_one() -> None:
    manager = LocalBarrierManager()
    manager.send(barrier(1, 2), {"a", "b"})
    manager.send(barrier(2, 3), {"a"})
    manager.collect("a", barrier(2, 3))
    assert manager.next_collected() is None
    with pytest.raises(IllegalTransition):
        manager.complete(manager._in_flight[2])
    assert manager._in_flight[2].state is EpochState.COLLECTED
    manager.collect("a", barrier(1, 2))
    manager.collect("b", barrier(1, 2))
    for prev in (1, 2):
        collected = manager.next_collected()
        assert collected is not None and collected.barrier.epoch.prev == prev
        manager.complete(collected)


def test_a_barrier_without_actors_is_collected_at_once() -> None:
    manager = LocalBarrierManager()
    manager.send(barrier(1, 2), set())
    assert manager.next_collected() is not None


def test_a_late_subscriber_gets_what_waits_for_it_and_nothing_else() -> None:
    async def main() -> None:
        manager = LocalBarrierManager()
        manager.send(barrier(1, 2), {"a"})
        manager.send(barrier(2, 3), {"a", "late"})
        manager.send(barrier(3, 4), {"a", "late"})
        receiver = manager.subscribe_barrier("late")
        manager.send(barrier(4, 5), {"a", "late"})
        assert await received(receiver) == [2, 3, 4]

    run(main())


def test_an_actor_subscribes_once_and_an_epoch_is_issued_once() -> None:
    manager = LocalBarrierManager()
    receiver = manager.subscribe_barrier("a")
    with pytest.raises(IllegalTransition):
        manager.subscribe_barrier("a")
    manager.send(barrier(1, 2), {"a"})
    with pytest.raises(IllegalTransition):
        manager.send(barrier(1, 3), {"a"})
    with pytest.raises(IllegalTransition):
        receiver.put(barrier(1, 2))


def test_nothing_waits_for_a_dropped_actor() -> None:
    async def main() -> None:
        manager = LocalBarrierManager()
        receiver = manager.subscribe_barrier("a")
        manager.send(barrier(1, 2), {"a", "b"})
        manager.send(barrier(2, 3), {"a"})
        manager.drop_actor("a")
        assert manager.waiting_for() == ["b"]
        with pytest.raises(IllegalTransition):
            manager.collect("a", barrier(1, 2))
        manager.collect("b", barrier(1, 2))
        for _ in range(2):
            collected = manager.next_collected()
            assert collected is not None
            manager.complete(collected)
        assert await received(receiver) == [1, 2]

    run(main())


def test_reports_are_handed_over_once_and_in_order() -> None:
    manager = LocalBarrierManager()
    manager.report_create_mview_progress(1, {"done": 1}, 3)
    manager.report_cdc_table_backfill_progress(2, {"done": 2})
    manager.report_source_offset(3, "0/1")
    assert [(p.kind, p.job_id, p.generation) for p in manager.drain_progress()] == [
        ("mview", 1, 3),
        ("cdc", 2, 0),
        ("source", 3, 0),
    ]
    assert manager.drain_progress() == [] and manager.changed.is_set()
