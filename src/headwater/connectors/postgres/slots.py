"""What must exist on the server: the publication with our tables, the slot. Making, using and dropping them.

Order matters: the publication first, then the slot (a slot that decodes a change made before its publication existed
fails on older servers), then the entry mark, then the first read.

Entering the stream. A table's changes are in the stream from the moment it entered the publication, and those of all
tables from the slot's start. A transaction that was running at that moment may have written before it, and those events
never come; nor does every read see a transaction whose commit is already in the log. So after both exist we take a
transaction number of our own (`enter_stream`): every transaction that has written by then has a smaller one. The first
read waits until all smaller ones have ended and are visible (`entry_satisfied`): then what never comes by stream is in
the read, and the rest comes by stream. (A snapshot's xmax would not do as the mark: it is one past the last number that
has *ended*, so the newest running transactions lie above it.)
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import errors as pg_errors
from psycopg import sql
from psycopg.rows import dict_row

from headwater.connectors.postgres.catalogue import TableInfo
from headwater.connectors.postgres.client import PostgresConfig, parse_lsn, translated
from headwater.connectors.postgres.replication import publication_query
from headwater.errors import SourceError, TransientError, UsageError

Connection = psycopg.Connection[Any]

PLUGIN: Final = "pgoutput"
SLOT_WAIT_S: Final = 60  # for transactions that run while a slot is made, before it is given up with their names
DROP_WAIT_S: Final = 10.0  # until a slot's last connection is noticed to be gone
FREE_WAIT_S: Final = 5.0  # a reader that has just been ended is given so long to go
GENERATED_COLUMNS_SINCE: Final = 180_000  # publish_generated_columns

_PUBLICATION_QUERY: Final = """
SELECT oid::int8 AS oid, puballtables AS all_tables, pubviaroot AS via_root,
       pubinsert AND pubupdate AND pubdelete AND pubtruncate AS all_operations, pg_get_userbyid(pubowner) AS owner
  FROM pg_publication WHERE pubname = %s
"""
# The view shows what the stream will have: tables by name, by schema, or all; partitions under their root if so set.
_MEMBER_QUERY: Final = """
SELECT to_jsonb(t) ->> 'rowfilter' AS rowfilter,
       ARRAY(SELECT jsonb_array_elements_text(to_jsonb(t) -> 'attnames')) AS columns
  FROM pg_publication_tables t WHERE pubname = %s AND schemaname = %s AND tablename = %s
"""
# With publish_via_partition_root the stream has a partition's changes under the uppermost table that is published.
_ABOVE_QUERY: Final = """
SELECT n.nspname || '.' || c.relname
  FROM pg_publication_tables t JOIN pg_namespace n ON n.nspname = t.schemaname
  JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
  JOIN pg_publication p ON p.pubname = t.pubname AND p.pubviaroot
 WHERE t.pubname = %(publication)s AND c.oid <> %(oid)s
   AND c.oid IN (SELECT relid FROM pg_partition_ancestors(%(oid)s::oid::regclass))
"""
_WITHDRAWN_QUERY: Final = """
SELECT n.nspname::text, c.relname::text
  FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid JOIN pg_class c ON c.oid = r.prrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE p.pubname = %s AND c.oid = %s
   AND NOT EXISTS (SELECT FROM pg_replication_slots
                    WHERE database = current_database() AND plugin = %s AND slot_name <> %s)
"""
_HOLDER_QUERY: Final = """
SELECT s.active_pid, coalesce(a.usename, '')::text, coalesce(a.application_name, ''), coalesce(host(a.client_addr), '')
  FROM pg_replication_slots s LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid
 WHERE s.slot_name = %s AND s.active
"""
_BLOCKING_QUERY: Final = """
SELECT pid, coalesce(usename, '')::text AS username, coalesce(application_name, '') AS application,
       coalesce(state, '') AS state, extract(epoch FROM clock_timestamp() - xact_start)::float8 AS age_s
  FROM pg_stat_activity
 WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()
   AND ((backend_xid::text::int8 - %(low)s + 6442450944) %% 4294967296) - 2147483648 < 0
