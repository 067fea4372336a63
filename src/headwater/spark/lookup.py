"""Look-ups of rows by key, inside a worker: few keys by the row groups that can hold them, many by an index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.key_hash import key_hashes
from headwater.model.schema import OP, OP_UPSERT, SEQ, VNODE, Schema
from headwater.model.vnode import key_text, vnodes
from headwater.spark.segment_index import TooLarge, is_open, opened
from headwater.storage.files import DataDir
from headwater.storage.segments import VnodeFilter, arrow_schema, newest_per_key, read_segments

FEW_VNODES: Final = 1 / 8  # of all: up to this part of a segment is read rather than an index made for it


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
    names = [*dict.fromkeys([*columns, *schema.key]), OP, SEQ]
    wanted = _Wanted(keys, match, vnode_count)
    parts = [_found(data_dir, schema, path, wanted, names) for path in paths]
    if not parts:
        parts = [pa.schema([arrow_schema(schema).field(n) for n in names]).empty_table()]
    rows = newest_per_key(pa.concat_tables(parts), schema.key)
    return rows.filter(pc.equal(rows.column(OP), OP_UPSERT)).select([*columns, OP, SEQ])


class _Wanted:
    """The keys in the forms in which they are looked for."""

    def __init__(self, keys: pa.Table, match: tuple[str, ...], vnode_count: int) -> None:
        self.match = match
        self.texts = pc.unique(key_text(keys, match))
        self.vnodes = pc.unique(vnodes(keys, match, vnode_count))
        self.where = VnodeFilter(pc.field(VNODE).isin(self.vnodes), vnode_count)
        self.hashes = np.unique(key_hashes(keys, match))
        self.few = len(self.vnodes) <= FEW_VNODES * vnode_count


def _found(data_dir: DataDir, schema: Schema, path: str, wanted: _Wanted, names: Sequence[str]) -> pa.Table:
    """The rows of a segment with a wanted key."""
    rows: pa.Table | None = None
    if not wanted.few or is_open(data_dir, schema, path):
        try:
            segment = opened(data_dir, schema, path)
            rows = segment.take(names, segment.find(wanted.match, wanted.hashes))
        except TooLarge:
            rows = None
    if rows is None:
        rows = read_segments(data_dir, schema, [path], names, wanted.where)
    return rows.filter(pc.is_in(key_text(rows, wanted.match), value_set=wanted.texts))


@dataclass(frozen=True, slots=True)
class LookUp:
    """Inside a worker: of the keys in the log's segments the rows that the segments seen before have."""

    data_dir: DataDir
    schema: Schema
    log: tuple[str, ...]
    seen: tuple[str, ...]
    columns: tuple[str, ...]
    vnode_count: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                keys = read_segments(self.data_dir, self.schema, self.log, list(self.schema.key))
                rows = lookup_rows(self.data_dir, self.schema, self.seen, keys, self.vnode_count, self.columns)
                yield from rows.select(list(self.columns)).to_batches()
