"""Delivery over a sink that is a dictionary: which failures clean up, which ask the target."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from headwater.connectors.trial.sink import BlackholeSink
from headwater.errors import DefiniteError, HeadwaterError, IndeterminateError, TransientError
from headwater.sink.delivery import TRANSITIONS, DeliveryEvent, DeliveryLoop, DeliveryState, advance
from headwater.sink.registry import sink_options
from headwater.sink.sink import Progress, SinkTraits, Token, Verdict, judge_progress


class MemorySink(SinkTraits):
    name = "memory"

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.rows: list[Any] = []
        self.aborted = 0
        self.fail: dict[str, BaseException] = {}
        self.lands = True

    def validate(self, columns: Any, key: Any) -> None: ...

    def claim(self) -> None: ...

    def prepare(self, from_epoch: int, to_epoch: int) -> Token:
        return Token(self.name, from_epoch, to_epoch, 1)

    def write(self, token: Token, df: Any) -> Token:
        self._maybe_fail("write")
        return token.written(rows=len(df), staged=list(df))

    def commit(self, token: Token) -> None:
        if self.lands and judge_progress(Progress(self.epoch, 1), token) is Verdict.APPLY:
            self.rows += token.payload["staged"]
            self.epoch = token.to_epoch
        self._maybe_fail("commit")

    def last_committed(self) -> int | None:
        self._maybe_fail("last_committed")
        return self.epoch

    def reset(self, to_epoch: int | None) -> None: ...

    def abort(self, token: Token) -> None:
        self.aborted += 1

    def close(self) -> None: ...

    def _maybe_fail(self, step: str) -> None:
        if error := self.fail.pop(step, None):
            raise error


UNKNOWN = IndeterminateError("X", "lost")
DOWN = TransientError("X", "down")


def test_a_commit_that_landed_but_was_reported_lost_is_found() -> None:
    sink = MemorySink()
    sink.fail = {"commit": UNKNOWN}
    delivered = DeliveryLoop(sink).deliver(0, 1, lambda: ["a"])
    assert (delivered.to_epoch, sink.rows, sink.aborted) == (1, ["a"], 0)


def test_a_commit_that_was_lost_is_delivered_again() -> None:
    sink = MemorySink()
    sink.fail, sink.lands = {"commit": UNKNOWN}, False
    loop = DeliveryLoop(sink)
    with pytest.raises(TransientError):
        loop.deliver(0, 1, lambda: ["a"])
    sink.lands = True
    loop.deliver(0, 1, lambda: ["a"])
    assert sink.rows == ["a"]


def test_nothing_is_cleaned_up_while_the_outcome_is_not_known() -> None:
    sink = MemorySink()
    sink.fail = {"commit": UNKNOWN, "last_committed": DOWN}
    loop = DeliveryLoop(sink)
    with pytest.raises(TransientError):
        loop.deliver(0, 1, lambda: ["a"])
    assert (loop.state, sink.aborted) == (DeliveryState.UNCERTAIN, 0)
    assert loop.deliver(0, 1, lambda: ["a"]).already
    assert sink.rows == ["a"]


def test_a_larger_batch_after_an_uncertain_commit_is_cut_anew() -> None:
    sink = MemorySink()
    sink.fail = {"commit": UNKNOWN, "last_committed": DOWN}
    loop = DeliveryLoop(sink)
    with pytest.raises(TransientError):
        loop.deliver(0, 1, lambda: ["a"])
    with pytest.raises(TransientError, match="SINK_OVERLAP"):
        loop.deliver(0, 2, lambda: ["a", "b"])
    loop.deliver(1, 2, lambda: ["b"])
    assert sink.rows == ["a", "b"]


@pytest.mark.parametrize("step", ["write", "commit"])
def test_a_determinate_failure_removes_what_was_staged(step: str) -> None:
    sink = MemorySink()
    sink.fail, sink.lands = {step: DOWN}, False
    loop = DeliveryLoop(sink)
    with pytest.raises(HeadwaterError):
        loop.deliver(0, 1, lambda: ["a"])
    assert (loop.state, sink.aborted) == (DeliveryState.IDLE, 1)


def test_a_target_that_lost_what_was_delivered_is_a_definite_error_with_the_way_out() -> None:
    sink = MemorySink()
    sink.epoch = 3
    with pytest.raises(DefiniteError, match="SINK_TARGET_WENT_BACK") as caught:
        DeliveryLoop(sink).start(5)
    assert "rewind memory --to-epoch 3" in caught.value.hint
    assert DeliveryLoop(sink).start(2) == 3


def test_a_target_that_lost_everything_is_not_answered_with_a_rewind_that_is_refused() -> None:
    with pytest.raises(DefiniteError, match="SINK_TARGET_WENT_BACK") as caught:
        DeliveryLoop(MemorySink()).start(5)
    assert "create it again" in caught.value.hint


def test_a_sink_that_remembers_nothing_goes_on_after_a_restart() -> None:
    options = sink_options({"connector": "blackhole"}, resolve_secret=str)
    sink = BlackholeSink("hole", options, (), (), 2)
    assert DeliveryLoop(sink).start(5) is None


def test_an_event_that_is_not_in_the_table_raises() -> None:
    for state, event in itertools.product(DeliveryState, DeliveryEvent):
        if (state, event) not in TRANSITIONS:
            with pytest.raises(RuntimeError):
                advance(state, event)


def test_the_rate_limit_delays_the_batch_after() -> None:
    slept: list[float] = []
    loop = DeliveryLoop(MemorySink(), rate_limit=10, clock=lambda: 100.0, sleep=slept.append)
    loop.deliver(0, 1, lambda: ["a"] * 5)
    loop.deliver(1, 2, lambda: ["b"])
    assert slept == [0.5]
