"""Compiled scanners over the binary values that Postgres sends: one pass per column, no Python object per value.

The same shape as `textscan.py`: `data`, `starts` and `lengths` (negative: NULL) in, `(row, fault)` out. All numbers are
big endian; days and microseconds count from 2000-01-01. A value whose length is not its type's is MALFORMED.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headwater.connectors.postgres.textscan import (
    FINE,
    MALFORMED,
    NOT_A_NUMBER,
    OUT_OF_RANGE,
    Bytes,
    Found,
    Longs,
    compiled,
    negated,
    times,
)
from headwater.connectors.postgres.types import INFINITY_DAYS, INFINITY_MICROS

_DAYS_TO_2000: Final = 10_957
_MICROS_TO_2000: Final = 946_684_800_000_000
_INT64_MAX: Final = (1 << 63) - 1
_INT64_MIN: Final = -(1 << 63)
_INT32_MAX: Final = (1 << 31) - 1
_INT32_MIN: Final = -(1 << 31)
_NEGATIVE: Final = 0x4000  # signs of a numeric
_NAN: Final = 0xC000
_PLUS_INFINITY: Final = 0xD000
_MINUS_INFINITY: Final = 0xF000
_HEAD: Final = 8  # of a numeric: count of digits, weight, sign, scale; two bytes each
NAN_TEXT: Final = np.frombuffer(b"NaN", np.uint8)
INFINITY_TEXT: Final = np.frombuffer(b"-Infinity", np.uint8)
HEX_DIGITS: Final = np.frombuffer(b"0123456789abcdef", np.uint8)


@compiled
def scan_rows(data: Bytes, at: int, starts: Longs, lengths: Longs) -> tuple[Any, Any]:
    """(rows, where they end) of the rows from `at` on; starts and lengths (column, row) are filled.

    The end is the trailer's, or the data's; -1 where a row has another number of fields or is not whole.
    """
    ncols = starts.shape[0]
    size = np.uint64(data.size)
    p = np.uint64(at)
    two, four = np.uint64(2), np.uint64(4)
    row = 0
    while p + two <= size:
        fields = _two(data, p)
        p += two
        if fields == -1:
            return row, np.int64(p)
        if fields != ncols:
            return row, -1
        for col in range(ncols):
            if p + four > size:
                return row, -1
            length = _four(data, p)
            p += four
            starts[col, row] = p
            lengths[col, row] = length
            if length > 0:
                p += np.uint64(length)
        if p > size:
            return row, -1
        row += 1
    return row, np.int64(p)


@compiled
def _two(data: Bytes, p: Any) -> Any:
    return np.int16((np.uint16(data[p]) << np.uint16(8)) | np.uint16(data[p + np.uint64(1)]))


@compiled
def _four(data: Bytes, p: Any) -> Any:
    a, b = np.uint32(data[p]), np.uint32(data[p + np.uint64(1)])
    c, d = np.uint32(data[p + np.uint64(2)]), np.uint32(data[p + np.uint64(3)])
    return np.int32((a << np.uint32(24)) | (b << np.uint32(16)) | (c << np.uint32(8)) | d)


@compiled
def _eight(data: Bytes, p: Any) -> Any:
    high = np.int64(_four(data, p))
    low = np.int64(np.uint32(_four(data, p + np.uint64(4))))
    return (high << np.int64(32)) | low


@compiled
def read_bools(data: Bytes, starts: Longs, lengths: Longs, out: NDArray[np.bool_]) -> Found:
    for i in range(starts.size):
        out[i] = False
        if lengths[i] < 0:
            continue
        if lengths[i] != 1:
            return i, MALFORMED
        out[i] = data[starts[i]] != 0
    return -1, FINE


@compiled
def read_numbers(data: Bytes, starts: Longs, lengths: Longs, width: int, out: Any) -> Found:
    """Integers of `width` bytes (2, 4 or 8) into an array of that width; a float's bits are read as those."""
    for i in range(starts.size):
        n = lengths[i]
        if n == width:
            p = np.uint64(starts[i])
            if width == 8:
                out[i] = _eight(data, p)
            elif width == 4:
                out[i] = _four(data, p)
            else:
                out[i] = _two(data, p)
        elif n < 0:
            out[i] = 0
        else:
            return i, MALFORMED
    return -1, FINE


