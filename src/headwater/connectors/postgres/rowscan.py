"""The compiled pass over rows as the server sends them that puts every value where its column wants it.

    message   ┌ fields ┬ length ┬ value ┬ length ┬ value ┬ …        row i of the copy, wherever it begins
              └────────┴────────┴───────┴────────┴───────┴
    scratch   [ value of the block's first row, of its second, … ]  for each column; stays in a core's cache
    column    [ … value … ]                                          at `places[i]`, in the order of a segment

Rows are read once, in the order in which they came, a block of them at a time; then each column's values of the block
go to their places, up to as many as there are vnodes, near which the next ones go too. Columns that are decoded first
and sorted afterwards cost twice as much, since they go through memory twice more.

All columns lie in one arena, the scratch too, which is passed in several widths, for compiled code knows no array of
arrays: what a column is (`kinds`), and where it begins, counted in its own width (`scratch`, `bases`), say the rest.
Of texts and of values that `columns.py` decodes the pass notes where they are; `wirerows.py` lays the arena out and
makes Arrow columns of it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.connectors.postgres.binaryscan import (
    date_of,
    decimal_of,
    eight,
    four,
    timestamp_of,
    two,
)
from headwater.connectors.postgres.textscan import (
    FINE,
    MALFORMED,
    Bytes,
    Longs,
    compiled,
    decimal_of_text,
    int_of,
)

# What a column is. The compiled code tests them in this order.
SKIPPED: Final = 0
EIGHT: Final = 1  # bytes of a number
FOUR: Final = 2
TWO: Final = 3
TEXT: Final = 4  # its lengths are placed; where it begins is noted in `fields`, in the order of the rows
BOOL: Final = 5  # a byte of the scratch, a bit of the column
TIMESTAMP: Final = 6
DECIMAL: Final = 7
DECIMAL_TEXT: Final = 8
DATE: Final = 9
OID: Final = 10
FIELD: Final = 11  # where it begins is placed, and its length: -1 for NULL
EIGHT_TEXT: Final = 12  # a number's digits; it is stored in so many bytes
FOUR_TEXT: Final = 13
TWO_TEXT: Final = 14
BOOL_TEXT: Final = 15

NARROW_DIGITS: Final = 18  # a decimal of up to so many is stored in 8 bytes, else in 16

MOST_WORDS: Final = 1024  # of a column; with more of them, or longer ones, it is no longer worth it
WORD_BYTES: Final = 255
WORD_SLOTS: Final = 4 * MOST_WORDS
WORD_PROBES: Final = 32  # slots that are looked at for a word; so many are only taken where somebody made it so
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)

ROW_MALFORMED: Final = -1  # instead of a column's number: the row has another number of fields, or is not whole


@compiled
def find_messages(
    data: Bytes, at: Any, used: int, frame: int, starts: Longs, ends: Longs, count: int
) -> tuple[Any, int]:
    """Note the payloads of the frames of this type from `at` on; stops at an incomplete or another one, or when full.

    Gives where it stopped, and how many there are.
    """
    while count < starts.size and used - at >= 5 and data[np.uint64(at)] == frame:
        end = at + 1 + np.int64(np.uint32(four(data, np.uint64(at + 1))))
        if end > used or end < at + 5:
            break
        starts[count] = at + 5
        ends[count] = end
        count += 1
        at = end
    return at, count


class Columns(NamedTuple):
    """What the pass is told about the columns; compiled code takes it for so many arguments."""

    kinds: Longs
    scratch: Longs
    bases: Longs
    limits: NDArray[Any]
    """(precision, scale) of decimals, the (least, greatest) of integers whose digits are read."""
    slots: Longs
    """A column's row of `fields`."""
    arena: Bytes
    arena2: NDArray[Any]
    arena4: NDArray[Any]
    arena8: Longs
    valid: NDArray[Any]
    """A column's bits, all set; NULLs clear them, and are counted."""
    nulls: Longs
    fields: NDArray[Any]


@compiled
def place_rows(
    data: Bytes, starts: Longs, ends: Longs, places: Longs, columns: Columns, last: int, block: int
) -> tuple[int, int]:
    """Place the values of all rows, `block` rows at a time; (column, fault) of the first value that cannot be.

    Columns behind `last` are not looked at, and then neither is the row's end.
    """
    for first in range(0, starts.size, block):
        after = min(first + block, starts.size)
        column, fault = _read_block(data, starts, ends, places, first, after, columns, last)
        if fault != FINE:
            return column, fault
        for c in range(last + 1):
            _place_block(c, places[first:after], columns)
    return 0, FINE


