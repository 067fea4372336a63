"""Each binary decoder equals a plain twin: what struct and Decimal pack, one value at a time, is what Arrow holds."""

from __future__ import annotations

import datetime as dt
import struct
import uuid
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.connectors.postgres.columns import decode_binary_column
from headwater.connectors.postgres.copybinary import decode_copy_binary
from headwater.connectors.postgres.types import ColumnPlan, Kind, Wire
from headwater.errors import DefiniteError

RUN = settings(max_examples=150, deadline=None)
HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


def copied(rows: list[list[bytes | None]]) -> bytes:
    """The twin of COPY … (FORMAT binary), without header and trailer."""
    fields = (struct.pack("!h", len(row)) + b"".join(map(_field, row)) for row in rows)
    return b"".join(fields)


def _field(value: bytes | None) -> bytes:
    return struct.pack("!i", -1) if value is None else struct.pack("!i", len(value)) + value


def holds(plan: ColumnPlan, values: list[Any], pack: Any, *, expected: Any = lambda v: v) -> None:
    """Alone, and as a column of a copy between two others."""
    rows = [[b"x", None if v is None else pack(v), None] for v in values]
    plans = [ColumnPlan("a", "STRING", Kind.TEXT, wire=Wire.RAW), plan, ColumnPlan("z", "INT", Kind.INT, wire=Wire.INT)]
    batch = decode_copy_binary(HEADER + copied(rows) + b"\xff\xff", plans)
    batch.validate(full=True)
    column = batch.column(1)
    assert column.type == plan.arrow_type
    assert column.to_pylist() == [None if v is None else expected(v) for v in values]
    assert batch.column(0).to_pylist() == ["x"] * len(values) and batch.column(2).null_count == len(values)


def column(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.none() | values, max_size=20)


@pytest.mark.parametrize(("ddl", "code", "bits"), [("SMALLINT", "!h", 16), ("INT", "!i", 32), ("BIGINT", "!q", 64)])
def test_integers_equal_their_twin(ddl: str, code: str, bits: int) -> None:
    @RUN
    @given(column(st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)))
    def check(values: list[int | None]) -> None:
        holds(ColumnPlan("c", ddl, Kind.INT, wire=Wire.INT), values, lambda v: struct.pack(code, v))

    check()


@RUN
@given(column(st.integers(0, 2**32 - 1)))
def test_oids_are_unsigned(values: list[int | None]) -> None:
    holds(ColumnPlan("c", "BIGINT", Kind.INT, wire=Wire.OID), values, lambda v: struct.pack("!I", v))


@RUN
@given(column(st.booleans()))
def test_booleans_equal_their_twin(values: list[bool | None]) -> None:
    holds(ColumnPlan("c", "BOOLEAN", Kind.BOOL, wire=Wire.BOOL), values, lambda v: struct.pack("!?", v))


@RUN
@given(column(st.floats(allow_nan=False)), column(st.floats(allow_nan=False, width=32)))
def test_floats_equal_their_twin(doubles: list[float | None], floats: list[float | None]) -> None:
    holds(ColumnPlan("c", "DOUBLE", Kind.FLOAT, wire=Wire.FLOAT), doubles, lambda v: struct.pack("!d", v))
    holds(ColumnPlan("c", "FLOAT", Kind.FLOAT, wire=Wire.FLOAT), floats, lambda v: struct.pack("!f", v))


@RUN
@given(column(TEXT), column(st.binary(max_size=9)))
def test_texts_and_bytes_are_as_they_are(texts: list[str | None], blobs: list[bytes | None]) -> None:
    holds(ColumnPlan("c", "STRING", Kind.TEXT, wire=Wire.RAW), texts, str.encode)
    holds(ColumnPlan("c", "BINARY", Kind.BYTES, wire=Wire.RAW), blobs, bytes)
    holds(ColumnPlan("c", "STRING", Kind.TEXT, wire=Wire.JSONB), texts, lambda t: b"\x01" + t.encode())


@RUN
@given(column(st.uuids()))
def test_uuids_equal_their_twin(values: list[uuid.UUID | None]) -> None:
    holds(ColumnPlan("c", "STRING", Kind.TEXT, wire=Wire.UUID), values, lambda v: v.bytes, expected=str)


