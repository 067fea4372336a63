"""What happened to a captured table while no engine ran is healed at the next start, before that one has caught up."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from unittest import mock

import pytest

import headwater
from cdc_world import SOURCE, World
from headwater.testing.servers import PostgresServer
from postgres_versions import OTHERS, USUAL
from unreadable_slot import make_unreadable

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


def caught_up(server: PostgresServer, data: Path, *tables: str) -> list[str]:
    """As `run --until-caught-up` does: the tables are the source's then; gives the codes of what was found."""
    with headwater.Engine(data, master="local[2]", settings={"barrier_interval_ms": "300"}) as engine:
        World.until_engine(engine, lambda: engine.caught_up() or engine.given_up())
        assert not engine.given_up()
        world = World(server, engine)
        for name in tables or ("gap",):
            assert world.rows(name) == world.source_rows(name)
        return [e["code"] for e in engine.status()["errors"]]


@pytest.mark.slow
def test_a_gap_made_while_the_engine_was_away_is_healed_before_it_has_caught_up(tmp_path: Path) -> None:
    if not PostgresServer.available(USUAL):
        pytest.skip(f"no binaries of Postgres {USUAL} on this machine")
    data = tmp_path / "data"
    with PostgresServer(USUAL) as server, mock.patch.dict(os.environ, {"HW_TEST_PASSWORD": server.password}):
        server.execute("CREATE TABLE gap (id int PRIMARY KEY, v int)", "INSERT INTO gap VALUES (1, 1), (2, 2)")
        with headwater.Engine(data, master="local[2]") as engine:
            engine.execute(SOURCE.format(server=server, options=""))
            world = World(server, engine)
            world.capture("public.gap", "gap")
            world.live("gap")
        server.execute("ALTER PUBLICATION headwater DROP TABLE gap", "UPDATE gap SET v = 3 WHERE id = 1")
        server.execute("ALTER PUBLICATION headwater ADD TABLE gap")
        assert "SOURCE_TABLE_UNPUBLISHED" in caught_up(server, data)
        # A crash between the epoch with which a table failed and the beginning of the copy that heals it.
        with contextlib.closing(sqlite3.connect(data / "meta.db")) as meta, meta:
            meta.execute("UPDATE jobs SET state = 'failed' WHERE name = 'gap'")
            meta.execute(
                "INSERT INTO errors (at, job_id, name, code, message, hint, retrying) "
                "SELECT 0, id, name, 'ROW_UNKNOWN', '', '', 1 FROM jobs WHERE name = 'gap'"
            )
        server.execute("UPDATE gap SET v = 4 WHERE id = 2")
        caught_up(server, data)


@pytest.mark.slow
@pytest.mark.parametrize("version", [*OTHERS, "15", "embedded"])
def test_a_slot_that_cannot_be_decoded_any_more_is_found_at_a_start_and_healed_before_it_has_caught_up(
    tmp_path: Path, version: str
) -> None:
    if not PostgresServer.available(version):
        pytest.skip(f"no binaries of Postgres {version} on this machine")
    data, secret = tmp_path / "data", tmp_path / "secret"  # a file: Spark's workers have the environment of their start
    with PostgresServer(version) as server:
        secret.write_text(server.password)
        server.execute("CREATE TABLE gap (id int PRIMARY KEY, v int)", "CREATE TABLE other (id int PRIMARY KEY)")
        server.execute("INSERT INTO gap SELECT i, i FROM generate_series(1, 100) i", "INSERT INTO other VALUES (1)")
        with headwater.Engine(data, master="local[2]") as engine:
            source = SOURCE.format(server=server, options="")
            engine.execute(source.replace("${HW_TEST_PASSWORD}", f"${{file:{secret}}}"))
            world = World(server, engine)
            for name in ("gap", "other"):
                world.capture(f"public.{name}", name)
            world.live("gap", "other")
        writes = ["UPDATE gap SET v = v + 1 WHERE id > 50", "DELETE FROM gap WHERE id % 10 = 1", "DELETE FROM other"]
        make_unreadable(server, "headwater", "gap", writes, tmp_path / "slot")
        server.execute("INSERT INTO other VALUES (2)")
        assert "SOURCE_SLOT_UNREADABLE" in caught_up(server, data, "gap", "other")
        # Nothing of it is left at the next start.
        server.execute("UPDATE gap SET v = 0 WHERE id = 2", "INSERT INTO other VALUES (3)")
        caught_up(server, data, "gap", "other")
