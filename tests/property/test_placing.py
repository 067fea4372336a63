"""Rows go to their places, whatever their types, NULLs and chunks are; the plain twin moves Python values."""

from __future__ import annotations

import datetime as dt
import itertools
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.storage.placing import MOST_WORDS, WORD_BYTES, placed, scatter_positions

RUN = settings(max_examples=80, deadline=None)
WORDS = st.text(st.sampled_from("aäb"), max_size=40)
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "i1": (pa.int8(), st.integers(-128, 127)),
    "i2": (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    "i4": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "i8": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "f4": (pa.float32(), st.floats(allow_nan=False, width=32)),
    "f8": (pa.float64(), st.floats(allow_nan=False)),
    "bool": (pa.bool_(), st.booleans()),
    "date": (pa.date32(), st.dates()),
    "time": (pa.timestamp("us", tz="UTC"), st.datetimes(timezones=st.just(dt.UTC))),
    "dec": (pa.decimal128(38, 2), st.integers(-(10**30), 10**30).map(lambda n: Decimal(n).scaleb(-2))),
    "dec64": (pa.decimal64(18, 2), st.integers(-(10**15), 10**15).map(lambda n: Decimal(n).scaleb(-2))),
    "text": (pa.string(), WORDS),
    "words": (pa.string(), WORDS),
    "blob": (pa.binary(), st.binary(max_size=40)),
    "list": (pa.list_(pa.int32()), st.lists(st.integers(0, 9), max_size=3)),
}


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Every kind of column, each in chunks of its own that are parts of larger arrays."""
    count = draw(st.integers(0, 40))
    columns = {}
    for name, (kind, values) in KINDS.items():
        given_values = draw(
            st.lists(st.none() | values if draw(st.booleans()) else values, min_size=count, max_size=count)
        )
        cuts = [0, *sorted(draw(st.lists(st.integers(0, count), max_size=3))), count]
        ahead = draw(st.integers(0, 9))
        padded = pa.array([None] * ahead + given_values + [None] * 3, kind)
        parts = [padded.slice(ahead + a, b - a) for a, b in itertools.pairwise(cuts)]
        columns[name] = pa.chunked_array(parts, kind)
    return pa.table(columns)


@RUN
@given(tables(), st.randoms(use_true_random=False))
def test_each_row_is_at_its_place(table: pa.Table, random: Any) -> None:
    places = list(range(table.num_rows))
    random.shuffle(places)
    found = placed(table, np.array(places, np.int64), words=["words"])
    found.validate(full=True)
    expected: list[Any] = [None] * table.num_rows
    for row, place in zip(table.to_pylist(), places, strict=True):
        expected[place] = row
    assert found.to_pylist() == expected
    for name, (kind, _) in KINDS.items():
        given_kind = found.schema.field(name).type
        assert given_kind == (pa.dictionary(pa.int32(), pa.string()) if name == "words" and expected else kind)


@RUN
@given(st.lists(st.integers(0, 7), max_size=50))
def test_rows_are_dealt_out_by_their_number_and_stay_in_order(numbers: list[int]) -> None:
    counts, places = scatter_positions(np.array(numbers, np.int32), 8)
    assert counts.tolist() == [numbers.count(n) for n in range(8)]
    ordered = sorted(range(len(numbers)), key=lambda i: numbers[i])
    assert places.tolist() == [ordered.index(i) for i in range(len(numbers))]


@pytest.mark.parametrize(
    ("count", "length", "few"),
    [(MOST_WORDS, 8, True), (MOST_WORDS + 1, 8, False), (3, WORD_BYTES, True), (3, WORD_BYTES + 1, False)],
)
def test_texts_that_are_too_many_or_too_long_for_words_stay_texts(count: int, length: int, few: bool) -> None:
    values = [f"{i:0{length}d}" for i in range(count)] * 2
    table = pa.table({"c": pa.chunked_array([values[:100], values[100:]], pa.string())})
    found = placed(table, np.arange(len(values))[::-1].copy(), words=["c"]).column("c")
    assert found.to_pylist() == values[::-1] and pa.types.is_dictionary(found.type) == few


def test_bytes_that_repeat_are_no_words() -> None:
    values = [b"\\x4142", b"\0\xff", b"", b"\\x4142"]
    found = placed(pa.table({"c": pa.array(values)}), np.arange(4), words=["c"]).column("c")
    assert found.type == pa.binary() and found.to_pylist() == values


@pytest.mark.parametrize("pattern", ["https://shop.example/item/{:04d}/index.html", "{:04d}", "{:08d}", "x{:015d}y"])
def test_words_that_are_alike_at_both_ends_are_told_apart(pattern: str) -> None:
    values = [pattern.format(i * 7 % 1000) for i in range(3000)]
    found = placed(pa.table({"c": pa.array(values)}), np.arange(3000), words=["c"]).column("c").combine_chunks()
    assert found.to_pylist() == values
    assert pa.types.is_dictionary(found.type) and len(found.dictionary) == 1000