@RUN
@given(column(st.dates()), column(st.datetimes()))
def test_dates_and_times_equal_their_twin(dates: list[dt.date | None], times: list[dt.datetime | None]) -> None:
    first = dt.datetime(2000, 1, 1)
    plan = ColumnPlan("c", "DATE", Kind.DATE, wire=Wire.DATE)
    holds(plan, dates, lambda v: struct.pack("!i", (v - first.date()).days))
    plan = ColumnPlan("c", "TIMESTAMP_NTZ", Kind.TIMESTAMP, wire=Wire.TIMESTAMP)
    holds(plan, times, lambda v: struct.pack("!q", (v - first) // dt.timedelta(microseconds=1)))


def numeric_send(value: Decimal) -> bytes:
    """The twin of Postgres' numeric_send: digits of base 10,000, without zeros at either end."""
    if value.is_nan():
        return struct.pack("!hhHh", 0, 0, 0xC000, 0)
    if value.is_infinite():
        return struct.pack("!hhHh", 0, 0, 0xF000 if value < 0 else 0xD000, 0)
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    scale = max(0, -exponent)
    whole = int("".join(map(str, digits))) * 10 ** (max(0, exponent))
    groups: list[int] = []
    unscaled = whole * 10 ** (-scale % 4)
    weight = -(-scale // 4) * -1 - 1
    while unscaled:
        unscaled, group = divmod(unscaled, 10_000)
        groups.insert(0, group)
        weight += 1
    while groups and groups[-1] == 0:
        groups.pop()
    if not groups:
        weight = 0
    negative = 0x4000 if sign and groups else 0
    return struct.pack(f"!hhHh{len(groups)}h", len(groups), weight, negative, scale, *groups)


@RUN
@given(st.data(), st.integers(1, 38))
def test_decimals_equal_their_twin(data: st.DataObject, precision: int) -> None:
    scale = data.draw(st.integers(0, precision))
    largest = 10**precision - 1
    unscaled = st.integers(-largest, largest) | st.integers(-min(99, largest), min(99, largest))
    values = data.draw(column(unscaled.map(lambda u: Decimal((u < 0, tuple(map(int, str(abs(u)))), -scale)))))
    plan = ColumnPlan(
        "c", f"DECIMAL({precision},{scale})", Kind.DECIMAL, precision=precision, scale=scale, wire=Wire.DECIMAL
    )
    holds(plan, values, numeric_send)


@RUN
@given(column(st.decimals(allow_nan=True, allow_infinity=True, places=7) | st.integers().map(Decimal)))
def test_numerics_are_printed_as_postgres_prints_them(values: list[Decimal | None]) -> None:
    plan = ColumnPlan("c", "STRING", Kind.TEXT, wire=Wire.NUMERIC)
    holds(plan, values, numeric_send, expected=printed)


def printed(value: Decimal) -> str:
    if value.is_nan():
        return "NaN"
    return str(value) if value.is_infinite() else format(value if value else abs(value), "f")


def decode(plan: ColumnPlan, value: bytes) -> pa.Array:
    data = np.frombuffer(value, np.uint8)
    return decode_binary_column(plan, data, np.zeros(1, np.int64), np.array([len(value)]))


@pytest.mark.parametrize(
    ("plan", "value", "code"),
    [
        (ColumnPlan("c", "INT", Kind.INT, wire=Wire.INT), bytes(8), "VALUE_MALFORMED"),
        (ColumnPlan("c", "BOOLEAN", Kind.BOOL, wire=Wire.BOOL), b"", "VALUE_MALFORMED"),
        (ColumnPlan("c", "STRING", Kind.TEXT, wire=Wire.UUID), bytes(15), "VALUE_MALFORMED"),
        (ColumnPlan("c", "STRING", Kind.TEXT, wire=Wire.JSONB), b"\x02{}", "VALUE_MALFORMED"),
        (ColumnPlan("c", "STRING", Kind.TEXT, wire=Wire.NUMERIC), bytes(9), "VALUE_MALFORMED"),
        (ColumnPlan("c", "STRING", Kind.TEXT, wire=Wire.RAW), b"\xff", "VALUE_NOT_REPRESENTABLE"),
        (
            ColumnPlan("c", "DECIMAL(5,1)", Kind.DECIMAL, precision=5, scale=1, wire=Wire.DECIMAL),
            numeric_send(Decimal("NaN")),
            "VALUE_NOT_REPRESENTABLE",
        ),
        (
            ColumnPlan("c", "DECIMAL(5,1)", Kind.DECIMAL, precision=5, scale=1, wire=Wire.DECIMAL),
            numeric_send(Decimal("12345.6")),
            "VALUE_NOT_REPRESENTABLE",
        ),
        (
            ColumnPlan("c", "DECIMAL(5,1)", Kind.DECIMAL, precision=5, scale=1, wire=Wire.DECIMAL),
            numeric_send(Decimal("1.25")),
            "VALUE_NOT_REPRESENTABLE",
        ),
    ],
)
def test_value_of_another_form_is_an_error_that_names_the_column(plan: ColumnPlan, value: bytes, code: str) -> None:
    with pytest.raises(DefiniteError, match="column c") as caught:
        decode(plan, value)
    assert caught.value.code == code


PLANS = [ColumnPlan("a", "INT", Kind.INT, wire=Wire.INT), ColumnPlan("b", "STRING", Kind.TEXT, wire=Wire.RAW)]
ROW = copied([[struct.pack("!i", 7), b"x"]])


def test_blocks_after_the_first_have_no_header_and_only_the_last_a_trailer() -> None:
    for block in (HEADER + ROW, ROW, ROW + b"\xff\xff"):
        assert decode_copy_binary(block, PLANS).to_pydict() == {"a": [7], "b": ["x"]}
    assert decode_copy_binary(HEADER + b"\xff\xff", PLANS).num_rows == 0
    assert decode_copy_binary(b"", PLANS).schema.names == ["a", "b"]


@pytest.mark.parametrize(
    "block", [ROW[:-1], ROW[:7], ROW + b"\0", copied([[b"x"]]), copied([[None] * 3]), ROW + b"\xff\xff" + ROW]
)
def test_rows_that_are_not_whole_or_have_other_fields_are_refused(block: bytes) -> None:
    with pytest.raises(DefiniteError) as caught:
        decode_copy_binary(block, PLANS)
    assert caught.value.code == "COPY_MALFORMED"
