"""The text format of COPY, without a server."""

from __future__ import annotations

import pytest

from headwater.connectors.postgres.copytext import decode_copy, scan_copy_text
from headwater.connectors.postgres.types import ColumnPlan, Kind
from headwater.errors import TransientError

PLANS = [ColumnPlan("a", "INT", Kind.INT), ColumnPlan("b", "STRING", Kind.TEXT)]


def test_block_becomes_a_record_batch() -> None:
    batch = decode_copy(b"1\tx\\ty\n\\N\t\n-3\t\\\\N\n", PLANS)
    assert batch.to_pydict() == {"a": [1, None, -3], "b": ["x\ty", "", "\\N"]}


def test_empty_block_is_an_empty_batch_with_its_schema() -> None:
    batch = decode_copy(b"", PLANS)
    assert batch.num_rows == 0 and batch.schema.names == ["a", "b"]


def test_empty_line_is_one_empty_field() -> None:
    scan = scan_copy_text(b"\n\\N\n\n", 1)
    assert scan.lengths.tolist() == [[0], [-1], [0]]


def test_block_that_ends_inside_of_a_line_says_how_much_it_used() -> None:
    scan = scan_copy_text(bytearray(b"1\ta\n2\tb\\"), 2)
    assert (scan.rows, scan.consumed) == (1, 4)
    with pytest.raises(TransientError, match="inside of a line"):
        decode_copy(b"1\ta\n2\tb", PLANS)


@pytest.mark.parametrize("block", [b"1\n", b"1\t2\t3\n", b"1\t\\Nx\n", b"1\tx\\\n", b"1\t\\\n"])
def test_line_with_another_number_of_fields_is_refused(block: bytes) -> None:
    with pytest.raises(TransientError) as caught:
        scan_copy_text(block, 2)
    assert caught.value.code == "COPY_MALFORMED"


def test_given_block_is_not_changed() -> None:
    block = bytearray(b"1\ta\\nb\n")
    decode_copy(block, PLANS)
    assert block == b"1\ta\\nb\n"
