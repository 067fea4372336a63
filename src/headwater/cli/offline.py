"""What can be said about a data directory without an engine: status from the last committed epoch, read only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwater.storage.location import existing_meta_store
from headwater.storage.meta import MetaStore


def offline_status(data_dir: Path) -> dict[str, Any]:
    """The same shape as a running engine's `/status`."""
    meta = MetaStore(existing_meta_store(data_dir))
    try:
        jobs = [
            {
                "id": j.id,
                "name": j.name,
                "kind": j.kind,
                "state": j.state,
                "lane": j.lane,
                "definition": j.definition,
                "depends_on": [],
                **_no_progress(j.state),
            }
            for j in meta.job_rows()
        ]
        return {
            "engine": {"running": False, "paused": meta.setting("paused") == "1", "data_dir": str(data_dir)},
            "committed_epoch": meta.committed_epoch(),
            "barriers": [],
            "jobs": jobs,
            "progress": [],
            "sources": [],
            "log_stores": [],
            "errors": [{**e, "at": e["at"]} for e in meta.error_rows()[-50:]],
        }
    finally:
        meta.close()


def _no_progress(state: str) -> dict[str, Any]:
    return {
        "phase": state,
        "done": 0,
        "total": 0,
        "percent": 100.0 if state == "live" else 0.0,
        "rows": 0,
        "bytes": 0,
        "rows_per_s": 0.0,
        "eta_s": None,
        "waiting_for": None,
    }
