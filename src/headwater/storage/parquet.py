"""Writes a table as a Parquet file, sooner than Arrow does; for the types that segments mostly have.

    PAR1
    row group, of `row_group_size` rows
        column chunk
            page header, dictionary             if the column has few distinct values
            page header, page                   of texts as many as it takes, of others one
                levels                          which rows are NULL, if any of the table is: RLE
                values                          without the NULLs
        column chunk ...
    row group ...
    footer, its size, PAR1                      `footer.py`

How a column is packed is said in the terms of `pyarrow.parquet.write_table` (`packing.py` decides it), so that a table
with a column that is not `supported` here can go to Arrow's writer. `pages.py` has the encoders. Numbers and bits
that are stored as they are come straight out of Arrow's memory; of others one page at a time is in memory twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.storage import footer, pages
from headwater.storage.footer import BOOLEAN, BYTE_ARRAY, Chunk, Kind, kind_of, varint
from headwater.storage.packing import DELTA_BINARY_PACKED, RUN_ROWS

# Texts of a page, in bytes: what a reader unpacks at once. Numbers need no bound, as a row group of them is less.
PAGE_BYTES: Final = 1 << 20
# A dictionary with more entries, or of more bytes of texts, would leave a reader's cache: values are written plain.
MOST_WORDS: Final = 1 << 14
MOST_WORD_BYTES: Final = 1 << 20
MOST_BOUND_BYTES: Final = 4096  # a longer text would make footers large
COPIED_BYTES: Final = 1 << 16  # smaller parts are gathered, for fewer calls; from 16 to 256 KiB it makes no difference
GATHERED_BYTES: Final = 1 << 20  # that many at the most: of a table of hundreds of columns all parts are small
KNOWN_SCHEMAS: Final = 256  # whose part of the footer is remembered, some 100 bytes a column

_STORED: Final[dict[int, np.dtype[Any]]] = {
    footer.INT32: np.dtype(np.int32),
    footer.INT64: np.dtype(np.int64),
    footer.FLOAT: np.dtype(np.float32),
    footer.DOUBLE: np.dtype(np.float64),
}
_NOTHING: Final = memoryview(b"")


class Output(Protocol):
    def write(self, data: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Type:
    """A type of Arrow and what it becomes."""

    kind: Kind
    is_dictionary: bool
    given: np.dtype[Any]
    """Numbers in Arrow's memory; of wide decimals the halves, of which the lower one has all digits."""
    step: int
    stored: np.dtype[Any]


def supported(schema: pa.Schema) -> bool:
    return _types(tuple(schema.types)) is not None


@lru_cache(KNOWN_SCHEMAS)
def _types(types: tuple[pa.DataType, ...]) -> tuple[_Type, ...] | None:
    """None if one is not known."""
    found = [_type(kind) for kind in types]
    return None if None in found else tuple(t for t in found if t is not None)


def _type(given: pa.DataType) -> _Type | None:
    kind = kind_of(given)
    if kind is None:
        return None
    if pa.types.is_dictionary(given):
        return _Type(kind, True, *_index(given.index_type))
    if kind.physical in (BOOLEAN, BYTE_ARRAY):
        return _Type(kind, False, *_index(pa.int32()))
    stored, width = _STORED[kind.physical], given.bit_width // 8
    if width == stored.itemsize:
        return _Type(kind, False, stored, 1, stored)
    return _Type(kind, False, np.dtype(f"i{min(width, 8)}"), 2 if width == 16 else 1, stored)


def _index(kind: pa.DataType) -> tuple[np.dtype[Any], int, np.dtype[Any]]:
    """The numbers of a dictionary; those of a text that is given without one are of 32 bits."""
    given = np.dtype(f"i{kind.bit_width // 8}")
    return given, 1, np.dtype(np.int64 if given.itemsize == 8 else np.int32)


