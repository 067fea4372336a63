"""`headwater check` for a Postgres source: everything that must be so, and the exact SQL for what is not.

Nothing is changed here; `slots.py` makes what is missing when a table is created.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql

from headwater.connectors.postgres import slots
from headwater.connectors.postgres.catalogue import TableInfo, describe, split_name
from headwater.connectors.postgres.client import (
    PostgresConfig,
    connect,
    may_be_read_by_others,
    reader_name,
    translated,
)
from headwater.errors import HeadwaterError, UsageError

Connection = psycopg.Connection[Any]
RUN: Final = "run on the source: "  # how the hint of an error begins that is a statement


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `sql_to_fix` is empty where all is well, or where SQL is not the remedy."""

    ok: bool
    what: str
    sql_to_fix: str = ""


def check_source(
    config: PostgresConfig, tables: Sequence[str] = (), *, exists: Callable[[], bool] = lambda: False
) -> list[Finding]:
    """Look at the server and the named tables (`schema.table`); a source that cannot be reached is one finding.

    `exists`: an engine of ours has this source, and may be reading from its slot now; asked only if somebody does.
    """
    try:
        conn = connect(config, application="headwater check")
    except HeadwaterError as error:
        return [Finding(False, f"{error}{f' ({error.hint})' if error.hint else ''}")]
    with conn, translated("checking the source"):
        findings = [Finding(True, f"Postgres {conn.info.server_version // 10_000} at {config.hostname}:{config.port}")]
        if warning := may_be_read_by_others(config):
            findings.append(Finding(True, f"but {warning}"))
        for check in (_wal_level, _replication_role, _free_slots, _free_senders):
            findings.append(check(conn, config))
        findings.append(_slot(conn, config, exists))
        publication = slots.publication_of(conn, config.publication)
        findings.append(_publication(conn, config, publication))
        for name in tables:
            findings += _table(conn, config, name, publication, exists=_made(findings) or publication is not None)
    return findings


def _made(findings: Sequence[Finding]) -> bool:
    """Whether whoever runs what was said so far has made the publication."""
    return any(f.sql_to_fix.startswith("CREATE PUBLICATION") for f in findings)


def _setting(conn: Connection, name: str) -> str:
    row = conn.execute("SELECT current_setting(%s)", (name,)).fetchone()
    return str(row[0]) if row else ""


def _number(conn: Connection, query: str) -> int:
    row = conn.execute(query.encode()).fetchone()
    return int(row[0]) if row else 0


def _wal_level(conn: Connection, config: PostgresConfig) -> Finding:
    level = _setting(conn, "wal_level")
    fix = "" if level == "logical" else "ALTER SYSTEM SET wal_level = 'logical'; -- then restart the server"
    return Finding(level == "logical", f"wal_level is {level}", fix)


def _replication_role(conn: Connection, config: PostgresConfig) -> Finding:
    row = conn.execute("SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user").fetchone()
    if row and row[0]:
        return Finding(True, f"role {config.username} may replicate")
    # Managed services give the right by membership in a role of their own.
    managed = conn.execute(
        "SELECT 1 FROM pg_roles WHERE rolname IN ('rds_replication', 'rds_superuser') "
        "AND pg_has_role(current_user, oid, 'member')"
    ).fetchone()
    role = sql.Identifier(config.username).as_string(conn)
    fix = "" if managed else f"ALTER ROLE {role} WITH REPLICATION;"
    return Finding(bool(managed), f"role {config.username} may {'' if managed else 'not '}replicate", fix)


def _free_slots(conn: Connection, config: PostgresConfig) -> Finding:
    most = int(_setting(conn, "max_replication_slots"))
    used = _number(conn, "SELECT count(*) FROM pg_replication_slots")
    ok = used < most or slots.slot_row(conn, config.slot) is not None
    fix = "" if ok else f"ALTER SYSTEM SET max_replication_slots = {most + 5}; -- then restart the server"
    return Finding(ok, f"{used} of {most} replication slots in use", fix)


def _free_senders(conn: Connection, config: PostgresConfig) -> Finding:
    most = int(_setting(conn, "max_wal_senders"))
    used = _number(conn, "SELECT count(*) FROM pg_stat_replication")
    row = slots.slot_row(conn, config.slot)
    ok = used < most or bool(row and row.get("active"))
    fix = "" if ok else f"ALTER SYSTEM SET max_wal_senders = {most + 5}; -- then restart the server"
    return Finding(ok, f"{used} of {most} walsenders in use", fix)


def _slot(conn: Connection, config: PostgresConfig, exists: Callable[[], bool]) -> Finding:
    row = slots.slot_row(conn, config.slot)
    if row is None:
        return Finding(True, f"slot {config.slot} does not exist yet and will be created")
    if row.get("plugin") != slots.PLUGIN or row.get("database") != config.database:
        # Somebody's: dropping it would lose their place in the stream, so no statement is offered.
        return Finding(False, f"slot {config.slot} belongs to something else; choose another slot.name")
    if row.get("wal_status") == "lost" or row.get("conflicting") or row.get("invalidation_reason"):
        return Finding(False, f"slot {config.slot} is lost", f"SELECT pg_drop_replication_slot('{config.slot}');")
    holder = slots.slot_holder(conn, config.slot)
    if holder is None:
        return Finding(True, f"slot {config.slot} exists")
    if holder.application == reader_name(config.slot) and exists():
        return Finding(True, f"slot {config.slot} is read by this source's own {holder}")
    ours = "; of an engine that has this source already, give the --data-dir"
    more = ours if holder.application == reader_name(config.slot) else ""
    return Finding(False, f"{slots.in_use(config.slot, holder)} ({slots.IN_USE_HINT}{more})")


