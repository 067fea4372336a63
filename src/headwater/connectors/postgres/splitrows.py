"""The rows of a split as Arrow columns, by the cheapest way that the connection, the types and the keys allow.

    by statement   SELECT past libpq, each column in the form that costs the server less; else COPY, binary or text
    by place       pages of a table that lies in the order of its keys (`dense.py`); else by the index

`planner.py` says what a split is and what a read of it has seen, `rowreader.py` gets the bytes, `wirerows.py` and
`copytext.py` decode them. The transaction, the pace, and what becomes of the rows are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import psycopg
import pyarrow as pa
from psycopg import sql

from headwater.capture.splits import Split, SplitKind
from headwater.connectors.postgres.catalogue import TableInfo
from headwater.connectors.postgres.copytext import decode_copy
from headwater.connectors.postgres.dense import DensePart, dense_part, missing_query
from headwater.connectors.postgres.planner import copy_statement, current_types, prefer_pages, split_query
from headwater.connectors.postgres.rowreader import RowReader
from headwater.connectors.postgres.types import ColumnPlan
from headwater.connectors.postgres.wire import reachable
from headwater.connectors.postgres.wirerows import RowDecoder, WireRows, forms, has_binary

PIECE_BYTES: Final = 2 << 20  # decoded at once, while they are in a core's cache, where they have just been received


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Reads parts of one table, inside of a transaction; `count` is told how many rows have come, and may wait.

    `by_content`: rows are known by their texts (a table without a key), and read as such.
    """

    conn: psycopg.Connection[Any]
    table: TableInfo
    plans: Sequence[ColumnPlan]
    count: Callable[[int], None]
    block_bytes: int
    by_content: bool = False

    def read(self, split: Split, *, dense: bool = True) -> tuple[pa.Table, bool]:
        """The rows of the split, and whether to try the next one page by page, as `dense` says for this one."""
        as_planned = self._is_as_planned()
        fast = as_planned and reachable(self.conn)
        if fast and dense and (part := dense_part(self.conn, self.table, split)) is not None:
            if (rows := self._dense(part)) is not None:
                return rows, True
            dense = False
        if self.table.in_key_order and split.kind is SplitKind.KEY:
            prefer_pages(self.conn)
        if fast:
            return self._selected(split_query(self.table, self._names, split, self._absent)), dense
        return self._copied(split, binary=as_planned and has_binary(self.plans)), dense

    @property
    def _names(self) -> list[str]:
        return [p.name for p in self.plans]

    @property
    def _absent(self) -> list[str]:
        return [p.name for p in self.plans if p.absent]

    def _is_as_planned(self) -> bool:
        """Whether the columns are still of the types that were planned for: bytes do not say what they are of."""
        if self.by_content:
            return False
        present = [p for p in self.plans if not p.absent]
        return current_types(self.conn, self.table, [p.name for p in present]) == [p.wire_oid for p in present]

    def _dense(self, part: DensePart) -> pa.Table | None:
        """None: the pages have too few of the keys."""
        found = part.within(self._selected(split_query(self.table, self._names, part.pages, self._absent)))
        if found is None:
            return None
        rows, gaps = found
        if not gaps:
            return rows
        elsewhere = self._selected(missing_query(self.table, self._names, gaps, self._absent))
        return pa.concat_tables([rows, elsewhere])

    def _selected(self, query: sql.Composed) -> pa.Table:
        chosen = forms(self.plans)
        reader = RowReader(self.conn, query.as_string(self.conn), block_bytes=self.block_bytes, forms=chosen)
        return self._decoded(reader, chosen)

    def _copied(self, split: Split, *, binary: bool) -> pa.Table:
        statement = copy_statement(self.table, self._names, split, self._absent, binary=binary).as_string(self.conn)
        reader = RowReader(self.conn, statement, block_bytes=self.block_bytes)
        return self._decoded(reader) if binary else self._decoded_texts(reader)

    def _decoded(self, reader: RowReader, forms: tuple[int, ...] | None = None) -> pa.Table:
        decoder = RowDecoder(self.plans, forms)
        pieces = reader.messages(most_bytes=PIECE_BYTES, count=self.count)
        with closing(pieces):  # its end sets the connection right, which is used next
            return pa.Table.from_batches([decoder.decode(WireRows.of(piece, forms)) for piece in pieces])

    def _decoded_texts(self, reader: RowReader) -> pa.Table:
        batches = []
        for block in reader:
            batches.append(decode_copy(block, self.plans, row_id=self.by_content))
            self.count(batches[-1].num_rows)
        if not batches:
            return pa.schema([pa.field(p.name, p.arrow_type) for p in self.plans]).empty_table()
        return pa.Table.from_batches(batches)
