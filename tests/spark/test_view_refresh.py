"""Refresh of every strategy on real DataFrames, against a fresh query, over several epochs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from headwater.errors import UsageError
from headwater.model.schema import Column, keyed
from headwater.spark import view
from headwater.view.analyse import analyse
from view_harness import Live, MemoryTable, interpreted, random_changes

pytestmark = pytest.mark.spark
SCHEMAS = {
    "t": keyed(
        [Column("id", "INT", False), Column("a", "INT"), Column("b", "DECIMAL(10,2)"), Column("d", "DOUBLE")], ["id"]
    ),
    "u": keyed([Column("a", "INT"), Column("c", "STRING")], []),
}


def make_t(rng: random.Random) -> dict[str, Any]:
    return {
        "id": rng.randint(1, 20),
        "a": rng.choice([None, 1, 2, 3, 4]),
        "b": rng.choice([None, Decimal("1.50"), Decimal("2.25"), Decimal("-3.00")]),
        "d": rng.choice([None, 0.0, 1.5, float("nan"), 2.25]),
    }


def make_u(rng: random.Random) -> dict[str, Any]:
    return {"_row_id": rng.randint(1, 15), "a": rng.choice([None, 1, 2, 3, 5]), "c": rng.choice([None, "x", "y", "z"])}


MAKE = {"t": make_t, "u": make_u}


@pytest.fixture(autouse=True)
def _quick(spark: Any) -> Iterator[None]:
    with interpreted(spark):
        yield


def tables(spark: Any, rng: random.Random) -> dict[str, MemoryTable]:
    return {name: MemoryTable(spark, SCHEMAS[name], [MAKE[name](rng) for _ in range(14)]) for name in SCHEMAS}


@pytest.mark.parametrize(
    "sql",
    [
        "select *, a + 1 as next from t where a > 1",
        "select a, 'x' as s from t union all select a, c from u where c = 'x'",
        "select a + 1 as k, sum(b * 2) as s, min(d) as m, max(a) as x, avg(a) as v, sum(b) / count(*) as w "
        "from t group by a + 1",
        "select c, sum(t.a) as s, count(*) as n, min(b) as m from t join u on t.a = u.a group by c",
        "select count(*) as n, sum(a) as s, max(b) as m from t where d > 1",
        "select d, count(*) as n from t group by d",
        "select a, sum(d) as s from t group by a having count(*) > 1",
        "select t.a, c from t left join u on t.a = u.a where exists "
        "(select 1 from u u2 where u2.a = t.a and u2.c > u.c)",
        "select c, count(distinct t.b) as s from t left join u on t.a = u.a group by c",
        "select a from t except select a from u",
        "select a from t intersect all select a from u",
        "select a, b from t qualify row_number() over (partition by a order by b desc, id) <= 2",
        "select id, (select count(*) from u where u.a = t.a) as n from t where b > (select avg(b) from t)",
        "select a from t order by a limit 3",
        "with x as (select a, count(*) as n from t group by a) select x.a, n, u.c from x full join u on x.a = u.a",
        "select a, count(*) as n from t group by rollup (a)",
        "select id, x from t lateral view explode(array(a, id)) e as x",
        "select id from t where a not in (select a from u)",
        "select t.id, u.c from u right join t on t.a = u.a and u.c <> 'x'",
        "select c, max(n) as m from (select a, count(*) as n from t group by a) g join u on g.a = u.a group by c",
        "select t.id, '{x}' as k from t left anti join u on t.a = u.a",
        "select id, explode(array(a, a + 1)) as e from t",
        "select id, posexplode(array(a, a + 1)) as (p, e) from t",
        "select x, count(*) as n from (select b as x from t union all select cast(a as dec(12,4)) from u) q group by x",
        "select b as x from t except all select cast(a as decimal(12,4)) from u",
        "select t.id, t.b, u.a from t full join u on t.b = u.a",
        "select b, id from t union all select a, a from u",
    ],
)
def test_refreshed_view_equals_a_fresh_query(spark: Any, sql: str) -> None:
    rng = random.Random(sql)
    data = tables(spark, rng)
    live = Live(spark, sql, data)
    live.check()
    for _ in range(2):
        random_changes(rng, data, MAKE)
        live.refresh()
        live.check()


def test_refresh_without_broadcast_gives_the_same(spark: Any) -> None:
    rng = random.Random(5)
    data = tables(spark, rng)
    live = Live(spark, "select c, sum(t.a) as s from t left join u on t.a = u.a group by c", data)
    random_changes(rng, data, MAKE)
    live.refresh(broadcast=False)
    live.check()


def test_a_global_aggregate_keeps_its_row_when_the_table_is_empty(spark: Any) -> None:
    data = tables(spark, random.Random(1))
    live = Live(spark, "select count(*) as n, sum(a) as s, max(b) as m from t", data)
    data["t"].begin()
    data["t"].rows.clear()
    live.refresh()
    live.check()
    assert [row["n"] for row in live.rows.values()] == [0]


def test_an_unchanged_input_gives_no_rows(spark: Any) -> None:
    data = tables(spark, random.Random(1))
    live = Live(spark, "select a, count(*) as n from t group by a", data)
    assert live.refresh() == 0


def test_a_change_that_cancels_out_gives_no_rows(spark: Any) -> None:
    data = tables(spark, random.Random(1))
    live = Live(spark, "select count(*) as n from t", data)
    key, row = next(iter(data["t"].rows.items()))
    data["t"].begin()
    data["t"].remove(key)
    data["t"].put({**row, "id": 77})
    assert live.refresh() == 0


def test_negative_zero_is_the_group_of_zero_and_nan_is_one_group(spark: Any) -> None:
    data = tables(spark, random.Random(1))
    data["t"].rows.clear()
    for i, value in enumerate([0.0, float("nan"), None]):
        data["t"].put({"id": i, "a": 1, "b": None, "d": value})
    live = Live(spark, "select d, count(*) as n, max(id) as m from t group by d", data)
    data["t"].begin()
    for i, value in enumerate([-0.0, float("nan"), None]):
        data["t"].put({"id": 10 + i, "a": 1, "b": None, "d": value})
    assert live.refresh() == 3
    live.check()


def test_negative_zero_inside_a_group_key_is_zero(spark: Any) -> None:
    data = tables(spark, random.Random(1))
    data["t"].rows.clear()
    data["t"].put({"id": 1, "a": 1, "b": None, "d": 0.0})
    live = Live(spark, "select struct(array(d) as x, a) as s, count(distinct id) as n from t group by 1", data)
    data["t"].begin()
    data["t"].put({"id": 2, "a": 1, "b": None, "d": -0.0})
    live.refresh()
    live.check()
    data["t"].begin()
    data["t"].rows.clear()
    live.refresh()
    live.check()


@pytest.mark.parametrize(
    "sql",
    [
        "select t.id, g.n from t left join (select c, count(*) as n from u group by c) g on t.a = g.c",
        "select id, (select count(*) from u where u.c = t.a) as n from t",
    ],
)
def test_texts_that_differ_may_equal_one_number(spark: Any, sql: str) -> None:
    data = tables(spark, random.Random(1))
    for table in data.values():
        table.rows.clear()
    data["t"].put({"id": 1, "a": 1, "b": None, "d": None})
    for row_id, text in enumerate(["1", "01", "2"]):
        data["u"].put({"_row_id": row_id, "a": None, "c": text})
    live = Live(spark, sql, data)
    live.check()
    data["u"].begin()
    data["u"].put({"_row_id": 7, "a": None, "c": "001"})
    data["u"].remove((0,))
    live.refresh()
    live.check()


def test_a_view_that_an_earlier_build_keyed_otherwise_is_compared_as_a_whole(spark: Any) -> None:
    rng = random.Random(3)
    data = tables(spark, rng)
    live = Live(spark, "select t.id, t.b, u.c from t left join u on t.a = u.a", data)
    assert live.plan.hidden == (("_part", "STRING"),)
    live.plan = replace(live.plan, hidden=())
    live.schema = view.storage_schema(spark, live.plan, {n: t.schema for n, t in data.items()})
    live.rows = {key: {k: v for k, v in row.items() if k != "_part"} for key, row in live.rows.items()}
    random_changes(rng, data, MAKE)
    live.refresh()
    live.check()


def test_a_row_that_the_filter_drops_is_not_evaluated(spark: Any) -> None:
    data = tables(spark, random.Random(1))
    live = Live(spark, "select id, 10 / a as q from t where a <> 0", data)
    data["t"].begin()
    data["t"].put({"id": 1, "a": 0, "b": None, "d": None})
    live.refresh()
    live.check()


def test_several_views_refresh_at_the_same_time(spark: Any) -> None:
    rng = random.Random(9)
    data = tables(spark, rng)
    queries = [
        "select a, count(*) as n from t group by rollup (a)",
        "select a, count(*) as n from t where id > 3 group by rollup (a)",
        "select id, a from t where a > 1",
    ]
    views = [Live(spark, sql, data) for sql in queries]
    random_changes(rng, data, MAKE)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda live: live.refresh(), views))
    for live in views:
        live.check()


def test_a_query_that_spark_refuses_is_a_usage_error(spark: Any) -> None:
    plan = analyse("select no_such_function(a) as x from t", SCHEMAS)
    with pytest.raises(UsageError, match="Spark refuses"):
        view.output_schema(spark, plan, SCHEMAS)
    plan = analyse("select id, null as x from t", SCHEMAS)
    with pytest.raises(UsageError) as caught:
        view.output_schema(spark, plan, SCHEMAS)
    assert caught.value.code == "VIEW_COLUMN_UNTYPED"


@pytest.mark.parametrize(
    "sql",
    [
        "select t.id, u.c from t join u on 10 / (t.a - length(u.c)) > 0",
        "select t.id, u.c from t left join u on t.b = u.a and 10 / (t.a - length(u.c)) > 0",
        "select t.id from t left semi join u on 10 / (t.a - length(u.c)) > 0",
        "select count(*) as n, sum(t.a) as s from t join u on t.b = u.a and 10 / (t.a - length(u.c)) > 0",
        "select q.id, v.c from (select t.id, t.a, u.c from t join u on t.b = u.a) q join u v "
        "on 10 / (q.a - length(q.c)) = v.a + 3",
    ],
)
def test_the_condition_of_a_join_is_not_asked_of_rows_that_never_stood_together(spark: Any, sql: str) -> None:
    data = tables(spark, random.Random(1))
    for table in data.values():
        table.rows.clear()
    data["t"].put({"id": 1, "a": 1, "b": Decimal("7.00"), "d": None})
    data["u"].put({"_row_id": 1, "a": 7, "c": ""})
    live = Live(spark, sql, data)
    for table in data.values():
        table.begin()
    data["t"].put({"id": 1, "a": 2, "b": Decimal("7.00"), "d": None})
    data["u"].put({"_row_id": 1, "a": 7, "c": "x"})  # with t's row of before, the divisor would be 0
    live.refresh()
    live.check()
    assert live.rows


@pytest.mark.parametrize(
    "sql",
    [
        "select a, t.id, u.c, v.z from t full join u using (a) full join v using (a)",
        "select a, t.id, u.c, v.z from t right join u using (a) left join v using (a)",
        "select z, t.id from v join (select id, a as z from t) t using (z)",
        "select * from (select a, id from t) t full join u using (a)",
        "select id, to_json(named_struct('Total', a, 'B', b)) as j from t",
        "select id, array(named_struct('a b', a, 'C', map('x', struct(b)))) as s from t",
        "select id, arrays_zip(array(a), array(b)) as z from t",
        "select a, any(b > 1) as x from t group by a",
        "select id, to_json(struct(*)) as j from t where a > 1",
        "select t.id, xxhash64(u.*) as h from t join u on t.a = u.a",
        "select q.a, q.n, r.m from (select a, count(*) as n from t group by a) q "
        "full join (select a, max(c) as m from u group by a) r on q.a = r.a",
    ],
)
def test_a_query_means_what_it_means_to_spark(spark: Any, sql: str) -> None:
    def make_v(rng: random.Random) -> dict[str, Any]:
        return {"_row_id": rng.randint(1, 9), "a": rng.choice([None, 1, 3, 5]), "z": rng.choice(["01", "1", "2"])}

    rng = random.Random(sql)
    schema = keyed([Column("a", "INT"), Column("z", "STRING")], [])
    data = {**tables(spark, rng), "v": MemoryTable(spark, schema, [make_v(rng) for _ in range(6)])}
    live = Live(spark, sql, data)
    live.check()
    for _ in range(2):
        random_changes(rng, data, {**MAKE, "v": make_v})
        live.refresh()
        live.check()


def test_a_full_join_keeps_apart_rows_without_a_key_on_either_side(spark: Any) -> None:
    data = tables(spark, random.Random(1))
    query = (
        "select q.a, q.n, r.m from (select a, count(*) as n from t group by a) q "
        "full join (select a, max(c) as m from u group by a) r on q.a = r.a"
    )
    data["t"].put({"id": 50, "a": None, "b": None, "d": None})
    data["u"].put({"_row_id": 50, "a": None, "c": "x"})
    live = Live(spark, query, data)
    live.check()
    for table, key in (("t", (51,)), ("u", (51,))):
        data[table].begin()
        data[table].put({"id": 51, "_row_id": 51, "a": None, "b": None, "d": None, "c": "y"})
        live.refresh()
        live.check()
        data[table].begin()
        data[table].remove(key)
        live.refresh()
        live.check()


def test_sessions_are_merged_with_those_that_are_stored(spark: Any) -> None:
    schema = keyed([Column("id", "INT", False), Column("at", "TIMESTAMP")], ["id"])
    noon = datetime(2026, 5, 1, 12, tzinfo=UTC)
    data = {"e": MemoryTable(spark, schema, [{"id": 1, "at": noon}])}
    live = Live(spark, "select session_window(at, '5 minutes') as w, count(*) as n from e group by 1", data)
    data["e"].begin()
    data["e"].put({"id": 2, "at": noon + timedelta(minutes=3)})
    live.refresh()
    live.check()


@pytest.mark.parametrize("value", ["interval 1 day", "parse_json('1')", "c collate utf8_lcase"])
def test_a_column_that_cannot_be_stored_is_refused(spark: Any, value: str) -> None:
    with pytest.raises(UsageError, match="cannot store") as caught:
        view.output_schema(spark, analyse(f"select {value} as x from u", SCHEMAS), SCHEMAS)
    assert caught.value.code == "VIEW_COLUMN_TYPE"


def test_sums_of_decimals_without_a_digit_to_spare_keep_all_their_digits(spark: Any) -> None:
    schema = keyed([Column("id", "INT", False), Column("k", "INT"), Column("x", "DECIMAL(38,18)")], ["id"])
    rows = [{"id": i, "k": 1, "x": Decimal(f"{i}.000000000000000007")} for i in range(3)]
    data = {"a": MemoryTable(spark, schema, rows)}
    live = Live(spark, "select k, sum(x) as s from a group by k", data)
    for change in ({"id": 9, "k": 1, "x": Decimal("0.000000000000000001")}, {"id": 1, "k": 1, "x": None}):
        data["a"].begin()
        data["a"].put(change)
        live.refresh()
        live.check()


def test_a_sum_may_change_by_more_than_its_type_holds(spark: Any) -> None:
    schema = keyed([Column("id", "INT", False), Column("x", "BIGINT")], ["id"])
    data = {"a": MemoryTable(spark, schema, [{"id": 1, "x": 9 * 10**18}])}
    live = Live(spark, "select sum(x) as s, avg(x) as m from a", data)
    data["a"].begin()
    data["a"].put({"id": 1, "x": -9 * 10**18})
    live.refresh()
    live.check()
