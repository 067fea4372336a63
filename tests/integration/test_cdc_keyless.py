"""Tables without a primary key on a real Postgres: at every epoch the same multiset of rows as the source."""

from __future__ import annotations

import contextlib
import random
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from cdc_reference import ReferenceReplica, Relation, parse_lsn
from cdc_world import World, open_world
from headwater.errors import UsageError
from headwater.testing.servers import PostgresServer
from postgres_versions import odd_collation

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("keyless") / "data") as found:
        yield found


class Bags(ReferenceReplica):
    """A witness that counts equal rows."""

    bags: dict[str, Counter[tuple[str | None, ...]]]

    def watch(self) -> None:
        super().watch()
        self.bags = {name: Counter() for name in self.tables}

    def _change(self, relation: Relation, tuples: dict[str, dict[str, Any]]) -> None:
        bag, old, new = self.bags[relation.name], tuples.get("O"), tuples.get("N")
        assert "K" not in tuples
        if old is not None:
            row = tuple(old.values())
            assert bag[row] > 0, "the witness itself is wrong"
            bag[row] -= 1
        if new is not None:
            assert old is not None or all(isinstance(v, str | None) for v in new.values())
            bag[tuple(v if isinstance(v, str | None) else old[k] for k, v in new.items())] += 1  # type: ignore[index]

    def _apply(self, message: bytes) -> None:
        if message[:1] == b"T":
            (count,) = struct.unpack_from("!I", message, 1)
            for oid in struct.unpack_from(f"!{count}I", message, 6):
                self.bags[self._relations[oid].name].clear()
        else:
            super()._apply(message)


# With all old values in the log a large row that changes is 20 kB of it: faster writers only measure the machine.
PAUSE_S = 0.1


def write(server: PostgresServer, seed: int, stopping: threading.Event, errors: list[BaseException]) -> None:
    rng = random.Random(seed)
    try:
        with server.connect() as c:
            while not stopping.wait(rng.random() * PAUSE_S):
                # Two writers may wait for each other: then this transaction is one that never was.
                with contextlib.suppress(psycopg.errors.DeadlockDetected):
                    c.execute("BEGIN")
                    for _ in range(rng.choice([1, 2, 6])):
                        step(c, rng)
                    c.execute("ROLLBACK" if rng.random() < 0.1 else "COMMIT")
                    continue
                c.execute("ROLLBACK")
    except BaseException as error:
        errors.append(error)


def step(c: psycopg.Connection[Any], rng: random.Random) -> None:
    a, b = rng.randrange(40), rng.choice([None, "x", "y", ""])
    one = "ctid = (SELECT ctid FROM bag WHERE a = %s LIMIT 1)"
    match rng.choices(range(6), [30, 25, 25, 8, 3, 0.05])[0]:
        case 0:
            c.execute("INSERT INTO bag VALUES (%s, %s, NULL)", (a, b))
        case 1:  # one of several equal rows
            c.execute(f"DELETE FROM bag WHERE {one}".encode(), (a,))
        case 2:
            c.execute(f"UPDATE bag SET b = %s WHERE {one}".encode(), (b, a))
        case 3:  # all of them; a large value that does not change
            c.execute("UPDATE bag SET b = %s WHERE a = %s", (b, a))
        case 4:
            c.execute("INSERT INTO bag SELECT %s, %s, repeat('z', 9000) FROM generate_series(1, 2)", (a, b))
        case 5:
            c.execute("TRUNCATE bag")
            c.execute("INSERT INTO bag SELECT i % 40, 'x', NULL FROM generate_series(1, 4000) i")