def write_table(rows: pa.Table, out: Output, *, row_group_size: int, **packed: Any) -> None:
    """Write rows whose columns are all supported. A column without a NULL is marked as such."""
    sink = _Sink(out)
    sink.add(footer.MAGIC)
    types = _types(tuple(rows.schema.types))
    assert types is not None, "a type that only Arrow's writer knows"
    columns = list(_columns(rows, types, packed))
    groups: list[bytes] = []
    for start in range(0, rows.num_rows, row_group_size):
        at, count = sink.at, min(row_group_size, rows.num_rows - start)
        chunks = [_write_chunk(sink, c, _part(rows.column(i), start, count)) for i, c in enumerate(columns)]
        groups.append(footer.row_group(chunks, count, at, len(groups)))
    schema = _schema(tuple(rows.column_names), types, tuple(c.optional for c in columns))
    sink.add(footer.file_end(schema, len(columns), rows.num_rows, groups))
    sink.flush()


@lru_cache(KNOWN_SCHEMAS)
def _schema(names: tuple[str, ...], types: tuple[_Type, ...], optional: tuple[bool, ...]) -> bytes:
    return footer.schema_elements(names, [t.kind for t in types], optional)


@dataclass(frozen=True, slots=True)
class _Column:
    """How a column is written, in all row groups."""

    name: bytes
    type: _Type
    optional: bool
    words: bool
    differences: bool
    compared: bool
    codec_number: int
    codec: pa.Codec | None


def _columns(rows: pa.Table, types: Sequence[_Type], packed: dict[str, Any]) -> Iterator[_Column]:
    words, compared = packed.get("use_dictionary", ()), packed.get("write_statistics", ())
    encodings, codecs = packed.get("column_encoding", {}), packed.get("compression", {})
    levels = packed.get("compression_level", {})
    for name, column, kind in zip(rows.column_names, rows.itercolumns(), types, strict=True):
        codec = codecs.get(name, "none")
        yield _Column(
            name.encode(),
            kind,
            column.null_count > 0 or (kind.is_dictionary and _has_null_word(column)),
            name in words or kind.is_dictionary,
            encodings.get(name) == DELTA_BINARY_PACKED,
            name in compared,
            footer.CODECS[codec],
            None if codec == "none" else _codec(codec, levels.get(name)),
        )


def _has_null_word(column: pa.ChunkedArray) -> bool:
    """Whether a NULL may be in a dictionary, where Arrow does not count it."""
    return any(chunk.dictionary.null_count for chunk in column.chunks)


@lru_cache
def _codec(name: str, level: int | None) -> pa.Codec:
    return pa.Codec(name, level)


def _part(column: pa.ChunkedArray, start: int, count: int) -> pa.Array:
    """Rows of a row group, which fit into one array whatever the column is."""
    part = column if count == len(column) else column.slice(start, count)
    return part.chunk(0) if part.num_chunks == 1 else part.combine_chunks()


