"""The engine's HTTP endpoint: the page, its status, SQL, metrics and health. It decides nothing; a `Backend` answers.

    GET  /         the page (page.html, page.css and page.js in one answer; nothing else is fetched)
    GET  /status   JSON, see `Backend.status`; `health` is what /healthz says
    POST /sql      {"statement": …} → {"columns", "rows", "epoch"} or {"error": {"code", "message", "detail", "hint"}}
    GET  /metrics  Prometheus text
    GET  /healthz  200 {"healthy": true}, or 503 {"healthy": false, "reason": …}

Who may ask (`guard.py`): whoever knows a token, through a Host that is ours and from no foreign Origin. How many, and
how slowly (`connections.py`). The server has an event loop and a thread of its own (`ServerThread`): whatever a client
does there stands in the way of no barrier, and `/healthz` is answered although the engine's loop may stand still. What
asks the engine goes over to its loop (`engine_loop.py`); what makes or reads long JSON works in pieces (`pieces.py`,
`body.py`).

A client that leaves takes its statement with it: what only reads is cancelled, what writes goes on to its end.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headwater.errors import HeadwaterError, IndeterminateError, TransientError, UsageError, place_of
from headwater.model.trust import Trust
from headwater.server.body import MAX_BODY_BYTES, statement_of, too_large
from headwater.server.connections import BACKLOG, Connection, sweep
from headwater.server.engine_loop import EngineLoop
from headwater.server.guard import Guard, machine_names, trust_of
from headwater.server.metrics import CONTENT_TYPE
from headwater.server.pieces import encode, gathered, row_pieces

log = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 10.0
# Statements under way, of each kind of caller. Eight queries run at a time (`spark/jobs.py`); the others wait, and one
# that would wait longer than its client is better told at once. Readers cannot take the administrators' places.
MAX_STATEMENTS: Final[dict[Trust, int]] = {Trust.READ: 32, Trust.ADMIN: 64}
RETRY_AFTER_S: Final = 2
# Until a client that reads its answer goes on with that: the answer holds a statement's place and perhaps a file.
STALLED_S: Final = 120.0
SMALL_BODY: Final = 64 << 10  # is read at once; a larger one in a thread
# An engine has 10 s to stop in order, of which this step has less than one: by then open requests have their answer.
STOP_TIMEOUT_S: Final = 0.5


class JsonRows(Protocol):
    """Rows that are turned into text only while they are sent, in a thread."""

    def pieces(self) -> Iterator[str]:
        """The rows of a JSON array without its brackets, in pieces of a bounded size."""

    def close(self) -> None:
        """Whoever reads has enough, or is gone."""


@dataclass(frozen=True, slots=True)
class SqlResult:
    """A query's answer, JSON-ready: values are spelt as `--format json` spells them. Without a query it is empty."""

    columns: list[str]
    rows: list[dict[str, Any]] | JsonRows
    epoch: int | None = None


class Backend(Protocol):
    """What the endpoint asks of the engine. All but `problem` and `ended_by` are called in the engine's event loop and
    must not block it."""

    async def sql(self, statement: str, trust: Trust) -> SqlResult:
        """Runs one or several statements and gives the result of the last; raises HeadwaterError. `PAUSE` and `RESUME`
        come this way too. Cancelled when its client leaves: then what reads ends, and what writes does not end half."""

    def status(self) -> dict[str, Any]:
        """How things stand, JSON-ready, from memory (a page asks every second). Times are ISO 8601 in UTC.

        - `engine`: version, pid, generation, started_at, master, paused, data_dir
        - `committed_epoch`: number or null
        - `barriers`: the last 120, oldest first: epoch, ms, at
        - `jobs`: the columns of hw_jobs, and depends_on (names), rows_per_s, and the columns of hw_progress
        - `progress`, `sources`, `log_stores`, `errors`: the rows of the hw_catalog tables of these names
        """

    def metrics(self) -> bytes:
        """Prometheus text (`Metrics.render`)."""

    def problem(self) -> str | None:
        """Why the engine is not healthy; None if it is. Asked from any thread, at any moment, and answered at once:
        it waits for nothing. Everybody on the machine may read it."""

    def ended_by(self) -> HeadwaterError | None:
        """What has ended the engine, if it was more than a wish. Asked as `problem` is."""


