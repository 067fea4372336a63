"""What a resync hands over: the changes that turn a table's rows into those of its new copy, as segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, ROW_ID, ROW_NO, Schema, quoted
from headwater.spark.segment import write_frame
from headwater.spark.width import is_wide
from headwater.storage.checkpoint import NewSegment, Segment

if TYPE_CHECKING:
    from headwater.engine import EngineCore

_RANK: Final = "_hw_rank"
SEQ_BLOCK: Final = 1 << 40  # `_seq` numbers for one difference: `dense_number` leaves 2**27 to each partition


def difference(
    core: EngineCore,
    table_id: int,
    schema: Schema,
    present: Sequence[Segment | NewSegment],
    copy: Sequence[NewSegment],
    only: Callable[[DataFrame], DataFrame] | None = None,
) -> list[NewSegment]:
    """Upserts of rows that are new or other in the copy, deletes of those that it does not have.

    `only` keeps the rows that the difference is about; all by default.
    """
    wide = is_wide([*present, *copy])
    reader = core.reader(schema, wide=wide)
    old, new = reader.snapshot(present), reader.snapshot(copy)
    if only is not None:
        old, new = only(old), only(new)
    seq_base = core.sequence.take(SEQ_BLOCK)
    key = list(schema.key)
    names = [quoted(n) for n in schema.names]
    if schema.multiset:
        # Numbers mean nothing: the n-th of several equal rows is the n-th of the other side, whatever its number.
        old, new = _ranked(old), _ranked(new)
        gone = old.join(new.select(ROW_ID, _RANK), [ROW_ID, _RANK], "left_anti")
        changed = new.join(old.select(ROW_ID, _RANK), [ROW_ID, _RANK], "left_anti")
        # A copy of the same generation has the numbers that the table's rows have: these are nobody's yet.
        changed = changed.withColumn(ROW_NO, F.lit(seq_base) + F.col(_RANK))
    else:
        gone = old.join(new.select(*[quoted(k) for k in key]), key, "left_anti")
        changed = new.exceptAll(old)
    upserts = changed.select(*names).withColumn(OP, F.lit(OP_UPSERT).cast("tinyint"))
    deletes = gone.select(*names).withColumn(OP, F.lit(OP_DELETE).cast("tinyint"))
    return write_frame(
        upserts.unionByName(deletes),
        core.data_dir,
        table_id,
        schema,
        kind="delta",
        vnode_count=core.vnode_count,
        seq_base=seq_base,
        wide=wide,
    )


def _ranked(frame: DataFrame) -> DataFrame:
    return frame.withColumn(_RANK, F.row_number().over(Window.partitionBy(ROW_ID).orderBy(ROW_NO)))