UNION ALL
SELECT NULL, owner::text, 'prepared transaction ' || gid, 'prepared',
       extract(epoch FROM clock_timestamp() - prepared)::float8
  FROM pg_prepared_xacts
 WHERE ((transaction::text::int8 - %(low)s + 6442450944) %% 4294967296) - 2147483648 < 0
 ORDER BY age_s DESC NULLS LAST
"""


@dataclass(frozen=True, slots=True)
class PublicationState:
    """`created`: we made the publication; `added`: we put the table into it. Only what we made is ours to drop."""

    created: bool
    added: bool


@dataclass(frozen=True, slots=True)
class SlotState:
    created: bool
    confirmed_lsn: int


@dataclass(frozen=True, slots=True)
class SlotHolder:
    """The session that reads from a slot at the moment. A role without rights sees of others only that they are."""

    pid: int
    username: str
    application: str
    address: str

    def __str__(self) -> str:
        told = [("user", self.username), ("application", self.application), ("from", self.address)]
        more = ", ".join(f"{what} {_printable(text)}" for what, text in told if text)
        return f"process {self.pid}" + (f" ({more})" if more else "")


def _printable(text: str) -> str:
    """Others choose their names: nothing in them may reach a terminal as more than text."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


@dataclass(frozen=True, slots=True)
class EntryMark:
    """A transaction number (64 bits) of our own, given out when the table was in the stream, and ended."""

    xid: int


@dataclass(frozen=True, slots=True)
class BlockingTransaction:
    """A transaction that a table's first read waits for."""

    pid: int | None
    username: str
    application: str
    state: str
    age_s: float

    def __str__(self) -> str:
        who = f"pid {self.pid}" if self.pid is not None else "no session"
        return f"{who} ({self.username}, {self.application or 'no application name'}, {self.state}, {self.age_s:.0f} s)"


# -- publication ---------------------------------------------------------------------------------------------------


def ensure_publication(conn: Connection, config: PostgresConfig, table: TableInfo) -> PublicationState:
    """See that all changes of the table are published; UsageError with the exact SQL where we may not do it."""
    with translated(f"publishing {table.qualified}"):
        require_identity(conn, table)
        publication = publication_of(conn, config.publication)
        if publication is None:
            require_sent_identity(conn, config, table)
            statement = create_publication_sql(conn, config.publication, table)
            _change(conn, config, statement, f"publication {config.publication} does not exist")
            return PublicationState(created=True, added=True)
        require_complete(conn, config, table, publication)
        if publishes(conn, config.publication, table):
            return PublicationState(created=False, added=False)
        require_own_name(conn, config, table)
        require_sent_identity(conn, config, table)
        _change(
            conn,
            config,
            add_table_sql(conn, config.publication, table),
            f"table {table.qualified} is not in publication {config.publication}",
        )
        return PublicationState(created=False, added=True)


def publication_of(conn: Connection, name: str) -> dict[str, Any] | None:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(_PUBLICATION_QUERY, (name,)).fetchone()


def publishes(conn: Connection, publication: str, table: TableInfo) -> bool:
    """The table is in the publication, with all rows and the columns of its key; UsageError if only part of it is."""
    found = conn.execute(_MEMBER_QUERY, (publication, table.schema, table.name)).fetchone()
    if found is None:
        return False
    rowfilter, columns = found
    if rowfilter or (columns and not set(table.key) <= set(columns)):
        what = "only some rows" if rowfilter else "not all key columns"
        fix = _text(
            conn,
            "ALTER PUBLICATION {} DROP TABLE {}; ALTER PUBLICATION {} ADD TABLE {}",
            (publication, table.published_as, publication, table.published_as),
        )
        raise UsageError(
            "SOURCE_PUBLICATION_FILTERED",
            f"publication {publication} has {what} of {table.qualified}",
            hint=f"run on the source: {fix}",
        )
    return True


