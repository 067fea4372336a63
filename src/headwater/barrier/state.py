"""The state machines of the barrier manager. Everything that decides a transition is in this file; there is no I/O.

An illegal event raises IllegalTransition and changes nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeVar


class EpochState(StrEnum):
    """One epoch in one lane. In memory only; COMMITTED is what the meta store's row of the epoch says.

    ISSUED      the coordinator sent the barrier; some actors have not collected it
    COLLECTED   every actor has; it waits for the epochs before it
    COMMITTED   its checkpoint (or, for a plain barrier, a later one) is durable
    """

    ISSUED = "issued"
    COLLECTED = "collected"
    COMMITTED = "committed"


class EpochEvent(StrEnum):
    LAST_ACTOR_COLLECTED = "last actor collected"
    COMMIT_LANDED = "commit landed"


class LaneState(StrEnum):
    """One lane. In memory only, shown in status.

    STARTING     the coordinator builds actors from committed state
    RUNNING      barriers flow
    SUSPENDED    an actor failed: nothing more is committed, further errors are awaited
    RECOVERING   staged data is dropped, back-off is waited out
    STOPPED      by the user, or for good
    """

    STARTING = "starting"
    RUNNING = "running"
    SUSPENDED = "suspended"
    RECOVERING = "recovering"
    STOPPED = "stopped"


class LaneEvent(StrEnum):
    BUILT = "built"
    ACTOR_FAILED = "actor failed"
    CAUSE_KNOWN = "cause known"
    BACKED_OFF = "backed off"
    STOP = "stop"


class IllegalTransition(RuntimeError):
    """An event that the present state does not allow: a bug, never a user's fault."""


EPOCH_TRANSITIONS: Final[dict[EpochState, dict[EpochEvent, EpochState]]] = {
    EpochState.ISSUED: {EpochEvent.LAST_ACTOR_COLLECTED: EpochState.COLLECTED},
    EpochState.COLLECTED: {EpochEvent.COMMIT_LANDED: EpochState.COMMITTED},
    EpochState.COMMITTED: {},
}

LANE_TRANSITIONS: Final[dict[LaneState, dict[LaneEvent, LaneState]]] = {
    LaneState.STARTING: {
        LaneEvent.BUILT: LaneState.RUNNING,
        LaneEvent.ACTOR_FAILED: LaneState.SUSPENDED,
        LaneEvent.STOP: LaneState.STOPPED,
    },
    LaneState.RUNNING: {LaneEvent.ACTOR_FAILED: LaneState.SUSPENDED, LaneEvent.STOP: LaneState.STOPPED},
    LaneState.SUSPENDED: {LaneEvent.CAUSE_KNOWN: LaneState.RECOVERING, LaneEvent.STOP: LaneState.STOPPED},
    LaneState.RECOVERING: {LaneEvent.BACKED_OFF: LaneState.STARTING, LaneEvent.STOP: LaneState.STOPPED},
    LaneState.STOPPED: {},
}

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


def step(table: dict[S, dict[E, S]], state: S, event: E) -> S:
    """The state after an event."""
    try:
        return table[state][event]
    except KeyError:
        raise IllegalTransition(f"{event!r} is not possible in state {state!r}") from None