@compiled
def _read_block(
    data: Bytes, starts: Longs, ends: Longs, places: Longs, first: int, after: int, columns: Columns, last: int
) -> tuple[int, int]:
    """Read rows into the scratch; fields and validity go to their places at once.

    One long function on purpose, with what the loop needs taken out of the tuple before: as functions of their own,
    inlined or not, its branches took three to six times as long.
    """
    kinds, scratch, slots = columns.kinds, columns.scratch, columns.slots
    arena, arena2, arena4, arena8 = columns.arena, columns.arena2, columns.arena4, columns.arena8
    fields, limits = columns.fields, columns.limits
    ncols = kinds.size
    for i in range(first, after):
        p, end = np.uint64(starts[i]), np.uint64(ends[i])
        if p + np.uint64(2) > end or two(data, p) != ncols:
            return ROW_MALFORMED, MALFORMED
        p += np.uint64(2)
        row = np.uint64(i - first)
        for c in range(last + 1):
            if p + np.uint64(4) > end:
                return ROW_MALFORMED, MALFORMED
            length = four(data, p)
            p += np.uint64(4)
            if length > 0 and p + np.uint64(length) > end:
                return ROW_MALFORMED, MALFORMED
            kind = kinds[c]
            at = np.uint64(scratch[c]) + row
            # Where a length is known it is tested and not added: the next field can be read before this one's is.
            if length < 0:
                if kind != SKIPPED:
                    to = np.uint64(places[i])
                    columns.nulls[c] += 1
                    columns.valid[c, to >> np.uint64(3)] &= ~np.uint8(np.uint8(1) << np.uint8(to & np.uint64(7)))
                    _read_null(c, at, row, columns)
                    if kind == FIELD:
                        fields[slots[c], to] = 0
                        fields[slots[c] + 1, to] = -1
            elif kind == EIGHT:
                if length != 8:
                    return c, MALFORMED
                arena8[at] = eight(data, p)
                p += np.uint64(8)
            elif kind == FOUR:
                if length != 4:
                    return c, MALFORMED
                arena4[at] = four(data, p)
                p += np.uint64(4)
            elif kind == TWO:
                if length != 2:
                    return c, MALFORMED
                arena2[at] = two(data, p)
                p += np.uint64(2)
            elif kind == TEXT:
                arena4[at] = length
                fields[slots[c], i] = p
                p += np.uint64(length)
            elif kind == BOOL:
                if length != 1:
                    return c, MALFORMED
                arena[at] = data[p]
                p += np.uint64(1)
            elif kind == TIMESTAMP:
                if length != 8:
                    return c, MALFORMED
                value, fault = timestamp_of(data, p)
                if fault != FINE:
                    return c, fault
                arena8[at] = value
                p += np.uint64(8)
            elif DECIMAL <= kind <= DECIMAL_TEXT:
                if kind == DECIMAL:
                    low, high, fault = decimal_of(data, p, length, limits[c, 0], limits[c, 1])
                else:
                    low, high, fault = decimal_of_text(data, p, length, limits[c, 0], limits[c, 1])
                if fault != FINE:
                    return c, fault
                if limits[c, 0] <= NARROW_DIGITS:
                    arena8[at] = low
                else:
                    arena8[at + row] = low
                    arena8[at + row + np.uint64(1)] = high
                p += np.uint64(length)
            elif kind == DATE:
                if length != 4:
                    return c, MALFORMED
                arena4[at] = date_of(data, p)
                p += np.uint64(4)
            elif kind == OID:
                if length != 4:
                    return c, MALFORMED
                arena8[at] = np.int64(np.uint32(four(data, p)))
                p += np.uint64(4)
            elif kind == FIELD:
                to = np.uint64(places[i])
                fields[slots[c], to] = p
                fields[slots[c] + 1, to] = length
                p += np.uint64(length)
            elif EIGHT_TEXT <= kind <= TWO_TEXT:
                value, fault = int_of(data, p, length, limits[c, 0], limits[c, 1])
                if fault != FINE:
                    return c, fault
                if kind == EIGHT_TEXT:
                    arena8[at] = value
                elif kind == FOUR_TEXT:
                    arena4[at] = value
                else:
                    arena2[at] = value
                p += np.uint64(length)
            elif kind == BOOL_TEXT:
                if length != 1 or (data[p] != 116 and data[p] != 102):
                    return c, MALFORMED
                arena[at] = data[p] == 116
                p += np.uint64(1)
            else:
                p += np.uint64(length)
        if last == ncols - 1 and p != end:
            return ROW_MALFORMED, MALFORMED
    return 0, FINE


@compiled
def _read_null(column: int, at: Any, row: Any, columns: Columns) -> None:
    """Zeros under a NULL: the arena is fresh memory, and what is under a NULL is written to files."""
    kind = columns.kinds[column]
    if kind in (EIGHT, TIMESTAMP, OID, EIGHT_TEXT):
        columns.arena8[at] = 0
    elif kind in (FOUR, DATE, TEXT, FOUR_TEXT):
        columns.arena4[at] = 0
    elif kind in (TWO, TWO_TEXT):
        columns.arena2[at] = 0
    elif kind in (BOOL, BOOL_TEXT):
        columns.arena[at] = 0
    elif kind in (DECIMAL, DECIMAL_TEXT) and columns.limits[column, 0] <= NARROW_DIGITS:
        columns.arena8[at] = 0
    elif kind in (DECIMAL, DECIMAL_TEXT):
        columns.arena8[at + row] = 0
        columns.arena8[at + row + np.uint64(1)] = 0


