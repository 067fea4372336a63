"""Random queries out of a grammar over three tables, and random rows for these; for the property tests of views."""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from headwater.model.schema import Column, keyed

SCHEMAS = {
    "t": keyed(
        [Column("id", "INT", False), Column("k", "INT"), Column("v", "BIGINT"), Column("p", "DECIMAL(8,2)")], ["id"]
    ),
    "u": keyed([Column("k", "INT"), Column("s", "STRING"), Column("f", "DOUBLE")], []),
    "w": keyed([Column("k", "INT", False), Column("s", "STRING", False), Column("v", "BIGINT")], ["k", "s"]),
}


def _t(rng: random.Random) -> dict[str, Any]:
    price = rng.choice([None, Decimal("0.50"), Decimal("9.99"), Decimal("-2.00")])
    return {"id": rng.randint(1, 25), "k": rng.choice([None, 1, 2, 3, 4]), "v": rng.choice([None, 1, 2, 5]), "p": price}


def _u(rng: random.Random) -> dict[str, Any]:
    # Multiples of a quarter: their sums are exact, whatever the order.
    value = rng.choice([None, 0.25, 1.5, float("nan"), -2.0])
    return {
        "_row_id": rng.randint(1, 15),
        "k": rng.choice([None, 1, 2, 3, 9]),
        "s": rng.choice([None, "x", "y"]),
        "f": value,
    }


def _w(rng: random.Random) -> dict[str, Any]:
    return {"k": rng.randint(1, 4), "s": rng.choice("xyz"), "v": rng.choice([None, 1, 7])}


MAKE: dict[str, Callable[[random.Random], dict[str, Any]]] = {"t": _t, "u": _u, "w": _w}


class Grammar:
    """Writes a random query; relations have the columns k, s (text) and v (bigint), whatever they are made of."""

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
        )

    def relation(self, depth: int) -> str:
        if depth == 0 or self.rng.random() < 0.3:
            return self.base()
        kind = self.rng.choice([self._join, self._group, self._union, self._window, self._distinct, self._filter])
        return kind(depth - 1)

    def _join(self, depth: int) -> str:
        how = self.pick("join", "left join", "right join", "full join")
        extra = self.pick("", "", " and a.v <= b.v", " and b.s = 'x'")
        key = self.pick("a.k", "b.k", "coalesce(a.k, b.k)")
        left, right = self.relation(depth), self.base()
        return f"select {key} as k, a.s, b.v from ({left}) a {how} ({right}) b on a.k = b.k{extra}"

    def _group(self, depth: int) -> str:
        aggregate = self.pick("count(*)", "sum(v)", "max(v)", "min(v)", "count(distinct s)", "count(v)")
        having = self.pick("", "", " having count(*) > 1", " having max(v) > 1")
        return f"select k, max(s) as s, {aggregate} as v from ({self.relation(depth)}) g group by k{having}"

    def _union(self, depth: int) -> str:
        how = self.pick("union all", "union", "intersect", "except", "except all", "intersect all")
        return f"select k, s, v from ({self.relation(depth)}) x {how} select k, s, v from ({self.base()}) y"

    def _window(self, depth: int) -> str:
        function = self.pick("rank() over (partition by k order by v, s)", "sum(v) over (partition by k)")
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
            "exists (select 1 from w where w.k = q.k and w.s <> q.s)",
            "not exists (select 1 from u where u.k = q.k and u.f > 0)",
            "q.v >= (select avg(v) from w)",
            "q.v > (select count(*) from u where u.k = q.k)",
            "coalesce(q.v, 0) <> (select coalesce(max(v), -1) from w where w.k = q.k)",
            "q.k > 1",
        )
        return f"select q.k, q.s, q.v from ({self.relation(depth)}) q where {condition}"

    def query(self) -> str:
        shape = self.rng.random()
        if shape < 0.15:
            return self.pick(
                "select id, k, v * 2 as v2 from t where k > 1",
                "select k, count(*) as n, sum(v) as s, avg(v) as a, min(p) as lo, max(p) as hi from t group by k",
                "select u.s, count(*) as n, sum(t.p) as p from t join u on t.k = u.k group by u.s",
                "select count(*) as n, sum(p) as p, min(v) as v from t where v > 1",
                "select a.id, b.id as other from t a join t b on a.k = b.k and a.id < b.id",
                "select t.id from t left semi join u on t.k = u.k and u.s = 'x'",
            )
        if shape < 0.3:
            body = self.relation(1)
            return f"with c as ({body}) select c.k, c.v, w.s from c left join w on c.k = w.k and c.s = w.s"
        return self.relation(2)
