"""`/` of two integers in Postgres' dialect has no fraction, in Spark's it has one."""

from __future__ import annotations

import pytest

from headwater.sql.reading import parse_query
from headwater.sql.whole_numbers import divide_whole_numbers

TABLES = {"t": {"i": "INT", "b": "BIGINT", "d": "DECIMAL(10,2)"}, "u": {"k": "INT"}}


def divided(text: str, dialect: str = "postgres") -> str:
    query = parse_query(text, dialect)
    divide_whole_numbers(query, TABLES.get)
    return query.sql(dialect="spark")


@pytest.mark.parametrize(
    "expression",
    ["i / 2", "7 / 2", "b / i / 2", "(i + 1) / k", "count(*) / 2", "sum(i) / count(*)", "i::int / 2", "max(b) / 2"],
)
def test_integers_are_divided_without_a_fraction(expression: str) -> None:
    text = divided(f"SELECT {expression} FROM t, u")
    assert " DIV " in text and "/" not in text


@pytest.mark.parametrize(
    "expression", ["d / 2", "i / 2.0", "sum(b) / count(*)", "avg(i) / 2", "i::numeric / 2", "x / 2"]
)
def test_everything_else_keeps_its_fraction(expression: str) -> None:
    assert " DIV " not in divided(f"SELECT {expression} FROM t")


def test_columns_of_subqueries_are_what_they_were_made_of() -> None:
    text = divided(
        "WITH q AS (SELECT i AS a, d AS c FROM t) "
        "SELECT q.a / 2 AS x, c / 2 AS y, z.i / 3 AS w FROM q, (SELECT * FROM t) z"
    )
    assert "q.a DIV 2" in text and "c / 2" in text and "z.i DIV 3" in text


def test_other_dialects_divide_as_they_do() -> None:
    assert "/" in divided("SELECT i / 2 FROM t", "spark") and "/" in divided("SELECT i / 2 FROM t", "mysql")
