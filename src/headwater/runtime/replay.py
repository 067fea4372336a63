"""Dead letters delivered again: `headwater dead-letters SINK --replay`.

A refused row may be old news by now. So an upsert sink gets, for each key among the letters, the row that its input has
*now* at the sink's place in the log (or a delete): nothing newer in the target is ever overwritten by something older.
An append-only sink gets the letters' rows themselves.

A replay is a batch of its own between two epochs: `(e, e + 1]`, where e is where the sink is (epochs are far apart). So
the target's progress makes it exactly once like any batch. Which letters it holds is stored with a checkpoint *before*:

    {"ids": […], "epoch": e + 1}      after a crash: the target is at e + 1: the letters are done; else they still wait
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.runtime.sink_worker import SinkWorker
    from headwater.sink.delivery import DeliveryLoop


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay under way: the letters' ids, and the epoch that the target has if it landed (0: none under way)."""

    ids: tuple[int, ...] = ()
    epoch: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {"ids": list(self.ids), "epoch": self.epoch}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> Replay:
        return cls(tuple(data["ids"]), int(data["epoch"])) if data else cls()


def letters_of(worker: SinkWorker) -> list[dict[str, Any]]:
    """The letters of a sink that wait."""
    return [r for r in worker.core.meta.dead_letter_rows(worker.job_id) if not r["replayed"]]


async def replay_letters(worker: SinkWorker, loop: DeliveryLoop, options: Any) -> int:
    """Deliver all letters of a sink that wait; gives how many rows they hold. Nothing else is being delivered."""
    waiting = letters_of(worker)
    if not waiting:
        return 0
    worker.replaying = Replay(tuple(int(r["id"]) for r in waiting), worker.reader.read_to + 1)
    await worker.save()
    await _deliver(worker, loop, options)
    return sum(int(r["rows"]) for r in waiting)


async def settle_replay(worker: SinkWorker, loop: DeliveryLoop, options: Any, found: int | None) -> None:
    """After a start: finish a replay that was under way, or forget it."""
    epoch = worker.replaying.epoch
    if not epoch:
        return
    begun = await worker.in_thread(loop.unfinished)
    if begun is not None and begun[1] == epoch:
        await _deliver(worker, loop, options)
        return
    await _finish(worker, landed=found == epoch)


async def _deliver(worker: SinkWorker, loop: DeliveryLoop, options: Any) -> None:
    core, epoch = worker.core, worker.replaying.epoch
    source = worker.source()
    paths = [str(r["path"]) for r in core.meta.dead_letter_rows(worker.job_id) if r["id"] in worker.replaying.ids]

    def frame() -> Any:
        from headwater.spark.delivery import replay_batch

        return replay_batch(core, source, epoch - 1, options, worker.key(), paths)

    delivered = await worker.in_thread(lambda: loop.deliver(epoch - 1, epoch, frame, worker.hold))
    worker.reader.start_from(epoch)
    worker.note(delivered)
    await _finish(worker, landed=True)


async def _finish(worker: SinkWorker, *, landed: bool) -> None:
    """Before the next batch: the stored note would be wrong once the target is further."""
    if landed:
        worker.core.meta.mark_replayed(worker.replaying.ids)
    worker.replaying = Replay()
    await worker.save()
