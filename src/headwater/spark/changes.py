"""`table_changes`: the change log epoch by epoch, with the columns that Spark's own change feeds use.

All epochs of a range are one query: the net change per key and epoch, beside each its predecessor (the key's change
before it, or its row at the start of the range). Only an epoch that replaced the whole table (TRUNCATE, a resync) is
compared as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from headwater.model.epoch import Epoch
from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, SEQ, Schema, quoted
from headwater.runtime.registry import schema_of
from headwater.spark.table import SMALL_DELTA_BYTES
from headwater.storage.checkpoint import JobRow, Segment

_EPOCH: Final = "_hw_epoch"
_MICROS: Final = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"


def change_feed(core: Any, job: JobRow, after: int, upto: int) -> DataFrame:
    """The epochs in (after, upto], each with one net change per key.

    Columns: the visible ones, `_change_type` (insert, update_preimage, update_postimage, delete), `_commit_version`,
    `_commit_timestamp`.
    """
    schema = schema_of(job)
    feed = _Feed(core, job.id, schema)
    resets = sorted(core.meta.reset_epochs(job.id, after, upto))
    frames = [feed.between(first, last) for first, last in _gaps(after, upto, resets)]
    frames += [feed.replaced(epoch) for epoch in resets]
    found = [f for f in frames if f is not None]
    if not found:
        found = [_named(_none(core.reader(schema).empty(), schema), schema)]
    return reduce(DataFrame.unionByName, found)


def _gaps(after: int, upto: int, resets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The ranges (first, last] between resets."""
    first = after
    for epoch in resets:
        yield first, epoch - 1
        first = epoch
    yield first, upto


class _Feed:
    """The pieces of one table's feed: rows of all columns, `_op` and `_hw_epoch`, turned into named changes."""

    def __init__(self, core: Any, table_id: int, schema: Schema) -> None:
        self.core = core
        self.table_id = table_id
        self.schema = schema
        self.reader = core.reader(schema)

    def between(self, after: int, upto: int) -> DataFrame | None:
        segments = self.core.meta.change_segments(self.table_id, after, upto)
        if not segments:
            return None
        small = sum(s.bytes for s in segments) <= SMALL_DELTA_BYTES
        changes = self._net(segments)
        before = self.core.meta.segments_at(self.table_id, after)
        rows = changes
        if before:
            keys = changes.select(*self._key()).distinct()
            known = self.reader.snapshot(before).join(
                F.broadcast(keys) if small else keys, list(self.schema.key), "left_semi"
            )
            rows = changes.unionByName(self._tagged(known, OP_UPSERT, after))
        return _named(_paired(rows.coalesce(1) if small else rows, self.schema, after), self.schema)

    def replaced(self, epoch: int) -> DataFrame:
        old = self.reader.snapshot(self.core.meta.segments_at(self.table_id, epoch - 1))
        new = self.reader.snapshot(self.core.meta.segments_at(self.table_id, epoch))
        gone = old.join(new, list(self.schema.key), "left_anti")
        rows = (
            self._tagged(old, OP_UPSERT, epoch - 1)
            .unionByName(self._tagged(new, OP_UPSERT, epoch))
            .unionByName(self._tagged(gone, OP_DELETE, epoch))
        )
        return _named(_paired(rows, self.schema, epoch - 1), self.schema)

    def _net(self, segments: Sequence[Segment]) -> DataFrame:
        """The newest change per key and epoch. A base row (a hand-over) is older than every delta of its epoch."""
        parts = []
        for epoch in sorted({s.added_epoch for s in segments}):
            for kind in ("base", "delta"):
                found = [s for s in segments if s.added_epoch == epoch and (s.kind == "base") == (kind == "base")]
                if found:
                    rows = self.reader.scan(found)
                    rank = F.lit(-1).cast("bigint") if kind == "base" else F.col(SEQ)
                    op = F.lit(OP_UPSERT).cast("tinyint") if kind == "base" else F.col(OP)
                    rows = rows.withColumns({SEQ: rank, OP: op, _EPOCH: F.lit(epoch).cast("bigint")})
                    parts.append(rows)
        rows = reduce(DataFrame.unionByName, parts)
        if sum(s.bytes for s in segments) <= SMALL_DELTA_BYTES:
            rows = rows.coalesce(1)
        others = [*_others(self.schema), OP]
        newest = F.max_by(F.struct(*[quoted(n) for n in others]), F.col(SEQ)).alias("_hw_newest")
        net = rows.groupBy(*self._key(), _EPOCH).agg(newest)
        return net.select(*self._key(), *[F.col(f"_hw_newest.{quoted(n)}").alias(n) for n in others], _EPOCH)

    def _tagged(self, rows: DataFrame, op: int, epoch: int) -> DataFrame:
        return rows.withColumns({OP: F.lit(op).cast("tinyint"), _EPOCH: F.lit(epoch).cast("bigint")})

    def _key(self) -> list[str]:
        return [quoted(k) for k in self.schema.key]