@compiled
def read_dates(data: Bytes, starts: Longs, lengths: Longs, out: NDArray[np.int32]) -> Found:
    for i in range(starts.size):
        out[i] = 0
        if lengths[i] < 0:
            continue
        if lengths[i] != 4:
            return i, MALFORMED
        days = _four(data, np.uint64(starts[i]))
        if days == _INT32_MAX:
            out[i] = INFINITY_DAYS
        elif days == _INT32_MIN:
            out[i] = -INFINITY_DAYS
        else:
            out[i] = days + _DAYS_TO_2000
    return -1, FINE


@compiled
def read_timestamps(data: Bytes, starts: Longs, lengths: Longs, out: Longs) -> Found:
    for i in range(starts.size):
        out[i] = 0
        if lengths[i] < 0:
            continue
        if lengths[i] != 8:
            return i, MALFORMED
        micros = _eight(data, np.uint64(starts[i]))
        if micros == _INT64_MAX:
            out[i] = INFINITY_MICROS
        elif micros == _INT64_MIN:
            out[i] = -INFINITY_MICROS
        elif micros >= INFINITY_MICROS - _MICROS_TO_2000:
            return i, OUT_OF_RANGE
        else:
            out[i] = micros + _MICROS_TO_2000
    return -1, FINE


@compiled
def read_decimals(
    data: Bytes, starts: Longs, lengths: Longs, precision: int, scale: int, out: NDArray[np.uint64]
) -> Found:
    """Numerics as unscaled 128-bit integers, low word first. A numeric is a row of digits of base 10,000."""
    for i in range(starts.size):
        out[i, 0] = 0
        out[i, 1] = 0
        n = lengths[i]
        if n < 0:
            continue
        p = np.uint64(starts[i])
        if n < _HEAD:
            return i, MALFORMED
        count = _two(data, p)
        weight = _two(data, p + np.uint64(2))
        sign = _two(data, p + np.uint64(4)) & 0xFFFF
        if sign in (_NAN, _PLUS_INFINITY, _MINUS_INFINITY):
            return i, NOT_A_NUMBER
        if count < 0 or n != _HEAD + 2 * count:
            return i, MALFORMED
        while count > 0 and _two(data, p + np.uint64(_HEAD - 2 + 2 * count)) == 0:
            count -= 1
        if count == 0:
            continue
        first = _two(data, p + np.uint64(_HEAD))
        whole = 4 * weight + (1 if first < 10 else 2 if first < 100 else 3 if first < 1000 else 4)
        if whole + scale > precision:
            return i, OUT_OF_RANGE
        # What the last digit of base 10,000 has beyond the scale must be zeros; where it ends before, zeros follow.
        beyond = 4 * (count - 1 - weight) - scale
        low, high = np.uint64(0), np.uint64(0)
        for k in range(count):
            digit = _two(data, p + np.uint64(_HEAD + 2 * k))
            if digit < 0 or digit > 9999:
                return i, MALFORMED
            factor = 10_000
            if k == count - 1 and beyond > 0:
                if beyond > 3:
                    return i, OUT_OF_RANGE
                cut = 10 if beyond == 1 else 100 if beyond == 2 else 1000
                if digit % cut != 0:
                    return i, OUT_OF_RANGE
                digit //= cut
                factor //= cut
            low, high = times(low, high, np.uint64(factor), np.uint64(digit))
        for _ in range(-beyond):
            low, high = times(low, high, np.uint64(10), np.uint64(0))
        if sign == _NEGATIVE:
            low, high = negated(low, high)
        out[i, 0] = low
        out[i, 1] = high
    return -1, FINE


