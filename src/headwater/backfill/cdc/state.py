"""The life of a split: one transition table, no I/O. And the older form of a table's state, with its migration.

    schema v2   one row per split: left, right, state, row_count, offset_low, offset_high, generation (`SplitRow`)
    schema v1   one row per table: pk (the cursor: everything before it is handed over), finished, row_count, offset

v1 is only read: `migrated` makes v2 of it, and the table's copy goes on as that of a single cursor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Final, Self

from headwater.capture.splits import Bound, Split
from headwater.errors import TransientError


class ReadPaused(TransientError):
    """A read was given up because of the rate limit: its table is paused for long, or it would take too long for what
    the limit is now. No fault: the split is read again, later or in smaller parts."""

    CODE: ClassVar = "BACKFILL_PAUSED"


class SplitState(StrEnum):
    """Stored in the meta store's `splits`, with the checkpoint that made it so; READING is in memory only.

    PLANNED       its range is fixed, nothing is read
    READING       a Spark task reads it; a restart reads it again
    STAGED        its rows are in a file that nobody sees; `low` and `high` say what the read had seen
    HANDED_OVER   its rows, brought to P(N), are part of the table since epoch N
    """

    PLANNED = "PLANNED"
    READING = "READING"
    STAGED = "STAGED"
    HANDED_OVER = "HANDED_OVER"


class SplitEvent(StrEnum):
    READ_STARTED = "read started"
    READ_FAILED = "read failed"
    READ_FINISHED = "read finished"
    HAND_OVER = "hand over"


TRANSITIONS: Final[dict[SplitState, dict[SplitEvent, SplitState]]] = {
    SplitState.PLANNED: {SplitEvent.READ_STARTED: SplitState.READING},
    SplitState.READING: {
        SplitEvent.READ_FAILED: SplitState.PLANNED,
        SplitEvent.READ_FINISHED: SplitState.STAGED,
    },
    SplitState.STAGED: {SplitEvent.HAND_OVER: SplitState.HANDED_OVER},
    SplitState.HANDED_OVER: {},
}


def step(state: SplitState, event: SplitEvent) -> SplitState:
    """The state after an event; an illegal one raises and changes nothing."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise RuntimeError(f"{event!r} is not possible for a split that is {state!r}") from None


@dataclass(frozen=True, slots=True)
class CursorState:
    """State schema v1. `pk` holds the source's text of each key column; None: nothing is handed over."""

    pk: Bound | None
    finished: bool
    row_count: int
    offset: str

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        pk = stored.get("pk")
        return cls(
            tuple(str(part) for part in pk) if pk is not None else None,
            bool(stored["finished"]),
            int(stored.get("row_count") or 0),
            str(stored.get("offset") or ""),
        )


def migrated(state: CursorState) -> list[tuple[Split, SplitState]]:
    """The same in schema v2: a split up to the cursor that is handed over, and one after it for the cursor to go on."""
    if state.finished:
        return [(Split(1, None, None), SplitState.HANDED_OVER)]
    if state.pk is None:
        return [(Split(1, None, None), SplitState.PLANNED)]
    return [
        (Split(1, None, state.pk), SplitState.HANDED_OVER),
        (Split(2, state.pk, None), SplitState.PLANNED),
    ]
