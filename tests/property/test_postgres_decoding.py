"""Each vectorised Postgres decoder equals a plain per-row twin: what the twin reads, one value at a time, is what Arrow holds."""

from __future__ import annotations

import datetime as dt
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.connectors.postgres.columns import decode_column
from headwater.connectors.postgres.copytext import scan_copy_text
from headwater.connectors.postgres.pgoutput import (
    StreamScanner,
    TransactionBegin,
    TransactionEnd,
    decode_events,
    scan_frames,
    spool_frame,
)
from headwater.connectors.postgres.shape import Relation, RelationColumn
from headwater.connectors.postgres.types import ColumnPlan, Kind

RUN = settings(max_examples=150, deadline=None)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
EPOCH = dt.datetime(1970, 1, 1)


def decode(plan: ColumnPlan, texts: list[bytes | None], gap: int = 0) -> pa.Array:
    """Decode the texts as a column of a larger buffer."""
    data, starts, lengths = b"\xff" * gap, [], []
    for text in texts:
        starts.append(len(data))
        lengths.append(-1 if text is None else len(text))
        data += (text or b"") + b"\xff" * gap
    array = decode_column(plan, np.frombuffer(data, np.uint8), np.array(starts, np.int64), np.array(lengths, np.int64))
    array.validate(full=True)
    assert array.type == plan.arrow_type
    return array


def holds(plan: ColumnPlan, texts: list[str | None], twin: Callable[[str], Any], gap: int) -> None:
    got = decode(plan, [None if t is None else t.encode() for t in texts], gap).to_pylist()
    assert got == [None if t is None else twin(t) for t in texts]


def column(values: st.SearchStrategy[str]) -> st.SearchStrategy[list[str | None]]:
    return st.lists(st.none() | values, max_size=20)


GAP = st.integers(0, 3)


@RUN
@given(column(st.integers(-(2**63), 2**63 - 1).map(str)), GAP)
def test_integers_equal_their_twin(texts: list[str | None], gap: int) -> None:
    holds(ColumnPlan("c", "BIGINT", Kind.INT), texts, int, gap)


@RUN
@given(column(st.sampled_from("tf")), GAP)
def test_booleans_equal_their_twin(texts: list[str | None], gap: int) -> None:
    holds(ColumnPlan("c", "BOOLEAN", Kind.BOOL), texts, lambda t: t == "t", gap)


@RUN
@given(column(TEXT), GAP)
def test_texts_equal_their_twin(texts: list[str | None], gap: int) -> None:
    holds(ColumnPlan("c", "STRING", Kind.TEXT), texts, str, gap)


@RUN
@given(column(st.floats(allow_nan=False).map(repr)), GAP)
def test_doubles_equal_their_twin(texts: list[str | None], gap: int) -> None:
    holds(ColumnPlan("c", "DOUBLE", Kind.FLOAT), texts, float, gap)


@RUN
@given(column(st.binary(max_size=9).map(lambda b: "\\x" + b.hex())), GAP)
def test_byteas_equal_their_twin(texts: list[str | None], gap: int) -> None:
    holds(ColumnPlan("c", "BINARY", Kind.BYTES), texts, lambda t: bytes.fromhex(t[2:]), gap)


@RUN
@given(st.data(), st.integers(1, 38), GAP)
def test_decimals_equal_their_twin(data: st.DataObject, precision: int, gap: int) -> None:
    scale = data.draw(st.integers(0, precision))
    unscaled = st.integers(-(10**precision) + 1, 10**precision - 1)
    texts = data.draw(
        column(unscaled.map(lambda u: format(Decimal((u < 0, tuple(map(int, str(abs(u)))), -scale)), "f")))
    )
    plan = ColumnPlan("c", f"DECIMAL({precision},{scale})", Kind.DECIMAL, precision=precision, scale=scale)
    holds(plan, texts, Decimal, gap)


@RUN
@given(column(st.dates().map(str)), GAP)
def test_dates_equal_their_twin(texts: list[str | None], gap: int) -> None:
    holds(ColumnPlan("c", "DATE", Kind.DATE), texts, dt.date.fromisoformat, gap)


def _iso(value: dt.datetime) -> str:
    """As Postgres prints it: no trailing zeros in the fraction."""
    text = value.strftime("%H:%M:%S.%f").rstrip("0").rstrip(".")
    return f"{value.date()} {text}"


@RUN
@given(column(st.datetimes().map(_iso)), GAP)
def test_timestamps_equal_their_twin(texts: list[str | None], gap: int) -> None:
    holds(ColumnPlan("c", "TIMESTAMP_NTZ", Kind.TIMESTAMP), texts, dt.datetime.fromisoformat, gap)


