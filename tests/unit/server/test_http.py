"""The HTTP endpoint, with a backend that needs no engine; the last tests listen on a real socket."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.types import Message, Scope

from fake_backend import FIRST_EPOCH, FakeBackend
from headwater.errors import UsageError
from headwater.model.trust import Trust
from headwater.server.body import MAX_BODY_BYTES
from headwater.server.http import make_app, serve, serving

TOKEN, READ_TOKEN = "right-token", "read-token"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
READER = {"Authorization": f"Bearer {READ_TOKEN}"}
Check = Callable[[httpx.AsyncClient, FakeBackend], Awaitable[None]]


@asynccontextmanager
async def _client(backend: FakeBackend, host: str = "127.0.0.1") -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(backend, TOKEN, read_token=READ_TOKEN, host=host))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8734") as client:
        yield client


def _run(check: Check, host: str = "127.0.0.1") -> None:
    async def body() -> None:
        backend = FakeBackend()
        async with _client(backend, host) as client:
            await check(client, backend)

    asyncio.run(body())


def _code(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "detail", "hint"}
    return str(error["code"])


async def _sql(client: httpx.AsyncClient, statement: str) -> httpx.Response:
    return await client.post("/sql", json={"statement": statement}, headers=BEARER)


# -- who may ask ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/status", "/metrics", "/sql", "/nothing", f"/status?token={TOKEN}"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": f"Basic {TOKEN}"},
        {"Cookie": f"headwater_token_8734={TOKEN}"},
    ],
)
def test_without_the_token_nothing_is_answered(path: str, headers: dict[str, str]) -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        answer = await client.request("POST" if path == "/sql" else "GET", path, headers=headers)
        assert (answer.status_code, _code(answer)) == (401, "TOKEN_REFUSED")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert not backend.statements

    _run(check)


def test_page_is_the_same_for_everybody_and_sets_no_cookie() -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        without = await client.get("/")
        with_token = await client.get("/", headers=BEARER)
        assert without.status_code == 200 and without.text == with_token.text
        assert TOKEN not in without.text and READ_TOKEN not in without.text
        assert "set-cookie" not in without.headers

    _run(check)


def test_health_needs_no_token_and_says_why_it_is_ill() -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        answer = await client.get("/healthz")
        assert (answer.status_code, answer.json()) == (200, {"healthy": True})
        assert (await client.get("/status", headers=BEARER)).json()["health"] == {"healthy": True}
        backend.is_healthy = False
        ill = {"healthy": False, "reason": "no epoch was completed for 47 s"}
        answer = await client.get("/healthz")
        assert (answer.status_code, answer.json()) == (503, ill)
        assert (await client.get("/status", headers=BEARER)).json()["health"] == ill

    _run(check)


def test_read_token_looks_and_asks_and_the_engine_is_told_whose_statement_it_is() -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        for path in ("/status", "/metrics", "/"):
            assert (await client.get(path, headers=READER)).status_code == 200
        for headers in (READER, BEARER):
            answer = await client.post("/sql", json={"statement": "SELECT 1"}, headers=headers)
            assert answer.status_code == 200
        assert backend.trusts == [Trust.READ, Trust.ADMIN]

    _run(check)


@pytest.mark.parametrize(
    "host", ["127.0.0.1/healthz?", "127.0.0.1/?", "127.0.0.1#", "x@127.0.0.1", "127.0.0.1\\healthz"]
)
@pytest.mark.parametrize("path", ["/sql", "/status", "/metrics"])
def test_path_in_the_host_header_opens_no_door(path: str, host: str) -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        method = "POST" if path == "/sql" else "GET"
        answer = await client.request(method, path, json={"statement": "SELECT 1"}, headers={"Host": host})
        assert answer.status_code in (401, 403)
        assert not backend.statements

    _run(check)


def test_guard_goes_by_the_path_that_is_routed_whatever_an_older_library_makes_of_the_host() -> None:
    """Before 1.0.1 Starlette's `request.url.path` was /healthz for this Host."""

    async def body() -> None:
        backend, sent = FakeBackend(), list[Message]()

        async def receive() -> Message:
            return {"type": "http.request", "body": b'{"statement": "SELECT 1"}', "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        scope: Scope = {"type": "http", "method": "POST", "path": "/sql", "raw_path": b"/sql", "query_string": b""}
        scope |= {"headers": [(b"host", b"127.0.0.1")], "scheme": "http", "server": ("127.0.0.1", 1), "root_path": ""}
        scope |= {"path_params": {}, "url": "http://127.0.0.1/healthz"}
        await make_app(backend, TOKEN)(scope, receive, send)
        assert sent[0]["status"] == 401 and not backend.statements

    asyncio.run(body())


@pytest.mark.parametrize("path", ["/", "/status", "/healthz"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "", "["])
def test_foreign_host_is_refused_even_with_the_token(path: str, host: str) -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        answer = await client.get(path, headers={**BEARER, "Host": host})
        assert (answer.status_code, _code(answer)) == (403, "FOREIGN_HOST")

    _run(check)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9", "127.0.0.1:1", "[::1]:8734"])
def test_loopback_names_are_ours(host: str) -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        assert (await client.get("/status", headers={**BEARER, "Host": host})).status_code == 200

    _run(check)


def test_engine_on_all_addresses_answers_to_addresses_but_not_to_names() -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        for host, status in (("10.1.2.3:80", 200), (socket.gethostname(), 200), ("evil.example", 403)):
            assert (await client.get("/status", headers={**BEARER, "Host": host})).status_code == status

    _run(check, host="0.0.0.0")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1", ""])
def test_foreign_origin_is_refused_even_with_the_token(origin: str) -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        answer = await client.post("/sql", json={"statement": "SELECT 1"}, headers={**BEARER, "Origin": origin})
        assert (answer.status_code, _code(answer)) == (403, "FOREIGN_ORIGIN")
        assert not backend.statements

    _run(check)


def test_own_origin_is_accepted() -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        origin = str(client.base_url).rstrip("/")
        answer = await client.post("/sql", json={"statement": "SELECT 1"}, headers={**BEARER, "Origin": origin})
        assert answer.status_code == 200

    _run(check)


# -- what is answered -------------------------------------------------------------------------------------------------


def test_query_gives_columns_rows_and_epoch_with_exact_integers() -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        answer = await _sql(client, "SELECT * FROM revenue")
        assert answer.headers["content-type"] == "application/json"
        body = json.loads(answer.content)
        assert list(body) == ["columns", "rows", "epoch"]
        assert body["columns"] == ["country", "total", "orders", "tags"]
        assert body["rows"][0]["orders"] == 9007199254740993
        assert body["epoch"] == FIRST_EPOCH

    _run(check)


@pytest.mark.parametrize(
    ("statement", "status", "code"),
    [("nosuch", 400, "UNKNOWN_TABLE"), ("gone", 422, "TABLE_GONE"), ("busy", 503, "SOURCE_BUSY")],
)
def test_errors_of_the_engine_keep_their_code_and_get_a_fitting_status(statement: str, status: int, code: str) -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        answer = await _sql(client, statement)
        assert (answer.status_code, _code(answer)) == (status, code)

    _run(check)


def test_unforeseen_error_shows_neither_its_text_nor_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        with caplog.at_level(logging.DEBUG):
            answer = await _sql(client, "bug")
        assert (answer.status_code, _code(answer)) == (500, "INTERNAL")
        assert "ValueError" in answer.text
        assert "secret row value" not in answer.text + caplog.text

    _run(check)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"statement": 1}',
        b'{"statement": "  "}',
        b"\xff",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"statement": ["SELECT 1"]}',
        b'{"statement": "SELECT 1", "more": {"deep": [[[[1]]]]}}',
        b'{"statement": ' + b"9" * 100_000 + b"}",
        b'{"statement": 1e999999}',
        b'{"statement": NaN}',
        b'{"statement": null}',
        b'{"statement": "\\ud800"}',
        b'{"statement": "SELECT 1"} trailing',
        b'{"statement": "SELECT\n1"}',
        b'"SELECT 1"',
        b"1e999",
        b"true",
        b"{" + b",".join(b'"n%d": 1' % i for i in range(100)) + b"}",
        '{"statement": "SELECT 1"}'.encode("utf-16"),
    ],
)
def test_body_without_a_statement_is_a_bad_request(body: bytes) -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        answer = await client.post("/sql", content=body, headers=BEARER)
        assert (answer.status_code, _code(answer)) == (400, "BAD_REQUEST")

    _run(check)


