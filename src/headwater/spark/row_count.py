"""How many rows a table holds: the rows of its base, and of its deltas those whose key the base does not have.

A segment's rows are known without a look into it; whether a change is of a new key is not. So only keys are read: those
of the deltas, which compaction keeps few, and of the base those of the same vnodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.schema import OP, OP_UPSERT, SEQ, VNODE, Schema
from headwater.model.vnode import vnodes
from headwater.runtime.tables import AnySegment
from headwater.spark.compaction import foldable, vnode_ranges, vnodes_between
from headwater.spark.tasks import Task, balanced, run_tasks
from headwater.storage.files import DataDir
from headwater.storage.segments import VnodeFilter, newest_per_key, read_segments

Counted = tuple[Schema, list[AnySegment]]


@dataclass(frozen=True, slots=True)
class CountVnodes:
    """By how many rows a table's deltas make it more, or fewer, than its base; of the vnodes from `first` to `end`."""

    data_dir: DataDir
    table_id: int
    schema: Schema
    base: tuple[str, ...]
    deltas: tuple[str, ...]
    first: int
    end: int
    vnode_count: int

    @property
    def subject(self) -> int:
        return self.table_id

    def run(self) -> Iterator[dict[str, Any]]:
        key = list(self.schema.key)
        where = vnodes_between(self.first, self.end, self.vnode_count)
        rows = read_segments(self.data_dir, self.schema, self.deltas, [*key, OP, SEQ], where)
        changes = newest_per_key(rows, self.schema.key)
        upserts = pc.sum(pc.equal(changes.column(OP), OP_UPSERT)).as_py() or 0
        yield {"subject": self.table_id, "more": int(upserts) - self._present(changes.select(key))}

    def _present(self, keys: pa.Table) -> int:
        """How many of these keys, each of which is there once, the base has; its keys are there once, too."""
        if not self.base or not keys.num_rows:
            return 0
        homes = pc.unique(vnodes(keys, self.schema.key, self.vnode_count))
        where = VnodeFilter(pc.field(VNODE).isin(homes), self.vnode_count)
        base = read_segments(self.data_dir, self.schema, self.base, keys.column_names, where)
        together = pa.concat_tables([keys, base]).group_by(keys.column_names).aggregate([])
        return int(keys.num_rows + base.num_rows - together.num_rows)


def count_rows(core: Any, tables: dict[int, Counted]) -> dict[int, int]:
    """The rows of each table: one Spark job for all, and one more for each whose keys only Spark can compare.

    A table whose files cannot be read is left out: whoever reads it next is told why.
    """
    found = {i: _base_rows(segments) for i, (schema, segments) in tables.items() if foldable(schema)}
    tasks = [(_weight(tables[i][1]), task) for i in found for task in _tasks(core, tables, i)]
    # On half of the slots: the others are for what must be fresh.
    for result in run_tasks(core.spark, balanced(tasks, max(1, core.slots // 2))):
        if "error" in result:
            found.pop(result["subject"], None)
        elif result["subject"] in found:
            found[result["subject"]] += result["more"]
    others = {i: table for i, table in tables.items() if not foldable(table[0])}
    return found | {i: core.reader(schema).snapshot(segments).count() for i, (schema, segments) in others.items()}


def _tasks(core: Any, tables: dict[int, Counted], table_id: int) -> list[Task]:
    schema, segments = tables[table_id]
    base = tuple(s.path for s in segments if s.kind == "base")
    deltas = tuple(s.path for s in segments if s.kind == "delta")
    return [
        CountVnodes(core.data_dir, table_id, schema, base, deltas, first, end, core.vnode_count)
        for first, end in vnode_ranges(segments, core.vnode_count)
    ]


def _base_rows(segments: Sequence[AnySegment]) -> int:
    return sum(s.rows for s in segments if s.kind == "base")


def _weight(segments: Sequence[AnySegment]) -> int:
    return sum(s.rows for s in segments if s.kind == "delta")