@RUN
@given(
    st.lists(st.tuples(st.datetimes(dt.datetime(2, 1, 1), dt.datetime(9998, 1, 1)), st.integers(-15 * 3600, 15 * 3600)))
)
def test_timestamps_with_an_offset_are_instants(values: list[tuple[dt.datetime, int]]) -> None:
    texts = []
    for value, east in values:
        hours, rest = divmod(abs(east), 3600)
        texts.append(f"{_iso(value)}{'-' if east < 0 else '+'}{hours:02}:{rest // 60:02}:{rest % 60:02}".encode())
    got = decode(ColumnPlan("c", "TIMESTAMP", Kind.TIMESTAMP), list(texts)).cast(pa.int64()).to_pylist()
    assert got == [(v - dt.timedelta(seconds=e) - EPOCH) // dt.timedelta(microseconds=1) for v, e in values]


@RUN
@given(st.lists(st.integers(-2440550, 2145042905)))
def test_days_of_all_years_that_postgres_has_equal_their_twin(days: list[int]) -> None:
    got = decode(ColumnPlan("c", "DATE", Kind.DATE), [_civil(d).encode() for d in days]).cast(pa.int32()).to_pylist()
    assert got == days


def _civil(days: int) -> str:
    """Python's dates end with 9999: shift by whole cycles of 400 years, which have 146097 days."""
    cycles, inside = divmod(days, 146097)
    date = dt.date(1970, 1, 1) + dt.timedelta(inside)
    year = date.year + 400 * cycles
    return f"{year:04}-{date:%m-%d}" if year > 0 else f"{1 - year:04}-{date:%m-%d} BC"


def array_out(elements: list[str | None]) -> str:
    """The twin of Postgres' array_out for one dimension."""
    return "{" + ",".join(map(_element_out, elements)) + "}"


def _element_out(element: str | None) -> str:
    if element is None:
        return "NULL"
    if element == "" or element.upper() == "NULL" or re.search(r'[{}",\\\s]', element):
        return '"' + re.sub(r'(["\\])', r"\\\1", element) + '"'
    return element


@RUN
@given(
    st.lists(
        st.none() | st.lists(st.none() | TEXT | st.sampled_from(["NULL", "null", "{}", ",", '"', "\\"]), max_size=5),
        max_size=9,
    ),
    GAP,
)
def test_arrays_equal_their_twin(values: list[list[str | None] | None], gap: int) -> None:
    plan = ColumnPlan("c", "ARRAY<STRING>", Kind.ARRAY, element=ColumnPlan("c", "STRING", Kind.TEXT))
    texts = [None if v is None else array_out(v).encode() for v in values]
    assert decode(plan, texts, gap).to_pylist() == values
    nested = ColumnPlan("c", "ARRAY<ARRAY<STRING>>", Kind.ARRAY, element=plan)
    wrapped = array_out([None if t is None else t.decode() for t in texts]).encode()
    assert decode(nested, [wrapped]).to_pylist() == [values]


def copy_out(rows: list[list[str | None]]) -> bytes:
    """The twin of COPY … TO STDOUT."""
    special = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\b": "\\b", "\f": "\\f", "\v": "\\v"}
    lines = (
        "\t".join("\\N" if v is None else "".join(special.get(c, c) for c in v) for v in row) + "\n" for row in rows
    )
    return "".join(lines).encode()


CELL = st.none() | TEXT | st.text("\\\tNn\n.b", max_size=6)


@RUN
@given(
    st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(CELL, min_size=n, max_size=n), min_size=1, max_size=8)),
    st.data(),
)
def test_copy_lines_cut_anywhere_equal_their_twin(rows: list[list[str | None]], data: st.DataObject) -> None:
    block = copy_out(rows)
    cut = data.draw(st.integers(0, len(block)))
    first = scan_copy_text(block[:cut], len(rows[0]))
    assert first.consumed == block[:cut].rfind(b"\n") + 1
    second = scan_copy_text(block[first.consumed :], len(rows[0]))
    assert first.consumed + second.consumed == len(block)
    got = []
    for scan in (first, second):
        for starts, lengths in zip(scan.starts, scan.lengths, strict=True):
            got.append(
                [
                    None if n < 0 else scan.data[s : s + n].tobytes().decode()
                    for s, n in zip(starts, lengths, strict=True)
                ]
            )
    assert got == rows


# pgoutput: random transactions over two tables; the twin applies the meaning of the events one by one.

