"""Decode one column of Postgres values into an Arrow array, from their text or from their binary form.

The scanners are in `textscan.py` and `binaryscan.py`; which one a column needs is in its `ColumnPlan` (`types.py`).
Here: buffers, validity, and errors that name the column and never its value, the same for both forms. The stream is
text, of a copy each column is what costs less (`wirerows.forms`): tests/integration/test_postgres_types.py holds the
two equal for every type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.connectors.postgres import binaryscan as binary
from headwater.connectors.postgres import textscan as scan
from headwater.connectors.postgres.textscan import Bytes, Found, Longs
from headwater.connectors.postgres.types import ColumnPlan, Kind, Wire
from headwater.errors import DefiniteError

MAX_COLUMN_BYTES: Final = (1 << 31) - 1  # Arrow's string and binary have 32-bit offsets

INT_RANGE: Final[dict[str, tuple[int, int, Any]]] = {
    "SMALLINT": (-(1 << 15), (1 << 15) - 1, np.int16),
    "INT": (-(1 << 31), (1 << 31) - 1, np.int32),
    "BIGINT": (-(1 << 63), (1 << 63) - 1, np.int64),
}
_FAULTS: Final[dict[int, tuple[str, str]]] = {
    scan.OUT_OF_RANGE: (
        "holds a value outside of the range of {ddl}",
        "correct the value in the source; if the column is wider there by now, DROP the table and CREATE it again",
    ),
    scan.NOT_A_NUMBER: ("holds NaN, which {ddl} cannot hold", "create the table with numeric.mode='string'"),
    scan.MULTI_DIMENSIONAL: (
        "holds an array with more than one dimension, which {ddl} cannot hold",
        "create the table with arrays='string'",
    ),
    scan.LOWER_BOUND: (
        "holds an array whose lower bound is not 1, which {ddl} cannot hold",
        "create the table with arrays='string'",
    ),
}


def decode_column(plan: ColumnPlan, data: Bytes, starts: Longs, lengths: Longs) -> pa.Array:
    """The texts `data[start : start + length]` as an Arrow array of `plan.arrow_type`; a negative length is NULL."""
    return _DECODERS[plan.kind](plan, read_only(data), starts, lengths)


def decode_binary_column(plan: ColumnPlan, data: Bytes, starts: Longs, lengths: Longs) -> pa.Array:
    """The same from the binary form of values that `rowscan.py` only finds (`FIELD`)."""
    return _BINARY_DECODERS[plan.wire](plan, read_only(data), starts, lengths)


def read_only(data: Bytes) -> Bytes:
    """Compiled code knows read-only arrays as a type of their own: one type here, or every scanner compiles twice."""
    if data.flags.writeable:
        data = data.view()
        data.flags.writeable = False
    return data


def check_value(plan: ColumnPlan, found: Found) -> None:
    _, fault = found
    if fault == scan.FINE:
        return
    if fault == scan.MALFORMED:
        raise DefiniteError(
            "VALUE_MALFORMED",
            f"column {plan.name} has a value that is not a {plan.ddl_type} as Postgres sends it",
            hint="the session settings of types.SESSION_SETTINGS must be in force for snapshot and stream",
        )
    what, hint = _FAULTS[fault]
    raise DefiniteError("VALUE_NOT_REPRESENTABLE", f"column {plan.name} {what.format(ddl=plan.ddl_type)}", hint=hint)


def validity(lengths: Longs) -> pa.Buffer | None:
    """The validity bitmap, or None where nothing is NULL."""
    valid = lengths >= 0
    if valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def _fixed(plan: ColumnPlan, lengths: Longs, values: NDArray[Any]) -> pa.Array:
    return pa.Array.from_buffers(plan.arrow_type, lengths.size, [validity(lengths), pa.py_buffer(values)])


def _bools(plan: ColumnPlan, data: Bytes, starts: Longs, lengths: Longs) -> pa.Array:
    out = np.empty(starts.size, np.bool_)
    check_value(plan, scan.parse_bools(data, starts, lengths, out))
    return _fixed(plan, lengths, np.packbits(out, bitorder="little"))


def _ints(plan: ColumnPlan, data: Bytes, starts: Longs, lengths: Longs) -> pa.Array:
    low, high, dtype = INT_RANGE[plan.ddl_type]
    out = np.empty(starts.size, np.int64)
    check_value(plan, scan.parse_ints(data, starts, lengths, low, high, out))
    return _fixed(plan, lengths, out.astype(dtype, copy=False))


def _dates(plan: ColumnPlan, data: Bytes, starts: Longs, lengths: Longs) -> pa.Array:
    out = np.empty(starts.size, np.int32)
    check_value(plan, scan.parse_dates(data, starts, lengths, out))
    return _fixed(plan, lengths, out)


def _timestamps(plan: ColumnPlan, data: Bytes, starts: Longs, lengths: Longs) -> pa.Array:
    out = np.empty(starts.size, np.int64)
    check_value(plan, scan.parse_timestamps(data, starts, lengths, plan.ddl_type == "TIMESTAMP", out))
    return _fixed(plan, lengths, out)


def _decimals(plan: ColumnPlan, data: Bytes, starts: Longs, lengths: Longs) -> pa.Array:
    out = np.empty((starts.size, 2), np.uint64)
    check_value(plan, scan.parse_decimals(data, starts, lengths, plan.precision, plan.scale, out))
    return _fixed(plan, lengths, out)


def _offsets(plan: ColumnPlan, sizes: Longs) -> NDArray[np.int32]:
    """Where each value goes in a buffer that holds all of them, and the buffer's size at the end."""
    offsets = np.empty(sizes.size + 1, np.int32)
    if scan.text_offsets(sizes, offsets) > MAX_COLUMN_BYTES:
        raise DefiniteError(
            "BATCH_TOO_LARGE",
            f"column {plan.name} has more than 2 GiB in one block",
            hint="decode smaller blocks",
        )
    return offsets


