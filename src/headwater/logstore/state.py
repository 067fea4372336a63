"""What a log store remembers over a restart; a JSON object that the engine puts into its checkpoint (I1).

    {"version": 2, "truncated_to": [epoch, chunk id or null], "per_vnode": {"7": [epoch, …], …} or null,
     "delivered_to": epoch or null}
    version 1 (read and migrated): {"epoch": e, "seq": chunk id or null}

`truncated_to` is what the target has for certain, whether or not those epochs held changes; nothing at or before it
is read again. `per_vnode` says more where vnodes have come unequally far: of a batch that several writers publish,
each for some vnodes, a part may be in the target when a writer fails. `truncated_to` is then the least of them.
`delivered_to` is the last epoch that was committed in the target: the target must never say less, nor of a vnode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headwater.logstore.offset import TruncateOffset


@dataclass(frozen=True, slots=True)
class LogStoreState:
    """Immutable; the methods give the next state or raise ValueError."""

    truncated_to: TruncateOffset
    delivered_to: int | None = None
    per_vnode: tuple[tuple[int, TruncateOffset], ...] | None = None

    @classmethod
    def starting_at(cls, epoch: int) -> LogStoreState:
        """A new log that owes everything after `epoch` (0: everything)."""
        return cls(TruncateOffset.barrier(epoch))

    def offset_of(self, vnode: int) -> TruncateOffset:
        return dict(self.per_vnode or ()).get(vnode, self.truncated_to)

    def truncated(self, offset: TruncateOffset, *, vnodes: frozenset[int] | None = None) -> LogStoreState:
        """Forget up to `offset`, for all vnodes (aligned) or for some (then the others stay where they are)."""
        if vnodes is None:
            if offset < self.truncated_to:
                raise ValueError(f"cannot truncate back from {self.truncated_to} to {offset}")
            rest = tuple((v, o) for v, o in self.per_vnode or () if o > offset)
            return replace(self, truncated_to=offset, per_vnode=rest or None)
        if any(offset < self.offset_of(v) for v in vnodes):
            raise ValueError(f"cannot truncate back to {offset}")
        merged = {**dict(self.per_vnode or ()), **dict.fromkeys(vnodes, offset)}
        return replace(self, per_vnode=_table(merged, self.truncated_to))

    def aligned(self) -> LogStoreState:
        """Without what is known of single vnodes."""
        return replace(self, per_vnode=None)

    def reached(self, epoch: int) -> frozenset[int]:
        """The vnodes that are known to have come at least so far while others have not."""
        return frozenset(v for v, offset in self.per_vnode or () if offset >= TruncateOffset.barrier(epoch))

    def delivered(self, epoch: int) -> LogStoreState:
        """The target has committed `epoch`."""
        if self.delivered_to is not None and epoch < self.delivered_to:
            raise ValueError(f"the target cannot go back from {self.delivered_to} to {epoch}")
        return replace(self, delivered_to=epoch)

    def rewound(self, epoch: int) -> LogStoreState:
        """The user's rewind: everything after `epoch` is owed again, whatever was delivered."""
        to = TruncateOffset.barrier(epoch)
        if to > self.truncated_to:
            raise ValueError(f"cannot rewind forwards from {self.truncated_to.epoch} to {epoch}")
        delivered = None if self.delivered_to is None else min(self.delivered_to, epoch)
        return LogStoreState(to, delivered)

    def as_dict(self) -> dict[str, Any]:
        vnodes = None if self.per_vnode is None else {str(v): o.as_json() for v, o in self.per_vnode}
        return {
            "version": 2,
            "truncated_to": self.truncated_to.as_json(),
            "per_vnode": vnodes,
            "delivered_to": self.delivered_to,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LogStoreState:
        if "version" not in data:
            return cls(TruncateOffset(data["epoch"], data["seq"]))
        if data["version"] != 2:
            raise ValueError(f"log-store state of version {data['version']} is from a newer release")
        table = data["per_vnode"]
        vnodes = None if table is None else {int(v): TruncateOffset.from_json(o) for v, o in table.items()}
        least = TruncateOffset.from_json(data["truncated_to"])
        return cls(least, data["delivered_to"], None if vnodes is None else _table(vnodes, least))


def _table(
    offsets: Mapping[int, TruncateOffset], least: TruncateOffset
) -> tuple[tuple[int, TruncateOffset], ...] | None:
    return tuple(sorted((v, o) for v, o in offsets.items() if o > least)) or None
