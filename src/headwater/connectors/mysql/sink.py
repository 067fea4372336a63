"""The MySQL and MariaDB sink: tasks insert into a staging table, one transaction merges it and moves the progress row.

    headwater_progress(sink PRIMARY KEY, epoch, generation)   in the target's database; its row lock orders everything
    _headwater_<sink>_<attempt>                               staging (InnoDB): target's columns, _hw_op, _hw_attempt

The same scheme as the Postgres sink, with three differences. A DDL statement commits implicitly, so the staging table
is made before and dropped after the merging transaction, never in it. Bulk loading is by multi-row INSERT, because
LOAD DATA LOCAL is off on most servers. And there is no ON CONFLICT with a chosen key: rows of the batch's keys are
deleted, then inserted, in the one transaction; a reader of any isolation level but READ UNCOMMITTED sees both or
none.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pymysql.connections import Connection
from pymysql.constants import CLIENT
from pymysql.err import DataError, IntegrityError, MySQLError, NotSupportedError, OperationalError, ProgrammingError

from headwater.errors import DefiniteError, HeadwaterError, IndeterminateError, TransientError
from headwater.model.schema import OP, OP_UPSERT, Column
from headwater.model.types import arrow_type
from headwater.sink import tls
from headwater.sink.base import LOGIN_HINT, UNREACHABLE_HINT, BaseSink
from headwater.sink.dead_letters import DeadLetters, letters_of
from headwater.sink.names import RENAME, name_refused, refuse_long
from headwater.sink.options import Option, SinkOptions
from headwater.sink.sink import Progress, Token, Verdict, fenced, judge_progress

OPTIONS: Final = (
    Option("hostname", default="localhost"),
    Option("port", int, default=3306),
    Option("username", required=True),
    Option("password", secret=True),
    Option("database.name", required=True),
    Option("table.name", required=True),
    Option("create_table_if_not_exists", bool, default=True),
    *tls.OPTIONS,
    Option("max_connections", int, default=16),  # parallel loads; a server's own limit is 151 by default
)
ROWS_PER_INSERT: Final = 1_000  # with usual rows well below max_allowed_packet (16 MB), and few enough statements
CONNECT_TIMEOUT_S: Final = 10
PROGRESS: Final = "headwater_progress"
NAME_CHARACTERS: Final = 64
# Collations by which two texts are equal only if their characters are: MariaDB's, MySQL's. The others of the name
# `…_bin` do not look at trailing spaces: 'a' and 'a ' would be one key.
EXACT: Final = ("utf8mb4_nopad_bin", "utf8mb4_0900_bin")
KEY_TEXT: Final = "VARCHAR(255)"  # a text in a key must have a bound; 255 four-byte characters fit into an index

_TYPES: Final[dict[pa.DataType, str]] = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "LONGTEXT",
    pa.binary(): "LONGBLOB",
    pa.date32(): "DATE",
    pa.timestamp("us"): "DATETIME(6)",
    pa.timestamp("us", tz="UTC"): "DATETIME(6)",
    pa.null(): "LONGTEXT",
}
_MISMATCH: Final = frozenset({1054, 1146, 1136, 1049})
_REFUSED: Final = frozenset({1264, 1265, 1366, 1406, 1292, 1048, 1062, 1452, 3819, 4025, 1364})
_LOGIN: Final = frozenset({1044, 1045, 1698, 1227, 1142})
_NAMES: Final = frozenset({1059, 1060, 1102, 1103, 1166, 1280, 1300})
_TOO_LONG_KEY: Final = 1071
_DUPLICATE: Final = 1062
_NO_TLS: Final = 2026  # the client's own number


class MySqlSink(BaseSink):
    """Upserts or appends into one table. Instants are stored in UTC."""

    takes_rows = True

    def __init__(
        self, name: str, options: SinkOptions, columns: Sequence[Column], key: Sequence[str], generation: int
    ) -> None:
        super().__init__(name, options, columns, key, generation)
        self.table = _quote(options.text("table.name"))
        self._digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        self._connection: Any = None

    def validate(self, columns: Sequence[Column], key: Sequence[str]) -> None:
        refuse_names("table", [self.options.text("table.name")])
        refuse_names("column", self.column_names)
        tls.warn_if_open(f"sink {self.name}", self.options.text("hostname"), self.options.text("ssl.mode"))
        with self._transaction() as cursor:
            found = self._target_columns(cursor)
            if not found:
                self._create_target(cursor)
                return
        if missing := [c for c in self.column_names if c.lower() not in found]:
            raise self.target_changed(f"has no column {', '.join(missing)}")

    def claim(self) -> None:
        with self._transaction() as cursor:
            self._progress_table(cursor)
            cursor.execute(
                f"INSERT INTO {PROGRESS} (sink, generation) VALUES (%s, %s) ON DUPLICATE KEY UPDATE sink = sink",
                (self.name, self.generation),
            )
            self._check_owner(cursor)
            cursor.execute(f"UPDATE {PROGRESS} SET generation = %s WHERE sink = %s", (self.generation, self.name))

    def _progress_table(self, cursor: Any) -> None:
        """Make it, or give the column of an older one the character set and the exactness that names need."""
        text = f"VARCHAR(255) CHARACTER SET utf8mb4 COLLATE {self._collation(cursor) or 'utf8mb4_bin'}"
        cursor.execute(
            f"CREATE TABLE IF NOT EXISTS {PROGRESS} (sink {text} PRIMARY KEY, epoch BIGINT,"
            " generation BIGINT NOT NULL, committed_at TIMESTAMP NULL) ENGINE=InnoDB"
        )
        cursor.execute(
            "SELECT collation_name FROM information_schema.columns"
            " WHERE table_schema = DATABASE() AND table_name = %s AND column_name = 'sink'",
            (PROGRESS,),
        )
        if text.split()[-1] not in [row[0] for row in cursor.fetchall()]:
            cursor.execute(f"ALTER TABLE {PROGRESS} MODIFY sink {text} NOT NULL")

    def _collation(self, cursor: Any) -> str:
        """The server's collation that is exact, or nothing."""
        marks = ", ".join(["%s"] * len(EXACT))
        cursor.execute(
            f"SELECT collation_name FROM information_schema.collations WHERE collation_name IN ({marks})", EXACT
        )
        found = [str(row[0]) for row in cursor.fetchall()]
        return next((c for c in EXACT if c in found), "")

    def prepare(self, from_epoch: int, to_epoch: int) -> Token:
        token = self.token(from_epoch, to_epoch)
        stage = f"_headwater_{self._digest}_{token.attempt[:24]}"
        with self._transaction() as cursor:
            self._check_owner(cursor)
        with self._transaction() as cursor:
            for stale in self._stages(cursor):
                self._drop(cursor, stale)
            columns = ", ".join(_quote(c) for c in self.column_names)
            cursor.execute(
                f"CREATE TABLE {_quote(stage)} ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4"
                f" AS SELECT {columns}, 1 AS _hw_op,"
                f" CAST(0 AS SIGNED) AS _hw_attempt FROM {self.table} LIMIT 0"
            )
            self._relax(cursor, stage)
        return token.written(rows=0, stage=stage)

    def write(self, token: Token, batch: Any) -> Token:
        from headwater.spark.sink import run_tasks

        letters = self.dead_letter_prefix(token)
        task = insert_task(self.name, connector(self.options), token.payload["stage"], self.column_names, letters)
        results = run_tasks(batch, task, at_most=int(self.options["max_connections"]))
        attempts = [r["attempt"] for r in results if r["rows"]]
        return token.written(rows=self.rows_of(results), attempts=attempts, **letters_of(results))

    def commit(self, token: Token) -> None:
        connection = self._connect()
        try:
            with translated(self.name), connection.cursor() as cursor:
                if judge_progress(self._lock_progress(cursor), token) is Verdict.APPLY:
                    self._merge(cursor, token)
                    cursor.execute(
                        f"UPDATE {PROGRESS} SET epoch = %s, generation = %s, committed_at = CURRENT_TIMESTAMP"
                        " WHERE sink = %s",
                        (token.to_epoch, token.generation, self.name),
                    )
        except HeadwaterError:
            self._roll_back()
            raise
        self._commit_now(connection)
        with contextlib.suppress(HeadwaterError), self._transaction() as cursor:
            self._drop(cursor, token.payload["stage"])

    def last_committed(self) -> int | None:
        with self._transaction() as cursor:
            cursor.execute("SHOW TABLES LIKE %s", (PROGRESS,))
            stored = self._lock_progress(cursor) if cursor.fetchone() else None
        return stored.epoch if stored is not None else None

    def reset(self, to_epoch: int | None) -> None:
        with self._transaction() as cursor:
            self._check_owner(cursor)
            cursor.execute(f"UPDATE {PROGRESS} SET epoch = %s WHERE sink = %s", (to_epoch, self.name))

    def abort(self, token: Token) -> None:
        with self._transaction() as cursor:
            self._drop(cursor, token.payload["stage"])

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(MySQLError):
                connection.close()

    def _merge(self, cursor: Any, token: Token) -> None:
        attempts = [int(a) for a in token.payload["attempts"]]
        if not attempts:
            return
        stage = _quote(token.payload["stage"])
        chosen = f"s._hw_attempt IN ({', '.join(map(str, attempts))})"
        if self.upsert:
            same = " AND ".join(self._same(c) for c in self.columns if c.name in self.key)
            cursor.execute(f"DELETE t FROM {self.table} t JOIN {stage} s ON {same} WHERE {chosen}")
        columns = ", ".join(_quote(c) for c in self.column_names)
        cursor.execute(
            f"INSERT INTO {self.table} ({columns}) SELECT {columns} FROM {stage} s"
            f" WHERE s._hw_op = {OP_UPSERT} AND {chosen}"
        )

    def _same(self, column: Column) -> str:
        """Whether a row of the target has the key of a staged one. `<=>` is equality that also finds NULL.

        A target of the user's own may take 'a', 'A' and 'a ' as one key. For us they are three: the row of one must
        not go because another comes. The target's unique key then refuses the second, and says so.
        """
        name = _quote(column.name)
        same = f"t.{name} <=> s.{name}"
        if arrow_type(column.type) == pa.string():
            same += f" AND CAST(t.{name} AS BINARY) <=> CAST(s.{name} AS BINARY)"
        return same

    def _relax(self, cursor: Any, stage: str) -> None:
        """Staged deletes have only their key: the other columns must take NULL. A column keeps its character set."""
        cursor.execute(
            "SELECT column_name, column_type, character_set_name, collation_name FROM information_schema.columns"
            " WHERE table_schema = DATABASE() AND table_name = %s AND is_nullable = 'NO'",
            (stage,),
        )
        strict = [row for row in cursor.fetchall() if row[0] not in ("_hw_op", "_hw_attempt")]
        sets = [
            f"CHARACTER SET {charset} COLLATE {collation}" if charset else "" for _, _, charset, collation in strict
        ]
        changes = [f"MODIFY {_quote(row[0])} {row[1]} {text} NULL" for row, text in zip(strict, sets, strict=True)]
        if self.options["dead_letters.path"] is not None:
            # So the task finds the row that the target would refuse, not the merge.
            changes += [f"ADD CHECK (_hw_op <> {OP_UPSERT} OR {_quote(row[0])} IS NOT NULL)" for row in strict]
        if changes:
            cursor.execute(f"ALTER TABLE {_quote(stage)} {', '.join(changes)}")

    def _target_columns(self, cursor: Any) -> set[str]:
        cursor.execute(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = %s",
            (self.options.text("table.name"),),
        )
        return {str(row[0]).lower() for row in cursor.fetchall()}

    def _create_target(self, cursor: Any) -> None:
        if not self.options["create_table_if_not_exists"]:
            raise DefiniteError("SINK_TARGET_MISSING", f"the table of sink {self.name} does not exist")
        parts = [self._definition(c) for c in self.columns]
        if self.key and self.upsert:  # an append-only target has a row for every version of a key
            nullable = any(c.nullable for c in self.columns if c.name in self.key)
            kind = "UNIQUE KEY" if nullable else "PRIMARY KEY"
            parts.append(f"{kind} ({', '.join(_quote(k) for k in self.key)})")
        collation = self._collation(cursor)
        if not collation and self.upsert and any(c.name in self.key and c.type == "STRING" for c in self.columns):
            raise DefiniteError(
                "SINK_TARGET_MISMATCH",
                f"the server of sink {self.name} has no collation that tells keys with trailing spaces apart",
                hint="use MySQL 8 or MariaDB 10.2 or later, or make the table yourself, with VARBINARY in its key",
            )
        options = f"ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE {collation or 'utf8mb4_bin'}"
        cursor.execute(f"CREATE TABLE {self.table} ({', '.join(parts)}) {options}")

    def _definition(self, column: Column) -> str:
        kind = column_type(column.type)
        if column.name in self.key and self.upsert:
            kind = {"LONGTEXT": KEY_TEXT, "LONGBLOB": "VARBINARY(255)"}.get(kind, kind)
        strict = " NOT NULL" if column.name in self.key and not column.nullable else " NULL"
        return f"{_quote(column.name)} {kind}{strict}"

    def _lock_progress(self, cursor: Any) -> Progress | None:
        cursor.execute(f"SELECT epoch, generation FROM {PROGRESS} WHERE sink = %s FOR UPDATE", (self.name,))
        row = cursor.fetchone()
        return Progress(row[0], row[1]) if row is not None else None

    def _check_owner(self, cursor: Any) -> None:
        stored = self._lock_progress(cursor)
        if stored is not None and stored.generation > self.generation:
            raise fenced(self.name)

    def _stages(self, cursor: Any) -> list[str]:
        cursor.execute("SHOW TABLES LIKE %s", (f"_headwater_{self._digest}_%".replace("_", r"\_"),))
        return [str(row[0]) for row in cursor.fetchall()]

    def _drop(self, cursor: Any, stage: str) -> None:
        """Drop a staging table unless a task that was given up still writes to it; then the next `prepare` will."""
        cursor.execute("SET SESSION lock_wait_timeout = 1")
        try:
            cursor.execute(f"DROP TABLE IF EXISTS {_quote(stage)}")
        except MySQLError as error:
            if error.args[0] != 1205:
                raise
        finally:
            cursor.execute("SET SESSION lock_wait_timeout = 3600")

    def _connect(self) -> Any:
        if self._connection is None:
            with translated(self.name):
                self._connection = connector(self.options)()
        return self._connection

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Any]:
        """One transaction that may be repeated without harm; its lost commit counts as a lost connection."""
        connection = self._connect()
        try:
            with translated(self.name), connection.cursor() as cursor:
                yield cursor
                connection.commit()
        except BaseException:
            self._roll_back()
            raise

    def _commit_now(self, connection: Any) -> None:
        try:
            connection.commit()
        except (MySQLError, OSError):
            self.close()
            message = f"the connection of sink {self.name} was lost while committing"
            raise IndeterminateError("SINK_COMMIT_UNKNOWN", message) from None

    def _roll_back(self) -> None:
        if self._connection is None:
            return
        try:
            self._connection.rollback()
        except (MySQLError, OSError):
            self.close()


