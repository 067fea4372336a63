"""Rows dealt out to their places in a segment's order: column by column, each value goes through memory once.

    batches, in the order in which rows came   ┌ row 0 ┬ row 1 ┬ row 2 ┬ …
    places                                     │   7   │   0   │   4   │ …
    the result                                 └ row i of the batches at `places[i]`

Reading is sequential, and writing goes to as many places at a time as there are vnodes, near which the next rows go
too. To gather instead (Arrow's `take`) misses the cache with every row, and takes texts several times as long.

Apart from `segments.py`, as it loads numba.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.errors import DefiniteError
from headwater.storage.bytecopy import copy_bytes, load_eight
from headwater.storage.compiled import compiled, inlined

Bytes = NDArray[Any]
Longs = NDArray[Any]

MOST_WORDS: Final = 1024  # of a column; with more of them, or longer ones, a dictionary is no longer worth it
WORD_BYTES: Final = 255
WORD_SLOTS: Final = 4 * MOST_WORDS
WORD_PROBES: Final = 32  # slots that are looked at for a word; that many are only taken where somebody made it so
MOST_BYTES: Final = (1 << 31) - 1  # of a column's texts: Arrow's offsets have 32 bits
_WORD_ROOM: Final = WORD_BYTES + 1  # in the last byte its length
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_WORDS_DTYPES: Final = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


@compiled
def scatter_positions(numbers: Any, count: int) -> tuple[Longs, Longs]:
    """How many rows have each number below `count`, and each row's place if they are put in order by it, stably."""
    counts = np.zeros(count, np.int64)
    for i in range(np.uint64(numbers.size)):
        counts[np.uint64(numbers[i])] += 1
    following = np.empty(count, np.int64)
    total = 0
    for number in range(count):
        following[number] = total
        total += counts[number]
    places = np.empty(numbers.size, np.int64)
    for i in range(np.uint64(numbers.size)):
        places[i] = following[np.uint64(numbers[i])]
        following[np.uint64(numbers[i])] += 1
    return counts, places


def placed(rows: pa.Table, places: Longs, words: Collection[str] = ()) -> pa.Table:
    """The rows, each at its place; columns of types that are rare are taken by Arrow.

    Of the texts in `words`, which are known to repeat, dictionaries are made, as long as they do.
    """
    order: Longs | None = None
    columns = []
    for field, column in zip(rows.schema, rows.columns, strict=True):
        chunks = [c for c in column.chunks if len(c)]
        made = _placed(field.type, chunks, places, as_words=field.name in words) if chunks else None
        if made is None:
            if order is None:
                order = np.empty(places.size, np.int64)
                order[places] = np.arange(places.size)
            made = column.take(pa.array(order))
        columns.append(made)
    fields = [f.with_type(c.type) for f, c in zip(rows.schema, columns, strict=True)]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _placed(kind: pa.DataType, chunks: Sequence[pa.Array], places: Longs, *, as_words: bool) -> pa.Array | None:
    """None: not by this way."""
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        numbered = _numbered(chunks, places) if as_words and pa.types.is_string(kind) else None
        return numbered if numbered is not None else _texts(kind, chunks, places)
    if pa.types.is_boolean(kind):
        return _bits(chunks, places)
    if pa.types.is_decimal128(kind):
        return _values(kind, chunks, places, np.dtype(np.uint64), 2)
    if (pa.types.is_primitive(kind) or pa.types.is_decimal64(kind)) and kind.bit_width in _WORDS_DTYPES:
        return _values(kind, chunks, places, np.dtype(_WORDS_DTYPES[kind.bit_width]), 1)
    return None


def _parts(chunks: Sequence[pa.Array], places: Longs) -> Any:
    """Each chunk with the places of its rows."""
    at = 0
    for chunk in chunks:
        yield chunk, places[at : at + len(chunk)]
        at += len(chunk)


