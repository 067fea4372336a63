"""Cases in which peers lost or invented rows, on a real Postgres: each is named after what must be true."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdc_world import World, open_world
from headwater.backfill.cdc.state import SplitState
from headwater.connectors.files.sink import read_table
from headwater.errors import HeadwaterError
from headwater.runtime.backfill import TableBackfill
from headwater.testing.servers import PostgresServer
from postgres_versions import odd_collation

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("peers") / "data") as found:
        yield found


def test_empty_and_one_row_tables_and_quoted_names_are_captured(world: World) -> None:
    world.sql("CREATE TABLE empty (id int PRIMARY KEY, v text)")
    world.sql("CREATE TABLE one (id int PRIMARY KEY, v text); INSERT INTO one VALUES (1, 'x')")
    world.sql('CREATE SCHEMA "Odd"; CREATE TABLE "Odd"."My ""Table" ("Id" int PRIMARY KEY, "select" text)')
    world.sql("""INSERT INTO "Odd"."My ""Table" VALUES (1, 'a'), (2, NULL)""")
    world.capture("public.empty", "empty")
    world.capture("public.one", "one")
    world.capture('"Odd"."My ""Table"', "odd")
    world.live("empty", "one", "odd")
    for table, name in (("empty", "empty"), ("one", "one"), ('"Odd"."My ""Table"', "odd")):
        world.assert_equal(table, name)
    world.sql("INSERT INTO empty VALUES (7, 'first'); DELETE FROM one")
    world.sql("""UPDATE "Odd"."My ""Table" SET "select" = 'b', "Id" = 3 WHERE "Id" = 2""")
    for table, name in (("empty", "empty"), ("one", "one"), ('"Odd"."My ""Table"', "odd")):
        world.assert_equal(table, name)


PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))
ODD_NAMES = (
    PRINTABLE[:63],  # as long as a name can be
    PRINTABLE[63:],
    "é" * 31 + "x",
    "${x}",
    "${env:HOME}",
    "100%",
    "%s %(a)s %%",
    "{} {0} {a}",
    "a.b",
    "back`quote``s",
    'quote"s',
    "it's",
    "back\\slash\\",
    "new\nline",
    "tab\t",
    " ",
    "select",
    "--",
    "/* x",
    "日本語",
    "😀",
)


def quoted(*names: str) -> str:
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def text(value: str) -> str:
    """A literal of Postgres'."""
    return "'" + value.replace("'", "''") + "'"


def given(value: str) -> str:
    """A literal of ours, in which a backslash escapes."""
    return text(value.replace("\\", "\\\\"))


ODD_KEYS = ('ke"y %s.`${k}`', "k\n'2")
ODD_SCHEMA = 'sch%s "é" ${x}.`'
ODD_TABLES = {
    "odd_bag": quoted(ODD_SCHEMA, "bag " + PRINTABLE[:40]),
    "odd_keyed": quoted(ODD_SCHEMA, PRINTABLE[20:83]),
}


