"""Columns that come, go and change at the source, and publications that do, on a real Postgres and one engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc_world import World, open_world
from headwater.connectors.files.sink import read_table
from headwater.errors import HeadwaterError, UsageError

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("shapes") / "data") as found:
        yield found


def columns(world: World, name: str) -> list[str]:
    return list(world.engine.table(name).df().columns)


def has(world: World, name: str, expected: list[str]) -> None:
    world.until(lambda: columns(world, name) == expected and world.state(name) == "live")


def failed_with(world: World, name: str, code: str, text: str = "") -> dict[str, str]:
    """The error with which a table has stopped."""

    def found() -> list[dict[str, str]]:
        errors = [e for e in world.engine.status()["errors"] if e["name"] == name]
        return [e for e in errors if e["code"] == code and text in e["message"]]

    world.until(lambda: world.state(name) == "failed" and bool(found()))
    return found()[-1]


def healed(world: World, name: str) -> None:
    """The table was copied again: it is live, and as the source."""
    world.until(lambda: world.rows(name) == world.source_rows(name))
    world.live(name)
    world.assert_equal(name, name)


def make(world: World, name: str, policy: str = "", body: str = "id int PRIMARY KEY, a int, b text") -> None:
    world.sql(f"CREATE TABLE {name} ({body}); INSERT INTO {name} SELECT i, i, 'b' || i FROM generate_series(1, 50) i")
    world.capture(f"public.{name}", name, f"schema.change.behavior='{policy}'" if policy else "")


def test_a_new_column_appears_with_what_the_source_shows_in_old_rows_and_views_keep_theirs(world: World) -> None:
    make(world, "grow")  # lenient, by default
    world.live("grow")
    world.engine.execute("CREATE MATERIALIZED VIEW everything AS SELECT * FROM grow WHERE id < 10")
    world.sql("ALTER TABLE grow ADD c int DEFAULT 7, ADD d float8 DEFAULT random(); UPDATE grow SET a = 0 WHERE id = 1")
    has(world, "grow", ["id", "a", "b", "c", "d"])
    world.assert_equal("grow", "grow")
    world.sql("INSERT INTO grow VALUES (0, 1, 'new', 8, 0.5); DELETE FROM grow WHERE id = 2")
    world.assert_equal("grow", "grow")
    assert columns(world, "everything") == ["id", "a", "b"]
    assert world.rows("everything") == sorted(
        world.source_rows("(SELECT id, a, b FROM grow WHERE id < 10) x"), key=repr
    )
    notices = [e for e in world.engine.status()["errors"] if e["name"] == "grow"]
    assert [(e["code"], "column c is new" in e["message"]) for e in notices] == [("SOURCE_SCHEMA_CHANGED", True)]


@pytest.mark.slow
def test_a_dropped_or_renamed_column_stays_with_nulls_while_a_view_reads_the_table(world: World) -> None:
    make(world, "shrink", "evolve")
    world.live("shrink")
    world.engine.execute("CREATE MATERIALIZED VIEW uses_b AS SELECT id, b FROM shrink WHERE id < 3")
    world.sql("ALTER TABLE shrink RENAME b TO bb; UPDATE shrink SET a = -a WHERE id = 1")
    has(world, "shrink", ["id", "a", "b", "bb"])
    world.settle()
    expected = [(i, a, None, b) for i, a, b in world.source_rows("shrink")]
    assert world.rows("shrink") == sorted(expected, key=repr)
    assert world.rows("uses_b") == [(1, None), (2, None)]
    world.engine.execute("DROP MATERIALIZED VIEW uses_b")
    world.sql("ALTER TABLE shrink DROP a; INSERT INTO shrink VALUES (100, 'x')")
    has(world, "shrink", ["id", "bb"])  # nobody uses them any more
    world.assert_equal("shrink", "shrink")


@pytest.mark.slow
def test_evolve_widens_a_column_and_anything_else_stops_the_table_alone(world: World) -> None:
    make(world, "wide", "evolve")
    make(world, "other", "evolve")
    world.live("wide", "other")
    world.sql("ALTER TABLE wide ALTER a TYPE bigint; UPDATE wide SET a = 5000000000 WHERE id = 3")
    world.until(lambda: dict(world.engine.table("wide").df().dtypes)["a"] == "bigint")
    world.live("wide")
    world.assert_equal("wide", "wide")
    before = world.rows("other")
    world.sql("ALTER TABLE other ALTER a TYPE text USING 'x' || a; UPDATE other SET b = 'z'")
    error = failed_with(world, "other", "SOURCE_SCHEMA_CHANGED", "column a is STRING, and was INT")
    assert "CREATE it again" in error["hint"]
    world.sql("INSERT INTO wide VALUES (200, 1, 'on')")
    world.assert_equal("wide", "wide")
    assert world.rows("other") == before


def test_a_wider_type_is_followed_under_a_view_and_a_sink_and_taken_over_where_there_is_none(
    world: World, tmp_path: Path
) -> None:
    body = "id int PRIMARY KEY, n numeric(20,6), v varchar(9), t timestamp(3), c smallint"
    for name in ("money", "lonely"):
        world.sql(f"CREATE TABLE {name} ({body})")
        world.sql(f"INSERT INTO {name} SELECT i, i / 7.0, 'v' || i, now(), i FROM generate_series(1, 50) i")
        world.capture(f"public.{name}", name)
    world.live("money", "lonely")
    summed = "SELECT c % 3 AS k, sum(n) AS total, count(*) AS many FROM money GROUP BY c % 3"
    world.engine.execute(f"CREATE MATERIALIZED VIEW money_sum AS {summed}")
    world.engine.execute(f"CREATE SINK money_out FROM money WITH (connector='files', path='{tmp_path}')")
    world.live("money_sum", "money_out")
    alter = (
        "ALTER n TYPE numeric(24,6), ALTER v TYPE text, ALTER t TYPE timestamp, ALTER c TYPE int, ALTER id TYPE bigint"
    )
    for name in ("money", "lonely"):
        world.sql(f"ALTER TABLE {name} {alter}")
        world.sql(f"UPDATE {name} SET n = n + 1, v = v || ' and longer', c = c + 1, t = now() WHERE id <= 10")
        world.sql(
            f"INSERT INTO {name} VALUES (51, 12345678901234.5, 'new', now(), 7); DELETE FROM {name} WHERE id = 50"
        )

    def equal() -> None:
        for name in ("money", "lonely"):
            world.until(lambda n=name: world.rows(n) == world.source_rows(n))  # type: ignore[misc]
        world.until(lambda: world.rows("money_sum") == world.source_rows(f"({summed}) x"))
        delivered = world.engine.table("money").df().select("id", "n").toArrow()
        world.until(lambda: sorted(read_table(tmp_path).select(["id", "n"]).to_pylist(), key=repr)
                    == sorted(delivered.to_pylist(), key=repr))  # fmt: skip

    equal()
    world.until(lambda: dict(world.engine.table("lonely").df().dtypes)["n"] == "decimal(24,6)")
    world.live("lonely", "money", "money_sum", "money_out")
    types = {name: dict(world.engine.table(name).df().dtypes) for name in ("money", "lonely")}
    assert [types["lonely"][c] for c in ("id", "n", "c")] == ["int", "decimal(24,6)", "int"]
    assert [types["money"][c] for c in ("id", "n", "c")] == ["int", "decimal(20,6)", "smallint"]
    world.engine.execute("RECOVER")
    world.sql("INSERT INTO lonely VALUES (52, 123456789012345678.123456, 'wide', now(), 100000)")
    world.sql("UPDATE money SET n = -n WHERE id > 40; INSERT INTO money VALUES (52, 0.000001, NULL, NULL, NULL)")
    equal()
    stopped = [e for e in world.engine.status()["errors"] if e["name"] in ("money", "lonely") and not e["retrying"]]
    assert not stopped and all(r["equal"] for r in world.engine.execute("VERIFY money")[0].rows)
    world.sql("INSERT INTO money VALUES (53, 123456789012345678.1, 'too wide', now(), 1)")
    code, text = "VALUE_NOT_REPRESENTABLE", "column n holds a value outside"
    # At first it is looked into whether a new copy would help.
    world.until(lambda: "wider there by now" in failed_with(world, "money", code, text)["hint"])
    world.engine.execute("DROP TABLE money CASCADE")


def test_columns_declared_with_several_dimensions_are_text_by_copy_and_by_stream(world: World) -> None:
    world.sql("CREATE DOMAIN grid AS int[][]; CREATE TABLE grids (id int PRIMARY KEY, g int[][], d grid, a int[])")
    world.sql("INSERT INTO grids VALUES (1, '{{1,2},{3,4}}', '{{1}}', '{1,2}'), (2, '{7}', NULL, NULL)")
    world.capture("public.grids", "grids")
    world.live("grids")
    world.sql("INSERT INTO grids SELECT id + 10, g, d, a FROM grids; UPDATE grids SET g = '{{5},{6}}' WHERE id = 2")
    world.settle()
    expected = world.source_rows("(SELECT id, g::text, d::text, a FROM grids) x")
    assert world.rows("grids") == expected and world.state("grids") == "live"
    assert dict(world.engine.table("grids").df().dtypes) == {
        "id": "int",
        "g": "string",
        "d": "string",
        "a": "array<int>",
    }
    world.capture("public.grids", "as_arrays", "arrays='array'")
    failed_with(world, "as_arrays", "VALUE_NOT_REPRESENTABLE", "more than one dimension")
    world.engine.execute("DROP TABLE as_arrays")


def test_exception_stops_at_any_change_and_resync_takes_the_new_definition(world: World) -> None:
    make(world, "strict", "exception")
    world.live("strict")
    world.sql("ALTER TABLE strict ADD c int DEFAULT 1; INSERT INTO strict VALUES (99, 1, 'x', 2)")
    failed_with(world, "strict", "SOURCE_SCHEMA_CHANGED", "column c is new")
    assert len(world.rows("strict")) == 50
    world.engine.execute("RESYNC strict")
    has(world, "strict", ["id", "a", "b", "c"])
    world.assert_equal("strict", "strict")


def test_ignore_and_a_column_list_keep_their_columns(world: World) -> None:
    make(world, "fixed", "ignore")
    world.engine.execute(
        "CREATE TABLE listed (id, a) FROM shop TABLE 'public.fixed' WITH (schema.change.behavior='exception')"
    )
    world.live("fixed", "listed")
    world.sql("ALTER TABLE fixed ADD c int DEFAULT 1, DROP b; UPDATE fixed SET a = 1000 WHERE id < 3")
    world.settle()
    assert columns(world, "fixed") == ["id", "a", "b"]
    found = {r[0]: r[1:] for r in world.rows("fixed")}
    assert found[1] == (1000, None) and found[3] == (3, "b3")  # rows written since have no b
    assert world.rows("listed") == sorted(world.source_rows("(SELECT id, a FROM fixed) x"), key=repr)
    assert (world.state("fixed"), world.state("listed")) == ("live", "live")


@pytest.mark.slow
def test_a_column_dropped_during_the_copy_begins_it_anew(world: World) -> None:
    make(world, "midway", "evolve")
    world.engine.execute("DROP TABLE midway")
    options = "schema.change.behavior='evolve', backfill.num_rows_per_split='10', backfill.rate_limit='5'"
    world.capture("public.midway", "midway", options)
    world.until(lambda: any(s["state"] == "HANDED_OVER" for s in world.splits("midway")))
    world.sql("ALTER TABLE midway DROP a, ADD c text DEFAULT 'd'")
    world.engine.execute("ALTER TABLE midway SET BACKFILL_RATE_LIMIT = DEFAULT")
    has(world, "midway", ["id", "b", "c"])
    world.assert_equal("midway", "midway")


def test_columns_that_change_their_names_with_each_other_are_copied_anew(world: World) -> None:
    world.sql("CREATE TABLE swapped (id int PRIMARY KEY, x int, y int, z int)")
    world.sql("INSERT INTO swapped SELECT i, i, -i, 0 FROM generate_series(1, 30) i")
    world.capture("public.swapped", "swapped")
    world.sql("CREATE TABLE swapped_loose AS SELECT * FROM swapped; ALTER TABLE swapped_loose REPLICA IDENTITY FULL")
    world.capture("public.swapped_loose", "swapped_loose")
    world.live("swapped", "swapped_loose")
    for table in ("swapped", "swapped_loose"):
        world.sql(
            f"BEGIN; ALTER TABLE {table} RENAME x TO t; ALTER TABLE {table} RENAME y TO x;"
            f"ALTER TABLE {table} RENAME t TO y; UPDATE {table} SET z = 1 WHERE id < 3; COMMIT"
        )
    for table in ("swapped", "swapped_loose"):
        world.until(lambda name=table: (9, -9, 9, 0) in world.rows(name), 60)  # type: ignore[misc]
        world.live(table)
        world.assert_equal(f"(SELECT id, x, y, z FROM {table}) q", table)
    # So is one that was dropped and made again before others.
    world.sql(
        "ALTER TABLE swapped DROP y; ALTER TABLE swapped ADD y int DEFAULT 7; UPDATE swapped SET z = 2 WHERE id = 5"
    )
    world.until(lambda: (9, -9, 7, 0) in world.rows("swapped"), 60)
    world.assert_equal("(SELECT id, x, y, z FROM swapped) q", "swapped")


def test_changes_of_old_rows_that_no_event_tells_are_found_in_the_catalogue(world: World) -> None:
    """The last column dropped and made again, a type that stays with values that do not, an enum's label renamed."""
    world.sql("CREATE TYPE mood AS ENUM ('sad', 'happy'); CREATE DOMAIN moods AS mood[]")
    unseen = {
        "remade": "ALTER TABLE remade DROP b; ALTER TABLE remade ADD b text DEFAULT 'again'",
        "rewritten": "ALTER TABLE rewritten ALTER a TYPE int USING a * 100",
        "relabelled": "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'",
    }
    for name in ("remade", "rewritten"):
        make(world, name)
    make(world, "untouched", "exception")
    make(world, "stopping", "exception")
    world.sql("CREATE TABLE relabelled (id int PRIMARY KEY, m mood, n moods)")
    world.sql("INSERT INTO relabelled VALUES (1, 'sad', '{happy,sad}'), (2, 'happy', NULL)")
    world.capture("public.relabelled", "relabelled")
    world.live("remade", "rewritten", "untouched", "stopping", "relabelled")
    world.sql("VACUUM FULL untouched")
    world.sql("ALTER TABLE stopping ALTER a TYPE int USING a + 1")
    for statement in unseen.values():
        world.sql(statement)
    healed(world, "remade")
    healed(world, "rewritten")
    world.until(lambda: world.rows("relabelled") == [(1, "blue", ["happy", "blue"]), (2, "happy", None)], 60)
    failed_with(world, "stopping", "SOURCE_SCHEMA_CHANGED", "column a was rewritten")
    assert world.state("untouched") == "live"
    assert not [e for e in world.engine.status()["errors"] if e["name"] == "untouched"]
    world.sql("INSERT INTO remade VALUES (100, 1, 'x'); UPDATE rewritten SET b = 'y' WHERE id = 2")
    world.assert_equal("remade", "remade")
    world.assert_equal("rewritten", "rewritten")


