"""Compiled code for the binary values that Postgres sends, without a Python object per value.

Values of a fixed size are read one by one, by the pass over the rows (`rowscan.py`). What has to be printed is done a
column at a time, in the same shape as `textscan.py`: `data`, `starts` and `lengths` (negative: NULL) in, `(row, fault)`
out. All numbers are big endian; days and microseconds count from 2000-01-01. A value whose length is not its type's is
MALFORMED.
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
    negated,
    times,
)
from headwater.connectors.postgres.types import INFINITY_DAYS, INFINITY_MICROS
from headwater.storage.compiled import compiled

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
_ONE_WORD_DIGITS: Final = 18  # what fits into 64 bits, whatever the digits are
_HEAD: Final = 8  # of a numeric: count of digits, weight, sign, scale; two bytes each
NAN_TEXT: Final = np.frombuffer(b"NaN", np.uint8)
INFINITY_TEXT: Final = np.frombuffer(b"-Infinity", np.uint8)
HEX_DIGITS: Final = np.frombuffer(b"0123456789abcdef", np.uint8)


@compiled
def two(data: Bytes, p: Any) -> Any:
    return np.int16((np.uint16(data[p]) << np.uint16(8)) | np.uint16(data[p + np.uint64(1)]))


@compiled
def four(data: Bytes, p: Any) -> Any:
    a, b = np.uint32(data[p]), np.uint32(data[p + np.uint64(1)])
    c, d = np.uint32(data[p + np.uint64(2)]), np.uint32(data[p + np.uint64(3)])
    return np.int32((a << np.uint32(24)) | (b << np.uint32(16)) | (c << np.uint32(8)) | d)


@compiled
def eight(data: Bytes, p: Any) -> Any:
    high = np.int64(four(data, p))
    low = np.int64(np.uint32(four(data, p + np.uint64(4))))
    return (high << np.int64(32)) | low


@compiled
def date_of(data: Bytes, p: Any) -> Any:
    """Days since 1970-01-01; infinite ones are the type's extreme values."""
    days = four(data, p)
    if days == _INT32_MAX:
        return np.int64(INFINITY_DAYS)
    if days == _INT32_MIN:
        return np.int64(-INFINITY_DAYS)
    return np.int64(days) + _DAYS_TO_2000


@compiled
def timestamp_of(data: Bytes, p: Any) -> Any:
    """(microseconds since 1970-01-01, fault)."""
    micros = eight(data, p)
    if micros == _INT64_MAX:
        return np.int64(INFINITY_MICROS), FINE
    if micros == _INT64_MIN:
        return np.int64(-INFINITY_MICROS), FINE
    if micros >= INFINITY_MICROS - _MICROS_TO_2000:
        return np.int64(0), OUT_OF_RANGE
    return micros + np.int64(_MICROS_TO_2000), FINE


@compiled
def decimal_of(data: Bytes, p: Any, size: int, precision: int, scale: int) -> Any:
    """(low, high, fault) of a numeric as an unscaled integer of 128 bits. It is a row of digits of base 10,000."""
    low, high = np.uint64(0), np.uint64(0)
    if size < _HEAD:
        return low, high, MALFORMED
    count = np.int64(two(data, p))
    weight = np.int64(two(data, p + np.uint64(2)))
    sign = np.int64(two(data, p + np.uint64(4))) & 0xFFFF
    if sign in (_NAN, _PLUS_INFINITY, _MINUS_INFINITY):
        return low, high, NOT_A_NUMBER
    if count < 0 or size != _HEAD + 2 * count:
        return low, high, MALFORMED
    while count > 0 and two(data, p + np.uint64(_HEAD - 2 + 2 * count)) == 0:
        count -= 1
    if count == 0:
        return low, high, FINE
    first = two(data, p + np.uint64(_HEAD))
    whole = 4 * weight + (1 if first < 10 else 2 if first < 100 else 3 if first < 1000 else 4)
    if whole + scale > precision:
        return low, high, OUT_OF_RANGE
    # What the last digit of base 10,000 has beyond the scale must be zeros; where it ends before, zeros follow.
    beyond = 4 * (count - 1 - weight) - scale
    if beyond > 3:
        return low, high, OUT_OF_RANGE
    for k in range(count):
        digit = np.int64(two(data, p + np.uint64(_HEAD + 2 * k)))
        if digit < 0 or digit > 9999:
            return low, high, MALFORMED
        factor = 10_000
        if k == count - 1 and beyond > 0:
            cut = 10 if beyond == 1 else 100 if beyond == 2 else 1000
            if digit % cut != 0:
                return low, high, OUT_OF_RANGE
            digit //= cut
            factor //= cut
        if precision <= _ONE_WORD_DIGITS:
            low = low * np.uint64(factor) + np.uint64(digit)
        else:
            low, high = times(low, high, np.uint64(factor), np.uint64(digit))
    for _ in range(-beyond):
        if precision <= _ONE_WORD_DIGITS:
            low *= np.uint64(10)
        else:
            low, high = times(low, high, np.uint64(10), np.uint64(0))
    if sign == _NEGATIVE:
        low, high = negated(low, high)
    return low, high, FINE


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
        count = two(data, p)
        weight = two(data, p + np.uint64(2))
        sign = two(data, p + np.uint64(4)) & 0xFFFF
        scale = two(data, p + np.uint64(6))
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
                first = two(data, p + np.uint64(_HEAD))
                whole = 4 * weight + (1 if first < 10 else 2 if first < 100 else 3 if first < 1000 else 4)
            sizes[i] = whole + (scale + 1 if scale > 0 else 0) + (1 if sign == _NEGATIVE else 0)
    return -1, FINE


@compiled
def _decimal_digit(data: Bytes, p: Any, count: int, weight: int, place: int) -> int:
    """The digit that stands for 10 ** place."""
    group = weight - (place // 4)  # Python's division: -1 // 4 is -1, the first group behind the point
    if group < 0 or group >= count:
        return 0
    digit = two(data, p + np.uint64(_HEAD + 2 * group))
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
        count = two(data, p)
        weight = two(data, p + np.uint64(2))
        sign = two(data, p + np.uint64(4)) & 0xFFFF
        scale = two(data, p + np.uint64(6))
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
