"""What a running engine tells about itself: progress of every job, and the whole picture for status and the page."""

from __future__ import annotations

import datetime as dt
import os
import time
from typing import TYPE_CHECKING, Any, Final

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
    row = progress.row(now)
    if core.waiting_for:
        row["waiting_for"] = core.waiting_for
    return {**row, "phase": "failed"} if job.state == "failed" and progress.finished else row


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
        "errors": [{**e, "at": e["at"].isoformat()} for e in core.catalogue.errors()[-ERRORS_SHOWN:]],
    }
