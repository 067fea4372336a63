"""Tables and views in segments, refreshed as the engine does it at a barrier, without an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import sqlglot

from headwater.model.schema import OP, SEQ, Schema
from headwater.runtime.tables import InputLog, SequenceAllocator, TableState, ViewState
from headwater.storage.checkpoint import JobRow
from headwater.storage.files import DataDir
from headwater.storage.segments import arrow_schema, write_segment
from view_harness import MemoryTable, Row


class SegmentWorld:
    """What a refresh needs of an engine, and tables whose rows are kept twice: in memory and in segments."""

    slots = 2
    vnode_count = 16

    def __init__(self, spark: Any, place: Path, tables: Mapping[str, MemoryTable]) -> None:
        self.spark, self.tables = spark, tables
        self.data_dir = DataDir(str(place))
        self.sequence = SequenceAllocator(0)
        self.states: dict[str, TableState] = {}
        self.views: dict[str, ViewState] = {}
        self.jobs_of_last = 0
        for number, (name, table) in enumerate(tables.items(), 1):
            self.states[name] = TableState(JobRow(number, name, "table", "live", "main", "", {}), table.schema)
            self._write(name, [{**row, OP: 1} for row in table.rows.values()], "base")

    def reader(self, schema: Schema) -> Any:
        from headwater.spark.table import TableReader

        return TableReader(self.spark, self.data_dir, schema, self.vnode_count)

    def _write(self, name: str, rows: Sequence[Row], kind: str) -> None:
        state = self.states[name]
        fields = [f for f in arrow_schema(state.schema) if f.name in {*state.schema.names, OP}]
        arrays = [pa.array([row.get(f.name) for row in rows], type=f.type) for f in fields]
        first = 0 if kind == "base" else self.sequence.take(len(rows))
        numbers = np.zeros(len(rows), np.int64) if kind == "base" else np.arange(first, first + len(rows))
        table = pa.Table.from_arrays(arrays, schema=pa.schema(fields)).append_column(SEQ, pa.array(numbers))
        found = write_segment(self.data_dir, state.job.id, state.schema, table, kind=kind, vnode_count=self.vnode_count)
        state.segments = [*state.segments, found]

    def create(self, name: str, sql: str) -> ViewState:
        from headwater.spark.view import storage_schema
        from headwater.spark.view_job import initial_segments
        from headwater.view.analyse import analyse

        schemas = {table: state.schema for table, state in self.states.items()}
        plan = analyse(sql, schemas)
        used = {table: schemas[table] for table in plan.inputs}
        job = JobRow(100 + len(self.views), name, "view", "live", "main", "", {"plan": plan.as_dict()})
        view = ViewState(job, storage_schema(self.spark, plan, used))
        view.segments = [*initial_segments(self, view, {t: (self.states[t], InputLog()) for t in used})]
        self.views[name] = view
        return view

    def refresh(self) -> None:
        """Write what the tables changed since their `begin`, and refresh the views of it together."""
        from headwater.spark.view_job import refresh_together

        logs: dict[str, InputLog] = {}
        for name, table in self.tables.items():
            seen = list(self.states[name].segments)
            if rows := table.net():
                self._write(name, rows, "delta")
            logs[name] = InputLog(seen, self.states[name].segments[len(seen) :])
        works = []
        for view in self.views.values():
            inputs = {t: (self.states[t], logs[t]) for t in view.job.spec["plan"]["inputs"]}
            if any(log.changed for _, log in inputs.values()):
                works.append((view, inputs))
        tracker = self.spark.sparkContext.statusTracker()
        before = len(tracker.getJobIdsForGroup(None))
        for job_id, segments in refresh_together(self, works).items() if works else ():
            view = next(v for v in self.views.values() if v.job.id == job_id)
            view.segments = [*view.segments, *segments]
        self.jobs_of_last = len(tracker.getJobIdsForGroup(None)) - before

    def fold(self, name: str) -> None:
        """What compaction does: one new base instead of base and deltas."""
        self.states[name].segments = []
        self._write(name, [{**row, OP: 1} for row in self.tables[name].rows.values()], "base")

    def stored(self, view: ViewState) -> Counter[str]:
        columns = [f"`{c}`" for c in view.job.spec["plan"]["columns"]]
        rows = self.reader(view.schema).snapshot(view.segments).select(*columns).collect()
        return Counter(repr(tuple(row)) for row in rows)

    def fresh(self, view: ViewState) -> Counter[str]:
        """The query as a user would run it, over the rows in memory."""
        for name, table in self.tables.items():
            table.after().select(*(c.name for c in table.schema.visible)).createOrReplaceTempView(name)
        sql = view.job.spec["plan"]["sql"]
        text = sqlglot.transpile(sql, read="spark", write="spark")[0] if "qualify" in sql else sql
        return Counter(repr(tuple(row)) for row in self.spark.sql(text).collect())

    def check(self) -> None:
        for name, view in self.views.items():
            stored, fresh = self.stored(view), self.fresh(view)
            sql = view.job.spec["plan"]["sql"]
            assert stored == fresh, f"{name}: {sql}\n too many {stored - fresh}\n missing {fresh - stored}"