def test_body_beyond_the_limit_is_refused() -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        answer = await client.post("/sql", content=b" " * (MAX_BODY_BYTES + 1), headers=BEARER)
        assert (answer.status_code, _code(answer)) == (400, "BODY_TOO_LARGE")
        assert "INSERT" in answer.json()["error"]["hint"]
        assert not backend.statements

    _run(check)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/sql", 405), ("POST", "/status", 405), ("GET", "/x", 404)]
)
def test_wrong_paths_and_methods_get_an_error_of_the_same_form(method: str, path: str, status: int) -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        answer = await client.request(method, path, headers=BEARER)
        assert answer.status_code == status
        assert _code(answer) in {"NO_SUCH_PATH", "METHOD_NOT_ALLOWED"}

    _run(check)


def test_status_and_metrics_come_from_the_backend() -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        status = (await client.get("/status", headers=BEARER)).json()
        assert {job["name"] for job in status["jobs"]} >= {"shop", "orders", "revenue"}
        metrics = await client.get("/metrics", headers=BEARER)
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "headwater_committed_epoch" in metrics.text

    _run(check)


def test_page_is_whole_and_allows_only_its_own_script() -> None:
    async def check(client: httpx.AsyncClient, backend: FakeBackend) -> None:
        page = await client.get("/")
        policy = page.headers["content-security-policy"]
        assert "unsafe" not in policy and "script-src 'sha256-" in policy
        assert "/*page." not in page.text
        assert "http://" not in page.text.replace("http://www.w3.org/", "") and "https://" not in page.text
        assert page.headers["referrer-policy"] == "no-referrer"
        assert page.headers["cache-control"] == "no-store"

    _run(check)


