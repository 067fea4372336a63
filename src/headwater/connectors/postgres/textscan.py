"""Compiled scanners over the text that Postgres prints: one pass per column, no Python object per value.

Every scanner takes `data` (uint8), `starts` and `lengths` (int64; a negative length is NULL), fills its output and
returns `(row, fault)`: the first value that it cannot take and why, or `(-1, FINE)`. `columns.py` chooses the scanner,
allocates, and turns a fault into an error that names the column.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headwater.connectors.postgres.types import INFINITY_DAYS, INFINITY_MICROS
from headwater.storage.bytecopy import copy_bytes, load_eight
from headwater.storage.compiled import compiled, inlined

Bytes = NDArray[Any]  # of uint8; an element is Any, since compiled code and mypy disagree about its arithmetic
Longs = NDArray[Any]  # of int64
Found = tuple[int, int]

FINE: Final = 0
MALFORMED: Final = 1  # not the text that Postgres prints under our session settings
OUT_OF_RANGE: Final = 2  # a real value that the type cannot hold
NOT_A_NUMBER: Final = 3
MULTI_DIMENSIONAL: Final = 4
LOWER_BOUND: Final = 5

_DAY_MICROS: Final = 86_400_000_000
_LAST_DAY: Final = 106_751_991  # days of the largest int64 of microseconds
_LAST_DAY_MICROS: Final = 14_454_775_807  # and the microseconds of that day, which mean infinity
_INT64_TENTH: Final = -922_337_203_685_477_580
NOT_SMALL: Final = np.int64(1 << 62)
_ALL: Final = np.uint64(0xFFFFFFFFFFFFFFFF)  # words of eight characters
_ZEROS: Final = np.uint64(0x3030303030303030)
_SIXES: Final = np.uint64(0x0606060606060606)
_THREES: Final = np.uint64(0x3333333333333333)
_HIGH_HALVES: Final = np.uint64(0xF0F0F0F0F0F0F0F0)
_LOW_HALVES: Final = np.uint64(0x0F0F0F0F0F0F0F0F)


@compiled
def text_offsets(lengths: Longs, offsets: Any) -> int:
    """Where each value goes in a buffer that holds all of them; gives the buffer's size, which may be too large."""
    total = np.int64(0)
    for i in range(np.uint64(lengths.size)):
        offsets[i] = total
        total += max(np.int64(lengths[i]), np.int64(0))
    offsets[lengths.size] = total
    return int(total)


@compiled
def gather(data: Bytes, starts: Longs, lengths: Longs, offsets: NDArray[np.int32], out: Bytes) -> None:
    """Copy the values one after the other to `out`; `offsets` says where each goes."""
    for i in range(starts.size):
        if lengths[i] > 0:
            copy_bytes(data, np.uint64(starts[i]), out, np.uint64(offsets[i]), np.uint64(lengths[i]))


@compiled
def parse_bools(data: Bytes, starts: Longs, lengths: Longs, out: NDArray[np.bool_]) -> Found:
    """`t` and `f`."""
    for i in range(starts.size):
        out[i] = False
        if lengths[i] < 0:
            continue
        c = data[starts[i]] if lengths[i] == 1 else 0
        if c == 116:
            out[i] = True
        elif c != 102:
            return i, MALFORMED
    return -1, FINE


@inlined
def _last_eight(data: Bytes, end: Any, n: Any) -> Any:
    """The `n` characters before `end` as a word of eight, behind zeros; n is 1 to 8, and end at least 8."""
    unwanted = (np.uint64(8) - n) << np.uint64(3)
    wanted = (_ALL >> unwanted) << unwanted
    return (load_eight(data, end - np.uint64(8)) & wanted) | (_ZEROS & ~wanted)


