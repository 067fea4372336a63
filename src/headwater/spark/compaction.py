"""The tasks of compaction, in workers with pyarrow: merge small deltas of a table into one, fold deltas into the base.

None of what they write is part of the change log: the segments that they replace stay in it as long as they are
retained. For columns that pyarrow cannot carry, `runtime/maintenance.py` lets Spark fold.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.schema import OP, OP_UPSERT, SEQ, VNODE, Schema
from headwater.spark.row_writer import writable
from headwater.spark.segment_index import SegmentIndex, TooLarge
from headwater.storage.checkpoint import NewSegment, Segment
from headwater.storage.files import DataDir, segment_path
from headwater.storage.segments import VnodeFilter, newest_per_key, read_segments, write_segment

# What a task holds at once: half a second of work, some hundred megabytes once decompressed.
FOLDED_ROWS: Final = 500_000
FOLDED_BYTES: Final = 64 << 20
_INEXACT: Final = ("FLOAT", "DOUBLE", "REAL")  # pyarrow and Spark differ in which of them are equal


def foldable(schema: Schema) -> bool:
    """Whether workers can fold a table of these columns."""
    return writable(schema) and not any(c.type.upper() in _INEXACT for c in schema.key_columns)


@dataclass(frozen=True, slots=True)
class MergeDeltas:
    """Many deltas become one: the newest change per key, deletes kept."""

    data_dir: DataDir
    table_id: int
    schema: Schema
    paths: tuple[str, ...]
    vnode_count: int

    @property
    def subject(self) -> int:
        return self.table_id

    def run(self) -> Iterator[dict[str, Any]]:
        rows = newest_per_key(read_segments(self.data_dir, self.schema, self.paths), self.schema.key)
        segment = write_segment(
            self.data_dir,
            self.table_id,
            self.schema,
            rows,
            kind="delta",
            vnode_count=self.vnode_count,
            is_change=False,
        )
        yield {"subject": self.table_id, "segment": segment.as_dict()}


@dataclass(frozen=True, slots=True)
class KeysOnce:
    """Whether no key of some vnodes (`first` up to `end`) stands in two rows and none is deleted; reads keys alone."""

    data_dir: DataDir
    table_id: int
    schema: Schema
    paths: tuple[str, ...]
    first: int
    end: int
    vnode_count: int

    @property
    def subject(self) -> int:
        return self.table_id

    def run(self) -> Iterator[dict[str, Any]]:
        names = list(self.schema.key)
        where = vnodes_between(self.first, self.end, self.vnode_count)
        rows = read_segments(self.data_dir, self.schema, self.paths, [*names, OP], where)
        deletes = pc.any(pc.not_equal(rows.column(OP), OP_UPSERT)).as_py()
        once = not deletes and rows.group_by(names).aggregate([]).num_rows == rows.num_rows
        yield {"subject": self.table_id, "once": once}


@dataclass(frozen=True, slots=True)
class FoldVnodes:
    """The rows of some vnodes (`first` up to `end`) as base and deltas amount to, as a new base segment."""

    data_dir: DataDir
    table_id: int
    folder: str
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
        base = self._read(self.base)
        # Whatever numbers its rows were written with: every delta is newer.
        base = base.set_column(base.column_names.index(SEQ), SEQ, pa.array(np.full(base.num_rows, -1, np.int64)))
        rows = newest_per_key(pa.concat_tables([base, self._read(self.deltas)]), self.schema.key)
        rows = rows.filter(pc.equal(rows.column(OP), OP_UPSERT))
        if rows.num_rows == 0:
            return
        rows = rows.set_column(rows.column_names.index(SEQ), SEQ, pa.array(np.zeros(rows.num_rows, np.int64)))
        segment = write_segment(
            self.data_dir,
            self.table_id,
            self.schema,
            rows,
            kind="base",
            vnode_count=self.vnode_count,
            is_change=False,
            path=segment_path(self.table_id, self.folder),
        )
        self._prepare(segment.path)
        yield {"subject": self.table_id, "segment": segment.as_dict()}

    def _prepare(self, path: str) -> None:
        """Look-ups that come next find what those before had made; an epoch would have to wait for it."""
        if self.base:
            with contextlib.suppress(OSError, TooLarge):
                old = SegmentIndex(self.data_dir, self.schema, self.base[0])
                SegmentIndex(self.data_dir, self.schema, path).prepare_like(old)

    def _read(self, paths: Sequence[str]) -> pa.Table:
        return read_segments(
            self.data_dir, self.schema, paths, where=vnodes_between(self.first, self.end, self.vnode_count)
        )


def vnodes_between(first: int, end: int, vnode_count: int) -> VnodeFilter:
    return VnodeFilter((pc.field(VNODE) >= first) & (pc.field(VNODE) < end), vnode_count)


def vnode_ranges(segments: Sequence[Segment | NewSegment], vnode_count: int) -> Iterator[tuple[int, int]]:
    """The vnodes of a table in parts of about FOLDED_ROWS: rows are spread evenly over them."""
    wanted = max(sum(s.rows for s in segments) // FOLDED_ROWS, sum(s.bytes for s in segments) // FOLDED_BYTES)
    parts = max(1, min(vnode_count, wanted))
    return itertools.pairwise(vnode_count * i // parts for i in range(parts + 1))


def fold_tasks(
    data_dir: DataDir, folder: str, schema: Schema, segments: Sequence[Segment], vnode_count: int
) -> list[FoldVnodes]:
    table_id = segments[0].table_id
    base = tuple(s.path for s in segments if s.kind == "base")
    deltas = tuple(s.path for s in segments if s.kind == "delta")
    return [
        FoldVnodes(data_dir, table_id, folder, schema, base, deltas, first, end, vnode_count)
        for first, end in vnode_ranges(segments, vnode_count)
    ]


def once_tasks(data_dir: DataDir, schema: Schema, segments: Sequence[Segment], vnode_count: int) -> list[KeysOnce]:
    paths = tuple(s.path for s in segments)
    return [
        KeysOnce(data_dir, segments[0].table_id, schema, paths, first, end, vnode_count)
        for first, end in vnode_ranges(segments, vnode_count)
    ]