# -- serving ----------------------------------------------------------------------------------------------------------


def test_server_answers_over_a_real_socket_in_this_event_loop() -> None:
    async def body() -> None:
        backend = FakeBackend()
        async with serving(make_app(backend, TOKEN)) as server, httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/healthz")).json() == {"healthy": True}
            assert (await client.get("/status")).status_code == 401
            assert (await _sql(client, "PAUSE")).status_code == 200
            assert (await client.get("/status", headers=BEARER)).json()["engine"]["paused"] is True

    asyncio.run(body())


def test_signals_stay_with_the_engine() -> None:
    async def body() -> None:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        async with serving(make_app(FakeBackend(), TOKEN)):
            assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before

    asyncio.run(body())


def test_taken_port_is_an_error_with_a_hint() -> None:
    async def body() -> None:
        async with serving(make_app(FakeBackend(), TOKEN)) as server:
            with pytest.raises(UsageError) as caught:
                await serve(make_app(FakeBackend(), TOKEN), port=server.port)
            assert caught.value.code == "HTTP_PORT_TAKEN"
            assert "--http" in caught.value.hint

    asyncio.run(body())


def test_statement_that_runs_when_the_server_stops_is_answered_in_the_form_of_all_errors() -> None:
    async def body() -> None:
        backend = FakeBackend()
        async with httpx.AsyncClient(timeout=30) as client:
            server = await serve(make_app(backend, TOKEN))
            url = f"{server.url}/sql"
            asking = asyncio.create_task(client.post(url, json={"statement": "FOREVER"}, headers=BEARER))
            while not backend.statements:
                await asyncio.sleep(0.01)
            await server.stop()
            answer = await asking
        assert (answer.status_code, _code(answer)) == (503, "ENGINE_STOPPING")

    asyncio.run(body())


def test_stop_ends_the_server_and_frees_the_port() -> None:
    async def body() -> None:
        async with serving(make_app(FakeBackend(), TOKEN)) as server:
            port = server.port
        again = await serve(make_app(FakeBackend(), TOKEN), port=port)
        await again.stop()

    asyncio.run(body())
