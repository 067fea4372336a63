"""Delivery of one batch as a state machine, and the loop that runs it: what happens after each kind of failure.

    IDLE ─prepare─► PREPARED ─write─► WRITTEN ─commit─► COMMITTING ─done─► DURABLE ─note─► IDLE
      ▲                │                 │                  │  │
      │◄─────abort─────┴─────────────────┴────refused───────┘  └─unknown─► UNCERTAIN ─found──► DURABLE
      │◄───────────────────────────────absent─────────────────────────────────┘

Only a determinate failure may clean up (`abort`); after an indeterminate one the target is asked (`last_committed`),
and nothing else happens before it has answered. The log store is told of DURABLE only, so it never truncates what the
target lacks (I5). The engine owns the waiting between attempts (`logstore.backoff`) and persists the log store's
state with its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from headwater.errors import DefiniteError, HeadwaterError, IndeterminateError, TransientError
from headwater.sink.sink import Sink, Token


class DeliveryState(StrEnum):
    """Set by `DeliveryLoop` alone and never stored: after a restart the target's progress says where we are."""

    IDLE = "idle"  # no batch under way
    PREPARED = "prepared"  # staging exists, nothing complete in it
    WRITTEN = "written"  # the batch is staged completely
    COMMITTING = "committing"  # the target may publish it at any moment
    UNCERTAIN = "uncertain"  # the commit's outcome is not known
    DURABLE = "durable"  # the target has it; the log store may truncate


class DeliveryEvent(StrEnum):
    PREPARE = "prepare"
    WRITE = "write"
    COMMIT = "commit"
    DONE = "done"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    FOUND = "found"
    ABSENT = "absent"
    ABORT = "abort"
    NOTE = "note"


_S, _E = DeliveryState, DeliveryEvent
TRANSITIONS: Final[dict[tuple[DeliveryState, DeliveryEvent], DeliveryState]] = {
    (_S.IDLE, _E.PREPARE): _S.PREPARED,
    (_S.PREPARED, _E.WRITE): _S.WRITTEN,
    (_S.PREPARED, _E.ABORT): _S.IDLE,
    (_S.WRITTEN, _E.COMMIT): _S.COMMITTING,
    (_S.WRITTEN, _E.ABORT): _S.IDLE,
    (_S.COMMITTING, _E.DONE): _S.DURABLE,
    (_S.COMMITTING, _E.REFUSED): _S.IDLE,
    (_S.COMMITTING, _E.UNKNOWN): _S.UNCERTAIN,
    (_S.UNCERTAIN, _E.FOUND): _S.DURABLE,
    (_S.UNCERTAIN, _E.ABSENT): _S.IDLE,
    (_S.DURABLE, _E.NOTE): _S.IDLE,
}


