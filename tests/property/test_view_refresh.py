"""Random queries out of a grammar, random changes: after each epoch a refreshed view equals a fresh query.

Each case is a seed, printed in its name: `pytest -k seed17` replays it. HEADWATER_VIEW_EXAMPLES sets how many there
are, HEADWATER_VIEW_SEED where they begin.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from view_grammar import MAKE, SCHEMAS, Grammar
from view_harness import Live, MemoryTable, interpreted, random_changes

pytestmark = pytest.mark.spark
EXAMPLES = int(os.environ.get("HEADWATER_VIEW_EXAMPLES", "25"))
FIRST = int(os.environ.get("HEADWATER_VIEW_SEED", "0"))
EPOCHS = 2
CHANGES: dict[int, int] = {}  # seed -> rows that its refreshes gave


@pytest.fixture(autouse=True)
def _quick(spark: Any) -> Iterator[None]:
    with interpreted(spark):
        yield


@pytest.mark.parametrize("seed", range(FIRST, FIRST + EXAMPLES), ids=lambda seed: f"seed{seed}")
def test_random_view_equals_a_fresh_query_after_every_epoch(spark: Any, seed: int) -> None:
    rng = random.Random(seed)
    sql = Grammar(rng).query()
    tables = {
        name: MemoryTable(spark, schema, [MAKE[name](rng) for _ in range(12)]) for name, schema in SCHEMAS.items()
    }
    live = Live(spark, sql, tables)
    live.check()
    changes = 0
    for _ in range(EPOCHS):
        random_changes(rng, tables, MAKE)
        changes += live.refresh()
        live.check()
    CHANGES[seed] = changes


def test_most_of_the_random_views_did_change() -> None:
    """Otherwise the test above would say little; it runs after it."""
    if len(CHANGES) < 10:
        pytest.skip("too few examples to judge")
    assert sum(count > 0 for count in CHANGES.values()) >= 0.7 * len(CHANGES), CHANGES
