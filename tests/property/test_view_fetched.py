"""Views that are refreshed by a prepared plan, over segments, equal a fresh query after every epoch.

Inputs of any size count as large here, so that all rows come by values; a view of whose refresh that cannot be is
refreshed in the other way, in the same call. HEADWATER_VIEW_EXAMPLES and HEADWATER_VIEW_SEED as in
`test_view_refresh.py`: each example has some views.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from view_grammar import MAKE, SCHEMAS, Grammar
from view_harness import MemoryTable, interpreted, random_changes
from view_segments import SegmentWorld

pytestmark = pytest.mark.spark
SLOW = bool(os.environ.get("HEADWATER_SLOW_TESTS"))
SHARE = 5 if SLOW else 25  # of as many as there: an example takes half a minute and more
EXAMPLES = max(1, int(os.environ.get("HEADWATER_VIEW_EXAMPLES", "25")) // SHARE)
FIRST = int(os.environ.get("HEADWATER_VIEW_SEED", "0"))
VIEWS = 6 if SLOW else 4
EPOCHS = 3 if SLOW else 2
FETCHED: list[int] = []  # of each refresh how many views were refreshed by the prepared plan


@pytest.fixture(autouse=True)
def _small_is_large(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from headwater.spark import view_fetched, view_job

    monkeypatch.setattr(view_fetched, "WHOLE_ROWS", 0)
    run = view_fetched.run

    def counted(core: Any, session: Any, frame: Any, works: Any) -> Any:
        FETCHED.append(len(works))
        return run(core, session, frame, works)

    monkeypatch.setattr(view_job.view_fetched, "run", counted)
    with interpreted(spark):
        yield


@pytest.mark.parametrize("seed", range(FIRST, FIRST + EXAMPLES), ids=lambda seed: f"seed{seed}")
def test_fetched_views_equal_a_fresh_query_after_every_epoch(spark: Any, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    tables = {
        name: MemoryTable(spark, schema, [MAKE[name](rng) for _ in range(12)]) for name, schema in SCHEMAS.items()
    }
    world = SegmentWorld(spark, tmp_path, tables)
    while len(world.views) < VIEWS:
        world.create(f"v{len(world.views)}", Grammar(rng).query())
    world.check()
    for epoch in range(EPOCHS):
        random_changes(rng, tables, MAKE)
        world.refresh()
        world.check()
        if epoch == 1:
            world.fold(rng.choice(sorted(tables)))


def test_a_view_that_wants_too_many_rows_is_refreshed_in_the_other_way_and_left_alone(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater.spark import fetch, view_fetched

    monkeypatch.setattr(view_fetched, "_too_many", {})
    rng = random.Random(5)
    rows = [{**MAKE["t"](rng), "id": i, "k": i % 2} for i in range(30)]
    tables = {"t": MemoryTable(spark, SCHEMAS["t"], rows)}
    world = SegmentWorld(spark, tmp_path, tables)
    view = world.create("kinds", "select k, count(distinct v) as n from t group by k")
    other = world.create("few", "select id, v from t where v > 1")
    before = len(FETCHED)
    for most, runs in ((100, 1), (5, 2), (100, 3)):
        monkeypatch.setattr(fetch, "MOST_FETCHED", most)
        tables["t"].begin()
        tables["t"].put({**rows[3], "v": most + runs})
        world.refresh()
        world.check()
        assert len(FETCHED) == before + runs
    assert FETCHED[-3:] == [2, 2, 1]
    assert view.job.id in view_fetched._too_many
    assert other.job.id not in view_fetched._too_many
    # What was too many is known of changes as large as that one: a much smaller one is tried again.
    until, changes = view_fetched._too_many[view.job.id]
    monkeypatch.setitem(view_fetched._too_many, view.job.id, (until, 3 * changes))
    tables["t"].begin()
    tables["t"].put({**rows[3], "v": 7})
    world.refresh()
    world.check()
    assert FETCHED[-1] == 2


def test_some_of_the_random_views_were_fetched() -> None:
    """Otherwise the test above would say little; it runs after it."""
    assert sum(FETCHED) >= EXAMPLES * EPOCHS, FETCHED
