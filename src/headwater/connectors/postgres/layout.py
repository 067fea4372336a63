"""What the catalogue tells of a table's rows that the stream does not: changes of old rows that no event announces.

    ALTER TABLE … DROP x, ADD x of the same type    the column has another number; old rows have its default
    ALTER TABLE … ALTER x TYPE … USING …            its entry was written again, and so were the table's files
    ALTER TYPE … RENAME VALUE                       a label of an enum is another text; old rows show that one
    a partition attached, detached or dropped       its rows come or go with it

The stream announces columns by name and type, so a table goes on as if nothing had happened. A layout is remembered
when a table enters the stream, and held against the present one now and then (`runtime/healing.py`).

VACUUM FULL and TRUNCATE give a table other files, SET NOT NULL and the like write a column's entry again; only both
together are taken for a rewriting ALTER. Where that is wrong, a copy is made that was not needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from headwater.connectors.postgres.catalogue import Connection
from headwater.connectors.postgres.client import translated

_QUERY: Final = """
SELECT (SELECT jsonb_object_agg(a.attname, jsonb_build_array(a.attnum, a.xmin::text))
          FROM pg_attribute a WHERE a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped),
       (SELECT jsonb_object_agg(c.oid, pg_relation_filenode(c.oid))
          FROM pg_class c
         WHERE c.oid = t.oid AND c.relkind <> 'p'
            OR c.oid IN (SELECT relid FROM pg_partition_tree(t.oid::oid::regclass) WHERE isleaf)),
       (SELECT jsonb_object_agg(a.attname, labels.found)
          FROM pg_attribute a
          JOIN pg_type outside ON outside.oid = a.atttypid
          LEFT JOIN pg_type base ON base.oid = outside.typbasetype
         CROSS JOIN LATERAL (
               SELECT jsonb_object_agg(e.oid, e.enumlabel) AS found FROM pg_enum e
                WHERE e.enumtypid IN (outside.oid, outside.typelem, base.oid, base.typelem)) labels
         WHERE a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped AND labels.found IS NOT NULL),
       -- A system column's entry is as old as its table; a partition that was made as one is as old as its place.
       (SELECT jsonb_object_agg(p.relid::oid, jsonb_build_array(p.relid::regclass::text, made.xmin <> place.xmin))
          FROM pg_partition_tree(t.oid::oid::regclass) p
          JOIN pg_inherits place ON place.inhrelid = p.relid
          JOIN pg_attribute made ON made.attrelid = p.relid AND made.attname = 'tableoid'
         WHERE p.relid::oid <> t.oid)  -- a captured partition is one by itself
  FROM unnest(%s::int8[]) WITH ORDINALITY t(oid, place)
 ORDER BY t.place
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """Of one table; `from_dict` takes what a job remembers as JSON."""

    columns: Mapping[str, Sequence[Any]]
    """Each column's number, and the transaction that wrote its entry in the catalogue."""
    files: Mapping[str, int]
    """By the table's number, or its partitions'."""
    labels: Mapping[str, Mapping[str, str]]
    """Of columns that are enums, or arrays or domains of one: each label by its number."""
    partitions: Mapping[str, Sequence[Any]]
    """By number: its name, and whether it was a table before it became a partition."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(data["columns"], data["files"], data["labels"], data["partitions"])


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """What has become of the columns that we take."""

    replaced: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()
    relabelled: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.replaced or self.rewritten or self.relabelled)

    def __str__(self) -> str:
        parts = [
            (self.replaced, "is another one than before"),
            (self.rewritten, "was rewritten"),
            (self.relabelled, "is an enum whose labels have other names"),
        ]
        return "; ".join(f"column {name} {what}" for names, what in parts for name in names)


def layouts(conn: Connection, oids: Sequence[int]) -> list[Layout]:
    """Of each of the tables, as it is now; nothing in it for one that is gone."""
    with translated("looking at the tables' columns"):
        return [Layout(*(part or {} for part in row)) for row in conn.execute(_QUERY, (list(oids),)).fetchall()]


def compare_layouts(before: Layout, now: Layout, taken: Collection[str]) -> LayoutChange:
    """Columns that are there no more, or are new, are the stream's to tell."""
    both = [name for name in taken if name in before.columns and name in now.columns]
    same = [name for name in both if before.columns[name][0] == now.columns[name][0]]
    moved = any(before.files[oid] != now.files[oid] for oid in before.files if oid in now.files)
    return LayoutChange(
        replaced=tuple(name for name in both if name not in same),
        rewritten=tuple(n for n in same if moved and before.columns[n][1] != now.columns[n][1]),
        relabelled=tuple(n for n in same if _renamed(before.labels.get(n, {}), now.labels.get(n, {}))),
    )


def compare_partitions(before: Layout, now: Layout) -> tuple[list[str], list[str]]:
    """The names of partitions that are gone, and of tables that have become one; their rows went, or came, unseen."""
    gone = [name for oid, (name, _) in before.partitions.items() if oid not in now.partitions]
    come = [name for oid, (name, was) in now.partitions.items() if was and oid not in before.partitions]
    return sorted(gone), sorted(come)


def _renamed(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    return any(before[oid] != now[oid] for oid in before if oid in now)
