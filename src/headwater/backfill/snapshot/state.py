"""The persisted state of a view's creation, and how far its next step goes. Values and pure functions.

The state of each vnode of the driving input is (vnode, epoch, row_count, is_epoch_finished, next key). Vnodes are read
in order, so what is stored is the first one that is not finished, with the key in it at which reading goes on
(inclusive), and the rows of each vnode; `vnodes()` writes it out. It is part of every checkpoint of the lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

Key = tuple[str | None, ...]  # the key columns' values as text, in the order of the key


class Phase(StrEnum):
    """Stored with every chunk and every consumed epoch of the change log.

    SNAPSHOT   reading the inputs as of the snapshot epoch
    LOG        consuming the change log from there on; ends by joining the main lane
    """

    SNAPSHOT = "snapshot"
    LOG = "log"


@dataclass(frozen=True, slots=True)
class VnodeState:
    """How far one vnode of the driving input is: `epoch` is what its rows in the view are as of, once finished."""

    vnode: int
    epoch: int
    row_count: int
    is_epoch_finished: bool
    next_key: Key | None


@dataclass(frozen=True, slots=True)
class CreatingState:
    """`consumed` is the epoch the view is at.

    snapshot   next_vnode: the first vnode that is not read to its end; next_key: where in it reading goes on
               vnode_rows: rows of the driving input per vnode (an upper bound where a key has several changes)
    log        group_epoch: the end of the group of epochs that is being consumed vnode by vnode, 0 if none is;
               group_vnode: the first vnode that has not consumed it
    """

    phase: Phase
    snapshot_epoch: int
    next_vnode: int
    row_count: int
    consumed: int
    next_key: Key | None = None
    rows_in_vnode: int = 0
    vnode_rows: tuple[int, ...] = field(default=())
    group_epoch: int = 0
    group_vnode: int = 0

    @classmethod
    def starting(cls, snapshot_epoch: int) -> CreatingState:
        return cls(Phase.SNAPSHOT, snapshot_epoch, 0, 0, snapshot_epoch)

    def counted(self, vnode_rows: Sequence[int]) -> CreatingState:
        return replace(self, vnode_rows=tuple(vnode_rows))

    def advanced(self, next_vnode: int, vnode_count: int, rows: int) -> CreatingState:
        """Everything before a vnode was read."""
        if not self.next_vnode < next_vnode <= vnode_count:
            raise ValueError(f"vnode {next_vnode} does not follow {self.next_vnode}")
        phase = Phase.LOG if next_vnode == vnode_count else Phase.SNAPSHOT
        return replace(
            self,
            phase=phase,
            next_vnode=next_vnode,
            row_count=self.row_count + rows,
            next_key=None,
            rows_in_vnode=0,
        )

    def advanced_within(self, next_key: Key, rows: int) -> CreatingState:
        """A part of a vnode was read; what is left of it begins with `next_key`."""
        if self.phase is not Phase.SNAPSHOT:
            raise ValueError("the snapshot has been read")
        return replace(
            self, next_key=next_key, rows_in_vnode=self.rows_in_vnode + rows, row_count=self.row_count + rows
        )

    def consumed_to(self, epoch: int) -> CreatingState:
        if epoch < self.consumed:
            raise ValueError(f"epoch {epoch} was consumed already")
        return replace(self, consumed=epoch, group_epoch=0, group_vnode=0)

    def consumed_within(self, epoch: int, next_vnode: int, vnode_count: int) -> CreatingState:
        """The vnodes before `next_vnode` have consumed the change log up to `epoch`."""
        if self.group_epoch not in (0, epoch) or next_vnode <= self.group_vnode:
            raise ValueError(f"vnode {next_vnode} of epoch {epoch} does not follow")
        if next_vnode >= vnode_count:
            return self.consumed_to(epoch)
        return replace(self, group_epoch=epoch, group_vnode=next_vnode)

    def vnodes(self, vnode_count: int) -> list[VnodeState]:
        """The state of every vnode."""
        found = []
        for vnode in range(vnode_count):
            rows = self.vnode_rows[vnode] if vnode < len(self.vnode_rows) else 0
            if self.phase is Phase.SNAPSHOT and vnode >= self.next_vnode:
                here = vnode == self.next_vnode
                key, done = (self.next_key, self.rows_in_vnode) if here else (None, 0)
                found.append(VnodeState(vnode, self.snapshot_epoch, done, False, key))
            else:
                ahead = self.phase is Phase.LOG and vnode < self.group_vnode
                found.append(VnodeState(vnode, self.group_epoch if ahead else self.consumed, rows, True, None))
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "phase": str(self.phase),
            "snapshot_epoch": self.snapshot_epoch,
            "next_vnode": self.next_vnode,
            "row_count": self.row_count,
            "consumed": self.consumed,
            "next_key": None if self.next_key is None else list(self.next_key),
            "rows_in_vnode": self.rows_in_vnode,
            "vnode_rows": list(self.vnode_rows),
            "group_epoch": self.group_epoch,
            "group_vnode": self.group_vnode,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CreatingState:
        key = data.get("next_key")
        return cls(
            Phase(data["phase"]),
            int(data["snapshot_epoch"]),
            int(data["next_vnode"]),
            int(data["row_count"]),
            int(data["consumed"]),
            None if key is None else tuple(key),
            int(data.get("rows_in_vnode", 0)),
            tuple(int(n) for n in data.get("vnode_rows", ())),
            int(data.get("group_epoch", 0)),
            int(data.get("group_vnode", 0)),
        )


def next_chunk(state: CreatingState, vnode_count: int, rows_wanted: int) -> int:
    """The end of a chunk of at most about `rows_wanted` rows; the vnode itself if a part of it is as much as that."""
    rows, vnode = 0, state.next_vnode
    while vnode < vnode_count:
        mine = state.vnode_rows[vnode] if vnode < len(state.vnode_rows) else 0
        mine -= state.rows_in_vnode if vnode == state.next_vnode else 0
        if rows + mine > rows_wanted:
            break
        rows += mine
        vnode += 1
    return vnode
