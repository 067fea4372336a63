"""The tables inside a query: found wherever they are, each with its epoch; CTEs and functions left alone."""

from __future__ import annotations

import pytest

from headwater.errors import UsageError
from headwater.sql import statements as s
from headwater.sql.binding import bind, table_names
from headwater.sql.parser import parse
from headwater.sql.reading import parse_query


def query(text: str) -> s.Query:
    (found,) = parse(text)
    assert isinstance(found, s.Query)
    return found


def test_tables_are_found_in_joins_subqueries_and_ctes() -> None:
    text = """WITH q AS (SELECT * FROM a) SELECT * FROM q JOIN b USING (id)
              WHERE id IN (SELECT id FROM c) AND EXISTS (SELECT 1 FROM q) UNION ALL SELECT * FROM d"""
    assert sorted(table_names(query(text).query)) == ["a", "b", "c", "d"]


def test_a_cte_hides_a_table_of_its_name_only_where_it_is_in_force() -> None:
    names = table_names(query("SELECT * FROM (WITH t AS (SELECT 1 AS a) SELECT * FROM t) x JOIN t ON true").query)
    assert names == ["t"]


def test_versions_moments_and_changes_are_read() -> None:
    _, refs = bind(
        query("SELECT * FROM a VERSION AS OF 12, b TIMESTAMP AS OF '2026-01-01', table_changes('c', 1, 2)").query
    )
    by_name = {r.name: r for r in refs}
    assert by_name["a"].version == "12"
    assert by_name["b"].timestamp == "'2026-01-01'"
    assert by_name["c"].changes == (1, 2)


def test_the_bound_query_keeps_the_names_that_the_user_refers_to() -> None:
    sql, refs = bind(query("SELECT orders.id, x.id FROM orders JOIN orders AS x ON x.id = orders.id").query)
    assert len(refs) == 2
    assert "AS `orders`" in sql
    assert "AS x" in sql
    assert all(r.placeholder in sql for r in refs)


def test_spark_s_own_table_functions_are_not_tables() -> None:
    assert table_names(query("SELECT * FROM range(3)").query) == []
    assert table_names(query("SELECT * FROM t LATERAL VIEW explode(xs) e AS x").query) == ["t"]


def test_the_catalogue_is_a_schema_and_others_do_not_exist() -> None:
    _, refs = bind(query("SELECT * FROM hw_catalog.hw_jobs").query)
    assert [(r.name, r.catalogue) for r in refs] == [("hw_jobs", True)]
    with pytest.raises(UsageError, match="UNKNOWN_TABLE"):
        bind(query("SELECT * FROM public.t").query)


@pytest.mark.parametrize("call", ["table_changes('t')", "table_changes('t', 'a', 'b')", "table_changes('t', 1)"])
def test_table_changes_wants_a_name_and_two_epochs(call: str) -> None:
    with pytest.raises(UsageError, match="SQL_SYNTAX"):
        bind(query(f"SELECT * FROM {call}").query)


@pytest.mark.parametrize(
    ("text", "constants"),
    [
        ("SELECT * FROM a WHERE id = 5 AND v > 3", {"id": (5,)}),
        ("SELECT * FROM a WHERE 'x' = ID", {"id": ("x",)}),
        ("SELECT * FROM a WHERE (id IN (1, -2)) AND name = 'y'", {"id": (1, -2), "name": ("y",)}),
        ("SELECT * FROM a AS q LEFT JOIN b ON q.id = b.id WHERE q.id = 1 AND id = 2", {"id": (1,)}),
        ("SELECT * FROM a WHERE id = 5 OR v = 3", {}),
        ("SELECT * FROM a WHERE NOT id = 5", {}),
        ("SELECT * FROM a WHERE id = 5.0", {}),
        ("SELECT * FROM a WHERE id IN (SELECT 1)", {}),
        ("SELECT * FROM (SELECT * FROM a) AS q WHERE id = 5", {}),
        ("SELECT * FROM a WHERE EXISTS (SELECT 1 FROM b WHERE id = 5)", {}),
    ],
)
def test_constants_are_taken_only_where_every_row_that_matters_must_have_them(
    text: str, constants: dict[str, tuple[int | str, ...]]
) -> None:
    _, refs = bind(query(text).query)
    assert {r.name: dict(r.constants) for r in refs}["a"] == constants


def test_the_catalogue_has_no_past() -> None:
    with pytest.raises(UsageError, match="only as they are now"):
        bind(query("SELECT * FROM hw_catalog.hw_jobs VERSION AS OF 5").query)


@pytest.mark.parametrize(
    ("text", "means"),
    [
        (
            "t LATERAL VIEW explode(a) x AS y JOIN u ON id = y",
            "t JOIN LATERAL EXPLODE(a) AS x(y) ON TRUE JOIN u ON id = y",
        ),
        (
            "t JOIN u ON a LATERAL VIEW OUTER explode(b) x AS y FULL JOIN v ON y",
            "t JOIN u ON a LEFT JOIN LATERAL EXPLODE(b) AS x(y) ON TRUE FULL JOIN v ON y",
        ),
        ("t JOIN u ON a LATERAL VIEW explode(b) x AS y", "t JOIN u ON a LATERAL VIEW EXPLODE(b) x AS y"),
        (
            "t LATERAL VIEW explode(a) x AS y JOIN u ON b LATERAL VIEW explode(c) z AS w",
            "t JOIN LATERAL EXPLODE(a) AS x(y) ON TRUE JOIN u ON b LATERAL VIEW EXPLODE(c) z AS w",
        ),
    ],
)
def test_a_lateral_view_stays_before_the_join_that_it_is_written_before(text: str, means: str) -> None:
    assert parse_query(f"SELECT 1 FROM {text}", "spark").sql(dialect="spark") == f"SELECT 1 FROM {means}"
