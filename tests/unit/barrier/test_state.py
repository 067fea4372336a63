"""Every pair of state and event: allowed by the table, or refused with nothing changed."""

from __future__ import annotations

import copy
from enum import StrEnum
from itertools import product
from typing import Any

import pytest

from headwater.barrier.state import (
    EPOCH_TRANSITIONS,
    LANE_TRANSITIONS,
    EpochEvent,
    EpochState,
    IllegalTransition,
    LaneEvent,
    LaneState,
    step,
)

TABLES: list[tuple[dict[Any, dict[Any, Any]], type[StrEnum], type[StrEnum]]] = [
    (EPOCH_TRANSITIONS, EpochState, EpochEvent),
    (LANE_TRANSITIONS, LaneState, LaneEvent),
]
PAIRS = [(table, state, event) for table, states, events in TABLES for state, event in product(states, events)]
LEGAL = {
    (EpochState.ISSUED, EpochEvent.LAST_ACTOR_COLLECTED): EpochState.COLLECTED,
    (EpochState.COLLECTED, EpochEvent.COMMIT_LANDED): EpochState.COMMITTED,
    (LaneState.STARTING, LaneEvent.BUILT): LaneState.RUNNING,
    (LaneState.STARTING, LaneEvent.ACTOR_FAILED): LaneState.SUSPENDED,
    (LaneState.RUNNING, LaneEvent.ACTOR_FAILED): LaneState.SUSPENDED,
    (LaneState.SUSPENDED, LaneEvent.CAUSE_KNOWN): LaneState.RECOVERING,
    (LaneState.RECOVERING, LaneEvent.BACKED_OFF): LaneState.STARTING,
    (LaneState.STARTING, LaneEvent.STOP): LaneState.STOPPED,
    (LaneState.RUNNING, LaneEvent.STOP): LaneState.STOPPED,
    (LaneState.SUSPENDED, LaneEvent.STOP): LaneState.STOPPED,
    (LaneState.RECOVERING, LaneEvent.STOP): LaneState.STOPPED,
}


@pytest.mark.parametrize(("table", "state", "event"), PAIRS, ids=lambda v: str(v) if isinstance(v, StrEnum) else "")
def test_an_event_leads_where_the_table_says_or_raises_and_changes_nothing(table: Any, state: Any, event: Any) -> None:
    before = copy.deepcopy(table)
    if (state, event) in LEGAL:
        assert step(table, state, event) is LEGAL[state, event]
    else:
        with pytest.raises(IllegalTransition):
            step(table, state, event)
    assert table == before


def test_every_state_is_in_its_table() -> None:
    for table, states, _ in TABLES:
        assert set(table) == set(states)