def _publication(conn: Connection, config: PostgresConfig, publication: dict[str, Any] | None) -> Finding:
    if publication is not None:
        return Finding(True, f"publication {config.publication} exists")
    if config.create_publication:
        what = f"publication {config.publication} does not exist yet and"
        if _number(conn, "SELECT has_database_privilege(current_database(), 'CREATE')::int"):
            return Finding(True, f"{what} will be created")
        grant = sql.SQL("GRANT CREATE ON DATABASE {} TO {};").format(
            sql.Identifier(config.database), sql.Identifier(config.username)
        )
        return Finding(False, f"{what} role {config.username} may not create it", grant.as_string(conn))
    return Finding(
        False,
        f"publication {config.publication} does not exist, and publication.create.enable is false",
        sql.SQL("CREATE PUBLICATION {} WITH (publish_via_partition_root = true);")
        .format(sql.Identifier(config.publication))
        .as_string(conn),
    )


def _table(
    conn: Connection, config: PostgresConfig, name: str, publication: dict[str, Any] | None, *, exists: bool
) -> list[Finding]:
    try:
        table = describe(conn, *split_name(name, config.schema))
    except UsageError as error:
        return [_refused(error)]
    return [
        *readable(conn, config, table),
        _identity(conn, table),
        _published(conn, config, table, publication, exists=exists),
        *_left_out(conn, config, table),
    ]


def _refused(error: UsageError) -> Finding:
    """What a statement would be refused with; the remedy is in the text where it is no SQL."""
    if error.hint.startswith(RUN):
        return Finding(False, error.message, error.hint.removeprefix(RUN) + ";")
    return Finding(False, f"{error.message} ({error.hint})" if error.hint else error.message)


def readable(conn: Connection, config: PostgresConfig, table: TableInfo) -> tuple[Finding, Finding]:
    """Whether a copy sees the table, and all of its rows."""
    return _select(conn, config, table), _row_security(conn, config, table)


def _select(conn: Connection, config: PostgresConfig, table: TableInfo) -> Finding:
    row = conn.execute(
        "SELECT has_schema_privilege(%s, 'USAGE') AND has_table_privilege(%s::oid, 'SELECT')", (table.schema, table.oid)
    ).fetchone()
    if row and row[0]:
        return Finding(True, f"{table.qualified} can be read")
    role = sql.Identifier(config.username)
    fix = sql.SQL("GRANT USAGE ON SCHEMA {} TO {}; GRANT SELECT ON {} TO {};").format(
        sql.Identifier(table.schema), role, table.identifier, role
    )
    return Finding(False, f"{table.qualified} cannot be read", fix.as_string(conn))


def _identity(conn: Connection, table: TableInfo) -> Finding:
    full = sql.SQL("ALTER TABLE {} REPLICA IDENTITY {};").format
    if not table.key and not table.names_rows:
        fix = full(table.identifier, sql.SQL("FULL")).as_string(conn)
        return Finding(False, f"{table.qualified} has no primary key and not the replica identity FULL", fix)
    if not table.names_rows:
        # Deletes would name other columns than the key by which we know a row.
        fix = full(table.identifier, sql.SQL("DEFAULT")).as_string(conn)
        return Finding(False, f"the replica identity of {table.qualified} does not have its primary key", fix)
    key = f"primary key ({', '.join(table.key)})" if table.key else "no primary key, replica identity full"
    return Finding(True, f"{table.qualified} has {key}")


def _row_security(conn: Connection, config: PostgresConfig, table: TableInfo) -> Finding:
    """Row security would hide rows from the copy but not from the stream."""
    row = conn.execute("SELECT row_security_active(%s::oid)", (table.oid,)).fetchone()
    if not (row and row[0]):
        return Finding(True, f"no row security hides rows of {table.qualified} from us")
    role = sql.Identifier(config.username).as_string(conn)
    return Finding(False, f"row security hides rows of {table.qualified} from us", f"ALTER ROLE {role} WITH BYPASSRLS;")


def _left_out(conn: Connection, config: PostgresConfig, table: TableInfo) -> list[Finding]:
    """Columns that the stream does not have: no fault, but good to know before `(*)`."""
    streamed = slots.streamed_columns(conn, config.publication, table)
    missing = [c.name for c in table.columns if c.name not in streamed]
    text = f"(*) leaves out what {table.qualified} does not stream: {', '.join(missing)}"
    return [Finding(True, text)] if missing else []


def _published(
    conn: Connection, config: PostgresConfig, table: TableInfo, publication: dict[str, Any] | None, *, exists: bool
) -> Finding:
    """`exists`: the publication is there by the time when what is said here is run."""
    try:
        slots.require_sent_identity(conn, config, table)
        if publication is not None:
            slots.require_complete(conn, config, table, publication)
            if slots.publishes(conn, config.publication, table):
                return Finding(True, f"{table.qualified} is in publication {config.publication}")
    except UsageError as error:
        return _refused(error)
    statement = (
        slots.add_table_sql(conn, config.publication, table)
        if exists
        else slots.create_publication_sql(conn, config.publication, table)
    )
    if not config.create_publication:
        return Finding(False, f"{table.qualified} is not in publication {config.publication}", statement + ";")
    if not _has_role(conn, table.owner):
        what = f"{table.qualified} is not published, and only its owner {table.owner} may do it"
        return Finding(False, what, statement + ";")
    if publication is not None and not _has_role(conn, str(publication["owner"])):
        what = f"{table.qualified} is not published, and only the publication's owner {publication['owner']} may do it"
        return Finding(False, what, statement + ";")
    return Finding(True, f"{table.qualified} will be added to publication {config.publication}")


def _has_role(conn: Connection, role: str) -> bool:
    row = conn.execute("SELECT pg_has_role(current_user, %s, 'USAGE')", (role,)).fetchone()
    return bool(row and row[0])
