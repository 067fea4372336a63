"""Connecting to Postgres: the options of a source, sessions with fixed text settings, errors in our words, LSN text.

Every session of ours (split reads, catalogue, the replication reader) uses SESSION_SETTINGS, so that a value has one
and the same text by snapshot and by stream. What is read over a session is left to `catalogue.py`, `planner.py`,
`slots.py` and `reader.py`. A password is kept as the reference the user wrote (`${NAME}`, `${file:path}`), is resolved
when a connection is made, and never appears in a repr or an error.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
from psycopg import errors as pg_errors

from headwater.config import masked, resolve_secret
from headwater.errors import HeadwaterError, SourceError, TransientError, UsageError

MIN_SERVER_VERSION: Final = 140_000  # tid range scans, pgoutput messages and 64-bit snapshots in one release
# Limits that a role or database has for its users: a slow or rate-limited read is one statement for as long as it
# takes, and a snapshot that several reads share is a transaction in which nothing happens.
NO_LIMITS: Final = {
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "default_transaction_read_only": "off",  # or no publication could be made; our reads say READ ONLY themselves
}
TRANSACTION_TIMEOUT_SINCE: Final = 170_000  # an older server refuses a session that names it
_SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
LOCK_WAIT_S: Final = 5  # then the statement fails, or the copy is tried again later and others have their turn
SCHEMA_CHANGES: Final = ("evolve", "lenient", "exception", "ignore")
MOST_NAME_BYTES: Final = 63  # longer ones the server cuts off, and does not find again
_SLOT_NAME: Final = re.compile(r"[a-z0-9_]{1,63}")


def reader_name(slot: str) -> str:
    """The application_name under which a slot's reader is seen at the server."""
    return f"headwater {slot}"


def parse_lsn(text: str) -> int:
    """`X/Y` as a 64-bit number: the order of the numbers is the order of the log."""
    high, slash, low = text.partition("/")
    try:
        if not slash:
            raise ValueError(text)
        return (int(high, 16) << 32) | int(low, 16)
    except ValueError:
        raise UsageError("INVALID_POSITION", "not a Postgres log position", hint="write it as X/Y in hex") from None


