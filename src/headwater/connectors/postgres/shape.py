"""A table's shape as the stream announces it (Relation messages), held against the columns that we capture.

`pgoutput.py` decodes rows by it; what a difference means for a table is decided in `runtime/shape.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Final

import numpy as np

from headwater.connectors.postgres.textscan import Longs
from headwater.connectors.postgres.types import NUMERIC_OID, ColumnPlan, Kind, Wire, decimal_of
from headwater.errors import DefiniteError


@dataclass(frozen=True, slots=True)
class RelationColumn:
    name: str
    type_oid: int
    typmod: int
    key: bool
    """Part of the replica identity: present in a K tuple."""


@dataclass(frozen=True, slots=True)
class Relation:
    """A table's shape as the stream announced it."""

    oid: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]


def parse_relation(message: bytes | memoryview) -> Relation:
    """A Relation message."""
    try:
        return _parsed(bytes(message))
    except (struct.error, IndexError, ValueError):
        raise corrupt("a table's description is malformed") from None


def corrupt(what: str) -> DefiniteError:
    """Bytes of the spool that are not what a server sends."""
    return DefiniteError(
        "SPOOL_CORRUPT",
        f"the spool cannot be read: {what}",
        hint="the stream is started over by itself, and all tables of the source are copied again",
    )


def _parsed(body: bytes) -> Relation:
    if body[:1] != b"R":
        raise ValueError("not a relation message")
    (oid,) = struct.unpack_from("!I", body, 1)
    namespace, at = _cstring(body, 5)
    name, at = _cstring(body, at)
    identity, count = struct.unpack_from("!cH", body, at)
    at += 3
    columns = []
    for _ in range(count):
        flags = body[at]
        column, at = _cstring(body, at + 1)
        type_oid, typmod = struct.unpack_from("!Ii", body, at)
        at += 8
        columns.append(RelationColumn(column, type_oid, typmod, bool(flags & 1)))
    if at != len(body):
        raise ValueError("a relation message has more than its columns")
    return Relation(oid, namespace or "pg_catalog", name, identity.decode("latin-1"), tuple(columns))


def _cstring(body: bytes, at: int) -> tuple[str, int]:
    end = body.index(0, at)
    return body[at:end].decode(), end + 1


@dataclass(frozen=True, slots=True)
class ShapeChange:
    """How a shape differs from what we capture, by names of columns; `added` are neither taken nor known."""

    added: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    retyped: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    """In another place among the others: this name was another column's, or the column was dropped and made again."""
    widened: tuple[str, ...] = ()
    """Wider in the source than here. Values are followed on as they are; by itself no change."""

    def __bool__(self) -> bool:
        return bool(self.added or self.gone or self.retyped or self.moved)

    def __str__(self) -> str:
        parts = [
            (self.added, "is new"),
            (self.gone, "is not in the stream"),
            (self.retyped, "has another type"),
            (self.moved, "is another one than before"),
            (self.widened, "has a wider type"),
        ]
        return "; ".join(f"column {name} {what}" for names, what in parts for name in names)


# From → to: each value of the first has the same text in the second.
_SAME_TEXT: Final = frozenset({(21, 23), (21, 20), (23, 20), (1043, 25), (25, 1043)})
_INT_WIDTH: Final = {21: "SMALLINT", 23: "INT", 20: "BIGINT"}


def kept_type(old: ColumnPlan, new: ColumnPlan) -> ColumnPlan | None:
    """The column as it is in the source now, under the type that it has here; None if that would change values.

    Each value is held against the type here when it is decoded: one that it cannot hold is an error, and not another
    value. So whoever reads the column does not notice that it is wider in the source, unless there is such a value.
    """
    if new.ddl_type == old.ddl_type:
        return new
    if old.kind is new.kind is Kind.DECIMAL and old.scale == new.scale:
        return replace(new, ddl_type=old.ddl_type, precision=old.precision)
    same = old.type_oid == new.type_oid or (old.type_oid, new.type_oid) in _SAME_TEXT
    if old.kind is new.kind is Kind.INT and same:
        return replace(new, ddl_type=old.ddl_type, wire=Wire.TEXT_ONLY)  # its bytes are of another width
    return None


def compare(relation: Relation, plans: Sequence[ColumnPlan], left_out: Collection[str] | None) -> ShapeChange:
    """`left_out` are columns of the source that we do not take; None: we take a fixed list, others are ignored."""
    there = {c.name: c for c in relation.columns}
    taken = {p.name: p for p in plans if not p.absent}
    known = None if left_out is None else {*taken, *left_out}
    return ShapeChange(
        added=() if known is None else tuple(name for name in there if name not in known),
        gone=tuple(name for name in taken if name not in there),
        retyped=tuple(name for name, p in taken.items() if name in there and not _fits(p, there[name])),
        moved=_moved(relation, taken),
        widened=tuple(name for name, p in taken.items() if name in there and _is_wider(there[name], p)),
    )


