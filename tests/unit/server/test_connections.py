"""Slow, silent and many clients; clients that leave; large answers and bodies: the others are answered meanwhile.

With a stub for the engine, over real sockets. Times are those of the event loop: how long it stood, not how much it
did.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fake_backend import FakeBackend
from headwater.model.trust import Trust
from headwater.server import connections, http
from headwater.server.body import MAX_BODY_BYTES
from headwater.server.http import RunningServer, ServerThread, SqlResult, make_app, serving

TOKEN = "right-token"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
HALF = b"POST /sql HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
Check = Callable[[httpx.AsyncClient, RunningServer, FakeBackend], Awaitable[None]]


def _run(check: Check, backend: FakeBackend | None = None) -> None:
    async def body() -> None:
        used = backend or FakeBackend()
        async with serving(make_app(used, TOKEN)) as server, _client(server.url) as client:
            await check(client, server, used)

    asyncio.run(body())


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers=BEARER, trust_env=False, timeout=30)


async def _half_open(server: RunningServer, count: int) -> list[asyncio.StreamWriter]:
    async def one() -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HALF)
        return writer

    return [writer for _ in range(0, count, 50) for writer in await asyncio.gather(*(one() for _ in range(50)))]


async def _ended(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 10)
    return b""


@contextlib.asynccontextmanager
async def _longest_stall() -> AsyncIterator[list[float]]:
    """The longest time for which this event loop did not come round, in the list when the block ends."""
    found = [0.0]

    async def watch() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            found[0] = max(found[0], now - last)
            last = now

    task = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    try:
        yield found
    finally:
        task.cancel()


# -- slow and many ----------------------------------------------------------------------------------------------------


def test_half_a_header_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_S", 0.3)
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)

    async def check(client: httpx.AsyncClient, server: RunningServer, backend: FakeBackend) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        trickle = asyncio.create_task(_trickle(writer, HALF + b"x" * 1000))
        begin = time.monotonic()
        assert await _ended(reader) == b""
        assert time.monotonic() - begin < 2
        trickle.cancel()

    _run(check)


async def _trickle(writer: asyncio.StreamWriter, text: bytes) -> None:
    for byte in text:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("authorized", [True, False])
def test_body_that_does_not_come_is_not_waited_for(authorized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BODY_S", "DRAIN_S"):
        monkeypatch.setattr(connections, name, 0.3)
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)

    async def check(client: httpx.AsyncClient, server: RunningServer, backend: FakeBackend) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        token = f"Authorization: Bearer {TOKEN}\r\n" if authorized else ""
        writer.write(f"POST /sql HTTP/1.1\r\nHost: 127.0.0.1\r\n{token}Content-Length: 100\r\n\r\n{{".encode())
        begin = time.monotonic()
        answer = await _ended(reader)
        assert time.monotonic() - begin < 2
        assert (b"TOKEN_REFUSED" in answer) is not authorized
        assert not backend.statements

    _run(check)


def test_chunked_body_is_refused_before_it_is_read() -> None:
    async def check(client: httpx.AsyncClient, server: RunningServer, backend: FakeBackend) -> None:
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(1000):
                yield b" "

        answer = await client.post("/sql", content=parts())
        assert (answer.status_code, answer.json()["error"]["code"]) == (411, "LENGTH_REQUIRED")

    _run(check)


def test_more_connections_than_there_is_room_for_push_out_those_that_ask_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "connection_limit", lambda: 40)

    async def check(client: httpx.AsyncClient, server: RunningServer, backend: FakeBackend) -> None:
        asking = asyncio.create_task(client.post("/sql", json={"statement": "FOREVER"}))
        while not backend.statements:
            await asyncio.sleep(0.01)
        others = await _half_open(server, 300)
        async with _client(server.url) as owner:
            for _ in range(20):
                assert (await owner.get("/healthz")).status_code == 200
                assert (await owner.post("/sql", json={"statement": "SELECT 1"})).status_code == 200
        assert len(server._server.server_state.connections) <= 41
        assert not asking.done()
        for writer in others:
            writer.close()
        asking.cancel()

    _run(check)


SERVER = """
import asyncio, sys
sys.path[:0] = [{tests!r}]
from fake_backend import FakeBackend
from headwater.limits import raise_open_files
from headwater.server.http import ServerThread, make_app

