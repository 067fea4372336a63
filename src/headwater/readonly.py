"""Reading a data directory on which no engine runs: queries at the last committed epoch, and nothing else.

No lane, no source, no sink is started and nothing is owned, so a look never moves anything.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from headwater.config import PARAMETERS
from headwater.model.schema import Schema
from headwater.runtime.catalogue import Catalogue
from headwater.runtime.commands import READS, Commands
from headwater.runtime.error_log import ErrorLog
from headwater.runtime.queries import Queries
from headwater.runtime.registry import Registry
from headwater.runtime.result import Result
from headwater.runtime.row_counts import RowCount, offline_count
from headwater.runtime.sink_log import stored_row
from headwater.storage.checkpoint import JobRow
from headwater.storage.files import DataDir
from headwater.storage.location import data_directory, existing_meta_store
from headwater.storage.meta import MetaStore

READING = READS


class ReadOnlyEngine:
    """Looks enough like an EngineCore for queries, the catalogue and SHOW; everything that moves is missing."""

    allow_python = False

    def __init__(self, data_dir: Path) -> None:
        data_dir = data_directory(data_dir)
        self.meta = MetaStore(existing_meta_store(data_dir))
        self.data_dir = DataDir(str(data_dir))
        self.errors = ErrorLog(self.meta)
        self.registry = Registry(self.meta.job_rows())
        self.paused = self.meta.setting("paused") == "1"
        stored = {k: int(v) for k, v in self.meta.settings("parameter:").items()}
        self.parameters = {name: stored.get(name, p.default) for name, p in PARAMETERS.items()}
        self.queries: Any = Queries(self)  # type: ignore[arg-type]
        self.catalogue = Catalogue(self)  # type: ignore[arg-type]
        self.commands = Commands(self)  # type: ignore[arg-type]
        self.capture = self.delivery = self.writes = self
        self._spark: Any = None

    def __enter__(self) -> ReadOnlyEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.meta.close()
        if self._spark is not None:
            self._spark.stop()

    @property
    def spark(self) -> Any:
        if self._spark is None:
            from headwater.spark.session import make_session

            self._spark = make_session(None)
        return self._spark

    @property
    def jobs(self) -> Any:
        from headwater.spark.jobs import JobRunner

        return JobRunner(self.spark, lambda stage, count: None)

    def execute(self, text: str) -> list[Result | None]:
        import asyncio

        return asyncio.run(self.commands.execute(text))

    def reader(self, schema: Schema) -> Any:
        from headwater.spark.table import TableReader

        return TableReader(self.spark, self.data_dir, schema, self.parameters["vnode_count"])

    @property
    def waiting_for(self) -> str:
        return ""

    async def settle(self) -> None:
        """There is nothing to wait for."""

    def progress_of(self, job_id: int) -> Any:
        from headwater.barrier.progress import JobProgress

        job = self.registry.by_id[job_id]
        progress = JobProgress.restored(job_id, job.name, job.state, self.meta.state(job_id, "progress"))
        if not progress.finished:
            progress.phase = job.state
        return progress

    def progress_rows(self) -> list[dict[str, Any]]:
        from headwater.runtime.status import with_count

        rows = []
        for job in self.registry.by_id.values():
            progress = self.progress_of(job.id)
            row = progress.row(time.monotonic())
            rows.append(with_count(row, job, self._count) if progress.finished else row)
        return rows

    def _count(self, job: JobRow) -> RowCount:
        return offline_count(self.meta, self.data_dir, job, self.parameters["vnode_count"])

    def source_rows(self) -> list[dict[str, Any]]:
        """Positions as committed; nothing is asked of the sources."""
        return [
            {
                "name": j.name,
                "connector": j.spec["options"]["connector"],
                "position": self.meta.position(j.id),
                "acknowledged": None,
                "lag_bytes": None,
                "lag_s": None,
                "retained_bytes": None,
            }
            for j in self.registry.of_kind("source")
        ]

    def log_store_rows(self) -> list[dict[str, Any]]:
        return [stored_row(self, j) for j in self.registry.of_kind("sink")]
