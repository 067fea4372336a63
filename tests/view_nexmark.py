"""Nexmark's tables in small and its queries q0–q22 as views over tables, for the tests.

Windows over event time are plain arithmetic on the timestamp. q6 (average of the last ten per seller) and q11
(sessions) are written with window functions, q12 (processing time) by event time, q13 (side input) as a join with a
table, q14's own function as Spark functions.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable
from typing import Any, Final

from headwater.model.schema import Column, Schema

Row = dict[str, Any]


def _schema(key: str, columns: str) -> Schema:
    pairs = [part.split(":") for part in columns.split()]
    return Schema(tuple(Column(n, t, nullable=n != key) for n, t in pairs), (key,))


SCHEMAS: Final[dict[str, Schema]] = {
    "person": _schema("id", "id:BIGINT name:STRING email:STRING city:STRING state:STRING date_time:TIMESTAMP"),
    "auction": _schema(
        "id",
        "id:BIGINT item:STRING initial_bid:BIGINT reserve:BIGINT date_time:TIMESTAMP expires:TIMESTAMP seller:BIGINT "
        "category:BIGINT",
    ),
    "bid": _schema(
        "bid_id",
        "bid_id:BIGINT auction:BIGINT bidder:BIGINT price:BIGINT channel:STRING url:STRING date_time:TIMESTAMP",
    ),
    "side_input": _schema("key", "key:BIGINT value:STRING"),
}
ROWS: Final = {"person": 8, "auction": 10, "bid": 30, "side_input": 4}


def _time(rng: random.Random) -> dt.datetime:
    return dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(milliseconds=rng.randint(0, 40_000))


def _person(rng: random.Random) -> Row:
    key = rng.randint(1, 9)
    return {
        "id": key, "name": f"p{key}", "email": f"p{key}@x", "city": rng.choice(["Kent", "Bend"]),
        "state": rng.choice(["OR", "ID", "CA", "WA"]), "date_time": _time(rng),
    }  # fmt: skip


def _auction(rng: random.Random) -> Row:
    begin = _time(rng)
    return {
        "id": rng.randint(1, 12), "item": rng.choice("abc"), "initial_bid": rng.randint(1, 50),
        "reserve": rng.randint(50, 90), "date_time": begin, "expires": begin + dt.timedelta(seconds=rng.randint(1, 30)),
        "seller": rng.randint(1, 9), "category": rng.randint(10, 12),
    }  # fmt: skip


def _bid(rng: random.Random) -> Row:
    return {
        "bid_id": rng.randint(1, 45), "auction": rng.randint(1, 12), "bidder": rng.randint(1, 9),
        "price": rng.randint(1, 1000), "channel": rng.choice(["apple", "google", "baidu", "other"]),
        "url": rng.choice(["http://a/b/c?channel_id=7", "http://x/y/z", None]), "date_time": _time(rng),
    }  # fmt: skip


def _side_input(rng: random.Random) -> Row:
    return {"key": rng.randint(0, 4), "value": rng.choice("vw")}


MAKE: Final[dict[str, Callable[[random.Random], Row]]] = {
    "person": _person, "auction": _auction, "bid": _bid, "side_input": _side_input
}  # fmt: skip


def _tumble(column: str) -> str:
    return f"timestamp_seconds(unix_seconds({column}) - unix_seconds({column}) % 10)"


_DAY = "date_format(date_time, 'yyyy-MM-dd')"
_RANKS = """count(*) as total_bids, count(*) filter (where price < 100) as rank1_bids,
    count(*) filter (where price >= 100 and price < 500) as rank2_bids"""
QUERIES: Final[dict[str, str]] = {
    "q0": "select auction, bidder, price, date_time from bid",
    "q1": "select auction, bidder, cast(0.908 as decimal(4,3)) * price as price, date_time from bid",
    "q2": "select auction, price from bid where auction % 3 = 0",
    "q3": """select p.name, p.city, p.state, a.id from auction a join person p on a.seller = p.id
        where a.category = 10 and p.state in ('OR', 'ID', 'CA')""",
    "q4": """select category, avg(final) as average from (
            select max(b.price) as final, a.category from auction a join bid b on a.id = b.auction
            where b.date_time between a.date_time and a.expires group by a.id, a.category) q group by category""",
    "q5": """with counts as (select auction, starttime, count(*) as num from (
                select auction, explode(sequence(unix_seconds(date_time) - unix_seconds(date_time) % 2 - 8,
                    unix_seconds(date_time) - unix_seconds(date_time) % 2, cast(2 as bigint))) as starttime from bid) e
            group by auction, starttime)
        select c.auction, c.num, c.starttime from counts c
        join (select max(num) as maxn, starttime from counts group by starttime) m
        on c.starttime = m.starttime and c.num >= m.maxn""",
    "q6": """select seller, avg(final) over (partition by seller order by date_time, id
            rows between 10 preceding and current row) as average from (
            select a.seller, a.id, b.price as final, b.date_time,
                row_number() over (partition by a.id order by b.price desc, b.date_time, b.bid_id) as r
            from auction a join bid b on a.id = b.auction
            where b.date_time between a.date_time and a.expires) q where r = 1""",
    "q7": f"""select b.auction, b.price, b.bidder, b.date_time from bid b join (
            select max(price) as maxprice, {_tumble("date_time")} as w from bid group by {_tumble("date_time")}) m
        on b.price = m.maxprice and {_tumble("b.date_time")} = m.w""",
    "q8": f"""select p.id, p.name, p.w from (
            select id, name, {_tumble("date_time")} as w from person group by id, name, {_tumble("date_time")}) p
        join (select seller, {_tumble("date_time")} as w from auction group by seller, {_tumble("date_time")}) a
        on p.id = a.seller and p.w = a.w""",
    "q9": """select id, item, seller, auction, bidder, price from (
            select a.id, a.item, a.seller, b.auction, b.bidder, b.price,
                row_number() over (partition by a.id order by b.price desc, b.date_time, b.bid_id) as r
            from auction a join bid b on a.id = b.auction
            where b.date_time between a.date_time and a.expires) q where r <= 1""",
    "q10": f"select auction, bidder, price, date_time, {_DAY} as day, hour(date_time) as h from bid",
    "q11": """select bidder, session, count(*) as bid_count, min(date_time) as starttime from (
            select bidder, date_time, sum(fresh) over (partition by bidder order by date_time, bid_id) as session from (
                select bidder, bid_id, date_time, case when unix_seconds(date_time) - unix_seconds(
                    lag(date_time) over (partition by bidder order by date_time, bid_id)) > 10
                    then 1 else 0 end as fresh from bid) g) s group by bidder, session""",
    "q12": f"select bidder, count(*) as bid_count, {_tumble('date_time')} as w from bid "
    f"group by bidder, {_tumble('date_time')}",
    "q13": "select b.auction, b.bidder, b.price, s.value from bid b join side_input s on b.auction % 5 = s.key",
    "q14": """select auction, bidder, price * 9 as price, case when hour(date_time) between 8 and 18 then 'dayTime'
            else 'nightTime' end as kind, length(url) - length(replace(url, 'c', '')) as c_counts
        from bid where price * 9 > 500""",
    "q15": f"""select {_DAY} as day, {_RANKS}, count(distinct bidder) as total_bidders,
            count(distinct auction) filter (where price < 100) as rank1_auctions from bid group by {_DAY}""",
    "q16": f"""select channel, {_DAY} as day, max(date_format(date_time, 'HH:mm')) as minute, {_RANKS},
            count(distinct bidder) as bidders from bid group by channel, {_DAY}""",
    "q17": f"""select auction, {_DAY} as day, {_RANKS}, min(price) as min_price, max(price) as max_price,
            avg(price) as avg_price, sum(price) as sum_price from bid group by auction, {_DAY}""",
    "q18": """select auction, bidder, price, date_time from (
            select *, row_number() over (partition by bidder, auction order by date_time desc, bid_id) as r from bid) q
        where r <= 1""",
    "q19": """select auction, bidder, price, r from (
            select *, row_number() over (partition by auction order by price desc, bid_id) as r from bid) q
        where r <= 10""",
    "q20": """select b.auction, b.bidder, b.price, a.item, a.category from bid b join auction a on b.auction = a.id
        where a.category = 10""",
    "q21": """select auction, bidder, price, case when lower(channel) = 'apple' then '0' when lower(channel) = 'google'
            then '1' else regexp_extract(url, '(&|[?])channel_id=([^&]*)', 2) end as channel_id from bid
        where url is not null or lower(channel) in ('apple', 'google')""",
    "q22": """select auction, bidder, split(url, '/')[3] as dir1, try_element_at(split(url, '/'), 5) as dir2 from bid
        where url is not null""",
}
