"""TPC-H's tables in small and its 22 queries as views, for the tests; the dates and shares fit the small data."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from headwater.model.schema import Column, Schema

Row = dict[str, Any]
_MONEY = "DECIMAL(15,2)"


def _schema(key: str, columns: str) -> Schema:
    names = key.split()
    pairs = [part.split(":") for part in columns.split()]
    return Schema(tuple(Column(n, t, nullable=n not in names) for n, t in pairs), tuple(names))


SCHEMAS: Final[dict[str, Schema]] = {
    "region": _schema("r_regionkey", "r_regionkey:INT r_name:STRING r_comment:STRING"),
    "nation": _schema("n_nationkey", "n_nationkey:INT n_name:STRING n_regionkey:INT n_comment:STRING"),
    "supplier": _schema(
        "s_suppkey",
        "s_suppkey:INT s_name:STRING s_address:STRING s_nationkey:INT s_phone:STRING "
        f"s_acctbal:{_MONEY} s_comment:STRING",
    ),
    "customer": _schema(
        "c_custkey",
        f"c_custkey:INT c_name:STRING c_address:STRING c_nationkey:INT c_phone:STRING c_acctbal:{_MONEY} "
        "c_mktsegment:STRING c_comment:STRING",
    ),
    "part": _schema(
        "p_partkey",
        "p_partkey:INT p_name:STRING p_mfgr:STRING p_brand:STRING p_type:STRING p_size:INT p_container:STRING "
        f"p_retailprice:{_MONEY} p_comment:STRING",
    ),
    "partsupp": _schema(
        "ps_partkey ps_suppkey",
        f"ps_partkey:INT ps_suppkey:INT ps_availqty:INT ps_supplycost:{_MONEY} ps_comment:STRING",
    ),
    "orders": _schema(
        "o_orderkey",
        f"o_orderkey:INT o_custkey:INT o_orderstatus:STRING o_totalprice:{_MONEY} o_orderdate:DATE "
        "o_orderpriority:STRING o_clerk:STRING o_shippriority:INT o_comment:STRING",
    ),
    "lineitem": _schema(
        "l_orderkey l_linenumber",
        f"l_orderkey:INT l_partkey:INT l_suppkey:INT l_linenumber:INT l_quantity:{_MONEY} l_extendedprice:{_MONEY} "
        f"l_discount:{_MONEY} l_tax:{_MONEY} l_returnflag:STRING l_linestatus:STRING l_shipdate:DATE l_commitdate:DATE "
        "l_receiptdate:DATE l_shipinstruct:STRING l_shipmode:STRING l_comment:STRING",
    ),
}
ROWS: Final = {
    "region": 3, "nation": 5, "supplier": 8, "customer": 12, "part": 10, "partsupp": 20, "orders": 25, "lineitem": 60
}  # fmt: skip
_NATIONS = ("FRANCE", "GERMANY", "BRAZIL", "CANADA", "SAUDI ARABIA")
_REGIONS = ("EUROPE", "AMERICA", "ASIA")


def _money(rng: random.Random, low: int, high: int) -> Decimal:
    return Decimal(rng.randint(low * 100, high * 100)) / 100


def _day(rng: random.Random) -> dt.date:
    return dt.date(1994, 1, 1) + dt.timedelta(days=rng.randint(0, 900))


def _nation(rng: random.Random) -> Row:
    key = rng.randint(0, 4)
    return {"n_nationkey": key, "n_name": _NATIONS[key], "n_regionkey": rng.randint(0, 2), "n_comment": "n"}


def _region(rng: random.Random) -> Row:
    key = rng.randint(0, 2)
    return {"r_regionkey": key, "r_name": _REGIONS[key], "r_comment": "r"}


def _supplier(rng: random.Random) -> Row:
    key = rng.randint(1, 8)
    return {
        "s_suppkey": key, "s_name": f"Supplier#{key}", "s_address": f"a{key}", "s_nationkey": rng.randint(0, 4),
        "s_phone": f"1{rng.randint(0, 9)}-555", "s_acctbal": _money(rng, -900, 9000),
        "s_comment": rng.choice(["fine", "Customer x Complaints", "ok"]),
    }  # fmt: skip


def _customer(rng: random.Random) -> Row:
    key = rng.randint(1, 14)
    return {
        "c_custkey": key, "c_name": f"Customer#{key}", "c_address": f"a{key}", "c_nationkey": rng.randint(0, 4),
        "c_phone": f"{rng.choice([13, 31, 23, 29, 30])}-55", "c_acctbal": _money(rng, -900, 9000),
        "c_mktsegment": rng.choice(["BUILDING", "MACHINERY"]), "c_comment": "c",
    }  # fmt: skip


def _part(rng: random.Random) -> Row:
    key = rng.randint(1, 10)
    return {
        "p_partkey": key, "p_name": rng.choice(["forest green", "green tea", "red"]), "p_mfgr": f"M{key % 3}",
        "p_brand": rng.choice(["Brand#12", "Brand#23", "Brand#34", "Brand#45"]),
        "p_type": rng.choice(["ECONOMY ANODIZED STEEL", "PROMO BRASS", "MEDIUM POLISHED TIN", "SMALL BRASS"]),
        "p_size": rng.choice([3, 9, 14, 15]), "p_container": rng.choice(["SM CASE", "MED BOX", "LG BOX"]),
        "p_retailprice": _money(rng, 10, 200), "p_comment": "p",
    }  # fmt: skip


def _partsupp(rng: random.Random) -> Row:
    return {
        "ps_partkey": rng.randint(1, 10), "ps_suppkey": rng.randint(1, 8), "ps_availqty": rng.randint(1, 90),
        "ps_supplycost": _money(rng, 1, 100), "ps_comment": "ps",
    }  # fmt: skip


def _orders(rng: random.Random) -> Row:
    key = rng.randint(1, 30)
    return {
        "o_orderkey": key, "o_custkey": rng.randint(1, 14), "o_orderstatus": rng.choice(["F", "O"]),
        "o_totalprice": _money(rng, 10, 900), "o_orderdate": _day(rng),
        "o_orderpriority": rng.choice(["1-URGENT", "2-HIGH", "5-LOW"]), "o_clerk": "k", "o_shippriority": 0,
        "o_comment": rng.choice(["x", "special y requests"]),
    }  # fmt: skip


def _lineitem(rng: random.Random) -> Row:
    ship = _day(rng)
    return {
        "l_orderkey": rng.randint(1, 30), "l_partkey": rng.randint(1, 10), "l_suppkey": rng.randint(1, 8),
        "l_linenumber": rng.randint(1, 4), "l_quantity": Decimal(rng.randint(1, 30)),
        "l_extendedprice": _money(rng, 10, 900), "l_discount": Decimal(rng.randint(3, 8)) / 100,
        "l_tax": Decimal(rng.randint(0, 8)) / 100, "l_returnflag": rng.choice("RAN"), "l_linestatus": rng.choice("FO"),
        "l_shipdate": ship, "l_commitdate": ship + dt.timedelta(days=rng.randint(-9, 9)),
        "l_receiptdate": ship + dt.timedelta(days=rng.randint(0, 9)),
        "l_shipinstruct": rng.choice(["DELIVER IN PERSON", "NONE"]), "l_shipmode": rng.choice(["AIR", "MAIL", "SHIP"]),
        "l_comment": "l",
    }  # fmt: skip


MAKE: Final[dict[str, Callable[[random.Random], Row]]] = {
    "region": _region, "nation": _nation, "supplier": _supplier, "customer": _customer, "part": _part,
    "partsupp": _partsupp, "orders": _orders, "lineitem": _lineitem,
}  # fmt: skip

_REVENUE = "l_extendedprice * (1 - l_discount)"
QUERIES: Final[dict[str, str]] = {
    "q1": f"""select l_returnflag, l_linestatus, sum(l_quantity) as sum_qty, sum(l_extendedprice) as sum_base_price,
        sum({_REVENUE}) as sum_disc_price, avg(l_quantity) as avg_qty, avg(l_discount) as avg_disc,
        count(*) as count_order from lineitem where l_shipdate <= date '1996-01-01' group by l_returnflag, l_linestatus
        order by l_returnflag, l_linestatus""",
    "q2": """select s_acctbal, s_name, n_name, p_partkey, p_mfgr, s_address, s_phone, s_comment
        from part, supplier, partsupp, nation, region
        where p_partkey = ps_partkey and s_suppkey = ps_suppkey and p_type like '%BRASS' and s_nationkey = n_nationkey
        and n_regionkey = r_regionkey and r_name = 'EUROPE' and ps_supplycost = (
            select min(ps_supplycost) from partsupp, supplier, nation, region
            where p_partkey = ps_partkey and s_suppkey = ps_suppkey and s_nationkey = n_nationkey
            and n_regionkey = r_regionkey and r_name = 'EUROPE')
        order by s_acctbal desc, n_name, s_name, p_partkey limit 100""",
    "q3": f"""select l_orderkey, sum({_REVENUE}) as revenue, o_orderdate, o_shippriority from customer, orders, lineitem
        where c_mktsegment = 'BUILDING' and c_custkey = o_custkey and l_orderkey = o_orderkey
        and o_orderdate < date '1995-06-15' and l_shipdate > date '1994-06-15'
        group by l_orderkey, o_orderdate, o_shippriority order by revenue desc, o_orderdate, l_orderkey limit 10""",
    "q4": """select o_orderpriority, count(*) as order_count from orders where o_orderdate >= date '1994-07-01'
        and o_orderdate < date '1995-10-01' and exists (
            select * from lineitem where l_orderkey = o_orderkey and l_commitdate < l_receiptdate)
        group by o_orderpriority order by o_orderpriority""",
    "q5": f"""select n_name, sum({_REVENUE}) as revenue from customer, orders, lineitem, supplier, nation, region
        where c_custkey = o_custkey and l_orderkey = o_orderkey and l_suppkey = s_suppkey and c_nationkey = s_nationkey
        and s_nationkey = n_nationkey and n_regionkey = r_regionkey and r_name = 'ASIA' group by n_name
        order by revenue desc""",
    "q6": """select sum(l_extendedprice * l_discount) as revenue from lineitem where l_shipdate >= date '1994-01-01'
        and l_shipdate < date '1996-01-01' and l_discount between 0.05 and 0.07 and l_quantity < 24""",
    "q7": f"""select supp_nation, cust_nation, l_year, sum(volume) as revenue from (
            select n1.n_name as supp_nation, n2.n_name as cust_nation, year(l_shipdate) as l_year, {_REVENUE} as volume
            from supplier, lineitem, orders, customer, nation n1, nation n2
            where s_suppkey = l_suppkey and o_orderkey = l_orderkey and c_custkey = o_custkey
            and s_nationkey = n1.n_nationkey and c_nationkey = n2.n_nationkey
            and ((n1.n_name = 'FRANCE' and n2.n_name = 'GERMANY') or (n1.n_name = 'GERMANY' and n2.n_name = 'FRANCE'))
        ) as shipping group by supp_nation, cust_nation, l_year""",
    "q8": f"""select o_year, sum(case when nation = 'BRAZIL' then volume else 0 end) / sum(volume) as mkt_share from (
            select year(o_orderdate) as o_year, {_REVENUE} as volume, n2.n_name as nation
            from part, supplier, lineitem, orders, customer, nation n1, nation n2, region
            where p_partkey = l_partkey and s_suppkey = l_suppkey and l_orderkey = o_orderkey and o_custkey = c_custkey
            and c_nationkey = n1.n_nationkey and n1.n_regionkey = r_regionkey and r_name = 'AMERICA'
            and s_nationkey = n2.n_nationkey) as all_nations group by o_year order by o_year""",
    "q9": f"""select nation, o_year, sum(amount) as sum_profit from (
            select n_name as nation, year(o_orderdate) as o_year, {_REVENUE} - ps_supplycost * l_quantity as amount
            from part, supplier, lineitem, partsupp, orders, nation
            where s_suppkey = l_suppkey and ps_suppkey = l_suppkey and ps_partkey = l_partkey and p_partkey = l_partkey
            and o_orderkey = l_orderkey and s_nationkey = n_nationkey and p_name like '%green%') as profit
        group by nation, o_year order by nation, o_year desc""",
    "q10": f"""select c_custkey, c_name, sum({_REVENUE}) as revenue, c_acctbal, n_name
        from customer, orders, lineitem, nation
        where c_custkey = o_custkey and l_orderkey = o_orderkey and l_returnflag = 'R' and c_nationkey = n_nationkey
        group by c_custkey, c_name, c_acctbal, n_name order by revenue desc, c_custkey limit 20""",
    "q11": """select ps_partkey, sum(ps_supplycost * ps_availqty) as value from partsupp, supplier, nation
        where ps_suppkey = s_suppkey and s_nationkey = n_nationkey group by ps_partkey
        having sum(ps_supplycost * ps_availqty) > (
            select sum(ps_supplycost * ps_availqty) * 0.05 from partsupp, supplier, nation
            where ps_suppkey = s_suppkey and s_nationkey = n_nationkey) order by value desc""",
    "q12": """select l_shipmode, sum(case when o_orderpriority = '1-URGENT' then 1 else 0 end) as high_line_count,
        count(*) as lines from orders, lineitem where o_orderkey = l_orderkey and l_shipmode in ('MAIL', 'SHIP')
        and l_commitdate < l_receiptdate group by l_shipmode order by l_shipmode""",
    "q13": """select c_count, count(*) as custdist from (
            select c_custkey, count(o_orderkey) as c_count from customer left outer join orders
            on c_custkey = o_custkey and o_comment not like '%special%requests%' group by c_custkey) as c_orders
        group by c_count order by custdist desc, c_count desc""",
    "q14": f"""select 100.00 * sum(case when p_type like 'PROMO%' then {_REVENUE} else 0 end) / sum({_REVENUE})
        as promo_revenue from lineitem, part where l_partkey = p_partkey and l_shipdate >= date '1994-09-01'""",
    "q15": f"""with revenue as (select l_suppkey as supplier_no, sum({_REVENUE}) as total_revenue from lineitem
            where l_shipdate >= date '1995-01-01' group by l_suppkey)
        select s_suppkey, s_name, total_revenue from supplier, revenue
        where s_suppkey = supplier_no and total_revenue = (select max(total_revenue) from revenue)""",
    "q16": """select p_brand, p_type, p_size, count(distinct ps_suppkey) as supplier_cnt from partsupp, part
        where p_partkey = ps_partkey and p_brand <> 'Brand#45' and p_type not like 'MEDIUM POLISHED%'
        and p_size in (3, 14, 9) and ps_suppkey not in (
            select s_suppkey from supplier where s_comment like '%Customer%Complaints%')
        group by p_brand, p_type, p_size""",
    "q17": """select sum(l_extendedprice) / 7.0 as avg_yearly from lineitem, part where p_partkey = l_partkey
        and p_brand = 'Brand#23' and l_quantity < (
            select 0.8 * avg(l_quantity) from lineitem where l_partkey = p_partkey)""",
    "q18": """select c_name, c_custkey, o_orderkey, o_orderdate, o_totalprice, sum(l_quantity) as total
        from customer, orders, lineitem where o_orderkey in (
            select l_orderkey from lineitem group by l_orderkey having sum(l_quantity) > 30)
        and c_custkey = o_custkey and o_orderkey = l_orderkey
        group by c_name, c_custkey, o_orderkey, o_orderdate, o_totalprice
        order by o_totalprice desc, o_orderdate, o_orderkey limit 100""",
    "q19": f"""select sum({_REVENUE}) as revenue from lineitem, part where
        (p_partkey = l_partkey and p_brand = 'Brand#12' and p_container = 'SM CASE' and l_quantity between 1 and 11)
        or (p_partkey = l_partkey and p_brand = 'Brand#23' and p_container = 'MED BOX' and l_quantity > 9)""",
    "q20": """select s_name, s_address from supplier, nation where s_suppkey in (
            select ps_suppkey from partsupp where ps_partkey in (select p_partkey from part where p_name like 'forest%')
            and ps_availqty > (select 0.5 * sum(l_quantity) from lineitem
                where l_partkey = ps_partkey and l_suppkey = ps_suppkey and l_shipdate >= date '1994-01-01'))
        and s_nationkey = n_nationkey and n_name in ('CANADA', 'BRAZIL', 'FRANCE') order by s_name""",
    "q21": """select s_name, count(*) as numwait from supplier, lineitem l1, orders, nation
        where s_suppkey = l1.l_suppkey and o_orderkey = l1.l_orderkey and o_orderstatus = 'F'
        and l1.l_receiptdate > l1.l_commitdate and exists (
            select * from lineitem l2 where l2.l_orderkey = l1.l_orderkey and l2.l_suppkey <> l1.l_suppkey)
        and not exists (select * from lineitem l3 where l3.l_orderkey = l1.l_orderkey
            and l3.l_suppkey <> l1.l_suppkey and l3.l_receiptdate > l3.l_commitdate)
        and s_nationkey = n_nationkey group by s_name order by numwait desc, s_name limit 100""",
    "q22": """select cntrycode, count(*) as numcust, sum(c_acctbal) as totacctbal from (
            select substring(c_phone, 1, 2) as cntrycode, c_acctbal from customer
            where substring(c_phone, 1, 2) in ('13', '31', '23', '29', '30') and c_acctbal > (
                select avg(c_acctbal) from customer where c_acctbal > 0.00)
            and not exists (select * from orders where o_custkey = c_custkey)) as custsale
        group by cntrycode order by cntrycode""",
}