def test_partitions_that_come_or_go_with_their_rows_are_said_and_those_made_as_such_are_not(world: World) -> None:
    world.sql("CREATE TABLE months (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)")
    world.sql("CREATE TABLE jan PARTITION OF months FOR VALUES FROM (0) TO (10); INSERT INTO months VALUES (1, 1)")
    world.capture("public.months", "months")
    world.live("months")
    world.sql("CREATE TABLE feb PARTITION OF months FOR VALUES FROM (10) TO (20); INSERT INTO months VALUES (11, 1)")
    world.assert_equal("months", "months")
    world.sql("CREATE TABLE mar (id int PRIMARY KEY, v int); INSERT INTO mar VALUES (21, 1)")
    world.sql("ALTER TABLE months ATTACH PARTITION mar FOR VALUES FROM (20) TO (30); DROP TABLE jan")

    def said() -> list[str]:
        errors = [e for e in world.engine.status()["errors"] if e["name"] == "months"]
        return [e["message"] for e in errors if e["code"] == "SOURCE_PARTITIONS_CHANGED"]

    world.until(lambda: any("partition jan went and partition mar came" in text for text in said()))
    assert not any("feb" in text for text in said())
    assert world.state("months") == "live"
    world.engine.execute("RESYNC months")
    healed(world, "months")


