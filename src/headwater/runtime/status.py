"""What a running engine tells about itself: progress of every job, and the whole picture for status and the page."""

from __future__ import annotations

import datetime as dt
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from headwater.barrier.progress import JobProgress
from headwater.model.epoch import MAX_EPOCH
from headwater.runtime.row_counts import RowCount
from headwater.storage.checkpoint import JobRow

if TYPE_CHECKING:
    from headwater.engine import EngineCore

ERRORS_SHOWN: Final = 50


def progress_rows(core: EngineCore) -> list[dict[str, Any]]:
    now = time.monotonic()
    return [_progress_row(core, job_id, now) for job_id in core.registry.by_id]


def _progress_row(core: EngineCore, job_id: int, now: float) -> dict[str, Any]:
    job = core.registry.by_id[job_id]
    progress = core.progress_of(job_id)
    if job.kind == "table" and not job.spec.get("captured") and not progress.finished:
        progress.finish()
    row = _row(core, job, progress, now)
    if job.kind == "view" and not row["waiting_for"]:
        copied = [one.name for one in core.registry.tables_behind(job) if is_first_copy(one)]
        row["waiting_for"] = f"the copy of {', '.join(copied)}" if copied else None
    return row


def is_first_copy(job: JobRow) -> bool:
    """Whether a captured table does not have all its rows yet."""
    return job.state == "creating" and job.live_epoch == MAX_EPOCH


def _row(core: EngineCore, job: JobRow, progress: JobProgress, now: float) -> dict[str, Any]:
    was_live = job.state == "failed" and job.live_epoch != MAX_EPOCH
    row = progress.row(now)
    if core.waiting_for:
        row["waiting_for"] = core.waiting_for
    if progress.finished or was_live:
        row = with_count(row, job, core.row_counts.of)
    return {**row, "phase": "failed"} if job.state == "failed" and progress.finished else row


def with_count(row: dict[str, Any], job: JobRow, count: Callable[[JobRow], RowCount]) -> dict[str, Any]:
    """Of a table or view that is there: the rows that it holds, and the epoch that they were counted at."""
    if job.kind not in ("table", "view"):
        return row
    found = count(job)
    return {**row, "rows": found.rows, "rows_epoch": found.epoch or None}


def status_of(core: EngineCore) -> dict[str, Any]:
    """`/status` and `headwater status --json`."""
    from headwater import __version__

    return {
        "engine": {
            "version": __version__,
            "pid": os.getpid(),
            "generation": core.generation,
            "started_at": dt.datetime.fromtimestamp(core.started_at, dt.UTC).isoformat(),
            "master": core.master,
            "paused": core.paused,
            "slots": core.slots,
            "waiting_for": core.waiting_for or None,
            "data_dir": str(core.local_dir),
        },
        "barriers": list(core.barriers),
        **picture(core),
    }


def picture(core: Any) -> dict[str, Any]:
    """The part that a data directory without an engine has, too (`readonly.py`)."""
    progress = {row["job_id"]: row for row in core.progress_rows()}
    jobs = []
    for row in core.catalogue.jobs():
        names = [core.registry.by_id[i].name for i in core.registry.depends_on(core.registry.by_id[row["id"]])]
        jobs.append({**progress[row["id"]], **row, "depends_on": names})
    return {
        "committed_epoch": core.meta.committed_epoch(),
        "jobs": jobs,
        "progress": list(progress.values()),
        "sources": core.catalogue.sources(),
        "log_stores": core.catalogue.log_stores(),
        "errors": [_as_text(e) for e in shown_errors(core.catalogue.errors())],
    }


def shown_errors(errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest, and the last of each kind that is open, however long ago it was; in their order."""
    last = set({(e["job_id"], e["name"], e["code"]): i for i, e in enumerate(errors)}.values())
    first = len(errors) - ERRORS_SHOWN
    return [e for i, e in enumerate(errors) if i >= first or (e["ended_at"] is None and i in last)]


def _as_text(error: dict[str, Any]) -> dict[str, Any]:
    return {**error, **{name: error[name] and error[name].isoformat() for name in ("at", "ended_at")}}