class _Checked(Connection):  # type: ignore[misc]
    """A connection that goes no further than the server's greeting where TLS is required and not offered."""

    def _request_authentication(self) -> None:
        if self.ssl and not self.server_capabilities & CLIENT.SSL:
            raise OperationalError(_NO_TLS, "the server offers no TLS")
        super()._request_authentication()


def connector(options: SinkOptions) -> Callable[[], Any]:
    """A function that connects; it resolves the password where it is called, also inside a Spark task."""

    def connect() -> Any:
        try:
            connection = _connect(options, tls.context(options))
        except OperationalError as error:
            if options.text("ssl.mode") not in tls.OPTIONAL or not _no_tls(error):
                raise
            connection = _connect(options, None)
        with connection.cursor() as cursor:
            # The default would lock gaps of the target for the length of a merge.
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        return connection

    return connect


def _connect(options: SinkOptions, context: ssl.SSLContext | None) -> Any:
    return _Checked(
        host=options.text("hostname"),
        port=options["port"],
        user=options.text("username"),
        password=(options.reveal("password") or "").encode(),  # of a text the client takes latin1 alone
        database=options.text("database.name"),
        charset="utf8mb4",
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=3600,
        init_command="SET time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'",
        ssl=context,
        ssl_disabled=context is None,
    )


