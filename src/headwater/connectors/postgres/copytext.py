r"""The snapshot's plain format: blocks of `COPY … TO STDOUT (FORMAT text)` to Arrow.

A line is one row: fields separated by a tab, NULL as `\N`, and a backslash before every tab, newline, carriage return
and backslash of the data. So a raw newline always ends a row, and blocks can be cut anywhere.

`rowreader.py` brings large blocks of whole lines; `scan_copy_text` finds the fields; `decode_copy` decodes them with
`columns.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from headwater.connectors.postgres.columns import decode_column
from headwater.connectors.postgres.rowhash import row_ids
from headwater.connectors.postgres.textscan import Bytes, Longs
from headwater.connectors.postgres.types import ColumnPlan
from headwater.errors import TransientError
from headwater.model.schema import ROW_ID
from headwater.storage.compiled import compiled

_ESCAPED: Final = np.arange(256, dtype=np.uint8)
for _letter, _byte in zip(b"bfnrtv", b"\b\f\n\r\t\v", strict=True):
    _ESCAPED[_letter] = _byte


@dataclass(frozen=True, slots=True)
class CopyScan:
    """Where the fields of whole lines are: `data[starts[r, c] :][: lengths[r, c]]`, unescaped; length -1 is NULL."""

    starts: Longs
    lengths: Longs
    data: Bytes
    consumed: int

    @property
    def rows(self) -> int:
        return int(self.starts.shape[0])


def malformed(what: str) -> TransientError:
    """The statement names its columns, so that no change of the table does this: the answer was damaged on its way."""
    return TransientError(
        "COPY_MALFORMED",
        what,
        hint="it is read again; if that stays so, look at what stands between us and the server",
    )


def scan_copy_text(block: Any, ncols: int) -> CopyScan:
    """Find the fields of all whole lines of a block; `consumed` says where the first incomplete line begins."""
    source = np.frombuffer(block, np.uint8)
    rows = int(np.count_nonzero(source == 10))
    data = source.copy()  # fields are unescaped in place: they only become shorter
    starts = np.empty((ncols, rows), np.int64)
    lengths = np.empty((ncols, rows), np.int64)
    consumed = _scan_lines(data, rows, _ESCAPED, starts, lengths)
    if consumed < 0:
        raise malformed(f"a line of the copy does not have {ncols} fields")
    return CopyScan(starts.T, lengths.T, data, consumed)


@compiled
def _scan_lines(data: Bytes, rows: int, escaped: Bytes, starts: Longs, lengths: Longs) -> int:
    """Fill starts and lengths (column, row) of `rows` lines; the end of the last one, or -1 for a wrong field count."""
    ncols = starts.shape[0]
    one = np.uint64(1)  # positions are unsigned, since an index that may be negative is tested for each byte
    p = np.uint64(0)
    for row in range(rows):
        for col in range(ncols):
            start = p
            c = data[p]
            while c != 9 and c != 10 and c != 92:
                p += one
                c = data[p]
            length = np.int64(p - start)
            if c == 92:
                if length == 0 and data[p + one] == 78:
                    length = np.int64(-1)
                    p += np.uint64(2)
                else:
                    to = p
                    while c != 9 and c != 10:
                        if c == 92:
                            p += one
                            if data[p] == 10:  # a raw newline ends a row, always: going on could leave the block
                                return -1
                            c = escaped[data[p]]
                        data[to] = c
                        to += one
                        p += one
                        c = data[p]
                    length = np.int64(to - start)
                c = data[p]
            starts[col, row] = start
            lengths[col, row] = length
            if c != (10 if col == ncols - 1 else 9):
                return -1
            p += one
    consumed: int = np.int64(p)  # type: ignore[assignment]
    return consumed


def decode_copy(block: Any, plans: Sequence[ColumnPlan], *, row_id: bool = False) -> pa.RecordBatch:
    """The rows of a block of whole lines; `plans` are the statement's columns in order.

    With `row_id` the last column says what each row is (`rowhash.py`), for tables without a key.
    """
    scan = scan_copy_text(block, len(plans))
    if scan.consumed != len(scan.data):
        raise malformed("a block of the copy ends inside of a line")
    arrays = [decode_column(plan, scan.data, scan.starts[:, i], scan.lengths[:, i]) for i, plan in enumerate(plans)]
    names = [plan.name for plan in plans]
    if row_id:
        arrays.append(row_ids(scan.data, list(scan.starts.T), list(scan.lengths.T), scan.rows))
        names.append(ROW_ID)
    return pa.RecordBatch.from_arrays(arrays, names=names)
