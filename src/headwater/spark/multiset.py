"""Tables without a key, inside a worker: an epoch's rows that came and went, netted to upserts and deletes.

docs/design/2026-11-16-tables-without-key.md says why this is exact. `capture.py` decodes and judges the events,
`connectors/postgres/rowhash.py` says what a row is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.connectors.postgres.pgoutput import ORDER, SIGN
from headwater.errors import DefiniteError
from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, ROW_ID, ROW_NO, SEQ, Schema
from headwater.spark.lookup import lookup_rows
from headwater.storage.files import DataDir

# A copied row's number: 16 bits of generation, 14 of split (there are at most 10,000), 32 of its place in the read; all
# below zero, since streamed rows count upwards from the engine's sequence.
_SPLIT_BITS: Final = 14
_PLACE_BITS: Final = 32


def copied_numbers(generation: int, split_id: int, rows: int) -> pa.Array:
    """`_row_no` of the rows of one split: no other split or generation of the table gives the same."""
    first = ((generation << _SPLIT_BITS) + split_id) << _PLACE_BITS
    return pa.array(-1 - (first + np.arange(rows, dtype=np.int64)))


def net_changes(
    rows: pa.Table,
    schema: Schema,
    *,
    data_dir: DataDir,
    segments: Sequence[str],
    vnode_count: int,
    seq_base: int,
    strict: bool,
) -> pa.Table:
    """The upserts and deletes that the arrivals (`EventBatch.arrivals`) of one epoch amount to, with `_op` and `_seq`.

    `segments` are the table's files. Without `strict` a row that went and is not there is passed over.
    """
    rows = rows.take(pc.sort_indices(rows, sort_keys=[(ORDER, "ascending")]))
    codes = rows.column(ROW_ID).combine_chunks().dictionary_encode()
    code = codes.indices.to_numpy().astype(np.int64)
    sign = rows.column(SIGN).to_numpy()
    net = np.bincount(code, weights=sign, minlength=len(codes.dictionary)).astype(np.int64)
    came = _surplus(rows, code, sign, net, seq_base)
    going = np.flatnonzero(net < 0)
    if not going.size:
        return came.select([*schema.names, OP, SEQ])
    ids = codes.dictionary.take(pa.array(going))
    counts = pa.table({ROW_ID: ids, "_count": -net[going]})
    found = lookup_rows(data_dir, schema, segments, counts, vnode_count, [ROW_ID, ROW_NO], (ROW_ID,))
    went = _chosen(found, counts, strict)
    return pa.concat_tables([came, _deletes(went, schema, came.schema, seq_base)]).select([*schema.names, OP, SEQ])


def _surplus(rows: pa.Table, code: Any, sign: Any, net: Any, seq_base: int) -> pa.Table:
    """Of each id the last rows that came, as many as came more than went."""
    arrived = np.flatnonzero(sign > 0)
    place = _place_from_end(code[arrived])
    keep = arrived[place < np.maximum(net, 0)[code[arrived]]]
    numbers = pa.array(seq_base + keep.astype(np.int64))
    kept = rows.take(pa.array(keep))
    kept = kept.append_column(ROW_NO, numbers).append_column(SEQ, numbers)
    return kept.append_column(OP, pa.array(np.full(keep.size, OP_UPSERT, np.int8)))


def _place_from_end(groups: Any) -> Any:
    """For each item how many of its group come after it."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    ends = np.searchsorted(ordered, ordered, side="right")
    place = np.empty(groups.size, np.int64)
    place[order] = ends - 1 - np.arange(groups.size)
    return place


def _chosen(found: pa.Table, counts: pa.Table, strict: bool) -> pa.Table:
    """Of each id as many present rows as are to go, the youngest first."""
    found = found.take(pc.sort_indices(found, sort_keys=[(ROW_ID, "ascending"), (ROW_NO, "ascending")]))
    index = pc.index_in(found.column(ROW_ID).combine_chunks(), counts.column(ROW_ID).combine_chunks()).to_numpy()
    wanted = counts.column("_count").to_numpy()
    keep = np.flatnonzero(_place_from_end(index) < wanted[index])
    if strict and keep.size < wanted.sum():
        raise DefiniteError(
            "ROW_UNKNOWN",
            "the stream deletes a row that we do not have",
            hint="the table is copied again by itself",
        )
    return found.select([ROW_ID, ROW_NO]).take(pa.array(keep))


def _deletes(went: pa.Table, schema: Schema, like: pa.Schema, seq_base: int) -> pa.Table:
    count = went.num_rows
    given = {
        ROW_ID: went.column(ROW_ID),
        ROW_NO: went.column(ROW_NO),
        OP: pa.array(np.full(count, OP_DELETE, np.int8)),
        SEQ: pa.array(np.full(count, seq_base, np.int64)),
    }
    columns = [given.get(f.name, pa.nulls(count, f.type)) for f in like]
    return pa.table(columns, schema=pa.schema([pa.field(f.name, f.type) for f in like]))
