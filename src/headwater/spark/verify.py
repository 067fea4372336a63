"""Count and checksum of a table's rows, by split: what `verify` compares. Rows stay in Spark's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headwater.backfill.cdc.mark import split_index
from headwater.connectors.postgres.types import ColumnPlan
from headwater.model.schema import ROW_NO, Schema, quoted
from headwater.spark.batches import map_batches
from headwater.spark.capture import typed_bounds


def checksums(
    frame: DataFrame, schema: Schema, key: tuple[ColumnPlan, ...], bounds: tuple[tuple[str, ...], ...]
) -> dict[int, tuple[int, str, str]]:
    """By index of the split: rows, and two sums over a 64-bit hash of every row that do not depend on their order."""
    columns = [F.col(quoted(n)) for n in schema.names if n != ROW_NO]  # which of several equal rows: says nothing
    # The hash alone passes over NULLs: which columns are NULL goes in as well.
    row = F.xxhash64(*columns, *[c.isNull() for c in columns])
    hashed = frame.select(*[F.col(quoted(k)) for k in schema.key], row.alias("_hw_hash"))
    numbered = _numbered(hashed, schema.key, key, bounds) if bounds else hashed.withColumn("_hw_split", F.lit(0))
    sums = numbered.groupBy("_hw_split").agg(
        F.count("*").alias("n"),
        F.sum(F.col("_hw_hash").cast("decimal(38,0)")).cast("string").alias("total"),
        F.bit_xor("_hw_hash").cast("string").alias("mixed"),
    )
    return {int(r["_hw_split"]): (int(r["n"]), str(r["total"]), str(r["mixed"])) for r in sums.collect()}


def _numbered(
    frame: DataFrame, names: tuple[str, ...], key: tuple[ColumnPlan, ...], bounds: tuple[tuple[str, ...], ...]
) -> DataFrame:
    def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        edges: Any = typed_bounds(key, bounds)
        for batch in batches:
            columns = [batch.column(n).cast(plan.arrow_type) for n, plan in zip(names, key, strict=True)]
            split = pa.array(split_index(columns, edges), pa.int64())
            yield pa.RecordBatch.from_arrays([split, batch.column("_hw_hash")], names=["_hw_split", "_hw_hash"])

    return map_batches(frame, work, "_hw_split bigint, _hw_hash bigint")


def in_splits(
    names: tuple[str, ...], key: tuple[ColumnPlan, ...], bounds: tuple[tuple[str, ...], ...], wanted: tuple[int, ...]
) -> Callable[[DataFrame], DataFrame]:
    """A filter that keeps the rows of some splits, by their index."""

    def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        edges: Any = typed_bounds(key, bounds)
        for batch in batches:
            columns = [batch.column(n).cast(plan.arrow_type) for n, plan in zip(names, key, strict=True)]
            yield batch.filter(pa.array(np.isin(split_index(columns, edges), wanted)))

    return lambda frame: map_batches(frame, work, frame.schema)