def format_lsn(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


@dataclass(frozen=True, slots=True)
class PostgresConfig:
    """The options of a `postgres-cdc` source, checked. `password` is a reference (`resolve_secret`) or a literal."""

    hostname: str
    database: str
    username: str
    port: int = 5432
    password: str = field(default="", repr=False)
    slot: str = "headwater"
    publication: str = "headwater"
    schema: str = "public"
    create_publication: bool = True
    ssl_mode: str = "prefer"
    ssl_root_cert: str = ""
    ssl_cert: str = ""
    ssl_key: str = ""
    heartbeat_ms: int = 10_000
    connect_timeout_s: int = 10
    schema_change: str = "lenient"

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> PostgresConfig:
        """From the WITH options of CREATE SOURCE; UsageError names the option that is wrong."""
        given = {k.lower(): str(v) for k, v in options.items() if k.lower() != "connector"}
        for name in given:
            if name not in OPTIONS:
                raise _unknown_option(name)
        for name in ("hostname", "database.name", "username"):
            if not given.get(name):
                raise UsageError("MISSING_OPTION", f"option {name} is missing", hint=f"add {name}='…' to WITH (…)")
        values = {OPTIONS[name]: _checked(name, text) for name, text in given.items()}
        return cls(**values)

    def conninfo(self, *, password: str | None = None) -> dict[str, str]:
        """Connection parameters for libpq; the password is resolved here and nowhere earlier."""
        # Late: the reader process uses this module too, and the types bring Arrow with them (a second of its start).
        from headwater.connectors.postgres.types import SESSION_SETTINGS

        secret = resolve_secret(self.password) if password is None else password
        settings = {**SESSION_SETTINGS, **NO_LIMITS}
        parts = {
            "host": self.hostname,
            "port": str(self.port),
            "user": self.username,
            "dbname": self.database,
            "password": secret,
            "sslmode": self.ssl_mode,
            "sslrootcert": self.ssl_root_cert,
            "sslcert": self.ssl_cert,
            "sslkey": self.ssl_key,
            "connect_timeout": str(self.connect_timeout_s),
            # A peer that vanished without a FIN is noticed within half a minute.
            "keepalives_idle": "10",
            "keepalives_interval": "5",
            "keepalives_count": "3",
            "tcp_user_timeout": "30000",
            "options": " ".join(f"-c {k}={v}" for k, v in settings.items() if k != "client_encoding"),
            "client_encoding": "UTF8",
        }
        return {k: v for k, v in parts.items() if v}


OPTIONS: Final[dict[str, str]] = {
    "hostname": "hostname",
    "port": "port",
    "username": "username",
    "password": "password",
    "database.name": "database",
    "schema.name": "schema",
    "slot.name": "slot",
    "publication.name": "publication",
    "publication.create.enable": "create_publication",
    "ssl.mode": "ssl_mode",
    "ssl.root.cert": "ssl_root_cert",
    "ssl.cert": "ssl_cert",
    "ssl.key": "ssl_key",
    "heartbeat.interval.ms": "heartbeat_ms",
    "connect.timeout": "connect_timeout_s",
    "schema.change.behavior": "schema_change",
}


def _unknown_option(name: str) -> UsageError:
    close = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"known options: {', '.join(sorted(OPTIONS))}"
    return UsageError("UNKNOWN_OPTION", f"unknown option {name} of connector postgres-cdc", hint=hint)


def _checked(name: str, text: str) -> Any:
    match name:
        case "port" | "heartbeat.interval.ms" | "connect.timeout":
            limit = {"port": 65_535, "heartbeat.interval.ms": 86_400_000, "connect.timeout": 3600}[name]
            if not text.isdecimal() or not 1 <= int(text) <= limit:
                raise _invalid(name, f"write a number from 1 to {limit}")
            return int(text)
        case "schema.change.behavior":
            if text not in SCHEMA_CHANGES:
                raise _invalid(name, f"one of {', '.join(SCHEMA_CHANGES)}")
            return text
        case "publication.create.enable":
            if text.lower() not in ("true", "false"):
                raise _invalid(name, "write 'true' or 'false'")
            return text.lower() == "true"
        case "ssl.mode":
            if text.lower() not in _SSL_MODES:
                raise _invalid(name, f"one of {', '.join(_SSL_MODES)}")
            return text.lower()
        case "publication.name" | "schema.name":
            if not text or "\0" in text or len(text.encode()) > MOST_NAME_BYTES:
                raise _invalid(name, f"a name in Postgres has 1 to {MOST_NAME_BYTES} bytes")
            return text
        case "ssl.root.cert" | "ssl.cert" | "ssl.key":
            if not text or "\0" in text:
                raise _invalid(name, "write the path of a file")
            return text
        case "slot.name":
            if not _SLOT_NAME.fullmatch(text):
                raise _invalid(name, "a slot name has lower-case letters, digits and underscores, at most 63")
            return text
        case _:
            return text


def _invalid(name: str, hint: str) -> UsageError:
    return UsageError("INVALID_OPTION", f"option {name} has an invalid value", hint=hint)


def may_be_read_by_others(config: PostgresConfig) -> str:
    """What to say of a connection that leaves this machine and is encrypted only if the server, or whoever answers in
    its place, offers it; empty if there is nothing to say."""
    if config.ssl_mode not in ("prefer", "allow") or _is_local(config.hostname):
        return ""
    return (
        f"ssl.mode is {config.ssl_mode}: the connection to {config.hostname} is in clear if that is all it offers, and "
        "nobody verifies who answers; use ssl.mode='verify-full' with ssl.root.cert"
    )


def _is_local(hostname: str) -> bool:
    if hostname == "localhost" or hostname.startswith("/"):  # a folder with the server's socket
        return True
    try:
        return ipaddress.ip_address(hostname.strip("[]")).is_loopback
    except ValueError:
        return False


def connect(
    config: PostgresConfig, *, application: str = "headwater", password: str | None = None
) -> psycopg.Connection[tuple[Any, ...]]:
    """A session in autocommit mode with our text settings; errors come as Headwater errors.

    It waits for locks for a bounded time: a table that somebody has locked must not hold up the others. Row security
    that would hide rows from us is an error: the stream has them all.
    """
    with translated(f"connecting to {config.hostname}:{config.port}"):
        parts: dict[str, Any] = {**config.conninfo(password=password), "application_name": application}
        parts["options"] += f" -c lock_timeout={LOCK_WAIT_S}s -c row_security=off"
        conn = psycopg.connect("", autocommit=True, prepare_threshold=None, **parts)
    if conn.info.server_version < MIN_SERVER_VERSION:
        version = conn.info.server_version // 10_000
        conn.close()
        raise UsageError("SOURCE_VERSION", f"Postgres {version} is too old", hint="Postgres 14 or later is needed")
    if conn.info.server_version >= TRANSACTION_TIMEOUT_SINCE:
        with translated("setting up a session"):
            conn.execute("SET transaction_timeout = 0")
    return conn


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn psycopg's errors into ours while `doing` something."""
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, doing) from None


# Definite while something is being created; where it exists already, passwords are rotated and servers moved, and an
# engine that was started without its secrets is started again with them.
_PASSING: Final = frozenset({"SECRET_MISSING", "SOURCE_AUTH_FAILED", "SOURCE_NOT_FOUND", "SOURCE_TLS"})


