"""CRC-32 of many byte slices, or of the digits of many numbers. Apart, so that only row-touching code loads numba."""

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


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def crc32_of_slices(raw, starts):  # type: ignore[no-untyped-def]
    """The CRC-32 of `raw[starts[i]:starts[i + 1]]` for every i."""
    out = np.empty(len(starts) - 1, np.uint32)
    for i in range(len(starts) - 1):
        crc = np.uint32(0xFFFFFFFF)
        for j in range(starts[i], starts[i + 1]):
            crc = (crc >> np.uint32(8)) ^ _LOOKUP[(crc ^ np.uint32(raw[j])) & np.uint32(0xFF)]
        out[i] = crc ^ np.uint32(0xFFFFFFFF)
    return out


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def crc32_of_numbers(numbers):  # type: ignore[no-untyped-def]
    """The CRC-32 of the decimal digits of every int64."""
    out = np.empty(numbers.size, np.uint32)
    digits = np.empty(20, np.uint8)
    for i in range(numbers.size):
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
        crc = np.uint32(0xFFFFFFFF)
        if number < 0:
            crc = (crc >> np.uint32(8)) ^ _LOOKUP[(crc ^ np.uint32(45)) & np.uint32(0xFF)]
        for j in range(np.uint64(first), np.uint64(20)):
            crc = (crc >> np.uint32(8)) ^ _LOOKUP[(crc ^ np.uint32(digits[j])) & np.uint32(0xFF)]
        out[i] = crc ^ np.uint32(0xFFFFFFFF)
    return out
