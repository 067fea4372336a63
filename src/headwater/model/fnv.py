"""FNV-1a of many byte slices at once, compiled by numba. Apart, so that only row-touching code loads numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def fnv_of_slices(raw: Any, starts: Any) -> Any:
    """FNV-1a of `raw[starts[i]:starts[i + 1]]` for every i."""
    out = np.empty(len(starts) - 1, np.uint64)
    for i in range(len(starts) - 1):
        value = np.uint64(0xCBF29CE484222325)
        for j in range(starts[i], starts[i + 1]):
            value = (value ^ np.uint64(raw[j])) * np.uint64(0x100000001B3)
        out[i] = value
    return out