def _validity(chunks: Sequence[pa.Array], places: Longs) -> pa.Buffer | None:
    if not any(c.null_count for c in chunks):
        return None
    valid = np.full(-(-places.size // 8), 255, np.uint8)
    for chunk, at in _parts(chunks, places):
        if chunk.null_count:
            _clear_bits(_read(chunk, 0, np.uint8), chunk.offset, at, valid)
    return pa.py_buffer(valid)


def _values(kind: pa.DataType, chunks: Sequence[pa.Array], places: Longs, dtype: Any, width: int) -> pa.Array:
    out = np.empty(places.size * width, dtype)
    for chunk, at in _parts(chunks, places):
        values = _read(chunk, 1, dtype)[chunk.offset * width :]
        if width == 1:
            _place_values(values, at, out)
        else:
            _place_pairs(values, at, out)
    return pa.Array.from_buffers(kind, places.size, [_validity(chunks, places), pa.py_buffer(out)])


def _bits(chunks: Sequence[pa.Array], places: Longs) -> pa.Array:
    out = np.full(-(-places.size // 8), 255, np.uint8)
    for chunk, at in _parts(chunks, places):
        _clear_bits(_read(chunk, 1, np.uint8), chunk.offset, at, out)
    return pa.Array.from_buffers(pa.bool_(), places.size, [_validity(chunks, places), pa.py_buffer(out)])


def _slices(chunk: pa.Array) -> tuple[Bytes, NDArray[Any]]:
    """The bytes of all texts, and where each begins; the last number is where the last one ends."""
    return _read(chunk, 2, np.uint8), _read(chunk, 1, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]


def _read(chunk: pa.Array, number: int, dtype: Any) -> NDArray[Any]:
    """A buffer; read-only, which is a type of its own for compiled code, so that there is one."""
    buffer = chunk.buffers()[number]
    values = np.frombuffer(buffer if buffer is not None and buffer.size else bytes(8), dtype)
    values.flags.writeable = False
    return values


def _texts(kind: pa.DataType, chunks: Sequence[pa.Array], places: Longs) -> pa.Array:
    offsets = np.empty(places.size + 1, np.int32)
    offsets[0] = size = 0
    for chunk, at in _parts(chunks, places):
        starts = _slices(chunk)[1]
        size += int(starts[-1]) - int(starts[0])
        _place_lengths(starts, at, offsets)
    if size > MOST_BYTES:
        raise DefiniteError(
            "BATCH_TOO_LARGE",
            "a column has more than 2 GiB in one segment",
            hint="copy the table in smaller splits: backfill.num_rows_per_split",
        )
    _add_up(offsets)
    out = np.empty(size, np.uint8)
    for chunk, at in _parts(chunks, places):
        _place_texts(*_slices(chunk), at, offsets, out)
    buffers = [_validity(chunks, places), pa.py_buffer(offsets), pa.py_buffer(out)]
    return pa.Array.from_buffers(kind, places.size, buffers)


def _numbered(chunks: Sequence[pa.Array], places: Longs) -> pa.Array | None:
    """As a dictionary of its different texts; None where there are too many."""
    known = np.full(WORD_SLOTS, -1, np.int32)
    words, out = np.empty(MOST_WORDS * _WORD_ROOM, np.uint8), np.empty(places.size, np.int32)
    count = 0
    for chunk, at in _parts(chunks, places):
        count = _place_numbers(*_slices(chunk), at, known, words, count, out)
        if count < 0:
            return None
    texts = [bytes(word[: word[-1]]).decode() for word in words.reshape(-1, _WORD_ROOM)[:count]]
    numbers = pa.Array.from_buffers(pa.int32(), places.size, [_validity(chunks, places), pa.py_buffer(out)])
    return pa.DictionaryArray.from_arrays(numbers, pa.array(texts, pa.string()))


@compiled
def _place_values(values: Any, places: Longs, out: Any) -> None:
    for i in range(np.uint64(places.size)):
        out[np.uint64(places[i])] = values[i]


@compiled
def _place_pairs(values: Any, places: Longs, out: Any) -> None:
    one = np.uint64(1)
    for i in range(np.uint64(places.size)):
        to = np.uint64(places[i]) << one
        out[to] = values[i << one]
        out[to + one] = values[(i << one) + one]


@compiled
def _clear_bits(bits: Any, first: int, places: Longs, out: Any) -> None:
    """Clear those of `out` whose bit is not set, from bit `first` on."""
    seven = np.uint64(7)
    for i in range(np.uint64(places.size)):
        at = np.uint64(first) + i
        if not (bits[at >> np.uint64(3)] >> np.uint8(at & seven)) & np.uint8(1):
            to = np.uint64(places[i])
            out[to >> np.uint64(3)] &= ~np.uint8(np.uint8(1) << np.uint8(to & seven))


@compiled
def _place_lengths(starts: Any, places: Longs, offsets: Any) -> None:
    """Behind their places: the first offset is 0."""
    one = np.uint64(1)
    for i in range(np.uint64(places.size)):
        offsets[np.uint64(places[i]) + one] = starts[i + one] - starts[i]


@compiled
def _add_up(numbers: Any) -> None:
    """Each becomes the sum of all up to it."""
    total = np.int32(0)
    for i in range(np.uint64(numbers.size)):
        total += numbers[i]
        numbers[i] = total


@compiled
def _place_texts(data: Bytes, starts: Any, places: Longs, offsets: Any, out: Bytes) -> None:
    for i in range(np.uint64(places.size)):
        at = np.uint64(starts[i])
        size = np.uint64(starts[i + np.uint64(1)]) - at
        copy_bytes(data, at, out, np.uint64(offsets[np.uint64(places[i])]), size)


@compiled
def _place_numbers(data: Bytes, starts: Any, places: Longs, known: Any, words: Any, count: int, out: Any) -> int:
    """Number the different texts in the order in which they come, and place the numbers; -1: too many, or too long."""
    for i in range(np.uint64(places.size)):
        p = np.uint64(starts[i])
        length = np.uint64(starts[i + np.uint64(1)]) - p
        if length > np.uint64(WORD_BYTES):
            return -1
        slot = _hash(data, p, length) >> np.uint64(52)
        probes = 0
        while True:
            word = np.int64(known[slot])
            if word < 0:
                if count == MOST_WORDS:
                    return -1
                word = np.int64(count)
                known[slot] = word
                at = np.uint64(word) * np.uint64(_WORD_ROOM)
                copy_bytes(data, p, words, at, length)
                words[at + np.uint64(WORD_BYTES)] = length
                count += 1
                break
            at = np.uint64(word) * np.uint64(_WORD_ROOM)
            if np.uint64(words[at + np.uint64(WORD_BYTES)]) == length and _equal(data, p, words, at, length):
                break
            probes += 1
            if probes == WORD_PROBES:
                return -1
            slot = (slot + np.uint64(1)) & np.uint64(WORD_SLOTS - 1)
        out[np.uint64(places[i])] = word
    return count


@inlined
def _hash(data: Bytes, p: Any, length: Any) -> Any:
    mixed = length
    whole = length & ~np.uint64(7)
    for k in range(np.uint64(0), whole, np.uint64(8)):
        mixed = (mixed ^ load_eight(data, p + k)) * _MIX
        mixed ^= mixed >> np.uint64(29)
    rest = np.uint64(0)
    for k in range(whole, length):
        rest = (rest << np.uint64(8)) | np.uint64(data[p + k])
    return (mixed ^ rest) * _MIX


@inlined
def _equal(data: Bytes, p: Any, words: Bytes, q: Any, length: Any) -> bool:
    whole = length & ~np.uint64(7)
    for k in range(np.uint64(0), whole, np.uint64(8)):
        if load_eight(data, p + k) != load_eight(words, q + k):
            return False
    for k in range(whole, length):  # noqa: SIM110 - compiled code knows no `all`
        if data[p + k] != words[q + k]:
            return False
    return True