def make_app(
    backend: Backend,
    token: str,
    *,
    read_token: str = "",
    host: str = "127.0.0.1",
    loop: asyncio.AbstractEventLoop | None = None,
) -> Starlette:
    """The application for one engine. `host` is the address it will listen on: requests must name it, or loopback.
    `loop` is where the backend lives, if that is another one than the server's."""
    engine = EngineLoop(loop)
    under_way = dict.fromkeys(Trust, 0)
    if host in ("0.0.0.0", "::"):
        machine_names()

    def health() -> dict[str, Any]:
        problem = backend.problem()
        return {"healthy": True} if problem is None else {"healthy": False, "reason": problem}

    async def page(request: Request) -> Response:
        return HTMLResponse(body, headers={"Content-Security-Policy": policy})

    async def status(request: Request) -> Response:
        found = await engine.call(backend.status)
        return await asyncio.to_thread(_json, {**found, "health": health()})

    async def sql(request: Request) -> Response:
        trust = trust_of(request.scope)
        if under_way[trust] >= MAX_STATEMENTS.get(trust, 0):
            return _too_many()
        with contextlib.ExitStack() as place:
            under_way[trust] += 1
            place.callback(lambda: under_way.__setitem__(trust, under_way[trust] - 1))
            statement = await _statement(request)
            gone = place.enter_context(_client_leaves(request))
            work = asyncio.create_task(engine.run(lambda: backend.sql(statement, trust)))
            return _Answer(await _unless(gone, work), gone, place.pop_all())

    async def metrics(request: Request) -> Response:
        return Response(await engine.call(backend.metrics), headers={"Content-Type": CONTENT_TYPE})

    async def healthz(request: Request) -> Response:
        found = health()
        return _json(found, 200 if found["healthy"] else 503)

    body, policy = _page()
    contained = functools.partial(_contained, backend.ended_by)
    return Starlette(
        routes=[
            Route("/", contained(page)),
            Route("/status", contained(status)),
            Route("/sql", contained(sql), methods=["POST"]),
            Route("/metrics", contained(metrics)),
            Route("/healthz", contained(healthz)),
        ],
        middleware=[Middleware(Guard, token=token, read_token=read_token, host=host, refuse=refuse)],
        exception_handlers={HTTPException: _on_http_error},
    )


# -- answers -------------------------------------------------------------------------------------------------------


def refuse(status: int, code: str, message: str, *, detail: str = "", hint: str = "") -> Response:
    """An error that is not a HeadwaterError, in the same form."""
    return _json({"error": {"code": code, "message": message, "detail": detail, "hint": hint}}, status)


def _json(content: object, status: int = 200) -> Response:
    return Response(encode(content).encode(), status, media_type="application/json")


def _too_many() -> Response:
    hint = "try again in a moment, or send fewer at a time"
    answer = refuse(503, "TOO_MANY_STATEMENTS", "too many statements are waiting already", hint=hint)
    answer.headers["Retry-After"] = str(RETRY_AFTER_S)
    return answer


class _Answer(Response):
    """The rows of a statement, on their way piece by piece: made in a thread, as fast as the client takes them."""

    def __init__(self, result: SqlResult, gone: asyncio.Task[None], place: contextlib.ExitStack) -> None:
        super().__init__(media_type="application/json")
        del self.headers["content-length"]
        self._result = result
        self._gone = gone
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place:
            try:
                await self._send(send)
            except Exception as error:  # the answer has begun: that it does not end is all that can be said
                log.error("an answer broke off: %s", place_of(error))
            finally:
                close = getattr(self._result.rows, "close", None)
                if close is not None:
                    close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pieces = gathered(self._text())
        while not self._gone.done() and (piece := await asyncio.to_thread(_next_bytes, pieces)) is not None:
            async with asyncio.timeout(STALLED_S):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        if not self._gone.done():
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _text(self) -> Iterator[str]:
        rows = self._result.rows
        yield f'{{"columns":{encode(self._result.columns)},"rows":['
        yield from row_pieces(rows) if isinstance(rows, list) else rows.pieces()
        yield f'],"epoch":{encode(self._result.epoch)}}}'


def _next_bytes(pieces: Iterator[str]) -> bytes | None:
    piece = next(pieces, None)
    return None if piece is None else piece.encode()


def http_status(error: HeadwaterError) -> int:
    match error:
        case UsageError():
            return 400
        case TransientError() | IndeterminateError():
            return 503
        case _:
            return 422


Handler = Callable[[Request], Awaitable[Response]]


