"""Point look-ups of rows by key, inside a worker: only the row groups whose vnodes can hold the keys are read."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headwater.model.schema import OP, OP_UPSERT, SEQ, VNODE, Schema
from headwater.model.vnode import key_text, vnodes
from headwater.storage.files import DataDir
from headwater.storage.segments import arrow_schema, newest_per_key


def lookup_rows(
    data_dir: DataDir,
    schema: Schema,
    paths: Sequence[str],
    keys: pa.Table,
    vnode_count: int,
    columns: Sequence[str],
    match: tuple[str, ...] = (),
) -> pa.Table:
    """The present rows of these keys (a table with the key columns); keys without a row are left out.

    `match` are the columns to compare, where that is less than the whole key: they must decide the vnode.
    """
    match = match or schema.key
    wanted = arrow_schema(schema)
    names = [*columns, VNODE, OP, SEQ]
    texts = pc.unique(key_text(keys, match))
    homes = pc.unique(vnodes(keys, match, vnode_count))
    parts = []
    for path in paths:
        fs, target = data_dir.path(path)
        present = set(pq.read_schema(target, filesystem=fs).names)
        part = pq.read_table(
            target,
            filesystem=fs,
            columns=[n for n in names if n in present],
            filters=pc.field(VNODE).isin(homes),
            partitioning=None,
        )
        for name in names:
            if name not in present:
                part = part.append_column(name, pa.nulls(part.num_rows, wanted.field(name).type))
        part = part.select(names).cast(pa.schema([wanted.field(n) for n in names]))
        parts.append(part.filter(pc.is_in(key_text(part, match), value_set=texts)))
    if not parts:
        return pa.schema([wanted.field(n) for n in names]).empty_table()
    rows = newest_per_key(pa.concat_tables(parts), schema.key)
    return rows.filter(pc.equal(rows.column(OP), OP_UPSERT))
