from __future__ import annotations

import datetime as dt
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.model.epoch import EPOCH_ZERO_UNIX_MS, PHYSICAL_SHIFT, Epoch, EpochClock, EpochPair


def test_an_epoch_is_milliseconds_since_april_2021_shifted_by_16() -> None:
    assert Epoch.at_unix_ms(EPOCH_ZERO_UNIX_MS + 5) == 5 << 16
    assert Epoch(5 << 16).unix_ms == EPOCH_ZERO_UNIX_MS + 5
    assert Epoch(0).timestamp == dt.datetime(2021, 4, 1, tzinfo=dt.UTC)
    assert Epoch.at_unix_ms(0) == 0


@given(st.lists(st.floats(0, 4e9), min_size=1, max_size=50), st.integers(0, 1 << 57))
def test_the_clock_never_goes_back_whatever_the_wall_clock_does(times: list[float], last: int) -> None:
    wall = iter(times)
    clock = EpochClock(lambda: next(wall), last)
    given_out = [last, *(clock.next() for _ in times)]
    assert all(a < b for a, b in itertools.pairwise(given_out))
    assert all(e & ((1 << PHYSICAL_SHIFT) - 1) == 0 for e in given_out[1:])


def test_the_clock_follows_the_wall_clock_again_once_that_has_caught_up() -> None:
    now = [1_790_000_000.0]
    clock = EpochClock(lambda: now[0])
    first = clock.next()
    now[0] -= 100
    assert clock.next().unix_ms == first.unix_ms + 1
    now[0] += 200
    assert clock.next().unix_ms == first.unix_ms + 100_000


@pytest.mark.parametrize("curr", [4, 5])
def test_a_pair_must_go_forward(curr: int) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        EpochPair(Epoch(5), Epoch(curr))
