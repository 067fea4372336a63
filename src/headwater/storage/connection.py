"""Connecting to the meta store's database, and what its errors mean to Headwater."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from headwater.errors import DefiniteError, HeadwaterError, TransientError, UsageError

CONNECT_TIMEOUT_S: Final = 10


def connect(url: str) -> sa.Engine:
    try:
        if not url.startswith("sqlite"):
            timeout = {"connect_timeout": CONNECT_TIMEOUT_S} if url.startswith("postgresql") else {}
            return sa.create_engine(url, pool_pre_ping=True, connect_args=timeout)
        engine = sa.create_engine(url, connect_args={"timeout": 30, "check_same_thread": False})
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


def meta_error(error: SQLAlchemyError) -> HeadwaterError:
    text = str(getattr(error, "orig", None) or error).splitlines()[0]
    hint = "check that the disk has room and that the meta store is readable and writable"
    if "disk is full" in text.lower() or "no space" in text.lower():
        return TransientError("DISK_FULL", "the meta store cannot be written: the disk is full", hint="free some space")
    if "malformed" in text or "not a database" in text or "corrupt" in text:
        return DefiniteError(
            "META_STORE_BROKEN", "the meta store is damaged", detail=text, hint="restore meta.db from a backup"
        )
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    if lost or isinstance(error, OperationalError | PoolTimeout):
        return TransientError("META_STORE_UNAVAILABLE", "the meta store does not answer", detail=text, hint=hint)
    return DefiniteError("META_STORE_ERROR", "the meta store refused a statement", detail=text, hint=hint)