@inlined
def _eight_digits(word: Any) -> Any:
    """The number that eight characters are, the first one in the lowest byte; -1 if not all of them are digits."""
    if ((word & _HIGH_HALVES) | (((word + _SIXES) & _HIGH_HALVES) >> np.uint64(4))) != _THREES:
        return np.int64(-1)
    word = (word & _LOW_HALVES) * np.uint64(10) + ((word & _LOW_HALVES) >> np.uint64(8))
    pairs = word & np.uint64(0x00FF00FF00FF00FF)
    fours = pairs * np.uint64(100) + (pairs >> np.uint64(16))
    fours &= np.uint64(0x0000FFFF0000FFFF)
    return np.int64((fours * np.uint64(10_000) + (fours >> np.uint64(32))) & np.uint64(0xFFFFFFFF))


@compiled
def int_of(data: Bytes, start: Any, n: int, low: int, high: int) -> Any:
    """(value, fault) of a decimal integer in `low .. high`."""
    # Unsigned positions throughout: one that may be negative is tested for each byte.
    p, end = np.uint64(start), np.uint64(start) + np.uint64(n)
    negative = n > 0 and data[p] == 45
    if negative:
        p += np.uint64(1)
    if p == end:
        return 0, MALFORMED
    if end - p <= np.uint64(8) and end >= np.uint64(8):
        few = _eight_digits(_last_eight(data, end, end - p))
        if few >= 0:  # else the loop says what is wrong
            few = -few if negative else few
            return few, FINE if low <= few <= high else OUT_OF_RANGE
    acc: Any = 0  # negative throughout: the minimum has no positive twin
    while p < end:
        d = np.int64(data[p]) - 48
        if d < 0 or d > 9:
            return 0, MALFORMED
        if acc < _INT64_TENTH or (acc == _INT64_TENTH and d > 8):
            return 0, OUT_OF_RANGE
        acc = acc * 10 - d
        p += np.uint64(1)
    if not negative:
        if acc == -INFINITY_MICROS - 1:
            return 0, OUT_OF_RANGE
        acc = -acc
    if acc < low or acc > high:
        return 0, OUT_OF_RANGE
    return acc, FINE


@compiled
def parse_ints(data: Bytes, starts: Longs, lengths: Longs, low: int, high: int, out: Longs) -> Found:
    """Decimal integers in `low .. high`."""
    for i in range(starts.size):
        out[i] = 0
        if lengths[i] < 0:
            continue
        value, fault = int_of(data, starts[i], lengths[i], low, high)
        if fault != FINE:
            return i, fault
        out[i] = value
    return -1, FINE


@compiled
def _two(data: Bytes, p: int) -> int:
    """Two digits as a number, or -1."""
    a = data[p] - 48
    b = data[p + 1] - 48
    if a < 0 or a > 9 or b < 0 or b > 9:
        return -1
    pair: int = a * 10 + b
    return pair


