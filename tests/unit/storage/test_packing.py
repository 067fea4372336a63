"""How columns of segments are packed."""

from __future__ import annotations

import io
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headwater.storage.packing import DELTA_BINARY_PACKED, difference_bits, is_small, packing, unpacked

ROWS = 5000
RANDOM = np.random.default_rng(1)
WORDS = ["".join(RANDOM.choice(list("abcdefghijklmnopqrstuvwxyz"), n)) for n in RANDOM.integers(3, 10, 400)]


def table(**columns: object) -> pa.Table:
    hidden = {"_vnode": pa.array(np.zeros(ROWS, np.int32)), "_op": pa.array(np.ones(ROWS, np.int8))}
    return pa.table({**columns, **hidden, "_seq": pa.array(np.zeros(ROWS, np.int64))})


def written(rows: pa.Table, key: tuple[str, ...] = ()) -> pq.FileMetaData:
    out = io.BytesIO()
    pq.write_table(rows, out, **packing(rows, key))
    assert pq.read_table(out).equals(rows)
    return pq.read_metadata(out).row_group(0)


@pytest.mark.parametrize(
    ("values", "encoding", "codec"),
    [
        (pa.array(np.arange(ROWS) * 3), DELTA_BINARY_PACKED, "UNCOMPRESSED"),
        (pa.array([None if i % 7 == 0 else i for i in range(ROWS)], pa.int32()), DELTA_BINARY_PACKED, "UNCOMPRESSED"),
        (pa.array(np.arange(ROWS) * 1_000_003, pa.timestamp("us", tz="UTC")), DELTA_BINARY_PACKED, "UNCOMPRESSED"),
        (
            pa.array([Decimal(i - 99) / 4 for i in range(ROWS)], pa.decimal128(9, 2)),
            DELTA_BINARY_PACKED,
            "UNCOMPRESSED",
        ),
        (
            pa.array([Decimal(10**15 + i) / 8 for i in range(ROWS)], pa.decimal128(18, 3)),
            DELTA_BINARY_PACKED,
            "UNCOMPRESSED",
        ),
        (pa.array([Decimal(i * 10**8) for i in range(ROWS)], pa.decimal128(38, 0)), "PLAIN", "ZSTD"),
        (pa.array(RANDOM.integers(-(2**63), 2**63 - 1, ROWS)), "PLAIN", "UNCOMPRESSED"),
        (pa.array([f"{x:x}" for x in RANDOM.integers(2**60, 2**62, ROWS)]), "PLAIN", "UNCOMPRESSED"),
        (pa.array([f"the customer with the number {i}" for i in range(ROWS)]), "PLAIN", "ZSTD"),
        (pa.array([" ".join(RANDOM.choice(WORDS, 6)) for _ in range(ROWS)]), "PLAIN", "SNAPPY"),
        (pa.array(np.arange(ROWS) % 10), DELTA_BINARY_PACKED, "UNCOMPRESSED"),
        (pa.array(RANDOM.integers(0, 1000, ROWS)), "RLE_DICTIONARY", "UNCOMPRESSED"),
        (pa.array(RANDOM.integers(0, 10, ROWS) * 10**12), "RLE_DICTIONARY", "UNCOMPRESSED"),
        (pa.array(RANDOM.integers(0, 10, ROWS) / 3), "RLE_DICTIONARY", "UNCOMPRESSED"),
        (pa.array(np.where(np.arange(ROWS) % 20 < 19, 7, np.arange(ROWS) % 20)), "RLE_DICTIONARY", "ZSTD"),
        (pa.array([f"city {i % 9}" for i in range(ROWS)]), "RLE_DICTIONARY", "ZSTD"),
        (pa.array(np.arange(ROWS) % 2 == 0), "PLAIN", "ZSTD"),
        (pa.nulls(ROWS, pa.string()), "RLE_DICTIONARY", "ZSTD"),
        (pa.array([[i] for i in range(ROWS)]), "PLAIN", "ZSTD"),
    ],
)
def test_column_is_packed_by_what_it_holds(values: pa.Array, encoding: str, codec: str) -> None:
    column = written(table(c=values)).column(0)
    assert encoding in column.encodings and column.compression == codec


def test_least_and_greatest_are_noted_but_of_texts_that_hardly_repeat_and_are_no_key() -> None:
    texts = pa.array([f"{x:x}" for x in RANDOM.integers(2**60, 2**62, ROWS)])
    few = pa.array([f"city {i % 9}" for i in range(ROWS)])
    group = written(table(k=texts, c=texts, few=few, n=pa.array(np.arange(ROWS))), key=("k",))
    found = {group.column(i).path_in_schema: group.column(i).is_stats_set for i in range(group.num_columns)}
    assert found == {"k": True, "c": False, "few": True, "n": True, "_vnode": True, "_op": True, "_seq": True}


def test_columns_of_a_segment_in_long_runs_have_a_dictionary_and_others_differences() -> None:
    runs = {"_vnode": np.sort(RANDOM.integers(0, 50, ROWS)), "_op": np.ones(ROWS), "_seq": np.zeros(ROWS)}
    short = {"_vnode": np.sort(RANDOM.integers(0, ROWS, ROWS)), "_op": np.ones(ROWS), "_seq": RANDOM.permutation(ROWS)}
    for columns, expected in ((runs, ["_vnode", "_op", "_seq"]), (short, ["_op"])):
        packed = packing(pa.table({n: v.astype(np.int64) for n, v in columns.items()}))
        assert packed["use_dictionary"] == expected
        assert list(packed.get("column_encoding", ())) == [n for n in columns if n not in expected]
        assert set(packed["compression"].values()) == {"none"}


def test_small_tables_are_not_looked_at() -> None:
    few = table(k=pa.array(["k"] * ROWS), c=pa.array(["c"] * ROWS)).slice(0, 10)
    assert is_small(few.schema, few.nbytes) and not is_small(few.schema, 1 << 20)
    packed = unpacked(few.schema, ("k",))
    assert packed["use_dictionary"] == [] and set(packed["compression"].values()) == {"none"}
    assert packed["write_statistics"] == ["k", "_vnode", "_op", "_seq"]
    nested = pa.schema([pa.field("c", pa.list_(pa.int32()))])  # whose leaves have other names
    assert not is_small(nested, 10)


def test_differences_are_counted_in_bits() -> None:
    assert difference_bits(np.arange(1000)) == 0
    assert 9 < difference_bits(RANDOM.integers(0, 500, 10_000)) < 11
    assert difference_bits(RANDOM.integers(-(2**63), 2**63 - 1, 10_000)) > 60
    assert difference_bits(np.array([5])) == 0


def test_empty_table_can_be_packed() -> None:
    rows = table(c=pa.array(np.arange(ROWS))).slice(0, 0)
    out = io.BytesIO()
    pq.write_table(rows, out, **packing(rows))
    assert pq.read_table(out).num_rows == 0
