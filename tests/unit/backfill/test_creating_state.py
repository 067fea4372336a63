"""The persisted state of a view's creation, and the groups of epochs that it consumes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.backfill.snapshot.consume_upstream.upstream import next_group
from headwater.backfill.snapshot.state import CreatingState, Phase, next_chunk

VNODES = 256


def test_state_survives_its_json_form() -> None:
    state = CreatingState.starting(7).counted([3] * VNODES).advanced(100, VNODES, 300).advanced_within(("5", None), 2)
    assert CreatingState.from_dict(state.as_dict()) == state


def test_a_state_that_an_older_engine_stored_is_read() -> None:
    old = {"phase": "log", "snapshot_epoch": 7, "next_vnode": 256, "row_count": 9, "consumed": 8}
    state = CreatingState.from_dict(old)
    assert (state.phase, state.consumed, state.group_epoch) == (Phase.LOG, 8, 0)


def test_last_vnode_ends_the_snapshot() -> None:
    state = CreatingState.starting(7).advanced(VNODES, VNODES, 10)
    assert state.phase is Phase.LOG
    assert state.consumed == 7


def test_reading_a_vnode_twice_is_refused() -> None:
    state = CreatingState.starting(7).advanced(100, VNODES, 1)
    with pytest.raises(ValueError, match="does not follow"):
        state.advanced(100, VNODES, 1)


def test_consuming_backwards_is_refused() -> None:
    with pytest.raises(ValueError, match="consumed already"):
        CreatingState.starting(7).consumed_to(6)


def test_a_vnode_that_is_read_in_part_resumes_at_its_next_key_and_the_next_one_at_its_beginning() -> None:
    state = CreatingState.starting(7).counted([10] * 4).advanced(1, 4, 10).advanced_within(("k6",), 5)
    states = state.vnodes(4)
    assert [(v.is_epoch_finished, v.next_key, v.row_count) for v in states] == [
        (True, None, 10),
        (False, ("k6",), 5),
        (False, None, 0),
        (False, None, 0),
    ]
    assert state.advanced(2, 4, 5).vnodes(4)[2].next_key is None


def test_a_group_that_is_consumed_vnode_by_vnode_resumes_with_the_next_vnode() -> None:
    live = CreatingState.starting(7).counted([1] * 4).advanced(4, 4, 4)
    state = live.consumed_within(9, 2, 4)
    assert [v.epoch for v in state.vnodes(4)] == [9, 9, 7, 7]
    assert state.consumed == 7
    with pytest.raises(ValueError, match="does not follow"):
        state.consumed_within(10, 3, 4)
    done = state.consumed_within(9, 4, 4)
    assert (done.consumed, done.group_epoch) == (9, 0)


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=12), wanted=st.integers(1, 400))
def test_chunks_cover_every_row_once_and_none_is_larger_than_wanted(counts: list[int], wanted: int) -> None:
    state = CreatingState.starting(1).counted(counts)
    read = 0
    while state.phase is Phase.SNAPSHOT:
        end = next_chunk(state, len(counts), wanted)
        if end > state.next_vnode:
            rows = sum(counts[state.next_vnode : end]) - state.rows_in_vnode
            state = state.advanced(end, len(counts), rows)
        else:
            rows = wanted
            state = state.advanced_within(("key",), rows)
        assert rows <= wanted
        read += rows
    assert read == sum(counts) == state.row_count


@given(
    epochs=st.lists(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=8), max_size=3),
    wanted=st.integers(1, 20),
)
def test_groups_follow_each_other_to_the_latest_epoch_and_take_every_change_once(
    epochs: list[list[tuple[int, int]]], wanted: int
) -> None:
    after, rows, latest = 0, 0, 40
    while (group := next_group(epochs, after, latest, wanted)) is not None:
        assert group.after == after < group.upto
        inside = {e: sum(n for u in epochs for m, n in u if m == e) for u in epochs for e, _ in u}
        taken = [n for e, n in inside.items() if after < e <= group.upto and n]
        assert sum(taken) == group.rows
        assert group.rows <= wanted or len(taken) == 1
        after, rows = group.upto, rows + group.rows
    assert (after, rows) == (latest, sum(n for u in epochs for _, n in u))