def _contained(ended_by: Callable[[], HeadwaterError | None], handler: Handler) -> Handler:
    """Turns every error into an answer: the framework would log its text, which may hold a row's value."""

    @functools.wraps(handler)
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except HeadwaterError as error:
            return _json({"error": error.as_dict()}, http_status(error))
        except ClientDisconnect:
            return refuse(499, "CLIENT_GONE", "the client has left")  # nobody reads it
        except asyncio.CancelledError:  # by the server's stop alone: whoever asked is still there
            if (end := ended_by()) is not None:
                return _json({"error": end.as_dict()}, http_status(end))
            return refuse(503, "ENGINE_STOPPING", "the engine is stopping", hint="start it again")
        except Exception as error:
            log.error("request failed: %s %s: %s", request.method, request.url.path, place_of(error))
            return refuse(500, "INTERNAL", "the request failed", detail=place_of(error), hint="see the engine's log")

    return answer


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "NO_SUCH_PATH", 405: "METHOD_NOT_ALLOWED"}
    answer = refuse(error.status_code, codes.get(error.status_code, "BAD_REQUEST"), str(error.detail).lower())
    answer.headers.update(error.headers or {})
    return answer


# -- requests ------------------------------------------------------------------------------------------------------


async def _statement(request: Request) -> str:
    body = await _body(request)
    return statement_of(body) if len(body) <= SMALL_BODY else await asyncio.to_thread(statement_of, body)


async def _body(request: Request) -> bytes:
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > MAX_BODY_BYTES:
        raise too_large()
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise too_large()
    return bytes(body)


@contextlib.contextmanager
def _client_leaves(request: Request) -> Iterator[asyncio.Task[None]]:
    """A task that ends when the client has left."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(watch())
    try:
        yield task
    finally:
        task.cancel()


async def _unless(gone: asyncio.Task[None], work: asyncio.Task[SqlResult]) -> SqlResult:
    """What comes of the work; it is cancelled when the client leaves, or the server stops."""
    try:
        await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        work.cancel()
        return await work  # why it ended, if it has more to say than that it was cancelled
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
        raise ClientDisconnect
    return work.result()


# -- the page ------------------------------------------------------------------------------------------------------


def _page() -> tuple[bytes, str]:
    """The page as one document, and the policy that lets exactly its own style and script run."""
    place = files("headwater.server")
    html, css, script = (place.joinpath(name).read_text("utf-8") for name in ("page.html", "page.css", "page.js"))
    document = html.replace("/*page.css*/", css).replace("/*page.js*/", script)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(css)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return document.encode(), policy


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# -- serving -------------------------------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: SIGTERM and ctrl-C are the engine's, which stops at a checkpoint."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server in this event loop."""

    host: str
    port: int
    _server: _Server
    _task: asyncio.Task[None]
    _sweeper: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    async def stop(self) -> None:
        self._server.should_exit = True
        self._sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


async def serve(app: Starlette, host: str = "127.0.0.1", port: int = 0) -> RunningServer:
    """Starts to listen (port 0: any free one) and returns when requests are taken; raises HTTP_PORT_TAKEN."""
    sock = _bind(host, port)
    config = uvicorn.Config(
        app,
        http=Connection,
        backlog=BACKLOG,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=STOP_TIMEOUT_S,  # type: ignore[arg-type] # it is given to asyncio as it is
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]), name="http")
    async with asyncio.timeout(START_TIMEOUT_S):
        while not server.started:
            if task.done():
                task.result()
                raise UsageError("HTTP_NOT_STARTED", "the HTTP endpoint ended while starting")
            await asyncio.sleep(0.01)
    sweeper = asyncio.create_task(sweep(server.server_state.connections), name="http connections")
    return RunningServer(host, sock.getsockname()[1], server, task, sweeper)


@contextlib.asynccontextmanager
async def serving(app: Starlette, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[RunningServer]:
    """`serve` for the length of a block."""
    server = await serve(app, host, port)
    try:
        yield server
    finally:
        await server.stop()


class ServerThread:
    """`serve` on an event loop of its own, in a thread: started and stopped from another loop."""

    def __init__(self, make: Callable[[], Starlette], host: str, port: int) -> None:
        self._make = make
        self._address = (host, port)
        self._started: Future[RunningServer] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="http", daemon=True)

    async def start(self) -> RunningServer:
        self._thread.start()
        return await asyncio.wrap_future(self._started)

    async def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            while self._thread.is_alive():
                await asyncio.sleep(0.02)

    async def _run(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        try:
            server = await serve(self._make(), *self._address)
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(server)
        await self._stopping.wait()
        await server.stop()


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(
            "HTTP_PORT_TAKEN",
            f"cannot listen on {host} port {port}",
            detail=error.strerror or type(error).__name__,
            hint="choose another with --http HOST:PORT (port 0 takes any free one)",
        ) from None
