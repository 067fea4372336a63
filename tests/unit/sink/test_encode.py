"""Column-wise text encodings held against a plain per-value twin."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.connectors.postgres.types import (
    INFINITY_DAYS,
    INFINITY_MICROS,
    MINUS_INFINITY_DAYS,
    MINUS_INFINITY_MICROS,
)
from headwater.sink.encode import array_literal, date_text, hex_text, json_rows, timestamp_text

texts = st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
VALUES = st.fixed_dictionaries(
    {
        "i": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
        "s": texts,
        "l": st.one_of(st.none(), st.lists(texts, max_size=3)),
        "o": st.one_of(st.none(), st.fixed_dictionaries({"a": st.one_of(st.none(), st.booleans()), "b": texts})),
    }
)
SCHEMA = pa.schema(
    {
        "i": pa.int64(),
        "s": pa.string(),
        "l": pa.list_(pa.string()),
        "o": pa.struct({"a": pa.bool_(), "b": pa.string()}),
    }
)


@settings(deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=6), st.data())
def test_json_rows_are_what_a_plain_encoder_gives(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(rows) - 1))
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA).slice(start)
    assert [json.loads(t) for t in json_rows(batch).to_pylist()] == rows[start:]


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.binary(max_size=8)), max_size=6), st.data())
def test_hex_is_what_a_plain_encoder_gives(values: list[bytes | None], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(values)))
    array = pa.array(values, pa.binary()).slice(start)
    assert hex_text(array, "\\x").to_pylist() == [None if v is None else "\\x" + v.hex() for v in values[start:]]


@given(st.lists(st.one_of(st.none(), st.datetimes()), max_size=6), st.data())
def test_times_are_what_python_prints(values: list[dt.datetime | None], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(values)))
    for zone, mark in ((None, ""), ("UTC", "Z")):
        array = pa.array(values, pa.timestamp("us", zone)).slice(start)
        wanted = [None if v is None else v.isoformat(timespec="microseconds") + mark for v in values[start:]]
        assert timestamp_text(array).to_pylist() == wanted
    days = pa.array([None if v is None else v.date() for v in values], pa.date32()).slice(start)
    assert date_text(days).to_pylist() == [None if v is None else v.date().isoformat() for v in values[start:]]


def test_array_literals_quote_what_needs_it_and_keep_null_apart_from_its_text() -> None:
    array = pa.array([["a", None, "NULL", 'q"', "b\\"], [], None])
    assert array_literal(array).to_pylist() == ['{"a",NULL,"NULL","q\\"","b\\\\"}', "{}", None]


def test_what_a_source_gives_for_infinity_prints_as_infinity() -> None:
    micros = pa.array([INFINITY_MICROS, MINUS_INFINITY_MICROS, MINUS_INFINITY_MICROS + 1]).cast(
        pa.timestamp("us", "UTC")
    )
    assert timestamp_text(micros).to_pylist()[:2] == ["infinity", "-infinity"]
    assert timestamp_text(micros).to_pylist()[2].endswith(" BC")
    days = pa.array([INFINITY_DAYS, MINUS_INFINITY_DAYS, 0], pa.int32()).cast(pa.date32())
    assert date_text(days).to_pylist() == ["infinity", "-infinity", "1970-01-01"]


def test_extreme_timestamps_print_as_infinity_and_far_years_exactly() -> None:
    far = [2**63 - 1, -(2**63), 253_402_300_800_000_000, 0, None]
    expected = ["infinity", "-infinity", "10000-01-01T00:00:00.000000", "1970-01-01T00:00:00.000000", None]
    assert timestamp_text(pa.array(far, pa.timestamp("us"))).to_pylist() == expected
