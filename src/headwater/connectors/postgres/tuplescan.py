"""Compiled scanners over pgoutput messages in spool frames: offsets only, no value is looked at but a changed key's.

`pgoutput.py` says what the format is, allocates the outputs and turns faults into errors.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from headwater.connectors.postgres.textscan import Bytes, Longs
from headwater.storage.compiled import compiled

UNCHANGED: Final = -2  # length of a TOAST value that was not sent
ABSENT: Final = -3  # length where there is no such tuple
PG_EPOCH_MICROS: Final = 946_684_800_000_000  # 2000-01-01, from 1970
_HEADER_BYTES: Final = 12  # of a spool frame


@compiled
def _big(data: Bytes, at: int, n: int) -> int:
    """An integer of n bytes, big endian."""
    value = 0
    for k in range(n):
        value = value * 256 + data[at + k]
    return value


@compiled
def _little(data: Bytes, at: int, n: int) -> int:
    """An integer of n bytes, little endian."""
    value = 0
    for k in range(n - 1, -1, -1):
        value = value * 256 + data[at + k]
    return value


@compiled
def count_frames(data: Bytes) -> tuple[int, int]:
    """(frames, commits), or (-1, 0) where the last frame is cut off."""
    at = 0
    frames = 0
    commits = 0
    while at < data.size:
        if data.size - at < _HEADER_BYTES:
            return -1, 0
        length = _little(data, at, 4)
        if length < 1 or data.size - at - _HEADER_BYTES < length:
            return -1, 0
        if data[at + _HEADER_BYTES] == 67:
            commits += 1
        frames += 1
        at += _HEADER_BYTES + length
    return frames, commits


@compiled
def fill_frames(
    data: Bytes,
    starts: Longs,
    lengths: Longs,
    lsns: Longs,
    kinds: Bytes,
    relations: Longs,
    transaction: Longs,
    tx: Longs,
) -> int:
    """0, or 1 for a transaction without its begin or end, 2 for a message that is not known."""
    at = 0
    done = 0  # transactions that have ended
    inside = False
    for i in range(starts.size):
        length = _little(data, at, 4)
        lsns[i] = _little(data, at + 4, 8)
        at += _HEADER_BYTES
        kind = data[at]
        starts[i] = at
        lengths[i] = length
        kinds[i] = kind
        if kind == 66:  # B
            if inside or done >= tx.shape[1]:
                return 1
            if length < 21:
                return 2
            inside = True
            tx[0, done] = _big(data, at + 17, 4)
            tx[3, done] = i
        transaction[i] = done if inside else -1
        if kind == 67:  # C
            if not inside:
                return 1
            if length < 26:
                return 2
            tx[1, done] = _big(data, at + 10, 8)
            tx[2, done] = _big(data, at + 18, 8) + PG_EPOCH_MICROS
            tx[4, done] = i + 1
            inside = False
            done += 1
        elif kind == 73 or kind == 85 or kind == 68 or kind == 82:  # I U D R
            if length < 7:
                return 2
            if kind != 82 and not inside:
                return 1
            relations[i] = _big(data, at + 1, 4)
        elif kind != 66 and kind != 84 and kind != 77 and kind != 79 and kind != 89:  # B T M O Y
            return 2
        at += length
    return 1 if inside else 0


@compiled
def _scan_tuple(data: Bytes, at: int, end: int, slots: Longs, row: int, starts: Longs, lengths: Longs) -> int:
    """Note the values of one tuple; where it ends, -1 for a malformed one, -2 for another number of columns."""
    if end - at < 2:
        return -1
    if data[at] * 256 + data[at + 1] != slots.size:
        return -2
    at += 2
    for col in range(slots.size):
        if at >= end:
            return -1
        kind = data[at]
        at += 1
        length = -1
        start = at
        if kind == 116:  # t
            if end - at < 4:
                return -1
            length = data[at] * 16777216 + data[at + 1] * 65536 + data[at + 2] * 256 + data[at + 3]
            start = at + 4
            at = start + length
            if at > end:
                return -1
        elif kind == 117:  # u
            length = UNCHANGED
        elif kind != 110:  # n
            return -1
        slot = slots[col]
        if slot >= 0:
            starts[slot, row] = start
            lengths[slot, row] = length
    return at


@compiled
def scan_rows(
    data: Bytes,
    starts: Longs,
    ends: Longs,
    slots: Longs,
    new_starts: Longs,
    new_lengths: Longs,
    old_starts: Longs,
    old_lengths: Longs,
    old_kinds: Bytes,
    new_kinds: Bytes,
) -> int:
    """Note the values of all events; -1, the first malformed event, or -2 for another number of columns."""
    for row in range(starts.size):
        at = starts[row] + 5
        end = ends[row]
        while at < end:
            part = data[at]
            if part == 78:  # N
                new_kinds[row] = part
                at = _scan_tuple(data, at + 1, end, slots, row, new_starts, new_lengths)
            elif part == 75 or part == 79:  # K O
                old_kinds[row] = part
                at = _scan_tuple(data, at + 1, end, slots, row, old_starts, old_lengths)
            else:
                return row
            if at < 0:
                return row if at == -1 else -2
    return -1


@compiled
def settle_rows(
    data: Bytes,
    ops: Bytes,
    old_kinds: Bytes,
    is_key: NDArray[np.bool_],
    keyed: bool,
    new_starts: Longs,
    new_lengths: Longs,
    old_starts: Longs,
    old_lengths: Longs,
    changed: NDArray[np.bool_],
) -> int:
    """Take unchanged values from an old tuple that has them, and see which keys changed; the first event without a key.

    Texts are compared: Postgres prints equal values of one type equally, and a row whose key is printed otherwise is
    deleted and inserted, which is as good.
    """
    for row in range(ops.size):
        full = old_kinds[row] == 79
        if old_kinds[row] == 0:
            if ops[row] == 68 or (ops[row] == 85 and not keyed):
                return row
            continue
        changed[row] = ops[row] == 85 and not keyed  # without a key every update is a delete and an insert
        for col in range(is_key.size):
            n = old_lengths[col, row]
            if is_key[col] and ((keyed and n < 0) or not (keyed or full)):
                return row
            if ops[row] != 85 or not (full or is_key[col]):
                continue
            if new_lengths[col, row] == UNCHANGED and n != UNCHANGED:
                new_lengths[col, row] = n
                new_starts[col, row] = old_starts[col, row]
            if is_key[col] and not changed[row]:
                same = n == new_lengths[col, row]
                for k in range(n if same else 0):
                    if data[old_starts[col, row] + k] != data[new_starts[col, row] + k]:
                        same = False
                        break
                changed[row] = not same
    return -1
