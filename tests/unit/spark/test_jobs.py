"""What runs on Spark is counted by stage and cancelled by stage and subject."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headwater.spark.jobs import JobRunner


def test_reads_of_all_tables_are_one_stage_and_those_of_one_can_be_cancelled() -> None:
    counted: list[tuple[str, int]] = []
    cancelled: list[str] = []
    context = SimpleNamespace(
        setJobGroup=lambda *_, **__: None,
        setLocalProperty=lambda *_: None,
        cancelJobGroup=cancelled.append,
        statusTracker=lambda: SimpleNamespace(getJobIdsForGroup=lambda _: [1]),
    )
    spark: Any = SimpleNamespace(_sc=context)
    runner = JobRunner(spark, lambda stage, jobs: counted.append((stage, jobs)))

    def inside() -> None:
        runner.cancel("backfill-7-")

    runner.run_blocking("backfill", "backfill", inside, 7)
    runner.run_blocking("backfill", "backfill", inside, 71)
    for stage in ("table", "view", "tables", "query"):
        runner.run_blocking("query", stage, lambda: runner.cancel("", but=("table", "view")))
    runner.close()
    assert cancelled == ["headwater-backfill-7-1", "headwater-tables-5", "headwater-query-6"]
    assert counted[:2] == [("backfill", 1), ("backfill", 1)]


@pytest.mark.parametrize(("exit_code", "code"), [(52, "SPARK_OUT_OF_MEMORY"), (-9, "SPARK_LOST"), (1, "SPARK_LOST")])
def test_a_driver_that_had_too_little_memory_is_told_from_one_that_is_gone(exit_code: int, code: str) -> None:
    codes: list[int | None] = [None, exit_code, exit_code]
    process = SimpleNamespace(poll=lambda: codes.pop(0))
    spark: Any = SimpleNamespace(_sc=SimpleNamespace(_gateway=SimpleNamespace(proc=process)))
    runner = JobRunner(spark, lambda *_: None)
    assert runner.alive()
    assert not runner.alive()
    assert runner.lost().code == code
    runner.close()
