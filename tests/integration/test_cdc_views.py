"""Views over a real Postgres: made while a table is still copied, under TRUNCATE, with functions; black-box.

After each story every view equals its query at committed epochs, read with VERSION AS OF.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pytest

from engine_process import EngineProcess, SqlError, headwater, wait_until
from headwater.testing.servers import PostgresServer
from postgres_versions import USUAL

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.slow]
PATIENCE_S: Final = 240.0
SOURCE: Final = (
    "CREATE SOURCE shop WITH (connector='postgres-cdc', hostname='{server.host}', port='{server.port}', "
    "username='{server.user}', password='${{HW_TEST_PASSWORD}}', database.name='{server.database}', "
    "slot.name='headwater', heartbeat.interval.ms='1000')"
)
# One of each strategy, and a view on a view.
VIEWS: Final = {
    "rowwise": "SELECT id, c, amount * 2 AS d FROM {o} WHERE amount % 5 <> 0",
    "joined": "SELECT x.id, x.amount, y.country FROM {o} x LEFT JOIN {c} y ON x.c = y.c",
    "sums": "SELECT c, count(*) AS n, sum(amount) AS s, max(amount) AS m FROM {o} GROUP BY c",
    "countries": "SELECT country, sum(amount) AS s, count(*) AS n FROM {o} x JOIN {c} y ON x.c = y.c GROUP BY country",
    "total": "SELECT count(*) AS n, sum(amount) AS s FROM {o}",
    "level2": "SELECT n, count(*) AS groups, sum(s) AS s FROM sums GROUP BY n",
    "level3": "SELECT sum(groups) AS g, max(n) AS n FROM level2",
}


class ViewWorld:
    """A Postgres, an engine in a process of its own, and what both say."""

    def __init__(self, server: PostgresServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.db = server.connect()
        self.engine = EngineProcess(
            folder / "data", "--set", "barrier_interval_ms=300", "--set", "vnode_count=16", "--allow-python"
        )
        self.engine.start()
        self.sql(SOURCE.format(server=server))

    def pg(self, text: str) -> None:
        self.db.execute(text.encode())

    def sql(self, text: str) -> list[dict[str, Any]]:
        return self.engine.sql(text)

    def state(self, name: str) -> str:
        found = self.sql(f"SELECT state FROM hw_catalog.hw_jobs WHERE name = '{name}'")
        return str(found[0]["state"]) if found else "gone"

    def errors(self, name: str) -> list[dict[str, Any]]:
        return self.sql(f"SELECT code, message, hint FROM hw_catalog.hw_errors WHERE name = '{name}'")

    def live(self, *names: str) -> None:
        for name in names:
            wait_until(lambda n=name: self.state(n) == "live", PATIENCE_S, f"{name} live")

    def settle(self) -> None:
        """What the source has by now is committed here."""
        row = self.db.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        assert row is not None

        def there() -> bool:
            found = self.sql("SELECT position FROM hw_catalog.hw_sources")[0]["position"]
            return found is not None and lsn(found) >= lsn(row[0])

        wait_until(there, PATIENCE_S, "the engine has what the source has")

    def tables(self, prefix: str, orders: int, options: str = "") -> dict[str, str]:
        """Orders and customers in Postgres and here; the queries of the views over them."""
        o, c = f"{prefix}_o", f"{prefix}_c"
        self.pg(f"CREATE TABLE {o} (id int PRIMARY KEY, c int, amount bigint, note text)")
        self.pg(f"CREATE TABLE {c} (c int PRIMARY KEY, country text)")
        self.pg(f"INSERT INTO {o} SELECT i, i % 20, i * 3, 'n' || i FROM generate_series(1, {orders}) i")
        self.pg(f"INSERT INTO {c} SELECT i, 'l' || i % 4 FROM generate_series(1, 17) i")
        self.sql(f"CREATE TABLE {c} (*) FROM shop TABLE 'public.{c}'")
        self.sql(f"CREATE TABLE {o} (*) FROM shop TABLE 'public.{o}'" + (f" WITH ({options})" if options else ""))
        names = {name: f"{prefix}_{name}" for name in VIEWS}
        found = {}
        for name, query in VIEWS.items():
            text = query.format(o=o, c=c)
            found[names[name]] = re.sub(r"\b(sums|level2)\b", lambda m: names[m[1]], text)
        return found

    def create(self, queries: dict[str, str]) -> None:
        for name, query in queries.items():
            self.sql(f"CREATE MATERIALIZED VIEW {name} AS {query}")

    def check(self, queries: dict[str, str], since: int, most: int = 6) -> int:
        """At some committed epochs since then each view equals its query at that epoch; how many epochs there were."""
        epochs = sorted({r["epoch"] for r in self.sql("SELECT epoch FROM hw_catalog.hw_epochs") if r["epoch"] >= since})
        chosen = sorted({epochs[0], epochs[-1], *random.Random(1).sample(epochs, min(most, len(epochs)))})
        for epoch in chosen:
            for name, query in queries.items():
                fresh = re.sub(r"\b(FROM|JOIN) (\w+)", rf"\1 \2 VERSION AS OF {epoch}", query)
                stored = self.sql(f"SELECT * FROM {name} VERSION AS OF {epoch}")
                assert bag(stored) == bag(self.sql(fresh)), f"{name} at epoch {epoch}"
        return len(chosen)


def bag(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(repr(list(row.values())) for row in rows)


def lsn(text: str) -> int:
    high, low = text.split("/")
    return int(high, 16) << 32 | int(low, 16)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewWorld]:
    if not PostgresServer.available(USUAL):
        pytest.skip(f"no binaries of Postgres {USUAL} on this machine")
    with pytest.MonkeyPatch.context() as patch, PostgresServer(USUAL) as server:
        patch.setenv("HW_TEST_PASSWORD", server.password)
        found = ViewWorld(server, tmp_path_factory.mktemp("views"))
        try:
            yield found
        finally:
            found.engine.stop()


def written(world: ViewWorld, table: str, rows: int, over: Callable[[], bool], rng: random.Random) -> None:
    """Inserts, updates, deletes and changes of key, until it is over."""
    with world.server.connect() as db:
        number = rows
        while not over():
            number += 1
            some = rng.randint(1, rows)
            for text in rng.choice(
                [
                    [f"INSERT INTO {table} VALUES ({number}, {rng.randrange(22)}, {some}, NULL)"],
                    [f"UPDATE {table} SET amount = amount + 1, c = {rng.randrange(22)} WHERE id % 97 = {some % 97}"],
                    [f"DELETE FROM {table} WHERE id = {some}"],
                    [f"UPDATE {table} SET id = {number + 10**6} WHERE id = {some}"],
                ]
            ):
                db.execute(text.encode())
            time.sleep(0.03)


def test_views_that_are_made_while_the_table_is_still_copied_are_right_at_every_epoch(world: ViewWorld) -> None:
    rows = 4000
    queries = world.tables("copied", rows, "backfill.num_rows_per_split='50', backfill.rate_limit='15'")
    over = threading.Event()
    writer = threading.Thread(target=written, args=(world, "copied_o", rows, over.is_set, random.Random(7)))
    writer.start()
    try:
        wait_until(lambda: world.sql("SELECT count(*) AS n FROM copied_o")[0]["n"] > 0, PATIENCE_S, "rows arrive")
        world.create(queries)
        world.live(*queries)
        assert world.state("copied_o") == "creating", "the copy was over before the views were live: this tests nothing"
        since = world.engine.epoch()
        world.sql("ALTER TABLE copied_o SET BACKFILL_RATE_LIMIT = 1000")
        world.live("copied_o")
    finally:
        over.set()
        writer.join(timeout=60)
    world.settle()
    assert world.check(queries, since, most=4) > 3
    as_in_postgres(world, queries)


def as_in_postgres(world: ViewWorld, queries: dict[str, str]) -> None:
    for name, query in queries.items():
        if "level" not in name:  # Postgres has no such view
            found = world.db.execute(query.encode()).fetchall()
            assert bag(world.sql(f"SELECT * FROM {name}")) == Counter(repr(plain(row)) for row in found), name


def plain(row: tuple[Any, ...]) -> list[Any]:
    """Postgres sums integers to numerics."""
    return [int(value) if isinstance(value, Decimal) else value for value in row]


STORIES: Final = [
    "TRUNCATE emptied_o",
    "INSERT INTO emptied_o SELECT i, i % 20, i, 'again' FROM generate_series(100, 180) i",
    "BEGIN; TRUNCATE emptied_o; INSERT INTO emptied_o SELECT i, i % 3, i, '' FROM generate_series(1, 40) i; COMMIT",
    "TRUNCATE emptied_c",
    "BEGIN; INSERT INTO emptied_c VALUES (1, 'only'); INSERT INTO emptied_o VALUES (900, 1, 1, ''); COMMIT",
    "BEGIN; DELETE FROM emptied_o WHERE id < 20; TRUNCATE emptied_c, emptied_o; COMMIT",
    "BEGIN; INSERT INTO emptied_o VALUES (1, 1, 1, ''); TRUNCATE emptied_o; "
    "INSERT INTO emptied_o VALUES (1, 1, 2, ''); UPDATE emptied_o SET id = 2; COMMIT",
]


def test_a_truncate_empties_every_kind_of_view_in_its_own_epoch(world: ViewWorld) -> None:
    queries = world.tables("emptied", 300)
    world.live("emptied_o", "emptied_c")
    world.create(queries)
    world.live(*queries)
    since = world.engine.epoch()
    for story in STORIES:
        world.pg(story)
        world.settle()
        as_in_postgres(world, queries)
    assert world.check(queries, since, most=4) > 3
    assert all(world.state(name) == "live" for name in queries)


def test_a_column_that_a_view_uses_goes_with_a_notice_and_the_view_stays_equal_to_its_query(world: ViewWorld) -> None:
    world.pg("CREATE TABLE used (id int PRIMARY KEY, a int, b text); INSERT INTO used VALUES (1, 1, 'x'), (2, 2, 'y')")
    world.sql("CREATE TABLE used (*) FROM shop TABLE 'public.used'")
    world.live("used")
    queries = {
        "used_row": "SELECT id, b FROM used WHERE a > 0",
        "used_group": "SELECT b, count(*) AS n FROM used GROUP BY b",
        "used_on": "SELECT max(b) AS b, sum(n) AS n FROM used_group",
    }
    world.create(queries)
    world.live(*queries)
    since = world.engine.epoch()
    world.pg("INSERT INTO used VALUES (3, 3, 'z'); ALTER TABLE used DROP b; INSERT INTO used VALUES (4, 4)")
    gone = [{"b": None, "n": 4}]
    wait_until(lambda: world.sql("SELECT * FROM used_group") == gone, PATIENCE_S, "the column has no values")
    world.pg("UPDATE used SET a = -1 WHERE id = 1; DELETE FROM used WHERE id = 2")
    world.settle()
    world.live("used")
    assert world.check(queries, since, most=3) > 2
    assert bag(world.sql("SELECT * FROM used_row")) == bag([{"id": 3, "b": None}, {"id": 4, "b": None}])
    assert any(e["code"] == "SOURCE_SCHEMA_CHANGED" and "column b" in e["message"] for e in world.errors("used"))


FUNCTION: Final = """
def tier(amount):
    if amount < 0:
        raise ValueError(f"negative: {amount}")
    return "large" if amount >= 30 else "small"