@compiled
def _days(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01 in the proleptic Gregorian calendar; year 0 is 1 BC."""
    y = year - 1 if month <= 2 else year
    era = y // 400
    of_era = y - era * 400
    of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


@compiled
def _date(data: Bytes, p: int, end: int, bc: bool) -> tuple[int, int]:
    """(days, where the text goes on); the position is -1 for malformed text. The year has four digits or more."""
    year = 0
    first = p
    while p < end and 48 <= data[p] <= 57 and p - first < 8:
        year = year * 10 + data[p] - 48
        p += 1
    if p - first < 4 or end - p < 6 or data[p] != 45 or data[p + 3] != 45:
        return 0, -1
    month = _two(data, p + 1)
    day = _two(data, p + 4)
    if month < 1 or month > 12 or day < 1 or day > 31:
        return 0, -1
    return _days(1 - year if bc else year, month, day), p + 6


@compiled
def _time(data: Bytes, p: int, end: int) -> tuple[int, int]:
    """(microseconds, where the text goes on) of `HH:MM:SS[.ffffff]`; the position is -1 for malformed text."""
    if end - p < 8 or data[p + 2] != 58 or data[p + 5] != 58:
        return 0, -1
    hour = _two(data, p)
    minute = _two(data, p + 3)
    second = _two(data, p + 6)
    if hour < 0 or minute < 0 or second < 0:
        return 0, -1
    p += 8
    fraction = 0
    if p < end and data[p] == 46:
        p += 1
        unit = 100_000
        while p < end and 48 <= data[p] <= 57 and unit > 0:
            fraction += (data[p] - 48) * unit
            unit //= 10
            p += 1
    return ((hour * 60 + minute) * 60 + second) * 1_000_000 + fraction, p


@compiled
def _zone(data: Bytes, p: int, end: int) -> tuple[int, int]:
    """(microseconds east of UTC, where the text goes on) of `+HH[:MM[:SS]]`; the position is -1 for malformed text."""
    if end - p < 3 or (data[p] != 43 and data[p] != 45):
        return 0, -1
    west = data[p] == 45
    seconds = 0
    unit = 3600
    while True:  # at the sign, then at each colon
        part = _two(data, p + 1)
        if part < 0:
            return 0, -1
        seconds += part * unit
        unit //= 60
        p += 3
        if unit == 0 or end - p < 3 or data[p] != 58:
            break
    return (-seconds if west else seconds) * 1_000_000, p


@compiled
def _infinite(data: Bytes, start: int, n: int) -> int:
    """1 for `infinity`, -1 for `-infinity`, else 0."""
    if n == 8 and data[start] == 105:
        return 1
    if n == 9 and data[start] == 45 and data[start + 1] == 105:
        return -1
    return 0


@compiled
def parse_dates(data: Bytes, starts: Longs, lengths: Longs, out: NDArray[np.int32]) -> Found:
    """ISO dates, `BC` included. All of Postgres' dates fit into 32 bits of days."""
    for i in range(starts.size):
        out[i] = 0
        n = lengths[i]
        if n < 0:
            continue
        p = starts[i]
        sign = _infinite(data, p, n)
        if sign != 0:
            out[i] = sign * INFINITY_DAYS
            continue
        end = p + n
        bc = n > 3 and data[end - 1] == 67 and data[end - 2] == 66 and data[end - 3] == 32
        if bc:
            end -= 3
        days, p = _date(data, p, end, bc)
        if p != end:
            return i, MALFORMED
        if days >= INFINITY_DAYS or days <= -INFINITY_DAYS:
            return i, OUT_OF_RANGE
        out[i] = days
    return -1, FINE


@compiled
def parse_timestamps(data: Bytes, starts: Longs, lengths: Longs, zoned: bool, out: Longs) -> Found:
    """ISO timestamps as microseconds since 1970; a zoned one has its offset from UTC in the text."""
    for i in range(starts.size):
        out[i] = 0
        n = lengths[i]
        if n < 0:
            continue
        p = starts[i]
        sign = _infinite(data, p, n)
        if sign != 0:
            out[i] = sign * INFINITY_MICROS
            continue
        end = p + n
        bc = n > 3 and data[end - 1] == 67 and data[end - 2] == 66 and data[end - 3] == 32
        if bc:
            end -= 3
        days, p = _date(data, p, end, bc)
        if p < 0 or p >= end or data[p] != 32:
            return i, MALFORMED
        micros, p = _time(data, p + 1, end)
        if p >= 0 and zoned:
            east, p = _zone(data, p, end)
            micros -= east
        if p != end:
            return i, MALFORMED
        if days > _LAST_DAY or (days == _LAST_DAY and micros >= _LAST_DAY_MICROS):
            return i, OUT_OF_RANGE
        out[i] = days * _DAY_MICROS + micros
    return -1, FINE


@compiled
def times(low: Any, high: Any, factor: Any, plus: Any) -> tuple[Any, Any]:
    """128 bits (low, high) times a number below 2 ** 32, plus one below 2 ** 32."""
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    a = (low & mask) * factor + plus
    b = (low >> shift) * factor + (a >> shift)
    return (b << shift) | (a & mask), high * factor + (b >> shift)


@compiled
def negated(low: Any, high: Any) -> tuple[Any, Any]:
    low = ~low + np.uint64(1)
    return low, ~high + (np.uint64(1) if low == 0 else np.uint64(0))


@compiled
def _wide_decimal(data: Bytes, p: Any, end: Any, zeros: int) -> tuple[np.uint64, np.uint64]:
    """The digits of `data[p:end]` (signs and points skipped) times 10 ** zeros as 128 bits (low, high)."""
    ten = np.uint64(10)
    low = np.uint64(0)
    high = np.uint64(0)
    while p < end or zeros > 0:
        digit = np.uint64(0)
        if p < end:
            c = data[p]
            p += np.uint64(1)
            if c < 48:
                continue
            digit = np.uint64(c - 48)
        else:
            zeros -= 1
        low, high = times(low, high, ten, digit)
    return low, high


@inlined
def small_decimal(data: Bytes, p: Any, length: Any, precision: int, scale: int) -> Any:
    """A numeric of up to eight characters, with as many digits behind its point as it should have; else NOT_SMALL.

    Most are, and to be looked at first: small enough to become part of a loop, it takes a third of `decimal_of_text`.
    """
    negative = np.uint64(1) if length > 0 and data[p] == 45 else np.uint64(0)
    n, end = np.uint64(length) - negative, p + np.uint64(length)
    point = np.uint64(1) if scale > 0 else np.uint64(0)
    if n > np.uint64(8) or end < np.uint64(8) or n < np.uint64(scale) + np.uint64(1) + point:
        return NOT_SMALL
    if np.int64(n - point) > precision:
        return NOT_SMALL
    word = _last_eight(data, end, n)
    if scale > 0:
        at = np.uint64(7 - scale) << np.uint64(3)
        if (word >> at) & np.uint64(0xFF) != np.uint64(46):
            return NOT_SMALL
        ahead = word & ((np.uint64(1) << at) - np.uint64(1))
        behind = (word >> (at + np.uint64(8))) << (at + np.uint64(8))
        word = behind | (ahead << np.uint64(8)) | np.uint64(48)
    few = _eight_digits(word)
    if few < 0:
        return NOT_SMALL
    return -few if negative else few


@compiled
def decimal_of_text(data: Bytes, start: Any, n: int, precision: int, scale: int) -> Any:
    """(low, high, fault) of a numeric as an unscaled integer of 128 bits: one multiplication per digit, of 64 bits as
    long as there are 18 at most."""
    low, high = np.uint64(0), np.uint64(0)
    p, end = np.uint64(start), np.uint64(start) + np.uint64(n)
    negative = n > 0 and data[p] == 45
    if negative:
        p += np.uint64(1)
    first = p
    acc: Any = 0
    digits = 0
    behind: Any = -1  # the point; that many digits
    while p < end:
        c = np.int64(data[p])
        if 48 <= c <= 57:
            if digits > 0 or c > 48:
                digits += 1
            if digits <= 18:
                acc = acc * 10 + c - 48
        elif c == 46 and behind < 0:
            behind = np.int64(end - p) - 1
        else:
            return low, high, NOT_A_NUMBER if c == 78 or c == 73 else MALFORMED
        p += np.uint64(1)
    if np.int64(end - first) - (1 if behind >= 0 else 0) < 1:
        return low, high, MALFORMED
    in_one = digits <= 18
    # Zeros beyond the scale are nothing: a column that got more digits prints them behind all of its values.
    for _ in range(behind - scale):
        end -= np.uint64(1)
        if data[end] != 48:
            return low, high, OUT_OF_RANGE
        behind -= 1
        digits -= 1
        acc //= 10
    digits = max(digits, 0)
    zeros = scale - max(behind, 0)
    if digits > 0 and digits + zeros > precision:
        return low, high, OUT_OF_RANGE
    if in_one and digits + zeros <= 18:
        for _ in range(zeros):
            acc *= 10
        low = np.uint64(acc)
    else:
        low, high = _wide_decimal(data, first, end, zeros)
    if negative and digits > 0:
        low, high = negated(low, high)
    return low, high, FINE


@compiled
def parse_decimals(
    data: Bytes, starts: Longs, lengths: Longs, precision: int, scale: int, out: NDArray[np.uint64]
) -> Found:
    """Numerics as unscaled 128-bit integers, low word first."""
    for i in range(starts.size):
        out[i, 0] = 0
        out[i, 1] = 0
        if lengths[i] < 0:
            continue
        low, high, fault = decimal_of_text(data, starts[i], lengths[i], precision, scale)
        if fault != FINE:
            return i, fault
        out[i, 0] = low
        out[i, 1] = high
    return -1, FINE


@compiled
def _nibble(c: int) -> int:
    if 48 <= c <= 57:
        return c - 48
    if 97 <= c <= 102:
        return c - 87
    return -1


@compiled
def parse_hex(data: Bytes, starts: Longs, lengths: Longs, offsets: NDArray[np.int32], out: Bytes) -> Found:
    r"""bytea as `\x` and lower-case hexadecimal digits."""
    for i in range(starts.size):
        n = lengths[i]
        if n < 0:
            continue
        p = starts[i]
        if n < 2 or n % 2 != 0 or data[p] != 92 or data[p + 1] != 120:
            return i, MALFORMED
        at = offsets[i]
        for k in range(1, n // 2):
            high = _nibble(data[p + 2 * k])
            low = _nibble(data[p + 2 * k + 1])
            if high < 0 or low < 0:
                return i, MALFORMED
            out[at + k - 1] = high * 16 + low
    return -1, FINE


@compiled
def count_elements(data: Bytes, starts: Longs, lengths: Longs, delimiter: int, offsets: NDArray[np.int32]) -> Found:
    """Check that every value is a one-dimensional array `{…}`; fill `offsets` (one more than values) with totals."""
    total = 0
    offsets[0] = 0
    for i in range(starts.size):
        n = lengths[i]
        if n >= 0:
            p = starts[i]
            end = p + n - 1
            if n > 0 and data[p] == 91:
                return i, LOWER_BOUND
            if n < 2 or data[p] != 123 or data[end] != 125:
                return i, MALFORMED
            p += 1
            if p < end:
                total += 1
            while p < end:
                c = data[p]
                if c == 123:
                    return i, MULTI_DIMENSIONAL
                if c == 125:
                    return i, MALFORMED
                if c == delimiter:
                    total += 1
                elif c == 34:
                    p += 1
                    while p < end and data[p] != 34:
                        p += 2 if data[p] == 92 else 1
                    if p >= end:
                        return i, MALFORMED
                p += 1
        offsets[i + 1] = total
    return -1, FINE


@compiled
def split_elements(
    data: Bytes, starts: Longs, lengths: Longs, delimiter: int, out: Bytes, out_starts: Longs, out_lengths: Longs
) -> None:
    """Write the elements of arrays that `count_elements` has accepted to `out`, without quotes; NULL has length -1."""
    e = 0
    at = 0
    for i in range(starts.size):
        if lengths[i] <= 2:
            continue
        p = starts[i] + 1
        end = starts[i] + lengths[i] - 1
        while p <= end:
            out_starts[e] = at
            quoted = False
            while p < end and data[p] != delimiter:
                if data[p] == 34:
                    quoted = True
                    p += 1
                    while data[p] != 34:
                        if data[p] == 92:
                            p += 1
                        out[at] = data[p]
                        at += 1
                        p += 1
                    p += 1
                else:
                    out[at] = data[p]
                    at += 1
                    p += 1
            s = out_starts[e]
            out_lengths[e] = at - s
            if (
                not quoted
                and at - s == 4
                and out[s] == 78
                and out[s + 1] == 85
                and out[s + 2] == 76
                and out[s + 3] == 76
            ):
                out_lengths[e] = -1
            e += 1
            p += 1
