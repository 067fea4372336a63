"""Each binary decoder equals a plain twin: what struct and Decimal pack, one value at a time, is what Arrow holds."""

from __future__ import annotations

import datetime as dt
import random
import struct
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoded_rows import decode_rows
from headwater.connectors.postgres.rowreader import Messages
from headwater.connectors.postgres.types import ColumnPlan, Kind, Wire
from headwater.connectors.postgres.wirerows import TEXT_FORM, RowDecoder, WireRows, forms
from headwater.errors import DefiniteError, TransientError

RUN = settings(max_examples=150, deadline=None)
HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER = b"\xff\xff"
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


def copied(row: list[bytes | None]) -> bytes:
    """The twin of one row of COPY … (FORMAT binary)."""
    return struct.pack("!h", len(row)) + b"".join(map(_field, row))


def _field(value: bytes | None) -> bytes:
    return struct.pack("!i", -1) if value is None else struct.pack("!i", len(value)) + value


def messages(*payloads: bytes) -> Messages:
    """Payloads as they lie in a buffer, with what is not theirs between them."""
    starts = np.array([sum(map(len, payloads[:i])) + 5 * i + 5 for i in range(len(payloads))], np.int64)
    ends = starts + np.array(list(map(len, payloads)), np.int64)
    return Messages(np.frombuffer(b"".join(b"d\xff\xff\xff\xff" + p for p in payloads), np.uint8), starts, ends, True)


def decoded(*payloads: bytes, plans: list[ColumnPlan]) -> pa.RecordBatch:
    batch = decode_rows(WireRows.of(messages(*payloads)), plans)
    batch.validate(full=True)
    return batch


def holds(plan: ColumnPlan, values: list[Any], pack: Any, *, expected: Any = lambda v: v) -> None:
    """As a column of a copy between two others."""
    rows = [copied([b"x", None if v is None else pack(v), None]) for v in values]
    plans = [ColumnPlan("a", "STRING", Kind.TEXT, wire=Wire.RAW), plan, ColumnPlan("z", "INT", Kind.INT, wire=Wire.INT)]
    batch = decoded(HEADER + rows[0], *rows[1:], TRAILER, plans=plans) if rows else decoded(HEADER, plans=plans)
    column = batch.column(1)
    wanted = [None if v is None else expected(v) for v in values]
    assert column.type == plan.arrow_type
    assert column.to_pylist() == wanted
    assert batch.column(0).to_pylist() == ["x"] * len(values) and batch.column(2).null_count == len(values)
    apart = WireRows.of(messages(HEADER, *rows, TRAILER))
    assert decode_rows(apart, plans).column(1).to_pylist() == wanted


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
        decoded(copied([value]), plans=[plan])
    assert caught.value.code == code


PLANS = [ColumnPlan("a", "INT", Kind.INT, wire=Wire.INT), ColumnPlan("b", "STRING", Kind.TEXT, wire=Wire.RAW)]
ROW = copied([struct.pack("!i", 7), b"x"])


def test_header_and_trailer_are_no_rows_wherever_they_stand() -> None:
    for payloads in ([HEADER + ROW], [HEADER, ROW], [ROW], [ROW, TRAILER], [HEADER + ROW, TRAILER]):
        assert decoded(*payloads, plans=PLANS).to_pydict() == {"a": [7], "b": ["x"]}
    assert decoded(HEADER, TRAILER, plans=PLANS).num_rows == 0
    assert decoded(HEADER + TRAILER, plans=PLANS).num_rows == 0
    assert decoded(plans=PLANS).schema.names == ["a", "b"]


@pytest.mark.parametrize(
    "row", [ROW[:-1], ROW[:7], ROW[:1], b"", ROW + b"\0", copied([b"x"]), copied([None] * 3), ROW + ROW]
)
def test_rows_that_are_not_whole_or_have_other_fields_are_refused(row: bytes) -> None:
    with pytest.raises(TransientError) as caught:
        decoded(ROW, row, ROW, plans=PLANS)
    assert caught.value.code == "COPY_MALFORMED"


