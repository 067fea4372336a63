"""Who may ask the HTTP endpoint: checked before any of its code runs.

1. *Host*: must be a loopback name or the address that we listen on. A foreign web page that points its own name at
   127.0.0.1 (DNS rebinding) so gets nothing. When we listen on all addresses, any literal address is ours, and so is
   the machine's name. The port is not compared: a tunnel may bring the page to another one.
2. *Origin*: if a browser sends one, it must be the very address that the request went to.
3. *Token*: `Authorization: Bearer …`, and nothing else: an address stays in histories and logs, and a cookie goes to
   every port of the machine. Compared in constant time. There are two, for administrators and for readers; which one it
   was goes on with the request (`trust_of`). `/healthz` needs none, nor does the page: it is the same for everybody,
   and what it shows it asks for with the token.

Paths are compared as the server routes them (`scope["path"]`), never as an address put together with the Host header.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import socket
from typing import Final, Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwater.model.trust import Trust

LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
WITHOUT_TOKEN: Final = frozenset({"/", "/healthz"})
HINT: Final = "`headwater token` prints it; send it as Authorization: Bearer …"
_TRUST: Final = "headwater.trust"
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Refuse(Protocol):
    def __call__(self, status: int, code: str, message: str, *, detail: str = "", hint: str = "") -> Response: ...


class Guard:
    """ASGI middleware; `refuse` makes the answer, so that all errors have one form."""

    def __init__(self, app: ASGIApp, *, token: str, read_token: str = "", host: str, refuse: Refuse) -> None:
        self._app = app
        self._tokens = [(token.encode(), Trust.ADMIN)] + ([(read_token.encode(), Trust.READ)] if read_token else [])
        self._host = host.lower()
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        trust = self._trust(headers)
        refused = self._foreign(headers) or self._without_token(scope["path"], trust) or self._without_length(headers)
        scope[_TRUST] = trust

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    found.setdefault(name, value)
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
        return _is_address(name) or name in machine_names()

    def _without_token(self, path: str, trust: Trust | None) -> Response | None:
        if path in WITHOUT_TOKEN or trust is not None:
            return None
        answer = self._refuse(401, "TOKEN_REFUSED", "the request has no valid token", hint=HINT)
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    def _without_length(self, headers: Headers) -> Response | None:
        if "transfer-encoding" not in headers:
            return None
        hint = "send the body with a Content-Length"
        return self._refuse(411, "LENGTH_REQUIRED", "the request does not say how long its body is", hint=hint)

    def _trust(self, headers: Headers) -> Trust | None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        presented = given.strip().encode() if scheme.lower() == "bearer" else b""
        found = [trust for token, trust in self._tokens if hmac.compare_digest(presented, token)]
        return found[0] if found else None


def trust_of(scope: Scope) -> Trust:
    """Of a request that the guard has let through; without a token it is the least."""
    found: Trust | None = scope.get(_TRUST)
    return found or Trust.READ


@functools.cache
def machine_names() -> frozenset[str]:
    """This machine's own; a name server may take its time to say, so it is asked once, and not by a request."""
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


def _host_name(host: str) -> str:
    if any(sign in host for sign in "/?#@\\"):  # no part of a host; what is around it could be taken for a path
        return ""
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