def streamed_columns(conn: Connection, publication: str, table: TableInfo) -> frozenset[str]:
    """The columns that the stream has, or will have once we have published the table.

    Generated columns are sent since version 18, if they are stored and the publication says so; before it the server
    lists them among the published columns and sends none of them.
    """
    sends = conn.info.server_version >= GENERATED_COLUMNS_SINCE
    with translated(f"looking at publication {publication}"):
        found = conn.execute(_MEMBER_QUERY, (publication, table.schema, table.name)).fetchone()
        if sends and found is None and publication_of(conn, publication) is not None:
            row = conn.execute(
                "SELECT pubgencols = 's' FROM pg_publication WHERE pubname = %s", (publication,)
            ).fetchone()
            sends = bool(row and row[0])
    listed = set(found[1]) if found is not None else set()
    columns = [c for c in table.columns if not c.virtual and (sends or not c.generated)]
    return frozenset(c.name for c in columns if not listed or c.name in listed)


def membership(conn: Connection, publication: str, table: TableInfo) -> str | None:
    """Which entry of the publication has the table, and under which options. A table taken out and put in again gets
    another one, and has missed changes meanwhile, as it may under other options: remember it with the table, and
    compare (`ReaderProcess.membership` follows it)."""
    return membership_of(conn, publication, table.oid, table.schema_oid)


def membership_of(conn: Connection, publication: str, table_oid: int, schema_oid: int) -> str | None:
    with translated(f"looking at publication {publication}"):
        row = conn.execute(publication_query(publication, conn.info.server_version).encode()).fetchone()
        return membership_token(json.loads(row[0]), table_oid, schema_oid) if row else None


def membership_token(content: Mapping[str, Any], table_oid: int, schema_oid: int) -> str | None:
    """From the content of a publication as `replication.publication_query` gives it."""
    publication = f"{content['oid']}.{content['version']}"
    if content["all"]:
        return f"{publication}/all"
    if entry := (content["tables"] or {}).get(str(table_oid)):
        return f"{publication}/t{entry}"
    if entry := (content["schemas"] or {}).get(str(schema_oid)):
        return f"{publication}/s{entry}"
    return None


def create_publication_sql(conn: Connection, name: str, table: TableInfo) -> str:
    extra = ", publish_generated_columns = stored" if conn.info.server_version >= GENERATED_COLUMNS_SINCE else ""
    return _text(
        conn, "CREATE PUBLICATION {} FOR TABLE {} WITH (publish_via_partition_root = true", (name, table.published_as)
    ) + (extra + ")")


def add_table_sql(conn: Connection, publication: str, table: TableInfo) -> str:
    return _text(conn, "ALTER PUBLICATION {} ADD TABLE {}", (publication, table.published_as))


def _text(conn: Connection, template: str, names: Sequence[str | sql.Composable]) -> str:
    parts = [sql.Identifier(n) if isinstance(n, str) else n for n in names]
    return sql.SQL(template).format(*parts).as_string(conn)


def _change(conn: Connection, config: PostgresConfig, statement: str, problem: str) -> None:
    if not config.create_publication:
        raise UsageError("SOURCE_PUBLICATION", problem, hint=f"run on the source: {statement}")
    try:
        conn.execute(statement.encode())
    except pg_errors.InsufficientPrivilege:
        hint = f"run on the source, as the owner of the table or a superuser: {statement}"
        raise UsageError("SOURCE_PERMISSION", f"{problem}, and we may not change that", hint=hint) from None
    except pg_errors.DuplicateObject:
        pass  # somebody did the same at the same moment


