"""TLS to a target: the options that every sink with a connection of its own has, named like those of a source.

    ssl.mode       encrypted        who the server is
    disable        no
    allow, prefer  if it offers     not looked at (a warning, unless the host is this machine)
    require        or an error      not looked at, unless ssl.root.cert is given: then as verify-ca
    verify-ca      or an error      its certificate is signed by ssl.root.cert
    verify-full    or an error      … and is for this host name

libpq does all of it for Postgres; `context` is the same for clients that take one of Python's SSL contexts.
"""

from __future__ import annotations

import ipaddress
import logging
import ssl
from typing import Final

from headwater.errors import TransientError, UsageError
from headwater.sink.options import Option, SinkOptions

log = logging.getLogger(__name__)
MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
OPTIONAL: Final = ("allow", "prefer")
OPTIONS: Final = (
    Option("ssl.mode", default="prefer", choices=MODES),
    Option("ssl.root.cert"),
    Option("ssl.cert"),
    Option("ssl.key"),
)
HINT: Final = "check ssl.mode and ssl.root.cert, and the target's certificate"


def context(options: SinkOptions) -> ssl.SSLContext | None:
    """What a client needs to encrypt; None where it must not."""
    mode, root = options.text("ssl.mode"), options["ssl.root.cert"]
    if mode == "disable":
        return None
    try:
        made = ssl.create_default_context(cafile=root or None)
        # Servers make certificates for themselves that have not all that a public authority's must have.
        made.verify_flags &= ~ssl.VERIFY_X509_STRICT
        made.check_hostname = mode == "verify-full"
        verified = mode.startswith("verify") or (mode == "require" and bool(root))
        made.verify_mode = ssl.CERT_REQUIRED if verified else ssl.CERT_NONE
        if options["ssl.cert"]:
            made.load_cert_chain(options.text("ssl.cert"), options["ssl.key"] or None)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            "SINK_TLS", "a certificate or key of the sink cannot be read", detail=type(error).__name__, hint=HINT
        ) from None
    return made


def failed(sink: str, why: str) -> TransientError:
    """No connection as safe as `ssl.mode` asks for; like a wrong password, definite while the sink is being created."""
    return TransientError(
        "SINK_TLS", f"there is no trusted connection to the target of sink {sink}", detail=why, hint=HINT
    )


def warn_if_open(what: str, host: str, mode: str) -> None:
    """Say that a password and rows may go over a network that others can read or change."""
    if mode in ("disable", *OPTIONAL) and not _this_machine(host):
        log.warning(
            "%s: ssl.mode=%s does not protect what is sent to %s; use verify-full with ssl.root.cert", what, mode, host
        )


def _this_machine(host: str) -> bool:
    if host in ("", "localhost") or host.startswith(("/", "@")):  # libpq: a socket of this machine
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
