"""Deep and odd statements are the user's errors, never ours; long ones are neither."""

from __future__ import annotations

import time

import pytest

from headwater.errors import HeadwaterError, UsageError
from headwater.model.schema import Column, Schema
from headwater.sql.binding import bind
from headwater.sql.parser import parse
from headwater.sql.reading import too_deep
from headwater.view.analyse import analyse

DEEP = [
    ("(", "1", ")"),
    ("NOT ", "true", ""),
    ("- ", "1", ""),
    ("CASE WHEN true THEN ", "1", " END"),
    ("abs(", "1", ")"),
    ("struct(", "1", ")"),
    ("array(", "1", ")"),
    ("(SELECT ", "1", ")"),
    ("CAST(", "1", " AS INT)"),
    ("EXISTS (SELECT ", "1", ")"),
    ("if(true, ", "1", ", 2)"),
    ("true AND (", "true", ")"),
    ("CAST(NULL AS ARRAY<", "INT", ">)"),
    ("1 BETWEEN 0 AND ", "1", ""),
]


def run(text: str) -> None:
    """What happens to a statement before Spark has it; of the generator `Commands` says the same."""
    for statement in parse(text):
        inner = getattr(statement, "inner", statement)
        try:
            if (query := getattr(inner, "query", None)) is not None:
                bind(query)
        except RecursionError:
            raise too_deep() from None


def outcome(text: str) -> str:
    try:
        run(text)
    except UsageError as error:
        return error.code
    return "read"


@pytest.mark.parametrize("frame", ["SELECT {}", "INSERT INTO t VALUES ({})"])
@pytest.mark.parametrize(("before", "core", "after"), DEEP)
def test_a_deep_statement_is_the_users_error(frame: str, before: str, core: str, after: str) -> None:
    for depth in (20, 60, 3000):
        began = time.monotonic()
        text = frame.replace("{}", before * depth + core + after * depth)
        assert outcome(text) in ("read", "SQL_TOO_DEEP", "SQL_SYNTAX")
        assert time.monotonic() - began < 10


def test_twenty_levels_are_not_deep() -> None:
    for before, core, after in DEEP[:-2]:
        run("SELECT " + before * 20 + core + after * 20)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT a FROM t |> LIMIT 3 |>",
        "SELECT a FROM t |>",
        "SELECT MAP(a) USING 'x' AS (b) FROM t",
        "SELECT * FROM t VERSION AS OF",
        "SELECT * FROM a.b.c.d",
        "EXPLAIN " * 3000 + "SELECT 1",
        "SELECT * FROM " + "(SELECT * FROM " * 3000 + "t" + ")" * 3000,
        "CREATE TABLE x (a " + "ARRAY<" * 3000 + "INT" + ">" * 3000 + ")",
        "WITH c AS (" * 3000 + "SELECT 1" + ") SELECT * FROM c" * 3000,
    ],
)
def test_an_odd_statement_is_the_users_error(text: str) -> None:
    with pytest.raises(UsageError):
        run(text)


def test_a_deep_view_is_refused_by_its_analysis_and_never_otherwise() -> None:
    schemas = {"t": Schema((Column("a", "BIGINT", False),), ("a",))}
    for depth in (20, 40, 45, 50, 55, 60):
        try:
            analyse("SELECT " + "abs(" * depth + "a" + ")" * depth + " AS x FROM t", schemas)
        except (HeadwaterError, RecursionError):
            assert depth > 20


def test_twenty_thousand_flat_terms_are_read_and_are_not_deep_for_spark() -> None:
    (found,) = parse("SELECT * FROM t WHERE " + " OR ".join(f"a = {i} AND b" for i in range(20_000)))
    sql, _ = bind(found.query)  # type: ignore[attr-defined]
    groups = sql.split("WHERE ")[1].split(") OR (")
    assert max(len(groups), *(group.count(" OR ") for group in groups)) <= 200
    assert sql.count("a = ") == 20_000
    assert sql.index("a = 7 ") < sql.index("a = 8 ")


def test_a_chain_of_usual_length_is_left_as_it_is() -> None:
    (found,) = parse("SELECT * FROM t WHERE a AND b AND (c OR d) AND e")
    assert bind(found.query)[0].endswith("WHERE a AND b AND (c OR d) AND e")  # type: ignore[attr-defined]
