"""Connecting to the meta store's database, and what its errors mean to Headwater."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from headwater.errors import DefiniteError, HeadwaterError, TransientError, UsageError
from headwater.storage.holders import lock_holder

CONNECT_TIMEOUT_S: Final = 10
BUSY_S: Final = 30  # how long SQLite waits for a lock
LOCK_NOT_AVAILABLE: Final = "55P03"  # Postgres: not within lock_timeout


def connect(url: str) -> sa.Engine:
    try:
        if not url.startswith("sqlite"):
            timeout = {"connect_timeout": CONNECT_TIMEOUT_S} if url.startswith("postgresql") else {}
            return sa.create_engine(url, pool_pre_ping=True, connect_args=timeout)
        engine = sa.create_engine(url, connect_args={"timeout": BUSY_S, "check_same_thread": False})
    except (SQLAlchemyError, ImportError) as error:
        raise UsageError(
            "META_STORE_URL",
            f"the meta store's URL cannot be used: {type(error).__name__}",
            hint="sqlite or postgresql",
        ) from error
    sa.event.listen(engine, "connect", _sqlite_pragmas)
    sa.event.listen(engine, "begin", _sqlite_begin)
    return engine


def _sqlite_pragmas(connection: Any, _record: Any) -> None:
    # SQLAlchemy begins transactions itself (below), so that a reader sees one snapshot and a writer locks at once.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _sqlite_begin(connection: sa.Connection) -> None:
    # A writer locks at once: a read transaction that turns into a write one can fail half-way ("database is locked").
    immediate = connection.get_execution_options().get("immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def meta_error(error: SQLAlchemyError, engine: sa.Engine | None = None) -> HeadwaterError:
    """What an error of the database means; `engine` to find out who holds a lock."""
    text = str(getattr(error, "orig", None) or error).splitlines()[0]
    hint = "check that the disk has room and that the meta store is readable and writable"
    if "disk is full" in text.lower() or "no space" in text.lower():
        return TransientError("DISK_FULL", "the meta store cannot be written: the disk is full", hint="free some space")
    if is_locked(error):
        return _locked(engine)
    if "malformed" in text or "not a database" in text or "corrupt" in text:
        return DefiniteError(
            "META_STORE_BROKEN", "the meta store is damaged", detail=text, hint="restore meta.db from a backup"
        )
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    if lost or isinstance(error, OperationalError | PoolTimeout):
        return TransientError("META_STORE_UNAVAILABLE", "the meta store does not answer", detail=text, hint=hint)
    return DefiniteError("META_STORE_ERROR", "the meta store refused a statement", detail=text, hint=hint)


def is_locked(error: SQLAlchemyError) -> bool:
    """Whether a lock was not to be had in time: the statement that wanted it has done nothing."""
    original = getattr(error, "orig", None)
    return "database is locked" in str(original) or getattr(original, "sqlstate", "") == LOCK_NOT_AVAILABLE


def _locked(engine: sa.Engine | None) -> TransientError:
    """The database is well, and somebody else has not let go of it for longer than anything of ours takes."""
    holder, hint = "", "end whoever else uses the meta store; it is tried again"
    if engine is not None and engine.dialect.name == "sqlite":
        file = engine.url.database or ""
        found = lock_holder(*(Path(f"{file}{end}") for end in ("-shm", "", "-wal")))
        if found is not None:
            way = f"kill -CONT {found.pid} lets it go on, kill {found.pid} ends it" if found.stopped else hint
            holder, hint = str(found), way
    elif engine is not None:
        holder, hint = _holding_session(engine) or (holder, hint)
    return TransientError("META_STORE_LOCKED", "the meta store is locked by somebody else", detail=holder, hint=hint)


def _holding_session(engine: sa.Engine) -> tuple[str, str] | None:
    """The oldest session of the server that has touched our table of owners and has not ended its transaction."""
    try:
        with engine.connect() as db:
            row = db.exec_driver_sql(_HOLDING).first()
    except SQLAlchemyError:
        return None
    if row is None:
        return None
    session = f"session {row.pid} of the server" + (f" ({row.application_name})" if row.application_name else "")
    return f"{session}, {row.state}", f"it ends by SELECT pg_terminate_backend({row.pid}); it is tried again"


_HOLDING: Final = """
SELECT a.pid, a.application_name, a.state FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE l.granted AND l.mode <> 'AccessShareLock'
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (l.relation = to_regclass('owner') OR l.locktype = 'advisory') AND a.pid <> pg_backend_pid()
  AND a.wait_event_type IS DISTINCT FROM 'Lock'
ORDER BY a.xact_start LIMIT 1"""
