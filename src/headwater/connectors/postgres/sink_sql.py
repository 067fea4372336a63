"""The statements of the Postgres sink, as texts. `sink.py` runs them and says why they are right together.

Parameters are the server's own (`$1`), and the cursors raw: a name in a statement may hold any character, `%` and
`{}` too, because no client looks for placeholders in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from psycopg import sql
from psycopg.sql import SQL, Composed, Identifier

from headwater.model.schema import OP_DELETE, OP_UPSERT, Column
from headwater.model.types import arrow_type

PROGRESS: Final = "headwater_progress"
STAGE_OP: Final = "_hw_op"
STAGE_ATTEMPT: Final = "_hw_attempt"

COLUMNS: Final = """
SELECT a.attname, t.typcategory
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_type t ON t.oid = a.atttypid
WHERE n.nspname = $1 AND c.relname = $2 AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"""

UNIQUE_KEYS: Final = """
SELECT (SELECT array_agg(a.attname::text) FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum = ANY (i.indkey))
FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relname = $2 AND i.indisunique AND i.indisvalid AND i.indimmediate
  AND i.indpred IS NULL AND i.indexprs IS NULL"""

# Columns that take texts of different characters as equal.
INEXACT: Final = """
SELECT a.attname
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_collation l ON l.oid = a.attcollation
WHERE n.nspname = $1 AND c.relname = $2 AND a.attname = ANY ($3)
  AND (t.typname = 'citext' OR NOT l.collisdeterministic)"""

# Conditions on columns of the sink alone, as expressions; another column has its default where we insert.
CHECKS: Final = """
WITH target AS (
  SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  WHERE n.nspname = $1 AND c.relname = $2
)
SELECT pg_get_expr(k.conbin, k.conrelid) FROM pg_constraint k JOIN target t ON t.oid = k.conrelid
WHERE k.contype = 'c' AND NOT EXISTS (
  SELECT 1 FROM pg_attribute a WHERE a.attrelid = k.conrelid AND a.attnum = ANY (k.conkey)
    AND NOT a.attname = ANY ($3))
