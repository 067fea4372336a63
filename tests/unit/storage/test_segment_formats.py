"""Segments of format v1 have no `_vnode`: the key says it, and a condition on vnodes takes the same rows of both."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from headwater.model.schema import OP, SEQ, VNODE, Column, Schema
from headwater.model.vnode import vnodes
from headwater.storage.files import DataDir
from headwater.storage.segments import VnodeFilter, read_segments, without_vnode, write_segment

SCHEMA = Schema((Column("id", "BIGINT", nullable=False), Column("name", "STRING")), ("id",))


@pytest.fixture
def both(tmp_path: Path) -> tuple[DataDir, str, str]:
    """The same rows in a segment of each format."""
    rows = pa.table(
        {
            "id": pa.array(range(1_000), pa.int64()),
            "name": pa.array([f"n{i}" for i in range(1_000)]),
            OP: pa.array([1] * 1_000, pa.int8()),
            SEQ: pa.array(range(1_000), pa.int64()),
        }
    )
    data_dir = DataDir(str(tmp_path))
    new = write_segment(data_dir, 1, SCHEMA, rows, kind="delta", vnode_count=16).path
    pq.write_table(pq.read_table(tmp_path / new, partitioning=None).drop_columns([VNODE]), tmp_path / "old.parquet")
    return data_dir, new, "old.parquet"


@pytest.mark.parametrize("columns", [None, ["name"], ["id", OP]])
def test_a_condition_on_vnodes_takes_the_same_rows_of_both_formats(
    both: tuple[DataDir, str, str], columns: list[str] | None
) -> None:
    data_dir, new, old = both
    where = VnodeFilter((pc.field(VNODE) >= 3) & (pc.field(VNODE) < 7), 16)
    names = columns or ["id", "name", OP, SEQ]
    found = [read_segments(data_dir, SCHEMA, [path], columns, where).select(names) for path in (new, old)]
    assert found[0].equals(found[1])
    assert 100 < found[0].num_rows < 500
    if columns is None:
        assert set(vnodes(found[1], ("id",), 16).to_pylist()) == {3, 4, 5, 6}


def test_the_format_of_a_segment_is_known_from_its_footer(both: tuple[DataDir, str, str]) -> None:
    data_dir, new, old = both
    assert without_vnode(data_dir, [new, old]) == {old}
    assert without_vnode(data_dir, [new, "gone.parquet"]) == frozenset()


@pytest.mark.parametrize("nulls", [False, True])
def test_columns_that_come_in_compact_types_are_those_of_the_table_in_the_file(tmp_path: Path, nulls: bool) -> None:
    schema = Schema((Column("id", "BIGINT"), Column("price", "DECIMAL(12,2)"), Column("kind", "STRING")), ("id",))
    kinds = [None if nulls and i % 7 == 0 else ("air", "rail", "ship")[i % 3] for i in range(5_000)]
    prices = [None if nulls and i % 5 == 0 else Decimal(i).scaleb(-2) for i in range(5_000)]
    plain = pa.table(
        {
            "id": pa.array(range(5_000), pa.int64()),
            "price": pa.array(prices, pa.decimal128(12, 2)),
            "kind": pa.array(kinds),
            OP: pa.array([1] * 5_000, pa.int8()),
            SEQ: pa.array([0] * 5_000, pa.int64()),
        }
    )
    compact = plain.set_column(1, "price", plain.column("price").cast(pa.decimal64(12, 2)))
    compact = compact.set_column(2, "kind", plain.column("kind").dictionary_encode())
    data_dir = DataDir(str(tmp_path))
    packed: dict[str, object] = {}
    paths = [
        write_segment(data_dir, 1, schema, rows, kind="base", vnode_count=16, path=name, packed=packed).path
        for name, rows in (("plain.parquet", plain), ("compact.parquet", compact))
    ]
    as_plain, as_compact = (pq.ParquetFile(tmp_path / path) for path in paths)
    assert as_compact.schema.equals(as_plain.schema)
    assert as_compact.read().equals(as_plain.read())
    statistics = [file.metadata.row_group(0).column(2).statistics for file in (as_plain, as_compact)]
    assert {(s.min, s.max, s.null_count) for s in statistics} == {("air", "ship", kinds.count(None))}
    assert read_segments(data_dir, schema, [paths[1]]).equals(read_segments(data_dir, schema, [paths[0]]))
