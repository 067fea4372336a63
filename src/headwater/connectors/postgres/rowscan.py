"""The compiled pass over rows as the server sends them: every value goes to its column.

    message   ┌ fields ┬ length ┬ value ┬ length ┬ value ┬ …        row i of the copy, wherever it begins
              └────────┴────────┴───────┴────────┴───────┴
    column    [ value of the first row, of the second, … ]

A block of rows at a time, which stays in a core's cache, is read column by column: first the values are found, and
where the next ones begin, then they are converted. So each loop does one thing for many rows that do not wait for each
other; row by row, with a choice by the column's kind for each value, it took twice as long.

All columns lie in one arena, which is passed in several widths, for compiled code knows no array of arrays: what a
column is (`kinds`), and where it begins, counted in its own width (`bases`), say the rest. Of values that `columns.py`
decodes the pass notes where they are; `wirerows.py` lays the arena out and makes Arrow columns of it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.connectors.postgres.binaryscan import (
    date_of,
    decimal_of,
    eight,
    four,
    timestamp_of,
    two,
)
from headwater.connectors.postgres.textscan import (
    FINE,
    MALFORMED,
    NOT_SMALL,
    Bytes,
    Longs,
    decimal_of_text,
    int_of,
    small_decimal,
)
from headwater.storage.compiled import compiled

# What a column is.
EIGHT: Final = 1  # bytes of a number
FOUR: Final = 2
TWO: Final = 3
BOOL: Final = 4
TIMESTAMP: Final = 5
DECIMAL: Final = 6
DECIMAL_TEXT: Final = 7
DATE: Final = 8
OID: Final = 9
FIELD: Final = 10  # where it begins is noted, and its length: -1 for NULL
EIGHT_TEXT: Final = 11  # a number's digits; it is stored in that many bytes
FOUR_TEXT: Final = 12
TWO_TEXT: Final = 13
BOOL_TEXT: Final = 14

ANY_LENGTH: Final = 1 << 40  # more than any

NARROW_DIGITS: Final = 18  # a decimal of up to that many is stored in 8 bytes, else in 16

ROW_MALFORMED: Final = -1  # instead of a column's number: the row has another number of fields, or is not whole
_NULL: Final = np.uint64(0xFFFFFFFFFFFFFFFF)  # where no value begins


@compiled
def find_messages(
    data: Bytes, at: Any, used: int, frame: int, starts: Longs, ends: Longs, count: int
) -> tuple[Any, int]:
    """Note the payloads of the frames of this type from `at` on; stops at an incomplete or another one, or when full.

    Gives where it stopped, and how many there are.
    """
    while count < starts.size and used - at >= 5 and data[np.uint64(at)] == frame:
        end = at + 1 + np.int64(np.uint32(four(data, np.uint64(at + 1))))
        if end > used or end < at + 5:
            break
        starts[count] = at + 5
        ends[count] = end
        count += 1
        at = end
    return at, count


class Columns(NamedTuple):
    """What the pass is told about the columns; compiled code takes it for that many arguments."""

    kinds: Longs
    sizes: Longs
    """How long each value is; ANY_LENGTH."""
    bases: Longs
    limits: NDArray[Any]
    """(precision, scale) of decimals, the (least, greatest) of integers whose digits are read."""
    slots: Longs
    """A column's first row of `fields`."""
    arena: Bytes
    arena2: NDArray[Any]
    arena4: NDArray[Any]
    arena8: Longs
    valid: NDArray[Any]
    """A column's bits, all set; NULLs clear them, and are counted."""
    nulls: Longs
    fields: NDArray[Any]


