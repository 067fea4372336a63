"""A view that is being created, phase by phase: killed, held, ended; black-box, over a table under writes.

After a kill creation goes on where it was, and at committed epochs since the view is live it equals its query.
HEADWATER_KILL_SEED plays a printed seed again.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from creation_world import QUERIES, CreationWorld, bag
from engine_process import SqlError, wait_until

pytestmark = pytest.mark.spark
RATE = 40  # rows per second: the snapshot takes some ten seconds, in which the log grows to several more
INSIDE_A_VNODE = r"Snapshot \[\d/4 vnodes, [1-9]"
AT_THE_MERGE = "Finishing|^live"  # it lasts for one barrier of the main lane, which a look at the progress may miss
HELD_S = 120.0
NAP_S = 2.0  # of each barrier: longer than a look at the progress takes


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., CreationWorld]]:
    worlds: list[CreationWorld] = []

    def make(*settings: str) -> CreationWorld:
        seed = int(os.environ.get("HEADWATER_KILL_SEED") or random.SystemRandom().randrange(10**6))
        print(f"HEADWATER_KILL_SEED={seed}")
        worlds.append(CreationWorld(tmp_path, seed, *settings))
        return worlds[0]

    yield make
    for one in worlds:
        one.engine.stop()


def killed_in(world: CreationWorld, name: str, strategy: str, phase: str, rate: int | None) -> None:
    """Create a view, kill the engine in a phase, start it again; it goes on, becomes live, and is right."""
    with world.writing():
        world.create(name, QUERIES[strategy], rate)
        world.until_phase(name, phase)
        before = world.progress(name)
        world.engine.kill()
    world.engine.start()
    after = world.progress(name)
    assert world.state(name) in ("creating", "live")
    assert after["rows"] >= before["rows"], f"killed at {before}, went on at {after}"
    if world.state(name) == "creating" and before["phase"].startswith("LogStore"):
        assert not after["phase"].startswith("Snapshot"), f"killed at {before}, went on at {after}"
    with world.writing():
        world.until_live(name)
    assert world.check(name, QUERIES[strategy]) >= 1


def test_a_creation_that_is_killed_inside_a_vnode_goes_on_there(world: Callable[..., CreationWorld]) -> None:
    killed_in(world(), "half", "rowwise", INSIDE_A_VNODE, RATE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "phase", "rate"),
    [
        ("algebraic", r"Snapshot \[0/4 vnodes, 0/", RATE),
        ("algebraic", INSIDE_A_VNODE, RATE),
        ("rowwise", "LogStore", RATE),
        ("algebraic", "LogStore", RATE),
        ("affected", AT_THE_MERGE, None),
        ("rowwise", AT_THE_MERGE, 10_000),
    ],
)
def test_a_creation_goes_on_after_a_kill_in_each_phase(
    world: Callable[..., CreationWorld], strategy: str, phase: str, rate: int | None
) -> None:
    killed_in(world(), "killed", strategy, phase, rate)


def stands_still(world: CreationWorld, name: str, why: str) -> None:
    """It says why, and from then on no row is read."""
    wait_until(lambda: why in str(world.progress(name)["waiting_for"]), HELD_S, f"{name} says {why}")
    wait_until(lambda: repeats(world, name), HELD_S, f"{name} stands still")


def repeats(world: CreationWorld, name: str) -> bool:
    """Whether two looks, some epochs apart, see the same place."""
    first = place(world.progress(name))
    world.sql("FLUSH; FLUSH; FLUSH")
    return first == place(world.progress(name))


def place(progress: dict[str, Any]) -> tuple[str, int]:
    return re.sub(r"lag [\d.]+ s", "", str(progress["phase"])), int(progress["rows"])


@pytest.mark.slow
@pytest.mark.parametrize("phase", [INSIDE_A_VNODE, "LogStore"], ids=["snapshot", "log"])
def test_a_creation_can_be_held_rescaled_and_ended_in_each_phase(
    world: Callable[..., CreationWorld], phase: str
) -> None:
    here = world("retention_s=2")  # what a held creation needs is kept by its pin, not by the retention
    query = QUERIES["algebraic"]
    with here.writing():
        here.create("held", query, RATE)
        here.until_phase("held", phase)
    here.sql("ALTER MATERIALIZED VIEW held SET BACKFILL_RATE_LIMIT = 0")
    stands_still(here, "held", "rate limit is 0")
    for _ in range(40):  # that many deltas are merged, and what they were merged from is garbage for all but the view
        here.change()
    here.sql("FLUSH; PAUSE; ALTER MATERIALIZED VIEW held SET BACKFILL_RATE_LIMIT = 200")
    stands_still(here, "held", "paused")
    here.sql("ALTER SYSTEM SET retention_s = 3600; ALTER MATERIALIZED VIEW held SET PARALLELISM = 1; RESUME")
    with here.writing():
        here.until_live("held")
    assert here.check("held", query) >= 1
    for end in ("CANCEL JOBS {id}", "DROP MATERIALIZED VIEW ended"):
        with here.writing():
            here.create("ended", QUERIES["rowwise"], RATE)
            here.until_phase("ended", phase)
        job = here.sql("SELECT id FROM hw_catalog.hw_jobs WHERE name = 'ended'")[0]["id"]
        here.sql(end.format(id=job))
        assert here.state("ended") is None
        left = "SELECT * FROM hw_catalog.hw_segments WHERE table_name = 'ended' AND removed_epoch IS NULL"
        assert here.sql(left) == []


@contextlib.contextmanager
def slow_main_lane(world: CreationWorld, folder: Path) -> Iterator[None]:
    """A live view keeps each barrier of the main lane busy for a while: what asks to join it has to wait."""
    file = folder / "naps.py"
    file.write_text(f"import time\n\ndef nap(n):\n    time.sleep({NAP_S})\n    return n\n")
    world.sql(f"CREATE FUNCTION nap(n BIGINT) RETURNS BIGINT LANGUAGE PYTHON AS '{file}:nap'")
    world.sql(
        "CREATE TABLE sleepy (id BIGINT PRIMARY KEY); CREATE MATERIALIZED VIEW naps AS SELECT nap(id) FROM sleepy"
    )
    over = threading.Event()

    def write() -> None:
        number = 0
        with contextlib.suppress(httpx.HTTPError, SqlError):  # [PAUSED]
            while not over.is_set():
                number += 1
                world.sql(f"INSERT INTO sleepy VALUES ({number}); FLUSH")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=60)


def is_finishing(world: CreationWorld, name: str) -> bool:
    """By what the page shows: a query would wait for the writes before it, and so miss the phase."""
    jobs = world.engine.http.get("/status").json()["jobs"]
    return any(job["name"] == name and str(job["phase"]).startswith("Finishing") for job in jobs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hold", "states"),
    [
        ("PAUSE", {"paused"}),
        ("ALTER MATERIALIZED VIEW held SET BACKFILL_RATE_LIMIT = 0", {"creating", "live"}),
        ("DROP MATERIALIZED VIEW held", {None}),
    ],
    ids=["pause", "limit", "drop"],
)
def test_a_creation_can_be_held_and_ended_while_it_waits_for_the_main_lane(
    world: Callable[..., CreationWorld], tmp_path: Path, hold: str, states: set[str | None]
) -> None:
    """Its entry rides with the hold or before it: the view is live and right from then on, or it waits and says so."""
    here, query = world(), QUERIES["algebraic"]
    with slow_main_lane(here, tmp_path):
        here.create("held", query, 100_000)
        wait_until(lambda: is_finishing(here, "held"), HELD_S, "the view waits for the main lane")
        here.sql(hold)
    found = here.state("held")
    assert found in states
    if found is None:
        left = "SELECT * FROM hw_catalog.hw_segments WHERE table_name = 'held' AND removed_epoch IS NULL"
        assert here.sql(left) == []
        here.create("held", query, None)  # nothing of the first is in the way
    elif found == "creating":
        stands_still(here, "held", "rate limit is 0")
    here.sql("RESUME")
    here.change()
    here.until_live("held")
    here.change()
    assert here.check("held", query, epochs=2) >= 1


@pytest.mark.slow
def test_an_input_is_dropped_under_a_creation_only_with_cascade(world: Callable[..., CreationWorld]) -> None:
    here = world()
    with here.writing():
        here.create("over", QUERIES["affected"], 0)
    with pytest.raises(SqlError, match="DEPENDANTS_EXIST"):
        here.sql("DROP TABLE names")
    here.sql("DROP TABLE names CASCADE")
    assert here.state("over") is None
    assert here.state("names") is None


@pytest.mark.slow
def test_what_a_failed_view_has_not_read_outlives_the_retention_and_a_kill(world: Callable[..., CreationWorld]) -> None:
    here = world("retention_s=2")
    query = "SELECT id, g, 1000 / v AS q FROM many WHERE v IS NOT NULL"
    here.sql("UPDATE many SET v = 1 WHERE v = 0; FLUSH")
    here.create("ratio", query, None)
    here.until_live("ratio")
    here.sql("INSERT INTO many VALUES (-1, 1, 0); FLUSH")  # no change picks a negative key: it would mend the row
    wait_until(lambda: here.state("ratio") == "failed", HELD_S, "the view stops")
    for _ in range(40):  # that many deltas are merged, and what they were merged from is garbage for all but the view
        here.change()
    time.sleep(4)  # twice the retention
    here.engine.kill()
    here.engine.start()
    assert here.state("ratio") == "failed"
    here.sql("UPDATE many SET v = 1 WHERE v = 0; FLUSH; RECOVER")
    wait_until(lambda: here.state("ratio") == "live", HELD_S, "the view resumes")
    assert bag(here.sql("SELECT * FROM ratio")) == bag(here.sql(query))