def _no_tls(error: Exception) -> bool:
    """Whether TLS was not offered, or could not be agreed on. (Some releases of the client say which, some wrap it.)"""
    return _number(error) == _NO_TLS or isinstance(getattr(error, "original_exception", error), ssl.SSLError)


def insert_task(
    sink: str, connect: Callable[[], Any], stage: str, columns: Sequence[str], letters: str | None
) -> Callable[[Iterator[Any], Any], dict[str, Any]]:
    """The task for `run_tasks`: all its rows in one transaction, by multi-row INSERT."""
    names = [*columns, OP]

    def task(batches: Iterator[Any], info: Any) -> dict[str, Any]:
        insert = _Insert(stage, names, int(info.attempt), DeadLetters(letters, info))
        connection: Any = None
        with translated(sink), contextlib.ExitStack() as stack:
            for batch in batches:
                if batch.num_rows == 0:
                    continue
                if connection is None:
                    connection = stack.enter_context(connect())
                for start in range(0, batch.num_rows, ROWS_PER_INSERT):
                    insert.rows_of(connection, batch.slice(start, ROWS_PER_INSERT).select(names))
            if connection is not None:
                connection.commit()
        return {"rows": insert.rows, **insert.dead.save()}

    return task


@dataclass(slots=True)
class _Insert:
    """Inserts batches and counts. With dead letters on, a refused batch is halved until the refused rows are found."""

    stage: str
    names: Sequence[str]
    attempt: int
    dead: DeadLetters
    rows: int = 0

    def rows_of(self, connection: Any, batch: Any) -> None:
        try:
            self._insert(connection, batch)
            self.rows += batch.num_rows
        except MySQLError as error:
            # A statement that failed has left nothing; the transaction goes on.
            if not self.dead.wanted or not _refused(error):
                raise
            if batch.num_rows == 1:
                self.dead.add(batch)
                return
            half = batch.num_rows // 2
            self.rows_of(connection, batch.slice(0, half))
            self.rows_of(connection, batch.slice(half))

    def _insert(self, connection: Any, batch: Any) -> None:
        # Values are put in by the client, which takes every `%` of the text for a place of theirs.
        targets = ", ".join(_quote(n).replace("%", "%%") if n != OP else "_hw_op" for n in self.names)
        marks = f"({', '.join(['%s'] * len(self.names))}, {self.attempt})"
        columns = [_values(batch.column(i)) for i in range(batch.num_columns)]
        values = ", ".join([marks] * batch.num_rows)
        statement = f"INSERT INTO {_quote(self.stage)} ({targets}, _hw_attempt) VALUES {values}"
        with connection.cursor() as cursor:
            cursor.execute(statement, [value for row in zip(*columns, strict=True) for value in row])


