"""The columns of a captured table, and which ones it gets when the source's table has changed.

`connectors/postgres/shape.py` finds a change in the stream; docs/design/2026-11-16-schema-change.md has the rules.
Nothing here talks to a server.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from headwater.connectors.postgres.catalogue import TableInfo
from headwater.connectors.postgres.shape import kept_type
from headwater.connectors.postgres.types import ColumnPlan, Kind, TypeOptions, column_plan
from headwater.errors import SourceError
from headwater.model.schema import Column, Schema, is_reserved, multiset

# From → to: every value of the first is one of the second, and a file that has the first is read as the second.
_WIDER: Final = {("SMALLINT", "INT"), ("SMALLINT", "BIGINT"), ("INT", "BIGINT"), ("FLOAT", "DOUBLE")}


@dataclass(frozen=True, slots=True)
class TableShape:
    """`star`: made with `(*)`, so that new columns concern it; `left_out`: columns of the source that it leaves out."""

    schema: Schema
    plans: tuple[ColumnPlan, ...]
    left_out: tuple[str, ...] = ()
    star: bool = True

    @property
    def follows(self) -> tuple[str, ...] | None:
        """For `compare`: None where other columns are ignored."""
        return self.left_out if self.star else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": self.schema.as_dict(),
            "plans": [p.as_dict() for p in self.plans],
            "left_out": list(self.left_out),
            "star": self.star,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TableShape:
        plans = tuple(ColumnPlan.from_dict(p) for p in data["plans"])
        return cls(Schema.from_dict(data["schema"]), plans, tuple(data["left_out"]), bool(data["star"]))


def shape_of(info: TableInfo, plans: Iterable[ColumnPlan], left_out: Iterable[str], *, star: bool) -> TableShape:
    """The shape of a table with these columns; without a key it gets the hidden one of a multiset."""
    plans = tuple(plans)
    columns = [Column(p.name, p.ddl_type, nullable=p.name not in info.key) for p in plans]
    schema = Schema(tuple(columns), info.key) if info.key else multiset(columns)
    return TableShape(schema, plans, tuple(left_out), star)


def sent_columns(info: TableInfo, streamed: Collection[str]) -> tuple[list[str], list[str]]:
    """The columns of a table that the stream has, and those that it does not, in order."""
    names = [c.name for c in info.columns]
    return [n for n in names if n in streamed], [n for n in names if n not in streamed]


def evolved(
    shape: TableShape,
    info: TableInfo,
    *,
    policy: str,
    options: Mapping[str, str],
    used: bool,
    streamed: Collection[str],
) -> TableShape:
    """What the table becomes; the same shape if nothing is to change. SourceError where its policy says stop.

    `used`: views or sinks read the table.
    """
    present = {c.name: c for c in info.columns}
    sent, not_sent = sent_columns(info, streamed)
    types = TypeOptions.of(options)
    widen = widens(policy) and not used
    _check_key(shape, info)
    plans = []
    for old in shape.plans:
        if old.name in sent and not (old.absent and policy == "ignore"):
            # An array of a table that was made before the declared dimensions counted stays one.
            as_before = replace(types, arrays_as_array=types.arrays_as_array or old.kind is Kind.ARRAY)
            plans.append(_kept(old, column_plan(present[old.name], as_before), info, widen=widen))
        elif used or policy != "evolve":
            plans.append(replace(old, absent=True))
    taken = {p.name for p in shape.plans}
    new = [n for n in sent if n not in taken and n not in shape.left_out and not is_reserved(n)]
    if shape.star and policy != "ignore":
        _check_case(info, [p.name for p in plans], new)
        plans += [column_plan(present[n], types) for n in new]
        left_out = [*not_sent, *(n for n in sent if n in shape.left_out or is_reserved(n))]
    else:  # a list is a list: what is not in it concerns nobody
        left_out = [n for n in present if n not in taken] if shape.star else []
    return shape_of(info, plans, left_out, star=shape.star)


def _check_case(info: TableInfo, kept: Iterable[str], new: Iterable[str]) -> None:
    """Upper and lower case count for nothing here: two such columns would be one."""
    seen = {name.lower(): name for name in kept}
    for name in new:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise _stopped(info, f"column {name} differs from {other} in upper and lower case alone")


def _check_key(shape: TableShape, info: TableInfo) -> None:
    key = () if shape.schema.multiset else shape.schema.key
    if info.key != key:
        raise _stopped(info, f"its key is ({', '.join(info.key)}), and was ({', '.join(key)})")


def widens(policy: str) -> bool:
    """Whether a column takes over a wider type of the source's, if no view or sink has its old one."""
    return policy in ("evolve", "lenient")


def _kept(old: ColumnPlan, new: ColumnPlan, info: TableInfo, *, widen: bool) -> ColumnPlan:
    if widen and _wider(old, new):
        return new
    if (kept := kept_type(old, new)) is None:
        raise _stopped(info, f"column {old.name} is {new.ddl_type}, and was {old.ddl_type}")
    return kept


def _wider(old: ColumnPlan, new: ColumnPlan) -> bool:
    if old.key_position is not None:
        return False  # a key of another type has another place
    if old.precision and new.precision:
        return new.scale == old.scale and new.precision >= old.precision
    return (old.ddl_type, new.ddl_type) in _WIDER


def _stopped(info: TableInfo, what: str) -> SourceError:
    return SourceError(
        "SOURCE_SCHEMA_CHANGED",
        f"table {info.qualified} is not as it was captured: {what}",
        hint="DROP the table, with CASCADE if views or sinks read it, and CREATE it again",
    )