def _strings(plan: ColumnPlan, data: Bytes, starts: Longs, lengths: Longs, kind: pa.DataType) -> pa.Array:
    offsets = _offsets(plan, lengths)
    out = np.empty(int(offsets[-1]), np.uint8)
    scan.gather(data, starts, lengths, offsets, out)
    return pa.Array.from_buffers(kind, lengths.size, [validity(lengths), pa.py_buffer(offsets), pa.py_buffer(out)])


def _texts(plan: ColumnPlan, data: Bytes, starts: Longs, lengths: Longs) -> pa.Array:
    return valid_texts(plan, _strings(plan, data, starts, lengths, pa.string()))


def valid_texts(plan: ColumnPlan, array: pa.Array) -> pa.Array:
    """The same array, if it is UTF-8. Most text is ASCII, which is seen at once."""
    if np.frombuffer(array.buffers()[2], np.int8).min(initial=0) >= 0:
        return array
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        # A database with the encoding SQL_ASCII may hold any bytes.
        raise DefiniteError(
            "VALUE_NOT_REPRESENTABLE",
            f"column {plan.name} holds text that is not valid UTF-8",
            hint="correct the value in the source, or capture a view of it as bytea",
        ) from error
    return array


def _floats(plan: ColumnPlan, data: Bytes, starts: Longs, lengths: Longs) -> pa.Array:
    text = _strings(plan, data, starts, lengths, pa.string())
    try:
        return pc.cast(text, plan.arrow_type)
    except pa.ArrowInvalid:
        # The Arrow error quotes the value: it must not be chained.
        failed: Found = (0, scan.MALFORMED)
    check_value(plan, failed)
    raise AssertionError("unreachable")


