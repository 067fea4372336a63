"""Large values that the stream leaves out because they have not changed: found in our table, or read at the source.

An update says "unchanged" in place of a TOASTed value. What it was is known from an earlier event of the same row, or
from our own table, if the row was in a range that is handed over. It is not known for a row whose key moves out of a
range that is not handed over into one that is. Such a value gets a token, and the row is read at the source, with what
the read had seen (`Patch`). That read is later than the epoch's position P. But a token stands for one value of one row
until an event overwrites it. So the events that the read had seen, also those after P, are followed to where the token
is then: the row read there has the value, and it is the one of P too. If the value was overwritten meanwhile, only a
later P helps (`Overtaken`).

`capture.py` decodes the events; `runtime/source_runtime.py` holds the epoch back until the stream has reached the read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.connectors.postgres.client import PostgresConfig
from headwater.connectors.postgres.pgoutput import XID
from headwater.connectors.postgres.types import ColumnPlan
from headwater.errors import DefiniteError
from headwater.model.schema import OP, OP_DELETE
from headwater.model.vnode import canonical_text

MAX_KEYS: Final = 50_000  # that one epoch reads at the source: a statement of a few MB; beyond, a new copy is cheaper
KEY_SEPARATOR: Final = "\x1f"
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the rows come from, for a task that must read some of them again."""

    config: PostgresConfig
    schema: str
    name: str


@dataclass(frozen=True, slots=True)
class Patch:
    """Rows that were read at the source for their large values: a file, and the read's snapshot."""

    path: str
    snapshot: str


class Missing(Exception):
    """Values that must be read at the source; `keys` are where their rows are now."""

    def __init__(self, keys: pa.Table) -> None:
        super().__init__("large values are missing")
        self.keys = keys


class Overtaken(Exception):
    """Values that were overwritten after P, before they could be read: a later P does not need them."""


@dataclass(frozen=True, slots=True)
class Token:
    """The unknown value of one column of one row, since the event of this number."""

    event: int
    column: int


@dataclass(frozen=True, slots=True)
class Events:
    """Changes in order. `before`: the key that the row had; `known`: our table's row under it is the one before."""

    rows: pa.Table
    before: pa.Table
    unchanged: dict[str, Mask]
    known: Mask

    @classmethod
    def joined(cls, parts: Sequence[Events]) -> Events:
        names = sorted({name for p in parts for name in p.unchanged})
        masks = {n: np.concatenate([p.unchanged.get(n, np.zeros(len(p), bool)) for p in parts]) for n in names}
        return cls(
            pa.concat_tables([p.rows for p in parts]).combine_chunks(),
            pa.concat_tables([p.before for p in parts]).combine_chunks(),
            {n: m for n, m in masks.items() if m.any()},
            np.concatenate([p.known for p in parts]),
        )

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def size(self, widths: Mapping[str, float]) -> float:
        """Bytes of the events once values that were left out are filled in, which are so wide."""
        left_out = sum(float(m.sum()) * widths.get(name, 0.0) for name, m in self.unchanged.items())
        return float(self.rows.nbytes) + left_out

    def pieces(self, widths: Mapping[str, float], limit: float) -> Iterator[Events]:
        """The same events in pieces of about that many bytes once they are filled."""
        count = max(1, min(len(self), round(self.size(widths) / limit)))
        first = 0
        for i in range(1, count + 1):
            end = len(self) if i == count else max(first, len(self) * i // count)
            # A delete may be the first half of a change of key, whose second half still looks the row up.
            while 0 < end < len(self) and self.rows.column(OP)[end - 1].as_py() == OP_DELETE:
                end += 1
            if end > first:
                yield self._slice(first, end - first)
            first = end

    def _slice(self, first: int, count: int) -> Events:
        masks = {name: mask[first : first + count] for name, mask in self.unchanged.items()}
        return Events(
            self.rows.slice(first, count),
            self.before.slice(first, count),
            {name: mask for name, mask in masks.items() if mask.any()},
            self.known[first : first + count],
        )


def row_text(table: pa.Table, key: Sequence[str]) -> pa.Array:
    """A text for each key, another one for every other key: unlike the vnode's text also for fractions."""
    parts = []
    for name in key:
        column = table.column(name)
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        parts.append(column.cast(pa.string()) if pa.types.is_floating(column.type) else canonical_text(column))
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, KEY_SEPARATOR)


