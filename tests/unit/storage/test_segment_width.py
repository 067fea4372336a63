"""Row groups and pages of a segment: of wide rows they have few, so that nobody needs much memory to read one."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headwater.model.schema import OP, SEQ, Column, Schema
from headwater.storage import segments
from headwater.storage.files import DataDir
from headwater.storage.segments import read_segments, write_segment

SCHEMA = Schema((Column("id", "BIGINT", nullable=False), Column("body", "BINARY")), ("id",))


def written(tmp_path: Path, widths: list[int]) -> tuple[pq.FileMetaData, list[int]]:
    """What the file of rows with values of these widths says of itself, and the widths that it holds, by id."""
    rows = pa.table(
        {
            "id": pa.array(range(len(widths)), pa.int64()),
            "body": pa.array([bytes(w) for w in widths], pa.binary()),
            OP: pa.array([1] * len(widths), pa.int8()),
            SEQ: pa.array([0] * len(widths), pa.int64()),
        }
    )
    data_dir = DataDir(str(tmp_path))
    path = write_segment(data_dir, 1, SCHEMA, rows, kind="base", vnode_count=16).path
    found = read_segments(data_dir, SCHEMA, [path]).sort_by("id").column("body")
    return pq.read_metadata(tmp_path / path), [len(v.as_py()) for v in found]


def test_narrow_rows_are_one_row_group(tmp_path: Path) -> None:
    found, widths = written(tmp_path, [20] * 60_000)
    assert found.num_row_groups == 1
    assert widths == [20] * 60_000


def test_a_row_group_of_wide_rows_is_bounded_in_bytes_and_a_wider_row_has_one_of_its_own(tmp_path: Path) -> None:
    wide = segments.ROW_GROUP_BYTES + 1
    found, widths = written(tmp_path, [wide, wide, wide])
    assert widths == [wide] * 3
    assert [found.row_group(i).num_rows for i in range(found.num_row_groups)] == [1, 1, 1]
    sizes = [segments.ROW_GROUP_BYTES // 10] * 25
    found, widths = written(tmp_path, sizes)
    assert widths == sizes
    groups = [found.row_group(i) for i in range(found.num_row_groups)]
    assert len(groups) == 3 and max(g.total_byte_size for g in groups) <= segments.ROW_GROUP_BYTES
