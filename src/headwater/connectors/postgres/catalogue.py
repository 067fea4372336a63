"""What the server's catalogue says about tables: columns, key, replica identity, size, whether we know its key order.

Types are decided in `types.py` (which also has the statement that lists columns); splits in `planner.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from headwater.connectors.postgres.client import translated
from headwater.connectors.postgres.types import COLUMNS_QUERY, PgColumn, pg_columns
from headwater.errors import UsageError

Connection = psycopg.Connection[Any]

# bool, bytea, int8, int2, int4, oid, date, time, timestamp, timestamptz, numeric, uuid: ordered by their values.
_ORDERED_TYPES: Final = frozenset({16, 17, 20, 21, 23, 26, 1082, 1083, 1114, 1184, 1700, 2950})
# text and varchar: by their bytes, if the collation says so. Not char(n): it ignores trailing spaces.
_TEXT_TYPES: Final = frozenset({25, 1043})
# Byte order in the server's encoding is byte order in UTF-8 for these.
_ENCODINGS: Final = frozenset({"UTF8", "LATIN1", "SQL_ASCII"})

FIRST_NORMAL_OID: Final = 16_384  # those below are the server's own: no publication takes them

_TABLE_QUERY: Final = """
SELECT c.oid::int8 AS oid, n.oid::int8 AS schema_oid, n.nspname::text AS schema, c.relname::text AS name,
       c.relkind::text AS relkind, c.relreplident::text AS replica_identity,
       c.reltuples::float8 AS reltuples, c.relpages::int8 AS relpages, c.relrowsecurity AS row_security,
       c.relhassubclass AS has_children,
       pg_get_userbyid(c.relowner)::text AS owner, pg_encoding_to_char(d.encoding)::text AS encoding,
       current_setting('block_size')::int AS block_size
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_database d ON d.datname = current_database()
 WHERE n.nspname = %s AND c.relname = %s
"""
_LIST_QUERY: Final = """
SELECT n.nspname::text, c.relname::text
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND NOT c.relispartition
   AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\\_toast%%'
   AND (%s::text IS NULL OR n.nspname = %s)
 ORDER BY 1, 2
"""
# A partitioned table has no pages of its own: its leaves have.
_SIZE_QUERY: Final = """
SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::float8 AS tuples, coalesce(sum(c.relpages), 0)::int8 AS pages,
       coalesce(sum(pg_relation_size(c.oid)), 0)::int8 AS heap_bytes, coalesce(max(pg_relation_size(c.oid)), 0)::int8
           AS largest_bytes, coalesce(sum(pg_table_size(c.oid)), 0)::int8 AS total_bytes,
       coalesce(bool_and(c.reltuples >= 0), false) AS analysed,
       min(c.oid::regclass::text) FILTER (WHERE c.relpersistence <> 'p') AS not_logged
  FROM pg_class c
 WHERE c.oid = %(oid)s AND c.relkind <> 'p'
    OR c.oid IN (SELECT relid FROM pg_partition_tree(%(oid)s::oid::regclass) WHERE isleaf)
"""
# A deferrable key is none: the server does not take it as the replica identity (publishing the table would make every
# UPDATE and DELETE of its users fail), and two rows may have it at once until their transaction ends.
_NAMES_QUERY: Final = """
SELECT named.oid::int8 AS named_oid, own_schema.nspname || '.' || own.relname AS name,
       own.relreplident::text AS replica_identity,
       coalesce((SELECT array_agg(a.attname::text ORDER BY k.place)
                   FROM (SELECT * FROM pg_index i
                          WHERE i.indrelid = t.oid AND i.indisvalid AND i.indimmediate
                            AND (i.indisprimary OR i.indisreplident AND own.relreplident = 'i')
                          ORDER BY i.indisprimary DESC LIMIT 1) i,
                        unnest(i.indkey::int2[]) WITH ORDINALITY k(attnum, place)
                   JOIN pg_attribute a ON a.attnum = k.attnum
                  WHERE a.attrelid = t.oid AND k.place <= i.indnkeyatts), '{}') AS key
  FROM unnest(%s::int8[], %s::text[], %s::text[]) WITH ORDINALITY t(oid, schema, name, place)
  LEFT JOIN pg_namespace n ON n.nspname = t.schema
  LEFT JOIN pg_class named ON named.relnamespace = n.oid AND named.relname = t.name AND named.relkind IN ('r', 'p')
  LEFT JOIN pg_class own ON own.oid = t.oid
  LEFT JOIN pg_namespace own_schema ON own_schema.oid = own.relnamespace
 ORDER BY t.place
