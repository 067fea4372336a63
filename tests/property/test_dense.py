"""Which numbers are not among the keys found, and which rows belong to a part; the plain twin is Python's sets."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.capture.splits import Split, SplitKind
from headwater.connectors.postgres import dense
from headwater.connectors.postgres.dense import DensePart, missing

PAGES = Split(1, ("(0,0)",), ("(9,0)",), SplitKind.CTID)


@st.composite
def parts(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """A range of numbers, and keys within and around it, in order or not."""
    low = draw(st.sampled_from([-(1 << 63), -40, 0, (1 << 63) - 60]) | st.integers(-50, 50))
    high = low + draw(st.integers(1, 40))
    keys = draw(st.sets(st.integers(max(low - 5, -(1 << 63)), min(high + 5, (1 << 63) - 1))))
    if draw(st.booleans()):  # next to all
        keys = set(range(low, high)) - set(draw(st.lists(st.integers(low, high - 1), max_size=3)))
    return low, high, draw(st.permutations(sorted(keys))) if draw(st.booleans()) else sorted(keys)


@settings(max_examples=500, deadline=None)
@given(parts())
def test_what_is_missing_is_what_no_key_is(case: tuple[int, int, list[int]]) -> None:
    low, high, keys = case
    inside = [k for k in keys if low <= k < high]
    gaps = missing(np.array(inside, np.int64), low, high)
    assert [n for a, b in gaps for n in range(a, b + 1)] == sorted(set(range(low, high)) - set(inside))
    assert all(b + 1 < c for (_, b), (c, _) in itertools.pairwise(gaps)), "ranges that touch are one"


def test_a_key_that_is_there_twice_hides_no_other() -> None:
    assert missing(np.array([0, 1, 2, 2, 4]), 0, 5) == [(3, 3)]


@settings(max_examples=300, deadline=None)
@given(parts(), st.sampled_from([1, 100]))
def test_rows_of_other_parts_are_left_out_and_too_many_gaps_are_refused(
    case: tuple[int, int, list[int]], rows_per_gap: int
) -> None:
    low, high, keys = case
    rows = pa.table({"v": [f"v{k}" for k in keys], "id": pa.array(keys, pa.int64())})
    part = DensePart("id", low, high, PAGES)
    usual, dense.ROWS_PER_GAP = dense.ROWS_PER_GAP, rows_per_gap  # type: ignore[misc]
    try:
        found = part.within(pa.concat_tables([rows.slice(0, 3), rows.slice(3)]))
    finally:
        dense.ROWS_PER_GAP = usual  # type: ignore[misc]
    inside = [k for k in keys if low <= k < high]
    gaps = missing(np.array(inside, np.int64), low, high)
    assert (found is None) == (len(gaps) * rows_per_gap > len(inside) + rows_per_gap)
    if found is not None:
        assert found[0].to_pylist() == [{"v": f"v{k}", "id": k} for k in inside]
        assert found[1] == gaps
