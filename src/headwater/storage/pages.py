"""Compiled encoders of the values of a Parquet page; `parquet.py` chooses among them and writes what is around them.

    differences   of whole numbers (DELTA_BINARY_PACKED)
                  header: values of a block, quarters of it, values, the first value
                  block:  the least difference, 4 numbers of bits, 4 x 32 differences above the least one
    numbered      the distinct values of a column, and for each row which it is
    hybrid        such numbers (RLE): `(groups of 8 << 1 | 1)` and their bits
    repeated      or, for a column of long `runs` of equal values, `(rows << 1) number` each
    texts         each with its length in front (PLAIN)

`bounds` and `text_bounds` find the least and the greatest value, for the statistics of a column chunk.

Encoders write into `out`, which its caller has made large enough (`differences_room` and so on), and say how
many bytes they wrote. All store whole words, so what comes behind their bytes is overwritten too: that is `SLACK`.
Positions are unsigned throughout: one that may be negative is tested at each use, which is several times slower.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from headwater.storage.bytecopy import copy_sixteen, load_eight, store_eight, store_four
from headwater.storage.compiled import compiled

Bytes = NDArray[Any]  # of uint8; an element is Any, since compiled code and mypy disagree about its arithmetic
Numbers = NDArray[Any]  # of int32 or int64

SLACK: Final = 16  # bytes behind the last one that the widest store may touch
_BLOCK: Final = 128  # what parquet-mr, and so Spark, takes for granted
_QUARTER: Final = 32
_BLOCK_HEAD: Final = 10 + 4  # bytes: the least difference as a varint, four numbers of bits
_GREATEST: Final = np.int64(2**63 - 1)
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: neighbours come far apart


def differences_room(rows: int, width: int) -> int:
    """Bytes of that many differences of numbers of `width` bytes, at most."""
    blocks = rows // _BLOCK + 1
    return 32 + blocks * (_BLOCK_HEAD + _BLOCK * width) + SLACK


def hybrid_room(rows: int, width: int) -> int:
    """Bytes of that many numbers of `width` bits, at most."""
    return 16 + (rows + 64) * width // 8 + SLACK


def repeated_room(runs: int) -> int:
    """Bytes of that many runs, at most: a varint of 32 bits and a number each."""
    return runs * (5 + 4) + SLACK


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _backwards(_: Any, word: Any) -> Any:
    """A word's bytes the other way round: the first one is the greatest, so that words compare as their bytes do."""

    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bswap(args[0])

    return types.uint64(types.uint64), made


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _leading_zeros(_: Any, word: Any) -> Any:
    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), made


@compiled
def _varint(out: Bytes, at: Any, number: Any) -> Any:
    """Seven bits to a byte, the least first."""
    while number >= np.uint64(128):
        out[at] = np.uint8(number & np.uint64(127)) | np.uint8(128)
        number >>= np.uint64(7)
        at += np.uint64(1)
    out[at] = np.uint8(number)
    return at + np.uint64(1)


@compiled
def _zigzag(number: Any) -> Any:
    """Small for numbers near zero of either sign."""
    return np.uint64((number << np.int64(1)) ^ (number >> np.int64(63)))


@compiled
def _pack(values: Any, start: Any, count: Any, width: Any, out: Bytes, at: Any) -> Any:
    """Numbers of `width` bits one after the other, the least bit first; `count` is a multiple of 8."""
    full = np.uint64(64)
    if width == np.uint64(0):
        return at
    if width == full:
        for i in range(count):
            store_eight(out, at + i * np.uint64(8), np.uint64(values[start + i]))
        return at + count * np.uint64(8)
    end = at + (count * width >> np.uint64(3))
    word, filled = np.uint64(0), np.uint64(0)
    for i in range(count):
        value = np.uint64(values[start + i])
        word |= value << filled
        filled += width
        if filled >= full:
            store_eight(out, at, word)
            at += np.uint64(8)
            filled -= full
            word = value >> (width - filled)
    store_eight(out, at, word)
    return end


