"""What a Postgres newer than Debian's 15 does otherwise, and what it must do alike: the embedded one, one engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc_world import World, open_world
from headwater.errors import UsageError

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("newer") / "data", "embedded") as found:
        yield found


def codes(world: World, name: str) -> list[str]:
    return [e["code"] for e in world.engine.status()["errors"] if e["name"] == name]


def verified(world: World, name: str) -> bool:
    found = world.engine.execute(f"VERIFY {name}")[0]
    assert found is not None and found.rows
    return all(row["equal"] for row in found.rows)


def holds(world: World, name: str, columns: str) -> None:
    """Our table has these columns of the source's, with its rows, and `verify` says the same."""
    wanted = sorted(world.db.execute(f"SELECT {columns} FROM {name}".encode()).fetchall(), key=repr)
    world.until(lambda: world.rows(name) == wanted and world.state(name) == "live")
    assert verified(world, name)


@pytest.mark.slow
def test_a_newer_server_streams_stored_generated_columns_and_tables_without_a_key(newer: World) -> None:
    newer.sql("CREATE TABLE gen (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)")
    newer.sql("CREATE TABLE bag (a int, b text); ALTER TABLE bag REPLICA IDENTITY FULL")
    newer.sql("INSERT INTO gen (id) VALUES (1), (2); INSERT INTO bag SELECT 1, 'x' FROM generate_series(1, 5)")
    newer.capture("public.gen", "gen")
    newer.capture("public.bag", "bag")
    newer.live("gen", "bag")
    newer.sql("UPDATE gen SET id = 7 WHERE id = 1; INSERT INTO gen (id) VALUES (9)")
    newer.sql("DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag)")
    newer.sql("INSERT INTO bag VALUES (1, 'x'), (2, NULL)")
    newer.sql("ALTER TABLE bag ADD c int DEFAULT 3; UPDATE bag SET a = 5 WHERE a = 2")
    newer.until(lambda: newer.rows("bag") == newer.source_rows("bag"))
    newer.assert_equal("gen", "gen")
    assert (9, 18) in newer.rows("gen")


def test_of_generated_columns_the_stored_are_copied_and_streamed_alike_and_the_virtual_left_out(newer: World) -> None:
    # Without a word of the kind a generated column is virtual since 18.
    newer.sql(
        "CREATE TABLE kinds (id int PRIMARY KEY, v text, kept text GENERATED ALWAYS AS (upper(v)) STORED,"
        " seen text GENERATED ALWAYS AS (lower(v)))"
    )
    newer.sql("INSERT INTO kinds (id, v) VALUES (1, 'Aa'), (2, NULL), (3, repeat('Xy', 5000))")
    with pytest.raises(UsageError) as caught:
        newer.engine.execute("CREATE TABLE kinds (id, seen) FROM shop TABLE 'public.kinds'")
    assert (caught.value.code, "seen" in caught.value.message) == ("GENERATED_COLUMN", True)
    newer.capture("public.kinds", "kinds")
    newer.live("kinds")
    assert codes(newer, "kinds") == ["COLUMNS_LEFT_OUT"]
    newer.sql("INSERT INTO kinds (id, v) VALUES (4, 'Dd'); UPDATE kinds SET id = 33 WHERE id = 3")
    newer.sql("DELETE FROM kinds WHERE id = 1; UPDATE kinds SET v = 'Bb' WHERE id = 2")
    newer.settle()
    holds(newer, "kinds", "id, v, kept")
    # One more virtual column is nothing that the stream tells of; an ordinary one is taken, also beside it.
    newer.sql("ALTER TABLE kinds ADD more int GENERATED ALWAYS AS (id + 1); UPDATE kinds SET v = 'Cc' WHERE id = 2")
    newer.settle()
    holds(newer, "kinds", "id, v, kept")
    newer.sql("ALTER TABLE kinds ADD plain int DEFAULT 5; UPDATE kinds SET v = 'Ee' WHERE id = 4")
    holds(newer, "kinds", "id, v, kept, plain")
    newer.engine.execute("RESYNC kinds")
    holds(newer, "kinds", "id, v, kept, plain")


@pytest.mark.slow
def test_stored_columns_that_the_publication_sends_no_longer_are_null_until_it_does_again(newer: World) -> None:
    newer.sql("CREATE TABLE told (id int PRIMARY KEY, v int, kept int GENERATED ALWAYS AS (v * 2) STORED)")
    newer.sql("INSERT INTO told (id, v) SELECT i, i FROM generate_series(1, 20) i")
    newer.capture("public.told", "told")
    newer.live("told")
    newer.sql("ALTER PUBLICATION headwater SET (publish_generated_columns = none); UPDATE told SET v = 7 WHERE id = 3")
    holds(newer, "told", "id, v, NULL::int")
    # Noticed by the publication, or by the next change, whichever is first.
    assert {"SOURCE_TABLE_UNPUBLISHED", "SOURCE_SCHEMA_CHANGED"} & set(codes(newer, "told"))
    newer.sql(
        "ALTER PUBLICATION headwater SET (publish_generated_columns = stored); UPDATE told SET v = 8 WHERE id = 4"
    )
    holds(newer, "told", "id, v, kept")
