"""A sink set back by its user: `headwater rewind SINK --to-epoch N`.

    {"epoch": n} with a checkpoint ─► the target's progress is n ─► the log store is at n, the note gone: a checkpoint
                 └─ a crash from here on: the next start goes on with the rewind

The target may be down. The note makes the wish durable, and keeps what it needs from being removed; whoever asked is
told that it is not done yet, and why.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from headwater.errors import HeadwaterError, TransientError, UsageError

if TYPE_CHECKING:
    from headwater.runtime.sink_worker import SinkWorker
    from headwater.sink.delivery import DeliveryLoop

# Longer than a target takes to refuse, and than a batch of usual size that is under way.
ANSWER_S: Final = 60.0


def check_rewind(worker: SinkWorker, epoch: int) -> None:
    """Refuse what cannot be done, before anything is noted."""
    if not worker.rewindable:
        raise UsageError(
            "SINK_NOT_REWINDABLE",
            f"sink {worker.name} cannot be set back: its class says so",
            hint="drop it, and create it again under another name",
        )
    source = worker.core.registry.by_id[worker.source_id]
    worker.core.queries.check_epoch(source, epoch)
    last = worker.reader.state.truncated_to.epoch
    if worker.fresh or epoch > last:
        where = "it has delivered nothing yet" if worker.fresh else f"it is at {last}"
        raise UsageError(
            "REWIND_RANGE",
            f"cannot rewind sink {worker.name} forwards to epoch {epoch}: {where}",
            hint="SELECT sink, delivered_to FROM hw_catalog.hw_log_stores",
        )


async def ask_rewind(worker: SinkWorker, epoch: int) -> None:
    """Note the rewind, and wait until it is done or known to take longer."""
    check_rewind(worker, epoch)
    worker.noted_rewind = epoch
    await worker.save()
    worker.rewinding = epoch
    try:
        async with asyncio.timeout(ANSWER_S):
            await worker.attempt()
    except TimeoutError:
        raise _waits(worker, epoch, "a delivery is still under way") from None
    except HeadwaterError as error:
        raise _waits(worker, epoch, str(error)) from error


def _waits(worker: SinkWorker, epoch: int, why: str) -> TransientError:
    return TransientError(
        "SINK_REWIND_WAITS",
        f"sink {worker.name} goes back to epoch {epoch} as soon as its target can be used",
        detail=why,
        hint="that is noted, and outlives a restart; hw_catalog.hw_progress says what the sink waits for",
    )


async def do_rewind(worker: SinkWorker, loop: DeliveryLoop) -> None:
    """Set target and log store back. Nothing is delivered before a checkpoint has it: it must not happen twice."""
    epoch = worker.rewinding
    assert epoch is not None
    await worker.in_thread(lambda: loop.sink.reset(epoch))
    worker.reader.rewind_to(epoch, retained_after=min(epoch, worker.core.meta.oldest_epoch()))
    worker.rewinding = worker.noted_rewind = None
    try:
        await worker.save()
    except BaseException:
        worker.rewinding = worker.noted_rewind = epoch
        raise