@pytest.mark.parametrize("size", [-2, 1 << 30, (1 << 31) - 1])
def test_length_beyond_the_row_is_refused_and_not_followed(size: int) -> None:
    row = struct.pack("!hi", 2, 4) + bytes(4) + struct.pack("!i", size) + b"x"
    with pytest.raises(TransientError) as caught:
        decoded(row, plans=PLANS)
    assert caught.value.code == "COPY_MALFORMED"


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_many_rows_of_every_kind_are_what_their_twin_packed(seed: int) -> None:
    """More rows than a block has."""
    rng = random.Random(seed)
    kinds: list[tuple[ColumnPlan, Callable[[], tuple[Any, bytes]]]] = [
        (ColumnPlan("i2", "SMALLINT", Kind.INT, wire=Wire.INT), lambda: packed("!h", rng.randint(-(2**15), 2**15 - 1))),
        (ColumnPlan("i4", "INT", Kind.INT, wire=Wire.INT), lambda: packed("!i", rng.randint(-(2**31), 2**31 - 1))),
        (ColumnPlan("i8", "BIGINT", Kind.INT, wire=Wire.INT), lambda: packed("!q", rng.randint(-(2**63), 2**63 - 1))),
        (ColumnPlan("oid", "BIGINT", Kind.INT, wire=Wire.OID), lambda: packed("!I", rng.randrange(2**32))),
        (ColumnPlan("bool", "BOOLEAN", Kind.BOOL, wire=Wire.BOOL), lambda: packed("!?", rng.random() < 0.5)),
        (ColumnPlan("f8", "DOUBLE", Kind.FLOAT, wire=Wire.FLOAT), lambda: packed("!d", rng.random())),
        (ColumnPlan("text", "STRING", Kind.TEXT, wire=Wire.RAW), lambda: text(rng.choice(["", "ä", "abc" * 9]))),
        (ColumnPlan("json", "STRING", Kind.TEXT, wire=Wire.JSONB), lambda: text(str(rng.random()), b"\x01")),
        (ColumnPlan("dec", "DECIMAL(9,2)", Kind.DECIMAL, 9, 2, wire=Wire.DECIMAL), lambda: decimal(rng)),
    ]
    plans = [plan for plan, _ in kinds]
    rows = [[None if rng.random() < 0.1 else make() for _, make in kinds] for _ in range(rng.choice([1, 63, 64, 5000]))]
    payloads = [copied([None if v is None else v[1] for v in row]) for row in rows]
    batch = decode_rows(WireRows.of(messages(*payloads)), plans)
    batch.validate(full=True)
    expected = [{p.name: None if v is None else v[0] for p, v in zip(plans, row, strict=True)} for row in rows]
    assert batch.to_pylist() == expected
    chosen = forms(plans)
    printed_rows = [
        copied([None if v is None else v[1] if chosen[i] else printed_as(v[0]) for i, v in enumerate(row)])
        for row in rows
    ]
    mixed = RowDecoder(plans, chosen).decode(WireRows.of(messages(*printed_rows), chosen))
    mixed.validate(full=True)
    assert mixed.to_pylist() == expected
    assert mixed.column("dec").type == pa.decimal64(9, 2)


@pytest.mark.parametrize(
    ("text_of", "value"),
    [
        ("1.5000", "1.50"),
        ("-1.5000", "-1.50"),
        ("0.0000", "0.00"),
        ("100.0000", "100.00"),
        ("1" * 16 + ".2500000", "1" * 16 + ".25"),
        ("7.", "7.00"),
    ],
)
def test_zeros_beyond_the_scale_are_nothing(text_of: str, value: str) -> None:
    plan = ColumnPlan("c", "DECIMAL(18,2)", Kind.DECIMAL, 18, 2, wire=Wire.DECIMAL)
    rows = WireRows.of(messages(copied([text_of.encode()])), (TEXT_FORM,))
    assert decode_rows(rows, [plan]).column(0).to_pylist() == [Decimal(value)]
    for other in ("1.505", "1.5001", "0.001"):
        with pytest.raises(DefiniteError, match="outside of the range"):
            decode_rows(WireRows.of(messages(copied([other.encode()])), (TEXT_FORM,)), [plan])


