"""The task that merges many small deltas of a table into one: the newest change per key, deletes kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headwater.model.schema import Schema
from headwater.storage.files import DataDir
from headwater.storage.segments import newest_per_key, read_segments, write_segment


@dataclass(frozen=True, slots=True)
class MergeDeltas:
    """Not part of the change log: the merged deltas stay in it as long as they are retained."""

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