@pytest.mark.slow
def test_a_table_without_a_key_follows_a_change_of_columns_exactly(world: World) -> None:
    world.sql("CREATE TABLE loose (a int, b text); ALTER TABLE loose REPLICA IDENTITY FULL")
    world.sql("INSERT INTO loose SELECT i % 3, 'b' FROM generate_series(1, 30) i")
    world.capture("public.loose", "loose")
    world.live("loose")
    one = "ctid = (SELECT min(ctid) FROM loose)"
    world.sql(
        f"ALTER TABLE loose ADD c int DEFAULT 4; DELETE FROM loose WHERE {one}; INSERT INTO loose VALUES (0, 'b', 4)"
    )
    has(world, "loose", ["a", "b", "c"])
    world.assert_equal("loose", "loose")
    world.sql(f"ALTER TABLE loose DROP b; DELETE FROM loose WHERE {one}; UPDATE loose SET a = 9 WHERE {one}")
    world.until(lambda: any(row[0] == 9 for row in world.rows("loose")))
    world.live("loose")
    world.settle()
    assert world.rows("loose") == sorted([(a, None, c) for a, c in world.source_rows("loose")], key=repr)


@pytest.mark.slow
def test_a_key_that_changes_stops_the_table_with_the_reason(world: World) -> None:
    make(world, "keyed")
    world.live("keyed")
    world.sql("ALTER TABLE keyed DROP CONSTRAINT keyed_pkey, ADD PRIMARY KEY (a); UPDATE keyed SET b = 'q'")
    failed_with(world, "keyed", "SOURCE_KEY_CHANGED")
    with pytest.raises(HeadwaterError) as caught:
        world.engine.execute("RESYNC keyed")
    assert "its key is (a), and was (id)" in caught.value.message


