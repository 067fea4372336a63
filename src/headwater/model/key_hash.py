"""A 64-bit number for each row's key: where an index has it. Equal keys have equal numbers, and perhaps others too."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.model.vnode import key_text


def key_hashes(rows: pa.Table, key: tuple[str, ...]) -> NDArray[np.uint64]:
    """An integer stands for itself; everything else is hashed by its canonical text; NULL has the number of 0 or ''."""
    if len(key) == 1 and pa.types.is_integer(rows.column(key[0]).type):
        numbers: NDArray[np.int64] = pc.fill_null(rows.column(key[0]), 0).to_numpy().astype(np.int64)
        return numbers.view(np.uint64)
    text = pc.fill_null(key_text(rows, key), "")
    text = (text.combine_chunks() if isinstance(text, pa.ChunkedArray) else text).cast(pa.large_string())
    if len(text) == 0:
        return np.empty(0, np.uint64)
    _, offsets, data = text.buffers()
    starts = np.frombuffer(offsets, np.int64)[text.offset : text.offset + len(text) + 1]
    raw = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)
    from headwater.model.fnv import fnv_of_slices  # late: numba is only loaded where rows are touched

    hashes: NDArray[np.uint64] = fnv_of_slices(raw, starts)
    return hashes
