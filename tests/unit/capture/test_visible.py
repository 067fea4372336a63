"""What a snapshot has seen: 32-bit numbers of the stream against 64-bit numbers of the snapshot."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.connectors.postgres.planner import visible


def _visible_one(xmin: int, xmax: int, running: set[int], full: int) -> bool:
    """The rule in the words of the Postgres manual, on 64-bit numbers."""
    if full < xmin:
        return True
    return full < xmax and full not in running


@settings(deadline=None)
@given(
    xmax=st.integers(1 << 32, 1 << 40),
    below=st.sets(st.integers(1, 1000), max_size=20),
    offsets=st.lists(st.integers(-(1 << 31) + 1, (1 << 31) - 1) | st.integers(-1100, 100), max_size=50),
)
def test_visibility_of_32_bit_numbers_is_that_of_the_64_bit_ones(
    xmax: int, below: set[int], offsets: list[int]
) -> None:
    running = {xmax - b for b in below}
    xmin = min(running, default=xmax)
    snapshot = f"{xmin}:{xmax}:{','.join(map(str, sorted(running)))}"
    full = [xmax + offset for offset in offsets]
    stream = np.array([f % (1 << 32) for f in full], np.uint32)
    assert visible(snapshot, stream).tolist() == [_visible_one(xmin, xmax, running, f) for f in full]


def test_numbers_around_the_wrap_of_32_bits_keep_their_order() -> None:
    wrap = 5 << 32
    snapshot = f"{wrap - 3}:{wrap + 4}:{wrap - 3},{wrap + 3}"
    xids = np.array([(wrap + d) % (1 << 32) for d in (-4, -3, -2, 3, 4, 5)], np.uint32)
    assert visible(snapshot, xids).tolist() == [True, False, True, False, False, False]


def test_snapshot_without_running_transactions_sees_all_below_its_end() -> None:
    assert visible("100:100:", np.array([99, 100], np.uint32)).tolist() == [True, False]