def as_bag(rows: list[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(None if v is None else str(v) for v in row) for row in rows)


@pytest.mark.slow
def test_at_every_epoch_a_table_without_a_key_is_the_same_multiset_as_the_source(world: World) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    world.sql("CREATE TABLE bag (a int, b text, big text); ALTER TABLE bag REPLICA IDENTITY FULL")
    world.sql("ALTER TABLE bag ALTER big SET STORAGE EXTERNAL")
    witness = Bags(world.server.connect, ["bag"], frozenset())
    witness.watch()
    world.sql("INSERT INTO bag SELECT i % 40, 'x', CASE WHEN i % 50 = 0 THEN repeat('q', 9000) END "
              "FROM generate_series(1, 4000) i; ANALYZE bag")  # fmt: skip
    stopping, errors = threading.Event(), list[BaseException]()
    writers = [threading.Thread(target=write, args=(world.server, seed + n, stopping, errors)) for n in range(2)]
    for thread in writers:
        thread.start()
    try:
        world.capture("public.bag", "bag", "backfill.num_rows_per_split='500', backfill.rate_limit='2000'")
        world.live("bag")
        planned = len(world.splits("bag"))
        stopping.wait(2)
        world.engine.execute("RESYNC bag")
        world.live("bag")
        stopping.wait(2)
    finally:
        stopping.set()
        for thread in writers:
            thread.join(30)
    assert not errors, errors
    world.settle()
    witness.collect()
    epochs = world.engine.execute("SELECT epoch, position FROM hw_catalog.hw_epochs ORDER BY epoch")[0]
    splits = world.splits("bag")
    assert epochs is not None
    assert max(planned, len(splits)) > 3  # a writer's TRUNCATE just before a plan leaves little to split
    live = max(s["handed_over_epoch"] for s in splits)
    rows = [r for r in epochs.rows if r["position"]]
    first = [r for r in rows if r["epoch"] < live][-3:]
    later = [r for r in rows if r["epoch"] >= live]
    for row in [*first, *later[:: max(1, len(later) // 6)], rows[-1]]:
        witness.advance(parse_lsn(row["position"]))
        found = world.engine.table("bag").df(epoch=row["epoch"]).toArrow().to_pylist()
        if found:  # before its first hand-over it is empty
            expected = witness.bags["bag"]
            assert as_bag([tuple(r.values()) for r in found]) == +expected, f"epoch {row['epoch']}, seed {seed}"
    world.assert_equal("bag", "bag")
    assert max(Counter(world.rows("bag")).values()) > 3, "there were no equal rows: the case is not the one meant"


def test_views_and_verify_over_a_table_without_a_key_count_equal_rows(world: World) -> None:
    world.sql("CREATE TABLE pile (a int, b text); ALTER TABLE pile REPLICA IDENTITY FULL")
    world.sql("INSERT INTO pile SELECT i % 3, NULL FROM generate_series(1, 30) i")
    world.capture("public.pile", "pile")
    world.live("pile")
    world.engine.execute("CREATE MATERIALIZED VIEW heap AS SELECT a, count(*) AS n FROM pile GROUP BY a")
    world.engine.execute("CREATE MATERIALIZED VIEW same AS SELECT a, b FROM pile WHERE a < 2")
    world.sql("DELETE FROM pile WHERE ctid IN (SELECT ctid FROM pile WHERE a = 1 LIMIT 4)")
    world.sql("UPDATE pile SET a = 2 WHERE ctid = (SELECT ctid FROM pile WHERE a = 0 LIMIT 1)")
    world.assert_equal("pile", "pile")
    assert world.rows("heap") == [(0, 9), (1, 6), (2, 11)]
    assert world.rows("same") == sorted([(0, None)] * 9 + [(1, None)] * 6)
    result = world.engine.execute("VERIFY pile")[0]
    assert result is not None
    assert [(r["rows"], r["source_rows"], r["equal"]) for r in result.rows] == [(26, 26, True)]
    world.sql("TRUNCATE pile")
    world.assert_equal("pile", "pile")
    assert world.rows("heap") == []


def test_two_repairs_at_once_put_missing_rows_in_once(world: World) -> None:
    world.sql("CREATE TABLE worn (a int, b text); ALTER TABLE worn REPLICA IDENTITY FULL")
    world.sql("INSERT INTO worn SELECT i % 3, 'x' FROM generate_series(1, 30) i")
    world.capture("public.worn", "worn")
    world.live("worn")
    world.halve("worn")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: world.engine.execute("VERIFY worn REPAIR")[0], range(2)))
    assert sorted(bool(r["repaired"]) for result in found if result is not None for r in result.rows) == [False, True]
    world.assert_equal("worn", "worn")


def test_a_table_without_key_or_identity_is_refused_with_the_statement_to_type(world: World) -> None:
    world.sql('CREATE TABLE "No Key" (a int)')
    with pytest.raises(UsageError) as caught:
        world.capture('public."No Key"', "nokey")
    assert caught.value.code == "SOURCE_NO_REPLICA_IDENTITY"
    assert 'ALTER TABLE "public"."No Key" REPLICA IDENTITY FULL' in caught.value.hint
    world.sql(caught.value.hint.partition(": ")[2])
    world.capture('public."No Key"', "nokey")
    world.live("nokey")
    world.sql(
        'INSERT INTO "No Key" VALUES (1), (1); DELETE FROM "No Key" WHERE ctid = (SELECT max(ctid) FROM "No Key")'
    )
    world.assert_equal('"No Key"', "nokey")


def test_columns_of_the_source_may_begin_with_an_underscore(world: World) -> None:
    world.sql("CREATE TABLE _docs (_id text PRIMARY KEY, _order int, _xid int); INSERT INTO _docs VALUES ('a', 1, 2)")
    world.sql("CREATE TABLE _bag (_sign int, _id int); ALTER TABLE _bag REPLICA IDENTITY FULL")
    world.sql("CREATE TABLE _ours (id int PRIMARY KEY, _op int)")
    world.capture("public._docs", "_docs")
    world.capture("public._bag", "_bag")
    with pytest.raises(UsageError, match="RESERVED_NAME"):
        world.capture("public._ours", "_ours")
    world.live("_docs", "_bag")
    world.sql("INSERT INTO _docs VALUES ('b', 3, 4); UPDATE _docs SET _id = 'c', _order = 5 WHERE _id = 'a'")
    world.sql("INSERT INTO _bag VALUES (1, 1), (1, 1), (-1, 2); DELETE FROM _bag WHERE _sign = -1")
    world.assert_equal("_docs", "_docs")
    world.assert_equal("_bag", "_bag")


def test_a_unique_index_that_names_rows_is_a_key(world: World) -> None:
    world.sql("CREATE TABLE uni (a int NOT NULL, b text); CREATE UNIQUE INDEX uni_a ON uni (a)")
    world.sql("ALTER TABLE uni REPLICA IDENTITY USING INDEX uni_a; INSERT INTO uni VALUES (1, 'x'), (2, 'y')")
    world.capture("public.uni", "uni")
    world.live("uni")
    world.sql("UPDATE uni SET a = 3 WHERE a = 1; DELETE FROM uni WHERE a = 2; INSERT INTO uni VALUES (4, NULL)")
    world.assert_equal("uni", "uni")
    assert [r["left"] for r in world.splits("uni")] == [None]


def test_keys_whose_order_is_not_ours_are_copied_whole(world: World) -> None:
    """Numbers that we hold as text, also under a domain, with the ones that are no numbers; text in a natural order."""
    world.sql("CREATE DOMAIN amount AS numeric")
    collation = odd_collation(world.db)
    world.sql(f'CREATE TABLE odd (n amount, t text COLLATE "{collation}", v int, PRIMARY KEY (n, t))')
    world.sql("INSERT INTO odd SELECT i * 10.5, chr(97 + i % 26), i FROM generate_series(1, 500) i")
    world.sql("INSERT INTO odd VALUES ('NaN', 'a', 0), ('Infinity', 'Z', 0), (-1e40, 'ä', 0); ANALYZE odd")
    world.capture("public.odd", "odd", "backfill.num_rows_per_split='50', backfill.rate_limit='500'")
    world.until(lambda: bool(world.splits("odd")))
    world.sql("UPDATE odd SET n = n + 1 WHERE v % 7 = 0; DELETE FROM odd WHERE n = 'NaN'")
    world.sql("INSERT INTO odd VALUES ('NaN', 'ß', 1)")
    world.live("odd")
    assert len({s["handed_over_epoch"] for s in world.splits("odd")}) == 1 < len(world.splits("odd"))
    assert all("(" in s["left"] for s in world.splits("odd") if s["left"])
    world.settle()
    expected = world.source_rows("(SELECT n::text, t, v FROM odd) x")
    assert world.rows("odd") == expected


def test_only_changes_of_a_table_without_a_key_pass_over_rows_of_before(world: World) -> None:
    world.sql("CREATE TABLE tail (a int); ALTER TABLE tail REPLICA IDENTITY FULL; INSERT INTO tail VALUES (1), (2)")
    world.capture("public.tail", "tail", "snapshot='false'")
    world.sql("DELETE FROM tail WHERE a = 1; INSERT INTO tail VALUES (3), (3); UPDATE tail SET a = 4 WHERE a = 2")
    world.settle()
    assert world.rows("tail") == [(3,), (3,), (4,)]
    assert world.state("tail") == "live"


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "VACUUM FULL moved",
        pytest.param("CLUSTER moved USING moved_v", marks=pytest.mark.slow),
        # After it, an older snapshot sees an empty table.
        pytest.param("ALTER TABLE moved ALTER v TYPE int USING v + 0", marks=pytest.mark.slow),
    ],
)
def test_rows_that_move_between_the_reads_of_pages_are_neither_lost_nor_doubled(world: World, statement: str) -> None:
    collation = odd_collation(world.db)
    world.sql("DROP TABLE IF EXISTS moved")
    world.sql(f'CREATE TABLE moved (k text COLLATE "{collation}" PRIMARY KEY, v int, pad text)')
    world.sql("CREATE INDEX moved_v ON moved (v)")
    world.sql("INSERT INTO moved SELECT 'k' || i, 1000 - i, repeat('p', 200) FROM generate_series(1, 1000) i")
    world.sql("DELETE FROM moved WHERE v % 2 = 0; ANALYZE moved")
    name = statement.split()[0].lower()
    world.capture("public.moved", name, "backfill.num_rows_per_split='50', backfill.rate_limit='150', "
                  "backfill.parallelism='1'")  # fmt: skip
    world.until(lambda: sum(s["state"] == "STAGED" for s in world.splits(name)) > 1)
    world.sql(statement)
    world.engine.execute(f"ALTER TABLE {name} SET BACKFILL_RATE_LIMIT = DEFAULT")
    world.live(name)
    world.assert_equal("moved", name)
    assert "SOURCE_TABLE_REWRITTEN" in [e["code"] for e in world.engine.status()["errors"] if e["name"] == name]
    world.engine.execute(f"DROP TABLE {name}")
