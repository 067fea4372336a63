"""Analysis of view queries: strategies, refusals, names, and what EXPLAIN says. No Spark."""

from __future__ import annotations

import json

import pytest
from sqlglot import exp

import view_nexmark
import view_tpch
from headwater.errors import UsageError
from headwater.model.schema import Column, Schema, keyed, quoted
from headwater.view.analyse import analyse, analysis
from headwater.view.plan import Strategy, ViewPlan, explain

TABLES = {
    "t": keyed(
        [Column("id", "INT", False), Column("a", "INT"), Column("b", "DECIMAL(10,2)"), Column("d", "DOUBLE")], ["id"]
    ),
    "u": keyed([Column("a", "INT"), Column("c", "STRING")], []),
    "e": keyed([Column("id", "INT", False), Column("at", "TIMESTAMP"), Column("what", "STRING")], ["id"]),
}


@pytest.mark.parametrize(
    ("sql", "strategy"),
    [
        ("select *, a + 1 as next from t where a > 1", Strategy.ROWWISE),
        ("select a from t union all select a from u where c = 'x'", Strategy.ROWWISE),
        ("select id, a from t order by a", Strategy.ROWWISE),
        ("select a, count(*) as n, sum(b) as s, avg(a) as v, min(d) as m from t group by a", Strategy.ALGEBRAIC),
        ("select count(*) as n, sum(a) as s from t", Strategy.ALGEBRAIC),
        ("select c, sum(t.a) as s from t join u on t.a = u.a group by c", Strategy.ALGEBRAIC),
        ("select a, sum(b) filter (where id > 3) as s from t group by a", Strategy.ALGEBRAIC),
        ("select a, avg(b) as s from t group by a", Strategy.ALGEBRAIC),
        ("select a, avg(cast(b as decimal(20,4))) as s from t group by a", Strategy.AFFECTED_KEYS),
        ("select a, sum(a div id) as s from t group by a", Strategy.AFFECTED_KEYS),
        ("select c, sum(t.a) as s from t join u on t.a = u.a where id % t.a = 1 group by c", Strategy.AFFECTED_KEYS),
        ("select a, sum(a) as s from t where id % a = 1 group by a", Strategy.ALGEBRAIC),
        ("select a, sum(d) as s from t group by a", Strategy.AFFECTED_KEYS),
        ("select a, count(*) as n from t group by a having count(*) > 1", Strategy.AFFECTED_KEYS),
        ("select a, count(distinct b) as n from t group by a", Strategy.AFFECTED_KEYS),
        ("select t.id, u.c from t left join u on t.a = u.a", Strategy.AFFECTED_KEYS),
        ("select t.id from t full join u on t.a = u.a", Strategy.AFFECTED_KEYS),
        ("select id from t where a in (select a from u)", Strategy.AFFECTED_KEYS),
        ("select id from t where not exists (select 1 from u where u.a = t.a)", Strategy.AFFECTED_KEYS),
        ("select id, (select max(c) from u where u.a = t.a) as c from t", Strategy.AFFECTED_KEYS),
        ("select distinct a from t", Strategy.AFFECTED_KEYS),
        ("select a from t intersect select a from u", Strategy.AFFECTED_KEYS),
        ("select id from t qualify row_number() over (partition by a order by id) = 1", Strategy.AFFECTED_KEYS),
        ("select id, rank() over w as r from t window w as (partition by a order by id)", Strategy.AFFECTED_KEYS),
        ("select id from t where exists(array(1, 2), x -> x = a)", Strategy.ROWWISE),
        ("select id, rank() over (order by a) as r from t", Strategy.FULL),
        ("select id from t order by a, id limit 3", Strategy.FULL),
        ("select a, count(*) as n from t group by rollup (a)", Strategy.FULL),
    ],
)
def test_the_cheapest_strategy_that_is_right_is_chosen(sql: str, strategy: Strategy) -> None:
    assert analyse(sql, TABLES).strategy is strategy