def _bytes(plan: ColumnPlan, data: Bytes, starts: Longs, lengths: Longs) -> pa.Array:
    offsets = _offsets(plan, lengths // 2 - 1)
    out = np.empty(int(offsets[-1]), np.uint8)
    check_value(plan, scan.parse_hex(data, starts, lengths, offsets, out))
    return pa.Array.from_buffers(
        pa.binary(), lengths.size, [validity(lengths), pa.py_buffer(offsets), pa.py_buffer(out)]
    )


def _arrays(plan: ColumnPlan, data: Bytes, starts: Longs, lengths: Longs) -> pa.Array:
    assert plan.element is not None
    offsets = np.empty(starts.size + 1, np.int32)
    delimiter = ord(plan.delimiter)
    check_value(plan, scan.count_elements(data, starts, lengths, delimiter, offsets))
    count = int(offsets[-1])
    inner_starts, inner_lengths = np.empty(count, np.int64), np.empty(count, np.int64)
    inner = np.empty(int(np.maximum(lengths, 0).sum()), np.uint8)
    scan.split_elements(data, starts, lengths, delimiter, inner, inner_starts, inner_lengths)
    child = decode_column(plan.element, inner, inner_starts, inner_lengths)
    return pa.Array.from_buffers(
        plan.arrow_type, lengths.size, [validity(lengths), pa.py_buffer(offsets)], children=[child]
    )


# -- the binary form ------------------------------------------------------------------------------------------------


def _binary_raw(plan: ColumnPlan, data: Bytes, starts: Longs, lengths: Longs) -> pa.Array:
    """What is the same bytes in both forms, but that bytes are printed as hexadecimal digits."""
    if plan.kind is Kind.BYTES:
        return _strings(plan, data, starts, lengths, pa.binary())
    return _texts(plan, data, starts, lengths)


def _binary_jsonb(plan: ColumnPlan, data: Bytes, starts: Longs, lengths: Longs) -> pa.Array:
    """The text behind one byte that says its version."""
    given = np.flatnonzero(lengths >= 0)
    if given.size and (lengths[given].min() < 1 or (data[starts[given]] != 1).any()):
        check_value(plan, (0, scan.MALFORMED))
    return _texts(plan, data, starts + 1, np.where(lengths < 0, lengths, lengths - 1))


def _printed(plan: ColumnPlan, lengths: Longs, sizes: Longs, print_to: Callable[[Any, Bytes], None]) -> pa.Array:
    offsets = _offsets(plan, sizes)
    out = np.empty(int(offsets[-1]), np.uint8)
    print_to(offsets, out)
    return pa.Array.from_buffers(
        pa.string(), lengths.size, [validity(lengths), pa.py_buffer(offsets), pa.py_buffer(out)]
    )


def _binary_numerics(plan: ColumnPlan, data: Bytes, starts: Longs, lengths: Longs) -> pa.Array:
    sizes = np.empty(starts.size, np.int64)
    check_value(plan, binary.numeric_sizes(data, starts, lengths, sizes))
    texts = (binary.NAN_TEXT, binary.INFINITY_TEXT)

    def print_to(offsets: Any, out: Bytes) -> None:
        binary.print_numerics(data, starts, lengths, offsets, *texts, out)

    return _printed(plan, lengths, sizes, print_to)


def _binary_uuids(plan: ColumnPlan, data: Bytes, starts: Longs, lengths: Longs) -> pa.Array:
    def print_to(offsets: Any, out: Bytes) -> None:
        check_value(plan, binary.print_uuids(data, starts, lengths, offsets, binary.HEX_DIGITS, out))

    return _printed(plan, lengths, np.where(lengths < 0, -1, 36), print_to)


_BINARY_DECODERS: Final[dict[Wire, Callable[[ColumnPlan, Bytes, Longs, Longs], pa.Array]]] = {
    Wire.RAW: _binary_raw,
    Wire.NUMERIC: _binary_numerics,
    Wire.JSONB: _binary_jsonb,
    Wire.UUID: _binary_uuids,
}
_DECODERS: Final[dict[Kind, Callable[[ColumnPlan, Bytes, Longs, Longs], pa.Array]]] = {
    Kind.BOOL: _bools,
    Kind.INT: _ints,
    Kind.FLOAT: _floats,
    Kind.DECIMAL: _decimals,
    Kind.TEXT: _texts,
    Kind.BYTES: _bytes,
    Kind.DATE: _dates,
    Kind.TIMESTAMP: _timestamps,
    Kind.ARRAY: _arrays,
}
