"""Which rows go to Python without their bytes being counted."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pytest

from headwater.spark.batches import gathered
from headwater.spark.width import is_wide, may_grow


@dataclass(frozen=True)
class File:
    rows: int
    bytes: int


def test_rows_are_wide_by_their_average_and_few_rows_are_not() -> None:
    assert not is_wide([])
    assert not is_wide([File(1_000_000, 60_000_000)])
    assert is_wide([File(1_000_000, 60_000_000), File(10_000, 1_000_000_000)])
    assert not is_wide([File(2, 4_000)])  # mostly a footer
    assert is_wide([File(2, 40_000_000)])


@pytest.mark.parametrize(
    ("query", "grows"),
    [
        ("SELECT id, concat('row ', id) FROM range(10)", False),
        ("SELECT repeat('x', 1000000) FROM t", True),
        ("SELECT k, COLLECT_LIST (v) FROM t GROUP BY k", True),
        ("SELECT repeated, spaces FROM t", False),
    ],
)
def test_a_query_may_make_long_values_of_short_ones(query: str, grows: bool) -> None:
    assert may_grow(query) is grows


def test_batches_are_gathered_by_rows_or_by_bytes() -> None:
    thin = [pa.RecordBatch.from_pydict({"v": list(range(n))}) for n in (3, 0, 3, 3)]
    assert [t.num_rows for t in gathered(thin, 5, 1 << 20)] == [6, 3]
    wide = [pa.RecordBatch.from_pydict({"v": ["x" * 1000]}) for _ in range(5)]
    assert [t.num_rows for t in gathered(wide, 1000, 2000)] == [2, 2, 1]
    assert list(gathered([], 5, 5)) == []