@compiled
def differences(values: Numbers, out: Bytes) -> Any:
    """Of numbers of 32 or 64 bits, in which differences wrap around, so that none is wider than its numbers."""
    cut = np.int64(64 - 8 * values.itemsize)
    count = np.uint64(values.size)
    at = _varint(out, np.uint64(0), np.uint64(_BLOCK))
    at = _varint(out, at, np.uint64(_BLOCK // _QUARTER))
    at = _varint(out, at, count)
    at = _varint(out, at, _zigzag(np.int64(values[0])) if values.size else np.uint64(0))
    steps = np.empty(_BLOCK, np.int64)
    one, block, quarter = np.uint64(1), np.uint64(_BLOCK), np.uint64(_QUARTER)
    start = one
    while start < count:
        present = min(block, count - start)
        least = _GREATEST
        for i in range(present):
            step = np.int64(values[start + i]) - np.int64(values[start + i - one])
            step = (step << cut) >> cut
            steps[i] = step
            least = min(least, step)
        for i in range(present, block):
            steps[i] = least
        at = _varint(out, at, _zigzag(least))
        widths = at
        at += np.uint64(4)
        for q in range(np.uint64(4)):
            union = np.uint64(0)
            for i in range(quarter):
                above = np.uint64(steps[q * quarter + i] - least)
                steps[q * quarter + i] = np.int64(above)
                union |= above
            width = np.uint64(64) - _leading_zeros(union)
            out[widths + q] = np.uint8(width)  # 0 for a quarter without values, which then has no bytes
            at = _pack(steps, q * quarter, quarter, width, out, at)
        start += block
    return at


@compiled
def bounds(values: Numbers) -> Any:
    """The least and the greatest of at least one."""
    least = greatest = values[0]
    for i in range(np.uint64(values.size)):
        least = min(least, values[i])
        greatest = max(greatest, values[i])
    return least, greatest


@compiled
def runs(values: Numbers, ends: NDArray[Any]) -> Any:
    """How many runs of equal values there are, and where each ends; -1 if more than `ends` has room for."""
    one, step, size = np.uint64(1), np.uint64(64), np.uint64(values.size)
    count, i = 0, one
    while i < size:
        if i + step <= size:
            changed = values[i] ^ values[i]
            for k in range(step):
                changed |= values[i + k] ^ values[i + k - one]
            if changed == 0:
                i += step
                continue
        for j in range(i, min(i + step, size)):
            if values[j] != values[j - one]:
                if count + 1 >= ends.size:
                    return -1
                ends[np.uint64(count)] = j
                count += 1
        i += step
    ends[np.uint64(count)] = size
    return count + 1


@compiled
def numbered(values: Numbers, heads: NDArray[Any], distinct: Numbers, numbers: NDArray[Any]) -> Any:
    """How many distinct values there are, in the order in which they come; -1 if more than `distinct` has room for.

    `heads` is the hash table, of zeros, of twice as many places and a power of two: a value's number + 1.
    """
    shift, mask = _leading_zeros(np.uint64(heads.size - 1)), np.uint64(heads.size - 1)
    one = np.uint64(1)
    count, number = 0, 0
    for i in range(np.uint64(values.size)):
        value = values[i]
        if i == np.uint64(0) or value != values[i - one]:
            place = (np.uint64(value) * _SPREAD) >> shift
            while heads[place] != 0 and distinct[np.uint64(heads[place] - 1)] != value:
                place = (place + one) & mask
            if heads[place] == 0:
                if count == distinct.size:
                    return -1
                distinct[np.uint64(count)] = value
                count += 1
                heads[place] = count
            number = heads[place] - 1
        numbers[i] = number
    return count


@compiled
def hybrid(numbers: NDArray[Any], width: int, out: Bytes) -> Any:
    """All in bits. Mixtures of runs and bits are rare, and a codec's work."""
    count, bits, zero, eight = np.uint64(numbers.size), np.uint64(width), np.uint64(0), np.uint64(8)
    groups = (count + np.uint64(7)) >> np.uint64(3)
    at = _varint(out, zero, groups << np.uint64(1) | np.uint64(1))
    whole = count & ~np.uint64(7)
    at = _pack(numbers, zero, whole, bits, out, at)
    if whole < count:
        rest = np.zeros(8, np.int32)
        for i in range(count - whole):
            rest[i] = numbers[whole + i]
        at = _pack(rest, zero, eight, bits, out, at)
    return at


@compiled
def repeated(numbers: NDArray[Any], ends: NDArray[Any], width: int, out: Bytes) -> Any:
    """Of each run its length and its number, in whole bytes."""
    value_bytes = np.uint64((width + 7) // 8)
    at, start = np.uint64(0), np.uint64(0)
    for i in range(np.uint64(numbers.size)):
        end = np.uint64(ends[i])
        at = _varint(out, at, (end - start) << np.uint64(1))
        store_four(out, at, np.uint32(numbers[i]))
        at += value_bytes
        start = end
    return at


@compiled
def texts(data: Bytes, offsets: NDArray[Any], out: Bytes) -> Any:
    """Of Arrow's offsets, one more than there are texts."""
    at, step, size = np.uint64(0), np.uint64(16), np.uint64(data.size)
    for i in range(np.uint64(offsets.size - 1)):
        start = np.uint64(offsets[i])
        length = np.uint64(offsets[i + np.uint64(1)]) - start
        store_four(out, at, np.uint32(length))
        at += np.uint64(4)
        if start + length + step <= size:
            copy_sixteen(data, start, out, at)  # whatever its length: a guess of it would often be wrong
            copied = step
            while copied < length:
                copy_sixteen(data, start + copied, out, at + copied)
                copied += step
        else:  # near the end of the data, behind which nothing may be read
            for k in range(length):
                out[at + k] = data[start + k]
        at += length
    return at


@compiled
def text_bounds(data: Bytes, offsets: NDArray[Any]) -> Any:
    """Which of at least one text is the least, and which the greatest, by their bytes."""
    one = np.uint64(1)
    least: Any = np.uint64(0)
    greatest: Any = np.uint64(0)
    low = high = _eight_of(data, np.uint64(offsets[0]), np.uint64(offsets[1]))
    for i in range(one, np.uint64(offsets.size - 1)):
        word = _eight_of(data, np.uint64(offsets[i]), np.uint64(offsets[i + one]))
        if word < low or (word == low and _precedes(data, offsets, i, least)):
            least, low = i, word
        elif word > high or (word == high and _precedes(data, offsets, greatest, i)):
            greatest, high = i, word
    return least, greatest


@compiled
def _eight_of(data: Bytes, start: Any, end: Any) -> Any:
    """The first eight bytes of a text as a number; zeros behind a shorter one, which so comes before others or ties."""
    eight = np.uint64(8)
    length = min(eight, end - start)
    if start + eight <= np.uint64(data.size):
        rest = (eight - length) << np.uint64(3)
        return (_backwards(load_eight(data, start)) >> rest) << rest if length else np.uint64(0)
    word = np.uint64(0)
    for k in range(length):
        word |= np.uint64(data[start + k]) << ((np.uint64(7) - k) << np.uint64(3))
    return word


@compiled
def _precedes(data: Bytes, offsets: NDArray[Any], i: Any, j: Any) -> Any:
    """Whether text i comes before text j, which begins with the same eight bytes."""
    one, eight = np.uint64(1), np.uint64(8)
    first, first_end = np.uint64(offsets[i]), np.uint64(offsets[i + one])
    second, second_end = np.uint64(offsets[j]), np.uint64(offsets[j + one])
    k, shorter = eight, min(first_end - first, second_end - second)
    while k < shorter:
        one_word, other = _eight_of(data, first + k, first_end), _eight_of(data, second + k, second_end)
        if one_word != other:
            return one_word < other
        k += eight
    return first_end - first < second_end - second
