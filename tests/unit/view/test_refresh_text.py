"""The text of a refresh: what it reads, and what it does not. No Spark."""

from __future__ import annotations

import pytest
import sqlglot

from headwater.model.schema import VIEW_KEY, Column, Schema, keyed
from headwater.view.analyse import analysis
from headwater.view.inputs import Part, Parts, SegmentText
from headwater.view.plan import ViewPlan
from headwater.view.refresh import Refresh
from headwater.view.relations import Sql
from headwater.view.safety import is_eager, may_fail

ORDERS = keyed(
    [Column("id", "BIGINT", False), Column("c", "BIGINT"), Column("amount", "BIGINT"), Column("note", "STRING")], ["id"]
)
CUSTOMERS = keyed([Column("c", "BIGINT", False), Column("country", "STRING"), Column("name", "STRING")], ["c"])
NOTHING = Parts(None, None)


def text(query: str, *, changed: str = "orders") -> str:
    schemas = {n: s for n, s in {"orders": ORDERS, "customers": CUSTOMERS}.items() if n in query}
    found = analysis(query, schemas)
    types = {c.name: c.type.lower() for s in schemas.values() for c in s.columns}

    def types_of(statement: str) -> dict[str, str]:
        """Every column is a BIGINT unless a name says otherwise; enough to write the text."""
        tree = sqlglot.parse_one(statement, read="spark")
        return {name: types.get(name.partition("_")[2], "bigint") for name in tree.named_selects}

    inputs = {}
    for name, schema in schemas.items():
        before = Parts(Part(f"{name}_base", False), Part(f"{name}_delta", True))
        log = Parts(None, Part(f"{name}_log", True)) if name == changed else NOTHING
        inputs[name] = SegmentText(name, schema, before, before, log)
    sql = Sql(types_of)
    return sql.text(Refresh(sql, found.plan, found, inputs).changes(_stored(found.plan)))


def _stored(plan: ViewPlan) -> SegmentText:
    columns = [*plan.columns, VIEW_KEY, *(name for name, _ in plan.hidden)]
    schema = Schema(tuple(Column(c, "STRING" if c == VIEW_KEY else "BIGINT") for c in columns), (VIEW_KEY,))
    return SegmentText("current", schema, NOTHING, Parts(Part("current_base", False), None), NOTHING)


JOIN = "SELECT k.country, sum(o.amount) AS s FROM orders o JOIN customers k ON o.c = k.c GROUP BY k.country"


def test_a_rowwise_refresh_reads_the_changes_and_nothing_else() -> None:
    written = text("SELECT id, amount + 1 AS more FROM orders WHERE amount > 3")
    assert "orders_log" in written
    assert all(name not in written for name in ("orders_base", "orders_delta", "current_base"))


def test_columns_that_a_query_does_not_use_are_not_read() -> None:
    written = text(JOIN)
    assert "`amount`" in written
    assert "`note`" not in written
    assert "`name`" not in written


def test_the_old_rows_of_changed_keys_are_looked_up_by_a_broadcast_of_the_keys() -> None:
    written = text(JOIN)
    assert "/*+ BROADCAST(b) */ * FROM" in written
    assert "LEFT SEMI JOIN" in written


def test_only_the_changed_side_of_a_join_contributes() -> None:
    assert "customers_log" not in text(JOIN)
    other = text(JOIN, changed="customers")
    assert "orders_log" not in other
    assert "customers_log" in other


def test_a_text_does_not_depend_on_when_it_is_written() -> None:
    assert text(JOIN) == text(JOIN)


@pytest.mark.parametrize(
    ("expression", "fails"),
    [
        ("a + b * 2 > 3 AND s LIKE 'x%'", False),
        ("a / b", True),
        ("a % b = 1", True),
        ("CAST(s AS INT)", True),
        ("CAST(a AS STRING)", False),
        ("DATE '2026-01-01'", False),
        ("my_function(a)", True),
        ("coalesce(a, 0) IN (1, 2)", False),
    ],
)
def test_only_plainly_total_expressions_count_as_safe(expression: str, fails: bool) -> None:
    assert may_fail(sqlglot.parse_one(expression, read="spark")) is fails


def test_functions_that_are_not_sparks_are_called_for_every_row() -> None:
    assert is_eager(sqlglot.parse_one("CASE WHEN a > 0 THEN my_function(a) END", read="spark"))
    assert not is_eager(sqlglot.parse_one("CASE WHEN a > 0 THEN upper(a) END", read="spark"))


def test_pieces_that_are_read_once_are_subqueries_and_others_are_written_once() -> None:
    sql = Sql(lambda _: {})
    base = sql.select(sql.given("t", ("a", "b")), {"a": "`a`", "c": "`b` + 1"})
    once = sql.where(base, "`c` > 2")
    assert sql.text(once).count("WITH") == 0
    both = sql.join(once, sql.select(once, {"d": "`a`"}), "`a` = `d`", "semi")
    written = sql.text(both)
    assert written.startswith("WITH ")
    assert written.count("`b` + 1") == 1
    assert "AS a LEFT SEMI JOIN" in written


def test_a_column_is_left_out_where_it_is_selected_unless_it_is_more_than_a_column() -> None:
    sql = Sql(lambda _: {})
    plain = sql.select(sql.given("t", ("a", "b")), {"a": "`a`", "x": "`b`"})
    assert sql.text(sql.keep(plain, ["a"])).count("SELECT") == 2
    many = sql.select(sql.given("t", ("a", "b")), {"a": "`a`", "x": "explode(`b`)"})
    assert "explode" in sql.text(sql.keep(many, ["a"]))
