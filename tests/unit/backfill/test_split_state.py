"""The life of a split: every pair of state and event, legal or not."""

from __future__ import annotations

import pytest

from headwater.backfill.cdc.state import TRANSITIONS, SplitEvent, SplitState, step

LEGAL = {
    (SplitState.PLANNED, SplitEvent.READ_STARTED): SplitState.READING,
    (SplitState.READING, SplitEvent.READ_FAILED): SplitState.PLANNED,
    (SplitState.READING, SplitEvent.READ_FINISHED): SplitState.STAGED,
    (SplitState.STAGED, SplitEvent.HAND_OVER): SplitState.HANDED_OVER,
}


@pytest.mark.parametrize("state", list(SplitState))
@pytest.mark.parametrize("event", list(SplitEvent))
def test_a_split_moves_only_along_its_table(state: SplitState, event: SplitEvent) -> None:
    expected = LEGAL.get((state, event))
    if expected is None:
        with pytest.raises(RuntimeError, match="not possible"):
            step(state, event)
    else:
        assert step(state, event) is expected


def test_every_state_has_a_row_in_the_table() -> None:
    assert set(TRANSITIONS) == set(SplitState)


def test_nothing_leads_away_from_handed_over() -> None:
    assert TRANSITIONS[SplitState.HANDED_OVER] == {}
