"""What is known of a captured table without looking at its splits: its columns, its way into the stream, its settings.

`backfill.py` builds on it; everything here is read from the registry and from the resync that is under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headwater.model.schema import Schema
from headwater.runtime.shape import TableShape
from headwater.storage.checkpoint import JobRow

if TYPE_CHECKING:
    from headwater.engine import EngineCore
    from headwater.runtime.source_runtime import SourceRuntime

DEFAULT_PARALLELISM: Final = 4


class TableFacts:
    """The facts of one captured table."""

    def __init__(self, core: EngineCore, source: SourceRuntime, job: JobRow) -> None:
        self.core = core
        self.source = source
        self.table_id = job.id
        self.name = job.name
        self._shape: TableShape | None = None  # handed over and perhaps not committed yet
        self._resync: dict[str, Any] = {}

    @property
    def job(self) -> JobRow:
        return self.core.registry.by_id[self.table_id]

    @property
    def captured(self) -> dict[str, Any]:
        return dict(self.job.spec["captured"])

    @property
    def entered(self) -> dict[str, Any]:
        """How this generation of the table entered the stream."""
        captured = self.captured
        return {
            k: self._resync.get(k) or captured.get(k) for k in ("oid", "schema_oid", "membership", "layout", "mark")
        }

    @property
    def oid(self) -> int:
        return int(self.entered["oid"])

    @property
    def followed_oid(self) -> int:
        """Of the table that is followed: during a resync it may be one that is dropped by now."""
        return int(self._resync.get("old_oid") or self.oid) if self.replacing else self.oid

    @property
    def mark(self) -> int:
        """The transaction that marks this generation's entry into the stream."""
        return int(self.entered["mark"])

    @property
    def policy(self) -> str:
        """`schema.change.behavior`, of the table or else of its source."""
        return str(self.settings.get("schema_change_behavior") or self.source.config.schema_change)

    @property
    def shape(self) -> TableShape:
        """The columns that the table has."""
        return self._shape or TableShape.from_dict(self.captured["shape"])

    @property
    def next_shape(self) -> TableShape:
        """The columns that the copy which is being made has."""
        found = self._resync.get("shape") if self.replacing else None
        return TableShape.from_dict(found) if found else self.shape

    @property
    def schema(self) -> Schema:
        return self.shape.schema

    @property
    def plans(self) -> tuple[Any, ...]:
        return self.shape.plans

    @property
    def replacing(self) -> bool:
        """A resync is under way."""
        return bool(self._resync) and not self._resync.get("done")

    @property
    def dropped(self) -> bool:
        """Its job is gone: a DROP is committed before the table is taken out of its source."""
        return self.table_id not in self.core.registry.by_id

    @property
    def failed(self) -> bool:
        return self.job.state == "failed"

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.job.spec.get("settings", {}))

    @property
    def rate_limit(self) -> int | None:
        if self.core.paused:
            return 0
        value = self.settings.get("backfill_rate_limit")
        return None if value is None else int(value)

    @property
    def held(self) -> str:
        """Why nothing of the table may be read at the moment; empty if something may."""
        if self.core.paused:
            return "RESUME: the engine is paused"
        return "the rate limit is 0" if self.rate_limit == 0 else ""

    @property
    def parallelism(self) -> int:
        settings = self.settings
        found = settings.get("parallelism") or settings.get("backfill_parallelism") or DEFAULT_PARALLELISM
        return int(found)
