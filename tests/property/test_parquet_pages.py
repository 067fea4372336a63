"""Our Parquet files read as what was written; encoders against plain twins that take one value at a time."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headwater.model.schema import OP, SEQ, VNODE
from headwater.storage import pages, parquet
from headwater.storage.packing import DELTA_BINARY_PACKED, packing, unpacked
from headwater.storage.parquet import supported, write_table
from headwater.storage.segments import ROW_GROUP_BYTES, ROW_GROUP_ROWS, _groups, _without_levels

ROWS = (0, 1, 2, 7, 8, 9, 31, 32, 33, 64, 65, 127, 128, 129, 130, 161, 257, 1000)
MANY_ROWS = 65_536 + 4097
DICTIONARY = pa.dictionary(pa.int32(), pa.string())
Random = np.random.Generator


# Values of a column, from a seed: hypothesis chooses what sort they are, not each of them.


def whole(bits: int) -> Callable[[Random, int, str], list[int]]:
    least, greatest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def made(random: Random, rows: int, sort: str) -> list[int]:
        match sort:
            case "extreme":  # differences wrap around
                return [int(x) for x in random.choice(np.array([least, greatest, 0, -1, 1]), rows)]
            case "free":
                return [int(x) for x in random.integers(least, greatest, rows, endpoint=True)]
            case "same":
                return [int(random.integers(least, greatest, endpoint=True))] * rows
            case "runs":
                return sorted(int(x) for x in random.integers(-3, 3, rows))
            case _:
                start = int(random.integers(-100, 100 - 2 * min(rows, 40)))
                return [max(least, min(greatest, start + int(x))) for x in np.arange(rows) % 90 * 3]

    return made


def digits(precision: int) -> Callable[[Random, int, str], list[Decimal]]:
    def made(random: Random, rows: int, sort: str) -> list[Decimal]:
        limit = 10**precision - 1
        found = whole(64)(random, rows, sort)
        return [Decimal(max(-limit, min(limit, x))).scaleb(-2) for x in found]

    return made


def floats(random: Random, rows: int, sort: str) -> list[float]:
    match sort:
        case "extreme":
            odd = [float("nan"), -0.0, 0.0, float("inf"), float("-inf"), 1.5]
            return [odd[i] for i in random.integers(0, len(odd), rows)]
        case "free":
            return [float(x) for x in random.normal(size=rows)]
        case "same":
            return [[-0.0, 0.0, float("nan"), 2.5][random.integers(4)]] * rows
        case "runs":
            return sorted(float(x) for x in random.integers(-1, 2, rows))
        case _:
            return [float(x) for x in np.arange(rows) % 7]


def texts(random: Random, rows: int, sort: str) -> list[str]:
    match sort:
        case "extreme":
            long = ["", "x" * 15, "y" * 16, "z" * 17, "ä" * 3000, "\0"]
            return [long[i] for i in random.integers(0, len(long), rows)]
        case "free":
            return [f"{x:x}" for x in random.integers(0, 2**62, rows)]
        case "same":
            return [["", "same"][random.integers(2)]] * rows
        case "runs":
            return sorted(f"{x}" for x in random.integers(0, 4, rows))
        case _:
            return [f"word {x % 9}" for x in range(rows)]


def flags(random: Random, rows: int, sort: str) -> list[bool]:
    if sort == "same":
        return [bool(random.integers(2))] * rows
    return [bool(x) for x in random.integers(0, 2, rows)]


SORTS = ("extreme", "free", "same", "runs", "near")
TYPES: dict[pa.DataType, Callable[[Random, int, str], Sequence[Any]]] = {
    pa.bool_(): flags,
    pa.int8(): whole(8),
    pa.int16(): whole(16),
    pa.int32(): whole(32),
    pa.int64(): whole(64),
    pa.float32(): floats,
    pa.float64(): floats,
    pa.string(): texts,
    pa.binary(): texts,
    pa.date32(): whole(32),
    pa.timestamp("us"): whole(64),
    pa.timestamp("us", "UTC"): whole(64),
    pa.timestamp("us", "Europe/Zurich"): whole(64),
    pa.decimal128(18, 2): digits(18),
    pa.decimal128(9, 2): digits(9),
    pa.decimal64(12, 2): digits(12),
    pa.decimal64(7, 2): digits(7),
    pa.decimal32(9, 2): digits(9),
    DICTIONARY: texts,
    pa.dictionary(pa.int8(), pa.binary()): texts,
}
NEAR = (pa.types.is_integer, pa.types.is_date32, pa.types.is_timestamp, pa.types.is_decimal)


@dataclass(frozen=True)
class ColumnCase:
    kind: pa.DataType
    sort: str
    nulls: float
    words: bool
    near: bool
    codec: str
    compared: bool

    def array(self, random: Random, rows: int) -> pa.Array:
        values = list(TYPES[self.kind](random, rows, self.sort))
        given = [None if null else v for v, null in zip(values, random.random(rows) < self.nulls, strict=True)]
        if pa.types.is_dictionary(self.kind):
            if self.kind.index_type.bit_width == 8:
                given = given[:100] + given[:1] * max(0, rows - 100)
            value_type = self.kind.value_type
            return pa.array(_as_type(given, value_type), value_type).dictionary_encode().cast(self.kind)
        if pa.types.is_timestamp(self.kind) or pa.types.is_date32(self.kind):  # by number: most have no Python twin
            return pa.array(given, pa.int32() if pa.types.is_date32(self.kind) else pa.int64()).cast(self.kind)
        return pa.array(_as_type(given, self.kind), self.kind)


def _as_type(values: list[Any], kind: pa.DataType) -> list[Any]:
    return [v.encode() if isinstance(v, str) and pa.types.is_binary(kind) else v for v in values]


@dataclass(frozen=True)
class Case:
    columns: tuple[ColumnCase, ...]
    rows: int
    skipped: int
    group: int
    seed: int

    def table(self) -> pa.Table:
        """A slice, whose arrays begin somewhere in their memory."""
        random = np.random.default_rng(self.seed)
        arrays = [c.array(random, self.skipped + self.rows + 3) for c in self.columns]
        return pa.table(arrays, names=[f"c{i}" for i in range(len(arrays))]).slice(self.skipped, self.rows)

    def packed(self) -> dict[str, Any]:
        columns = {f"c{i}": c for i, c in enumerate(self.columns)}
        near = [n for n, c in columns.items() if c.near and not c.words and any(is_kind(c.kind) for is_kind in NEAR)]
        packed: dict[str, Any] = {
            "use_dictionary": [n for n, c in columns.items() if c.words],
            "store_decimal_as_integer": True,
            "write_statistics": [n for n, c in columns.items() if c.compared],
            "compression": {n: c.codec for n, c in columns.items()},
            "compression_level": {n: 1 for n, c in columns.items() if c.codec == "zstd"},
        }
        return packed | ({"column_encoding": dict.fromkeys(near, DELTA_BINARY_PACKED)} if near else {})


columns = st.builds(
    ColumnCase,
    kind=st.sampled_from(list(TYPES)),
    sort=st.sampled_from(SORTS),
    nulls=st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
    words=st.booleans(),
    near=st.booleans(),
    codec=st.sampled_from(["none", "none", "zstd", "snappy"]),
    compared=st.booleans(),
)
cases = st.builds(
    Case,
    columns=st.lists(columns, min_size=1, max_size=5).map(tuple),
    rows=st.sampled_from(ROWS),
    skipped=st.sampled_from([0, 0, 1, 3, 8, 64]),
    group=st.sampled_from([1000, 1000, 64, 33]),
    seed=st.integers(0, 2**32),
)


def ours(rows: pa.Table, group: int, packed: dict[str, Any]) -> pq.ParquetFile:
    out = io.BytesIO()
    write_table(rows, out, row_group_size=group, **packed)
    return pq.ParquetFile(pa.BufferReader(out.getvalue()))


def theirs(rows: pa.Table, group: int, packed: dict[str, Any]) -> pq.ParquetFile:
    out = io.BytesIO()
    pq.write_table(_without_levels(rows), out, store_schema=False, row_group_size=group, **packed)
    return pq.ParquetFile(pa.BufferReader(out.getvalue()))


def as_read(rows: pa.Table) -> pa.Table:
    """In the types of a reader; floats by their bits, as a NaN is not equal to itself, but zeros of both signs are."""
    arrays = []
    for column in rows.columns:
        kind, array = column.type, column.combine_chunks()
        if pa.types.is_dictionary(kind):
            array = array.cast(kind.value_type)
        elif pa.types.is_decimal(kind):
            array = array.cast(pa.decimal128(kind.precision, kind.scale))
        elif pa.types.is_timestamp(kind) and kind.tz:  # a file knows no zones
            array = array.cast(pa.timestamp("us", "UTC"))
        elif pa.types.is_floating(kind):
            array = array.view(pa.int64() if kind.bit_width == 64 else pa.int32())
        arrays.append(array)
    return pa.table(arrays, names=rows.column_names)


def check_same_schema(mine: pq.ParquetFile, other: pq.ParquetFile) -> None:
    assert mine.schema_arrow.equals(other.schema_arrow)
    assert mine.schema.equals(other.schema)
    for a, b in zip(mine.schema, other.schema, strict=True):
        assert (str(a.logical_type), a.converted_type, a.physical_type) == (
            str(b.logical_type),
            b.converted_type,
            b.physical_type,
        )
        assert (a.path, a.max_definition_level) == (b.path, b.max_definition_level)


def check_same_statistics(rows: pa.Table, group: int, mine: pq.ParquetFile, other: pq.ParquetFile) -> None:
    for g in range(mine.metadata.num_row_groups):
        for i, column in enumerate(rows.slice(g * group, group).columns):
            a, b = mine.metadata.row_group(g).column(i), other.metadata.row_group(g).column(i)
            assert a.is_stats_set == b.is_stats_set
            if a.is_stats_set:
                assert a.statistics.null_count == b.statistics.null_count
                assert bounds(a.statistics) == expected_bounds(column, b.statistics)


def bounds(found: pq.Statistics) -> tuple[Any, Any] | None:
    if not found.has_min_max:
        return None
    if isinstance(found.min_raw, float):  # zeros have signs
        return struct.pack("d", found.min_raw), struct.pack("d", found.max_raw)
    return found.min_raw, found.max_raw


def expected_bounds(column: pa.ChunkedArray, theirs: pq.Statistics) -> tuple[Any, Any] | None:
    """Those that Arrow writes; but none beside a NaN, which for Spark is the greatest number, and those of the words
    that occur, where Arrow takes the whole dictionary as soon as there is a NULL."""
    values = column.drop_null().to_pylist() if pa.types.is_floating(column.type) else []
    if any(v != v for v in values):
        return None
    if not pa.types.is_dictionary(column.type):
        return bounds(theirs)
    words = [v for v in column.cast(column.type.value_type).cast(pa.binary()).to_pylist() if v is not None]
    if not words or max(len(min(words)), len(max(words))) > parquet.MOST_BOUND_BYTES:
        return None
    return min(words), max(words)


def check(rows: pa.Table, group: int, packed: dict[str, Any]) -> pq.ParquetFile:
    assert supported(rows.schema)
    mine = ours(rows, group, packed)
    assert as_read(mine.read()).equals(as_read(rows))
    other = theirs(rows, group, packed)
    check_same_schema(mine, other)
    if rows.num_rows:
        check_same_statistics(rows, group, mine, other)
    bounds = [mine.metadata.row_group(g).num_rows for g in range(mine.metadata.num_row_groups)]
    assert bounds == [min(group, rows.num_rows - start) for start in range(0, rows.num_rows, group)]
    assert mine.metadata.num_rows == rows.num_rows
    return mine


@settings(max_examples=400, deadline=None)
@given(cases)
def test_what_is_written_is_read_with_the_schema_and_statistics_that_arrow_writes(case: Case) -> None:
    check(case.table(), case.group, case.packed())


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("sort", SORTS)
def test_many_rows_are_read_as_they_were_written(sort: str, words: bool) -> None:
    chosen = [ColumnCase(k, sort, 0.1 if i % 3 == 0 else 0.0, words, True, "none", True) for i, k in enumerate(TYPES)]
    chosen = [c for c in chosen if not (pa.types.is_dictionary(c.kind) and c.kind.index_type.bit_width == 8)]
    if sort == "extreme":  # long texts, of which fewer do
        chosen = [c for c in chosen if TYPES[c.kind] is not texts]
    case = Case(tuple(chosen), MANY_ROWS, 5, ROW_GROUP_ROWS, 7)
    check(case.table(), case.group, case.packed())


@settings(max_examples=50, deadline=None)
@given(cases)
def test_packing_and_its_absence_for_small_files_are_understood_by_both_writers(case: Case) -> None:
    rows = case.table()
    for name, kind in ((VNODE, pa.int32()), (OP, pa.int8()), (SEQ, pa.int64())):
        rows = rows.append_column(name, pa.array(sorted(i % 3 for i in range(rows.num_rows)), kind))
    check(rows, case.group, packing(rows, ("c0",)))
    check(rows, case.group, unpacked(rows.schema, ("c0",)))


def test_row_groups_of_wide_rows_are_bounded_by_their_bytes() -> None:
    assert _groups(1000, 1000) == {"row_group_size": ROW_GROUP_ROWS, "write_batch_size": 1024}
    assert _groups(10, 10 * ROW_GROUP_BYTES)["row_group_size"] == 1
    assert _groups(0, 0)["row_group_size"] == ROW_GROUP_ROWS


def test_columns_in_several_chunks_and_without_any_are_written() -> None:
    parts = [pa.table({"n": [i, None], "t": pa.array([f"t{i}", "x"]).dictionary_encode()}) for i in range(3)]
    rows = pa.concat_tables(parts)
    assert as_read(ours(rows, 4, {}).read()).equals(as_read(rows))
    empty = rows.schema.empty_table()
    assert ours(empty, 4, {}).read().num_rows == 0


def test_null_that_only_a_dictionary_has_is_a_null() -> None:
    words = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int32()), pa.array(["a", None]))
    mine = ours(pa.table({"w": words}), 10, {"write_statistics": ["w"]})
    assert mine.read().column("w").to_pylist() == ["a", None, "a"]
    assert mine.metadata.row_group(0).column(0).statistics.null_count == 1


def test_words_of_a_dictionary_that_do_not_occur_are_not_written() -> None:
    words = pa.DictionaryArray.from_arrays(pa.array([2, 0, 2], pa.int32()), pa.array(["b", "a" * 9999, "c"]))
    mine = ours(pa.table({"w": words}), 10, {"write_statistics": ["w"]})
    column = mine.metadata.row_group(0).column(0)
    assert column.total_uncompressed_size < 200 and (column.statistics.min, column.statistics.max) == ("b", "c")


@pytest.mark.parametrize("count", [parquet.MOST_WORDS, parquet.MOST_WORDS + 1])
def test_dictionary_is_given_up_beyond_a_number_of_entries(count: int) -> None:
    numbers = pa.array(np.random.default_rng(1).permutation(np.repeat(np.arange(count), 2)))
    rows = pa.table({"n": numbers, "t": numbers.cast(pa.string())})
    mine = check(rows, ROW_GROUP_ROWS, unpacked(rows.schema) | {"use_dictionary": ["n", "t"]})
    for i in range(2):
        assert mine.metadata.row_group(0).column(i).has_dictionary_page is (count <= parquet.MOST_WORDS)


def test_dictionary_of_long_texts_is_given_up() -> None:
    rows = pa.table({"t": ["x" * parquet.MOST_WORD_BYTES + str(i % 2) for i in range(6)]})
    mine = ours(rows, 10, {"use_dictionary": ["t"]})
    assert not mine.metadata.row_group(0).column(0).has_dictionary_page
    assert as_read(mine.read()).equals(rows)


def test_long_runs_of_a_column_with_a_dictionary_take_a_few_bytes_each() -> None:
    rows = pa.table({"v": pa.array(np.repeat(np.arange(100, dtype=np.int32), 500))})
    mine = check(rows, ROW_GROUP_ROWS, unpacked(rows.schema) | {"use_dictionary": ["v"]})
    assert mine.metadata.row_group(0).column(0).total_compressed_size < 100 * (4 + 4) + 100


def test_texts_are_cut_into_pages_of_about_their_bound_and_a_text_never() -> None:
    sizes = [100] * 30_000 + [3 * parquet.PAGE_BYTES, 0, 5]
    array = pa.array(["x" * n for n in sizes])
    parts = list(parquet._paged(array.slice(1)))
    assert pa.concat_arrays(parts).equals(array.slice(1))
    assert all(sum(len(t) for t in p.to_pylist()) <= parquet.PAGE_BYTES or len(p) == 1 for p in parts)
    assert len(parts) == 5
    rows = pa.table({"t": pa.chunked_array([array])})
    packed = {"compression": {"t": "zstd"}, "compression_level": {"t": 1}}
    assert as_read(ours(rows, ROW_GROUP_ROWS, packed).read()).equals(as_read(rows))
    holes = pa.table({"t": [None if i % 3 == 0 else "y" * 100 for i in range(40_000)]})
    assert ours(holes, ROW_GROUP_ROWS, {}).read().equals(holes)


@pytest.mark.parametrize(
    "kind",
    [
        pa.null(),
        pa.list_(pa.int32()),
        pa.struct([pa.field("a", pa.int32())]),
        pa.decimal128(19, 2),
        pa.decimal128(5, -2),
        pa.decimal256(9, 2),
        pa.large_string(),
        pa.string_view(),
        pa.uint32(),
        pa.float16(),
        pa.timestamp("ns"),
        pa.time64("us"),
        pa.binary(4),
        pa.dictionary(pa.int32(), pa.int64()),
    ],
    ids=str,
)
def test_other_types_are_left_to_arrow(kind: pa.DataType) -> None:
    assert not supported(pa.schema([pa.field("n", pa.int32()), pa.field("c", kind)]))


# The encoders.


def varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        number |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return number, at


def signed(number: int) -> int:
    return (number >> 1) ^ -(number & 1)


def bits_of(data: bytes, count: int, width: int) -> list[int]:
    packed = int.from_bytes(data, "little")
    return [packed >> (i * width) & ((1 << width) - 1) for i in range(count)]


def decoded_differences(data: bytes, bits: int) -> Iterator[int]:
    """As the format says it, with nothing behind the last block."""
    block, at = varint(data, 0)
    quarters, at = varint(data, at)
    count, at = varint(data, at)
    first, at = varint(data, at)
    value, left = signed(first), count - 1
    if count:
        yield value
    while left > 0:
        least, at = varint(data, at)
        widths, at = data[at : at + quarters], at + quarters
        for width in widths:
            each = block // quarters
            if left <= 0:
                assert width == 0
                continue
            assert width <= bits
            for above in bits_of(data[at : at + each * width // 8], each, width)[: max(0, left)]:
                value = (value + signed(least) + above + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
                yield value
            left -= each
            at += each * width // 8
    assert at == len(data)


def decoded_hybrid(data: bytes, count: int, width: int) -> list[int]:
    found: list[int] = []
    at = 0
    while len(found) < count:
        head, at = varint(data, at)
        if head & 1:
            size = (head >> 1) * width
            found += bits_of(data[at : at + size], (head >> 1) * 8, width)
        else:
            size = (width + 7) // 8
            found += [int.from_bytes(data[at : at + size], "little")] * (head >> 1)
        at += size
    assert at == len(data)
    return found[:count]


def encoded(room: int, encoder: Callable[[NDArray[np.uint8]], int]) -> bytes:
    """What an encoder writes, into memory that is as small as may be; it leaves what is behind it alone."""
    out = np.full(room + 64, 0xAA, np.uint8)
    size = encoder(out[:room])
    assert size <= room and (out[room:] == 0xAA).all()
    return out[:size].tobytes()


def frozen(values: Sequence[int], bits: int) -> NDArray[Any]:
    made = np.array(values, f"i{bits // 8}")
    made.setflags(write=False)
    return made


@st.composite
def numbers(draw: st.DrawFn) -> tuple[int, list[int]]:
    bits = draw(st.sampled_from([32, 64]))
    each = st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) | st.integers(-5, 5)
    rows = draw(st.sampled_from(ROWS[:-2]))
    some = draw(st.lists(each, min_size=min(rows, 1), max_size=40))
    return bits, [some[i % len(some)] + (i if abs(some[i % len(some)]) < 9 else 0) for i in range(rows)]


@settings(max_examples=300, deadline=None)
@given(numbers())
@example((32, [-(2**31), 2**31 - 1] * 70))
@example((64, [-(2**63), 2**63 - 1] * 70))
@example((64, [0, -(2**63), 0, 2**63 - 1, -1]))
@example((32, []))
@example((32, [5]))
def test_differences_are_those_of_the_format(case: tuple[int, list[int]]) -> None:
    bits, values = case
    room = pages.differences_room(len(values), bits // 8)
    data = encoded(room, lambda out: pages.differences(frozen(values, bits), out))
    assert list(decoded_differences(data, bits)) == values


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 300), st.integers(1, 20))
def test_numbers_of_words_are_packed_into_their_bits(seed: int, rows: int, width: int) -> None:
    values = np.random.default_rng(seed).integers(0, 2**width, rows).astype(np.int32)
    data = encoded(pages.hybrid_room(rows, width), lambda out: pages.hybrid(values, width, out))
    assert decoded_hybrid(data, rows, width) == values.tolist()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 200)), min_size=1, max_size=20), st.sampled_from([32, 64]))
def test_runs_are_found_and_written(parts: list[tuple[int, int]], bits: int) -> None:
    values = [v for v, rows in parts for _ in range(rows)]
    places = [i for i in range(1, len(values)) if values[i] != values[i - 1]] + [len(values)]
    ends = np.zeros(len(places), np.int64)
    assert pages.runs(frozen(values, bits), ends) == len(places) and ends.tolist() == places
    if len(places) > 1:
        assert pages.runs(frozen(values, bits), ends[:-1]) == -1
    firsts = np.array([values[e - 1] for e in places], np.int32)
    data = encoded(pages.repeated_room(len(places)), lambda out: pages.repeated(firsts, ends, 4, out))
    assert decoded_hybrid(data, len(values), 4) == values


@settings(max_examples=200, deadline=None)
@given(numbers())
def test_distinct_values_are_numbered_as_they_come(case: tuple[int, list[int]]) -> None:
    bits, values = case
    words = list(dict.fromkeys(values))
    distinct, found = np.zeros(len(words), f"i{bits // 8}"), np.zeros(len(values), np.int32)
    heads = np.zeros(1 << max(1, (2 * len(words) - 1).bit_length()), np.int32)
    assert pages.numbered(frozen(values, bits), heads, distinct, found) == len(words)
    assert distinct.tolist() == words and found.tolist() == [words.index(v) for v in values]
    if words:
        assert pages.numbered(frozen(values, bits), np.zeros_like(heads), distinct[:-1], found) == -1
        assert pages.bounds(frozen(values, bits)) == (min(values), max(values))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=70), max_size=40), st.integers(0, 3))
def test_texts_have_their_length_in_front(values: list[bytes], skipped: int) -> None:
    array = pa.array(values, pa.binary())
    skipped = min(skipped, len(values))
    offsets = np.frombuffer(array.buffers()[1], np.int32, len(values) + 1)[skipped:]
    data = np.frombuffer(b"".join(values), np.uint8)  # no byte more
    offsets.setflags(write=False)
    twin = b"".join(struct.pack("<i", len(v)) + v for v in values[skipped:])
    assert encoded(len(twin) + pages.SLACK, lambda out: pages.texts(data, offsets, out)) == twin
    if twin:
        least, greatest = pages.text_bounds(data, offsets)
        assert values[skipped:][least] == min(values[skipped:])
        assert values[skipped:][greatest] == max(values[skipped:])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("\0aé", max_size=12).map(str.encode), min_size=1, max_size=12))
def test_least_and_greatest_text_are_found_among_similar_ones(values: list[bytes]) -> None:
    offsets = frozen([0, *np.cumsum([len(v) for v in values])], 32)
    data = np.frombuffer(b"".join(values), np.uint8)
    least, greatest = pages.text_bounds(data, offsets)
    assert (values[least], values[greatest]) == (min(values), max(values))


class Writes:
    """Notes how much is written at a time."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def write(self, data: Any) -> None:
        self.sizes.append(len(data))


def test_a_table_of_many_columns_is_written_in_parts_and_not_gathered_whole() -> None:
    columns = {f"c{i}": np.random.default_rng(i).integers(0, 2**62, 4000) for i in range(200)}
    out = Writes()
    write_table(pa.table(columns), out, row_group_size=1000)
    assert sum(out.sizes) > 6 << 20 and max(out.sizes) < 2 << 20
