"""Reading tables: a snapshot at an epoch, and the net changes of an epoch range, as DataFrames.

    snapshot = base rows whose key no delta touches  ∪  newest delta row per key, unless it is a delete

The base is a plain Parquet scan by Spark's own reader. While the deltas are small they are folded in one partition and
broadcast, so that no shuffle happens; large ones are left to Spark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, SEQ, VNODE, Schema, quoted
from headwater.spark.segment import vnode_expression
from headwater.storage.checkpoint import NewSegment, Segment
from headwater.storage.files import DataDir
from headwater.storage.segments import without_vnode

# Up to this much the deltas are folded in one task and broadcast; beyond it a shuffle is cheaper than one slow task.
SMALL_DELTA_BYTES: Final = 48 * 1024 * 1024
# Up to this many rows of deltas are folded by one aggregation over whole rows, without a join.
FOLDED_ROWS: Final = 200_000
AnySegment = Segment | NewSegment


@dataclass(frozen=True, slots=True)
class TableReader:
    """Reads one table from given lists of segments; what is visible is decided by the caller."""

    spark: SparkSession
    data_dir: DataDir
    schema: Schema
    vnode_count: int

    def snapshot(
        self, segments: Sequence[AnySegment], where: Column | None = None, vnodes: Sequence[int] | None = None
    ) -> DataFrame:
        """The rows that these segments amount to, hidden columns included.

        `where` prunes (on `_vnode` or key); so does `vnodes`: row groups are sorted by vnode.
        """
        base, delta = _split(segments)
        if vnodes is not None:
            inside = F.col(VNODE).isin(list(vnodes))
            where = inside if where is None else where & inside
        if not delta:
            return self._columns(self._scan(base, where))
        net = self._net(delta, where)
        live = net.where(F.col(OP) == OP_UPSERT)
        if not base:
            return self._columns(live)
        untouched = self._untouched(self._scan(base, where), net, delta)
        return self._columns(untouched).unionByName(self._columns(live))

    def changes(self, segments: Sequence[AnySegment], vnodes: Sequence[int] | None = None) -> DataFrame:
        """The net change per key of the change-log segments of an epoch range: all columns + `_op`."""
        base, delta = _split(segments)
        where = None if vnodes is None else F.col(VNODE).isin(list(vnodes))
        names = [quoted(n) for n in self.schema.names]
        inserts = self._scan(base, where).withColumn(OP, F.lit(OP_UPSERT).cast("tinyint"))
        if not delta:
            return inserts.select(*names, OP)
        net = self._net(delta, where)
        if not base:
            return net.select(*names, OP)
        return self._untouched(inserts, net, delta).select(*names, OP).unionByName(net.select(*names, OP))

    def changes_with_old(self, segments: Sequence[AnySegment], before: DataFrame) -> DataFrame:
        """Retractions: rows with `_op` 2 hold the complete old row, with 1 the new one; an update is both.

        `before` is the snapshot at the start of the range. Rows that did not change are left out.
        """
        changed = self.changes(segments)
        keys = changed.select(*self._key())
        if _bytes(segments) <= SMALL_DELTA_BYTES:
            keys = F.broadcast(keys)
        old = before.join(keys, list(self.schema.key), "left_semi").withColumn(OP, F.lit(OP_DELETE).cast("tinyint"))
        names = [quoted(n) for n in self.schema.names]
        new = changed.where(F.col(OP) == OP_UPSERT)
        return old.select(*names, OP).unionByName(new.select(*names, OP))

    def scan(self, segments: Sequence[AnySegment], where: Column | None = None) -> DataFrame:
        """The rows of segments as they are, with `_op` and `_seq`; `where` may be about `_vnode`."""
        return self._scan(segments, where)

    def scan_numbered(self, segments: Sequence[AnySegment]) -> DataFrame:
        """The same with `_vnode`, whatever format the segments have."""
        old = without_vnode(self.data_dir, [s.path for s in segments])
        known = self._read([s for s in segments if s.path not in old])
        if not old:
            return known
        vnode = vnode_expression(self.schema.key_columns, self.vnode_count)
        return known.unionByName(self._read([s for s in segments if s.path in old]).withColumn(VNODE, vnode))

    def empty(self) -> DataFrame:
        return self._columns(self._scan([], None))

    # -- pieces -----------------------------------------------------------------------------------------------------

    def _scan(self, segments: Sequence[AnySegment], where: Column | None) -> DataFrame:
        return self._read(segments) if where is None else self.scan_numbered(segments).where(where)

    def _read(self, segments: Sequence[AnySegment]) -> DataFrame:
        fields = [(c.name, c.type) for c in self.schema.columns] + [(VNODE, "INT"), (OP, "TINYINT"), (SEQ, "BIGINT")]
        if not segments:
            return empty_frame(self.spark, fields)
        ddl = ", ".join(f"{quoted(name)} {kind}" for name, kind in fields)
        read = self.spark.read.option("__globPaths__", "false")  # a data directory's name is never a pattern
        return read.schema(ddl).parquet(*[self.data_dir.url(s.path) for s in segments])

    def _net(self, delta: Sequence[AnySegment], where: Column | None) -> DataFrame:
        """The newest row per key of the deltas, with its `_op`."""
        rows = self._scan(delta, where)
        if _rows(delta) > FOLDED_ROWS or has_wide_deltas(delta):
            # Whole rows as an aggregate make Spark sort them all, with columns that nobody asked for; numbers alone are
            # aggregated by hashing. Wide rows stay where they are: the keys go to them.
            newest = rows.groupBy(*self._key()).agg(F.max(SEQ).alias(SEQ))
            if has_wide_deltas(delta):
                newest = F.broadcast(newest)
            return rows.join(newest, [*self.schema.key, SEQ], "left_semi")
        if _bytes(delta) <= SMALL_DELTA_BYTES:
            rows = rows.coalesce(1)
        others = [c.name for c in self.schema.columns if c.name not in self.schema.key] + [OP]
        newest = F.max_by(F.struct(*[quoted(n) for n in others]), F.col(SEQ)).alias("_hw_newest")
        grouped = rows.groupBy(*self._key()).agg(newest)
        return grouped.select(*self._key(), *[F.col(f"_hw_newest.{quoted(n)}").alias(n) for n in others])

    def _untouched(self, base: DataFrame, net: DataFrame, delta: Sequence[AnySegment]) -> DataFrame:
        keys = net.select(*self._key())
        if _bytes(delta) <= SMALL_DELTA_BYTES:
            keys = F.broadcast(keys)
        return base.join(keys, list(self.schema.key), "left_anti")

    def _columns(self, frame: DataFrame) -> DataFrame:
        return frame.select(*[quoted(n) for n in self.schema.names])

    def _key(self) -> list[str]:
        return [quoted(k) for k in self.schema.key]


def has_wide_deltas(segments: Sequence[AnySegment]) -> bool:
    """Whether deltas have few rows and many bytes: their keys are little, their rows better left where they are."""
    delta = _split(segments)[1]
    return _rows(delta) <= FOLDED_ROWS and _bytes(delta) > SMALL_DELTA_BYTES


def empty_frame(spark: SparkSession, fields: Sequence[tuple[str, str]]) -> DataFrame:
    """No rows of these (name, type) columns, as a local relation: Spark folds it away, and reading it costs no job."""
    columns = ", ".join(f"CAST(NULL AS {kind}) AS {quoted(name)}" for name, kind in fields)
    return spark.sql(f"SELECT {columns} WHERE false")


def _split(segments: Sequence[AnySegment]) -> tuple[list[AnySegment], list[AnySegment]]:
    return [s for s in segments if s.kind == "base"], [s for s in segments if s.kind != "base"]


def _rows(segments: Sequence[AnySegment]) -> int:
    return sum(s.rows for s in segments)


def _bytes(segments: Sequence[AnySegment]) -> int:
    return sum(s.bytes for s in segments)
