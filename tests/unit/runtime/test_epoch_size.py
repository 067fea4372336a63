"""A backlog is worked off in epochs of a few seconds, whatever a byte costs, and never slower than it grows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headwater.runtime.epoch_size import FIRST, FIRST_ROWS, GOAL_S, ROW_SIZES, SIZES, EpochSize

MB = 1 << 20
Cost = Callable[[float], float]  # of an epoch of that many MB, in seconds


def work_off(backlog: float, cost: Cost, *, coming: float = 0.0, most: int = 300) -> list[tuple[float, float]]:
    """(MB, seconds) of each epoch until the backlog is gone; sizes in MB, `coming` in MB a second."""
    size, seconds, durable, position = EpochSize(), 0.0, int(backlog * MB), 0
    epochs: list[tuple[float, float]] = []
    while position < durable:
        assert len(epochs) < most, "the backlog was never worked off"
        came = int(coming * seconds * MB)
        durable += came
        size.record_arrived(came)
        taken = min(size.limit, durable - position)
        position += taken
        size.record_taken(taken, rest=position < durable)
        seconds = cost(taken / MB)
        size.record_duration(seconds)
        epochs.append((taken / MB, seconds))
    return epochs


def linear(fixed_s: float, mb_per_s: float) -> Cost:
    return lambda mb: fixed_s + mb / mb_per_s


def share_of_best(epochs: list[tuple[float, float]], cost: Cost) -> float:
    """How the time that it took compares with that of the largest epochs alone."""
    total = sum(mb for mb, _ in epochs)
    largest = SIZES[-1] / MB
    return (total / largest * cost(largest)) / sum(seconds for _, seconds in epochs)


@pytest.mark.parametrize("mb_per_s", [3, 5, 10, 20])
def test_epochs_of_a_backlog_take_about_as_long_as_they_should(mb_per_s: float) -> None:
    cost = linear(0.4, mb_per_s)
    epochs = work_off(1000, cost)
    usual = sorted(seconds for _, seconds in epochs)[len(epochs) // 2]
    assert GOAL_S / 4 < usual <= GOAL_S and max(seconds for _, seconds in epochs) < 4 * GOAL_S
    assert share_of_best(epochs, cost) > 0.6


@pytest.mark.parametrize("fixed_s", [3.0, 8.0, 20.0])
def test_where_an_epoch_is_mostly_fixed_cost_it_does_not_become_small(fixed_s: float) -> None:
    cost = linear(fixed_s, 4.0)
    assert share_of_best(work_off(2000, cost), cost) > 0.45


def test_size_beyond_which_epochs_are_done_in_a_slower_way_is_left_alone() -> None:
    """As views are: of that many changes by a plan that is kept, of more by one that is made again."""

    def cost(mb: float) -> float:
        return 0.2 + mb / 16 if mb <= 25 else 4 + mb / 10

    epochs = work_off(2000, cost)
    assert sum(mb for mb, _ in epochs if mb <= 25) > 0.75 * 2000


def test_cold_start_does_not_decide_about_the_epochs_that_follow() -> None:
    seen = []

    def cost(mb: float) -> float:
        seen.append(mb)
        return 20.0 if len(seen) == 1 else 0.2 + mb / 20

    work_off(2000, cost)
    assert max(seen[20:]) >= SIZES[3] / MB


def test_backlog_that_grows_while_epochs_are_slow_is_still_worked_off() -> None:
    """Small epochs alone would never do: their fixed cost lets more come in than they take."""
    cost = linear(8, 4)
    small = SIZES[FIRST] / MB
    assert 1.5 * cost(small) > small
    work_off(200, cost, coming=1.5)


def test_what_gathers_during_a_pause_does_not_make_the_first_epoch_larger() -> None:
    size = EpochSize()
    for came in (10, 40 * MB, 40 * MB, 120 * MB):  # barriers at which nothing is taken
        size.record_arrived(came)
        size.record_duration(0.01)
    assert size.limit == SIZES[FIRST]


def test_slow_epoch_that_took_all_there_was_says_nothing_about_its_size() -> None:
    size = EpochSize()
    size.record_arrived(1)
    size.record_taken(1000, rest=False)
    size.record_duration(60.0)
    assert size.limit == SIZES[FIRST]


def test_splits_are_handed_over_as_they_fit_and_one_that_never_would_alone() -> None:
    size = EpochSize(ROW_SIZES, FIRST_ROWS)
    size.record_arrived(0)
    assert size.fit([size.limit - 1000, 900, 200, 50]) == 2
    size.record_duration(GOAL_S / 10)
    assert size.limit == ROW_SIZES[FIRST_ROWS + 1]
    size.record_arrived(0)
    assert size.fit([10 * size.limit, 1]) == 1
    assert size.fit([1]) == 0  # of another table
    size.record_arrived(0)
    assert size.fit([]) == 0 and size.fit([5, 0, 7]) == 3