def test_rows_that_are_one_by_the_old_key_and_two_by_the_new_stop_the_table(world: World) -> None:
    tables = ("longer", "by_rows", "undone")
    for name in tables:
        make(world, name)
    world.live(*tables)
    world.sql("ALTER TABLE by_rows REPLICA IDENTITY FULL")  # the stream does not say its key any more
    for name in ("longer", "by_rows"):
        world.sql(f"ALTER TABLE {name} DROP CONSTRAINT {name}_pkey, ADD PRIMARY KEY (id, a)")
        world.sql(f"INSERT INTO {name} (id, a) VALUES (1, 77)")
    world.sql("ALTER TABLE undone DROP CONSTRAINT undone_pkey; INSERT INTO undone (id, a) VALUES (88, 8)")
    world.sql("ALTER TABLE undone ADD PRIMARY KEY (id)")
    failed_with(world, "longer", "SOURCE_KEY_CHANGED")
    failed_with(world, "by_rows", "SOURCE_SCHEMA_CHANGED")
    assert "its key is (id, a), and was (id)" in str(world.engine.status()["errors"])
    healed(world, "undone")


# -- publications ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_table_taken_out_of_the_publication_and_put_in_again_is_copied_anew(world: World) -> None:
    make(world, "away")
    world.live("away")
    world.sql("ALTER PUBLICATION headwater DROP TABLE away")
    world.sql("DELETE FROM away WHERE id < 10; UPDATE away SET a = 1 WHERE id = 20")
    world.sql("ALTER PUBLICATION headwater ADD TABLE away; INSERT INTO away VALUES (300, 3, 'x')")
    world.until(lambda: "SOURCE_TABLE_UNPUBLISHED" in [e["code"] for e in world.engine.status()["errors"]])
    healed(world, "away")
    world.sql("ALTER PUBLICATION headwater DROP TABLE away; DELETE FROM away WHERE id < 20")
    healed(world, "away")  # put in again by us


