"""Barriers and the mutations they carry. A barrier closes `epoch.prev` and opens `epoch.curr`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headwater.model.epoch import EpochPair


class BarrierKind(StrEnum):
    """INITIAL: first after start or recovery, nothing to seal. BARRIER: stage only. CHECKPOINT: stage and commit."""

    INITIAL = "initial"
    BARRIER = "barrier"
    CHECKPOINT = "checkpoint"


class MutationKind(StrEnum):
    """What a barrier may change; in force after that barrier."""

    ADD = "add"
    DROP = "drop"
    PAUSE = "pause"
    RESUME = "resume"
    THROTTLE = "throttle"
    RESCALE = "rescale"


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of the job graph. `job_id` is 0 for PAUSE and RESUME, which concern everything."""

    kind: MutationKind
    job_id: int = 0
    argument: Any = None


@dataclass(frozen=True, slots=True)
class Barrier:
    """The message itself; `paused` is the state of the lane after this barrier."""

    epoch: EpochPair
    kind: BarrierKind
    mutations: tuple[Mutation, ...] = ()
    paused: bool = False

    @property
    def at_rest(self) -> bool:
        """Nothing is taken from the sources in this epoch: a PAUSE is in force, or its RESUME is only on its way.

        So neither waits for anything but a checkpoint: what has gathered during a pause is for the epochs after it.
        """
        return self.paused or any(m.kind is MutationKind.RESUME for m in self.mutations)

    @property
    def is_checkpoint(self) -> bool:
        return self.kind is BarrierKind.CHECKPOINT
