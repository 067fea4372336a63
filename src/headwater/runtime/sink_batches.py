"""What a sink is handed for a batch: rows in memory, or a frame that Spark makes; the whole, or what the target lacks.

A `Making` is what `DeliveryLoop.deliver` calls for the batch, in its thread, and only if the target wants it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwater.sink.batch import RowBatch
from headwater.sink.sink import Sink

if TYPE_CHECKING:
    from headwater.logstore.chunk import LogBatch
    from headwater.runtime.sink_worker import SinkWorker
    from headwater.spark.delivery import Part


@dataclass(slots=True)
class Making:
    """`by_spark` makes the rows of some vnodes; `pending` are those that the target lacks, `landed` the others.

    `there` counts the rows of the others: with this batch they are delivered, and nobody has counted them (I7).
    """

    by_spark: Callable[[Part], Any]
    numbered: bool
    pending: frozenset[int] | None
    landed: frozenset[int]
    in_memory: Callable[[], RowBatch | None] = lambda: None
    there: int = 0

    def __call__(self) -> Any:
        from headwater.spark.delivery import Part

        small = self.in_memory()
        if small is not None:
            return small
        if self.pending is not None:
            self.there = self.by_spark(Part(self.landed)).count()
        return self.by_spark(Part(self.pending, self.numbered))

    def count(self) -> int:
        """The rows of the whole batch."""
        from headwater.spark.delivery import WHOLE

        return int(self.by_spark(WHOLE).count())


def snapshot_of(worker: SinkWorker, sink: Sink | None, epoch: int, options: Any) -> Making:
    source, key = worker.source(), worker.key()

    def rows(part: Part) -> Any:
        from headwater.spark.delivery import snapshot_batch

        return snapshot_batch(worker.core, source, epoch, options, key, part)

    return Making(rows, _numbered(sink), worker.reader.pending(epoch), worker.reader.state.reached(epoch))


def changes_between(worker: SinkWorker, sink: Sink | None, after: int, upto: int, options: Any) -> Making:
    """`sink` None: only to be counted."""
    source, key = worker.source(), worker.key()

    def rows(part: Part) -> Any:
        from headwater.spark.delivery import change_batch

        return change_batch(worker.core, source, after, upto, options, key, part)

    return Making(rows, _numbered(sink), None, frozenset())


def changes_of(worker: SinkWorker, sink: Sink, batch: LogBatch, options: Any, *, in_memory: bool) -> Making:
    made = changes_between(worker, sink, batch.from_epoch, batch.to_epoch, options)
    made.pending, made.landed = batch.vnodes, worker.reader.state.reached(batch.to_epoch)
    if in_memory and (held := worker.rows.of(batch)) is not None:
        source = worker.source()
        made.in_memory = lambda: worker.rows.change_batch(worker.name, source, batch, held, options)
    return made


def _numbered(sink: Sink | None) -> bool:
    return sink is not None and sink.wants_vnodes
