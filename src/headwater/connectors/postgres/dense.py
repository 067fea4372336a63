"""Parts of a table whose key is one whole number and that lies in the order of its keys, as most append-only tables do:
read page by page instead of by the index, and shown to be complete by their keys.

    keys of a split   [100, 200)
    found on the pages between those of its first and its last row   100 … 149, 151 … 199
    not found there   150: somewhere else, or nowhere; the index says which

No two rows of a snapshot have the same key, so that a row elsewhere can only have a key that was not found: those are
looked up one range of them at a time, under the same snapshot. A scan of pages costs the server a tenth less than one
by the index: it sees a page's rows at once, and needs none of the index's pages.

It is worth it where next to every number is a key, which some pages in the middle tell before all are read. Where it is
not, the caller reads by the index, as for other keys.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import psycopg
import pyarrow as pa
from numpy.typing import NDArray
from psycopg import sql

from headwater.capture.splits import Split, SplitKind
from headwater.connectors.postgres.catalogue import TableInfo
from headwater.connectors.postgres.client import translated
from headwater.connectors.postgres.planner import page_number, split_query

Connection = psycopg.Connection[Any]

_WHOLE_NUMBERS: Final = frozenset({20, 21, 23})  # int8, int2, int4
SPARSE: Final = 1.2  # numbers, and pages, for each that is expected; with more there are other keys or rows between
ROWS_PER_GAP: Final = 100  # a look-up costs the server as much as the pages save for that many rows
PROBED_PAGES: Final = 6  # a few hundred rows


@dataclass(frozen=True, slots=True)
class DensePart:
    """The numbers `[low, high)` and the pages on which nearly all of them should be."""

    key: str
    low: int
    high: int
    pages: Split

    def within(self, rows: pa.Table) -> tuple[pa.Table, list[tuple[int, int]]] | None:
        """Those of the rows of the pages that belong to the part, and the ranges of numbers `[from, to]` that are not
        among them; None if these are too many to be looked up."""
        keys = rows.column(self.key).to_numpy().astype(np.int64, copy=False)
        rows, keys = self._inside(rows, keys)
        gaps = missing(keys, self.low, self.high)
        return None if _too_many(gaps, len(keys)) else (rows, gaps)

    def _inside(self, rows: pa.Table, keys: NDArray[np.int64]) -> tuple[pa.Table, NDArray[np.int64]]:
        """Of the first and the last page some rows are the neighbours'."""
        inside = (keys >= self.low) & (keys < self.high)
        count = int(np.count_nonzero(inside))
        first = int(inside.argmax()) if count else 0
        if inside[first : first + count].all():
            return rows.slice(first, count), keys[first : first + count]
        return rows.filter(pa.array(inside)), keys[inside]


def missing(keys: NDArray[np.int64], low: int, high: int) -> list[tuple[int, int]]:
    """The ranges `[from, to]` of the numbers in `[low, high)` that are not among the keys, which are in it."""
    if keys.size == 0:
        return [(low, high - 1)]
    rising = bool((keys[1:] > keys[:-1]).all())
    if rising and keys.size == high - low:
        return []
    if not rising:
        keys = np.sort(keys, kind="stable")  # which takes little where they are nearly in order
    before = [(low, int(keys[0]) - 1)] if keys[0] > low else []
    between = [(int(keys[i]) + 1, int(keys[i + 1]) - 1) for i in np.flatnonzero(np.diff(keys) > 1)]
    behind = [(int(keys[-1]) + 1, high - 1)] if keys[-1] < high - 1 else []
    return before + between + behind


def dense_part(conn: Connection, table: TableInfo, split: Split) -> DensePart | None:
    """The pages of a split, as the transaction sees it, if reading them promises to be worth it."""
    if split.left is None or split.right is None or split.kind is not SplitKind.KEY or not _is_promising(table):
        return None
    low, high = int(split.left[0]), int(split.right[0])
    ends = _ends(conn, table, low, high)
    if ends is None or high <= low:
        return None
    first, behind = ends[0], ends[1] + 1
    expected = (high - low) * table.pages / table.rows
    if not expected / SPARSE - 1 <= behind - first <= expected * SPARSE + 2:
        return None
    middle = (first + behind - PROBED_PAGES) // 2
    if middle > first and not _is_dense(conn, table, _pages(middle, middle + PROBED_PAGES)):
        return None
    return DensePart(table.key[0], low, high, _pages(first, behind))


def _too_many(gaps: Sequence[tuple[int, int]], keys: int) -> bool:
    return len(gaps) * ROWS_PER_GAP > keys + ROWS_PER_GAP


def _pages(first: int, behind: int) -> Split:
    return Split(0, (f"({first},0)",), (f"({behind},0)",), SplitKind.CTID)


def _is_dense(conn: Connection, table: TableInfo, pages: Split) -> bool:
    with translated("looking at some pages"):
        keys = [int(row[0]) for row in conn.execute(split_query(table, table.key, pages))]
    return bool(keys) and not _too_many(missing(np.array(keys, np.int64), min(keys), max(keys) + 1), len(keys))


def _is_promising(table: TableInfo) -> bool:
    one = len(table.key) == 1 and table.column(table.key[0]).type_oid in _WHOLE_NUMBERS
    return one and table.in_key_order and table.rows > 0 and table.pages > 0


def _ends(conn: Connection, table: TableInfo, low: int, high: int) -> tuple[int, int] | None:
    """The pages of the rows with the lowest and the highest key of a range; None without rows."""
    query = sql.SQL(
        "SELECT (SELECT ctid::text FROM {table} WHERE {key} >= {low} AND {key} < {high} ORDER BY {key} LIMIT 1), "
        "(SELECT ctid::text FROM {table} WHERE {key} >= {low} AND {key} < {high} ORDER BY {key} DESC LIMIT 1)"
    ).format(table=table.from_clause, key=sql.Identifier(table.key[0]), low=low, high=high)
    with translated("looking at a split's pages"):
        row = conn.execute(query).fetchone()
    if row is None or row[0] is None or row[1] is None:
        return None
    return page_number(row[0]), page_number(row[1])


def missing_query(
    table: TableInfo, columns: Sequence[str], gaps: Sequence[tuple[int, int]], absent: Collection[str] = ()
) -> sql.Composed:
    """The statement that looks for rows whose keys are in these ranges; each is one look-up in the index."""
    names = sql.SQL(", ").join(sql.SQL("NULL") if c in absent else sql.Identifier("_hw", c) for c in columns)
    key = sql.Identifier(table.key[0])
    lows, highs = ([gap[i] for gap in gaps] for i in (0, 1))
    return sql.SQL(
        "SELECT {names} FROM unnest({lows}::int8[], {highs}::int8[]) AS _hw_gap (low, high) CROSS JOIN LATERAL "
        "(SELECT * FROM {table} AS _hw_row WHERE {key} >= _hw_gap.low AND {key} <= _hw_gap.high OFFSET 0) AS _hw"
    ).format(names=names, lows=lows, highs=highs, table=table.from_clause, key=key)
