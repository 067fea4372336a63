"""hw_catalog: what the engine is and does, as tables. Names and columns are a contract with users (docs/sql.md)."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from headwater.config import suggestion
from headwater.errors import UsageError
from headwater.model.epoch import MAX_EPOCH
from headwater.model.schema import Column

if TYPE_CHECKING:
    from headwater.engine import EngineCore

TABLES: Final[dict[str, str]] = {
    "hw_jobs": "id BIGINT, name STRING, kind STRING, state STRING, lane STRING, definition STRING",
    "hw_progress": (
        "job_id BIGINT, name STRING, phase STRING, done BIGINT, total BIGINT, percent DOUBLE, rows BIGINT, "
        "bytes BIGINT, rows_per_s DOUBLE, eta_s DOUBLE, waiting_for STRING"
    ),
    "hw_epochs": "epoch BIGINT, kind STRING, committed_at TIMESTAMP, source STRING, position STRING",
    "hw_sources": (
        "name STRING, connector STRING, position STRING, acknowledged STRING, lag_bytes BIGINT, lag_s DOUBLE, "
        "retained_bytes BIGINT"
    ),
    "hw_splits": (
        "table_name STRING, split_id BIGINT, left STRING, right STRING, state STRING, row_count BIGINT, "
        "offset_low STRING, offset_high STRING, handed_over_epoch BIGINT"
    ),
    "hw_segments": (
        "table_name STRING, path STRING, kind STRING, rows BIGINT, bytes BIGINT, added_epoch BIGINT, "
        "removed_epoch BIGINT"
    ),
    "hw_log_stores": (
        "sink STRING, backlog_rows BIGINT, backlog_bytes BIGINT, backlog_epochs BIGINT, truncated_to BIGINT, "
        "delivered_to BIGINT"
    ),
    "hw_errors": (
        "at TIMESTAMP, job_id BIGINT, name STRING, code STRING, message STRING, hint STRING, retrying BOOLEAN, "
        "ended_at TIMESTAMP"
    ),
}


def columns_of(table: str) -> tuple[Column, ...]:
    """UsageError if hw_catalog has no such table."""
    found = TABLES.get(table.lower())
    if found is None:
        hint = suggestion(table.lower(), TABLES)
        raise UsageError("UNKNOWN_TABLE", f"there is no table hw_catalog.{table}", hint=hint)
    return tuple(Column(name, kind) for name, kind in (part.split(" ") for part in found.split(", ")))


class Catalogue:
    """The rows of each catalogue table, from the meta store and the running parts."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._rows: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "hw_jobs": self.jobs,
            "hw_progress": self.progress,
            "hw_epochs": self.epochs,
            "hw_sources": self.sources,
            "hw_splits": self.splits,
            "hw_segments": self.segments,
            "hw_log_stores": self.log_stores,
            "hw_errors": self.errors,
        }

    def rows(self, name: str) -> list[dict[str, Any]]:
        columns_of(name)
        return self._rows[name.lower()]()

    def frame(self, name: str) -> Any:
        """A local relation: reading it costs no Spark job."""
        import pyarrow as pa

        from headwater.model.types import arrow_type

        rows = self.rows(name)
        fields = [pa.field(c.name, arrow_type(c.type)) for c in columns_of(name)]
        arrays = [pa.array([r.get(f.name) for r in rows], f.type) for f in fields]
        table = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
        return self.core.spark.createDataFrame(table)

    # -- the tables -------------------------------------------------------------------------------------------------

    def jobs(self) -> list[dict[str, Any]]:
        paused = self.core.paused
        rows = []
        for job in self.core.registry.by_id.values():
            state = "paused" if paused and job.state in ("creating", "live") else job.state
            rows.append(
                {
                    "id": job.id,
                    "name": job.name,
                    "kind": job.kind,
                    "state": state,
                    "lane": job.lane,
                    "definition": job.definition,
                }
            )
        return rows

    def progress(self) -> list[dict[str, Any]]:
        return self.core.progress_rows()

    def epochs(self) -> list[dict[str, Any]]:
        """One row per committed checkpoint and source; a checkpoint before any source has NULLs there."""
        names = {j.id: j.name for j in self.core.meta.job_rows(dropped=True) if j.kind == "source"}
        by_epoch: dict[int, list[tuple[str, str]]] = {}
        for row in self.core.meta.position_rows():
            by_epoch.setdefault(row["epoch"], []).append((names.get(row["source_id"], "?"), row["position"]))
        rows = []
        for row in self.core.meta.epoch_rows():
            for source, position in by_epoch.get(row["epoch"], [(None, None)]):
                rows.append(
                    {
                        "epoch": row["epoch"],
                        "kind": row["kind"],
                        "committed_at": moment(row["committed_at"]),
                        "source": source,
                        "position": position,
                    }
                )
        return rows

    def sources(self) -> list[dict[str, Any]]:
        return self.core.capture.source_rows()

    def splits(self) -> list[dict[str, Any]]:
        """Of a table that is copied again, the splits that its present rows are of, until the new are handed over."""
        names = {j.id: j.name for j in self.core.registry.of_kind("table")}
        all_rows = self.core.meta.split_rows()
        open_ = {(r.table_id, r.generation) for r in all_rows if r.state != "HANDED_OVER"}
        shown: dict[int, tuple[bool, int]] = {}
        for row in all_rows:
            rank = ((row.table_id, row.generation) not in open_, row.generation)
            shown[row.table_id] = max(shown.get(row.table_id, (False, 0)), rank)
        return [
            {
                "table_name": names[row.table_id],
                "split_id": row.split_id,
                "left": row.left,
                "right": row.right,
                "state": row.state,
                "row_count": row.row_count,
                "offset_low": row.offset_low,
                "offset_high": row.offset_high,
                "handed_over_epoch": row.handed_over_epoch,
            }
            for row in all_rows
            if row.table_id in names and row.generation == shown[row.table_id][1]
        ]

    def segments(self) -> list[dict[str, Any]]:
        names = {j.id: j.name for j in self.core.meta.job_rows(dropped=True)}
        return [
            {
                "table_name": names.get(s.table_id, "?"),
                "path": s.path,
                "kind": s.kind,
                "rows": s.rows,
                "bytes": s.bytes,
                "added_epoch": s.added_epoch,
                "removed_epoch": None if s.removed_epoch == MAX_EPOCH else s.removed_epoch,
            }
            for s in self.core.meta.all_segments()
        ]

    def log_stores(self) -> list[dict[str, Any]]:
        return self.core.delivery.log_store_rows()

    def errors(self) -> list[dict[str, Any]]:
        rows = self.core.errors.rows()
        return [
            {**row, "at": moment(row["at"]), "ended_at": None if row["ended_at"] is None else moment(row["ended_at"])}
            for row in rows
        ]


def moment(unix_s: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(unix_s, tz=dt.UTC)