@compiled
def read_rows(data: Bytes, starts: Longs, ends: Longs, columns: Columns, block: int) -> tuple[int, int]:
    """Read all rows, `block` rows at a time; (column, fault) of a value that cannot be read."""
    values, following = np.empty((2, block), np.uint64)
    lengths = np.empty(block, np.int32)
    for first in range(0, starts.size, block):
        after = min(first + block, starts.size)
        block_ends = ends[first:after]
        if not _begin_rows(data, starts[first:after], block_ends, columns.kinds.size, following):
            return ROW_MALFORMED, MALFORMED
        for c in range(columns.kinds.size):
            found = _find_values(data, block_ends, columns.sizes[c], following, values, lengths)
            if found == -1:
                return ROW_MALFORMED, MALFORMED
            if found < 0:
                return _at_fault(c, data, starts[first:after], block_ends, columns.kinds.size), MALFORMED
            if found:
                columns.nulls[c] += found
                _note_nulls(values[: after - first], first, columns.valid[c])
            fault = _convert(c, data, values[: after - first], lengths, first, columns)
            if fault != FINE:
                return _at_fault(c, data, starts[first:after], block_ends, columns.kinds.size), fault
        for r in range(np.uint64(after - first)):
            if following[r] != np.uint64(block_ends[r]):
                return ROW_MALFORMED, MALFORMED
    return 0, FINE


@compiled
def _at_fault(column: int, data: Bytes, starts: Longs, ends: Longs, fields: int) -> int:
    """The column whose value cannot be read, unless a length is wrong: then what was taken for a value is none."""
    for r in range(starts.size):
        at = starts[r] + 2
        for _ in range(fields):
            if at + 4 > ends[r]:
                return ROW_MALFORMED
            length = np.int64(four(data, np.uint64(at)))
            at += 4 + max(length, np.int64(0))
            if length < -1 or at > ends[r]:
                return ROW_MALFORMED
        if at != ends[r]:
            return ROW_MALFORMED
    return column


@compiled
def _begin_rows(data: Bytes, starts: Longs, ends: Longs, fields: int, following: Any) -> bool:
    for r in range(np.uint64(starts.size)):
        p = np.uint64(starts[r])
        if p + np.uint64(2) > np.uint64(ends[r]) or two(data, p) != fields:
            return False
        following[r] = p + np.uint64(2)
    return True


@compiled
def _find_values(data: Bytes, ends: Longs, size: int, following: Any, values: Any, lengths: Any) -> int:
    """Where the next value of each row begins, and its length; `following` goes behind it.

    Gives how many are NULL; -1: a row is not whole, -2: a value has not the size that it should.
    """
    nulls = 0
    whole = np.uint64(4 + size)
    for r in range(np.uint64(ends.size)):
        p, end = following[r], np.uint64(ends[r])
        if p + np.uint64(4) > end:
            return -1
        length = four(data, p)
        if length == size and p + whole <= end:
            values[r] = p + np.uint64(4)
            following[r] = p + whole
        elif length == -1:
            values[r] = _NULL
            following[r] = p + np.uint64(4)
            nulls += 1
        else:
            if length < 0 or p + np.uint64(4) + np.uint64(length) > end:
                return -1
            if size != ANY_LENGTH:
                return -2
            values[r] = p + np.uint64(4)
            following[r] = p + np.uint64(4) + np.uint64(length)
        lengths[r] = length
    return nulls


@compiled
def _note_nulls(values: Any, first: int, valid: Any) -> None:
    for r in range(np.uint64(values.size)):
        if values[r] == _NULL:
            row = np.uint64(first) + r
            valid[row >> np.uint64(3)] &= ~np.uint8(np.uint8(1) << np.uint8(row & np.uint64(7)))