def require_identity(conn: Connection, table: TableInfo) -> None:
    """In a publication, a table without a replica identity refuses every UPDATE and DELETE of its users."""
    if table.names_rows:
        return
    if table.key:
        fix = _text(conn, "ALTER TABLE {} REPLICA IDENTITY DEFAULT", (table.identifier,))
        what, hint = "has a replica identity without its primary key", f"run on the source: {fix}"
    else:
        fix = _text(conn, "ALTER TABLE {} REPLICA IDENTITY FULL", (table.identifier,))
        what = (
            "has no primary key (a deferrable one is none) and no replica identity: "
            "its updates and deletes would not say which row they mean"
        )
        hint = f"run on the source: {fix}"
    raise UsageError("SOURCE_NO_REPLICA_IDENTITY", f"table {table.qualified} {what}", hint=hint)


def require_sent_identity(conn: Connection, config: PostgresConfig, table: TableInfo) -> None:
    """Since version 18 a table refuses every UPDATE and DELETE of its users while it is in a publication that does not
    send a generated column of its replica identity; of a virtual one none does. UsageError before we do that to them.
    """
    if conn.info.server_version < GENERATED_COLUMNS_SINCE:
        return
    sent = streamed_columns(conn, config.publication, table)
    unsent = [c for c in table.columns if c.generated and c.name in table.identity_columns and c.name not in sent]
    if not unsent:
        return
    if not any(c.virtual for c in unsent):
        template, names = "ALTER PUBLICATION {} SET (publish_generated_columns = stored)", [config.publication]
        hint = f"run on the source: {_text(conn, template, names)}"
    elif table.key:
        hint = f"run on the source: {_text(conn, 'ALTER TABLE {} REPLICA IDENTITY DEFAULT', [table.identifier])}"
    else:
        hint = "give the table a primary key and REPLICA IDENTITY DEFAULT, or make the column STORED"
    raise UsageError(
        "SOURCE_NO_REPLICA_IDENTITY",
        f"column {unsent[0].name} of table {table.qualified} is generated, part of its replica identity and not sent: "
        "once published, the table would refuse every update and delete",
        hint=hint,
    )


def require_complete(conn: Connection, config: PostgresConfig, table: TableInfo, publication: dict[str, Any]) -> None:
    """The publication sends every kind of change, and partitions under their root; UsageError with the SQL if not."""
    if not publication["all_operations"]:
        fix = _text(
            conn, "ALTER PUBLICATION {} SET (publish = 'insert, update, delete, truncate')", (config.publication,)
        )
        raise UsageError(
            "SOURCE_PUBLICATION",
            f"publication {config.publication} leaves out some kinds of change",
            hint=f"run on the source: {fix}",
        )
    if table.partitioned and not publication["via_root"]:
        fix = _text(conn, "ALTER PUBLICATION {} SET (publish_via_partition_root = true)", (config.publication,))
        raise UsageError(
            "SOURCE_PUBLICATION",
            f"publication {config.publication} has partitions under their own names",
            hint=f"run on the source: {fix}",
        )


def require_own_name(conn: Connection, config: PostgresConfig, table: TableInfo) -> None:
    """UsageError for a partition whose changes the publication sends under the name of a table above it."""
    found = conn.execute(_ABOVE_QUERY, {"oid": table.oid, "publication": config.publication}).fetchone()
    if found is not None:
        raise UsageError(
            "SOURCE_PUBLICATION",
            f"table {table.qualified} is a partition of {found[0]}, and publication {config.publication} has its "
            "changes under that name",
            hint=f"capture {found[0]}, or make a source with another publication.name for the partition",
        )


def remove_table(conn: Connection, config: PostgresConfig, table: TableInfo) -> None:
    """Take a table that we added out of the publication; nothing if it is not there any more."""
    with translated(f"unpublishing {table.qualified}"), contextlib.suppress(pg_errors.UndefinedObject):
        names = (config.publication, table.published_as)
        conn.execute(_text(conn, "ALTER PUBLICATION {} DROP TABLE {}", names).encode())


