"""What can be said about a data directory without an engine: status from the last committed epoch, read only."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def offline_status(data_dir: Path) -> dict[str, Any]:
    """The same shape as a running engine's `/status`; no Spark is started for it."""
    from headwater.readonly import ReadOnlyEngine
    from headwater.runtime.status import picture

    with ReadOnlyEngine(data_dir) as core:
        engine = {"running": False, "paused": core.paused, "data_dir": str(data_dir.absolute())}
        return {"engine": engine, "barriers": [], **picture(core)}
