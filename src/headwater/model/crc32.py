"""CRC-32 of many keys at once, column by column: of byte slices, and of numbers' digits without making their text.

Apart from `vnode.py`, so that only row-touching code loads numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


def _lookup_table() -> np.ndarray[Any, np.dtype[np.uint32]]:
    table = np.zeros(256, np.uint32)
    for i in range(256):
        value = i
        for _ in range(8):
            value = (value >> 1) ^ (0xEDB88320 if value & 1 else 0)
        table[i] = value
    return table


_LOOKUP = _lookup_table()


def initial(count: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.full(count, 0xFFFFFFFF, np.uint32)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def modulo(crcs, count):  # type: ignore[no-untyped-def]
    """What is left of each sum when it is ended and divided by `count`."""
    out = np.empty(crcs.size, np.int32)
    divisor = np.uint32(count)
    if divisor & (divisor - np.uint32(1)) == 0:  # a power of two, as it mostly is, needs no division
        for i in range(np.uint64(crcs.size)):
            out[i] = (crcs[i] ^ np.uint32(0xFFFFFFFF)) & (divisor - np.uint32(1))
    else:
        for i in range(np.uint64(crcs.size)):
            out[i] = (crcs[i] ^ np.uint32(0xFFFFFFFF)) % divisor
    return out


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _with(crc, byte):  # type: ignore[no-untyped-def]
    return (crc >> np.uint32(8)) ^ _LOOKUP[(crc ^ np.uint32(byte)) & np.uint32(0xFF)]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def add_slices(crcs, separator, raw, starts):  # type: ignore[no-untyped-def]
    """Go on with `raw[starts[i]:starts[i + 1]]` for every i; before it a separator, unless that is negative."""
    for i in range(crcs.size):
        crc = crcs[i]
        if separator >= 0:
            crc = _with(crc, separator)
        for j in range(starts[i], starts[i + 1]):
            crc = _with(crc, raw[j])
        crcs[i] = crc


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def add_numbers(crcs, separator, numbers):  # type: ignore[no-untyped-def]
    """Go on with the decimal digits of every int64; before them a separator, unless that is negative.

    Keys mostly come in order, so that all digits but the last two are those of the row before, and so is what they do
    to a sum that began as that one's did.
    """
    digits = np.empty(20, np.uint8)
    known_begun, known_ahead, known = np.uint32(0), np.uint64(0), np.uint32(0)
    for i in range(np.uint64(crcs.size)):
        number, crc = numbers[i], crcs[i]
        if number < 100:
            crcs[i] = _with_digits(crc, separator, number, digits)
            continue
        ahead = np.uint64(number) // np.uint64(100)
        if ahead != known_ahead or crc != known_begun:
            known_begun, known_ahead, known = crc, ahead, _with_digits(crc, separator, np.int64(ahead), digits)
        last = np.uint64(number) - ahead * np.uint64(100)
        tens = last // np.uint64(10)
        crcs[i] = _with(_with(known, np.uint64(48) + tens), np.uint64(48) + last - tens * np.uint64(10))


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _with_digits(crc, separator, number, digits):  # type: ignore[no-untyped-def]
    rest = np.uint64(number)
    if number < 0:
        rest = ~rest + np.uint64(1)  # also of the least, which has no opposite
    first = 20
    while True:
        tenth = rest // np.uint64(10)
        first -= 1
        digits[np.uint64(first)] = np.uint8(48) + np.uint8(rest - tenth * np.uint64(10))
        rest = tenth
        if rest == 0:
            break
    if separator >= 0:
        crc = _with(crc, separator)
    if number < 0:
        crc = _with(crc, 45)
    for j in range(np.uint64(first), np.uint64(20)):
        crc = _with(crc, digits[j])
    return crc
