"""Vnodes are what zlib's crc32 of the canonical text says; the plain twin here is the specification."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import zlib
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.model.vnode import KEY_SEPARATOR, canonical_text, vnodes, vnodes_of_values

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def _micros(value: dt.datetime) -> str:
    delta = value.replace(tzinfo=dt.UTC) - EPOCH
    return str((delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds)


def _float(value: float) -> str:
    if math.isnan(value):
        return "nan"
    return str(int(value)) if abs(value) < 9e15 else "big"


def _unscaled(value: decimal.Decimal) -> str:
    with decimal.localcontext() as context:
        context.prec = 60
        return str(int(value.scaleb(4)))


_DECIMALS = st.integers(-(10**38) + 1, 10**38 - 1).map(
    lambda n: decimal.Decimal((0 if n >= 0 else 1, tuple(map(int, str(abs(n)))), -4))
)
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any], Callable[[Any], str]]] = {
    "tinyint": (pa.int8(), st.integers(-128, 127), str),
    "smallint": (pa.int16(), st.integers(-(2**15), 2**15 - 1), str),
    "int": (pa.int32(), st.integers(-(2**31), 2**31 - 1), str),
    "bigint": (pa.int64(), st.integers(-(2**63), 2**63 - 1), str),
    "boolean": (pa.bool_(), st.booleans(), lambda v: "true" if v else "false"),
    "string": (pa.string(), st.text(), str),
    "large string": (pa.large_string(), st.text(), str),
    "date": (pa.date32(), st.dates(), lambda v: str((v - EPOCH.date()).days)),
    "timestamp": (pa.timestamp("us", tz="UTC"), st.datetimes(timezones=st.just(dt.UTC)), _micros),
    "timestamp_ntz": (pa.timestamp("us"), st.datetimes(), _micros),
    "decimal": (pa.decimal128(38, 4), _DECIMALS, _unscaled),
    "binary": (pa.binary(), st.binary(), lambda v: v.hex().upper()),
    "double": (pa.float64(), st.floats(), _float),
    "float": (pa.float32(), st.floats(width=32), _float),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_every_key_type_has_the_vnode_of_its_canonical_text(kind: str, data: st.DataObject) -> None:
    arrow, strategy, text = KINDS[kind]
    values = data.draw(st.lists(strategy, max_size=20))
    table = pa.table({"k": pa.array(values, arrow)})
    assert canonical_text(table.column("k")).to_pylist() == [text(v) for v in values]
    assert vnodes(table, ("k",), 256).to_pylist() == [zlib.crc32(text(v).encode()) % 256 for v in values]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(95, 205) | st.integers(10**12, 10**12 + 300)), max_size=60))
def test_keys_that_share_their_first_digits_with_the_one_before_are_not_taken_for_it(
    rows: list[tuple[int, int]],
) -> None:
    """In order, as most keys come, and in any; as the whole of a key and behind another column."""
    for given_rows in (rows, sorted(rows)):
        a, b = [x for x, _ in given_rows], [y for _, y in given_rows]
        table = pa.table({"a": pa.array(a, pa.int64()), "b": pa.array(b, pa.int64())})
        assert vnodes(table, ("b",), 256).to_pylist() == [zlib.crc32(str(y).encode()) % 256 for y in b]
        texts = [f"{x}{KEY_SEPARATOR}{y}" for x, y in given_rows]
        assert vnodes(table, ("a", "b"), 256).to_pylist() == [zlib.crc32(t.encode()) % 256 for t in texts]


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(), st.integers(-9, 9), st.binary()), max_size=20), st.integers(1, 1000))
def test_a_key_of_several_columns_is_joined(rows: list[tuple[str, int, bytes]], count: int) -> None:
    a, b, c = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    table = pa.table({"a": pa.array(a, pa.string()), "b": pa.array(b, pa.int64()), "c": pa.array(c, pa.binary())})
    texts = [KEY_SEPARATOR.join((x, str(y), z.hex().upper())) for x, y, z in rows]
    assert vnodes(table, ("a", "b", "c"), count).to_pylist() == [zlib.crc32(t.encode()) % count for t in texts]


@settings(deadline=None)
@given(st.lists(st.text(), min_size=3, max_size=20))
def test_slices_and_chunks_do_not_matter(values: list[str]) -> None:
    table = pa.table({"k": values})
    expected = [zlib.crc32(v.encode()) % 256 for v in values]
    assert vnodes(table.slice(1), ("k",)).to_pylist() == expected[1:]
    chunked = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    assert vnodes(chunked, ("k",)).to_pylist() == expected
    assert vnodes(table.to_batches()[0].slice(2), ("k",)).to_pylist() == expected[2:]


@pytest.mark.parametrize("arrow", [pa.list_(pa.int32()), pa.struct([("a", pa.int32())])])
def test_nested_types_cannot_be_keys(arrow: pa.DataType) -> None:
    with pytest.raises(ValueError, match="cannot be a key"):
        canonical_text(pa.array([], arrow))


def test_vnodes_of_given_values_are_those_of_the_rows() -> None:
    rows = pa.table({"a": ["x", "ü", "x"], "b": pa.array([1, -2, -2], pa.int32())})
    found = set(vnodes_of_values([("x", "ü"), (1, -2)], 256))
    assert set(vnodes(rows, ("a", "b"), 256).to_pylist()) <= found
    assert len(found) <= 4