class Filling:
    """One table's events of an epoch (`events`), and those after it that a read at the source may have seen (`ahead`).

    Only events of rows with a value left out are looked at one by one. Values stay in Arrow, for Python has no such
    dates as `infinity`: what is followed is the number of the row that has them, counted over the events that are
    looked at, our own rows (`stored`) and those of each patch.
    """

    def __init__(self, events: Events, ahead: Events | None, key: Sequence[str]) -> None:
        self.events, self.key = events, tuple(key)
        everything = Events.joined([events, ahead]) if ahead is not None and len(ahead) else events
        self.names = sorted(everything.unchanged)
        now, was = row_text(everything.rows, key), row_text(everything.before, key)
        left_out = np.logical_or.reduce([everything.unchanged[n] for n in self.names])
        touched = pc.unique(pa.concat_arrays([now.filter(pa.array(left_out)), was.filter(pa.array(left_out))]))
        concerned = pc.or_(pc.is_in(now, value_set=touched), pc.is_in(was, value_set=touched))
        self.index = np.flatnonzero(concerned.to_numpy(zero_copy_only=False))
        take = pa.array(self.index)
        self.keys = everything.rows.select(list(key)).take(take)
        self.now: list[str] = now.take(take).to_pylist()
        self.was: list[str] = was.take(take).to_pylist()
        self.xids = everything.rows.column(XID).to_numpy()[self.index]
        self.known = everything.known[self.index].tolist()
        self.is_delete = (everything.rows.column(OP).to_numpy()[self.index] == OP_DELETE).tolist()
        self.masks = [everything.unchanged[n][self.index].tolist() for n in self.names]
        self.sent = everything.rows.select(self.names).take(take)
        self.in_epoch = self.index < len(events)

    def wanted(self) -> pa.Table:
        """The keys whose rows may be needed of our own table."""
        left_out = np.logical_or.reduce([self.events.unchanged.get(n, _none(self.events)) for n in self.names])
        return self.events.before.take(pa.array(np.flatnonzero(left_out & self.events.known)))

    def replay(self, stored: Mapping[str, int], include: Mask) -> tuple[dict[str, list[Any]], list[list[Any]]]:
        """Follow the rows over some of the events: the last values by key, with the event's number; and all values."""
        latest: dict[str, list[Any]] = {key: [*[row] * len(self.names), -1] for key, row in stored.items()}
        values: list[list[Any]] = [list(range(len(self.now))) for _ in self.names]
        for i in np.flatnonzero(include).tolist():
            key, was = self.now[i], self.was[i]
            if self.is_delete[i]:
                moved = (
                    i + 1 < len(self.now) and self.was[i + 1] == key and not self.is_delete[i + 1] and include[i + 1]
                )
                if not moved:  # else the first half of a change of key: the second half still looks the row up
                    latest.pop(key, None)
                continue
            before = latest.get(was) if self.known[i] else None
            for j, mask in enumerate(self.masks):
                if mask[i]:
                    values[j][i] = Token(i, j) if before is None else before[j]
            if was != key and self.known[i]:
                latest.pop(was, None)
            latest[key] = [*(column[i] for column in values), i]
        return latest, values

    def filled(self, stored: pa.Table, patches: Iterable[tuple[Mask, pa.Table]]) -> pa.Table:
        """The epoch's rows with all values; each patch: which events its read had seen, and the rows that it found."""
        tables = [self.sent, stored]
        ours = self._by_key(stored, len(self.now))
        latest, values = self.replay(ours, self.in_epoch)
        needed = {v for row in latest.values() for v in row[:-1] if isinstance(v, Token)}
        found: dict[Token, int] = {}
        if needed:
            for seen, rows in patches:
                there = self._by_key(rows, sum(t.num_rows for t in tables))
                tables.append(rows)
                then, _ = self.replay(ours, seen)
                for key, row in then.items():
                    if key in there:
                        found |= {v: there[key] for v in row[:-1] if isinstance(v, Token)}
            if needed - found.keys():
                self._missing(ours, needed - found.keys())
        return self._with(values, found, tables)

    def _by_key(self, rows: pa.Table, first: int) -> dict[str, int]:
        """The numbers of rows, from `first` on, by the text of their key."""
        texts = row_text(rows, self.key).to_pylist() if rows.num_rows else []
        return {text: first + i for i, text in enumerate(texts)}

    def _missing(self, stored: Mapping[str, int], tokens: set[Token]) -> None:
        last, _ = self.replay(stored, np.ones(len(self.now), bool))
        places = {v: row[-1] for row in last.values() for v in row[:-1] if isinstance(v, Token)}
        if not tokens <= places.keys():
            raise Overtaken
        if len(tokens) > MAX_KEYS:
            raise unknown_value(self.names[0])
        raise Missing(self.keys.take(pa.array(sorted({places[t] for t in tokens}), pa.int64())))

    def _with(self, values: list[list[Any]], found: Mapping[Token, int], tables: Sequence[pa.Table]) -> pa.Table:
        rows = self.events.rows
        here = np.flatnonzero(self.in_epoch)
        for j, name in enumerate(self.names):
            mask = self.events.unchanged.get(name)
            if mask is None:
                continue
            put = [i for i in here.tolist() if self.masks[j][i]]
            # A value that nobody found is overwritten, or its row deleted, within the epoch.
            new = [found.get(v) if isinstance(v := values[j][i], Token) else v for i in put]
            column = rows.column(name).combine_chunks()
            source = np.arange(len(column))
            source[self.index[put]] = len(column) + np.arange(len(put))
            known = pa.concat_arrays([t.column(name).combine_chunks().cast(column.type) for t in tables])
            both = pa.concat_arrays([column, known.take(pa.array(new, pa.int64()))])
            rows = rows.set_column(rows.schema.get_field_index(name), name, both.take(pa.array(source)))
        return rows


