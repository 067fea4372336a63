"""Splits of a Postgres table, the statement that reads one, and what a read has seen.

Bounds are keys that are really there, taken at even distances from a sorted sample of all key columns, so that skewed,
uuid, text and composite keys, and a first column that is always the same, give even splits. A small table is sampled
whole. A key whose order we cannot reproduce (`catalogue.has_known_order`), or no key, gives ranges of pages (`ctid`).

What a read has seen: the reading transaction notes `pg_current_snapshot()`; an event is contained in the read iff its
transaction is visible in that snapshot (`visible`). Why that misses none: visibility is decided by the server's list of
running transactions and not by the log, so a transaction whose commit record is already streamed but which other
sessions do not see yet (it waits for a synchronous standby) counts as not seen, and its events are applied. Events
carry the xid of the top-level transaction; a snapshot lists top-level ones too, so subtransactions need no care.

A crash of the server must not make that false: it forgets the log that was not on its disk yet, with transactions that
a read may have seen (committed asynchronously), and gives their numbers to others, which the read had not seen. So a
read ends only when the log is on disk up to where the read ended (`current_lsn`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import sql

from headwater.capture.splits import (
    DEFAULT_ROWS_PER_SPLIT,
    MAX_SPLITS,
    WHOLE_UP_TO,
    Bound,
    Page,
    Split,
    SplitKind,
    splits_between,
)
from headwater.connectors.postgres.catalogue import TableInfo
from headwater.connectors.postgres.client import parse_lsn, translated
from headwater.errors import TransientError

Connection = psycopg.Connection[Any]

WHOLE_PAGES: Final = 2_000  # up to 16 MB the keys are read whole: that takes less than a second
SAMPLE_PAGES_PER_SPLIT: Final = 40  # rows of a page are neighbours: what counts is the number of pages, ± 1/√40
SAMPLE_ROWS_PER_PAGE: Final = 5  # of which some are enough: the others would only have to be sorted with them
SPLIT_BYTES: Final = 128 << 20  # on the source's disk; a reader has a split in memory, some four times as large
ASSUMED_ROWS_PER_PAGE: Final = 50  # where there are no statistics
# Values that sort in the server but have no place between finite ones: as bounds they are left out, and rows that have
# them fall into the first or last split (NaN and Infinity sort last, -Infinity first).
_NOT_A_BOUND: Final = frozenset({"NaN", "Infinity", "-Infinity", "infinity", "-infinity"})
_HIGH: Final = (
    "SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END)::text"
)
_FLUSHED: Final = "SELECT pg_is_in_recovery() OR pg_current_wal_flush_lsn() >= %s::pg_lsn"
FLUSH_WAIT_S: Final = 0.5  # the server's own writer is due every 0.2 s; after that we make it write
# A commit of ours takes all of the log before it to disk; it waits for no standby.
_FLUSH: Final = "SET synchronous_commit = local; SELECT pg_logical_emit_message(true, 'headwater', '')"
_READ_STREAMS: Final = 180000  # the first version whose bitmap scans read several pages at once


def plan_splits(conn: Connection, table: TableInfo, *, rows_per_split: int = DEFAULT_ROWS_PER_SPLIT) -> list[Split]:
    """The splits of a table, about `rows_per_split` rows each or fewer if they are large, at most MAX_SPLITS; never
    none."""
    with translated(f"planning the splits of {table.qualified}"):
        if not table.ordered_key:
            return _physical_splits(table, rows_per_split)
        return splits_between(_sampled_bounds(conn, table, rows_per_split))


def plan_cursor(table: TableInfo) -> list[Split]:
    """One cursor: a single split, from which each read cuts off a page (`page_end`). The key must have our order."""
    return [Split(1, None, None)] if table.ordered_key else []


def page_end(conn: Connection, table: TableInfo, split: Split, page: Page) -> Bound | None:
    """Where the page ends that a read takes of a split; None: where the split does."""
    if not page.rows:
        return None
    if split.kind is SplitKind.CTID:
        return _physical_end(table, split, page)
    if page.most > page.rows and _key_after(conn, table, split, page.most) is None:
        return None
    return _key_after(conn, table, split, page.rows)


def _physical_end(table: TableInfo, split: Split, page: Page) -> Bound | None:
    """In pages of the table, by the rows that they have on average; of a partitioned one the same pages of each."""
    first = 0 if split.left is None else page_number(split.left[0])
    behind = table.largest_pages if split.right is None else page_number(split.right[0])
    per_page = table.rows / table.largest_pages if table.rows > 0 and table.largest_pages else ASSUMED_ROWS_PER_PAGE
    if (behind - first) * per_page <= WHOLE_UP_TO * page.rows:
        return None
    end = first + max(1, math.ceil(page.rows / per_page))
    return (f"({end},0)",) if end < behind else None


def page_number(ctid: str) -> int:
    return int(ctid[1:].partition(",")[0])


def _key_after(conn: Connection, table: TableInfo, split: Split, rows: int) -> Bound | None:
    """The key before which a split has that many rows; None: it has not more."""
    texts = _texts(table.key)
    condition = split_condition(table.key, split)
    query = sql.SQL("SELECT {} FROM {} AS _hw {} ORDER BY {} OFFSET {} LIMIT 1").format(
        texts,
        table.from_clause,
        sql.SQL("") if condition is None else sql.SQL("WHERE {}").format(condition),
        # With the table's name: without it the order would be that of the texts, which have the columns' names.
        sql.SQL(", ").join(sql.Identifier("_hw", k) for k in table.key),
        rows,
    )
    found = conn.execute(query).fetchone()
    if found is None or _NOT_A_BOUND.intersection(found):
        return None
    return tuple(str(part) for part in found)


def _texts(key: Sequence[str]) -> sql.Composed:
    """The key's values as the server prints them, which is what the decoder reads: a cast of a boolean says `true`."""
    return sql.SQL(", ").join(sql.SQL("format('%s', {})").format(sql.Identifier(k)) for k in key)


