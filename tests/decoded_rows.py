"""Rows of a copy in the types of their columns' plans, whatever types the decoder has them in meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from headwater.connectors.postgres.types import ColumnPlan
from headwater.connectors.postgres.wirerows import RowDecoder, WireRows


def decode_rows(rows: WireRows, plans: Sequence[ColumnPlan]) -> pa.RecordBatch:
    batch = RowDecoder(plans, rows.forms).decode(rows)
    arrays = [c.cast(p.arrow_type) for c, p in zip(batch.columns, plans, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)