@compiled
def numeric_sizes(data: Bytes, starts: Longs, lengths: Longs, sizes: Longs) -> Found:
    """How long each numeric is as Postgres prints it; -1 for NULL."""
    for i in range(starts.size):
        n = lengths[i]
        sizes[i] = -1
        if n < 0:
            continue
        if n < _HEAD:
            return i, MALFORMED
        p = np.uint64(starts[i])
        count = _two(data, p)
        weight = _two(data, p + np.uint64(2))
        sign = _two(data, p + np.uint64(4)) & 0xFFFF
        scale = _two(data, p + np.uint64(6))
        if sign == _NAN:
            sizes[i] = 3
        elif sign == _PLUS_INFINITY:
            sizes[i] = 8
        elif sign == _MINUS_INFINITY:
            sizes[i] = 9
        elif count < 0 or scale < 0 or n != _HEAD + 2 * count:
            return i, MALFORMED
        else:
            whole = 1
            if count > 0 and weight >= 0:
                first = _two(data, p + np.uint64(_HEAD))
                whole = 4 * weight + (1 if first < 10 else 2 if first < 100 else 3 if first < 1000 else 4)
            sizes[i] = whole + (scale + 1 if scale > 0 else 0) + (1 if sign == _NEGATIVE else 0)
    return -1, FINE


@compiled
def _decimal_digit(data: Bytes, p: Any, count: int, weight: int, place: int) -> int:
    """The digit that stands for 10 ** place."""
    group = weight - (place // 4)  # Python's division: -1 // 4 is -1, the first group behind the point
    if group < 0 or group >= count:
        return 0
    digit = _two(data, p + np.uint64(_HEAD + 2 * group))
    below = place % 4
    digit //= 1 if below == 0 else 10 if below == 1 else 100 if below == 2 else 1000
    last: int = digit % 10
    return last


@compiled
def print_numerics(
    data: Bytes, starts: Longs, lengths: Longs, offsets: NDArray[np.int32], nan: Bytes, infinity: Bytes, out: Bytes
) -> None:
    """Numerics as Postgres prints them; `offsets` are the sums of `numeric_sizes`."""
    for i in range(starts.size):
        if lengths[i] < 0:
            continue
        p = np.uint64(starts[i])
        at = offsets[i]
        end = offsets[i + 1]
        count = _two(data, p)
        weight = _two(data, p + np.uint64(2))
        sign = _two(data, p + np.uint64(4)) & 0xFFFF
        scale = _two(data, p + np.uint64(6))
        if sign == _NAN:
            for k in range(3):
                out[at + k] = nan[k]
            continue
        if sign in (_PLUS_INFINITY, _MINUS_INFINITY):
            for k in range(end - at):
                out[at + k] = infinity[9 - (end - at) + k]
            continue
        if sign == _NEGATIVE:
            out[at] = 45
            at += 1
        place = end - at - 1 - (scale + 1 if scale > 0 else 0)
        while place >= 0:
            out[at] = 48 + _decimal_digit(data, p, count, weight, place)
            at += 1
            place -= 1
        if scale > 0:
            out[at] = 46
            at += 1
            while place >= -scale:
                out[at] = 48 + _decimal_digit(data, p, count, weight, place)
                at += 1
                place -= 1


@compiled
def print_uuids(
    data: Bytes, starts: Longs, lengths: Longs, offsets: NDArray[np.int32], digits: Bytes, out: Bytes
) -> Found:
    """16 bytes as 32 lower-case digits in five groups."""
    for i in range(starts.size):
        if lengths[i] < 0:
            continue
        if lengths[i] != 16:
            return i, MALFORMED
        p = np.uint64(starts[i])
        at = np.uint64(offsets[i])
        for k in range(16):
            if k == 4 or k == 6 or k == 8 or k == 10:
                out[at] = 45
                at += np.uint64(1)
            byte = data[p + np.uint64(k)]
            out[at] = digits[byte >> 4]
            out[at + np.uint64(1)] = digits[byte & 15]
            at += np.uint64(2)
    return -1, FINE
