"""Arrow batches inside a worker: Spark sends small ones (`width.py`), what is done with them is worth more rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

Work = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def map_batches(frame: DataFrame, work: Work, result: str | StructType) -> DataFrame:
    """`mapInArrow`, which takes no column whose name has a dot or a quote in it."""
    names = frame.columns
    if all(name.isidentifier() for name in names):
        return frame.mapInArrow(work, result)

    def named(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return work(batch.rename_columns(names) for batch in batches)

    return frame.toDF(*[f"_{i}" for i in range(len(names))]).mapInArrow(named, result)


def gathered(batches: Iterable[pa.RecordBatch], rows: int, size: int) -> Iterator[pa.Table]:
    """The same rows in tables of that many rows or bytes, and the rest; nothing for no rows."""
    waiting: list[pa.RecordBatch] = []
    waiting_rows = waiting_size = 0
    for batch in batches:
        if batch.num_rows == 0:
            continue
        waiting.append(batch)
        waiting_rows += batch.num_rows
        waiting_size += batch.nbytes
        if waiting_rows >= rows or waiting_size >= size:
            yield pa.Table.from_batches(waiting)
            waiting, waiting_rows, waiting_size = [], 0, 0
    if waiting:
        yield pa.Table.from_batches(waiting)
