"""Spark's readers, the vectorized one and the other, read our files as Arrow does."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from headwater.model.schema import Column, Schema
from headwater.storage.files import DataDir
from headwater.storage.packing import DELTA_BINARY_PACKED, unpacked
from headwater.storage.parquet import supported, write_table
from headwater.storage.segments import arrow_schema, write_segment

pytestmark = pytest.mark.spark
ROWS = 3001
GROUP = 1000
VECTORIZED = "spark.sql.parquet.enableVectorizedReader"


def numbers(bits: int) -> list[int]:
    """Near ones, then such whose differences wrap around, then all the same."""
    least, greatest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    far = [least, greatest, 0] * GROUP
    return [i % 100 for i in range(GROUP)] + far[:GROUP] + [7] * (ROWS - 2 * GROUP)


def table() -> pa.Table:
    days = [i % 20_000 for i in range(ROWS)]
    micros = [1_700_000_000_000_000 + i * 1_234_567 for i in range(ROWS)]
    words = pa.array([f"word {i % 9}" for i in range(ROWS)])
    full: dict[str, pa.Array] = {
        "id": pa.array(range(ROWS), pa.int64()),
        "flag": pa.array([i % 3 == 0 for i in range(ROWS)]),
        "i8": pa.array(numbers(8), pa.int8()),
        "i16": pa.array(numbers(16), pa.int16()),
        "i32": pa.array(numbers(32), pa.int32()),
        "i64": pa.array(numbers(64), pa.int64()),
        "f32": pa.array(np.arange(ROWS, dtype=np.float32) - 5),
        "f64": pa.array(np.where(np.arange(ROWS) % 2, -0.0, np.arange(ROWS) / 3)),
        "text": pa.array([f"täxt {i}" * (i % 4) for i in range(ROWS)]),
        "bytes": pa.array([bytes([i % 256]) * (i % 40) for i in range(ROWS)], pa.binary()),
        "day": pa.array(days, pa.int32()).cast(pa.date32()),
        "instant": pa.array(micros).cast(pa.timestamp("us", "UTC")),
        "local": pa.array(micros).cast(pa.timestamp("us")),
        "dec9": pa.array([Decimal(i - 99) / 4 for i in range(ROWS)], pa.decimal128(9, 2)),
        "dec18": pa.array([Decimal(10**15 + i) / 8 for i in range(ROWS)], pa.decimal128(18, 3)),
        "dec64": pa.array([Decimal(i) / 100 for i in range(ROWS)], pa.decimal64(12, 2)),
        "word": words.dictionary_encode(),
        "run": pa.array(sorted(i % 5 for i in range(ROWS)), pa.int32()),
        "one": pa.array([42] * ROWS, pa.int64()),
    }
    holes = {f"{n}_null": _with_nulls(a) for n, a in full.items()}
    none = {f"{n}_none": pa.nulls(ROWS, a.type) for n, a in full.items() if not pa.types.is_dictionary(a.type)}
    return pa.table(full | holes | none)


def _with_nulls(array: pa.Array) -> pa.Array:
    """In runs and singly; the second row group has none."""
    gone = [i < 50 or (i > 2 * GROUP and i % 7 == 0) for i in range(ROWS)]
    return array.take(pa.array([None if g else i for i, g in enumerate(gone)]))


def ways(rows: pa.Table) -> Iterator[dict[str, Any]]:
    """Each column plain, by a dictionary, and by differences where there are any; with and without a codec."""
    plain = unpacked(rows.schema) | {"write_statistics": rows.column_names}
    whole = (pa.types.is_integer, pa.types.is_date32, pa.types.is_timestamp, pa.types.is_decimal)
    near = [f.name for f in rows.schema if any(is_kind(f.type) for is_kind in whole)]
    yield plain
    yield plain | {"column_encoding": dict.fromkeys(near, DELTA_BINARY_PACKED)}
    yield plain | {
        "use_dictionary": [f.name for f in rows.schema if not pa.types.is_boolean(f.type)],
        "compression": dict.fromkeys(rows.column_names, "zstd"),
        "compression_level": dict.fromkeys(rows.column_names, 1),
    }
    yield plain | {"compression": dict.fromkeys(rows.column_names, "snappy")}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place, rows = tmp_path_factory.mktemp("files"), table()
    for i, packed in enumerate(ways(rows)):
        with (place / f"{i}.parquet").open("wb") as out:
            write_table(rows, out, row_group_size=GROUP, **packed)
    return sorted(str(p) for p in place.iterdir())


@pytest.fixture(params=["true", "false"], ids=["vectorized", "row by row"])
def reader(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    before = spark.conf.get(VECTORIZED)
    spark.conf.set(VECTORIZED, request.param)
    # Whole rows of more columns than this would be read one by one.
    spark.conf.set("spark.sql.codegen.maxFields", "200")
    yield spark
    spark.conf.set(VECTORIZED, str(before))
    spark.conf.unset("spark.sql.codegen.maxFields")


def scanned(found: DataFrame) -> int:
    """How many rows came out of the file, before the filter."""
    plan = found._jdf.queryExecution().executedPlan()
    return int(plan.collectLeaves().apply(0).metrics().apply("numOutputRows").value())


def test_spark_reads_all_types_and_nulls_in_every_encoding(reader: SparkSession, files: list[str]) -> None:
    for path in files:
        expected = pq.read_table(path)
        found = reader.read.parquet(path)
        rows = sorted(found.collect(), key=lambda r: r.id)
        assert found.columns == expected.column_names
        for name in expected.column_names:
            assert [_plain(r[name]) for r in rows] == [_plain(v) for v in expected.column(name).to_pylist()], name


def _plain(value: Any) -> Any:
    """Spark gives instants in the time of this machine, without a zone; bytes as bytearrays."""
    if hasattr(value, "astimezone"):
        return value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
    return bytes(value) if isinstance(value, bytearray) else value


@pytest.mark.parametrize(
    ("condition", "rows", "from_file"),
    [
        ("id >= 2500", 501, ROWS - 2 * GROUP),
        ("id_null = 1234", 1, GROUP),
        ("text_null = 'täxt 2001'", 1, ROWS),
        ("dec64 < 1", 100, GROUP),
        ("i64 = -9223372036854775808", 334, GROUP),
        ("one = 43", 0, 0),
        ("word = 'word 99'", 0, 0),
        ("id_none = 1", 0, 0),
        ("f64 < -1", 0, 0),
    ],
)
def test_row_groups_that_cannot_match_are_not_read(
    reader: SparkSession, files: list[str], condition: str, rows: int, from_file: int
) -> None:
    for path in files:
        found = reader.read.parquet(path).where(condition).select("id", "one")
        assert len(found.collect()) == rows
        assert scanned(found) <= from_file


@pytest.mark.parametrize("rare", ["ARRAY<INT>", "DECIMAL(30,2)"])
def test_filters_on_zeros_and_nan_find_them_also_beside_columns_that_arrow_writes(
    reader: SparkSession, tmp_path: Path, rare: str
) -> None:
    schema = Schema((Column("id", "BIGINT"), Column("x", "DOUBLE"), Column("rare", rare)), ("id",))
    values = [-0.0, -0.0, -0.0, 1.0] * 3000
    for name, x in (("zeros", values), ("nans", [float("nan") if i == 7 else 1.0 for i in range(12000)])):
        rare_type = arrow_schema(schema).field("rare").type
        rows = pa.table({"id": range(12000), "x": x, "rare": pa.nulls(12000, rare_type)})
        (tmp_path / name).mkdir()
        segment = write_segment(DataDir(str(tmp_path / name)), 1, schema, rows, kind="base", vnode_count=4)
        assert not supported(pq.read_schema(tmp_path / name / segment.path))
        read = reader.read.parquet(str(tmp_path / name / segment.path))
        assert read.where("x = 0.0D").count() == (9000 if name == "zeros" else 0)
        assert read.where("x > 5.0D").count() == (0 if name == "zeros" else 1)  # NaN is the greatest


@pytest.mark.parametrize("words", [[], ["x"]], ids=["plain", "dictionary"])
def test_filters_on_zeros_of_either_sign_and_on_nan_find_them(
    reader: SparkSession, tmp_path: Path, words: list[str]
) -> None:
    path = tmp_path / "floats.parquet"
    rows = pa.table({"x": [0.0, 0.0, -0.0, -0.0, 1.0, float("nan")], "n": range(6)})
    with path.open("wb") as out:
        write_table(rows, out, row_group_size=2, write_statistics=["x", "n"], use_dictionary=words)
    read = reader.read.parquet(str(path))
    assert sorted(r.n for r in read.where("x = 0.0D").collect()) == [0, 1, 2, 3]
    assert sorted(r.n for r in read.where("x IN (0.0D, 99.0D)").collect()) == [0, 1, 2, 3]
    assert sorted(r.n for r in read.where("x > 5.0D").collect()) == [5]  # NaN is the greatest
