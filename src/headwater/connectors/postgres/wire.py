"""The bytes of a connection, read and written past libpq while libpq is idle: plain, or through its own TLS session.

libpq hands rows out one by one, each in memory of its own. Its socket, and OpenSSL's session on it (`PQgetssl`), are
part of its interface; whoever uses them must leave the protocol as libpq expects to find it. Not `reachable` are
connections with GSS encryption, and those of a libpq whose libraries cannot be found.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import select
import socket
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import psycopg

_SEND_AGAIN_MS: Final = 1000
_WANT_READ: Final = 2  # of SSL_get_error
_WANT_WRITE: Final = 3


class PlainWire:
    """The socket itself, by a second descriptor: libpq keeps its own."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._socket = socket.socket(fileno=os.dup(conn.pgconn.socket))
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def send(self, data: bytes) -> None:
        message = memoryview(data)
        while message:
            try:
                message = message[self._socket.send(message) :]
            except BlockingIOError:
                select.select([], [self._socket], [], _SEND_AGAIN_MS / 1000)

    def receive(self, room: memoryview, wait_ms: int, patience_s: float) -> int:
        """How many bytes have come, 0 at the connection's end. It looks again after so long, however few they are.

        TimeoutError when none has come for `patience_s`.
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self._socket.recv_into(room)
            except BlockingIOError:
                _check(deadline)
                self._poll.poll(wait_ms)

    def give_up(self) -> None:
        """End the connection, for libpq too: it must not wait for, or read, what comes by it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def wake_for(self, size: int) -> None:
        """Be woken when that many bytes have come; 1 is usual."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def close(self) -> None:
        # An option of the socket, not of our descriptor: libpq would wait for ever for a short answer.
        self.wake_for(1)
        self._socket.close()


class TlsWire(PlainWire):
    """OpenSSL's session of the connection; of the socket only that something has come is asked.

    The server encrypts each of its 8 KiB by itself, and OpenSSL gives no more than one such piece at a time.
    """

    def __init__(self, conn: psycopg.Connection[Any], library: ctypes.CDLL, session: int) -> None:
        super().__init__(conn)
        self._library, self._session = library, session

    def send(self, data: bytes) -> None:
        self._library.ERR_clear_error()
        while (sent := self._library.SSL_write(self._session, data, len(data))) <= 0:  # all of it, or nothing
            if not self._may_go_on(sent, _SEND_AGAIN_MS):
                raise ConnectionError("the connection was lost")

    def receive(self, room: memoryview, wait_ms: int, patience_s: float) -> int:
        deadline = time.monotonic() + patience_s
        self._library.ERR_clear_error()  # else an old one would be taken for that of this call
        read, session = self._library.SSL_read, self._session
        first = at = ctypes.addressof(ctypes.c_char.from_buffer(room))
        end = first + len(room)
        while at < end:
            got = read(session, at, end - at)
            if got > 0:
                at += got
            elif at > first:
                break  # whatever it is, the next call meets it
            elif not self._may_go_on(got, wait_ms):
                return 0
            else:
                _check(deadline)
        return at - first

    def _may_go_on(self, result: int, wait_ms: int) -> bool:
        """Wait for what the session wants; False if it has ended."""
        wanted = self._library.SSL_get_error(self._session, result)
        if wanted == _WANT_READ:
            self._poll.poll(wait_ms)
        elif wanted == _WANT_WRITE:
            select.select([], [self._socket], [], wait_ms / 1000)
        return wanted in (_WANT_READ, _WANT_WRITE)


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError


def reachable(conn: psycopg.Connection[Any]) -> bool:
    """Whether the connection's bytes can be had at all. Where libpq cannot say how they go, they cannot."""
    import psycopg

    try:
        return not conn.pgconn.used_gssapi and (not conn.pgconn.ssl_in_use or bool(_session(conn)))
    except (psycopg.NotSupportedError, AttributeError):
        return False


def open_wire(conn: psycopg.Connection[Any]) -> PlainWire:
    if not conn.pgconn.ssl_in_use:
        return PlainWire(conn)
    library, session = _libpq(), _session(conn)
    if library is None or session is None:  # nothing is ever written in clear where the user expects encryption
        raise ValueError("the TLS session of this connection is not reachable")
    return TlsWire(conn, library, session)


def _session(conn: psycopg.Connection[Any]) -> int | None:
    library = _libpq()
    libpq: Any = conn.pgconn  # its type does not tell of the pointer
    return library.PQgetssl(libpq.pgconn_ptr) if library else None


@functools.cache
def _libpq() -> ctypes.CDLL | None:
    """The libpq that psycopg uses, and what it is linked with: another copy of OpenSSL may be in the process."""
    from psycopg import pq

    module = importlib.import_module(pq.PGconn.__module__)
    try:
        library = ctypes.CDLL(str(module.__file__))
        library.PQgetssl.argtypes, library.PQgetssl.restype = (ctypes.c_void_p,), ctypes.c_void_p
        for function in (library.SSL_read, library.SSL_write):
            function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int), ctypes.c_int
        library.SSL_get_error.argtypes, library.SSL_get_error.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_int
        library.ERR_clear_error.argtypes, library.ERR_clear_error.restype = (), None
    except (OSError, AttributeError):
        return None
    return library