@compiled
def _convert(column: int, data: Bytes, values: Any, lengths: Any, first: int, columns: Columns) -> Any:
    """The values of a block, or where they are, to their column.

    Zeros under a NULL: the arena is fresh memory, and what is under a NULL is written to files.
    """
    kind = columns.kinds[column]
    to = np.uint64(columns.bases[column] + first)
    count = np.uint64(values.size)
    arena4, arena8 = columns.arena4, columns.arena8
    if kind == EIGHT:
        for r in range(count):
            arena8[to + r] = eight(data, values[r]) if values[r] != _NULL else np.int64(0)
    elif kind == FOUR:
        for r in range(count):
            arena4[to + r] = four(data, values[r]) if values[r] != _NULL else np.int32(0)
    elif kind == TWO:
        for r in range(count):
            columns.arena2[to + r] = two(data, values[r]) if values[r] != _NULL else np.int16(0)
    elif kind == TIMESTAMP:
        for r in range(count):
            arena8[to + r] = 0
            if values[r] != _NULL:
                arena8[to + r], fault = timestamp_of(data, values[r])
                if fault != FINE:
                    return fault
    elif kind == FIELD:
        return _note_fields(columns.slots[column], values, lengths, first, columns.fields)
    elif kind in (DECIMAL, DECIMAL_TEXT):
        return _convert_decimals(column, data, values, lengths, first, columns)
    elif kind == DATE:
        for r in range(count):
            arena4[to + r] = date_of(data, values[r]) if values[r] != _NULL else np.int64(0)
    elif kind == OID:
        for r in range(count):
            arena8[to + r] = np.int64(np.uint32(four(data, values[r]))) if values[r] != _NULL else np.int64(0)
    elif kind in (BOOL, BOOL_TEXT):
        return _convert_bools(kind, data, values, first, columns.arena[columns.bases[column] :])
    else:
        return _convert_digits(column, data, values, lengths, first, columns)
    return FINE


@compiled
def _note_fields(slot: int, values: Any, lengths: Any, first: int, fields: Any) -> int:
    starts, sizes = fields[slot, first:], fields[slot + 1, first:]
    for r in range(np.uint64(values.size)):
        starts[r] = values[r] if values[r] != _NULL else np.uint64(0)
        sizes[r] = lengths[r]
    return FINE


@compiled
def _convert_bools(kind: int, data: Bytes, values: Any, first: int, out: Bytes) -> int:
    """Bits of zeroed memory are set."""
    for r in range(np.uint64(values.size)):
        if values[r] == _NULL:
            continue
        value = data[values[r]]
        if kind == BOOL_TEXT:
            if value != 116 and value != 102:
                return MALFORMED
            value = np.uint8(value == 116)
        if value != 0:
            row = np.uint64(first) + r
            out[row >> np.uint64(3)] |= np.uint8(np.uint8(1) << np.uint8(row & np.uint64(7)))
    return FINE


@compiled
def _convert_decimals(column: int, data: Bytes, values: Any, lengths: Any, first: int, columns: Columns) -> Any:
    as_text = columns.kinds[column] == DECIMAL_TEXT
    precision, scale = columns.limits[column, 0], columns.limits[column, 1]
    narrow = precision <= NARROW_DIGITS
    to = np.uint64(columns.bases[column] + (first if narrow else 2 * first))
    arena8 = columns.arena8
    for r in range(np.uint64(values.size)):
        low, high, fault = np.uint64(0), np.uint64(0), FINE
        if values[r] == _NULL:
            pass
        elif as_text:
            few = small_decimal(data, values[r], lengths[r], precision, scale)
            if few != NOT_SMALL:
                low, high = np.uint64(few), np.uint64(few >> np.int64(63))
            else:
                low, high, fault = decimal_of_text(data, values[r], lengths[r], precision, scale)
        else:
            low, high, fault = decimal_of(data, values[r], lengths[r], precision, scale)
        if fault != FINE:
            return fault
        if narrow:
            arena8[to + r] = low
        else:
            arena8[to + r + r] = low
            arena8[to + r + r + np.uint64(1)] = high
    return FINE


@compiled
def _convert_digits(column: int, data: Bytes, values: Any, lengths: Any, first: int, columns: Columns) -> Any:
    kind = columns.kinds[column]
    least, greatest = columns.limits[column, 0], columns.limits[column, 1]
    to = np.uint64(columns.bases[column] + first)
    for r in range(np.uint64(values.size)):
        value, fault = np.int64(0), FINE
        if values[r] != _NULL:
            value, fault = int_of(data, values[r], lengths[r], least, greatest)
            if fault != FINE:
                return fault
        if kind == EIGHT_TEXT:
            columns.arena8[to + r] = value
        elif kind == FOUR_TEXT:
            columns.arena4[to + r] = value
        else:
            columns.arena2[to + r] = value
    return FINE
