"""When an error of hw_errors is over. `error_log.py` asks after each checkpoint, for the kinds that are open.

of a job that was dropped                at once
of a source                              its reader is connected again and nothing stands in its way
of a sink                                it has delivered since, or passed over an epoch without changes
of a view, or a table that is live       it is live, and the error has not come again for a while
of a table that is copied                a read has succeeded since, or the copy is done
of a lane, or house-keeping              a checkpoint, or a round, was completed since
what only somebody else can mend         the table was copied again since, or dropped
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from headwater.model.epoch import MAX_EPOCH, Epoch
from headwater.runtime.error_log import Kind
from headwater.storage.checkpoint import JobRow
from headwater.storage.meta import MAIN_LANE

if TYPE_CHECKING:
    from headwater.engine import EngineCore

# What is tried again each round comes again within this time if it has not gone.
QUIET_S: Final = 6.0
# The table goes on and is not what the user may think it is: true until it is copied again.
LASTING: Final = frozenset({"SOURCE_PARTITIONS_CHANGED", "SOURCE_TABLE_RENAMED"})
# Of a source that is gone: nothing here will ever hear that somebody ran the statements.
NOT_RELEASED: Final = "SOURCE_NOT_RELEASED"
NOT_RELEASED_S: Final = 24 * 3600.0


def is_over(core: EngineCore, kind: Kind, at: float) -> bool:
    if kind.job_id is None:
        return _is_part_well(core, kind, at)
    job = core.registry.by_id.get(kind.job_id)
    if job is None:
        return True
    match job.kind:
        case "source":
            source = core.capture.sources.get(job.id)
            return source is not None and source.connected and source.error is None and not source.healing
        case "sink":
            worker = core.delivery.sinks.get(job.id)
            return worker is not None and worker.well_at > at
        case "view":
            troubled = job.id in core.creating.troubled
            return job.state in ("live", "creating") and not troubled and _is_quiet(at)
        case _:
            return _is_table_well(core, job, kind, at)


def _is_table_well(core: EngineCore, job: JobRow, kind: Kind, at: float) -> bool:
    if job.state != "live" or core.capture.healing.heals(job.id):
        return core.capture.read_at(job.id) > at and job.state == "creating"
    if kind.code in LASTING:
        return job.live_epoch != MAX_EPOCH and Epoch(job.live_epoch).unix_ms / 1000 > at
    return _is_quiet(at)


def _is_part_well(core: EngineCore, kind: Kind, at: float) -> bool:
    """Of errors without a job: a lane, house-keeping, a function, a source that is gone."""
    if kind.code == NOT_RELEASED:
        return core.registry.get(kind.name) is not None or time.time() - at > NOT_RELEASED_S
    if kind.name == "maintenance":
        return core.maintenance.well_at > at
    if kind.name in core.functions.broken:
        return False
    return kind.name == MAIN_LANE or _is_quiet(at)


def _is_quiet(at: float) -> bool:
    return time.time() - at > QUIET_S
