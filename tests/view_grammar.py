"""Random queries out of a grammar over three tables, and random rows for these; for the property tests of views."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from headwater.model.schema import Column, keyed

SCHEMAS = {
    "t": keyed(
        [Column("id", "INT", False), Column("k", "INT"), Column("v", "BIGINT"), Column("p", "DECIMAL(8,2)")], ["id"]
    ),
    "u": keyed([Column("k", "INT"), Column("s", "STRING"), Column("f", "DOUBLE")], []),
    "w": keyed(
        [
            Column("k", "INT", False),
            Column("s", "STRING", False),
            Column("v", "BIGINT"),
            Column("d", "DECIMAL(10,4)"),
            Column("ts", "TIMESTAMP"),
        ],
        ["k", "s"],
    ),
}
# Around the days on which Europe changes its clocks, and before time zones were whole hours.
INSTANTS = [
    datetime(2026, 3, 29, 0, 30, tzinfo=UTC),
    datetime(2026, 10, 25, 1, 30, tzinfo=UTC),
    datetime(1890, 1, 1, tzinfo=UTC),
]


def _t(rng: random.Random) -> dict[str, Any]:
    price = rng.choice([None, Decimal("0.50"), Decimal("9.99"), Decimal("-2.00")])
    return {"id": rng.randint(1, 25), "k": rng.choice([None, 1, 2, 3, 4]), "v": rng.choice([None, 1, 2, 5]), "p": price}


def _u(rng: random.Random) -> dict[str, Any]:
    # Multiples of a quarter: their sums are exact, whatever the order.
    value = rng.choice([None, 0.25, 1.5, float("nan"), -2.0, 0.0, -0.0])
    return {
        "_row_id": rng.randint(1, 15),
        "k": rng.choice([None, 1, 2, 3, 9]),
        "s": rng.choice([None, "x", "y"]),
        "f": value,
    }


def _w(rng: random.Random) -> dict[str, Any]:
    number = rng.choice([None, Decimal("0.5000"), Decimal("9.9901"), Decimal("1.0000")])
    return {
        "k": rng.randint(1, 4),
        "s": rng.choice("xyz"),
        "v": rng.choice([None, 1, 7]),
        "d": number,
        "ts": rng.choice([None, *INSTANTS]),
    }


MAKE: dict[str, Callable[[random.Random], dict[str, Any]]] = {"t": _t, "u": _u, "w": _w}


class Grammar:
    """Writes a random query; relations have the columns k, s (text) and v, whatever they are made of.

    Of k and v the types differ from base to base (integers, decimals of several scales, doubles with NaN and -0.0), so
    that joins and set operations have to widen them. Sums over doubles are not asked for: their order is chance.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)

    def base(self) -> str:
        return self.pick(
            "select k, cast(id as string) as s, v from t",
            "select k, s, cast(length(s) as bigint) as v from u",
            "select k, s, v from w",
            "select k, 'c' as s, v from t where p > 0 or p is null",
            "select k, s, v + 1 as v from w where v is not null",
            "select k, cast(id % 3 as string) as s, p as v from t",
            "select k, s, d as v from w",
            "select v as k, s, k as v from w",
            "select cast(k as decimal(6,1)) as k, s, d as v from w",
            "select f as k, s, cast(k as bigint) as v from u",
            "select k, cast(cast(ts as date) as string) as s, hour(ts) as v from w",
        )

    def relation(self, depth: int) -> str:
        if depth == 0 or self.rng.random() < 0.3:
            return self.base()
        kind = self.rng.choice(
            [self._join, self._group, self._union, self._window, self._distinct, self._filter, self._semi]
        )
        return kind(depth - 1)

    def _join(self, depth: int) -> str:
        how = self.pick("join", "left join", "right join", "full join")
        extra = self.pick("", "", " and a.v <= b.v", " and b.s = 'x'", " and a.s = b.s")
        on = self.pick("a.k = b.k", "a.k = b.k", "a.k <=> b.k", "a.k = b.k + 1", "a.v = b.k")
        key = self.pick("a.k", "b.k", "coalesce(a.k, b.k)")
        left, right = self.relation(depth), self.base()
        return f"select {key} as k, a.s, b.v from ({left}) a {how} ({right}) b on {on}{extra}"

    def _semi(self, depth: int) -> str:
        how = self.pick("left semi join", "left anti join")
        on = self.pick("a.k = b.k", "a.k <=> b.k", "a.k = b.k and a.s <> b.s", "a.v < b.v")
        return f"select a.k, a.s, a.v from ({self.relation(depth)}) a {how} ({self.base()}) b on {on}"

    def _group(self, depth: int) -> str:
        aggregate = self.pick(
            "count(*)",
            "sum(v)",
            "max(v)",
            "min(v)",
            "count(distinct s)",
            "count(v)",
            "sum(distinct v)",
            "cast(avg(v) as bigint)",
            "count(*) filter (where v > 1)",
            "sum(v) filter (where s = 'x')",
            "size(collect_set(s))",
            "max(v) - min(v)",
        )
        having = self.pick("", "", " having count(*) > 1", " having max(v) > 1")
        key = self.pick("k", "k", "k", "k + 1", "coalesce(k, 0)")
        how = self.pick(key, key, key, key, f"rollup({key})")
        return (
            f"select {key} as k, max(s) as s, {aggregate} as v from ({self.relation(depth)}) g group by {how}{having}"
        )

    def _union(self, depth: int) -> str:
        how = self.pick("union all", "union", "intersect", "except", "except all", "intersect all")
        sides = [f"({self.relation(depth)}) x", f"({self.base()}) y"]
        self.rng.shuffle(sides)
        return f"select k, s, v from {sides[0]} {how} select k, s, v from {sides[1]}"

    def _window(self, depth: int) -> str:
        function = self.pick(
            "rank() over (partition by k order by v, s)",
            "dense_rank() over (partition by k order by v)",
            "row_number() over (partition by k order by v desc, s)",
            "sum(v) over (partition by k)",
            "sum(v) over (partition by k order by s)",
            "sum(v) over (partition by k order by v, s rows between 1 preceding and current row)",
            "lag(v) over (partition by k order by s, v)",
            "count(*) over (partition by k, s)",
        )
        inner = f"select k, s, v, cast({function} as bigint) as r from ({self.relation(depth)}) i"
        if self.rng.random() < 0.5:
            return f"select k, s, v from ({inner}) o where r <= 2"
        return f"select k, s, r as v from ({inner}) o"

    def _distinct(self, depth: int) -> str:
        return f"select distinct k, s, v from ({self.relation(depth)}) d"

    def _filter(self, depth: int) -> str:
        condition = self.pick(
            "q.k in (select k from u)",
            "q.k not in (select k from w)",
            "q.k not in (select k from u)",
            "q.k in (select k from t group by k having count(*) > 2)",
            "(q.k, q.s) in (select k, s from w)",
            "q.k in (select v from w) or q.v > 1",
            "exists (select 1 from w where w.k = q.k and w.s <> q.s)",
            "not exists (select 1 from u where u.k = q.k and u.f > 0)",
            "exists (select 1 from u where u.f > 1)",
            "q.v >= (select avg(v) from w)",
            "q.v > (select count(*) from u where u.k = q.k)",
            "coalesce(q.v, 0) <> (select coalesce(max(v), -1) from w where w.k = q.k)",
            "q.v < (select max(d) from w where w.k < q.k)",
            "q.k > 1",
        )
        return f"select q.k, q.s, q.v from ({self.relation(depth)}) q where {condition}"

    def query(self) -> str:
        shape = self.rng.random()
        if shape < 0.2:
            return self.pick(
                "select id, k, v * 2 as v2 from t where k > 1",
                "select k, count(*) as n, sum(v) as s, avg(v) as a, min(p) as lo, max(p) as hi from t group by k",
                "select u.s, count(*) as n, sum(t.p) as p from t join u on t.k = u.k group by u.s",
                "select count(*) as n, sum(p) as p, min(v) as v from t where v > 1",
                "select a.id, b.id as other from t a join t b on a.k = b.k and a.id < b.id",
                "select t.id from t left semi join u on t.k = u.k and u.s = 'x'",
                "select f, count(*) as n, max(s) as s from u group by f",
                "select struct(f as x, s as y) as b, count(distinct k) as n from u group by struct(f as x, s as y)",
                "select date_trunc('day', ts) as day, count(*) as n, max(ts) as m, avg(d) as a from w group by 1",
                "select p as x, k from t union all select d, v from w",
                "select x, count(*) as n from (select p as x from t union all select d from w) q group by x",
                "select t.p, w.d, t.id from t full join w on t.p = w.d",
                "select k, s, sum(v) as v, grouping_id() as g from w group by cube (k, s)",
                "select * from (select k, s, v from w) pivot (sum(v) for s in ('x' as x, 'y' as y))",
                "select t.id, q.n from t, lateral (select count(*) as n from w where w.k = t.k) q",
                "select id, e from t lateral view explode(array(k, v)) x as e",
                "select id, (select max(s) from u where u.k = t.k) as m, (select count(*) from w) as n from t",
                "select k, v, id from t qualify rank() over (partition by k order by v desc) <= 2",
                "select k, s, v from w order by v desc, k, s limit 4",
                "select w.k, sum(t.p * w.d) as x, avg(t.p) as a, max(w.d) as m from t join w on t.k = w.k group by w.k",
            )
        if shape < 0.35:
            body = self.relation(1)
            return f"with c as ({body}) select c.k, c.v, w.s from c left join w on c.k = w.k and c.s = w.s"
        return self.relation(2)