@pytest.mark.parametrize(
    ("sql", "code"),
    [
        ("select zz from t", "VIEW_UNKNOWN_COLUMN"),
        ("select a from nope", "VIEW_UNKNOWN_TABLE"),
        ("select now() as x from t", "NON_DETERMINISTIC"),
        ("select current_timestamp as x from t", "NON_DETERMINISTIC"),
        ("select id from t where current_date() > date '2020-01-01'", "NON_DETERMINISTIC"),
        ("select rand() as x from t", "NON_DETERMINISTIC"),
        ("select date_add('today', id) as x from t", "NON_DETERMINISTIC"),
        ("select date_format('now', 'yyyy') as x from t", "NON_DETERMINISTIC"),
        ("select uuid() as x from t", "NON_DETERMINISTIC"),
        ("select monotonically_increasing_id() as x from t", "NON_DETERMINISTIC"),
        ("select a, first(b) as x from t group by a", "NON_DETERMINISTIC"),
        ("select a, collect_list(b) as x from t group by a", "NON_DETERMINISTIC"),
        ("select id from t tablesample (10 percent)", "NON_DETERMINISTIC"),
        ("select a, a from t", "VIEW_DUPLICATE_COLUMN"),
        ("select t.a, u.A from t join u on t.a = u.a", "VIEW_DUPLICATE_COLUMN"),
        ("select a as _key from t", "VIEW_COLUMN_RESERVED"),
        ("select a from t limit 3", "VIEW_LIMIT_WITHOUT_ORDER"),
        ("select _row_id from u", "VIEW_UNKNOWN_COLUMN"),
        ("drop table t", "VIEW_NOT_A_QUERY"),
        ("select from from", "VIEW_NOT_UNDERSTOOD"),
        ("select id, what.* from (select id, named_struct('x', id) as what from t)", "VIEW_NOT_UNDERSTOOD"),
        ("select a, listagg(c, ',') as l from u group by a", "NON_DETERMINISTIC"),
        ("select a, collect_set(c) as l from u group by a", "NON_DETERMINISTIC"),
        ("select a, mode(c) as m from u group by a", "NON_DETERMINISTIC"),
        ("select id, reflect('java.util.UUID', 'randomUUID') as r from t", "NON_DETERMINISTIC"),
        ("select id, timestamp 'now' as r from t", "NON_DETERMINISTIC"),
        ("select id, to_date(' Today ') as r from t", "NON_DETERMINISTIC"),
        ("select id from e where at > 'yesterday'", "NON_DETERMINISTIC"),
        ("select * from t version as of 5", "VIEW_OF_THE_PAST"),
        ("select id from t where a in (select a from u timestamp as of '2026-01-01')", "VIEW_OF_THE_PAST"),
    ],
)
def test_what_no_refresh_could_reproduce_is_refused_with_its_code(sql: str, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        analyse(sql, TABLES)
    assert caught.value.code == code
    first = caught.value.message.split()[0]
    assert first[0].islower() or first.isupper()  # an SQL keyword is spelt as in SQL
    assert not caught.value.message.endswith(".")


def test_ordered_window_functions_and_sorted_lists_are_deterministic() -> None:
    analyse("select id, first_value(b) over (partition by a order by id) as f from t", TABLES)
    analyse("select a, sort_array(collect_list(b)) as l from t group by a", TABLES)
    analyse("select a, sort_array(collect_set(b) filter (where id > 1)) as l from t group by a", TABLES)
    analyse("select a, size(collect_set(b)) as n, mode(b, true) as m from t group by a", TABLES)
    analyse("select a, listagg(c, ',') within group (order by c) as l from u group by a", TABLES)
    analyse("select id from e where what = 'today' and at > timestamp 'epoch'", TABLES)


def test_output_names_are_spelt_as_written_and_functions_name_their_columns() -> None:
    assert analyse("select a as Total, count(*), a + 1 from t group by a", TABLES).columns == (
        "Total",
        "count",
        "column3",
    )
    assert analyse("select * from t", TABLES).columns == ("id", "a", "b", "d")


def test_a_plan_survives_json() -> None:
    plan = analyse("select a, sum(b) as s, max(b) as m from t group by a", TABLES)
    assert ViewPlan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan


def test_accumulators_have_the_types_of_sparks_sums() -> None:
    plan = analyse("select a, sum(b * 2) as s, sum(a) as i, max(b) as m from t group by a", TABLES)
    hidden = dict(plan.hidden)
    assert hidden["_count"] == "BIGINT"
    assert hidden["_acc_0"] == "DECIMAL(22,2)"
    assert hidden["_acc_1"] == "BIGINT"
    assert hidden["_acc_2"] == "DECIMAL(10,2)"


def test_explain_names_keys_and_why_not_a_cheaper_strategy() -> None:
    text = explain(analyse("select a, sum(d) as s from t group by a", TABLES))
    assert "affected_keys" in text
    assert "t.a" in text
    assert "cannot be subtracted exactly" in text
    assert "spark jobs:    1, shared with other views" in text


def test_an_expression_that_may_fail_is_not_evaluated_on_pairs_that_never_stood_together() -> None:
    plan = analyse("select c, sum(t.a) as s from t join u on t.a = u.a where id / t.a > 1 group by c", TABLES)
    assert any("never stood together" in reason for reason in plan.reasons)


def test_names_of_inputs_keep_their_case() -> None:
    tables = {"Odd Name": TABLES["t"], "U": TABLES["u"]}
    found = analysis("select x.id, u.c from `odd name` x join (select * from u) u on x.a = u.a", tables)
    assert found.plan.strategy is Strategy.AFFECTED_KEYS
    assert set(found.plan.inputs) == {"Odd Name", "U"}
    assert found.relation is not None
    assert found.relation.node.inputs == {"Odd Name", "U"}


def test_a_cte_may_have_the_name_of_a_table() -> None:
    plan = analyse("with u as (select id, a from t) select u.id from u", TABLES)
    assert plan.inputs == ("t",)


TPCH = {
    Strategy.ALGEBRAIC: "q1 q5 q6 q7 q8 q9 q12 q14 q19",
    Strategy.AFFECTED_KEYS: "q4 q11 q13 q15 q16 q20 q22",
    Strategy.FULL: "q2 q3 q10 q17 q18 q21",
}
NEXMARK = {
    Strategy.ROWWISE: "q0 q1 q2 q10 q14 q21 q22",
    Strategy.ALGEBRAIC: "q12 q17",
    Strategy.AFFECTED_KEYS: "q3 q4 q5 q6 q7 q8 q9 q11 q13 q15 q16 q18 q19 q20",
}


@pytest.mark.parametrize(("suite", "expected"), [(view_tpch, TPCH), (view_nexmark, NEXMARK)], ids=["tpch", "nexmark"])
def test_the_benchmark_queries_get_the_strategies_that_the_docs_list(suite: object, expected: dict) -> None:  # type: ignore[type-arg]
    found: dict[Strategy, list[str]] = {}
    for name, sql in suite.QUERIES.items():  # type: ignore[attr-defined]
        found.setdefault(analyse(sql, suite.SCHEMAS).strategy, []).append(name)  # type: ignore[attr-defined]
    assert {strategy: " ".join(names) for strategy, names in found.items()} == expected


@pytest.mark.parametrize(
    ("sql", "joined"),
    [
        ("select a, id from t join u using (a)", ["`t`.`a` = `u`.`a`"]),
        (
            "select a, id from t right join u using (a) left join v using (a)",
            ["`t`.`a` = `u`.`a`", "`u`.`a` = `v`.`a`"],
        ),
        (
            "select a, id from t full join u using (a) full join v using (a)",
            ["`t`.`a` = `u`.`a`", "COALESCE(`t`.`a`, `u`.`a`) = `v`.`a`"],
        ),
    ],
)
def test_using_joins_with_the_column_that_the_joins_before_it_give(sql: str, joined: list[str]) -> None:
    tables = {**TABLES, "v": keyed([Column("a", "BIGINT"), Column("z", "STRING")], [])}
    found = analysis(sql, tables).query.tree
    assert [join.args["on"].sql("spark") for join in found.args["joins"]] == joined


def test_the_columns_of_a_star_and_the_fields_of_a_struct_are_spelt_as_they_were_written() -> None:
    tables = {"m": keyed([Column("Id", "INT", False), Column("createdAt", "TIMESTAMP"), Column("a b", "INT")], ["Id"])}
    assert analyse("select * from m", tables).columns == ("Id", "createdAt", "a b")
    assert analyse("select q.*, 1 as One from (select createdat as Then from m) q", tables).columns == ("Then", "One")
    found = analysis("select named_struct('Total', id) as x, cast(id as struct<Yy: int>) as y from m", tables)
    assert "AS `Total`" in found.query.tree.sql("spark")
    assert "`Yy`: INT" in found.query.tree.sql("spark")


@pytest.mark.parametrize(
    "sql",
    [
        "select session_window(at, '5 minutes') as w, count(*) as n from e group by 1",
        "select id, arrays_zip(array(id), array(what)) as z from e",
        "select lower(what collate utf8_lcase) as w, count(*) as n from e group by 1",
    ],
)
def test_what_depends_on_other_rows_or_on_names_is_recomputed_as_it_was_written(sql: str) -> None:
    assert analyse(sql, TABLES).strategy is Strategy.FULL


def test_any_is_an_aggregate() -> None:
    assert analyse("select a, any(b > 1) as x from t group by a", TABLES).strategy is Strategy.AFFECTED_KEYS
    assert analyse("select id from e where what like any ('a%', 'b%')", TABLES).strategy is Strategy.ROWWISE


@pytest.mark.parametrize("on", ["on t.a = b.a and b.c > 'x'", "using (a)"])
def test_the_right_side_of_a_semi_join_may_be_called_as_a_column_is(on: str) -> None:
    found = analysis(f"select t.id from t left semi join u as b {on}", TABLES)
    assert found.plan.strategy is Strategy.AFFECTED_KEYS
    assert found.query.tree.find(exp.Dot) is None


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("DECIMAL(28,6)", Strategy.ALGEBRAIC),
        ("DECIMAL(27,9)", Strategy.ALGEBRAIC),
        ("DECIMAL(28,7)", Strategy.AFFECTED_KEYS),
        ("DECIMAL(38,18)", Strategy.AFFECTED_KEYS),
    ],
)
def test_sums_are_added_to_only_where_spark_keeps_their_digits(kind: str, strategy: Strategy) -> None:
    tables = {"x": keyed([Column("id", "INT", False), Column("k", "INT"), Column("n", kind)], ["id"])}
    assert analyse("select k, sum(n) as s from x group by k", tables).strategy is strategy