UNSENT = "unsent"
RELATIONS = {
    oid: Relation(oid, "s", f"t{oid}", "d", (RelationColumn("v", 25, -1, False), RelationColumn("k", 25, -1, True)))
    for oid in (7, 9)
}
PLANS = [
    ColumnPlan("k", "STRING", Kind.TEXT, key_position=0, type_oid=25),
    ColumnPlan("v", "STRING", Kind.TEXT, type_oid=25),
]


@dataclass(frozen=True)
class Event:
    oid: int
    op: str
    key: str
    value: str | None
    old_key: str | None


WORD = st.text("ab", max_size=2)
EVENT = st.builds(
    Event, st.sampled_from([7, 9]), st.sampled_from("IUUDT"), WORD, st.none() | WORD | st.just(UNSENT), st.none() | WORD
)


def _tuple(*values: str | None) -> bytes:
    out = struct.pack("!H", len(values))
    for value in values:
        if value is None:
            out += b"n"
        elif value == UNSENT:
            out += b"u"
        else:
            out += b"t" + struct.pack("!I", len(value.encode())) + value.encode()
    return out


def _message(event: Event) -> bytes:
    if event.op == "T":
        return b"T" + struct.pack("!IBII", 2, 0, 1, event.oid)
    body = event.op.encode() + struct.pack("!I", event.oid)
    if event.op == "D":
        return body + b"K" + _tuple(None, event.key)
    if event.op == "U" and event.old_key is not None:
        body += b"K" + _tuple(None, event.old_key)
    value = None if event.op == "I" and event.value == UNSENT else event.value
    return body + b"N" + _tuple(value, event.key)


def _spool(transactions: list[list[Event]]) -> tuple[bytes, list[bytes]]:
    messages = []
    for n, events in enumerate(transactions, 1):
        messages.append(b"B" + struct.pack("!QqI", n * 100, 5, n))
        messages += [_message(e) for e in events]
        messages.append(b"M" + b"\0" * 20)
        messages.append(b"C" + struct.pack("!BQQq", 0, n * 100, n * 100 + 8, 5))
    return b"".join(spool_frame(i, m) for i, m in enumerate(messages)), messages


@RUN
@given(st.lists(st.lists(EVENT, max_size=6), max_size=5), st.sampled_from([7, 9]))
def test_events_equal_their_twin(transactions: list[list[Event]], oid: int) -> None:
    buf, _ = _spool(transactions)
    batch = decode_events(buf, RELATIONS[oid], PLANS)
    changes = batch.changes()
    got = [
        (row["_op"], row["k"], UNSENT if unsent else row["v"], row["_hw_xid"], row["_hw_commit_end_lsn"], before)
        for row, unsent, before in zip(
            changes.rows.to_pylist(), changes.unchanged["v"], changes.before.column("k").to_pylist(), strict=True
        )
    ]
    want: list[tuple[int, str, str | None, int, int, str]] = []
    truncates = 0
    for xid, events in enumerate(transactions, 1):
        for e in (e for e in events if e.oid == oid):
            at = (xid, xid * 100 + 8)
            was = e.old_key if e.op == "U" and e.old_key is not None else e.key
            truncates += e.op == "T"
            if e.op == "D" or (e.op == "U" and was != e.key):
                want.append((2, was, None, *at, was))
            if e.op in "IU":
                want.append((1, e.key, None if e.op == "I" and e.value == UNSENT else e.value, *at, was))
    assert got == want
    assert len(batch.truncates.order) == truncates
    order = changes.rows.column("_hw_order").to_pylist()
    assert order == sorted(set(order))


@RUN
@given(st.lists(st.lists(EVENT, max_size=6), max_size=5))
def test_transactions_equal_those_that_the_scanner_sees(transactions: list[list[Event]]) -> None:
    buf, messages = _spool(transactions)
    frames = scan_frames(buf)
    one, many = StreamScanner(), StreamScanner()
    seen = [(i, e) for i, m in enumerate(messages) if (e := one.feed(m)) is not None]
    assert many.feed_many(frames.data, frames.starts, frames.lengths) == seen
    tx = frames.transactions
    assert [(i, e.xid) for i, e in seen if isinstance(e, TransactionBegin)] == list(zip(tx.first, tx.xid, strict=True))
    assert [(i + 1, e.end_lsn, e.commit_micros) for i, e in seen if isinstance(e, TransactionEnd)] == list(
        zip(tx.last, tx.commit_end_lsn, tx.commit_micros, strict=True)
    )
    assert frames.lsns.tolist() == list(range(len(messages)))
    assert [frames.message(i) for i in range(len(messages))] == messages


# ruff: noqa: E501