def _values(array: Any) -> list[Any]:
    """A column as what the client library escapes: numbers and bytes as they are, everything else as text."""
    import pyarrow.compute as pc

    from headwater.sink.encode import flat, json_text, plain_text, timestamp_text

    kind = array.type
    if pa.types.is_nested(kind):
        array = flat(array)
        values: list[Any] = pc.if_else(array.is_valid(), json_text(array), None).to_pylist()
    elif pa.types.is_timestamp(kind):
        local = flat(array).cast(pa.timestamp("us", kind.tz)).cast(pa.int64()).cast(pa.timestamp("us"))
        values = timestamp_text(local, separator=" ").to_pylist()
    elif pa.types.is_decimal(kind) or pa.types.is_date(kind):
        values = plain_text(array).to_pylist()
    else:
        values = array.to_pylist()
    if pa.types.is_floating(kind):
        # As a text the server refuses it like any value that does not fit; the client library would refuse the batch.
        values = [v if v is None or math.isfinite(v) else str(v) for v in values]
    return values


def column_type(ddl: str) -> str:
    """The MySQL type for a Spark DDL type; what is nested becomes JSON."""
    kind = arrow_type(ddl)
    if kind in _TYPES:
        return _TYPES[kind]
    if pa.types.is_decimal(kind):
        return f"DECIMAL({kind.precision},{min(kind.scale, 30)})"
    return "JSON"


