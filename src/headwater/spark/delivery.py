"""The batches that sinks get: a snapshot, or the net changes of an epoch range, one row per sink key."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, Schema, quoted
from headwater.runtime.registry import schema_of
from headwater.sink.sink import SinkType
from headwater.spark.changes import difference
from headwater.spark.sink import appended, net_by_key
from headwater.spark.width import is_wide
from headwater.storage.checkpoint import JobRow


def snapshot_batch(core: Any, source: JobRow, epoch: int, options: Any, key: Sequence[str]) -> DataFrame:
    """All rows as of an epoch, as upserts."""
    schema = schema_of(source)
    segments = core.meta.segments_at(source.id, epoch)
    rows = core.reader(schema, wide=is_wide(segments)).snapshot(segments)
    rows = _visible(rows.withColumn(OP, F.lit(OP_UPSERT).cast("tinyint")), schema)
    return rows if options.type is SinkType.APPEND_ONLY or _own_key(schema, key) else net_by_key(rows, key)


def change_batch(core: Any, source: JobRow, after: int, upto: int, options: Any, key: Sequence[str]) -> DataFrame:
    """The net changes of (after, upto]."""
    schema = schema_of(source)
    segments = core.meta.change_segments(source.id, after, upto)
    own_key = _own_key(schema, key)
    reset = core.meta.was_reset(source.id, after, upto)
    read = [*segments, *core.meta.segments_at(source.id, after)] if reset or not own_key else segments
    reader = core.reader(schema, wide=is_wide(read))
    if reset:
        before = reader.snapshot(core.meta.segments_at(source.id, after))
        now = reader.snapshot(core.meta.segments_at(source.id, upto))
        rows = _visible(difference(before, now), schema)
        own_key = False
    elif options.type is SinkType.APPEND_ONLY:
        return appended(_visible(reader.changes(segments), schema), force=options.force_append_only)
    elif own_key:
        rows = _visible(reader.changes(segments), schema)
    else:
        before = reader.snapshot(core.meta.segments_at(source.id, after))
        rows = _visible(reader.changes_with_old(segments, before), schema)
    if options.type is SinkType.APPEND_ONLY:
        return appended(rows, force=options.force_append_only)
    return rows if own_key else net_by_key(rows, key)


def replay_batch(
    core: Any, source: JobRow, epoch: int, options: Any, key: Sequence[str], paths: Sequence[str]
) -> DataFrame:
    """Refused rows again: append-only as they were, else the rows that their keys have at an epoch."""
    schema = schema_of(source)
    reader = core.reader(schema, wide=True)  # few rows, and perhaps refused because they are long
    letters = reader.spark.read.parquet(*paths)
    visible = [quoted(c.name) for c in schema.visible]
    if options.type is SinkType.APPEND_ONLY:
        return letters.select(*visible, OP)
    keys = letters.select(*[F.col(quoted(k)).alias(f"_key{i}") for i, k in enumerate(key)]).distinct()
    there = reader.snapshot(core.meta.segments_at(source.id, epoch))
    marked = there.select(*visible, F.lit(True).alias("_there"))
    same = [marked[quoted(k)].eqNullSafe(keys[f"`_key{i}`"]) for i, k in enumerate(key)]
    found = keys.join(marked, reduce(lambda a, b: a & b, same), "left")
    op = F.when(F.col("_there"), F.lit(OP_UPSERT)).otherwise(F.lit(OP_DELETE)).cast("tinyint").alias(OP)
    numbers = {k: i for i, k in enumerate(key)}
    columns = [
        F.col(f"_key{numbers[c.name]}").alias(c.name) if c.name in numbers else F.col(quoted(c.name))
        for c in schema.visible
    ]
    rows = found.select(*columns, op)
    return rows if _own_key(schema, key) else net_by_key(rows, key)


def _own_key(schema: Schema, key: Sequence[str]) -> bool:
    """Whether the sink's key is the table's: then a change of the table is a change of the sink as it is."""
    return tuple(key) == schema.key


def _visible(rows: DataFrame, schema: Schema) -> DataFrame:
    return rows.select(*[quoted(c.name) for c in schema.visible], OP)
