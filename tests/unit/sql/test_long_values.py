"""A long INSERT is cut between its rows, and the slices have the rows of the whole, whatever stands in them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import UsageError
from headwater.sql import long_values
from headwater.sql import statements as s
from headwater.sql.parser import parse

TEXTS = st.text(st.sampled_from("ab'\"`\\()-/*;, \n${}é"), max_size=8)
VALUES = st.one_of(
    st.integers(-5, 5).map(str),
    TEXTS.map(lambda t: "'" + t.replace("\\", "\\\\").replace("'", "\\'") + "'"),
    TEXTS.map(lambda t: '"' + t.replace("\\", "\\\\").replace('"', '\\"') + '"'),
    st.sampled_from(["NULL", "array(1, 2)", "-(1 + 2)", "'it''s'", "DATE '2026-01-01'", "concat('(', ')')"]),
)


def read(text: str, monkeypatch: pytest.MonkeyPatch, *, long: int, part: int = 60) -> list[Any]:
    """What the statements mean: of an INSERT its table and rows."""
    monkeypatch.setattr(long_values, "LONG_CHARS", long)
    monkeypatch.setattr(long_values, "SLICE_CHARS", part)
    found: list[Any] = []
    for statement in parse(text):
        if not isinstance(statement, s.Insert):
            found.append(statement.text)
            continue
        parts = [statement, *(p for t in statement.more for p in parse(t))]
        rows = [e.sql("spark") for p in parts if isinstance(p, s.Insert) for e in p.query.expressions]
        found.append((statement.text, statement.table, statement.columns, rows))
    return found


@settings(max_examples=300, deadline=None)
@given(rows=st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=12), tail=st.sampled_from(["", ";", "; FLUSH"]))
def test_slices_have_the_rows_of_the_whole(rows: list[tuple[str, str]], tail: str) -> None:
    text = "INSERT INTO `odd name` (a, b) VALUES " + ", ".join(f"({a}, {b})" for a, b in rows) + tail
    with pytest.MonkeyPatch.context() as patch:
        assert read(text, patch, long=40) == read(text, patch, long=1 << 30)


@pytest.mark.parametrize(
    "text",
    [
        "INSERT INTO t VALUES (1, r'\\'), (2, 'x'), (3, 'y'), (4, 'z')",
        "INSERT INTO t VALUES (1, 'a'), -- (\n (2, 'b'), (3, 'c'), (4, 'd'), (5, 'e')",
        "INSERT INTO t VALUES (1, 'a'), /* ( */ (2, 'b'), (3, 'c'), (4, 'd')",
        "INSERT INTO t SELECT * FROM VALUES (1, 'a'), (2, 'b'), (3, 'c'), (4, 'd')",
        "SELECT 'INSERT INTO t VALUES (1)', 'and so on', 'and so on', 'and so on'",
    ],
)
def test_what_is_not_surely_a_list_of_rows_is_left_whole(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(text, monkeypatch, long=40) == read(text, monkeypatch, long=1 << 30)
    assert long_values.sliced(text) is None


@pytest.mark.parametrize(
    "rows", ["(1), (2), (3", "(1), (2),, (3)", "(1) (2), (3)", "(1), (2))", "(1), 2, (3)", "(1), (2) x"]
)
def test_list_that_is_no_list_means_what_it_meant(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(long: int) -> Any:
        try:
            return read(f"INSERT INTO some_table VALUES {rows}", monkeypatch, long=long, part=5)
        except UsageError as error:
            return error.code

    assert outcome(long=20) == outcome(long=1 << 30)


def test_no_slice_is_much_longer_than_it_should_be() -> None:
    text = "INSERT INTO t VALUES " + ", ".join(f"({i}, 'text {i}')" for i in range(40_000))
    found = long_values.sliced(text)
    assert found is not None and found[1] == ""
    assert max(map(len, found[0])) < 1.1 * long_values.SLICE_CHARS and len(found[0]) > 5
