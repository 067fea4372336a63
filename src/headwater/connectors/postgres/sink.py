"""The Postgres sink: tasks COPY into a staging table, one transaction merges it and moves the progress row.

    headwater_progress(sink PRIMARY KEY, epoch, generation)   in the target's schema; its row lock orders everything
    _headwater_<sink>_<attempt>                               unlogged staging: target's columns, _hw_op, _hw_attempt

Exactly once: the merge, the progress and the drop of the staging table are one transaction. A Spark task may run
twice, so each row of the staging table carries the attempt that copied it, and the merge takes only the attempts that
Spark reported as successful. `last_committed` locks the progress row: a commit that is still running on the server
(its connection lost) is waited for, so after it has said "not there" nothing can land any more. Statement texts and
encodings are in `sink_sql.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import sql

from headwater.connectors.postgres import sink_sql as texts
from headwater.errors import DefiniteError, HeadwaterError, IndeterminateError, TransientError
from headwater.model.schema import OP, Column
from headwater.sink import tls
from headwater.sink.base import LOGIN_HINT, UNREACHABLE_HINT, BaseSink
from headwater.sink.dead_letters import letters_of
from headwater.sink.names import RENAME, refuse_long
from headwater.sink.options import Option, SinkOptions
from headwater.sink.sink import Progress, Token, Verdict, fenced, judge_progress

OPTIONS: Final = (
    Option("hostname", default="localhost"),
    Option("port", int, default=5432),
    Option("username", required=True),
    Option("password", secret=True),
    Option("database.name", required=True),
    Option("schema.name", default="public"),
    Option("table.name", required=True),
    Option("create_table_if_not_exists", bool, default=True),
    *tls.OPTIONS,
    Option("max_connections", int, default=16),  # parallel COPYs; a server's own limit is 100 by default
)
CONNECT_TIMEOUT_S: Final = 10
# Longer than any merge of a batch of the default size; a dead peer is noticed by keep-alives before that.
STATEMENT_TIMEOUT_MS: Final = 3_600_000
ANALYZE_FROM_ROWS: Final = 10_000
MERGE_FROM_VERSION: Final = 150000
COLLATIONS_FROM_VERSION: Final = 120000  # that may be nondeterministic
NAME_BYTES: Final = 63  # the server cuts off what is longer, and then does not find it
ABORT_WAIT_S: Final = 10  # tasks of a cancelled job end in that time; a dropped sink has no later `prepare` to clean up
PREDECESSOR_WAIT_S: Final = 15  # how long a claim lets a commit that is under way finish
LOCKED: Final = "55P03"
_CERTIFICATES: Final = (("sslrootcert", "ssl.root.cert"), ("sslcert", "ssl.cert"), ("sslkey", "ssl.key"))
_NAMES: Final = frozenset({"42701", "42602", "42622", "42939"})  # a column twice, or named like one of the server's own
# Without a SQLSTATE the client itself refused; only lost connections may pass.
_CLIENT_SAYS_NO: Final = (psycopg.ProgrammingError, psycopg.NotSupportedError, psycopg.DataError)
_NO_TLS: Final = ("certificate", "does not support ssl", "private key", "ssl error: tlsv", "ssl error: ssl")


class PostgresSink(BaseSink):
    """Upserts or appends into one table."""

    takes_rows = True

    def __init__(
        self, name: str, options: SinkOptions, columns: Sequence[Column], key: Sequence[str], generation: int
    ) -> None:
        super().__init__(name, options, columns, key, generation)
        self.schema = options.text("schema.name")
        self.table = options.text("table.name")
        self.names = texts.Names(name, self.schema, self.table, self.column_names, self.key)
        self._connection: psycopg.Connection[Any] | None = None
        self._session = f"headwater sink {self.names.digest}"

    def validate(self, columns: Sequence[Column], key: Sequence[str]) -> None:
        for what, names in (("schema", [self.schema]), ("table", [self.table]), ("column", self.column_names)):
            refuse_long(what, names, NAME_BYTES)
        tls.warn_if_open(f"sink {self.name}", self.options.text("hostname"), self.options.text("ssl.mode"))
        with self._transaction() as cursor:
            found = self._target_columns(cursor)
            if not found:
                self._create_target(cursor)
                return
            self._check_key(cursor)
        missing = [c for c in self.column_names if c not in found]
        if missing:
            raise self.target_changed(f"has no column {', '.join(missing)}")

    def claim(self) -> None:
        try:
            self._claim()
        except TransientError as error:
            if LOCKED not in error.detail:
                raise
            self._end_predecessor()
            self._claim()

    def _claim(self) -> None:
        with self._transaction() as cursor:
            cursor.execute(self.names.create_progress())
            cursor.execute(self.names.insert_progress(), (self.name, self.generation))
            cursor.execute(f"SET LOCAL lock_timeout = '{PREDECESSOR_WAIT_S}s'")
            stored = self._lock_progress(cursor)
            if stored is not None and stored.generation > self.generation:
                raise fenced(self.name)
            cursor.execute(self.names.claim_progress(), (self.generation, self.name))

    def _end_predecessor(self) -> None:
        """An engine that was stopped in the middle of its commit, or whose machine is gone, still holds the row; the
        server would notice in hours. Its session is ended: the commit has landed or never will.
        """
        with self._transaction() as cursor:
            cursor.execute(texts.END_SESSIONS, (self._session, self.schema, texts.PROGRESS))

    def prepare(self, from_epoch: int, to_epoch: int) -> Token:
        token = self.token(from_epoch, to_epoch)
        stage = self.names.stage(token.attempt)
        with self._transaction() as cursor:
            stored = self._lock_progress(cursor)
            if stored is not None and stored.generation > self.generation:
                raise fenced(self.name)
            for stale in self._stale_stages(cursor):
                self._drop(cursor, stale)
            cursor.execute(self.names.create_stage(stage))
            self._copy_constraints(cursor, stage)
            arrays = [n for n, category in self._target_columns(cursor).items() if category == "A"]
        return token.written(rows=0, stage=stage, arrays=arrays)

    def write(self, token: Token, batch: Any) -> Token:
        from headwater.connectors.postgres.sink_task import copy_task
        from headwater.spark.sink import run_tasks

        task = copy_task(
            sink=self.name,
            connect=connector(self.options),
            statement=self.names.copy_stage(token.payload["stage"], upsert=self.upsert),
            columns=(*self.column_names, OP) if self.upsert else self.column_names,
            arrays=frozenset(token.payload["arrays"]),
            dead_letters=self.dead_letter_prefix(token),
        )
        results = run_tasks(batch, task, at_most=int(self.options["max_connections"]))
        done = [r for r in results if r["rows"]]
        return token.written(
            rows=self.rows_of(done),
            bytes=sum(r["bytes"] for r in done),
            attempts=[r["attempt"] for r in done],
            **letters_of(results),
        )

    def commit(self, token: Token) -> None:
        stage = token.payload["stage"]
        connection = self._connect()
        try:
            with self._translated(), connection.cursor() as cursor:
                verdict = judge_progress(self._lock_progress(cursor), token)
                if verdict is Verdict.APPLY:
                    self._merge(cursor, stage, token)
                    cursor.execute(self.names.move_progress(), (token.to_epoch, token.generation, self.name))
                cursor.execute(self.names.drop(stage))
        except HeadwaterError:
            self._roll_back()
            raise
        self._commit_now(connection)

    def last_committed(self) -> int | None:
        with self._transaction() as cursor:
            cursor.execute("SELECT to_regclass($1)", (self.names.progress_text(),))
            row = cursor.fetchone()
            stored = self._lock_progress(cursor) if row and row[0] is not None else None
        return stored.epoch if stored is not None else None

    def reset(self, to_epoch: int | None) -> None:
        with self._transaction() as cursor:
            stored = self._lock_progress(cursor)
            if stored is not None and stored.generation > self.generation:
                raise fenced(self.name)
            cursor.execute(self.names.move_progress(), (to_epoch, self.generation, self.name))

    def abort(self, token: Token) -> None:
        with self._transaction() as cursor:
            self._drop(cursor, token.payload["stage"], wait_s=ABORT_WAIT_S)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _merge(self, cursor: psycopg.Cursor[Any], stage: str, token: Token) -> None:
        attempts = [list(token.payload["attempts"])]

        def run(*statements: Any) -> None:
            for statement in statements:
                cursor.execute(statement, attempts)

        if not self.upsert:
            run(self.names.append(stage))
            return
        if token.rows >= ANALYZE_FROM_ROWS:
            cursor.execute(self.names.analyze(stage))
        if any(c.nullable for c in self.columns if c.name in self.key):
            run(self.names.prepare_null_keys(stage))
        if not self._has_unique_key(cursor):
            run(*self.names.replace(stage))
        elif cursor.connection.info.server_version < MERGE_FROM_VERSION:
            run(*self.names.upsert(stage))
        else:
            try:
                with cursor.connection.transaction():
                    run(self.names.merge(stage))
            except psycopg.errors.UniqueViolation:
                run(*self.names.upsert(stage))

    def _has_unique_key(self, cursor: psycopg.Cursor[Any]) -> bool:
        cursor.execute(texts.UNIQUE_KEYS, (self.schema, self.table))
        return any(set(row[0]) == set(self.key) for row in cursor.fetchall()) and bool(self.key)

    def _check_key(self, cursor: psycopg.Cursor[Any]) -> None:
        """A target that takes two keys as one would lose the row of one of them."""
        if not self.upsert or cursor.connection.info.server_version < COLLATIONS_FROM_VERSION:
            return
        cursor.execute(texts.INEXACT, (self.schema, self.table, list(self.key)))
        if found := [str(row[0]) for row in cursor.fetchall()]:
            hint = "change the column to text with a deterministic collation, or let the sink create the table"
            raise self.target_changed(f"takes different texts as one in its key column {found[0]}", hint=hint)

    def _target_columns(self, cursor: psycopg.Cursor[Any]) -> dict[str, str]:
        cursor.execute(texts.COLUMNS, (self.schema, self.table))
        return {str(name): str(category) for name, category in cursor.fetchall()}

    def _create_target(self, cursor: psycopg.Cursor[Any]) -> None:
        if not self.options["create_table_if_not_exists"]:
            raise DefiniteError(
                "SINK_TARGET_MISSING",
                f"table {self.schema}.{self.table} does not exist",
                hint="create it, or add create_table_if_not_exists='true'",
            )
        cursor.execute("SELECT 1 FROM pg_namespace WHERE nspname = $1", (self.schema,))
        if cursor.fetchone() is None:  # IF NOT EXISTS would want the right to create one in any case
            cursor.execute(self.names.create_schema())
        version = cursor.connection.info.server_version
        for statement in self.names.create_target(self.columns, version, keyed=self.upsert):
            cursor.execute(statement)

    def _copy_constraints(self, cursor: psycopg.Cursor[Any], stage: str) -> None:
        """With dead letters on, staging refuses what the target would: so the task finds the row, not the merge."""
        if self.options["dead_letters.path"] is None:
            return
        cursor.execute(texts.CHECKS, (self.schema, self.table, list(self.column_names)))
        for (condition,) in cursor.fetchall():
            cursor.execute(self.names.add_check(stage, str(condition), upsert=self.upsert))

    def _lock_progress(self, cursor: psycopg.Cursor[Any]) -> Progress | None:
        cursor.execute(self.names.lock_progress(), (self.name,))
        row = cursor.fetchone()
        return Progress(row[0], row[1]) if row is not None else None

    def _stale_stages(self, cursor: psycopg.Cursor[Any]) -> list[str]:
        cursor.execute(texts.TABLES_LIKE, (self.schema, self.names.stage("").replace("_", r"\_") + "%"))
        return [str(row[0]) for row in cursor.fetchall()]

    def _drop(self, cursor: psycopg.Cursor[Any], stage: str, *, wait_s: int = 1) -> None:
        """Drop a staging table unless a task that was given up still writes to it; then the next `prepare` will."""
        try:
            with cursor.connection.transaction():
                cursor.execute(f"SET LOCAL lock_timeout = '{wait_s}s'")
                cursor.execute(self.names.drop(stage))
        except psycopg.errors.LockNotAvailable:
            return

    def _connect(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            with self._translated():
                self._connection = connector(self.options, self._session)()
        return self._connection

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Cursor[Any]]:
        """One transaction that may be repeated without harm; its lost commit counts as a lost connection."""
        connection = self._connect()
        try:
            with self._translated(), connection.cursor() as cursor:
                yield cursor
                connection.commit()
        except BaseException:
            self._roll_back()
            raise

    def _commit_now(self, connection: psycopg.Connection[Any]) -> None:
        try:
            connection.commit()
        except psycopg.Error as error:
            self._roll_back()
            if error.sqlstate is not None and not error.sqlstate.startswith(("08", "57")):
                raise translate(error, self.name) from None
            raise IndeterminateError(
                "SINK_COMMIT_UNKNOWN", f"the connection of sink {self.name} was lost while committing"
            ) from None

    def _roll_back(self) -> None:
        if self._connection is None:
            return
        try:
            self._connection.rollback()
        except psycopg.Error:
            self.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise translate(error, self.name) from None


def connector(options: SinkOptions, session: str = "headwater sink") -> Callable[[], psycopg.Connection[Any]]:
    """A function that connects; it resolves the password where it is called, also inside a Spark task."""

    def connect() -> psycopg.Connection[Any]:
        certificates: dict[str, Any] = {name: options[option] for name, option in _CERTIFICATES if options[option]}
        return psycopg.connect(
            host=options.text("hostname"),
            port=options["port"],
            user=options.text("username"),
            password=options.reveal("password"),
            dbname=options.text("database.name"),
            sslmode=options.text("ssl.mode"),
            **certificates,
            # No client-side placeholders: they would be looked for inside of names too.
            cursor_factory=psycopg.RawCursor,
            application_name=session,
            connect_timeout=CONNECT_TIMEOUT_S,
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
            options=f"-c TimeZone=UTC -c DateStyle=ISO -c statement_timeout={STATEMENT_TIMEOUT_MS}",
        )

    return connect


def translate(error: psycopg.Error, sink: str) -> HeadwaterError:
    """A client error as one of ours. The server's message text is left out: it may quote a row."""
    state = error.sqlstate or ""
    diag = error.diag
    where = ", ".join(f"{k} {v}" for k, v in (("column", diag.column_name), ("constraint", diag.constraint_name)) if v)
    detail = ", ".join(t for t in (f"SQLSTATE {state}" if state else type(error).__name__, where) if t)
    if state.startswith(("22", "23")) or (not state and isinstance(error, psycopg.DataError)):
        return DefiniteError(
            "SINK_ROW_REFUSED",
            f"the target of sink {sink} refuses a row",
            detail=detail,
            hint="compare the target's types and constraints with the sink's columns",
        )
    if state in ("42P01", "42703", "42804", "3F000"):
        return DefiniteError(
            "SINK_TARGET_MISMATCH",
            f"the target of sink {sink} no longer fits",
            detail=detail,
            hint="change the target back, or drop the sink and create it again",
        )
    if state == "42501":
        hint = "it needs USAGE and CREATE on the target's schema (staging and progress are tables beside the target)"
        hint += ", and SELECT, INSERT, UPDATE and DELETE on the target"
        message = f"sink {sink} lacks a privilege in its target"
        return DefiniteError("SINK_NOT_ALLOWED", message, detail=detail, hint=hint)
    if state in _NAMES:
        message = f"the target of sink {sink} cannot have a name that the sink asks for"
        return DefiniteError("SINK_NAME_REFUSED", message, detail=detail, hint=RENAME)
    if not state and isinstance(error, _CLIENT_SAYS_NO):
        return DefiniteError("SINK_FAILED", f"the client of sink {sink} refuses a statement", detail=detail)
    said = str(error).lower()
    if state.startswith("28") or "authentication" in said or "no pg_hba.conf entry" in said:
        return TransientError(
            "SINK_LOGIN_REFUSED", f"the target of sink {sink} refuses the login", detail=detail, hint=LOGIN_HINT
        )
    if not state and (why := next((w for w in _NO_TLS if w in said), "")):
        return tls.failed(
            sink, "the server offers no TLS" if "support" in why else "its certificate, or ours, is refused"
        )
    if not state or state.startswith(("08", "40", "53", "55", "57", "3D")):
        return TransientError(
            "SINK_UNREACHABLE", f"the target of sink {sink} cannot be used now", detail=detail, hint=UNREACHABLE_HINT
        )
    return DefiniteError("SINK_FAILED", f"the target of sink {sink} refuses a statement", detail=detail)


__all__ = ["OPTIONS", "PostgresSink", "connector", "sql", "translate"]
