"""The task that turns acknowledged rows (Arrow files in staging/) into a segment of their table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from headwater.model.schema import SEQ, Schema
from headwater.storage.files import DataDir
from headwater.storage.segments import newest_per_key, write_segment


@dataclass(frozen=True, slots=True)
class WriteRows:
    """All waiting rows of one table in one epoch, in the order of their acknowledgement."""

    data_dir: DataDir
    table_id: int
    schema: Schema
    batches: tuple[tuple[str, int], ...]  # path, first `_seq`
    kind: str
    vnode_count: int

    @property
    def subject(self) -> int:
        return self.table_id

    def run(self) -> Iterator[dict[str, Any]]:
        rows = pa.concat_tables([self._read(path, seq_base) for path, seq_base in self.batches])
        if self.kind == "delta":
            rows = newest_per_key(rows, self.schema.key)
        segment = write_segment(
            self.data_dir, self.table_id, self.schema, rows, kind=self.kind, vnode_count=self.vnode_count
        )
        yield {"subject": self.table_id, "segment": segment.as_dict()}

    def _read(self, path: str, seq_base: int) -> pa.Table:
        fs, target = self.data_dir.path(path)
        with fs.open_input_file(target) as source:
            rows = pa.ipc.open_file(source).read_all()
        seq = np.zeros(rows.num_rows, np.int64)
        if self.kind == "delta":
            seq = seq_base + np.arange(rows.num_rows, dtype=np.int64)
        return rows.append_column(SEQ, pa.array(seq))
