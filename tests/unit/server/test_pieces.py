"""JSON in pieces is the JSON that a plain encoder gives, and each piece is small."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headwater.server.pieces import PIECE_CHARS, gathered, row_pieces, value_pieces

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@given(VALUES)
def test_value_in_pieces_is_the_value(value: Any) -> None:
    assert "".join(value_pieces(value)) == _plain(value)


@given(st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), max_size=30))
def test_rows_in_pieces_are_the_rows(rows: list[dict[str, Any]]) -> None:
    assert f"[{''.join(gathered(row_pieces(rows)))}]" == _plain(rows)


def test_large_values_come_in_small_pieces() -> None:
    value = {"numbers": list(range(300_000)), "text": "ä\n" * 400_000, "rows": [{"a": "x" * 9000}] * 100}
    pieces = list(value_pieces(value))
    assert "".join(pieces) == _plain(value)
    assert max(map(len, pieces)) <= 2 * PIECE_CHARS + 2
    assert max(map(len, gathered(pieces))) <= 4 * PIECE_CHARS


def test_many_rows_come_in_pieces_of_a_bounded_size() -> None:
    rows = [{"id": i, "text": "x" * 1000} for i in range(5000)]
    pieces = list(row_pieces(rows))
    assert "[" + "".join(pieces) + "]" == _plain(rows)
    assert max(map(len, pieces)) <= 4 * PIECE_CHARS
