"""A TCP proxy that goes wrong on demand: the network fault tool for tests of connectors and sinks.

It runs an asyncio loop in a thread of its own, so that blocking clients in the test's thread can go through it. It
knows bytes only; what they mean is the business of the two ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Self, TypeVar

HOST: Final = "127.0.0.1"
CHUNK_BYTES: Final = 1 << 16
CALL_TIMEOUT_S: Final = 10.0
# Closing with a linger time of 0 sends a reset, as a lost peer does, and not an orderly end.
_RESET: Final = struct.pack("ii", 1, 0)

T = TypeVar("T")


class TcpProxy:
    """Forwards a loopback port to a target.

    - `cut()` resets every open connection; new ones are taken.
    - `refuse()` closes the port: nobody can connect until `accept()`; open connections live on.
    - `stall()` holds all bytes back without closing anything (a black hole), until `flow()`.
    - `delay(seconds)` holds each block back for that long, in both directions.
    - `cut_after(count)` resets a connection once it has carried that many bytes from the target; None ends this.
    - `alter(made)` lets `made()` give, for each new connection, what becomes of the blocks from the target.
    """

    def __init__(self, target_port: int, target_host: str = HOST) -> None:
        self.target = (target_host, target_port)
        self.host = HOST
        self.port = 0
        self.connections_made = 0
        self.bytes_from_target = 0
        self._delay_s = 0.0
        self._cut_after: int | None = None
        self._alter: Callable[[], Callable[[bytes], bytes]] = lambda: lambda block: block
        self._loop = asyncio.new_event_loop()
        self._flow = asyncio.Event()
        self._flow.set()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._call(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_TIMEOUT_S)
        self._loop.close()

    def cut(self) -> None:
        self._call(self._cut_all())

    def refuse(self) -> None:
        self._call(self._close_port())

    def accept(self) -> None:
        self._call(self._listen())

    def stall(self) -> None:
        self._loop.call_soon_threadsafe(self._flow.clear)

    def flow(self) -> None:
        self._loop.call_soon_threadsafe(self._flow.set)

    def delay(self, seconds: float) -> None:
        self._delay_s = seconds

    def cut_after(self, count: int | None) -> None:
        self._cut_after = count

    def alter(self, made: Callable[[], Callable[[bytes], bytes]]) -> None:
        self._alter = made

    @property
    def open_connections(self) -> int:
        return len(self._open) // 2

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_TIMEOUT_S)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, HOST, self.port, reuse_address=True)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _close_port(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            await asyncio.sleep(0)

    async def _cut_all(self) -> None:
        for writer in list(self._open):
            _reset(writer)

    async def _shut_down(self) -> None:
        await self._close_port()
        await self._cut_all()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections_made += 1
        try:
            target_reader, target_writer = await asyncio.open_connection(*self.target)
        except OSError:
            _reset(writer)
            return
        pair = {writer, target_writer}
        self._open |= pair
        try:
            await asyncio.gather(
                self._pump(reader, target_writer, counted=False), self._pump(target_reader, writer, counted=True)
            )
        except OSError:
            for side in pair:
                _reset(side)
        finally:
            self._open -= pair
            for side in pair:
                side.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool) -> None:
        carried = 0
        altered = self._alter()
        while block := await reader.read(CHUNK_BYTES):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            await self._flow.wait()
            if counted:  # before the other side can have it, and look
                self.bytes_from_target += len(block)
                block = altered(block)
            writer.write(block)
            await writer.drain()
            if counted:
                carried += len(block)
                if self._cut_after is not None and carried >= self._cut_after:
                    raise ConnectionResetError
        with contextlib.suppress(OSError):
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
