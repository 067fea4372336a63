"""When an engine calls itself unhealthy, and when not."""

from __future__ import annotations

from headwater.barrier.coordinator import LaneParameters
from headwater.model.barrier import BarrierKind
from headwater.runtime.health import BARRIER_S, LOOP_S, SPARK_S, Health


class Engine:
    """A clock, and everything that tells Health of itself unless it is stuck."""

    def __init__(self, *, interval: float = 1.0, frequency: int = 1) -> None:
        self.now = 1000.0
        self.committing = False
        parameters = LaneParameters(interval, frequency)
        self.health = Health(parameters, lambda: self.committing, clock=lambda: self.now)
        self.tasks = 0
        self.stuck = set[str]()

    def goes_on(self, seconds: float) -> list[str]:
        """The problems that were said on the way, in order."""
        said = list[str]()
        for _ in range(int(seconds)):
            self.now += 1
            if "loop" not in self.stuck:
                self.health.beat()
            if "spark" not in self.stuck:
                self.health.answered(self.tasks)
            if "barriers" not in self.stuck:
                self.health.completed(BarrierKind.CHECKPOINT)
            if (problem := self.health.problem()) is not None:
                said.append(problem)
        return said


def test_engine_whose_epochs_complete_is_healthy() -> None:
    assert Engine().goes_on(600) == []


def test_stopped_jvm_is_said_even_if_idle_epochs_complete_without_it() -> None:
    engine = Engine()
    engine.stuck = {"spark"}
    assert engine.goes_on(SPARK_S) == []
    assert "Spark's driver process has not answered" in engine.goes_on(2)[-1]
    engine.stuck = set()
    assert engine.goes_on(10) == []


def test_event_loop_that_stands_is_said() -> None:
    engine = Engine()
    engine.stuck = {"loop", "barriers"}
    assert "event loop" in engine.goes_on(LOOP_S + 2)[-1]


def test_commit_that_does_not_come_to_its_end_is_said_with_its_reason() -> None:
    engine = Engine()
    engine.stuck, engine.committing = {"barriers"}, True
    assert engine.goes_on(BARRIER_S + 2) == []
    assert engine.goes_on(1) == ["no epoch was completed for 33 s: the meta store does not take the commit"]


def test_lane_that_keeps_recovering_is_unhealthy_although_its_first_barriers_complete_and_tasks_run() -> None:
    engine = Engine()
    engine.stuck = {"barriers"}
    said = list[str]()
    for _ in range(50):
        engine.health.failed("EPOCH_FAILED")
        engine.health.completed(BarrierKind.INITIAL)
        engine.tasks += 1
        said += engine.goes_on(1)
    assert said[-1] == "no epoch was completed for 50 s: the main lane recovers from [EPOCH_FAILED]"
    engine.stuck = set()
    assert engine.goes_on(5) == []


def test_checkpoints_that_fail_are_unhealthy_although_barriers_between_them_complete() -> None:
    engine = Engine(frequency=5)
    engine.stuck = {"barriers"}
    said = list[str]()
    for _ in range(60):
        engine.health.completed(BarrierKind.BARRIER)
        said += engine.goes_on(1)
    assert said[-1].startswith("no checkpoint was committed for 60 s")


def test_long_epoch_that_goes_on_is_healthy_and_one_that_stands_is_not() -> None:
    engine = Engine()
    engine.stuck = {"barriers"}
    for _ in range(20):
        engine.tasks += 1
        assert engine.goes_on(20) == []
    assert engine.goes_on(BARRIER_S + 3)[-1].startswith("no epoch was completed")


def test_long_barrier_interval_is_waited_for() -> None:
    engine = Engine(interval=60)
    engine.stuck = {"barriers"}
    assert engine.goes_on(BARRIER_S + 120) == []
    assert engine.goes_on(2) != []
