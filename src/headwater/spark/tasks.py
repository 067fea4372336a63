"""Many small pieces of work as one Spark job: `spark.range(n, numPartitions=n).mapInArrow(…)`, no shuffle, n tasks.

A `Task` is a picklable value with `run()`; what it yields (JSON-ready dicts) comes back to the driver. A task may run
more than once (retry, speculation), so it writes only to fresh names, and only what came back counts. A definite error
inside a task comes back as a result with `error`, so that it stops one table and not the job; a transient one is raised
where the job was begun, as what it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql import SparkSession

from headwater.errors import DefiniteError, TransientError


class Task(Protocol):
    """One piece of work. `subject` names whom an error concerns (a job id)."""

    @property
    def subject(self) -> int: ...

    def run(self) -> Iterator[dict[str, Any]]: ...


def run_tasks(spark: SparkSession, groups: Sequence[Sequence[Task]]) -> list[dict[str, Any]]:
    """Run groups of tasks, one Spark task per group; results in the order of the groups."""
    groups = [list(g) for g in groups if g]
    if not groups:
        return []

    def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for index in batch.column(0).to_pylist():
                results = [json.dumps(r) for task in groups[index] for r in run_to_the_end(task)]
                yield pa.RecordBatch.from_pydict(
                    {"part": pa.array([index] * len(results), pa.int64()), "result": pa.array(results, pa.string())}
                )

    frame = spark.range(0, len(groups), numPartitions=len(groups)).mapInArrow(work, "part bigint, result string")
    rows = sorted(frame.collect(), key=lambda r: r.part)
    results = [json.loads(r.result) for r in rows]
    for failed in (r["failed"] for r in results if "failed" in r):
        raise TransientError(failed["code"], failed["message"], detail=failed["detail"], hint=failed["hint"])
    return results


def run_to_the_end(task: Task) -> Iterator[dict[str, Any]]:
    """The same, and a transient error as a result too: one that is raised reaches the driver as a text of Spark's."""
    try:
        yield from run_guarded(task)
    except TransientError as error:
        yield {"subject": task.subject, "failed": error.as_dict()}


def run_here(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """The same in this process, without Spark."""
    return [json.loads(json.dumps(r)) for task in tasks for r in run_guarded(task)]


def run_guarded(task: Task) -> Iterator[dict[str, Any]]:
    """The task's results, or its definite error as a result."""
    try:
        yield from task.run()
    except DefiniteError as error:
        yield {"subject": task.subject, "error": error.as_dict()}


def balanced(tasks: Sequence[tuple[int, Task]], slots: int) -> list[list[Task]]:
    """Spread (weight, task) over at most `slots` groups, heaviest first, each to the lightest group."""
    slots = max(1, min(slots, len(tasks)))
    groups: list[list[Task]] = [[] for _ in range(slots)]
    loads = [0] * slots
    for weight, task in sorted(tasks, key=lambda t: -t[0]):
        lightest = loads.index(min(loads))
        groups[lightest].append(task)
        loads[lightest] += max(1, weight)
    return groups