def may_pass(error: HeadwaterError) -> bool:
    """Whether something that exists already waits for this error to pass."""
    return isinstance(error, TransientError) or error.code in _PASSING


def translate(error: psycopg.Error, doing: str) -> HeadwaterError:
    """Our error for one of psycopg's. Only the server's primary message is kept: details can hold row values."""
    if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
        return _connection_error(str(error), doing)
    return classify(error.sqlstate or "", error.diag.message_primary or type(error).__name__, doing)


def _connection_error(text: str, doing: str) -> HeadwaterError:
    """libpq reports a refused log-in without a SQLSTATE in the exception; the wording is the server's own."""
    first = main_line(text)
    lower = text.lower()
    if "authentication failed" in lower or "no password supplied" in lower or "no pg_hba.conf entry" in lower:
        return SourceError("SOURCE_AUTH_FAILED", f"{doing}: log-in refused", hint="check username and password")
    if "does not exist" in lower and ("database" in lower or "role" in lower):
        return SourceError("SOURCE_NOT_FOUND", f"{doing}: {_after_fatal(first)}", hint="check database.name, username")
    if "certificate" in lower or "does not support ssl" in lower:
        return SourceError("SOURCE_TLS", f"{doing}: {_after_fatal(first)}", hint="check ssl.mode and ssl.root.cert")
    if "translate host name" in lower or "name or service not known" in lower:
        return TransientError("SOURCE_UNREACHABLE", f"{doing}: no such host", hint="check hostname")
    return TransientError("SOURCE_UNREACHABLE", f"{doing}: {_after_fatal(first)}", hint="check hostname and port")


def main_line(text: str) -> str:
    """Of libpq's message, which may have details and advice below it, the line that says what happened."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return masked(next((line for line in lines if "FATAL:" in line), lines[0] if lines else "connection failed"))


def _after_fatal(line: str) -> str:
    return line.split("FATAL:")[-1].strip()


_NOT_UTF8: Final = "the database holds text that UTF-8 cannot express: correct the value in the source"
# SQLSTATE (or its class) → (transient, code, hint)
_STATES: Final[dict[str, tuple[bool, str, str]]] = {
    "28": (False, "SOURCE_AUTH_FAILED", "check username and password"),
    "3D000": (False, "SOURCE_NOT_FOUND", "check database.name"),
    "42501": (False, "SOURCE_PERMISSION", "grant the role what `headwater check` names"),
    "42P01": (False, "SOURCE_TABLE_NOT_FOUND", "check the table's name and schema"),
    "42703": (False, "SOURCE_COLUMN_NOT_FOUND", "the table's columns have changed"),
    "22021": (False, "VALUE_NOT_REPRESENTABLE", _NOT_UTF8),
    "22P05": (False, "VALUE_NOT_REPRESENTABLE", _NOT_UTF8),
    "3F000": (False, "SOURCE_TABLE_NOT_FOUND", "check the table's schema"),
    "55006": (True, "SOURCE_SLOT_IN_USE", "another connection still holds the slot"),
    "55P03": (True, "SOURCE_BUSY", "another session holds a lock on it: see pg_locks, pg_blocking_pids"),
    "40": (True, "SOURCE_BUSY", ""),
    "53": (True, "SOURCE_BUSY", "the server is short of connections, memory or disk"),
    "57014": (True, "SOURCE_BUSY", "somebody has cancelled it at the server; it is tried again"),
    "57": (True, "SOURCE_UNREACHABLE", "the server is stopping or starting"),
    "08": (True, "SOURCE_UNREACHABLE", "check hostname and port"),
    "58": (True, "SOURCE_IO", "look into the server's log"),
}


def classify(sqlstate: str, message: str, doing: str) -> HeadwaterError:
    """The error for a SQLSTATE; what is not known is definite, because retrying it for ever would hide it."""
    transient, code, hint = _STATES.get(sqlstate) or _STATES.get(sqlstate[:2]) or (False, "SOURCE_FAILED", "")
    kind = TransientError if transient else SourceError
    return kind(code, f"{doing}: {masked(message)}", detail=f"SQLSTATE {sqlstate}" if sqlstate else "", hint=hint)


def protocol_error(what: str) -> TransientError:
    """Bytes that no Postgres sends: the connection is made again, and what was to be read is read again."""
    return TransientError(
        "SOURCE_PROTOCOL",
        f"the server's answer cannot be understood: {what}",
        hint="it is asked again by a new connection; if that stays so, look at what stands between us and the server",
    )


def is_permission_error(error: psycopg.Error) -> bool:
    return isinstance(error, pg_errors.InsufficientPrivilege)