def _moved(relation: Relation, taken: Mapping[str, ColumnPlan]) -> tuple[str, ...]:
    """A relation has its columns in the order of their numbers, which stay theirs as long as they live."""
    now = [c.name for c in relation.columns if c.name in taken]
    numbers = {name: taken[name].attnum for name in now}
    if not all(numbers.values()):
        return ()  # plans that were made without a server
    before = sorted(now, key=numbers.__getitem__)
    if now == before:
        return ()
    same = SequenceMatcher(None, now, before, autojunk=False).get_matching_blocks()
    stayed = {name for block in same for name in now[block.a : block.a + block.size]}
    return tuple(name for name in now if name not in stayed)


def _fits(plan: ColumnPlan, column: RelationColumn) -> bool:
    """Whether the column's values are those of the plan, or are told from others when they are decoded."""
    if plan.type_oid not in (0, column.type_oid) and (plan.type_oid, column.type_oid) not in _SAME_TEXT:
        return False
    # Of a domain the modifier is not in the stream; its type is not numeric's own then.
    if plan.kind is not Kind.DECIMAL or column.type_oid != NUMERIC_OID:
        return True
    now = decimal_of(column.typmod)
    return now is not None and now[1] == plan.scale


def _is_wider(column: RelationColumn, plan: ColumnPlan) -> bool:
    if not _fits(plan, column):
        return False
    if plan.kind is Kind.DECIMAL and column.type_oid == NUMERIC_OID:
        now = decimal_of(column.typmod)
        return now is not None and now[0] > plan.precision
    return plan.kind is Kind.INT and _INT_WIDTH.get(column.type_oid, plan.ddl_type) != plan.ddl_type


def bind(relation: Relation, plans: Sequence[ColumnPlan], *, changing: bool, tolerant: bool) -> Longs:
    """For each column of the relation the index of its plan, or -1; an error where they do not fit.

    `changing`: there are updates or deletes, which must name their row. `tolerant`: see `pgoutput.decode_events`.
    """
    change = compare(relation, plans, None)
    keys = {p.name for p in plans if p.key_position is not None}
    lost = {*change.gone, *change.moved}
    if change.retyped or (lost and (not tolerant or keys & lost)):
        raise shape_changed(relation, str(change), retyped=bool(change.retyped))
    primary = tuple(c.name for c in relation.columns if c.key)
    if keys and relation.replica_identity == "d" and keys != set(primary):
        # Also of inserts: two rows may have the same values in what is our key.
        raise key_changed(f"{relation.namespace}.{relation.name}", primary)
    slots = np.full(len(relation.columns), -1, np.int64)
    by_name = {column.name: i for i, column in enumerate(relation.columns)}
    for slot, plan in enumerate(plans):
        if plan.absent or plan.name not in by_name:
            continue
        if changing and plan.name in keys and not relation.columns[by_name[plan.name]].key:
            raise identity_missing(relation)
        slots[by_name[plan.name]] = slot
    return slots


def shape_changed(relation: Relation, what: str, *, retyped: bool = True) -> DefiniteError:
    # Not every other type can be taken, and only the source's catalogue says which one it is.
    hint = "RESYNC the table to take its new definition"
    if retyped:
        hint += "; if its type cannot be taken, DROP it, with CASCADE if views or sinks read it, and CREATE it again"
    return DefiniteError(
        "SOURCE_SCHEMA_CHANGED",
        f"table {relation.namespace}.{relation.name} is not as it was captured: {what}",
        hint=hint,
    )


def key_changed(table: str, now: Sequence[str]) -> DefiniteError:
    return DefiniteError(
        "SOURCE_KEY_CHANGED",
        f"table {table} has another key than the captured one: ({', '.join(now)})",
        hint="it is copied again if the key is by now what it was",
    )


def identity_missing(relation: Relation, *, keyed: bool = True) -> DefiniteError:
    """`keyed`: we know its rows by their key; else by the whole row, and a key that it has by now does not help."""
    table = f"{relation.namespace}.{relation.name}"
    wanted = (
        "DEFAULT (with a primary key) or FULL, then resync" if keyed else "FULL, then resync; or DROP and CREATE it"
    )
    return DefiniteError(
        "REPLICA_IDENTITY_MISSING",
        f"an update or delete of table {table} does not say which row it was",
        hint=f"in the source: ALTER TABLE {table} REPLICA IDENTITY {wanted}",
    )
