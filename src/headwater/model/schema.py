"""Columns, schemas and keys of tables and views. Types are Spark DDL type names (`types.py` maps them to Arrow)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

ROW_ID: Final = "_row_id"  # hidden key of a table without a primary key
ROW_NO: Final = "_row_no"  # hidden: tells equal rows of a captured table without a key apart
VIEW_KEY: Final = "_key"  # hidden key of a view
VNODE: Final = "_vnode"
OP: Final = "_op"
SEQ: Final = "_seq"
OP_UPSERT: Final = 1
OP_DELETE: Final = 2
SEGMENT_COLUMNS: Final = (VNODE, OP, SEQ)
CHANGE_NAMES: Final = ("_change_type", "_commit_version", "_commit_timestamp")  # beside the columns in a change log
VIEW_COLUMNS: Final = (VIEW_KEY, "_part", "_count")  # hidden ones of views, beside the accumulators
RESERVED: Final = frozenset({ROW_ID, ROW_NO, *VIEW_COLUMNS, *SEGMENT_COLUMNS, *CHANGE_NAMES})
# Accumulators of views, and whatever else stands beside a table's columns for a moment.
RESERVED_PREFIXES: Final = ("_acc_", "_hw_")


def is_reserved(name: str) -> bool:
    """Whether a column cannot have this name, because one of ours stands beside it; upper and lower case are one."""
    return name.lower() in RESERVED or name.lower().startswith(RESERVED_PREFIXES)


def why_reserved(name: str) -> str:
    return f"column {name}: a hidden column of Headwater's own has this name"


@dataclass(frozen=True, slots=True)
class Column:
    """One column; a hidden one is stored and carried along but not shown by `SELECT *`."""

    name: str
    type: str
    nullable: bool = True
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a table in order, and the names of its key columns (never empty)."""

    columns: tuple[Column, ...]
    key: tuple[str, ...]

    def __post_init__(self) -> None:
        names = {c.name for c in self.columns}
        missing = [k for k in self.key if k not in names]
        if missing or not self.key:
            raise ValueError(f"key columns {missing or '(none)'} are not among the columns")

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.columns)

    @property
    def visible(self) -> tuple[Column, ...]:
        return tuple(c for c in self.columns if not c.hidden)

    @property
    def key_columns(self) -> tuple[Column, ...]:
        return tuple(self[k] for k in self.key)

    @property
    def keyless(self) -> bool:
        return self.key == (ROW_ID,)

    @property
    def multiset(self) -> bool:
        """A captured table without a key: `_row_id` says what a row is, `_row_no` which of several equal ones."""
        return self.key == (ROW_ID, ROW_NO)

    def restricted(self, names: Iterable[str] | None) -> Schema:
        """The same with all visible columns hidden that are not named: as somebody sees it who knew only those."""
        if names is None:
            return self
        known = set(names)
        return Schema(tuple(replace(c, hidden=c.hidden or c.name not in known) for c in self.columns), self.key)

    def as_dict(self) -> dict[str, Any]:
        return {
            "columns": [[c.name, c.type, c.nullable, c.hidden] for c in self.columns],
            "key": list(self.key),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Schema:
        return cls(tuple(Column(*c) for c in data["columns"]), tuple(data["key"]))


def quoted(name: str) -> str:
    """A name as Spark SQL and the DataFrame API read it, whatever characters it has (a backquote, too)."""
    return "`" + name.replace("`", "``") + "`"


def keyed(columns: Iterable[Column], key: Iterable[str]) -> Schema:
    """A schema with the given key, or with the hidden row id where there is none."""
    columns, key = tuple(columns), tuple(key)
    if key:
        return Schema(columns, key)
    return Schema((*columns, Column(ROW_ID, "BIGINT", nullable=False, hidden=True)), (ROW_ID,))


def multiset(columns: Iterable[Column]) -> Schema:
    """The schema of a captured table whose rows have no key."""
    hidden = (
        Column(ROW_ID, "STRING", nullable=False, hidden=True),
        Column(ROW_NO, "BIGINT", nullable=False, hidden=True),
    )
    return Schema((*columns, *hidden), (ROW_ID, ROW_NO))