def withdraw_table(conn: Connection, config: PostgresConfig, oid: int) -> None:
    """Take a table that nobody here follows any more out of the publication, by its number: it may be renamed by now.

    Another slot of the database may read the same publication, and would miss changes: then it stays.
    """
    with translated(f"taking a table out of publication {config.publication}"):
        found = conn.execute(_WITHDRAWN_QUERY, (config.publication, oid, PLUGIN, config.slot)).fetchone()
        if found is not None:
            # Without tables that inherit from it: they are not in there, or are somebody else's.
            names = (config.publication, sql.Identifier(*found))
            conn.execute(_text(conn, "ALTER PUBLICATION {} DROP TABLE ONLY {}", names).encode())


def drop_publication(conn: Connection, config: PostgresConfig) -> None:
    """Drop a publication that we created (the caller remembers `PublicationState.created`)."""
    with translated(f"dropping publication {config.publication}"):
        conn.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(config.publication)))


# -- slot ----------------------------------------------------------------------------------------------------------


def ensure_slot(conn: Connection, config: PostgresConfig) -> SlotState:
    """The slot, made if need be. Making it waits until all transactions that write now have ended, or so long."""
    with translated(f"creating slot {config.slot}"):
        found = slot_row(conn, config.slot)
        if found is not None:
            return SlotState(created=False, confirmed_lsn=_usable(found, config))
        try:
            conn.execute(f"SET lock_timeout = '{SLOT_WAIT_S}s'".encode())
            row = conn.execute(
                "SELECT lsn::text FROM pg_create_logical_replication_slot(%s, %s)", (config.slot, PLUGIN)
            ).fetchone()
        except pg_errors.LockNotAvailable:
            open_ones = blocking_transactions(conn, enter_stream(conn))
            raise TransientError(
                "SOURCE_BUSY",
                f"slot {config.slot} cannot be made while older transactions are open"
                + (f": {open_ones[0]}" if open_ones else ""),
                hint="end them, or wait until they have ended, and try again",
            ) from None
        except pg_errors.InsufficientPrivilege:
            role = sql.Identifier(config.username).as_string(conn)
            hint = f"run on the source: ALTER ROLE {role} WITH REPLICATION"
            raise UsageError("SOURCE_PERMISSION", "we may not create a replication slot", hint=hint) from None
        except pg_errors.ConfigurationLimitExceeded:
            hint = "raise max_replication_slots and restart, or drop a slot that is not used"
            raise UsageError("SOURCE_NO_FREE_SLOT", "all replication slots are in use", hint=hint) from None
        except pg_errors.ObjectNotInPrerequisiteState:
            hint = "run on the source: ALTER SYSTEM SET wal_level = 'logical', then restart it"
            raise UsageError("SOURCE_WAL_LEVEL", "the server does not write a logical log", hint=hint) from None
        return SlotState(created=True, confirmed_lsn=parse_lsn(row[0]) if row else 0)


def advance_slot(conn: Connection, config: PostgresConfig) -> int:
    """Move the slot to the log's end without reading it; gives where it stands then. Nobody may be reading it."""
    deadline = time.monotonic() + DROP_WAIT_S
    with translated(f"moving slot {config.slot}"):
        while True:
            try:
                row = conn.execute(
                    "SELECT end_lsn::text FROM pg_replication_slot_advance(%s, pg_current_wal_insert_lsn())",
                    (config.slot,),
                ).fetchone()
                return parse_lsn(row[0]) if row else 0
            except pg_errors.ObjectInUse:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def slot_row(conn: Connection, slot: str) -> dict[str, Any] | None:
    """The slot's row in pg_replication_slots, with the columns that this version has."""
    row = conn.execute("SELECT to_jsonb(s) FROM pg_replication_slots s WHERE slot_name = %s", (slot,)).fetchone()
    return dict(row[0]) if row else None


def slot_holder(conn: Connection, slot: str) -> SlotHolder | None:
    row = conn.execute(_HOLDER_QUERY, (slot,)).fetchone()
    return SlotHolder(*row) if row else None


