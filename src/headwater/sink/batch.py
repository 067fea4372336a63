"""A small batch of changes whose rows are in the engine's memory, and the net change per key of such rows.

A sink that says `takes_rows` gets one instead of a DataFrame where the log store's buffer has the rows: its tasks then
run in the engine (`spark/sink.py`: `run_tasks`) and cost no Spark job. The rows are the same, and so is the code that
writes them. `spark/delivery.py` has the same rule for batches of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from headwater.errors import DefiniteError
from headwater.model.schema import OP, OP_UPSERT
from headwater.storage.segments import newest_per_key


@dataclass(frozen=True, slots=True)
class RowBatch:
    """What a DataFrame of a batch holds: the visible columns and `_op`."""

    rows: pa.Table

    @property
    def columns(self) -> list[str]:
        return list(self.rows.column_names)


def net_rows(parts: Sequence[pa.Table], key: Sequence[str]) -> pa.Table:
    """The newest row per key of rows as segments have them.

    Rows of a hand-over carry a `_seq` below every change's (`storage/segments.py`: `read_held`).
    """
    return newest_per_key(pa.concat_tables(parts), key)


def appended_rows(sink: str, rows: pa.Table, *, force: bool) -> pa.Table:
    """The rows of an append-only delivery. Without `force`, a delete among them is an error."""
    inserted = pc.equal(rows.column(OP), OP_UPSERT)
    if force:
        return rows.filter(inserted)
    if pc.all(inserted).as_py() is False:
        raise not_append_only(sink)
    return rows


def not_append_only(sink: str) -> DefiniteError:
    return DefiniteError(
        "SINK_NOT_APPEND_ONLY",
        f"sink {sink} is append-only, but its input deletes rows",
        hint="use type='upsert' with a primary_key, or force_append_only='true' to drop deletes",
    )
