"""TPC-H and Nexmark queries as views on small generated data under changes, each compared with a fresh query.

By default a share of them; all with `make test-long`.
"""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest

import view_nexmark
import view_tpch
from view_harness import Live, MemoryTable, interpreted, random_changes

pytestmark = pytest.mark.spark
_EPOCHS = 2
_MOST_EPOCHS = 10  # for a query whose result happened not to change in the first ones
_CHANGES = 20  # at most, per table and epoch
_DEFAULT = {
    "view_tpch": ("q4", "q5", "q13", "q17", "q22"),
    "view_nexmark": ("q3", "q4", "q9", "q16", "q18"),
}
CASES = [
    pytest.param(
        suite,
        name,
        id=f"{suite.__name__.removeprefix('view_')}-{name}",
        marks=[] if name in _DEFAULT[suite.__name__] else [pytest.mark.slow],
    )
    for suite in (view_tpch, view_nexmark)
    for name in suite.QUERIES
]


@pytest.mark.parametrize(("suite", "name"), CASES)
def test_benchmark_query_as_a_view_equals_a_fresh_query(spark: Any, suite: ModuleType, name: str) -> None:
    rng = random.Random(name)
    data = {
        table: MemoryTable(spark, schema, [suite.MAKE[table](rng) for _ in range(3 * suite.ROWS[table])])
        for table, schema in suite.SCHEMAS.items()
    }
    with interpreted(spark):
        live = Live(spark, suite.QUERIES[name], data)
        live.check()
        used = {table: data[table] for table in live.plan.inputs}
        shown, changes = len(live.rows), 0
        for epoch in range(_MOST_EPOCHS):
            if epoch >= _EPOCHS and changes > 0:
                break
            random_changes(rng, used, suite.MAKE, most=_CHANGES)
            changes += live.refresh()
            live.check()
            shown += len(live.rows)
    # A view that is empty or never changes would be equal to anything.
    assert shown > 0
    assert changes > 0
