"""Recoveries of the lane and cut connections while a table is copied: nothing of it is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from cdc_world import World, open_world

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("recovery") / "data") as found:
        yield found


def test_recoveries_and_cut_connections_during_the_backfill_lose_nothing(world: World) -> None:
    world.sql("CREATE TABLE rough (id bigint PRIMARY KEY, v int, big text)")
    world.sql("INSERT INTO rough SELECT i, 0, repeat('x', 3000) FROM generate_series(1, 3000) i; ANALYZE rough")
    world.capture("public.rough", "rough", "backfill.num_rows_per_split='200', backfill.rate_limit='300'")
    world.until(lambda: any(s["state"] == "HANDED_OVER" for s in world.splits("rough")))
    for i in range(1, 9):
        world.sql(f"UPDATE rough SET v = v + 1 WHERE id % {i + 1} = 0")
        world.sql(f"UPDATE rough SET id = -id WHERE id = {i * 300}")
        if i % 2:
            world.engine.execute("RECOVER")
        else:
            world.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'headwater%'")
        time.sleep(0.7)
    world.engine.execute("ALTER TABLE rough SET BACKFILL_RATE_LIMIT = 1000000")
    world.live("rough")
    world.assert_equal("rough", "rough")
    assert {s["state"] for s in world.splits("rough")} == {"HANDED_OVER"}