def _physical_splits(table: TableInfo, rows_per_split: int) -> list[Split]:
    """Ranges of pages. Of a partitioned table they cut every partition at the same places."""
    pages = table.largest_pages
    per_page = table.rows / table.pages if table.rows > 0 and table.pages else ASSUMED_ROWS_PER_PAGE
    step = max(1, math.ceil(rows_per_split / max(per_page, 1e-9)))
    step = max(1, min(step, pages // _least_splits(table)))
    step = max(step, -(-pages // MAX_SPLITS)) if pages else step
    return splits_between([(f"({page},0)",) for page in range(step, pages, step)], SplitKind.CTID)


def _sampled_bounds(conn: Connection, table: TableInfo, rows_per_split: int) -> list[Bound]:
    percent = _sample_percent(table, rows_per_split)
    share = _sample_share(table) if percent < 100 else 1.0
    keys = sql.SQL(", ").join(map(sql.Identifier, table.key))
    texts = _texts(table.key)
    # A row is taken where the number of its split changes. The number of splits follows from the rows found, so that a
    # table without statistics, or with stale ones, is planned by what is in it.
    query = sql.SQL(
        "SELECT {texts} FROM (SELECT {keys}, row_number() OVER (ORDER BY {keys}) - 1 AS _hw_row, "
        "count(*) OVER () AS _hw_all FROM {table} {sample}) AS t, "
        "LATERAL (SELECT least({most}, greatest({least}, ceil(_hw_all * {scale} / {target})))::int8 AS _hw_splits) s "
        "WHERE _hw_row > 0 AND _hw_row * _hw_splits / _hw_all > (_hw_row - 1) * _hw_splits / _hw_all "
        "ORDER BY _hw_row"
    ).format(
        texts=texts,
        keys=keys,
        table=table.from_clause,
        sample=_sample(percent, share),
        most=MAX_SPLITS,
        least=_least_splits(table),
        scale=100 / percent / share,
        target=rows_per_split,
    )
    if share < 1:
        conn.execute("SELECT setseed(0)")  # the same rows of the same pages: what is planned again is planned alike
    found: list[Bound] = [tuple(row) for row in conn.execute(query)]
    return [bound for bound in found if not _NOT_A_BOUND.intersection(bound)]


def _sample(percent: float, share: float) -> sql.Composable:
    if percent >= 100:
        return sql.SQL("")
    pages = sql.SQL("TABLESAMPLE SYSTEM ({}) REPEATABLE (1)").format(percent)
    return pages if share >= 1 else sql.SQL("{} WHERE random() < {}").format(pages, share)


def _sample_share(table: TableInfo) -> float:
    """How many of a sampled page's rows are looked at."""
    per_page = table.rows / table.pages if table.rows > 0 else ASSUMED_ROWS_PER_PAGE
    return min(1.0, SAMPLE_ROWS_PER_PAGE / max(per_page, 1e-9))


def _sample_percent(table: TableInfo, rows_per_split: int) -> float:
    """How much of the table to look at: whole pages, enough of them for every split to be."""
    if table.pages <= WHOLE_PAGES:
        return 100.0
    rows = table.rows if table.rows > 0 else table.pages * ASSUMED_ROWS_PER_PAGE
    splits = min(MAX_SPLITS, max(_least_splits(table), math.ceil(rows / rows_per_split)))
    wanted = max(WHOLE_PAGES, splits * SAMPLE_PAGES_PER_SPLIT)
    return min(100.0, 100.0 * wanted / table.pages)


def _least_splits(table: TableInfo) -> int:
    """How many a table of this size has at least, whatever the number of its rows."""
    return max(1, math.ceil(table.size_bytes / SPLIT_BYTES))


# -- reading one split ---------------------------------------------------------------------------------------------


def split_query(table: TableInfo, columns: Sequence[str], split: Split, absent: Collection[str] = ()) -> sql.Composed:
    """The statement that reads a split; bounds are literals, since COPY takes no parameters.

    `absent` columns are NULL: the source does not have them any more.
    """
    names = sql.SQL(", ").join(sql.SQL("NULL") if c in absent else sql.Identifier(c) for c in columns)
    query = sql.SQL("SELECT {} FROM {}").format(names, table.from_clause)
    condition = split_condition(table.key, split)
    return query if condition is None else sql.SQL("{} WHERE {}").format(query, condition)


def copy_statement(
    table: TableInfo, columns: Sequence[str], split: Split, absent: Collection[str] = (), *, binary: bool = False
) -> sql.Composed:
    """The same as COPY, in the text format, which `copytext.py` decodes, or the binary one of `wirerows.py`."""
    form = sql.SQL("COPY ({}) TO STDOUT (FORMAT binary)" if binary else "COPY ({}) TO STDOUT")
    return form.format(split_query(table, columns, split, absent))


def current_types(conn: Connection, table: TableInfo, columns: Sequence[str]) -> list[int]:
    """The columns' types, domains as what they are over. To be called in the reading transaction: they stay so in it.

    Asked of the table itself, since the catalogue is seen as of the transaction's snapshot, and the table as it is now.
    """
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    with translated("looking at a table's columns"):
        found = conn.execute(sql.SQL("SELECT {} FROM {} LIMIT 0").format(names, table.from_clause))
        return [column.type_code for column in found.description or ()]


def split_condition(key: Sequence[str], split: Split) -> sql.Composed | None:
    """What selects a split's rows, said so that the server sees how few they are. None: everything.

    Of two comparisons of whole keys it takes the estimates to be independent, and half of all keys above the one and
    half below the other make a quarter of the table, which it scans. So what both bounds have in common is said as
    equality, and the next column's range by itself:
    `a = 1 AND b >= 2 AND b <= 7 AND (b, c) >= (2, 3) AND (b, c) < (7, 1)`.
    """
    ends = [(bound, operator) for bound, operator in ((split.left, ">="), (split.right, "<")) if bound is not None]
    if split.kind is SplitKind.CTID:
        parts = [sql.SQL("ctid {} {}::tid").format(sql.SQL(operator), sql.Literal(b[0])) for b, operator in ends]
    else:
        common = _common_columns(split)
        parts = _narrowing(key, split, common)
        parts += [_compared(key[common:], operator, bound[common:]) for bound, operator in ends]
    return sql.SQL(" AND ").join(parts) if parts else None


def _common_columns(split: Split) -> int:
    """In how many columns both bounds are the same; the last one always tells them apart."""
    if split.left is None or split.right is None:
        return 0
    same = [low == high for low, high in zip(split.left[:-1], split.right[:-1], strict=True)]
    return same.index(False) if False in same else len(same)


def _narrowing(key: Sequence[str], split: Split, common: int) -> list[sql.Composed]:
    """Of two bounds: the columns that are the same in both, and the next one's range, if more columns follow it."""
    if split.left is None or split.right is None:
        return []
    parts = [_compared([name], "=", [value]) for name, value in zip(key[:common], split.left, strict=False)]
    if common < len(key) - 1:
        for bound, operator in ((split.left, ">="), (split.right, "<=")):
            parts.append(_compared([key[common]], operator, [bound[common]]))
    return parts


def _compared(names: Sequence[str], operator: str, values: Sequence[str]) -> sql.Composed:
    """Columns with values. Quoted texts have no type of their own: each takes that of the column it stands against."""
    columns, literals = (sql.SQL(", ").join(x) for x in (map(sql.Identifier, names), map(sql.Literal, values)))
    form = "{} {} {}" if len(names) == 1 else "ROW({}) {} ROW({})"
    return sql.SQL(form).format(columns, sql.SQL(operator), literals)


def prefer_index(conn: Connection) -> None:
    """For the rest of the transaction: a part of a table is not read by scanning all of it, whatever its statistics
    say. Compiling the statement takes longer than it saves, and how many readers there are is ours to decide."""
    conn.execute("SET LOCAL enable_seqscan = off; SET LOCAL jit = off; SET LOCAL max_parallel_workers_per_gather = 0")
    conn.execute("SET LOCAL enable_indexscan = on; SET LOCAL enable_bitmapscan = on; SET LOCAL enable_tidscan = on")


def prefer_pages(conn: Connection) -> None:
    """After `prefer_index`: the index first tells all pages of the part, which are then read one after the other. Where
    the table lies in the order of its keys that costs the server a twentieth less, and rows come in nearly that order.

    Servers before 18 would ask the system for each page ahead of time; in this order it reads ahead by itself.
    """
    conn.execute("SET LOCAL enable_indexscan = off")
    if conn.info.server_version < _READ_STREAMS:
        conn.execute("SET LOCAL effective_io_concurrency = 0")


_STORAGE: Final = """
SELECT coalesce(string_agg(concat(c.oid, ':', pg_relation_filenode(c.oid)), ' ' ORDER BY c.oid), '')
  FROM pg_class c
 WHERE c.oid = %(oid)s AND c.relkind <> 'p'
    OR c.oid IN (SELECT relid FROM pg_partition_tree(%(oid)s::oid::regclass) WHERE isleaf)
"""


def storage(conn: Connection, table_oid: int) -> str:
    """The files that hold the table. VACUUM FULL, CLUSTER, TRUNCATE and rewriting ALTERs give it other ones."""
    with translated("looking at a table's files"):
        row = conn.execute(_STORAGE, {"oid": table_oid}).fetchone()
        return str(row[0]) if row else ""


def check_storage(conn: Connection, table: TableInfo, before: str) -> None:
    """To be called in the reading transaction, after the read: its lock keeps the files as they are.

    `before` must be of before the snapshot. If they differ, rows may have moved between ranges of pages, or be
    invisible to a snapshot that is older than their rewriting: what was read says nothing.
    """
    if storage(conn, table.oid) != before:
        raise TransientError(
            "SOURCE_TABLE_REWRITTEN",
            f"table {table.qualified} was rewritten while it was being read",
            hint="it is read again",
        )


# -- what a read has seen ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ReadMark:
    """`low`: the snapshot's text from the start of the read. `high`: the log's end after it."""

    low: str
    high: int = 0


@contextmanager
def marked_read(conn: Connection, table: TableInfo) -> Iterator[ReadMark]:
    """A transaction for one read: REPEATABLE READ, READ ONLY; the mark's `high` is set when it has ended well.

    The lock that every SELECT takes is taken before the snapshot: to a snapshot that is older than an ALTER TABLE which
    rewrites the table, and which the read waits for, the table would be empty.
    """
    with translated("reading a split"):
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            conn.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(table.from_clause))
            mark = ReadMark(read_snapshot_mark(conn))
            yield mark
            conn.execute("COMMIT")
        except BaseException:
            if not conn.closed and conn.pgconn.transaction_status != psycopg.pq.TransactionStatus.ACTIVE:
                conn.execute("ROLLBACK")
            raise
        mark.high = current_lsn(conn)


def read_snapshot_mark(conn: Connection) -> str:
    """What the current transaction sees, as `xmin:xmax:xip,…` in 64-bit transaction numbers."""
    row = conn.execute("SELECT pg_current_snapshot()::text").fetchone()
    return str(row[0]) if row else ""


def current_lsn(conn: Connection) -> int:
    """The end of the log, once it is on disk: every transaction that a finished read has seen has ended before it."""
    row = conn.execute(_HIGH).fetchone()
    text = str(row[0]) if row else "0/0"
    deadline = time.monotonic() + FLUSH_WAIT_S
    while (row := conn.execute(_FLUSHED, (text,)).fetchone()) is not None and not row[0]:
        if time.monotonic() > deadline:
            conn.execute(_FLUSH)
            break
        time.sleep(0.01)
    return parse_lsn(text)


def visible(snapshot: str, xids: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Which transactions of the stream (32-bit numbers) a read with this snapshot (64-bit numbers) has seen.

    A 32-bit number stands for the 64-bit one nearest to the snapshot's xmax: the server never lets transactions that
    may still matter get further apart than 2^31. Below xmax it is visible unless it is listed as running.
    """
    _, xmax_text, running_text = snapshot.split(":")
    xmax = int(xmax_text)
    distance = (np.asarray(xids, np.uint32) - np.uint32(xmax & 0xFFFFFFFF)).view(np.int32).astype(np.int64)
    seen = distance < 0
    if running_text:
        running = np.array([int(x) - xmax for x in running_text.split(",")], np.int64)
        seen &= ~np.isin(distance, running)
    return seen
