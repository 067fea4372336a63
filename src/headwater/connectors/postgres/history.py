"""Whether the server's log is still the one that we have read: it sends us the last of it again, and we compare.

A server that was put back to an earlier state (a copy of its files, a snapshot of its disk) and has been written to
since looks like ours: the same system, the same timeline, a log that is longer than what we have, and a transaction
under every number that we know. But its log is another one from some point on. What it holds behind that point and
before our position would be missing without a word, and what we hold from there on would stay for ever.

Its slot was put back too. So the stream begins where the slot stands, and not where we are: whatever the server sends
up to our position must be in the spool, and what the spool has from there on must be sent, with the same place, number
and time. Until that is certain nothing is acknowledged, since the slot would then stand behind the difference.

    slot's confirmed position ── … sent again: compared, and skipped … ──► our position ── written to the spool ──►

The price is small: between the two lies what has come since the last checkpoint, and the server decodes it anyway. The
slot of a server that crashed may stand further back; then only the last `CHECKED_BYTES` are sent again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Self

from headwater.capture.spool import SpoolReader
from headwater.connectors.postgres.client import format_lsn
from headwater.errors import SourceError

ALL_COPIED_AGAIN: Final = (
    "all tables of the source are copied again by themselves"  # what the engine does (`SourceRuntime.heal`)
)
CHECKED_BYTES: Final = 64 << 20  # of the source's log: read by the stream within seconds


class History:
    """What the server has to send again before its stream goes on behind `have`, our position.

    `start`: where the stream has to begin. `known`: number and commit time of the transactions in (start, have], by
    where they end.
    """

    def __init__(self, have: int, start: int, known: dict[int, tuple[int, int]]) -> None:
        self.have = have
        self.start = start
        self._known = known
        self.is_ours = start >= have

    @classmethod
    def of_spool(cls, directory: Path | str, have: int, *, confirmed: int, begin: int) -> Self:
        """`confirmed`: where the slot stands; `begin`: where the spool began."""
        known_end = max(confirmed, begin)  # ends of log records, at which a stream can begin
        floor = max(known_end, have - CHECKED_BYTES)
        index, complete = SpoolReader(directory).newest_transactions(floor, have)
        if complete and (floor == known_end or not len(index)):
            start = floor
        elif len(index):
            start, index = int(index["end_lsn"][0]), index[1:]
        else:
            start = have
        records = zip(index["end_lsn"].tolist(), index["xid"].tolist(), index["commit_us"].tolist(), strict=True)
        return cls(have, start, {end: (xid, commit_us) for end, xid, commit_us in records})

    def sent_again(self, end_lsn: int, xid: int, commit_us: int) -> None:
        """A transaction with rows, whose commit record begins before our position."""
        unknown = end_lsn > self.start and self._known.pop(end_lsn, None) != (xid, commit_us)
        if end_lsn > self.have or unknown:
            raise self._another(end_lsn)

    def reached(self, lsn: int) -> None:
        """All that ended up to this position has been sent."""
        if not self.is_ours and lsn >= self.have:
            if self._known:
                raise self._another(min(self._known))
            self.is_ours = True

    def _another(self, lsn: int) -> SourceError:
        return restored(f"the server's log at {format_lsn(lsn)} is not the one that we have read there")


def restored(message: str) -> SourceError:
    hint = f"it was restored from a backup or failed over with loss; {ALL_COPIED_AGAIN}"
    return SourceError("SOURCE_RESTORED", message, hint=hint)