"""


def test_a_function_that_raises_for_one_row_stops_its_view_until_the_row_is_gone(world: ViewWorld) -> None:
    """All through the command line, as docs/views.md says."""

    def cli(statement: str) -> str:
        done = headwater("sql", "-c", statement, "--format", "json", data_dir=world.engine.data_dir)
        assert done.returncode == 0, done.stderr
        return done.stdout

    file = world.folder / "functions.py"
    file.write_text(FUNCTION)
    world.pg("CREATE TABLE paid (id int PRIMARY KEY, amount numeric(10,2))")
    world.pg("INSERT INTO paid SELECT i, i * 10 FROM generate_series(1, 5) i")
    function = f"FUNCTION tier(amount DECIMAL(10,2)) RETURNS STRING LANGUAGE PYTHON AS '{file}:tier'"
    cli(f"CREATE {function}; CREATE TABLE paid (*) FROM shop TABLE 'public.paid'")
    queries = {
        "tiers": "SELECT id, tier(amount) AS tier FROM paid",
        "tier_counts": "SELECT tier(amount) AS tier, count(*) AS n FROM paid GROUP BY tier(amount)",
        "tier_totals": "SELECT tier, count(*) AS n FROM tiers GROUP BY tier",
        "others": "SELECT id, amount + 1 AS more FROM paid",
    }
    world.live("paid")
    for name, query in queries.items():
        cli(f"CREATE MATERIALIZED VIEW {name} AS {query}")
    world.live(*queries)
    since = world.engine.epoch()
    world.pg("INSERT INTO paid VALUES (6, 25)")
    world.settle()
    world.check(queries, since, most=2)
    before = world.engine.epoch()
    world.pg("INSERT INTO paid VALUES (7, -77.25), (8, 1)")
    world.settle()
    stopped = [name for name in queries if name != "others"]
    for name in stopped:
        wait_until(lambda n=name: world.state(n) == "failed", PATIENCE_S, f"{name} stops")
    assert world.state("others") == "live"
    assert len(world.sql("SELECT * FROM others")) == 8
    for name in stopped:
        with pytest.raises(SqlError, match="VIEW_FAILED"):
            world.sql(f"SELECT * FROM {name}")
    assert len(world.sql(f"SELECT * FROM tiers VERSION AS OF {before}")) == 6, "it keeps its last rows"
    wait_until(lambda: "paid.id = 7" in repr(world.errors("tiers")), PATIENCE_S, "the key is named")
    said = repr([world.errors(name) for name in queries])
    assert "77.25" not in said and "negative" not in said, "never a value of the row"
    at = world.engine.epoch()
    world.pg("UPDATE paid SET amount = 31 WHERE id = 8; DELETE FROM paid WHERE id = 7")
    world.live(*queries)  # by itself: nobody said RECOVER
    healed = world.engine.epoch()
    world.pg("UPDATE paid SET amount = 1 WHERE id = 5")
    world.settle()
    assert world.check(queries, healed, most=2) >= 1
    with pytest.raises(SqlError, match="EPOCH_NOT_AVAILABLE"):
        world.sql(f"SELECT * FROM tiers VERSION AS OF {at}")
    assert json.loads(cli("SELECT tier, n FROM tier_totals ORDER BY tier")) == [
        {"tier": "large", "n": 3},
        {"tier": "small", "n": 4},
    ]
    refused = headwater("sql", "-c", "DROP FUNCTION tier", data_dir=world.engine.data_dir)
    assert refused.returncode == 2 and "is used by" in refused.stderr