def difference(before: DataFrame, after: DataFrame) -> DataFrame:
    """What turned one snapshot into another, as rows with `_op` (deletes carry the old row)."""
    gone = before.exceptAll(after).withColumn(OP, F.lit(OP_DELETE).cast("tinyint"))
    new = after.exceptAll(before).withColumn(OP, F.lit(1).cast("tinyint"))
    return gone.unionByName(new)


def _paired(rows: DataFrame, schema: Schema, after: int) -> DataFrame:
    """Beside each change of an epoch past `after` the key's row before it; nothing for what stayed as it was."""
    names = [*_others(schema), OP]
    new = F.struct(*[quoted(n) for n in names])
    window = Window.partitionBy(*[quoted(k) for k in schema.key]).orderBy(_EPOCH)
    paired = rows.select(
        *[quoted(k) for k in schema.key], _EPOCH, new.alias("_hw_new"), F.lag(new).over(window).alias("_hw_old")
    )
    was = F.coalesce(F.col(f"_hw_old.{OP}") == OP_UPSERT, F.lit(False))
    changes = paired.where(F.col(_EPOCH) > after).withColumns(
        {"_hw_was": was, "_hw_is": F.col(f"_hw_new.{OP}") == OP_UPSERT}
    )
    same = F.col("_hw_was") & F.col("_hw_is") & _equal(schema)
    return changes.where((F.col("_hw_was") | F.col("_hw_is")) & ~same)


def _equal(schema: Schema) -> Column:
    others = [c for c in schema.columns if c.name not in schema.key]
    if not any("MAP<" in c.type.upper() for c in others):
        pairs = [F.col(f"_hw_old.{quoted(c.name)}").eqNullSafe(F.col(f"_hw_new.{quoted(c.name)}")) for c in others]
        return reduce(lambda a, b: a & b, pairs, F.lit(True))
    # Spark cannot compare maps; their JSON text can be.
    options = {"ignoreNullFields": "false", "timestampFormat": f"{_MICROS}XXX", "timestampNTZFormat": _MICROS}
    return F.to_json("_hw_old", options) == F.to_json("_hw_new", options)


def _named(paired: DataFrame, schema: Schema) -> DataFrame:
    """One row per image of a change."""

    def image(name: str, side: str) -> Column:
        values = [F.col(f"{side}.{quoted(n)}").alias(n) for n in _others(schema)]
        return F.struct(F.lit(name).alias("_change_type"), *values)

    was, now = F.col("_hw_was"), F.col("_hw_is")
    images = (
        F.when(was & now, F.array(image("update_preimage", "_hw_old"), image("update_postimage", "_hw_new")))
        .when(now, F.array(image("insert", "_hw_new")))
        .otherwise(F.array(image("delete", "_hw_old")))
    )
    exploded = paired.select(*[quoted(k) for k in schema.key], _EPOCH, F.explode(images).alias("_hw_image"))
    visible = [
        F.col(quoted(c.name)) if c.name in schema.key else F.col(f"_hw_image.{quoted(c.name)}").alias(c.name)
        for c in schema.visible
    ]
    millis = F.shiftright(F.col(_EPOCH), 16) + F.lit(Epoch(0).unix_ms)
    return exploded.select(
        *visible,
        F.col("_hw_image._change_type").alias("_change_type"),
        F.col(_EPOCH).alias("_commit_version"),
        F.timestamp_millis(millis).alias("_commit_timestamp"),
    )


def _none(empty: DataFrame, schema: Schema) -> DataFrame:
    tagged = empty.withColumns({OP: F.lit(1).cast("tinyint"), _EPOCH: F.lit(0).cast("bigint")})
    return _paired(tagged, schema, 0)


def _others(schema: Schema) -> list[str]:
    return [c.name for c in schema.columns if c.name not in schema.key]
