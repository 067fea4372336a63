"""Who may ask the HTTP endpoint: checked before any of its code runs.

1. *Host*: must be a loopback name or the address that we listen on. A foreign web page that points its own name at
   127.0.0.1 (DNS rebinding) so gets nothing. When we listen on all addresses, any literal address is ours, and so is
   the machine's name. The port is not compared: a tunnel may bring the page to another one.
2. *Origin*: if a browser sends one, it must be the very address that the request went to.
3. *Token*: `Authorization: Bearer …`, or `?token=…` (answered with a cookie, which the page uses from then on), or that
   cookie. Compared in constant time. `/healthz` needs none.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from typing import Final, Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
WITHOUT_TOKEN: Final = frozenset({"/healthz"})
HINT: Final = "`headwater run` prints the address with its token; endpoint.json in the data directory has it too"
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_NO_TOKEN_PAGE: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Headwater</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<h1>Headwater</h1><p>This page needs the engine's token. The address with its token is printed by
<code>headwater run</code>, and stands in <code>endpoint.json</code> in the data directory.</p></html>
"""


class Refuse(Protocol):
    def __call__(self, status: int, code: str, message: str, *, detail: str = "", hint: str = "") -> Response: ...


class Guard:
    """ASGI middleware; `refuse` makes the answer, so that all errors have one form."""

    def __init__(self, app: ASGIApp, *, token: str, host: str, refuse: Refuse) -> None:
        self._app = app
        self._token = token.encode()
        self._host = host.lower()
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        connection = HTTPConnection(scope)
        refused = self._foreign(connection.headers) or self._without_token(connection)
        cookie = None if refused else self._cookie(connection)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                if cookie:
                    headers.append("Set-Cookie", cookie)
            await send(message)

        await (refused or self._app)(scope, receive, send_with_headers)

    def _foreign(self, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        if not self._ours(_host_name(host)):
            return self._refuse(403, "FOREIGN_HOST", "the request names a host that is not this engine's", hint=HINT)
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"http://{host}".lower():
            return self._refuse(403, "FOREIGN_ORIGIN", "the request comes from another site", hint=HINT)
        return None

    def _ours(self, name: str) -> bool:
        if name in LOOPBACK or (name and name == self._host):
            return True
        if self._host not in ("0.0.0.0", "::"):
            return False
        return _is_address(name) or name in {socket.gethostname().lower(), socket.getfqdn().lower()}

    def _without_token(self, connection: HTTPConnection) -> Response | None:
        path = connection.url.path
        if path in WITHOUT_TOKEN or any(self._right(token) for token in self._presented(connection)):
            return None
        if path == "/" and "text/html" in connection.headers.get("accept", ""):
            return HTMLResponse(_NO_TOKEN_PAGE, 401)
        answer = self._refuse(401, "TOKEN_REFUSED", "the request has no valid token", hint=HINT)
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    def _presented(self, connection: HTTPConnection) -> list[str]:
        scheme, _, bearer = connection.headers.get("authorization", "").partition(" ")
        found = [
            bearer.strip() if scheme.lower() == "bearer" else None,
            connection.query_params.get("token"),
            connection.cookies.get(_cookie_name(connection)),
        ]
        return [token for token in found if token]

    def _right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token)

    def _cookie(self, connection: HTTPConnection) -> str | None:
        """Only a browser that came with `?token=` gets one; it never leaves this host, and no script can read it."""
        if connection.url.path != "/" or "token" not in connection.query_params:
            return None
        return f"{_cookie_name(connection)}={self._token.decode()}; Path=/; HttpOnly; SameSite=Strict"


def _cookie_name(connection: HTTPConnection) -> str:
    """Cookies do not know ports, so the name does: two engines on one machine must not push each other out."""
    return f"headwater_token_{connection.url.port or 80}"


def _host_name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
