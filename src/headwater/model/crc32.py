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


def begun(count: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.full(count, 0xFFFFFFFF, np.uint32)


def ended(crcs: np.ndarray[Any, np.dtype[np.uint32]]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return crcs ^ np.uint32(0xFFFFFFFF)


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
    """Go on with the decimal digits of every int64; before them a separator, unless that is negative."""
    digits = np.empty(20, np.uint8)
    for i in range(crcs.size):
        number = numbers[i]
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
        crc = crcs[i]
        if separator >= 0:
            crc = _with(crc, separator)
        if number < 0:
            crc = _with(crc, 45)
        for j in range(np.uint64(first), np.uint64(20)):
            crc = _with(crc, digits[j])
        crcs[i] = crc