@compiled
def _place_block(column: int, places: Longs, columns: Columns) -> None:
    """Take a column's values of a block from the scratch to their places."""
    arena, arena2, arena4, arena8 = columns.arena, columns.arena2, columns.arena4, columns.arena8
    kind, count = columns.kinds[column], np.uint64(places.size)
    at, to = np.uint64(columns.scratch[column]), np.uint64(columns.bases[column])
    narrow = kind in (DECIMAL, DECIMAL_TEXT) and columns.limits[column, 0] <= NARROW_DIGITS
    if kind in (EIGHT, TIMESTAMP, OID, EIGHT_TEXT) or narrow:
        for r in range(count):
            arena8[to + np.uint64(places[r])] = arena8[at + r]
    elif kind in (FOUR, DATE, FOUR_TEXT):
        for r in range(count):
            arena4[to + np.uint64(places[r])] = arena4[at + r]
    elif kind == TEXT:  # the first of its offsets is 0
        for r in range(count):
            arena4[to + np.uint64(places[r]) + np.uint64(1)] = arena4[at + r]
    elif kind in (TWO, TWO_TEXT):
        for r in range(count):
            arena2[to + np.uint64(places[r])] = arena2[at + r]
    elif kind in (DECIMAL, DECIMAL_TEXT):
        for r in range(count):
            place = to + np.uint64(2) * np.uint64(places[r])
            arena8[place] = arena8[at + r + r]
            arena8[place + np.uint64(1)] = arena8[at + r + r + np.uint64(1)]
    elif kind in (BOOL, BOOL_TEXT):
        for r in range(count):
            if arena[at + r] != 0:
                place = np.uint64(places[r])
                arena[to + (place >> np.uint64(3))] |= np.uint8(np.uint8(1) << np.uint8(place & np.uint64(7)))


@compiled
def place_texts(data: Bytes, starts: NDArray[Any], places: Longs, offsets: NDArray[np.int32], out: Bytes) -> None:
    """Copy the texts that begin at `starts` to where `offsets` has them."""
    for i in range(places.size):
        to = np.uint64(places[i])
        at = np.uint64(offsets[to])
        size = np.uint64(offsets[to + np.uint64(1)]) - at
        start = np.uint64(starts[i])
        for k in range(size):
            out[at + k] = data[start + k]


@compiled
def place_words(
    data: Bytes,
    starts: NDArray[Any],
    places: Longs,
    lengths: NDArray[np.int32],
    numbers: NDArray[np.int32],
    words: Longs,
) -> int:
    """Number the different texts that begin at `starts`, in the order in which they come, and place the numbers.

    `words` is filled with the (start, length) of each. Gives how many there are; -1 where they are too many, or long.
    """
    k: Any
    slots = np.full(WORD_SLOTS, -1, np.int32)
    hashes = np.empty(MOST_WORDS, np.uint64)
    count = 0
    for i in range(places.size):
        to = np.uint64(places[i])
        length = np.int64(lengths[to])
        if length > WORD_BYTES:
            return -1
        p = np.uint64(starts[i]) if length > 0 else np.uint64(0)  # under a NULL there is none
        mixed = np.uint64(length)
        whole = np.uint64(length & ~7)
        for k in range(np.uint64(0), whole, np.uint64(8)):
            mixed = (mixed ^ np.uint64(eight(data, p + k))) * _MIX
            mixed ^= mixed >> np.uint64(29)
        rest = np.uint64(0)
        for k in range(whole, np.uint64(length)):
            rest = (rest << np.uint64(8)) | np.uint64(data[p + k])
        mixed = (mixed ^ rest) * _MIX
        slot = mixed >> np.uint64(52)
        probes = 0
        while True:
            word = np.uint64(slots[slot])
            if slots[slot] < 0:
                if count == MOST_WORDS:
                    return -1
                word = np.uint64(count)
                words[word, 0], words[word, 1] = p, length
                hashes[word] = mixed
                slots[slot] = count
                count += 1
                break
            if hashes[word] == mixed and words[word, 1] == length:
                q = np.uint64(words[word, 0])
                k = np.uint64(0)
                while k < np.uint64(length) and data[q + k] == data[p + k]:
                    k += np.uint64(1)
                if k == np.uint64(length):
                    break
            probes += 1
            if probes == WORD_PROBES:
                return -1
            slot = (slot + np.uint64(1)) & np.uint64(WORD_SLOTS - 1)
        numbers[to] = word
    return count
