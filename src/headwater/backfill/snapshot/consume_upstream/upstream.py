"""What a job that follows a table reads of it, and how many of its epochs make one step.

The contract is on `UpstreamTable`. Implementations: tables and views of this engine (`runtime/upstream.py`), and a
Delta table with change data feed (`connectors/delta/upstream.py`), whose epochs are its versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

Snapshot = TypeVar("Snapshot", covariant=True)
Log = TypeVar("Log", covariant=True)

# Changes that one step takes at most, beyond the first epoch: a lane that is far behind commits now and then.
GROUP_ROWS: Final = 500_000


class UpstreamTable(Protocol[Snapshot, Log]):
    """A table that somebody else writes, read as of an epoch and followed from there on.

    Order. Epochs are numbers that grow. `epochs(after, upto)` lists those that changed the table, in order; what is
    between two of them is the same table. An epoch that was listed once is listed the same again, until it is expired.

    Snapshot. `snapshot(epoch)` is the whole table as of an epoch, each key once. It does not change while the epoch is
    held, however often it is read: a reader that was stopped in the middle of a vnode goes on in the same rows.

    Change log. `change_log(after, upto)` is one net change per key of the epochs in (after, upto]: a key that was
    inserted and deleted within the range is not in it, or is a delete. Applied to the snapshot at `after` it gives the
    snapshot at `upto`. Reading it twice is harmless; it is never cut inside an epoch.

    Vnodes. Both can be restricted to vnodes by their reader, since a key is in one vnode for ever. So a range may be
    consumed vnode by vnode, and a reader that stops in between goes on with the next vnode.

    Holding. As long as a reader is registered (`hold(epoch)`, moved forward by calling it again, never back) the owner
    keeps what is needed to read from that epoch on, where it can. A Delta table cannot be held: it may be vacuumed.

    Errors. A lost connection or a busy file system is a TransientError: the reader tries again. `UPSTREAM_EXPIRED`:
    the log does not reach back to `after` any more, and only a new snapshot helps. `UPSTREAM_DROPPED`: the table is
    gone. `UPSTREAM_UNREADABLE`: it is there but cannot be followed (no change data feed, a changed schema). All three
    are DefiniteErrors whose hint says what to do; none is ever answered by an empty log.
    """

    def latest_epoch(self) -> int:
        """The newest epoch that may be read."""
        ...

    def epochs(self, after: int, upto: int) -> Sequence[tuple[int, int]]:
        """(epoch, changed rows or an estimate) in order."""
        ...

    def snapshot(self, epoch: int) -> Snapshot: ...

    def change_log(self, after: int, upto: int) -> Log: ...

    def hold(self, epoch: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Group:
    """The epochs of one step: (after, upto], and how many changes they hold."""

    after: int
    upto: int
    rows: int


def next_group(
    upstreams: Iterable[Sequence[tuple[int, int]]], after: int, latest: int, rows_wanted: int = GROUP_ROWS
) -> Group | None:
    """The next epochs to consume of several upstreams together; None if there is nothing after `after`.

    All of them are taken to the same epoch, so that the reader is consistent. At least one epoch is taken whole,
    however large; epochs in which nothing changed cost nothing and are taken along.
    """
    if latest <= after:
        return None
    changed: dict[int, int] = {}
    for epochs in upstreams:
        for epoch, rows in epochs:
            if after < epoch <= latest:
                changed[epoch] = changed.get(epoch, 0) + rows
    total, upto = 0, after
    for epoch in sorted(changed):
        if total and total + changed[epoch] > rows_wanted:
            return Group(after, upto, total)
        total, upto = total + changed[epoch], epoch
    return Group(after, latest, total)
