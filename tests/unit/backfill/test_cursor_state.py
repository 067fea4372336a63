"""State of schema v1, one row per table, becomes splits of schema v2: nothing is read twice, and nothing left out."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headwater.backfill.cdc.state import CursorState, SplitState, migrated
from headwater.capture.splits import Split


def stored(**values: Any) -> CursorState:
    return CursorState.from_dict({"pk": None, "finished": False, "row_count": 0, "offset": "0/0", **values})


def test_a_table_that_was_finished_is_one_split_that_is_handed_over() -> None:
    assert migrated(stored(finished=True, pk=["9"])) == [(Split(1, None, None), SplitState.HANDED_OVER)]


def test_a_table_that_was_not_begun_is_one_split_to_read() -> None:
    assert migrated(stored()) == [(Split(1, None, None), SplitState.PLANNED)]


def test_a_cursor_cuts_the_table_in_two_at_its_place() -> None:
    assert migrated(stored(pk=["b", 7], row_count=12)) == [
        (Split(1, None, ("b", "7")), SplitState.HANDED_OVER),
        (Split(2, ("b", "7"), None), SplitState.PLANNED),
    ]


@given(st.one_of(st.none(), st.integers(-100, 100)), st.booleans(), st.integers(-100, 100))
def test_every_key_is_in_one_split_and_is_known_exactly_if_it_is_before_the_cursor(
    cursor: int | None, finished: bool, key: int
) -> None:
    state = stored(pk=None if cursor is None else [cursor], finished=finished)
    homes = [
        phase
        for split, phase in migrated(state)
        if (split.left is None or int(split.left[0]) <= key) and (split.right is None or key < int(split.right[0]))
    ]
    known = finished or (cursor is not None and key < cursor)
    assert homes == [SplitState.HANDED_OVER if known else SplitState.PLANNED]
