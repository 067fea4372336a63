"""Vnodes: `crc32(canonical key text) % vnode_count`, the unit of progress and parallelism.

The canonical text of a key column (columns are joined by U+001F):

    integers             decimal digits
    boolean              true / false
    string               itself
    date                 days since 1970-01-01
    timestamp (both)     microseconds since 1970-01-01T00:00
    decimal              the unscaled integer
    binary               upper-case hex
    float, double        its integer part; `big` from 9e15 on, `nan` for NaN

`_row_no` takes no part: equal rows of a table without a key share a vnode.

`spark/segment.py` has the same rule as a Spark expression; a test holds the two equal.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.model.schema import ROW_NO

DEFAULT_VNODE_COUNT: Final = 256
KEY_SEPARATOR: Final = "\x1f"
FLOAT_LIMIT: Final = 9e15


def canonical_text(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The canonical key text of one column, as an Arrow string array."""
    kind = column.type
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return column.cast(pa.string())
    if pa.types.is_integer(kind):
        return column.cast(pa.string())
    if pa.types.is_boolean(kind):
        return pc.if_else(column, "true", "false")
    if pa.types.is_date(kind):
        return column.cast(pa.int32()).cast(pa.string())
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("us", tz=kind.tz)).cast(pa.int64()).cast(pa.string())
    if pa.types.is_decimal(kind):
        return _unscaled(column)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pa.array([None if v is None else v.hex().upper() for v in column.to_pylist()], pa.string())
    if pa.types.is_floating(kind):
        return _float_text(column)
    raise ValueError(f"a column of type {kind} cannot be a key")


def _unscaled(column: pa.Array) -> pa.Array:
    wide = column.cast(pa.decimal128(38, column.type.scale))
    integers = pa.Array.from_buffers(pa.decimal128(38, 0), len(wide), wide.buffers(), wide.null_count, wide.offset)
    return integers.cast(pa.string())


def _float_text(column: pa.Array) -> pa.Array:
    values = column.cast(pa.float64())
    small = pc.less(pc.abs(values), FLOAT_LIMIT)
    whole = pc.trunc(pc.if_else(small, values, 0.0)).cast(pa.int64()).cast(pa.string())
    return pc.if_else(pc.is_nan(values), "nan", pc.if_else(small, whole, "big"))


def key_text(table: pa.Table | pa.RecordBatch, key: tuple[str, ...]) -> pa.Array:
    """The canonical text of the whole key, one string per row."""
    parts = [canonical_text(table.column(name)) for name in key]
    if len(parts) == 1:
        return parts[0]
    return pc.binary_join_element_wise(*parts, KEY_SEPARATOR)


def vnodes(table: pa.Table | pa.RecordBatch, key: tuple[str, ...], vnode_count: int = DEFAULT_VNODE_COUNT) -> pa.Array:
    """The vnode of every row, int32."""
    columns = [table.column(k) for k in key if k != ROW_NO]
    if any(c.null_count for c in columns):
        columns = [key_text(table, tuple(k for k in key if k != ROW_NO))]
    return pa.array(_vnodes(columns, vnode_count))


def _vnodes(columns: Sequence[pa.Array | pa.ChunkedArray], vnode_count: int) -> NDArray[np.int32]:
    """Column by column: a key's whole text is never made, nor that of a number."""
    from headwater.model import crc32  # late: numba is only loaded where rows are touched

    crcs = crc32.initial(len(columns[0]))
    for i, column in enumerate(columns):
        separator = ord(KEY_SEPARATOR) if i else -1
        numbers = _numbers(column)
        if numbers is not None:
            crc32.add_numbers(crcs, separator, numbers)
        else:
            crc32.add_slices(crcs, separator, *_slices(canonical_text(column)))
    found: NDArray[np.int32] = crc32.modulo(crcs, vnode_count)
    return found


def _numbers(column: pa.Array | pa.ChunkedArray) -> NDArray[np.int64] | None:
    """The integers whose digits are the canonical text; None for another type."""
    kind = column.type
    if pa.types.is_date32(kind):
        column = column.cast(pa.int32())
    elif pa.types.is_timestamp(kind) and kind.unit == "us":
        column = column.cast(pa.int64())
    elif not pa.types.is_signed_integer(kind):
        return None
    numbers: NDArray[np.int64] = column.cast(pa.int64()).to_numpy()
    return numbers


def _slices(text: pa.Array | pa.ChunkedArray) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """The bytes of all texts, and where each begins; the last number is where the last one ends."""
    if isinstance(text, pa.ChunkedArray):
        text = text.combine_chunks()
    text = text.cast(pa.string())
    _, offsets, data = text.buffers()
    raw = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)
    if not len(text):
        return raw, np.zeros(1, np.int32)
    return raw, np.frombuffer(offsets, np.int32)[text.offset : text.offset + len(text) + 1]


def vnodes_of_values(values: Sequence[Sequence[int | str]], vnode_count: int) -> list[int]:
    """The vnodes of all keys whose columns have one of the given integers or strings each."""
    texts = (KEY_SEPARATOR.join(map(str, key)) for key in itertools.product(*values))
    return sorted({zlib.crc32(text.encode()) % vnode_count for text in texts})