def test_a_table_that_becomes_a_partition_of_a_captured_one_stops_with_the_reason(world: World) -> None:
    """The stream has its changes under the root's name from then on: it would stand still without a word."""
    world.sql("CREATE TABLE whole (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)")
    world.sql("CREATE TABLE piece (id int PRIMARY KEY, v int); INSERT INTO piece VALUES (1, 0)")
    world.capture("public.piece", "piece")
    world.capture("public.whole", "whole")
    world.live("piece", "whole")
    world.sql("ALTER TABLE whole ATTACH PARTITION piece FOR VALUES FROM (0) TO (10)")
    world.sql("UPDATE piece SET v = 1; INSERT INTO whole VALUES (2, 0)")
    error = failed_with(world, "piece", "SOURCE_PUBLICATION", "is a partition of public.whole")
    assert "capture public.whole" in error["hint"]
    assert world.state("whole") == "live"
    world.engine.execute("RESYNC whole")
    world.until(lambda: world.rows("whole") == world.source_rows("whole"))


def test_a_publication_that_left_out_updates_for_a_while_is_noticed_and_its_tables_copied_anew(world: World) -> None:
    make(world, "partly")
    world.live("partly")
    world.sql("ALTER PUBLICATION headwater SET (publish = 'insert')")
    world.sql("UPDATE partly SET a = 1 WHERE id = 20; DELETE FROM partly WHERE id < 10")
    world.sql("ALTER PUBLICATION headwater SET (publish = 'insert, update, delete, truncate')")
    world.until(lambda: "SOURCE_TABLE_UNPUBLISHED" in [e["code"] for e in world.engine.status()["errors"]])
    healed(world, "partly")


