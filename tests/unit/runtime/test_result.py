"""Results as Arrow batches: the rows are what they were, in memory or in a file, and the text comes in small pieces."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.runtime import result
from headwater.runtime.result import CollectedRows, Result
from headwater.server.pieces import PIECE_CHARS, gathered

TAGS = pa.list_(pa.string())


def _collected(batches: list[pa.RecordBatch], order: list[int], directory: Path | None = None) -> CollectedRows:
    found = CollectedRows(batches[0].schema.names, directory)
    for batch in batches:
        found.take(batch)
    found.finish(order)
    return found


def _batch(first: int, count: int) -> pa.RecordBatch:
    numbers = range(first, first + count)
    return pa.record_batch(
        {"id": pa.array(numbers, pa.int64()), "tags": pa.array([["a"] * (i % 3) for i in numbers], TAGS)}
    )


@pytest.mark.parametrize("in_memory", [1 << 30, 20_000, 0])
def test_rows_and_text_are_in_the_order_of_the_result_wherever_they_are_kept(
    in_memory: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(result, "IN_MEMORY_BYTES", in_memory)
    found = _collected([_batch(5000, 3000), _batch(0, 5000), _batch(8000, 0)], [1, 0, 2], tmp_path)
    expected = [{"id": i, "tags": ["a"] * (i % 3)} for i in range(8000)]
    assert Result(["id", "tags"], found, 1).rows == expected
    pieces = list(gathered(found.pieces()))
    assert json.loads("[" + "".join(pieces) + "]") == expected
    assert list(tmp_path.iterdir()) == []  # a file of ours has no name
    found.close()


def test_no_rows_are_no_text() -> None:
    assert list(_collected([_batch(0, 0)], [0]).pieces()) == []
    assert CollectedRows(["id"]).rows() == []


def test_rows_of_any_width_come_in_small_pieces() -> None:
    wide = pa.record_batch({"id": [1, 2, 3], "text": ["x" * 3_000_000, "y", "z" * 10]})
    long = pa.record_batch({"id": [4], "text": ["ä\n" * 10], "numbers": [list(range(300_000))]})
    for batch in (wide, long, _batch(0, 20_000)):
        found = _collected([batch], [0])
        assert json.loads("[" + "".join(found.pieces()) + "]") == batch.to_pylist()
        assert max(map(len, found.pieces())) <= 4 * PIECE_CHARS


def test_text_that_is_not_utf8_is_shown_all_the_same() -> None:
    broken = _unchecked([b"a\xff", b"b"])
    found = _collected([pa.record_batch({"t": broken})], [0])
    assert found.rows() == [{"t": "a\N{REPLACEMENT CHARACTER}"}, {"t": "b"}]


def _unchecked(values: list[bytes]) -> pa.Array:
    """As Spark makes it of `CAST(unhex('ff') AS STRING)`."""
    plain = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(values), plain.buffers())