def require_free_slot(conn: Connection, config: PostgresConfig) -> None:
    """UsageError where somebody reads from the slot: for a source that is being made it is not ours yet."""
    deadline = time.monotonic() + FREE_WAIT_S
    with translated(f"looking at slot {config.slot}"):
        while (holder := slot_holder(conn, config.slot)) is not None:
            if time.monotonic() > deadline:
                raise UsageError("SOURCE_SLOT_IN_USE", in_use(config.slot, holder), hint=IN_USE_HINT)
            time.sleep(0.1)


def in_use(slot: str, holder: SlotHolder) -> str:
    return f"replication slot {slot} is in use by {holder}"


IN_USE_HINT: Final = (
    "choose another slot.name; if that process is a reader of ours that died, the server lets the slot go within "
    "wal_sender_timeout (60 s)"
)


def _usable(row: dict[str, Any], config: PostgresConfig) -> int:
    if row.get("plugin") != PLUGIN or row.get("database") != config.database or row.get("temporary"):
        raise UsageError(
            "SOURCE_SLOT_FOREIGN",
            f"replication slot {config.slot} exists and is not a pgoutput slot of database {config.database}",
            hint="choose another slot.name",
        )
    if row.get("wal_status") == "lost" or row.get("conflicting") or row.get("invalidation_reason"):
        hint = f"run on the source: SELECT pg_drop_replication_slot('{config.slot}')"
        raise SourceError("SOURCE_SLOT_LOST", f"replication slot {config.slot} was invalidated", hint=hint)
    return parse_lsn(row["confirmed_flush_lsn"])


def drop_slot(conn: Connection, config: PostgresConfig) -> None:
    """Drop a slot (whose it is, `SlotState.created`, the caller remembers); waits until its reader is gone."""
    deadline = time.monotonic() + DROP_WAIT_S
    with translated(f"dropping slot {config.slot}"):
        while True:
            try:
                conn.execute("SELECT pg_drop_replication_slot(%s)", (config.slot,))
                return
            except pg_errors.UndefinedObject:
                return
            except pg_errors.ObjectInUse:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


# -- entering the stream -------------------------------------------------------------------------------------------


def enter_stream(conn: Connection) -> EntryMark:
    """To be taken after the table is in the publication and the slot exists, each in a transaction that has ended."""
    with translated("entering the stream"):
        row = conn.execute("SELECT pg_current_xact_id()::text::int8").fetchone()
        return EntryMark(int(row[0]) if row else 0)


def entry_satisfied(conn: Connection, mark: EntryMark) -> bool:
    """Everything that ran at the mark has ended and is visible to a read that begins now.

    If nothing runs at all that is so whatever the numbers are: a server that crashed may have forgotten the mark's.
    """
    with translated("entering the stream"):
        row = conn.execute(
            "SELECT pg_snapshot_xmin(s)::text::int8, pg_snapshot_xmax(s)::text::int8 FROM pg_current_snapshot() s"
        ).fetchone()
        return row is not None and (int(row[0]) >= mark.xid or row[0] == row[1])


def blocking_transactions(conn: Connection, mark: EntryMark) -> list[BlockingTransaction]:
    """Whom the first read waits for, the oldest first; never what they execute."""
    with translated("entering the stream"):
        rows = conn.execute(_BLOCKING_QUERY.encode(), {"low": mark.xid % (1 << 32)}).fetchall()
        return [BlockingTransaction(pid, user, app, state, age or 0.0) for pid, user, app, state, age in rows]


def waiting_for(blocking: Sequence[BlockingTransaction]) -> str:
    """The text for hw_progress.waiting_for; empty if there is nobody."""
    if not blocking:
        return ""
    more = f" and {len(blocking) - 1} more" if len(blocking) > 1 else ""
    return f"a transaction that was open before the table was published: {blocking[0]}{more}"
