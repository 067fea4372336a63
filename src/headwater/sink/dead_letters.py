"""Dead letters: rows that a target refuses, kept as Parquet files so that the rest can be delivered.

A task collects what its target refused and writes one file: the visible columns and `_op`. The token carries the files
to the delivery, which notes them with the next checkpoint (`runtime/sink_worker.py`); `headwater dead-letters SINK
--replay` delivers them again. Which rows are refused is the connector's to find out; what has no row to blame (a lost
connection, a missing table) is never a dead letter.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from headwater.storage.private import new_file


class DeadLetters:
    """The refused rows of one task. `prefix` None: the sink has dead letters switched off."""

    def __init__(self, prefix: str | None, info: Any) -> None:
        self.wanted = prefix is not None
        self._path = f"{prefix}-{info.partition:05d}-{info.attempt}.parquet"
        self._batches: list[Any] = []
        self._new = 0

    @property
    def rows(self) -> int:
        return sum(b.num_rows for b in self._batches)

    def add(self, batch: Any) -> None:
        self._batches.append(batch)
        self._new += batch.num_rows

    def taken(self) -> int:
        """How many rows were added since the last call."""
        new, self._new = self._new, 0
        return new

    def save(self) -> dict[str, Any]:
        """Write the file if there are any; the part of the task's result that tells of it."""
        if not self._batches:
            return {"refused": 0, "dead_letters": ""}
        filesystem, path = fs.FileSystem.from_uri(self._path)
        with new_file(filesystem, path) as out:
            pq.write_table(pa.Table.from_batches(self._batches), out)
        return {"refused": self.rows, "dead_letters": self._path}


def letters_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What `Token.written` takes of the tasks' results: the count, and each file with its rows."""
    found = [[r["dead_letters"], r["refused"]] for r in results if r.get("dead_letters")]
    return {"refused": sum(n for _, n in found), "dead_letters": found}
