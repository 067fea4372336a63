"""How many rows a table holds: the rows of its base, and of its deltas those whose key the base does not have.

A segment's rows are known without a look into it; whether a change is of a new key is not. So only keys are read: those
of the deltas, which compaction keeps few, and of the base those of the same vnodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.schema import OP, OP_UPSERT, SEQ, VNODE, Schema
from headwater.model.vnode import vnodes
from headwater.storage.files import DataDir
from headwater.storage.segments import VnodeFilter, newest_per_key, read_segments


def more_rows(
    data_dir: DataDir,
    schema: Schema,
    base: Sequence[str],
    deltas: Sequence[str],
    vnode_count: int,
    where: VnodeFilter | None = None,
) -> int:
    """By how many rows the deltas make a table more, or fewer, than its base; of some vnodes, or of all."""
    rows = read_segments(data_dir, schema, deltas, [*schema.key, OP, SEQ], where)
    changes = newest_per_key(rows, schema.key)
    upserts = int(pc.sum(pc.equal(changes.column(OP), OP_UPSERT)).as_py() or 0)
    keys = changes.select(list(schema.key))
    if not base or not keys.num_rows:
        return upserts
    homes = pc.unique(vnodes(keys, schema.key, vnode_count))
    near = VnodeFilter(pc.field(VNODE).isin(homes), vnode_count)
    present = read_segments(data_dir, schema, base, keys.column_names, near)
    # On either side a key is there once: what they have in common is what is missing together.
    together = pa.concat_tables([keys, present]).group_by(keys.column_names).aggregate([])
    return upserts - int(keys.num_rows + present.num_rows - together.num_rows)