async def main():
    raise_open_files()
    backend, loop = FakeBackend(), asyncio.get_running_loop()
    server = ServerThread(lambda: make_app(backend, {token!r}, loop=loop), "127.0.0.1", 0)
    print((await server.start()).port, flush=True)
    for _ in range(300):  # what else the process does needs descriptors all the time
        files = [open("/dev/null") for _ in range(400)]
        await asyncio.sleep(0.02)
        [f.close() for f in files]
        if sys.stdin in (await asyncio.to_thread(__import__("select").select, [sys.stdin], [], [], 0))[0]:
            break
    print("well", flush=True)

asyncio.run(main())
"""


def test_a_thousand_half_open_connections_leave_descriptors_and_answers_to_others_with_a_hard_limit_of_1024() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    code = SERVER.format(tests=str(Path(__file__).parents[2]), token=TOKEN)
    limit = ["prlimit", "--nofile=256:1024", sys.executable, "-c", code]
    process = subprocess.Popen(limit, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin and process.stdout
        port = int(process.stdout.readline())
        asyncio.run(_besiege(port))
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "well\n"
    finally:
        process.kill()
        process.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _besiege(port: int) -> None:
    async with _client(f"http://127.0.0.1:{port}") as client:

        async def siege() -> list[asyncio.StreamWriter]:
            writers = []
            for _ in range(1100):
                with contextlib.suppress(OSError):
                    writers.append((await asyncio.open_connection("127.0.0.1", port))[1])
                    writers[-1].write(HALF)
            return writers

        besieging = asyncio.create_task(siege())
        asked = 0
        while not besieging.done() or asked < 20:
            async with _client(f"http://127.0.0.1:{port}") as fresh:
                for one in (client, fresh):
                    begin = time.monotonic()
                    assert (await one.get("/healthz")).status_code == 200
                    assert (await one.post("/sql", json={"statement": "SELECT 1"})).status_code == 200
                    assert time.monotonic() - begin < 2
            asked += 1
        for writer in await besieging:
            writer.close()


# -- leaving ----------------------------------------------------------------------------------------------------------


def test_client_that_leaves_takes_its_statement_with_it() -> None:
    async def check(client: httpx.AsyncClient, server: RunningServer, backend: FakeBackend) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/sql", json={"statement": "FOREVER"}, timeout=0.3)
        async with asyncio.timeout(5):
            while not backend.cancelled:
                await asyncio.sleep(0.01)

    _run(check)


def test_statements_that_would_wait_too_long_are_told_so_and_leave_room_when_they_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(http.MAX_STATEMENTS, Trust.ADMIN, 3)

    async def check(client: httpx.AsyncClient, server: RunningServer, backend: FakeBackend) -> None:
        asking = [asyncio.create_task(client.post("/sql", json={"statement": "FOREVER"})) for _ in range(3)]
        while len(backend.statements) < 3:
            await asyncio.sleep(0.01)
        answer = await client.post("/sql", json={"statement": "SELECT 1"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "TOO_MANY_STATEMENTS")
        assert int(answer.headers["retry-after"]) > 0
        for task in asking:
            task.cancel()
        async with asyncio.timeout(5):
            while len(backend.cancelled) < 3:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert (await client.post("/sql", json={"statement": "SELECT 1"})).status_code == 200

    _run(check)


# -- large ------------------------------------------------------------------------------------------------------------

# Far above what was measured (a few ms), far below what one call for all of it takes (seconds).
STALL_S = 0.25


class Large(FakeBackend):
    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows = rows

    async def sql(self, statement: str, trust: Trust = Trust.ADMIN) -> SqlResult:
        return SqlResult(["id", "text"], self.rows, 1)


def test_large_answer_stops_the_event_loop_for_no_longer_than_a_piece_takes() -> None:
    rows = [{"id": i, "text": "x" * 40} for i in range(300_000)]

    async def check(client: httpx.AsyncClient, server: RunningServer, backend: FakeBackend) -> None:
        received = bytearray()
        asked = client.stream("POST", "/sql", json={"statement": "SELECT 1"})
        async with _longest_stall() as stall, asked as answer:
            async for part in answer.aiter_raw():
                received += part
        assert stall[0] < STALL_S
        assert json.loads(received) == {"columns": ["id", "text"], "rows": rows, "epoch": 1}

    _run(check, Large(rows))


def test_answer_ends_with_its_client() -> None:
    class Endless:
        closed = False

        def pieces(self) -> Any:
            while True:
                yield '{"id":1},' * 10_000

        def close(self) -> None:
            self.closed = True

    rows = Endless()

    async def check(client: httpx.AsyncClient, server: RunningServer, backend: FakeBackend) -> None:
        async with client.stream("POST", "/sql", json={"statement": "SELECT 1"}) as answer:
            async for _ in answer.aiter_raw():
                break
        async with asyncio.timeout(10):
            while not rows.closed:
                await asyncio.sleep(0.01)

    _run(check, Large(rows))


@pytest.mark.parametrize(
    "body",
    [
        b'{"statement": "' + b"\\n" * (MAX_BODY_BYTES // 2 - 100) + b'SELECT 1"}',
        b'{"statement": "SELECT 1", "numbers": [' + b"1," * (MAX_BODY_BYTES // 2 - 100) + b"1]}",
        b'{"statement": "SELECT 1", "number": ' + b"1" * (MAX_BODY_BYTES - 100) + b"}",
        b"[" * (MAX_BODY_BYTES - 100),
        b" " * (3 * MAX_BODY_BYTES),
    ],
    ids=["escapes", "numbers", "digits", "depth", "too large"],
)
def test_large_body_stops_the_event_loop_for_no_longer_than_a_piece_takes(body: bytes) -> None:
    async def check(client: httpx.AsyncClient, server: RunningServer, backend: FakeBackend) -> None:
        async with _longest_stall() as stall:
            with contextlib.suppress(httpx.WriteError):
                assert (await client.post("/sql", content=body)).status_code in (200, 400)
        assert stall[0] < STALL_S

    _run(check)


# -- the engine's loop ------------------------------------------------------------------------------------------------


def test_health_is_answered_although_the_engine_s_loop_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.server.engine_loop.CALL_S", 0.2)

    async def body() -> None:
        backend, loop = FakeBackend(), asyncio.get_running_loop()
        server = ServerThread(lambda: make_app(backend, TOKEN, loop=loop), "127.0.0.1", 0)
        url = (await server.start()).url
        found: list[httpx.Response] = []

        def ask() -> None:
            with httpx.Client(base_url=url, headers=BEARER, trust_env=False) as client:
                found.extend(client.get(path) for path in ("/healthz", "/status"))

        asking = loop.run_in_executor(None, ask)
        time.sleep(1.5)  # noqa: ASYNC251
        await asking
        assert found[0].json() == {"healthy": True}
        assert (found[1].status_code, found[1].json()["error"]["code"]) == (503, "ENGINE_BUSY")
        async with _client(url) as client:
            assert (await client.get("/status")).status_code == 200
            answer = await client.post("/sql", json={"statement": "SELECT 1"})
            assert len(answer.json()["rows"]) == 2
            assert (await client.post("/sql", json={"statement": "nosuch"})).status_code == 400
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/sql", json={"statement": "FOREVER"}, timeout=0.3)
        async with asyncio.timeout(5):
            while not backend.cancelled:
                await asyncio.sleep(0.01)
        await server.stop()

    asyncio.run(body())