def advance(state: DeliveryState, event: DeliveryEvent) -> DeliveryState:
    """The next state; an illegal event raises and changes nothing."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise RuntimeError(f"delivery: {event} is not possible when {state}") from None


@dataclass(frozen=True, slots=True)
class Delivered:
    """What the target now holds: everything up to `to_epoch`. `rows` is 0 where it had the batch already."""

    to_epoch: int
    rows: int
    bytes: int
    refused: int
    dead_letters: tuple[tuple[str, int], ...] = ()  # files of refused rows, and how many each holds
    already: bool = False


class DeliveryLoop:
    """Delivers batches of one sink, one at a time.

    `start` first: it claims the sink and gives the epoch from which to deliver. Then `deliver` per batch. A failed
    `deliver` leaves the loop IDLE or UNCERTAIN; calling it again (after the engine's back-off) is always right.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        rate_limit: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.sink = sink
        self.state = DeliveryState.IDLE
        self.pace = Pace(rate_limit, clock=clock, sleep=sleep)
        self._uncertain: Token | None = None

    def start(self, delivered_to: int | None) -> int | None:
        """Claim the sink and ask the target where it is; `delivered_to` is what our last checkpoint knows.

        The target may be ahead of the checkpoint (a crash before it was noted): delivery goes on from the target's
        epoch. It must not be behind: then someone set it back, and only a person can say from where to deliver again.
        A sink that remembers nothing (`durable = False`: print, blackhole) goes on from the checkpoint.
        """
        self.sink.claim()
        found = self.sink.last_committed()
        if self.sink.durable and delivered_to is not None and (found is None or found < delivered_to):
            raise went_back(self.sink.name, f"delivered up to epoch {delivered_to}", found)
        return found

    def unfinished(self) -> tuple[int, int] | None:
        """A range that the sink has begun to publish and that must come next, exactly as it was.

        Only a sink whose commit is several steps of its target has such a thing (a Kafka batch of several producers).
        """
        return self.sink.unfinished()

    def landed(self, vnode_count: int) -> frozenset[int]:
        """The vnodes whose part of the unfinished range is in the target for certain; the others must come."""
        return self.sink.landed(vnode_count)

    def deliver(
        self,
        from_epoch: int,
        to_epoch: int,
        batch: Callable[[], Any],
        before_commit: Callable[[Token], None] | None = None,
    ) -> Delivered:
        """Deliver the changes of `(from_epoch, to_epoch]`; `batch()` makes the DataFrame, only if it is needed.

        Returns when the target has them durably, whoever delivered them. `before_commit` gets the token that is about
        to be published, for what must be known after a crash in that moment.
        """
        found = self._settle()
        if found is not None and found >= to_epoch:
            return Delivered(to_epoch, 0, 0, 0, already=True)
        if found is not None and found > from_epoch:
            raise overlap(self.sink.name, found)
        token = self.sink.prepare(from_epoch, to_epoch)
        self._to(DeliveryEvent.PREPARE)
        token = self._write(token, batch, before_commit)
        self._commit(token)
        self._to(DeliveryEvent.NOTE)
        self.pace.spent(token.rows)
        letters = tuple((str(path), int(rows)) for path, rows in token.payload.get("dead_letters", ()))
        return Delivered(to_epoch, token.rows, token.bytes, token.refused, letters)

    def _write(self, token: Token, batch: Callable[[], Any], before_commit: Callable[[Token], None] | None) -> Token:
        try:
            self.pace.wait()
            written = self.sink.write(token, batch())
            if before_commit is not None:
                before_commit(written)
        except BaseException:
            self._abort(token)
            raise
        self._to(DeliveryEvent.WRITE)
        return written

    def _commit(self, token: Token) -> None:
        self._to(DeliveryEvent.COMMIT)
        try:
            self.sink.commit(token)
        except IndeterminateError:
            self._to(DeliveryEvent.UNKNOWN)
            self._uncertain = token
            found = self._settle()
            if found is None or found < token.to_epoch:
                raise TransientError(
                    "SINK_COMMIT_LOST", f"a commit of sink {self.sink.name} did not land and is repeated"
                ) from None
            self.state = DeliveryState.DURABLE
            return
        except HeadwaterError:
            self._to(DeliveryEvent.REFUSED)
            self._remove_staging(token)
            raise
        except BaseException:
            # Anything else (a killed thread, a bug in a client) proves nothing about the target.
            self._to(DeliveryEvent.UNKNOWN)
            self._uncertain = token
            raise
        self._to(DeliveryEvent.DONE)

    def _settle(self) -> int | None:
        """Resolve an uncertain commit by asking the target; None where nothing was uncertain and nothing needs
        skipping.
        """
        if self._uncertain is None:
            return None
        token = self._uncertain
        found = self.sink.last_committed()
        landed = found is not None and found >= token.to_epoch
        self._to(DeliveryEvent.FOUND if landed else DeliveryEvent.ABSENT)
        self._uncertain = None
        if landed:
            self._to(DeliveryEvent.NOTE)
        else:
            self._remove_staging(token)
        return found

    def _abort(self, token: Token) -> None:
        self._to(DeliveryEvent.ABORT)
        self._remove_staging(token)

    def _remove_staging(self, token: Token) -> None:
        try:
            self.sink.abort(token)
        except HeadwaterError:
            return  # the next `prepare` removes stale staging; the first error is the one to report

    def _to(self, event: DeliveryEvent) -> None:
        self.state = advance(self.state, event)


def went_back(sink: str, known: str, found: int | None) -> DefiniteError:
    return DefiniteError(
        "SINK_TARGET_WENT_BACK",
        f"the target of sink {sink} has lost what was delivered to it",
        detail=f"{known}, the target says {found}",
        hint="drop the sink and create it again: it then begins with a snapshot"
        if found is None
        else f"headwater rewind {sink} --to-epoch {found}",
    )


def overlap(sink: str, found: int) -> TransientError:
    """The batch must be cut again, from the epoch that the target holds."""
    return TransientError(
        "SINK_OVERLAP", f"the target of sink {sink} holds a part of the batch", detail=f"epoch {found}"
    )


class Pace:
    """Rate limit in rows per second: a batch is never cut, the next one waits until its rows are paid for."""

    def __init__(self, limit: int | None, *, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self.limit = limit
        self._clock, self._sleep = clock, sleep
        self._free_at = 0.0

    def spent(self, rows: int) -> None:
        if self.limit:
            self._free_at = max(self._free_at, self._clock()) + rows / self.limit

    @property
    def owed_s(self) -> float:
        """How long until the rows of earlier batches are paid for. A limit of 0 pauses: the caller does not deliver."""
        return max(0.0, self._free_at - self._clock()) if self.limit else 0.0

    def wait(self) -> None:
        """Sleep that long, for a caller that has nothing else to do meanwhile."""
        if (delay := self.owed_s) > 0:
            self._sleep(delay)

    @property
    def paused(self) -> bool:
        return self.limit == 0
