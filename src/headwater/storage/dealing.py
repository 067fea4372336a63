"""Rows dealt out by a small number that each has: places by counting instead of sorting. Apart, as it loads numba."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def dealt_out(numbers, count):  # type: ignore[no-untyped-def]
    """How many rows have each number below `count`, and each row's place if they are put in order by it, stably."""
    counts = np.zeros(count, np.int64)
    for i in range(numbers.size):
        counts[numbers[i]] += 1
    following = np.empty(count, np.int64)
    total = 0
    for number in range(count):
        following[number] = total
        total += counts[number]
    places = np.empty(numbers.size, np.int64)
    for i in range(numbers.size):
        places[i] = following[numbers[i]]
        following[numbers[i]] += 1
    return counts, places
