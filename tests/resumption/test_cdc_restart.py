"""A restart of the engine while its source is down, in the middle of copies: what was shown stays, the rest follows.

One story, told by the fixture; each test looks at one thing that it must have left.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import headwater
from cdc_world import SOURCE, World
from headwater.testing.servers import PostgresServer
from postgres_versions import USUAL

pytestmark = [pytest.mark.postgres, pytest.mark.spark]
SETTINGS = {"barrier_interval_ms": "300"}


@dataclass
class Story:
    """What was seen: before the stop, while the source was down, at the end."""

    before: dict[str, Any] = field(default_factory=dict)
    down: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    rows: dict[str, Any] = field(default_factory=dict)
    splits: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    cursor: str = ""


def progress(engine: headwater.Engine) -> dict[str, Any]:
    result = engine.execute("SELECT * FROM hw_catalog.hw_progress")[0]
    assert result is not None
    return {r["name"]: r for r in result.rows}


def codes(engine: headwater.Engine) -> list[str]:
    return [e["code"] for e in engine.status()["errors"]]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    if not PostgresServer.available(USUAL):
        pytest.skip(f"no binaries of Postgres {USUAL} on this machine")
    data, story = tmp_path_factory.mktemp("restart") / "data", Story()
    with PostgresServer(USUAL) as server, mock.patch.dict(os.environ, {"HW_TEST_PASSWORD": server.password}):
        with headwater.Engine(data, master="local[2]", settings=SETTINGS) as engine:
            begin(World(server, engine), story)
        story.cursor = as_schema_v1(data)
        with server.connect() as db:
            db.execute("UPDATE old SET v = -1 WHERE id % 3 = 0; DELETE FROM done WHERE id = 1")
        server.stop()
        with headwater.Engine(data, master="local[2]", settings=SETTINGS) as engine:
            story.down = progress(engine)
            story.rows["done while down"] = engine.table("done").df().count()
            story.rows["part while down"] = engine.table("part").df().count()
            World.until_engine(engine, lambda: "SOURCE_UNREACHABLE" in codes(engine))
            server.start()
            finish(World(server, engine), story)
        yield story


def begin(world: World, story: Story) -> None:
    world.engine.execute(SOURCE.format(server=world.server, options=""))
    world.sql(
        "CREATE TABLE done (id int PRIMARY KEY, v int); INSERT INTO done SELECT i, i FROM generate_series(1, 50) i"
    )
    for name in ("part", "old"):
        world.sql(f"CREATE TABLE {name} (id int PRIMARY KEY, v int)")
        world.sql(f"INSERT INTO {name} SELECT i, i FROM generate_series(1, 1000) i; ANALYZE {name}")
    world.capture("public.done", "done")
    world.engine.execute("CREATE MATERIALIZED VIEW total AS SELECT count(*) AS n FROM done")
    world.capture("public.part", "part", "backfill.num_rows_per_split='100', backfill.rate_limit='100'")
    world.capture("public.old", "old", "backfill.parallelism='0', snapshot.batch_size='100', backfill.rate_limit='100'")
    world.live("done", "total")
    for name in ("part", "old"):
        world.until(lambda n=name: sum(s["state"] == "HANDED_OVER" for s in world.splits(n)) >= 3)
        world.engine.execute(f"ALTER TABLE {name} SET BACKFILL_RATE_LIMIT = 0")
    world.settle()
    story.before = progress(world.engine)
    story.splits["old before"] = world.splits("old")


def as_schema_v1(data: Path) -> str:
    """Put the state of `old` into the form of schema v1: one row, with the cursor."""
    with contextlib.closing(sqlite3.connect(data / "meta.db")) as db:
        (table_id,) = db.execute("SELECT id FROM jobs WHERE name = 'old'").fetchone()
        rows = db.execute(
            "SELECT right, row_count FROM splits WHERE table_id = ? AND state = 'HANDED_OVER' ORDER BY split_id",
            (table_id,),
        ).fetchall()
        state = {
            "pk": json.loads(rows[-1][0]),
            "finished": False,
            "row_count": sum(r[1] for r in rows),
            "offset": "0/0",
        }
        db.execute("DELETE FROM splits WHERE table_id = ?", (table_id,))
        db.execute("DELETE FROM job_states WHERE job_id = ? AND part = 'plan'", (table_id,))
        db.execute(
            "INSERT INTO job_states (job_id, part, epoch, value) SELECT job_id, 'backfill', epoch, ? FROM job_states "
            "WHERE job_id = ? LIMIT 1",
            (json.dumps(state), table_id),
        )
        db.commit()
    return str(state["pk"][0])


def finish(world: World, story: Story) -> None:
    world.until(lambda: world.engine.status()["sources"][0]["acknowledged"] is not None)
    for name in ("part", "old"):
        world.engine.execute(f"ALTER TABLE {name} SET BACKFILL_RATE_LIMIT = 1000000")
    world.live("done", "part", "old")
    world.settle()
    for name in ("done", "part", "old"):
        story.rows[name], story.source[name] = world.rows(name), world.source_rows(name)
        story.splits[name] = world.splits(name)
    story.after = progress(world.engine)
    story.errors = codes(world.engine)


def test_an_engine_starts_while_its_source_is_down_and_its_tables_can_be_read(story: Story) -> None:
    assert story.rows["done while down"] == 50
    assert story.rows["part while down"] >= 300


def test_a_source_that_is_down_is_shown_and_followed_again_when_it_is_back(story: Story) -> None:
    assert "SOURCE_UNREACHABLE" in story.errors
    for name in ("done", "part", "old"):
        assert story.rows[name] == story.source[name]


def test_progress_does_not_fall_over_a_restart(story: Story) -> None:
    for name in ("part", "old", "done", "total"):
        copied = ("rows",) if name in ("part", "old") else ()  # of those that are live it is what they hold
        for counter in ("done", "bytes", "total", *copied):
            before, down, after = (p[name][counter] for p in (story.before, story.down, story.after))
            assert before <= down <= after, (name, counter)
    assert story.before["part"]["done"] >= 3 and story.before["part"]["rows"] >= 300
    assert [p["done"]["rows"] for p in (story.before, story.down)] == [50, 50]


def test_jobs_that_are_live_say_so_after_a_restart_and_others_are_below_100_percent(story: Story) -> None:
    for name in ("shop", "done", "total"):
        assert (story.down[name]["phase"], story.down[name]["percent"]) == ("live", 100.0), name
    for name in ("part", "old"):
        assert story.before[name]["percent"] <= 99.99 and story.down[name]["percent"] <= 99.99
        assert story.after[name]["percent"] == 100.0


def test_a_single_cursor_hands_over_page_by_page(story: Story) -> None:
    pages = [s for s in story.splits["old before"] if s["state"] == "HANDED_OVER"]
    assert [s["row_count"] for s in pages] == [100] * len(pages)
    assert story.splits["old before"][-1]["right"] is None
    assert all(a["right"] == b["left"] for a, b in itertools.pairwise(story.splits["old before"]))


def test_state_of_schema_v1_becomes_a_split_up_to_the_cursor_and_fresh_ones_after_it(story: Story) -> None:
    first, *rest = story.splits["old"]
    assert (first["left"], first["right"]) == (None, json.dumps([story.cursor]))
    assert len(rest) == 10 - first["row_count"] // 100
    assert {s["state"] for s in story.splits["old"]} == {"HANDED_OVER"}