class _Sink:
    """Gathers small parts, and knows where in the file it is. The output is done with a part when it returns."""

    def __init__(self, out: Output) -> None:
        self.at = 0
        self._out = out
        self._small = bytearray()
        self._scratch = np.empty(0, np.uint8)

    def add(self, part: Any) -> None:
        size = len(part)
        self.at += size
        if size < COPIED_BYTES:
            self._small += part
            if len(self._small) >= GATHERED_BYTES:
                self.flush()
        else:
            self.flush()
            self._out.write(part)

    def flush(self) -> None:
        if self._small:
            self._out.write(self._small)
            self._small = bytearray()

    def scratch(self, size: int) -> NDArray[np.uint8]:
        """Memory for a page. One for all of them, since fresh memory is dear; what was in it is to be added before."""
        if self._scratch.size < size:
            self._scratch = np.empty(size + size // 4, np.uint8)
        return self._scratch


@dataclass(slots=True)
class _Encoded:
    """The values of a column chunk or page, without levels."""

    encoding: int
    body: memoryview
    bounds: tuple[bytes, bytes] | None = None
    words: memoryview | None = None
    word_count: int = 0


def _write_chunk(sink: _Sink, column: _Column, array: pa.Array) -> Chunk:
    """The pages of some rows; the file's part of the footer."""
    begun, plain_size, words_at = sink.at, 0, None
    data_at, pages_written, nulls, encoding = begun, 0, 0, footer.PLAIN
    bounds: tuple[bytes, bytes] | None = None
    for part, made in _encoded(sink, column, array):
        if made.words is not None:
            words_at = sink.at
            plain_size += _add_page(sink, column, (made.words,), made.word_count, None)
            data_at = sink.at
        parts = (_levels(part), made.body) if column.optional else (made.body,)
        plain_size += _add_page(sink, column, parts, len(part), made.encoding)
        pages_written += 1
        nulls += part.null_count
        bounds, encoding = made.bounds or bounds, made.encoding
    return Chunk(
        column.type.kind.physical,
        column.name,
        column.codec_number,
        encoding,
        len(array),
        pages_written,
        plain_size,
        sink.at - begun,
        data_at,
        words_at,
        footer.statistics(nulls, bounds) if column.compared else None,
    )


def _add_page(sink: _Sink, column: _Column, parts: Sequence[Any], values: int, encoding: int | None) -> int:
    """A page of data, or without an encoding the dictionary; how large it is before it is compressed."""
    plain = packed = sum(len(p) for p in parts)
    if column.codec is not None:
        # Also if it does not shrink: the codec is one for all pages of a chunk.
        made = column.codec.compress(parts[0] if len(parts) == 1 else b"".join(parts))
        parts, packed = (memoryview(made.slice()),), made.size  # itself it shows Python the size before it shrank
    if encoding is None:
        head = footer.words_page(plain, packed, values)
    else:
        head = footer.data_page(plain, packed, values, encoding)
    sink.add(head)
    for part in parts:
        sink.add(part)
    return plain + len(head)


def _encoded(sink: _Sink, column: _Column, array: pa.Array) -> Iterable[tuple[pa.Array, _Encoded]]:
    """The rows of each page, and their values."""
    physical = column.type.kind.physical
    if physical == BYTE_ARRAY:
        return _encoded_texts(sink, column, array)
    if physical == BOOLEAN:
        return ((array, _encoded_bits(column, _present(array))),)
    return ((array, _encoded_numbers(sink, column, _numbers(_present(array), column.type))),)


def _present(array: pa.Array) -> pa.Array:
    return array.drop_null() if array.null_count else array


def _levels(array: pa.Array) -> bytes:
    """Which rows have a value; Arrow's bitmap is such a run of bits."""
    rows, nulls = len(array), array.null_count
    if nulls in (0, rows):
        run = varint(rows << 1) + (b"\0" if nulls else b"\1")
    else:
        run = varint((rows + 7) // 8 << 1 | 1) + bytes(_bits(array.buffers()[0], array.offset, rows))
    return len(run).to_bytes(4, "little") + run


def _bits(buffer: pa.Buffer, offset: int, count: int) -> memoryview:
    """Some bits of a bitmap; as they are, unless they begin within a byte."""
    data = memoryview(buffer)[offset // 8 : (offset + count + 7) // 8]
    if offset % 8 == 0:
        return data
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return _raw(np.packbits(bits[offset % 8 : offset % 8 + count], bitorder="little"))


def _encoded_bits(column: _Column, array: pa.Array) -> _Encoded:
    if len(array) == 0:
        return _Encoded(footer.PLAIN, _NOTHING)
    made = _Encoded(footer.PLAIN, _bits(array.buffers()[1], array.offset, len(array)))
    if column.compared:
        true = array.true_count
        made.bounds = (b"\1" if true == len(array) else b"\0", b"\1" if true else b"\0")
    return made


def _numbers(array: pa.Array, kind: _Type) -> NDArray[Any]:
    """The values as they are stored; without a copy if Arrow has them so."""
    count, step = len(array), kind.step
    if count == 0:
        return np.empty(0, kind.stored)
    start = array.offset * step * kind.given.itemsize
    values = np.frombuffer(array.buffers()[1], kind.given, count * step, start)
    if kind.given != kind.stored or step > 1:
        values = values[::step].astype(kind.stored)
    values.setflags(write=False)  # so that encoders are compiled for one sort of memory
    return values


def _encoded_numbers(sink: _Sink, column: _Column, values: NDArray[Any]) -> _Encoded:
    floats = values.dtype.kind == "f"
    if values.size and column.words and (found := _worded(sink, _as_whole(values), floats=floats)) is not None:
        distinct, body = found
        bounds = _bounds(distinct.view(values.dtype)) if column.compared else None
        return _Encoded(footer.WORDS, body, bounds, _raw(distinct), distinct.size)
    bounds = _bounds(values) if column.compared else None
    if values.size and column.differences:
        out = sink.scratch(pages.differences_room(values.size, values.itemsize))
        return _Encoded(footer.DELTA_BINARY_PACKED, _raw(out)[: pages.differences(values, out)], bounds)
    return _Encoded(footer.PLAIN, _raw(values), bounds)


def _raw(values: NDArray[Any]) -> memoryview:
    """The bytes of an array."""
    return memoryview(values.data).cast("B") if values.size else _NOTHING


def _as_whole(values: NDArray[Any]) -> NDArray[Any]:
    """Floats by their bits, so that zeros of both signs and every NaN stay what they are."""
    return values.view(np.dtype(f"i{values.itemsize}")) if values.dtype.kind == "f" else values


def _bounds(values: NDArray[Any]) -> tuple[bytes, bytes] | None:
    """The least and the greatest. None beside a NaN, which is the greatest for Spark, and for Parquet has no place."""
    if values.size == 0:
        return None
    if values.dtype.kind == "i":
        values.setflags(write=False)
        least, greatest = pages.bounds(values)
        width = values.itemsize
        return least.to_bytes(width, "little", signed=True), greatest.to_bytes(width, "little", signed=True)
    low, high = values.min(), values.max()
    if np.isnan(low):
        return None
    zero = values.dtype.type(0)  # of either sign, so that bounds hold for both
    return (-zero if low == 0 else low).tobytes(), (zero if high == 0 else high).tobytes()


def _worded(sink: _Sink, values: NDArray[Any], *, floats: bool = False) -> tuple[NDArray[Any], memoryview] | None:
    """The distinct values, and for each row which it has, behind their number of bits; None if they are too many.

    A column whose runs of equal values are long on average is written as such.
    """
    ends = np.empty(values.size // RUN_ROWS + 1, np.int64)
    runs = pages.runs(values, ends)
    if runs >= 0:
        values = values[np.append(0, ends[: runs - 1])]
        values.setflags(write=False)
    found = _numbered(values)
    if found is None:
        return None
    distinct, numbers = found
    if floats:
        distinct = _with_both_zeros(distinct)
    width = (distinct.size - 1).bit_length()
    if runs >= 0:
        out = sink.scratch(1 + pages.repeated_room(runs))
        size = pages.repeated(numbers, ends, width, out[1:])
    else:
        out = sink.scratch(1 + pages.hybrid_room(numbers.size, width))
        size = pages.hybrid(numbers, width, out[1:])
    out[0] = width
    return distinct, _raw(out)[: 1 + size]


def _with_both_zeros(distinct: NDArray[Any]) -> NDArray[Any]:
    """Of floats, by their bits. Spark looks a filter's 0.0 up in the dictionary, where -0.0 is another value; it leaves
    the row group out if it is not there: so where one is, both are, and one of them may be no row's."""
    zeros = np.array([0, np.iinfo(distinct.dtype).min], distinct.dtype)
    missing = zeros[~np.isin(zeros, distinct)]
    return np.append(distinct, missing) if missing.size == 1 else distinct


def _numbered(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int32]] | None:
    """The distinct values, and for each row which it has; None if they are too many."""
    most = min(values.size, MOST_WORDS)
    heads = np.zeros(1 << (2 * most - 1).bit_length(), np.int32)
    distinct, numbers = np.empty(most, values.dtype), np.empty(values.size, np.int32)
    count = pages.numbered(values, heads, distinct, numbers)
    return None if count < 0 else (distinct[:count], numbers)


def _encoded_texts(sink: _Sink, column: _Column, array: pa.Array) -> Iterator[tuple[pa.Array, _Encoded]]:
    if column.words and (made := _worded_texts(sink, column, array)) is not None:
        yield array, made
        return
    if column.type.is_dictionary:
        array = array.cast(array.type.value_type)
    bounds = _text_bounds(_present(array)) if column.compared else None
    for part in _paged(array):
        yield part, _Encoded(footer.PLAIN, _plain_texts(_present(part), sink), bounds)


def _worded_texts(sink: _Sink, column: _Column, array: pa.Array) -> _Encoded | None:
    """By a dictionary of the texts that occur; None if it would be too large."""
    if not column.type.is_dictionary:
        array = array.dictionary_encode()
    indices = _present(array.indices)
    if len(indices) == 0 or array.dictionary.null_count:
        return None
    found = _worded(sink, _numbers(indices, column.type))
    if found is None:
        return None
    words = array.dictionary.take(pa.array(found[0]))
    if words.nbytes > MOST_WORD_BYTES:
        return None
    bounds = _text_bounds(words) if column.compared else None
    return _Encoded(footer.WORDS, found[1], bounds, _plain_texts(words), len(words))


def _text_bounds(array: pa.Array) -> tuple[bytes, bytes] | None:
    if len(array) == 0:
        return None
    data, offsets = _text_data(array), _offsets(array)
    least, greatest = (data[offsets[i] : offsets[i + 1]].tobytes() for i in pages.text_bounds(data, offsets))
    return None if max(len(least), len(greatest)) > MOST_BOUND_BYTES else (least, greatest)


def _offsets(array: pa.Array) -> NDArray[np.int32]:
    found = np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4)
    found.setflags(write=False)
    return found


def _text_data(array: pa.Array) -> NDArray[np.uint8]:
    buffer = array.buffers()[2]
    found = np.frombuffer(buffer, np.uint8) if buffer is not None and buffer.size else np.empty(0, np.uint8)
    found.setflags(write=False)
    return found


def _paged(array: pa.Array) -> Iterator[pa.Array]:
    """Cut so that a page's texts are not much more than a page's bytes; a text is never cut, however large."""
    offsets = _offsets(array)
    if offsets[-1] - offsets[0] <= PAGE_BYTES:
        yield array
        return
    start = 0
    while start < len(array):
        fitting = int(np.searchsorted(offsets, int(offsets[start]) + PAGE_BYTES, "right")) - 1
        end = min(len(array), max(start + 1, fitting))
        yield array.slice(start, end - start)
        start = end


def _plain_texts(array: pa.Array, sink: _Sink | None = None) -> memoryview:
    """In the sink's memory, or in fresh one."""
    if len(array) == 0:
        return _NOTHING
    data, offsets = _text_data(array), _offsets(array)
    room = int(offsets[-1]) - int(offsets[0]) + 4 * len(array) + pages.SLACK
    out = np.empty(room, np.uint8) if sink is None else sink.scratch(room)
    return _raw(out)[: pages.texts(data, offsets, out)]


def prepare() -> None:
    """Compile the encoders, or load what was compiled before, so that no row waits for it."""
    rising = np.arange(2 * RUN_ROWS)
    whole = {f"{way}{bits}": rising.astype(f"i{bits}") for way in ("near", "word") for bits in (4, 8)}
    same = {f"run{bits}": np.zeros(rising.size, f"i{bits}") for bits in (4, 8)}
    rows = pa.table(whole | same | {"text": rising.astype(str)})
    names = rows.column_names
    write_table(
        rows,
        pa.BufferOutputStream(),
        row_group_size=len(rows),
        use_dictionary=[n for n in names if n.startswith(("word", "run"))],
        column_encoding={n: DELTA_BINARY_PACKED for n in names if n.startswith("near")},
        write_statistics=names,
    )
