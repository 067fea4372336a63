"""The batches that sinks get: a snapshot, or the net changes of an epoch range, one row per sink key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, VNODE, Schema, quoted
from headwater.runtime.registry import schema_of
from headwater.sink.sink import SinkType
from headwater.spark.changes import difference
from headwater.spark.segment import vnode_expression
from headwater.spark.sink import appended, net_by_key
from headwater.spark.width import is_wide
from headwater.storage.checkpoint import JobRow


@dataclass(frozen=True, slots=True)
class Part:
    """What a batch is asked to hold: the rows of some vnodes (None: of all), with `_vnode` if `numbered`.

    Both are only for changes that reach the sink row by row as the table has them; `numbered` is a wish.
    """

    vnodes: frozenset[int] | None = None
    numbered: bool = False


WHOLE: Final = Part()


def snapshot_batch(
    core: Any, source: JobRow, epoch: int, options: Any, key: Sequence[str], part: Part = WHOLE
) -> DataFrame:
    """All rows as of an epoch, as upserts."""
    schema = schema_of(source)
    segments = core.meta.segments_at(source.id, epoch)
    reader = core.reader(schema, wide=is_wide(segments))
    own = options.type is SinkType.APPEND_ONLY or _own_key(schema, key)
    rows = reader.snapshot(segments, vnodes=_vnodes(part, own))
    rows = rows.withColumn(OP, F.lit(OP_UPSERT).cast("tinyint"))
    return _numbered(rows, core, schema, part) if own else net_by_key(_visible(rows, schema), key)


def change_batch(
    core: Any, source: JobRow, after: int, upto: int, options: Any, key: Sequence[str], part: Part = WHOLE
) -> DataFrame:
    """The net changes of (after, upto]."""
    schema = schema_of(source)
    segments = core.meta.change_segments(source.id, after, upto)
    append_only = options.type is SinkType.APPEND_ONLY
    reset = core.meta.was_reset(source.id, after, upto)
    own = not reset and (append_only or _own_key(schema, key))
    read = segments if own else [*segments, *core.meta.segments_at(source.id, after)]
    reader = core.reader(schema, wide=is_wide(read))
    vnodes = _vnodes(part, own)
    if own:
        rows = _numbered(reader.changes(segments, vnodes), core, schema, part)
        return appended(rows, force=options.force_append_only) if append_only else rows
    before = reader.snapshot(core.meta.segments_at(source.id, after))
    if reset:
        changes = difference(before, reader.snapshot(core.meta.segments_at(source.id, upto)))
    else:
        changes = reader.changes_with_old(segments, before)
    rows = _visible(changes, schema)
    return appended(rows, force=options.force_append_only) if append_only else net_by_key(rows, key)


def replay_batch(
    core: Any, source: JobRow, epoch: int, options: Any, key: Sequence[str], paths: Sequence[str]
) -> DataFrame:
    """Refused rows again: append-only as they were, else the rows that their keys have at an epoch."""
    schema = schema_of(source)
    reader = core.reader(schema, wide=True)  # few rows, and perhaps refused because they are long
    letters = reader.spark.read.option("__globPaths__", "false").parquet(*paths)  # names, never patterns
    visible = [quoted(c.name) for c in schema.visible]
    if options.type is SinkType.APPEND_ONLY:
        return letters.select(*visible, OP)
    keys = letters.select(*[F.col(quoted(k)).alias(f"_hw_key{i}") for i, k in enumerate(key)]).distinct()
    there = reader.snapshot(core.meta.segments_at(source.id, epoch))
    marked = there.select(*visible, F.lit(True).alias("_hw_there"))
    same = [marked[quoted(k)].eqNullSafe(keys[f"`_hw_key{i}`"]) for i, k in enumerate(key)]
    found = keys.join(marked, reduce(lambda a, b: a & b, same), "left")
    op = F.when(F.col("_hw_there"), F.lit(OP_UPSERT)).otherwise(F.lit(OP_DELETE)).cast("tinyint").alias(OP)
    numbers = {k: i for i, k in enumerate(key)}
    columns = [
        F.col(f"_hw_key{numbers[c.name]}").alias(c.name) if c.name in numbers else F.col(quoted(c.name))
        for c in schema.visible
    ]
    rows = found.select(*columns, op)
    return rows if _own_key(schema, key) else net_by_key(rows, key)


def _own_key(schema: Schema, key: Sequence[str]) -> bool:
    """Whether the sink's key is the table's: then a change of the table is a change of the sink as it is."""
    return tuple(key) == schema.key


def _vnodes(part: Part, own: bool) -> list[int] | None:
    if part.vnodes is not None and not own:
        raise ValueError("a row of this sink may come of several rows of its input, hence of several vnodes")
    return None if part.vnodes is None else sorted(part.vnodes)


def _numbered(rows: DataFrame, core: Any, schema: Schema, part: Part) -> DataFrame:
    if not part.numbered:
        return _visible(rows, schema)
    vnode = vnode_expression(schema.key_columns, core.vnode_count).alias(VNODE)
    return rows.select(*[quoted(c.name) for c in schema.visible], OP, vnode)


def _visible(rows: DataFrame, schema: Schema) -> DataFrame:
    return rows.select(*[quoted(c.name) for c in schema.visible], OP)