def _none(events: Events) -> Mask:
    return np.zeros(len(events), bool)


def unknown_value(column: str) -> DefiniteError:
    return DefiniteError(
        "TOAST_VALUE_UNKNOWN",
        f"column {column}: the source left out a large value that has not changed, and we do not have it",
        hint="ALTER TABLE … REPLICA IDENTITY FULL on the source, then resync the table",
    )


# -- reading rows again ---------------------------------------------------------------------------------------------


def read_again(origin: Origin, plans: Sequence[ColumnPlan], key: Sequence[str], keys: pa.Table) -> tuple[Any, pa.Table]:
    """The rows of these keys as they are now; gives the read's mark, and the rows."""
    from psycopg import sql

    from headwater.connectors.postgres.catalogue import describe
    from headwater.connectors.postgres.client import connect
    from headwater.connectors.postgres.copytext import decode_copy
    from headwater.connectors.postgres.planner import marked_read, prefer_index
    from headwater.connectors.postgres.rowreader import RowReader

    texts = [_literals(keys.column(name)) for name in key]
    rows = (sql.SQL(", ").join(map(sql.Literal, row)) for row in zip(*texts, strict=True))
    wanted = sql.SQL(", ").join(sql.SQL("({})").format(row) for row in rows)
    names = sql.SQL(", ").join(sql.Identifier(p.name) for p in plans)
    with connect(origin.config, application="headwater backfill") as conn:
        info = describe(conn, origin.schema, origin.name)
        statement = sql.SQL("COPY (SELECT {} FROM {} WHERE ({}) IN ({})) TO STDOUT").format(
            names, info.from_clause, sql.SQL(", ").join(map(sql.Identifier, key)), wanted
        )
        with marked_read(conn, info) as mark:
            prefer_index(conn)
            batches = [decode_copy(block, plans) for block in RowReader(conn, statement.as_string(conn))]
    if not batches:
        return mark, pa.schema([pa.field(p.name, p.arrow_type) for p in plans]).empty_table()
    return mark, pa.Table.from_batches(batches)


def _literals(column: pa.ChunkedArray) -> list[str]:
    """Values of a key column as the source reads them back."""
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return ["\\x" + value.hex() for value in column.to_pylist()]
    return [str(v) for v in column.cast(pa.string()).to_pylist()]
