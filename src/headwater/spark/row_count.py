"""The Spark job that counts the rows of tables; `storage/row_count.py` has the rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.model.schema import Schema
from headwater.runtime.tables import AnySegment
from headwater.spark.compaction import foldable, vnode_ranges, vnodes_between
from headwater.spark.tasks import Task, balanced, run_tasks
from headwater.storage.files import DataDir
from headwater.storage.row_count import more_rows

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
        where = vnodes_between(self.first, self.end, self.vnode_count)
        more = more_rows(self.data_dir, self.schema, self.base, self.deltas, self.vnode_count, where)
        yield {"subject": self.table_id, "more": more}


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