@pytest.mark.parametrize("name", ["kll_sketch_agg_bigint", "theta_sketch_agg", "bitmap_and_agg"])
def test_a_sketch_is_an_aggregate(name: str) -> None:
    assert analyse(f"select {name}(a) as x from t", TABLES).strategy is Strategy.FULL
    assert analyse(f"select a, {name}(id) as x from t group by a", TABLES).strategy is Strategy.AFFECTED_KEYS


@pytest.mark.parametrize(
    "name", ["${env:X}", "${x}", "@v", ":p", "{}", "$1", "a.b", "%s", "back\\slash", "quo'te", "bq`x", "tab\t"]
)
def test_the_name_of_a_column_is_never_read_as_sql(name: str) -> None:
    odd = Schema((Column("id", "BIGINT", False), Column(name, "STRING"), Column("v", "INT")), ("id",))
    column = quoted(name)
    for sql, columns in (
        ("SELECT * FROM odd", ("id", name, "v")),
        (f"SELECT id, {column} FROM odd WHERE {column} > 'a'", ("id", name)),
        (f"SELECT {column}, count(*) AS n FROM odd GROUP BY {column}", (name, "n")),
        (f"SELECT a.id, b.{column} FROM odd a JOIN odd b ON a.{column} = b.{column}", ("id", name)),
        (f"SELECT a.id, {column} FROM odd a JOIN odd b USING ({column})", ("id", name)),
    ):
        assert analyse(sql, {"odd": odd}).columns == columns