UNION ALL
SELECT format('%I IS NOT NULL', a.attname) FROM pg_attribute a JOIN target t ON t.oid = a.attrelid
WHERE a.attnotnull AND a.attnum > 0 AND a.attname = ANY ($3)"""

TABLES_LIKE: Final = """
SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relkind = 'r' AND c.relname LIKE $2"""

# Sessions of one sink that hold a lock on its progress table; those of tasks and of other sinks have other names.
END_SESSIONS: Final = """
SELECT pg_terminate_backend(a.pid)
FROM pg_stat_activity a JOIN pg_locks l ON l.pid = a.pid
JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE a.application_name = $1 AND a.pid <> pg_backend_pid() AND a.usename = current_user
  AND n.nspname = $2 AND c.relname = $3 AND l.granted"""

_TYPES: Final[dict[pa.DataType, str]] = {
    pa.bool_(): "boolean",
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.string(): "text",
    pa.binary(): "bytea",
    pa.date32(): "date",
    pa.timestamp("us"): "timestamp",
    pa.timestamp("us", tz="UTC"): "timestamptz",
    pa.null(): "text",
}


def column_type(ddl: str) -> str:
    """The Postgres type for a Spark DDL type: structs and maps become jsonb, and so do arrays of them."""
    return _type_of(arrow_type(ddl))


def _type_of(kind: pa.DataType) -> str:
    if kind in _TYPES:
        return _TYPES[kind]
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    if pa.types.is_list(kind):
        inner = _type_of(kind.value_type)
        # An array of arrays has the type of its innermost elements.
        return inner if inner.endswith("[]") or inner == "jsonb" else f"{inner}[]"
    return "jsonb"


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one sink in its target, and the statements over them."""

    sink: str
    schema: str
    table: str
    columns: tuple[str, ...]
    key: tuple[str, ...]

    @property
    def target(self) -> Identifier:
        return Identifier(self.schema, self.table)

    @property
    def progress(self) -> Identifier:
        return Identifier(self.schema, PROGRESS)

    def progress_text(self) -> str:
        """The table as `to_regclass` wants it."""
        return self.progress.as_string(None)

    def stage(self, attempt: str) -> str:
        """A name of at most 63 bytes: the sink's digest, so that no sink drops the staging of another, and the
        attempt.
        """
        return f"_headwater_{self.digest}_{attempt[:24]}"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.sink.encode()).hexdigest()[:16]

    def create_schema(self) -> Composed:
        return SQL("CREATE SCHEMA IF NOT EXISTS {}").format(Identifier(self.schema))

    def create_target(self, columns: Sequence[Column], server_version: int, *, keyed: bool) -> list[Composed]:
        """The target, `keyed` by the sink key: an append-only one has a row for every version of a key. Where a key
        column may be NULL, NULL counts as a value (from version 15 on).
        """
        parts: list[Composed] = []
        for column in columns:
            strict = SQL(" NOT NULL") if column.name in self.key and not column.nullable else SQL("")
            kind = SQL(column_type(column.type))  # from a closed list, not from the user
            parts.append(SQL("{} {}{}").format(Identifier(column.name), kind, strict))
        if self.key and keyed:
            nullable = any(c.nullable for c in columns if c.name in self.key)
            kind = SQL("UNIQUE") if nullable else SQL("PRIMARY KEY")
            if nullable and server_version >= 150000:
                kind = SQL("UNIQUE NULLS NOT DISTINCT")
            parts.append(SQL("{} ({})").format(kind, _list(self.key)))
        return [SQL("CREATE TABLE {} ({})").format(self.target, SQL(", ").join(parts))]

    def create_progress(self) -> Composed:
        return SQL(
            "CREATE TABLE IF NOT EXISTS {} (sink text PRIMARY KEY, epoch bigint, generation bigint NOT NULL,"
            " committed_at timestamptz NOT NULL DEFAULT now())"
        ).format(self.progress)

    def insert_progress(self) -> Composed:
        return SQL("INSERT INTO {} (sink, generation) VALUES ($1, $2) ON CONFLICT DO NOTHING").format(self.progress)

    def lock_progress(self) -> Composed:
        return SQL("SELECT epoch, generation FROM {} WHERE sink = $1 FOR UPDATE").format(self.progress)

    def claim_progress(self) -> Composed:
        return SQL("UPDATE {} SET generation = $1 WHERE sink = $2").format(self.progress)

    def move_progress(self) -> Composed:
        return SQL("UPDATE {} SET epoch = $1, generation = $2, committed_at = now() WHERE sink = $3").format(
            self.progress
        )

    def create_stage(self, stage: str) -> Composed:
        return SQL(
            "CREATE UNLOGGED TABLE {} AS SELECT {}, 1::smallint AS {}, 0::bigint AS {} FROM {} WITH NO DATA"
        ).format(
            Identifier(self.schema, stage),
            _list(self.columns),
            Identifier(STAGE_OP),
            Identifier(STAGE_ATTEMPT),
            self.target,
        )

    def add_check(self, stage: str, condition: str, *, upsert: bool) -> Composed:
        """A condition of the target, as the server itself spells it; a delete has only its key."""
        if not upsert:
            return SQL("ALTER TABLE {} ADD CHECK ({})").format(Identifier(self.schema, stage), SQL(condition))
        return SQL("ALTER TABLE {} ADD CHECK ({} = {} OR ({}))").format(
            Identifier(self.schema, stage), Identifier(STAGE_OP), sql.Literal(OP_DELETE), SQL(condition)
        )

    def copy_stage(self, stage: str, *, upsert: bool) -> str:
        """An append-only batch needs no `_hw_op`: all its rows are new."""
        columns = _list((*self.columns, *((STAGE_OP,) if upsert else ()), STAGE_ATTEMPT))
        statement = SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(Identifier(self.schema, stage), columns)
        return statement.as_string(None)

    def analyze(self, stage: str) -> Composed:
        return SQL("ANALYZE {}").format(Identifier(self.schema, stage))

    def drop(self, stage: str) -> Composed:
        return SQL("DROP TABLE IF EXISTS {}").format(Identifier(self.schema, stage))

    def append(self, stage: str) -> Composed:
        return self._insert(stage, SQL("true"), SQL(""))

    def prepare_null_keys(self, stage: str) -> Composed:
        """Before `merge` and `upsert`, which find a key by `=`: rows whose key has a NULL are few, and are deleted."""
        same = SQL(" AND ").join(
            SQL("t.{} IS NOT DISTINCT FROM s.{}").format(Identifier(k), Identifier(k)) for k in self.key
        )
        has_null = SQL(" OR ").join(SQL("s.{} IS NULL").format(Identifier(k)) for k in self.key)
        return self._delete_where(stage, same, SQL("({})").format(has_null))

    def merge(self, stage: str) -> Composed:
        """From version 15 on: twice as fast as ON CONFLICT. Another's insert of the same key meanwhile fails it."""
        others = [c for c in self.columns if c not in self.key]
        sets = [SQL("{} = s.{}").format(Identifier(c), Identifier(c)) for c in others]
        return SQL(
            "MERGE INTO {} t USING (SELECT * FROM {} WHERE {} = ANY($1)) s ON {}"
            " WHEN MATCHED AND s.{} = {} THEN DELETE WHEN MATCHED THEN {}"
            " WHEN NOT MATCHED AND s.{} = {} THEN INSERT ({}) OVERRIDING SYSTEM VALUE VALUES ({})"
        ).format(
            self.target,
            Identifier(self.schema, stage),
            Identifier(STAGE_ATTEMPT),
            self._same_key(),
            Identifier(STAGE_OP),
            sql.Literal(OP_DELETE),
            SQL("UPDATE SET {}").format(SQL(", ").join(sets)) if sets else SQL("DO NOTHING"),
            Identifier(STAGE_OP),
            sql.Literal(OP_UPSERT),
            _list(self.columns),
            SQL(", ").join(SQL("s.{}").format(Identifier(c)) for c in self.columns),
        )

    def upsert(self, stage: str) -> list[Composed]:
        """The same for older servers, and where others write to the target too."""
        deleted = SQL("s.{} = {}").format(Identifier(STAGE_OP), sql.Literal(OP_DELETE))
        return [self._delete(stage, deleted), self._insert(stage, self._live(), self._on_conflict())]

    def replace(self, stage: str) -> list[Composed]:
        """Where the target has no unique key over the sink key: rows are deleted before they come again."""
        return [self._delete(stage, SQL("true")), self._insert(stage, self._live(), SQL(""))]

    def _live(self) -> Composed:
        return SQL("s.{} = {}").format(Identifier(STAGE_OP), sql.Literal(OP_UPSERT))

    def _on_conflict(self) -> Composed:
        others = [c for c in self.columns if c not in self.key]
        sets = [SQL("{} = EXCLUDED.{}").format(Identifier(c), Identifier(c)) for c in others]
        action = SQL("DO UPDATE SET {}").format(SQL(", ").join(sets)) if sets else SQL("DO NOTHING")
        return SQL(" ON CONFLICT ({}) {}").format(_list(self.key), action)

    def _insert(self, stage: str, condition: Composed | SQL, conflict: Composed | SQL) -> Composed:
        columns = _list(self.columns)
        return SQL(
            "INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM {} s WHERE {} AND s.{} = ANY($1){}"
        ).format(
            self.target,
            columns,
            columns,
            Identifier(self.schema, stage),
            condition,
            Identifier(STAGE_ATTEMPT),
            conflict,
        )

    def _delete(self, stage: str, condition: Composed | SQL) -> Composed:
        return self._delete_where(stage, self._same_key(), condition)

    def _same_key(self) -> Composed:
        return SQL(" AND ").join(SQL("t.{} = s.{}").format(Identifier(k), Identifier(k)) for k in self.key)

    def _delete_where(self, stage: str, same: Composed, condition: Composed | SQL) -> Composed:
        return SQL("DELETE FROM {} t USING {} s WHERE {} AND {} AND s.{} = ANY($1)").format(
            self.target, Identifier(self.schema, stage), same, condition, Identifier(STAGE_ATTEMPT)
        )


def _list(names: Sequence[str]) -> Composed:
    return SQL(", ").join(Identifier(n) for n in names)
