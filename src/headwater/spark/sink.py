"""The data plane of sinks: makes the batch that a sink gets, and runs a sink's writing as one Spark job.

`sink/sink.py` has the contract, the connectors have what a task does with its Arrow batches. Rows of a DataFrame never
pass through the driver: a task hands back one small JSON line (counts, file names). An error inside a task comes back
as data, not as a stack trace, so that no row value leaks into a message and a definite error is not retried by Spark.
Rows that are in the engine's memory already (`sink/batch.py`) go through the same task, here and now.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headwater import errors
from headwater.errors import HeadwaterError, IndeterminateError, TransientError
from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, VNODE, quoted
from headwater.sink.batch import RowBatch
from headwater.spark.batches import gathered, map_batches


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """Which task of the job this is; `attempt` is unique in the Spark application, also among retries and
    speculation. Rows in memory are one task (0, 0), which is run once.
    """

    partition: int
    attempt: int


SinkTask = Callable[[Iterator[pa.RecordBatch], TaskInfo], dict[str, Any]]
# What a task gets at once: what it does for a batch, a statement or a file, is worth that many rows.
TASK_ROWS: Final = 65_536
TASK_BYTES: Final = 16 * 1024 * 1024


def run_tasks(
    batch: DataFrame | RowBatch, task: SinkTask, *, at_most: int | None = None, commits: bool = False
) -> list[dict[str, Any]]:
    """Run `task` over every partition in one job; the results of the successful attempts, in partition order.

    `at_most` bounds the tasks, for a target that takes no more connections. With `commits` the tasks publish: an error
    that nobody foresaw then leaves the outcome open.
    """
    unforeseen = IndeterminateError if commits else TransientError
    if isinstance(batch, RowBatch):
        lines = [_guarded(task, _larger(iter(batch.rows.to_batches())), unforeseen)]
    else:
        lines = _by_spark(batch if at_most is None else batch.coalesce(at_most), task, unforeseen)
    results = [json.loads(line) for line in lines]
    failed = [r["error"] for r in results if "error" in r]
    if failed:
        # What is not known comes first, as nothing else may be done then. A definite error explains more than the lost
        # connections that it may have caused elsewhere.
        failed.sort(key=lambda e: (e["type"] != "IndeterminateError", e["type"] == "TransientError"))
        raise _rebuild(failed[0])
    return sorted(results, key=lambda r: int(r["partition"]))


def _by_spark(df: DataFrame, task: SinkTask, unforeseen: type[HeadwaterError]) -> list[str]:
    def partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"result": [_guarded(task, _larger(batches), unforeseen)]})

    return [row.result for row in map_batches(df, partition, "result STRING").collect()]


def _larger(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for rows in gathered(batches, TASK_ROWS, TASK_BYTES):
        yield from rows.combine_chunks().to_batches()


def _guarded(task: SinkTask, batches: Iterator[pa.RecordBatch], unforeseen: type[HeadwaterError]) -> str:
    from pyspark import TaskContext

    context = TaskContext.get()
    info = TaskInfo(context.partitionId(), context.taskAttemptId()) if context is not None else TaskInfo(0, 0)
    try:
        result = task(batches, info)
    except HeadwaterError as error:
        result = {"error": {"type": type(error).__name__, **error.as_dict()}}
    except Exception as error:
        message = f"a sink task failed with {type(error).__name__}"
        wrapped = unforeseen("SINK_TASK_FAILED", message)
        result = {"error": {"type": unforeseen.__name__, **wrapped.as_dict()}}
    return json.dumps({"partition": info.partition, "attempt": info.attempt, **result})


def _rebuild(error: dict[str, str]) -> HeadwaterError:
    cls = getattr(errors, error["type"], TransientError)
    rebuilt: HeadwaterError = cls(error["code"], error["message"], detail=error["detail"], hint=error["hint"])
    return rebuilt


def numbered_tasks(count: int, like: DataFrame | RowBatch | None) -> DataFrame | RowBatch:
    """For `run_tasks`: tasks that have no rows but their number, in the column `id`; they run where a batch's did."""
    if isinstance(like, RowBatch):
        return RowBatch(pa.table({"id": pa.array(range(count), pa.int64())}))
    spark = SparkSession.active() if like is None else like.sparkSession
    return spark.range(0, count, 1, count)


def sliced(df: DataFrame | RowBatch, by: Sequence[str], count: int, name: str) -> DataFrame | RowBatch:
    """The rows with the number of their slice, 0 to `count` - 1: a function of the values of `by` alone.

    By `_vnode` it is the vnode's number modulo `count`; the column is then taken away.
    """
    if isinstance(df, RowBatch):
        assert count == 1, "Spark's hash is not to be had here"
        return RowBatch(df.rows.append_column(name, pa.repeat(pa.scalar(0, pa.int32()), df.rows.num_rows)))
    if count == 1:
        return df.drop(VNODE).withColumn(name, F.lit(0))
    if tuple(by) == (VNODE,):
        return df.withColumn(name, F.pmod(F.col(VNODE), F.lit(count))).drop(VNODE)
    df = df.drop(VNODE)
    # Spark hashes no maps; their JSON text is the same for the same segments.
    kinds = dict(df.dtypes)
    values = [F.to_json(quoted(c)) if "map<" in kinds[c] else F.col(quoted(c)) for c in by]
    return df.withColumn(name, F.pmod(F.xxhash64(*values), F.lit(count)).cast("int"))


def net_by_key(changes: DataFrame, key: Sequence[str]) -> DataFrame:
    """One row per sink key, for a sink key that is not the table's own key.

    `changes` is `changes_with_old(E1, E2)`: a delete carries its old row, an update is both. A key that some row has
    after the batch is an upsert; a key that rows only left is a delete. Two live rows with one sink key are the
    user's error in `primary_key`; the one with the greatest remaining columns wins, so that a replay gives the same.
    """
    others = [c for c in changes.columns if c not in key and c != OP]
    # Maps have no order; they take part in the row but not in the choice.
    ordered = [c for c, t in changes.dtypes if c in others and "map<" not in t]
    rank = F.struct((F.col(OP) == OP_UPSERT).alias("live"), *[F.col(quoted(c)) for c in ordered])
    row = F.struct(F.col(OP), *[F.col(quoted(c)) for c in others])
    grouped = changes.groupBy(*[F.col(quoted(k)) for k in key]).agg(F.max_by(row, rank).alias("_hw_row"))
    picked = {c: F.col("_hw_row").getField(c) for c in (*others, OP)}
    return grouped.select(*[F.col(quoted(c)) if c in key else picked[c].alias(c) for c in changes.columns])


def appended(changes: DataFrame, *, force: bool) -> DataFrame:
    """The rows of an append-only delivery. Without `force`, a delete in the batch fails the task that sees it."""
    if force:
        return changes.where(F.col(OP) == OP_UPSERT)
    refuse = F.raise_error(F.lit("SINK_NOT_APPEND_ONLY")).cast("tinyint")
    return changes.withColumn(OP, F.when(F.col(OP) == OP_DELETE, refuse).otherwise(F.col(OP)))