"""
# Whether rows lie in the order of the key, by the last ANALYZE: in that of its first column, which tells most of them
# apart (a negative number of distinct values is a share of the rows, a tenth at least).
_INDEX_QUERY: Final = """
SELECT i.indisprimary AS primary, i.indisreplident AS identity,
       (SELECT array_agg(a.attname::text ORDER BY k.place)
          FROM unnest(i.indkey::int2[]) WITH ORDINALITY k(attnum, place)
          JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
         WHERE k.place <= i.indnkeyatts) AS columns,
       (SELECT s.correlation >= 0.999 AND s.n_distinct < 0
          FROM pg_stats s JOIN pg_attribute a ON a.attname = s.attname
         WHERE (s.schemaname, s.tablename) = (%(schema)s, %(name)s) AND NOT s.inherited
           AND a.attrelid = i.indrelid AND a.attnum = i.indkey[0]) AS in_order
  FROM pg_index i
 WHERE i.indrelid = %(oid)s AND i.indisvalid AND i.indimmediate AND (i.indisprimary OR i.indisreplident)
"""


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table as the server describes it. `rows` is an estimate for the present size, -1 if there are no statistics."""

    schema: str
    name: str
    oid: int
    schema_oid: int
    relkind: str
    columns: tuple[PgColumn, ...]
    key: tuple[str, ...]
    replica_identity: str
    identity_columns: tuple[str, ...]
    rows: int
    pages: int
    largest_pages: int
    size_bytes: int
    ordered_key: bool
    row_security: bool
    owner: str
    has_children: bool = False
    in_key_order: bool = False
    """Rows lie in the table in the order of their keys, but for very few; an estimate."""

    @property
    def partitioned(self) -> bool:
        return self.relkind == "p"

    @property
    def qualified(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def identifier(self) -> sql.Composable:
        """The table's name for a statement that changes it."""
        return sql.Identifier(self.schema, self.name)

    @property
    def published_as(self) -> sql.Composable:
        """For a publication: without tables that inherit from it. They do not inherit the key, so that once they are
        published every UPDATE and DELETE of them would fail."""
        return self.from_clause if self.has_children else self.identifier

    @property
    def from_clause(self) -> sql.Composable:
        """For reading: without tables that inherit from it, since the stream has them under their own name."""
        return self.identifier if self.partitioned else sql.SQL("ONLY {}").format(self.identifier)

    @property
    def names_rows(self) -> bool:
        """An update or delete in the stream says which row of ours it is about: by the key, or by the whole row."""
        if not self.key:
            return self.replica_identity == "f"
        return set(self.key) <= set(self.identity_columns)

    def column(self, name: str) -> PgColumn:
        return next(c for c in self.columns if c.name == name)


def split_name(text: str, default_schema: str) -> tuple[str, str]:
    """`schema.table`, each part quoted or not as in SQL; without a schema the default one."""
    parts, part, quoted, at = [], "", False, 0
    while at < len(text):
        char = text[at]
        if char == '"' and quoted and text[at + 1 : at + 2] == '"':
            part, at = part + '"', at + 1
        elif char == '"':
            quoted = not quoted
        elif char == "." and not quoted:
            parts.append(part)
            part = ""
        else:
            part += char
        at += 1
    parts.append(part)
    if quoted or not all(parts) or len(parts) > 2:
        raise UsageError(
            "INVALID_TABLE_NAME", "a table is named as schema.table", hint='quote parts as in SQL: "a.b".c'
        )
    return (parts[0], parts[1]) if len(parts) == 2 else (default_schema, parts[0])


def list_tables(conn: Connection, schema: str | None = None) -> list[tuple[str, str]]:
    """(schema, name) of every permanent table; a partitioned one as a whole, without its parts."""
    with translated("listing tables"):
        return [(s, n) for s, n in conn.execute(_LIST_QUERY, (schema, schema))]


@dataclass(frozen=True, slots=True)
class Present:
    """What has become of a captured table: the number of the one that has its name; its own name, identity and key."""

    named_oid: int | None
    name: str | None
    replica_identity: str | None
    key: list[str]


def present(conn: Connection, tables: Sequence[tuple[int, str, str]]) -> list[Present]:
    """For each table (number, schema, name) what has become of it."""
    oids, schemas, names = zip(*tables, strict=True)
    with translated("looking at the tables' names"):
        return [Present(*row) for row in conn.execute(_NAMES_QUERY, (list(oids), list(schemas), list(names)))]


def describe(conn: Connection, schema: str, name: str) -> TableInfo:
    """Everything about one table; UsageError if there is none of that name, or it is none that can be followed."""
    with translated(f"describing {schema}.{name}"), conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(_TABLE_QUERY, (schema, name)).fetchone()
        if row is None:
            raise UsageError(
                "SOURCE_TABLE_NOT_FOUND",
                f"there is no table {schema}.{name} in the source",
                hint="check the name and its upper and lower case",
            )
        if row["relkind"] not in ("r", "p"):
            raise UsageError("SOURCE_NOT_A_TABLE", f"{schema}.{name} is a view, index or foreign table, not a table")
        if row["oid"] < FIRST_NORMAL_OID:
            raise UsageError("SOURCE_NOT_A_TABLE", f"{schema}.{name} is a table of the server itself, and not streamed")
        # By number: a name is looked up only in schemas that we may use, and `check` describes others too.
        columns = pg_columns(cursor.execute(COLUMNS_QUERY.encode(), (str(row["oid"]),)).fetchall())
        size = cursor.execute(_SIZE_QUERY, {"oid": row["oid"]}).fetchone() or {}
        indexes = cursor.execute(_INDEX_QUERY, row).fetchall()
    if size.get("not_logged"):
        raise UsageError(
            "SOURCE_TABLE_NOT_LOGGED",
            f"table {size['not_logged']} is unlogged or temporary: the server does not write its changes to its log",
            hint=f"run on the source: ALTER TABLE {size['not_logged']} SET LOGGED",
        )
    return _table_info(row, columns, size, indexes)


def _table_info(
    row: Mapping[str, Any], columns: tuple[PgColumn, ...], size: Mapping[str, Any], indexes: list[dict[str, Any]]
) -> TableInfo:
    primary = next((tuple(i["columns"]) for i in indexes if i["primary"]), ())
    chosen = next((tuple(i["columns"]) for i in indexes if i["identity"]), ())
    identity = {"d": primary, "i": chosen, "f": tuple(c.name for c in columns)}.get(row["replica_identity"], ())
    pages = size["heap_bytes"] // row["block_size"]
    # As the server's own planner does: rows per page from the last ANALYZE, times the pages of now.
    if size["analysed"] and size["pages"] > 0:
        rows = round(size["tuples"] / size["pages"] * pages)
    else:
        rows = 0 if pages == 0 else -1
    # A unique index that names rows in the stream is as good as a primary key: unique, and no column of it is NULL.
    key = primary or (chosen if row["replica_identity"] == "i" else ())
    columns = tuple(replace(c, key_position=key.index(c.name) if c.name in key else None) for c in columns)
    by_name = {c.name: c for c in columns}
    return TableInfo(
        schema=row["schema"],
        name=row["name"],
        oid=row["oid"],
        schema_oid=row["schema_oid"],
        relkind=row["relkind"],
        columns=columns,
        key=key,
        replica_identity=row["replica_identity"],
        identity_columns=identity,
        rows=rows,
        pages=pages,
        largest_pages=-(-size["largest_bytes"] // row["block_size"]),
        size_bytes=size["total_bytes"],
        ordered_key=bool(key) and all(has_known_order(by_name[k], row["encoding"]) for k in key),
        row_security=row["row_security"],
        owner=row["owner"],
        has_children=row["has_children"],
        in_key_order=any(i["in_order"] for i in indexes if tuple(i["columns"]) == key),
    )


def has_known_order(column: PgColumn, encoding: str = "UTF8") -> bool:
    """The server orders this column as we do: by value, or by bytes."""
    base = column
    while base.base is not None:
        base = base.base
    if base.type_oid in _TEXT_TYPES:
        return column.collation_reproducible and encoding in _ENCODINGS
    return base.type_oid in _ORDERED_TYPES
