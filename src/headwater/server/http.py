"""The engine's HTTP endpoint: the page, its status, SQL, metrics and health. It decides nothing; a `Backend` answers.

    GET  /         the page (page.html, page.css and page.js in one answer; nothing else is fetched)
    GET  /status   JSON, see `Backend.status`
    POST /sql      {"statement": …} → {"columns", "rows", "epoch"} or {"error": {"code", "message", "detail", "hint"}}
    GET  /metrics  Prometheus text
    GET  /healthz  200 or 503, the only one without a token

Who may ask (`guard.py`): whoever knows the token, through a Host that is ours and from no foreign Origin. The server
runs in the engine's own event loop (`serve`); the engine keeps its signals.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from headwater.errors import HeadwaterError, IndeterminateError, TransientError, UsageError, place_of
from headwater.server.guard import Guard
from headwater.server.metrics import CONTENT_TYPE

log = logging.getLogger(__name__)

# A statement is written by a person or a small program; more is a mistake or an attack on our memory.
MAX_BODY_BYTES: Final = 64 << 20  # an INSERT of a million short rows; it is held in memory and parsed
START_TIMEOUT_S: Final = 10.0
# An engine has 10 s to stop in order, of which this step has less than one: by then open requests have their answer.
STOP_TIMEOUT_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class SqlResult:
    """A query's answer, JSON-ready: values are spelt as `--format json` spells them. Without a query it is empty."""

    columns: list[str]
    rows: list[dict[str, Any]]
    epoch: int | None = None


class Backend(Protocol):
    """What the endpoint asks of the engine. All methods are called in the engine's event loop and must not block it."""

    async def sql(self, statement: str) -> SqlResult:
        """Runs one or several statements and gives the result of the last; raises HeadwaterError. `PAUSE` and `RESUME`
        come this way too."""

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

    def healthy(self) -> bool:
        """Whether the engine can commit: Spark is there and it still owns its data directory."""


def make_app(backend: Backend, token: str, *, host: str = "127.0.0.1") -> Starlette:
    """The application for one engine. `host` is the address it will listen on: requests must name it, or loopback."""

    async def page(request: Request) -> Response:
        return HTMLResponse(body, headers={"Content-Security-Policy": policy})

    async def status(request: Request) -> Response:
        return _json(backend.status())

    async def sql(request: Request) -> Response:
        result = await backend.sql(_statement(await _body(request)))
        return _json({"columns": result.columns, "rows": result.rows, "epoch": result.epoch})

    async def metrics(request: Request) -> Response:
        return Response(backend.metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def healthz(request: Request) -> Response:
        healthy = backend.healthy()
        return _json({"healthy": healthy}, 200 if healthy else 503)

    body, policy = _page()
    return Starlette(
        routes=[
            Route("/", _contained(page)),
            Route("/status", _contained(status)),
            Route("/sql", _contained(sql), methods=["POST"]),
            Route("/metrics", _contained(metrics)),
            Route("/healthz", _contained(healthz)),
        ],
        middleware=[Middleware(Guard, token=token, host=host, refuse=refuse)],
        exception_handlers={HTTPException: _on_http_error},
    )


# -- answers -------------------------------------------------------------------------------------------------------


def refuse(status: int, code: str, message: str, *, detail: str = "", hint: str = "") -> Response:
    """An error that is not a HeadwaterError, in the same form."""
    return _json({"error": {"code": code, "message": message, "detail": detail, "hint": hint}}, status)


def _json(content: object, status: int = 200) -> Response:
    # NaN is not JSON; the backend spells it as text, and a slip must fail here, not in the reader.
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode(), status, media_type="application/json")


def http_status(error: HeadwaterError) -> int:
    match error:
        case UsageError():
            return 400
        case TransientError() | IndeterminateError():
            return 503
        case _:
            return 422


Handler = Callable[[Request], Awaitable[Response]]


def _contained(handler: Handler) -> Handler:
    """Turns every error into an answer: the framework would log its text, which may hold a row's value."""

    @functools.wraps(handler)
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except HeadwaterError as error:
            return _json({"error": error.as_dict()}, http_status(error))
        except asyncio.CancelledError:  # by the server's stop alone: whoever asked is still there
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


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise UsageError("REQUEST_TOO_LARGE", f"a request may have at most {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _statement(body: bytes) -> str:
    hint = 'send {"statement": "SELECT …"}'
    try:
        content = json.loads(body)
    except ValueError:
        raise UsageError("BAD_REQUEST", "the body is not JSON", hint=hint) from None
    statement = content.get("statement") if isinstance(content, dict) else None
    if not isinstance(statement, str) or not statement.strip():
        raise UsageError("BAD_REQUEST", "the body has no statement", hint=hint)
    return statement


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

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    async def stop(self) -> None:
        self._server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


async def serve(app: Starlette, host: str = "127.0.0.1", port: int = 0) -> RunningServer:
    """Starts to listen (port 0: any free one) and returns when requests are taken; raises HTTP_PORT_TAKEN."""
    sock = _bind(host, port)
    config = uvicorn.Config(
        app,
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
    return RunningServer(host, sock.getsockname()[1], server, task)


@contextlib.asynccontextmanager
async def serving(app: Starlette, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[RunningServer]:
    """`serve` for the length of a block."""
    server = await serve(app, host, port)
    try:
        yield server
    finally:
        await server.stop()


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise UsageError(
            "HTTP_PORT_TAKEN",
            f"cannot listen on {host} port {port}",
            detail=error.strerror or type(error).__name__,
            hint="choose another with --http HOST:PORT (port 0 takes any free one)",
        ) from None