@contextlib.contextmanager
def translated(sink: str) -> Iterator[None]:
    """Client errors as ours. The server's message text is left out: it may quote a row."""
    try:
        yield
    except (MySQLError, OSError) as error:
        raise _translate(error, sink) from None


def _translate(error: Exception, sink: str) -> HeadwaterError:
    number = _number(error)
    detail = f"error {number}" if number else type(error).__name__
    if isinstance(error, ssl.SSLError) or _no_tls(error):
        offered = _number(error) != _NO_TLS
        return tls.failed(sink, "its certificate, or ours, is refused" if offered else "the server offers no TLS")
    if number in _NAMES:
        message = f"the target of sink {sink} cannot have a name that the sink asks for"
        return DefiniteError("SINK_NAME_REFUSED", message, detail=detail, hint=RENAME)
    if number == _TOO_LONG_KEY:
        message = f"the key of sink {sink} is too long for an index of its target"
        return DefiniteError("SINK_TARGET_MISMATCH", message, detail=detail, hint="make the table yourself")
    if number == _DUPLICATE:
        hint = "the target takes two keys as one (a collation that ignores case, accents or trailing spaces), or has"
        hint += f" another unique key: ALTER TABLE … CONVERT TO CHARACTER SET utf8mb4 COLLATE {EXACT[0]} ({EXACT[1]})"
        return DefiniteError("SINK_ROW_REFUSED", f"the target of sink {sink} refuses a row", detail=detail, hint=hint)
    if _refused(error):
        hint = "compare the target's types and constraints with the sink's columns"
        return DefiniteError("SINK_ROW_REFUSED", f"the target of sink {sink} refuses a row", detail=detail, hint=hint)
    if number in _MISMATCH:
        hint = "change the target back, or drop the sink and create it again"
        return DefiniteError(
            "SINK_TARGET_MISMATCH", f"the target of sink {sink} no longer fits", detail=detail, hint=hint
        )
    if number in _LOGIN:
        return TransientError(
            "SINK_LOGIN_REFUSED", f"the target of sink {sink} refuses the login", detail=detail, hint=LOGIN_HINT
        )
    if isinstance(error, ProgrammingError | NotSupportedError):
        return DefiniteError("SINK_FAILED", f"the target of sink {sink} refuses a statement", detail=detail)
    return TransientError(
        "SINK_UNREACHABLE", f"the target of sink {sink} cannot be used now", detail=detail, hint=UNREACHABLE_HINT
    )


def _number(error: Exception) -> int:
    return error.args[0] if error.args and isinstance(error.args[0], int) else 0


def _refused(error: Exception) -> bool:
    return _number(error) in _REFUSED or isinstance(error, DataError | IntegrityError)


def refuse_names(what: str, names: Sequence[str]) -> None:
    """What MySQL's identifiers cannot be."""
    refuse_long(what, names, 4 * NAME_CHARACTERS)
    for name in names:
        if len(name) > NAME_CHARACTERS:
            raise name_refused(what, name, f"it has {len(name)} characters, at most {NAME_CHARACTERS} are possible")
        if name[-1] in " \t\n\v\f\r":
            raise name_refused(what, name, "a name cannot end with white space")
        if any(ord(c) > 0xFFFF for c in name):
            raise name_refused(what, name, "a name can hold no character beyond U+FFFF")


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