def test_a_table_made_again_in_a_published_schema_is_copied_anew_and_a_renamed_one_followed(world: World) -> None:
    make_it = "CREATE TABLE apart.twice (id int PRIMARY KEY, v int); INSERT INTO apart.twice VALUES (1, {})"
    if world.db.info.server_version < 150_000:
        pytest.skip("schemas are published since Postgres 15")
    world.sql("CREATE SCHEMA apart; ALTER PUBLICATION headwater ADD TABLES IN SCHEMA apart")
    world.sql(make_it.format(1))
    world.capture("apart.twice", "twice")
    world.live("twice")
    world.sql("DROP TABLE apart.twice")
    world.sql(make_it.format(2))
    world.until(lambda: world.rows("twice") == [(1, 2)])
    assert "SOURCE_TABLE_REPLACED" in [e["code"] for e in world.engine.status()["errors"]]
    world.live("twice")
    world.sql("ALTER TABLE apart.twice RENAME TO once; UPDATE apart.once SET v = 3")
    world.until(lambda: "SOURCE_TABLE_RENAMED" in [e["code"] for e in world.engine.status()["errors"]])
    world.assert_equal("apart.once", "twice")
    world.sql(make_it.format(4))
    world.until(lambda: world.rows("twice") == [(1, 4)])
    world.live("twice")


@pytest.mark.slow
def test_a_publication_that_was_dropped_is_made_again_and_every_table_copied_anew(world: World) -> None:
    make(world, "published")
    world.live("published")
    world.sql("DROP PUBLICATION headwater")
    world.sql("UPDATE published SET a = 0; DELETE FROM published WHERE id = 1")
    world.until(lambda: "SOURCE_PUBLICATION_LOST" in [e["code"] for e in world.engine.status()["errors"]])
    healed(world, "published")


def test_generated_columns_are_left_out_with_a_notice_or_refused_by_name(world: World) -> None:
    kind = "VIRTUAL" if world.db.info.server_version >= 180_000 else "STORED"  # those of the other kind 18 sends
    world.sql(f"CREATE TABLE gen (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) {kind}, v text)")
    world.sql("INSERT INTO gen (id, v) VALUES (1, 'x')")
    with pytest.raises(UsageError) as caught:
        world.engine.execute("CREATE TABLE gen (id, twice) FROM shop TABLE 'public.gen'")
    assert (caught.value.code, "twice" in caught.value.message) == ("GENERATED_COLUMN", True)
    world.capture("public.gen", "gen")
    world.live("gen")
    world.sql("INSERT INTO gen (id, v) VALUES (2, NULL); UPDATE gen SET id = 3 WHERE id = 1")
    world.settle()
    assert world.rows("gen") == [(2, None), (3, "x")]
    assert [e["code"] for e in world.engine.status()["errors"] if e["name"] == "gen"] == ["COLUMNS_LEFT_OUT"]