def make_odd_tables(world: World) -> None:
    columns = ", ".join([f"{quoted(k)} int" for k in ODD_KEYS] + [f"{quoted(c)} text" for c in ODD_NAMES])
    values = ", ".join(text(f"{c} v") for c in ODD_NAMES)
    world.sql(f"CREATE SCHEMA {quoted(ODD_SCHEMA)}")
    for ours, table in ODD_TABLES.items():
        world.sql(f"CREATE TABLE {table} ({columns})")
        if ours == "odd_keyed":
            world.sql(f"ALTER TABLE {table} ADD PRIMARY KEY ({', '.join(map(quoted, ODD_KEYS))})")
        else:
            world.sql(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
        world.sql(f"INSERT INTO {table} SELECT i, -i, {values} FROM generate_series(1, 40) i")


def odd_tables_are_the_same(world: World) -> None:
    world.live(*ODD_TABLES)
    for ours, table in ODD_TABLES.items():
        world.until(lambda o=ours, t=table: world.rows(o) == world.source_rows(t), 60)  # type: ignore[misc]


def test_names_with_any_character_are_captured_followed_resynced_verified_and_reshaped(world: World) -> None:
    publication = "p \"q\" 'r' %s {} ${x} \\ ,é"
    published = f"pg_publication WHERE pubname = {text(publication)}"
    server, key = world.server, quoted(ODD_KEYS[0])
    make_odd_tables(world)
    world.engine.execute(
        f"CREATE SOURCE odd_source WITH (connector='postgres-cdc', hostname='{server.host}', port='{server.port}', "
        f"username='{server.user}', password='${{HW_TEST_PASSWORD}}', database.name='{server.database}', "
        f"slot.name='odd', publication.name={given(publication)}, heartbeat.interval.ms='1000')"
    )
    assert world.source_rows(published)
    for ours, table in ODD_TABLES.items():
        world.engine.execute(f"CREATE TABLE {ours} (*) FROM odd_source TABLE {given(table)}")
    odd_tables_are_the_same(world)
    nothing = ", ".join(f"{quoted(c)} = NULL" for c in ODD_NAMES[::2])
    for table in ODD_TABLES.values():
        world.sql(f"UPDATE {table} SET {nothing} WHERE {key} < 5; UPDATE {table} SET {key} = 100 WHERE {key} = 7")
        world.sql(f"DELETE FROM {table} WHERE {key} > 38 AND {key} < 50")
    odd_tables_are_the_same(world)
    added = "new \t" + PRINTABLE[:30] + "é"
    for table in ODD_TABLES.values():
        world.sql(f"ALTER TABLE {table} ADD {quoted(added)} text DEFAULT 'd'")
        world.sql(f"INSERT INTO {table} ({key}, {quoted(ODD_KEYS[1])}) VALUES (60, 0)")
    world.until(lambda: all(added in world.engine.table(ours).df().columns for ours in ODD_TABLES), 60)
    odd_tables_are_the_same(world)
    for ours in ODD_TABLES:
        world.engine.execute(f"RESYNC {ours}")
    odd_tables_are_the_same(world)
    assert all(r["equal"] for r in world.engine.execute("VERIFY odd_keyed")[0].rows)
    world.engine.execute("DROP SOURCE odd_source CASCADE")
    assert not world.source_rows(published)


def test_rows_beyond_the_last_split_and_changes_of_key_during_the_backfill_are_kept(world: World) -> None:
    world.sql("CREATE TABLE far (id bigint PRIMARY KEY, v int)")
    world.sql("INSERT INTO far SELECT i, i FROM generate_series(1, 2000) i; ANALYZE far")
    world.capture("public.far", "far", "backfill.num_rows_per_split='200', backfill.rate_limit='400'")
    world.until(lambda: bool(world.splits("far")))
    for i in range(1, 200):
        world.sql(f"INSERT INTO far VALUES ({1_000_000_000 + i}, {i}), ({-i}, {i})")
        world.sql(f"UPDATE far SET id = id + {5_000 if i % 2 else 777_000} WHERE id = {i * 10}")
        world.sql(f"UPDATE far SET id = {i * 10} WHERE id = {2001 - i * 10}")
    world.engine.execute("ALTER TABLE far SET BACKFILL_RATE_LIMIT = 1000000")
    world.live("far")
    world.assert_equal("far", "far")
    assert len(world.splits("far")) > 5


def test_values_that_repeat_are_copied_as_they_are_in_the_second_split_too(world: World) -> None:
    """How columns are packed is learnt from the first split of a reader; those after it are decoded for that."""
    world.sql("CREATE TYPE way AS ENUM ('air', 'rail')")
    world.sql(
        "CREATE TABLE alike (a int, b bytea, id int, w way, t text, url text, n numeric(18,2), big numeric(30,4), "
        "x numeric, j jsonb, arr int[], f float8, ok boolean, PRIMARY KEY (a, id))"
    )
    world.sql(
        "INSERT INTO alike SELECT i % 3, CASE i % 3 WHEN 0 THEN '\\x00ff'::bytea WHEN 1 THEN '\\x5c7834313432' END, i, "
        "CASE WHEN i % 2 = 0 THEN 'air' ELSE 'rail' END::way, CASE i % 4 WHEN 0 THEN '' WHEN 1 THEN 'ä' END, "
        "'https://shop.example/item/' || i % 50 || '/index.html', i % 7 / 4.0, i % 5 * 1e20, i % 3, "
        "jsonb_build_object('k', i % 4), ARRAY[i % 2], i % 2 / 3.0, i % 2 = 0 FROM generate_series(1, 6000) i; "
        "ANALYZE alike"
    )
    world.capture("public.alike", "alike", "backfill.num_rows_per_split='500', backfill.parallelism='2'")
    world.live("alike")
    assert len(world.splits("alike")) > 8
    assert all(r["equal"] for r in world.engine.execute("VERIFY alike")[0].rows)
    columns = ["id", "b", "t", "url", "n", "big", "arr", "f", "ok"]
    ours = world.engine.table("alike").df().select(*columns).toArrow().sort_by("id")
    theirs = world.db.execute(f"SELECT {', '.join(columns)} FROM alike ORDER BY id".encode()).fetchall()
    assert list(zip(*(c.to_pylist() for c in ours.columns), strict=True)) == theirs


def test_a_key_that_begins_with_a_boolean_is_cut_into_splits(world: World) -> None:
    world.sql("CREATE TABLE truths (k boolean, id int, PRIMARY KEY (k, id))")
    world.sql("INSERT INTO truths SELECT i % 2 = 0, i FROM generate_series(1, 60) i")
    world.capture("public.truths", "truths", "backfill.num_rows_per_split='20'")
    world.until(lambda: world.state("truths") != "creating", 60)
    world.sql("UPDATE truths SET id = -id WHERE id % 3 = 0; UPDATE truths SET k = NOT k WHERE id % 5 = 0")
    world.assert_equal("truths", "truths")
    assert [s["left"] for s in world.splits("truths")] == [None, '["f", "41"]', '["t", "22"]']


def test_text_that_is_not_utf_8_stops_its_table_and_not_the_stream(world: World) -> None:
    world.sql("CREATE DATABASE bytes TEMPLATE template0 ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'")
    bad, good = (f"convert_from('\\{b}'::bytea, 'SQL_ASCII')" for b in ("xff", "xc3a9"))
    with world.server.connect("bytes") as db:
        db.execute(
            "CREATE TABLE streamed (id int PRIMARY KEY, v text); CREATE TABLE whole (id int PRIMARY KEY, v text)"
        )
        db.execute(f"CREATE TABLE copied (id int PRIMARY KEY, v text); INSERT INTO copied VALUES (1, {bad})")
        db.execute("INSERT INTO streamed VALUES (1, 'x'); INSERT INTO whole VALUES (1, 'x')")
        world.engine.execute(
            f"CREATE SOURCE bytes WITH (connector='postgres-cdc', hostname='{world.server.host}',"
            f" port='{world.server.port}', username='{world.server.user}', password='${{HW_TEST_PASSWORD}}',"
            " database.name='bytes', slot.name='bytes', publication.name='bytes')"
        )
        for name in ("streamed", "whole", "copied"):
            world.engine.execute(f"CREATE TABLE {name} (*) FROM bytes TABLE 'public.{name}'")
        world.live("streamed", "whole")
        world.until(lambda: world.state("copied") == "failed", 60)
        healing = world.engine.core.capture.healing
        with mock.patch.object(healing, "look", mock.AsyncMock()):  # it comes too late
            db.execute(f"INSERT INTO streamed VALUES (2, {bad}); INSERT INTO whole VALUES (2, {good})")
            world.until(lambda: len(world.rows("whole")) == 2, 60)
            assert world.rows("whole") == [(1, "x"), (2, "é")]
            world.until(lambda: world.state("streamed") == "failed", 60)
            codes = {e["name"]: e["code"] for e in world.engine.status()["errors"]}
            assert codes["streamed"] == codes["copied"] == "VALUE_NOT_REPRESENTABLE"
            db.execute("DELETE FROM streamed WHERE id = 2")
            world.engine.execute("RESYNC streamed")
            world.live("streamed")
        # What was found before the RESYNC does not stop the table after it.
        world.until(lambda: not healing.heals(world.engine.core.registry.find("streamed", "table").id), 60)
        world.engine.execute("FLUSH")
        assert world.state("streamed") == "live"
    world.engine.execute("DROP SOURCE bytes CASCADE")


def test_truncate_and_inserts_in_one_epoch_leave_only_the_inserts(world: World) -> None:
    world.sql("CREATE TABLE cut (id int PRIMARY KEY, v text)")
    world.sql("INSERT INTO cut SELECT i, repeat('x', 10000) FROM generate_series(1, 50) i")
    world.capture("public.cut", "cut")
    world.live("cut")
    world.sql("BEGIN; UPDATE cut SET v = 'y'; TRUNCATE cut; INSERT INTO cut VALUES (1, 'new'), (99, 'new'); COMMIT")
    world.assert_equal("cut", "cut")


def test_a_truncate_alone_empties_the_target_of_a_sink_too(world: World, tmp_path: Path) -> None:
    world.sql("CREATE TABLE emptied (id int PRIMARY KEY); INSERT INTO emptied SELECT generate_series(1, 20)")
    world.capture("public.emptied", "emptied")
    world.live("emptied")
    world.engine.execute(f"CREATE SINK emptied_out FROM emptied WITH (connector='files', path='{tmp_path}')")
    world.until(lambda: (tmp_path / "_manifest").exists() and read_table(tmp_path).num_rows == 20)
    world.sql("TRUNCATE emptied")
    world.assert_equal("emptied", "emptied")
    world.until(lambda: read_table(tmp_path).num_rows == 0)
    world.sql("INSERT INTO emptied VALUES (1)")
    world.until(lambda: read_table(tmp_path).num_rows == 1)
    world.engine.execute("DROP SINK emptied_out")


def test_a_commit_that_is_streamed_before_readers_see_it_is_not_lost(world: World) -> None:
    """The commit waits for a standby that never comes: it is in the stream, and no other session sees it."""
    world.sql(
        "CREATE TABLE held (id int PRIMARY KEY, v int); INSERT INTO held SELECT i, 0 FROM generate_series(1, 9) i"
    )
    world.sql("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    world.sql("SELECT pg_reload_conf()")
    world.db.execute("SET synchronous_commit = local")
    waiting = threading.Thread(target=hang, args=(world.server,), daemon=True)
    try:
        world.db.execute("ALTER ROLE postgres SET synchronous_commit = local")
        world.capture("public.held", "held", "backfill.rate_limit='0'")
        world.until(lambda: bool(world.splits("held")))
        waiting.start()
        time.sleep(3)
        before = world.db.execute("SELECT v FROM held WHERE id = 5").fetchone()
        assert before == (0,), "the commit was not held back: the case is not the one that is meant"
        world.engine.execute("ALTER TABLE held SET BACKFILL_RATE_LIMIT = 1000")
        world.live("held")
    finally:
        world.sql("ALTER SYSTEM RESET synchronous_standby_names")
        world.sql("SELECT pg_reload_conf()")
        world.sql("ALTER ROLE postgres RESET synchronous_commit")
    waiting.join(30)
    world.assert_equal("held", "held")
    assert (5, 1) in world.rows("held")


def hang(server: PostgresServer) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = on")
        connection.execute("UPDATE held SET v = 1 WHERE id = 5")


def test_the_source_keeps_no_log_for_us_while_we_are_paused(world: World) -> None:
    world.sql("CREATE TABLE steady (id bigserial PRIMARY KEY, v text)")
    world.capture("public.steady", "steady")
    world.live("steady")
    world.engine.execute("PAUSE")
    try:
        for _ in range(20):
            world.sql("INSERT INTO steady (v) SELECT repeat('x', 500) FROM generate_series(1, 500)")
        world.sql("CHECKPOINT")
        world.until(lambda: retained(world) < 1 << 20, 60)
    finally:
        world.engine.execute("RESUME")
    world.assert_equal("steady", "steady")


def retained(world: World) -> int:
    row = world.db.execute(
        "SELECT pg_current_wal_lsn() - confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'headwater'"
    ).fetchone()
    assert row is not None
    return int(row[0])


def verified(world: World, name: str) -> list[dict[str, Any]]:
    result = world.engine.execute(f"VERIFY {name}")[0]
    assert result is not None
    rows: list[dict[str, Any]] = result.rows
    return rows


def test_verify_is_exact_under_load_and_resync_repairs_what_differs(world: World) -> None:
    world.sql('CREATE TABLE led (a text COLLATE "C", b int, v text, PRIMARY KEY (a, b))')
    world.sql("INSERT INTO led SELECT 'k' || (i % 9), i, 'v' FROM generate_series(1, 1000) i; ANALYZE led")
    world.capture("public.led", "led", "backfill.num_rows_per_split='200'")
    world.live("led")
    with Load(world.server):
        rows = verified(world, "led")
        assert len(rows) == len(world.splits("led")) > 3
        assert all(r["equal"] for r in rows)
        assert sum(r["source_rows"] for r in rows) >= 900
        world.halve("led")
        assert not all(r["equal"] for r in verified(world, "led"))
        world.engine.execute("RESYNC led")
        world.live("led")
        assert all(r["equal"] for r in verified(world, "led"))
    world.assert_equal("led", "led")


@pytest.mark.parametrize("what", ["", " REPAIR"])
def test_a_comparison_into_which_a_new_copy_falls_says_so_and_is_not_taken_for_equal(world: World, what: str) -> None:
    name = f"again{len(what)}"
    world.sql(f"CREATE TABLE {name} (id int PRIMARY KEY, v int); INSERT INTO {name} VALUES (1, 1), (2, 2)")
    world.capture(f"public.{name}", name)
    world.live(name)
    source = captured(world, name).source
    with world.server.connect() as other, ThreadPoolExecutor(1) as pool:
        other.execute("BEGIN")
        other.execute(f"INSERT INTO {name} VALUES (3, 3)".encode())  # what is read next waits for its end
        comparison = pool.submit(verified, world, name + what)
        world.until(lambda: len(source._holds) == 1)
        world.engine.execute(f"RESYNC {name}")
        with pytest.raises(HeadwaterError, match="is being copied again"):
            verified(world, name)
        other.execute("COMMIT")
        with pytest.raises(HeadwaterError, match=r"BACKFILL_RUNNING.* began while it was compared"):
            comparison.result()
    world.live(name)
    assert [(r["rows"], r["equal"]) for r in verified(world, name)] == [(3, True)]


def captured(world: World, name: str) -> TableBackfill:
    sources = world.engine.core.capture.sources.values()
    return next(table for source in sources for table in source.tables.values() if table.name == name)


class Load:
    """Updates of its second half, inserts and deletes on `led`, until the end of the block."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.thread.join(10)

    def run(self) -> None:
        number = 10_000
        with self.server.connect() as connection:
            while not self.stopping.wait(0.005):
                number += 1
                connection.execute("INSERT INTO led VALUES ('n', %s, 'new')", (number,))
                connection.execute("UPDATE led SET v = %s WHERE b = %s", (str(number), 500 + number % 500))
                connection.execute("DELETE FROM led WHERE b = %s", (number - 50,))


@pytest.mark.parametrize("ordered", [True, False], ids=["key-ranges", "physical-ranges"])
def test_verify_repairs_rows_that_were_damaged_on_purpose_and_no_others(world: World, ordered: bool) -> None:
    name, collation = ("hurt", "C") if ordered else ("bruised", odd_collation(world.db))
    world.sql(f'CREATE TABLE {name} (k text COLLATE "{collation}" PRIMARY KEY, v int)')
    world.sql(f"INSERT INTO {name} SELECT 'k' || (1000 + i), i FROM generate_series(1, 1000) i; ANALYZE {name}")
    world.capture(f"public.{name}", name, "backfill.num_rows_per_split='200'")
    world.live(name)
    world.sql(f"UPDATE {name} SET v = -v WHERE v % 10 = 0")
    world.settle()
    assert all(r["equal"] for r in verified(world, name))
    damage(world, name)
    before = world.segments(name)
    rows = verified(world, f"{name} REPAIR")
    wrong = [r for r in rows if not r["equal"]]
    assert wrong and all(r["repaired"] for r in wrong) and not any(r["repaired"] for r in rows if r["equal"])
    assert len(wrong) < len(rows) or not ordered
    assert sum(r["rows"] for path, r in world.segments(name).items() if path not in before) == 4
    world.assert_equal(name, name)
    assert all(r["equal"] for r in verified(world, name))


def damage(world: World, name: str) -> None:
    """One file of the table loses three rows, and one value of it is another."""
    base = next(r for r in world.segments(name).values() if r["kind"] == "base")
    path = world.data / base["path"]
    rows = pq.read_table(path, partitioning=None)
    values = rows.column("v").to_pylist()
    keys = rows.column("k").to_pylist()
    streamed = {k for k, v in world.db.execute(f"SELECT k, v FROM {name}".encode()) if v < 0}
    picks = [i for i, k in enumerate(keys) if k not in streamed][:4]
    values[picks[0]] = 123_456
    rows = rows.set_column(
        rows.schema.get_field_index("v"), rows.schema.field("v"), pa.array(values, rows.schema.field("v").type)
    )
    keep = [i for i in range(rows.num_rows) if i not in picks[1:]]
    pq.write_table(rows.take(keep), path)


def test_rows_that_move_between_ranges_of_pages_are_neither_lost_nor_doubled_by_a_copy_in_physical_order(
    world: World,
) -> None:
    """Each update writes its row elsewhere. The reads share a snapshot, which is lost in the middle."""
    world.sql('CREATE TABLE strewn (id text COLLATE "C" PRIMARY KEY, n int, v text)')
    world.sql("INSERT INTO strewn SELECT md5(i::text), i, repeat('v', 200) FROM generate_series(1, 100000) i")
    world.sql("ANALYZE strewn")
    stopping = threading.Event()

    def move() -> None:
        with world.server.connect() as connection:
            for i in itertools.count():
                if stopping.is_set():
                    return
                connection.execute("UPDATE strewn SET v = v || 'x' WHERE n %% 400 = %s", (i % 400,))
                connection.execute("INSERT INTO strewn VALUES (gen_random_uuid()::text, %s, 'new')", (-i,))

    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(move)
        options = "backfill.order='physical', backfill.num_rows_per_split='250', backfill.parallelism='2'"
        world.capture("public.strewn", "strewn", options)
        table = captured(world, "strewn")
        world.until(lambda: any(x.state is SplitState.STAGED for x in table.splits.values()))
        assert terminated(world, "headwater snapshot") == 1, "all was read before it could be disturbed"
        world.live("strewn")
        stopping.set()
        moving.result()
    assert "SOURCE_SNAPSHOT_LOST" in {e["code"] for e in world.engine.status()["errors"] if e["name"] == "strewn"}
    splits = world.splits("strewn")
    assert len(splits) > 300 and all(s["left"] is None or '"(' in s["left"] for s in splits)
    assert len({s["handed_over_epoch"] for s in splits}) == 1
    world.assert_equal("strewn", "strewn")
    assert all(r["equal"] for r in verified(world, "strewn"))
    world.until(lambda: not nobodys_files(world, "strewn"))  # what had been read under the lost snapshot


def nobodys_files(world: World, name: str) -> set[str]:
    rows = world.engine.execute("SELECT table_name, path FROM hw_catalog.hw_segments")[0]
    assert rows is not None
    known = {r["path"] for r in rows.rows if r["table_name"] == name}
    folder = min(known, key=len).rpartition("/")[0]
    return {str(p.relative_to(world.data)) for p in world.data.glob(f"{folder}/*.parquet")} - known


def test_a_large_value_that_moves_unchanged_into_a_split_that_is_handed_over_is_not_lost(world: World) -> None:
    """The stream leaves the value out, and our table does not have the row yet: it is read at the source."""
    world.sql("CREATE TABLE wide (id int PRIMARY KEY, big text); ALTER TABLE wide ALTER big SET STORAGE EXTERNAL")
    world.sql("INSERT INTO wide SELECT i, repeat(md5(i::text), 300) FROM generate_series(1, 400) i; ANALYZE wide")
    world.capture("public.wide", "wide", "backfill.num_rows_per_split='50', backfill.rate_limit='20'")
    world.until(lambda: any(s["state"] == "HANDED_OVER" for s in world.splits("wide")))
    world.engine.execute("ALTER TABLE wide SET BACKFILL_RATE_LIMIT = 0")
    assert any(s["state"] == "PLANNED" for s in world.splits("wide"))
    world.sql("UPDATE wide SET id = -id WHERE id = 400")
    world.settle()
    moved = [r for r in world.rows("wide") if r[0] == -400]
    assert moved == [r for r in world.source_rows("wide") if r[0] == -400]
    world.sql("UPDATE wide SET id = id - 1000 WHERE id IN (390, 391, 392); UPDATE wide SET big = 'new' WHERE id = -609")
    world.sql("UPDATE wide SET id = id - 1000 WHERE id = -610")
    # A row of another value under the key that one has just left.
    world.sql("UPDATE wide SET id = -399 WHERE id = 399; INSERT INTO wide VALUES (399, repeat('other', 2000))")
    world.engine.execute("ALTER TABLE wide SET BACKFILL_RATE_LIMIT = 1000000")
    world.live("wide")
    world.assert_equal("wide", "wide")
    assert not [e for e in world.engine.status()["errors"] if e["name"] == "wide"]


def test_a_table_that_is_rewritten_while_its_read_waits_is_not_taken_for_empty(world: World) -> None:
    world.sql("CREATE TABLE redone (id int PRIMARY KEY, v text)")
    world.sql("INSERT INTO redone SELECT i, 'v' || i FROM generate_series(1, 500) i; ANALYZE redone")
    world.capture("public.redone", "redone", "backfill.num_rows_per_split='100', backfill.rate_limit='0'")
    world.until(lambda: bool(world.splits("redone")))
    with world.server.connect() as other:
        other.execute("BEGIN")
        other.execute("ALTER TABLE redone ALTER v TYPE text USING v || ''")
        world.engine.execute("ALTER TABLE redone SET BACKFILL_RATE_LIMIT = 1000000")
        world.until(lambda: waiting_reads(world) > 0)
        # Nobody waits behind the lock for ever, nor without a word.
        with pytest.raises(HeadwaterError, match="SOURCE_BUSY"):
            world.capture("public.redone", "again")
        world.until(lambda: "SOURCE_BUSY" in waiting_for(world, "redone"))
        other.execute("COMMIT")
    world.live("redone")
    assert not waiting_for(world, "redone")
    world.assert_equal("redone", "redone")


def waiting_for(world: World, name: str) -> str:
    rows = world.engine.execute("SELECT name, waiting_for FROM hw_catalog.hw_progress")[0]
    assert rows is not None
    return next(str(r["waiting_for"] or "") for r in rows.rows if r["name"] == name)


def waiting_reads(world: World) -> int:
    row = world.db.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'headwater%' AND wait_event_type = 'Lock'"
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_rows_that_share_one_log_position_are_all_kept(world: World) -> None:
    """COPY writes many rows with one record of the log: the stream gives them one and the same position."""
    world.sql("CREATE TABLE batch (id int PRIMARY KEY, v text)")
    world.capture("public.batch", "batch")
    world.live("batch")
    with world.db.cursor() as cursor, cursor.copy("COPY batch FROM STDIN") as copy:
        for i in range(3000):
            copy.write_row((i, "v"))
    world.assert_equal("batch", "batch")


def test_a_transaction_that_was_open_while_the_reader_restarted_is_whole(world: World) -> None:
    world.sql("CREATE TABLE span (id int PRIMARY KEY, v int)")
    world.capture("public.span", "span")
    world.live("span")
    with world.server.connect(autocommit=False) as other:
        other.execute("INSERT INTO span SELECT i, 0 FROM generate_series(1, 500) i")
        world.sql("INSERT INTO span VALUES (1000, 1)")
        world.settle()
        world.sql("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = 'headwater'")
        world.sql("INSERT INTO span VALUES (1001, 1)")
        world.until(lambda: slot_is_active(world))
        world.settle()
        other.execute("UPDATE span SET v = 2 WHERE id <= 100")
        other.commit()
    world.assert_equal("span", "span")


def test_a_statement_of_many_rows_is_never_seen_in_part(world: World) -> None:
    world.sql("CREATE TABLE whole (id int PRIMARY KEY, v int)")
    world.sql("INSERT INTO whole SELECT i, 0 FROM generate_series(1, 20000) i")
    world.capture("public.whole", "whole")
    world.live("whole")
    first = world.engine.status()["committed_epoch"]
    for _ in range(4):
        world.sql("UPDATE whole SET v = v + 1")
    world.settle()
    result = world.engine.execute("SELECT epoch FROM hw_catalog.hw_epochs WHERE position IS NOT NULL")[0]
    assert result is not None
    epochs = sorted(r["epoch"] for r in result.rows if r["epoch"] > first)
    for epoch in {*epochs[:: max(1, len(epochs) // 6)], epochs[-1]}:
        row = world.engine.table("whole").df(epoch).selectExpr("min(v)", "max(v)", "count(*)").collect()[0]
        assert row[0] == row[1] and row[2] == 20_000


def test_a_shared_snapshot_that_is_lost_with_its_connection_is_made_anew(world: World) -> None:
    world.sql(f'CREATE TABLE odd_order (k text COLLATE "{odd_collation(world.db)}" PRIMARY KEY, v int)')
    world.sql("INSERT INTO odd_order SELECT 'k' || i, i FROM generate_series(1, 1000) i; ANALYZE odd_order")
    world.capture("public.odd_order", "odd_order", "backfill.num_rows_per_split='100', backfill.rate_limit='300'")
    world.until(lambda: terminated(world, "headwater snapshot") > 0)
    world.sql("UPDATE odd_order SET v = -v WHERE v % 3 = 0; DELETE FROM odd_order WHERE v = 500")
    world.until(lambda: any(e["name"] == "odd_order" for e in world.engine.status()["errors"]))
    world.engine.execute("ALTER TABLE odd_order SET BACKFILL_RATE_LIMIT = 1000000")
    world.live("odd_order")
    world.assert_equal("odd_order", "odd_order")


def terminated(world: World, application: str) -> int:
    row = world.db.execute(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = %s", (application,)
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_unchanged_large_values_beside_json_nulls_stay_what_they_are(world: World) -> None:
    world.sql("CREATE TABLE doc (id int PRIMARY KEY, j jsonb, big text, n int)")
    world.sql("ALTER TABLE doc ALTER big SET STORAGE EXTERNAL; ALTER TABLE doc ALTER j SET STORAGE EXTERNAL")
    world.sql("INSERT INTO doc VALUES (1, 'null', repeat('a', 9000), 0), (2, NULL, NULL, 0)")
    world.sql("INSERT INTO doc SELECT 3, to_jsonb(repeat('b', 9000)), repeat('c', 9000), 0")
    world.capture("public.doc", "doc")
    world.live("doc")
    world.sql("UPDATE doc SET n = n + 1")
    world.sql("UPDATE doc SET j = 'null' WHERE id = 3; UPDATE doc SET n = n + 1")
    world.settle()
    found = {r[0]: (r[1], r[2], r[3]) for r in world.rows("doc")}
    assert found == {1: ("null", "a" * 9000, 2), 2: (None, None, 2), 3: ("null", "c" * 9000, 2)}


def test_a_table_that_was_dropped_here_and_made_again_is_copied_again(world: World) -> None:
    """Its source's position has moved on: nothing of before may be taken for known."""
    world.sql("CREATE TABLE twice (id int PRIMARY KEY); INSERT INTO twice SELECT generate_series(1, 300)")
    world.capture("public.twice", "twice")
    world.live("twice")
    world.sql("INSERT INTO twice VALUES (1000)")
    world.settle()
    world.engine.execute("DROP TABLE twice")
    world.sql("INSERT INTO twice VALUES (1001); DELETE FROM twice WHERE id = 1")
    world.capture("public.twice", "twice")
    world.live("twice")
    world.assert_equal("twice", "twice")


def test_a_lost_slot_heals_by_a_new_copy_and_never_by_a_silent_jump(world: World) -> None:
    world.sql(
        "CREATE TABLE gap (id int PRIMARY KEY, v int); INSERT INTO gap SELECT i, 0 FROM generate_series(1, 100) i"
    )
    world.capture("public.gap", "gap")
    world.live("gap")
    world.settle()
    world.until(lambda: slot_was_dropped(world))
    world.sql("DELETE FROM gap WHERE id < 10; UPDATE gap SET v = 1 WHERE id > 90; INSERT INTO gap VALUES (1000, 1)")
    world.until(lambda: any(e["code"] == "SOURCE_SLOT_LOST" for e in world.engine.status()["errors"]))
    world.until(lambda: slot_is_active(world))
    world.live("gap")
    world.assert_equal("gap", "gap")
    world.sql("INSERT INTO gap VALUES (1001, 2)")
    world.assert_equal("gap", "gap")


def slot_is_active(world: World) -> bool:
    row = world.db.execute("SELECT active FROM pg_replication_slots WHERE slot_name = 'headwater'").fetchone()
    return row is not None and bool(row[0])


def slot_was_dropped(world: World) -> bool:
    """The reader connects again at once: whoever drops its slot must be quicker."""
    world.sql("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = 'headwater'")
    try:
        world.sql("SELECT pg_drop_replication_slot('headwater')")
    except psycopg.errors.ObjectInUse:
        return False
    return True
