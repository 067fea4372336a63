"""What a row without a key is: 128 bits of a hash over the source's text of its columns, as 32 hex digits.

The same for a copied and a streamed row, since both have the same text (`types.SESSION_SETTINGS`). The rounds are those
of MurmurHash3 (128 bit, 64-bit words), over each value padded to whole blocks and preceded by a block of its column and
length: so NULL, an empty text and texts that only together are equal all differ. Not meant against somebody who
searches for collisions; by chance one takes about 2^64 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.connectors.postgres.textscan import Bytes, Longs
from headwater.storage.compiled import compiled

Words = NDArray[Any]  # of uint64
_HEX: Final = np.frombuffer(b"0123456789abcdef", np.uint8)

_C1: Final = np.uint64(0x87C37B91114253D5)
_C2: Final = np.uint64(0x4CF5AD432745937F)
_ADD1: Final = np.uint64(0x52DCE729)
_ADD2: Final = np.uint64(0x38495AB5)
_F1: Final = np.uint64(0xFF51AFD7ED558CCD)
_F2: Final = np.uint64(0xC4CEB9FE1A85EC53)
_FIVE: Final = np.uint64(5)


@compiled
def _rotated(x: Any, left: int) -> Any:
    return (x << np.uint64(left)) | (x >> np.uint64(64 - left))


@compiled
def _mixed(h1: Any, h2: Any, k1: Any, k2: Any) -> Any:
    h1 ^= _rotated(k1 * _C1, 31) * _C2
    h1 = (_rotated(h1, 27) + h2) * _FIVE + _ADD1
    h2 ^= _rotated(k2 * _C2, 33) * _C1
    h2 = (_rotated(h2, 31) + h1) * _FIVE + _ADD2
    return h1, h2


@compiled
def _finished(x: Any) -> Any:
    x ^= x >> np.uint64(33)
    x *= _F1
    x ^= x >> np.uint64(33)
    x *= _F2
    return x ^ (x >> np.uint64(33))


@compiled
def _word(data: Bytes, at: Any, n: Any) -> Any:
    """Up to eight bytes, little endian."""
    value = np.uint64(0)
    for k in range(n):
        value |= np.uint64(data[at + np.uint64(k)]) << np.uint64(8 * k)
    return value


@compiled
def hash_column(data: Bytes, starts: Longs, lengths: Longs, column: int, h1: Words, h2: Words) -> None:
    """Take one column's values into the rows' states; a negative length is NULL."""
    for row in range(starts.size):
        n = max(lengths[row], -1)
        a, b = _mixed(h1[row], h2[row], np.uint64(column + 1), np.uint64(n + 1))
        at = np.uint64(starts[row])
        left = n
        while left > 0:
            first = _word(data, at, min(left, 8))
            second = _word(data, at + np.uint64(8), min(left - 8, 8)) if left > 8 else np.uint64(0)
            a, b = _mixed(a, b, first, second)
            at += np.uint64(16)
            left -= 16
        h1[row] = a
        h2[row] = b


@compiled
def _finish(h1: Words, h2: Words) -> None:
    for row in range(h1.size):
        a = h1[row] + h2[row]
        b = h2[row] + a
        a, b = _finished(a), _finished(b)
        a += b
        h1[row] = a
        h2[row] = b + a


def row_ids(data: Bytes, starts: Sequence[Longs], lengths: Sequence[Longs], rows: int) -> pa.Array:
    """The ids of rows whose i-th column's values are `data[starts[i]:][:lengths[i]]`."""
    h1, h2 = np.zeros(rows, np.uint64), np.zeros(rows, np.uint64)
    for column, (begin, length) in enumerate(zip(starts, lengths, strict=True)):
        hash_column(data, np.ascontiguousarray(begin), np.ascontiguousarray(length), column, h1, h2)
    _finish(h1, h2)
    raw = np.stack([h1, h2], axis=1).astype(">u8").view(np.uint8).reshape(rows, 16)
    text = np.empty((rows, 32), np.uint8)
    text[:, 0::2] = _HEX[raw >> 4]
    text[:, 1::2] = _HEX[raw & 15]
    offsets = np.arange(rows + 1, dtype=np.int32) * 32
    return pa.Array.from_buffers(pa.string(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(text)])