def printed_as(value: Any) -> bytes:
    """As Postgres prints it."""
    return (str(value)[0].lower() if isinstance(value, bool) else str(value)).encode()


@pytest.mark.parametrize(("ddl", "bits"), [("SMALLINT", 16), ("INT", 32), ("BIGINT", 64)])
@pytest.mark.parametrize("beyond", [0, 1])
def test_digits_of_integers_are_taken_to_the_ends_of_their_range(ddl: str, bits: int, beyond: int) -> None:
    plan = ColumnPlan("c", ddl, Kind.INT, wire=Wire.INT)
    for value in (-(2 ** (bits - 1)) - beyond, 2 ** (bits - 1) - 1 + beyond):
        rows = WireRows.of(messages(copied([str(value).encode()])), (TEXT_FORM,))
        if not beyond:
            assert decode_rows(rows, [plan]).column(0).to_pylist() == [value]
            continue
        with pytest.raises(DefiniteError, match="outside of the range"):
            decode_rows(rows, [plan])


@pytest.mark.parametrize("text_of", [b"", b"-", b"1x", b"1.5", b"tt", b"\xff"])
@pytest.mark.parametrize(
    "plan",
    [
        ColumnPlan("c", "INT", Kind.INT, wire=Wire.INT),
        ColumnPlan("c", "BOOLEAN", Kind.BOOL, wire=Wire.BOOL),
        ColumnPlan("c", "DECIMAL(5,0)", Kind.DECIMAL, 5, 0, wire=Wire.DECIMAL),
    ],
)
def test_texts_that_the_type_does_not_have_are_refused(plan: ColumnPlan, text_of: bytes) -> None:
    with pytest.raises(DefiniteError, match="column c"):
        decode_rows(WireRows.of(messages(copied([text_of])), (TEXT_FORM,)), [plan])


def test_forms_never_ask_for_more_binary_values_than_the_server_has_room_for() -> None:
    wide = [ColumnPlan(f"i{n}", "INT", Kind.INT, wire=Wire.INT) for n in range(20)]
    assert sum(forms(wide)) == 7 and forms(wide[:5]) == (1,) * 5
    times = [ColumnPlan(f"t{n}", "DATE", Kind.DATE, wire=Wire.DATE) for n in range(9)]
    assert forms([*wide, *times]) == (0,) * 20 + (1,) * 9
    others = [
        ColumnPlan("s", "STRING", Kind.TEXT, wire=Wire.RAW),
        ColumnPlan("b", "BINARY", Kind.BYTES, wire=Wire.RAW),
        ColumnPlan("n", "DECIMAL(9,2)", Kind.DECIMAL, 9, 2, wire=Wire.DECIMAL),
        ColumnPlan("x", "ARRAY<INT>", Kind.ARRAY),
        ColumnPlan("u", "STRING", Kind.TEXT, wire=Wire.UUID),
    ]
    assert forms(others) == (0, 1, 0, 0, 1)


def packed(code: str, value: Any) -> tuple[Any, bytes]:
    return value, struct.pack(code, value)


def text(value: str, before: bytes = b"") -> tuple[str, bytes]:
    return value, before + value.encode()


def decimal(rng: random.Random) -> tuple[Decimal, bytes]:
    value = Decimal(rng.randint(-(10**9) + 1, 10**9 - 1)).scaleb(-2)
    return value, numeric_send(value)
