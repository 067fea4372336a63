"""What Headwater makes at a source, and undoes: publication, slot, the mark at which a table enters the stream."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headwater.errors import HeadwaterError, SourceError, TransientError, UsageError

if TYPE_CHECKING:
    from headwater.connectors.postgres.catalogue import Present
    from headwater.connectors.postgres.client import PostgresConfig
    from headwater.connectors.postgres.layout import Layout


def open_slot(config: PostgresConfig) -> dict[str, Any]:
    """Publication, then slot: a slot decodes with the catalogue of its time, and must find the publication there."""
    from headwater.connectors.postgres.client import connect, translated
    from headwater.connectors.postgres.slots import drop_publication, ensure_slot, publication_of, require_free_slot

    try:
        with connect(config) as conn:
            require_free_slot(conn, config)
            published = publication_of(conn, config.publication) is None
            if published:
                with translated(f"creating publication {config.publication}"):
                    _create_publication(conn, config)
            try:
                slot = ensure_slot(conn, config)
            except BaseException:
                if published:  # a statement that fails leaves nothing of itself
                    with contextlib.suppress(HeadwaterError):
                        drop_publication(conn, config)
                raise
            return {
                "slot_created": slot.created,
                "publication_created": published,
                "start_lsn": slot.confirmed_lsn,
            }
    except (TransientError, SourceError) as error:
        # While creating, no such host and a wrong password are the user's to mend: nothing is retried.
        raise UsageError(error.code, error.message, detail=error.detail, hint=error.hint) from error


def _create_publication(conn: Any, config: PostgresConfig) -> None:
    from psycopg import errors as pg_errors
    from psycopg import sql

    extra = ", publish_generated_columns = stored" if conn.info.server_version >= 180_000 else ""
    statement = sql.SQL("CREATE PUBLICATION {} WITH (publish_via_partition_root = true" + extra + ")").format(
        sql.Identifier(config.publication)
    )
    text = statement.as_string(conn)
    missing = f"publication {config.publication} does not exist"
    if not config.create_publication:
        raise UsageError("SOURCE_PUBLICATION", missing, hint=f"run on the source: {text}")
    try:
        conn.execute(statement)
    except pg_errors.InsufficientPrivilege:
        raise UsageError(
            "SOURCE_PERMISSION", f"{missing}, and we may not create it", hint=f"run on the source: {text}"
        ) from None


def release(config: PostgresConfig, made: Mapping[str, Any]) -> None:
    """Undo what we had made at the source ourselves, and nothing else."""
    from headwater.connectors.postgres.client import connect
    from headwater.connectors.postgres.slots import drop_publication, drop_slot

    with connect(config) as conn:
        if made.get("slot_created"):
            drop_slot(conn, config)
        if made.get("publication_created"):
            drop_publication(conn, config)


def not_released(name: str, config: PostgresConfig, made: Mapping[str, Any], error: HeadwaterError) -> SourceError:
    """A slot that nobody reads any more lets the source's log grow until its disk is full: somebody must know."""
    statements = []
    if made.get("slot_created"):
        statements.append(f"SELECT pg_drop_replication_slot('{config.slot}');")
    if made.get("publication_created"):
        statements.append('DROP PUBLICATION "{}";'.format(config.publication.replace('"', '""')))
    what = f"source {name} is dropped here, but what was made for it at the source is still there: {error.message}"
    return SourceError("SOURCE_NOT_RELEASED", what, hint=f"run on the source: {' '.join(statements)}")


def enter(config: PostgresConfig, table: Any) -> dict[str, Any]:
    """Publish the table and mark the moment: its first read waits for every transaction that runs now."""
    from headwater.connectors.postgres.client import connect
    from headwater.connectors.postgres.layout import layouts
    from headwater.connectors.postgres.slots import ensure_publication, enter_stream, membership

    with connect(config) as conn:
        publication = ensure_publication(conn, config, table.info)
        entry = membership(conn, config.publication, table.info)
        (layout,) = layouts(conn, [table.info.oid])
        mark = enter_stream(conn)
    return {
        "external": [table.info.schema, table.info.name],
        "oid": table.info.oid,
        "schema_oid": table.info.schema_oid,
        "options": table.type_options,
        "published": dataclasses.asdict(publication),
        "membership": entry,
        "layout": layout.as_dict(),
        "mark": mark.xid,
        "shape": table.shape.as_dict(),
    }


def withdraw(config: PostgresConfig, oid: int) -> None:
    """A table that we had published is followed by nobody here any more: the source need not send its changes."""
    from headwater.connectors.postgres.client import connect
    from headwater.connectors.postgres.slots import withdraw_table

    with connect(config) as conn:
        withdraw_table(conn, config, oid)


def enter_again(config: PostgresConfig, external: list[str]) -> tuple[Any, frozenset[str], dict[str, Any]]:
    """A new mark for a table that is to be copied again; it is published again if somebody took it out.

    Gives the table as it is now, the columns that the stream has, and what is to be remembered of its entry.
    """
    from headwater.connectors.postgres.catalogue import describe
    from headwater.connectors.postgres.client import connect
    from headwater.connectors.postgres.layout import layouts
    from headwater.connectors.postgres.slots import ensure_publication, enter_stream, membership, streamed_columns

    with connect(config) as conn:
        info = describe(conn, *external)
        ensure_publication(conn, config, info)
        entry = membership(conn, config.publication, info)
        streamed = streamed_columns(conn, config.publication, info)
        (layout,) = layouts(conn, [info.oid])
        mark = enter_stream(conn).xid
    entered = {"oid": info.oid, "schema_oid": info.schema_oid, "membership": entry, "layout": layout.as_dict()}
    return info, streamed, {"mark": mark, **entered}


def present(config: PostgresConfig, tables: Sequence[tuple[int, str, str]]) -> list[tuple[Present, Layout]]:
    """For each table (number, schema, name) what has become of it, and of its columns."""
    from headwater.connectors.postgres import catalogue
    from headwater.connectors.postgres.client import connect
    from headwater.connectors.postgres.layout import layouts

    with connect(config) as conn:
        found = catalogue.present(conn, tables)
        return list(zip(found, layouts(conn, [oid for oid, _, _ in tables]), strict=True))


def new_slot(config: PostgresConfig, *, ours: bool, publication_lost: bool = False, unreadable: bool = False) -> int:
    """A slot whose stream can be read from here on, in the place of one that is lost; gives where it begins.

    A slot that can be used is taken as it stands. One that cannot is dropped if it was ours to make, and in any case if
    the server cannot decode the log from its place on (`unreadable`). If the publication was lost, the slot is moved to
    now: a stream cannot be decoded from before its publication.
    """
    from headwater.connectors.postgres.client import connect, translated
    from headwater.connectors.postgres.slots import advance_slot, drop_slot, ensure_slot, publication_of

    with connect(config) as conn:
        if publication_of(conn, config.publication) is None:
            publication_lost = True
            with translated(f"creating publication {config.publication}"):
                _create_publication(conn, config)
        if unreadable:
            # Whoever made it: nobody can read on from it. It may be ours without our knowing, if the engine was killed
            # between making it and noting that.
            drop_slot(conn, config)
        try:
            confirmed = ensure_slot(conn, config).confirmed_lsn
            return advance_slot(conn, config) if publication_lost else confirmed
        except SourceError as error:
            if not ours or error.code != "SOURCE_SLOT_LOST":
                raise
        drop_slot(conn, config)
        return ensure_slot(conn, config).confirmed_lsn
