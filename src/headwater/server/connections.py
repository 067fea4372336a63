"""Connections of the HTTP endpoint: how many, how long they may take, and who goes when there are too many.

Whoever can reach the port can open connections, without a token, and each is a descriptor of the engine's process,
where the spool, the meta store and Spark's gateway need theirs. So:

- there are at most `connection_limit()` of them, a part of what the process may open;
- above that the one goes that has waited longest without a request under way: half a header takes nobody's place, and
  a client that sends its request at once is answered however many others do not;
- a header must be there within `HEADER_S`, a body must go on within `BODY_S`, and what follows an answer is read for at
  most `DRAIN_S` (a client that is still sending must get the chance to see why it was refused);
- a chunked body is not read: its framing costs more than its content, before anybody has looked at the token.
"""

from __future__ import annotations

import asyncio
import resource
import time
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_S: Final = 10.0
BODY_S: Final = 10.0
DRAIN_S: Final = 10.0
SWEEP_S: Final = 1.0
# One in eight of the descriptors; as many as there can be statements under way, and as many again, are always enough.
SHARE: Final = 8
MAX_CONNECTIONS: Final = 256
MIN_CONNECTIONS: Final = 32
# Accepted in one go, before any of them can be sent away: their descriptors come on top.
BACKLOG: Final = 64


def connection_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else soft // SHARE
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, allowed))


class _Requests(h11.Connection):
    """Says of a chunked body that it is not read; the request itself is answered."""

    _chunked = False

    def next_event(self) -> Any:
        if self._chunked:
            return h11.PAUSED
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunked = any(name == b"transfer-encoding" for name, _ in event.headers)
        return event

    @property
    def is_chunked(self) -> bool:
        return self._chunked


class Connection(H11Protocol):
    """uvicorn's connection with the limits of this module. A `Sweeper` asks it to look at the clock."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = _Requests(h11.SERVER, self.conn._max_incomplete_event_size)
        self._since = self._moved = time.monotonic()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self._moved = time.monotonic()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        self._moved = time.monotonic()
        if not self._is_chunked():  # else it was answered; what still comes is thrown away
            super().data_received(data)

    def on_response_complete(self) -> None:
        self._since = time.monotonic()
        super().on_response_complete()
        if self._is_chunked() and not self.transport.is_closing():
            self.transport.write_eof()

    @property
    def is_busy(self) -> bool:
        """A request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def _make_room(self) -> None:
        others = [c for c in self.connections if isinstance(c, Connection) and not c.transport.is_closing()]
        if len(others) <= connection_limit():
            return
        waiting = [c for c in others if not c.is_busy]
        min(waiting or [self], key=lambda c: c._since).transport.abort()

    def look_at_the_clock(self, now: float) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if self.is_busy:
            waits = self.cycle.more_body and not self.flow.read_paused and not self._is_chunked()
            late = waits and now - self._moved > BODY_S
        elif self.conn.their_state is h11.SEND_BODY:  # answered before its body was there
            late = now - self._since > DRAIN_S
        else:
            late = now - self._since > HEADER_S
        if late:
            self.transport.abort()

    def _is_chunked(self) -> bool:
        return isinstance(self.conn, _Requests) and self.conn.is_chunked


async def sweep(connections: set[Any]) -> None:
    """Ends the connections that are late, for as long as it runs."""
    while True:
        await asyncio.sleep(SWEEP_S)
        now = time.monotonic()
        for connection in list(connections):
            if isinstance(connection, Connection):
                connection.look_at_the_clock(now)
