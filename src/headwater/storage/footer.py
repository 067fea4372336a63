"""What a Parquet file says about itself, in Thrift's compact protocol; `parquet.py` writes the values.

A struct is its fields and a zero byte. A field begins with `(id - id of the field before) << 4 | type`, so the byte in
front of each value below tells its type and, added up, its id:

    1 true   2 false   3 byte   5 i32   6 i64 (both zigzag varints)   8 bytes with their length   9 list   C struct

Only the fields that readers use are written. Pieces are put together from bytes as they stand: a small file has more
of this than of rows, and a delta of a few rows is written for many tables each second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import pyarrow as pa

MAGIC: Final = b"PAR1"
CREATED_BY: Final = b"headwater version 1"  # "<application> version <number>" is what readers can parse

# Physical types.
BOOLEAN, INT32, INT64, FLOAT, DOUBLE, BYTE_ARRAY = 0, 1, 2, 4, 5, 6
# Encodings.
PLAIN, RLE, DELTA_BINARY_PACKED, WORDS = 0, 3, 5, 8
CODECS: Final = {"none": 0, "snappy": 1, "zstd": 6}

KNOWN_COLUMNS: Final = 4096  # whose part of a footer is remembered, some 200 bytes each
MOST_DIGITS: Final = 18  # of a decimal that is stored as a whole number of 64 bits
MOST_DIGITS_32: Final = 9  # and of 32 bits
_FILE_VERSION: Final = 2
_DATA_PAGE, _WORDS_PAGE = 0, 2


def varint(number: int) -> bytes:
    """Seven bits to a byte, the least first."""
    if number < 1 << 7:
        return _ONE_BYTE[number]
    if number < 1 << 14:
        return bytes((number & 127 | 128, number >> 7))
    if number < 1 << 21:
        return bytes((number & 127 | 128, number >> 7 & 127 | 128, number >> 14))
    return bytes((number & 127 | 128,)) + varint(number >> 7)


_ONE_BYTE: Final = [bytes((n,)) for n in range(128)]


def whole(number: int) -> bytes:
    """A number of 32 or 64 bits that is not negative."""
    return varint(number << 1)


def _text(value: bytes) -> bytes:
    return varint(len(value)) + value


def _list(kind: int, items: Sequence[bytes]) -> bytes:
    size = len(items)
    head = bytes([size << 4 | kind]) if size < 15 else bytes([0xF0 | kind]) + varint(size)
    return head + b"".join(items)


@dataclass(frozen=True, slots=True)
class Kind:
    """A column's type: what its values are stored as, and what they mean."""

    physical: int
    meaning: bytes = b""
    """Fields 6 to 10 of a SchemaElement: converted type, scale, precision, logical type."""


_TEXT: Final = Kind(BYTE_ARRAY, b"\x25" + whole(0) + b"\x4c\x1c\0\0")
_KINDS: Final = {
    pa.bool_(): Kind(BOOLEAN),
    pa.int8(): Kind(INT32, b"\x25" + whole(15) + b"\x4c\xac\x13\x08\x11\0\0"),
    pa.int16(): Kind(INT32, b"\x25" + whole(16) + b"\x4c\xac\x13\x10\x11\0\0"),
    pa.int32(): Kind(INT32),
    pa.int64(): Kind(INT64),
    pa.float32(): Kind(FLOAT),
    pa.float64(): Kind(DOUBLE),
    pa.string(): _TEXT,
    pa.binary(): Kind(BYTE_ARRAY),
    pa.date32(): Kind(INT32, b"\x25" + whole(6) + b"\x4c\x6c\0\0"),
    pa.timestamp("us"): Kind(INT64, b"\x6c\x8c\x12\x1c\x2c\0\0\0\0"),
}
_INSTANT: Final = Kind(INT64, b"\x25" + whole(10) + b"\x4c\x8c\x11\x1c\x2c\0\0\0\0")


def kind_of(kind: pa.DataType) -> Kind | None:
    """None for a type that only Arrow's writer knows."""
    if (simple := _KINDS.get(kind)) is not None:
        return simple
    if pa.types.is_dictionary(kind) and (pa.types.is_string(kind.value_type) or pa.types.is_binary(kind.value_type)):
        return _KINDS[kind.value_type] if pa.types.is_signed_integer(kind.index_type) else None
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        return _INSTANT
    if pa.types.is_decimal128(kind) or pa.types.is_decimal64(kind) or pa.types.is_decimal32(kind):
        return _decimal(kind.precision, kind.scale)
    return None


def _decimal(precision: int, scale: int) -> Kind | None:
    if precision > MOST_DIGITS or not 0 <= scale <= precision:
        return None
    digits = b"\x15" + whole(scale) + b"\x15" + whole(precision)
    meaning = b"\x25" + whole(5) + digits + b"\x2c\x5c" + digits + b"\0\0"
    return Kind(INT32 if precision <= MOST_DIGITS_32 else INT64, meaning)


def schema_elements(names: Sequence[str], kinds: Sequence[Kind], optional: Sequence[bool]) -> bytes:
    """A list of SchemaElement: the row and its columns."""
    row = b"\x35\0\x18" + _text(b"schema") + b"\x15" + whole(len(names)) + b"\0"
    columns = [
        b"\x15" + whole(kind.physical) + b"\x25" + whole(may) + b"\x18" + _text(name.encode()) + kind.meaning + b"\0"
        for name, kind, may in zip(names, kinds, optional, strict=True)
    ]
    return _list(0xC, [row, *columns])


def data_page(plain_size: int, packed_size: int, rows: int, encoding: int) -> bytes:
    """A PageHeader. Levels are always RLE."""
    plain, packed, count = varint(plain_size << 1), varint(packed_size << 1), varint(rows << 1)
    return b"\x15\0\x15%b\x15%b\x2c\x15%b\x15%b\x15\x06\x15\x06\0\0" % (plain, packed, count, whole(encoding))


def words_page(plain_size: int, packed_size: int, words: int) -> bytes:
    """The PageHeader of a dictionary."""
    sizes = b"\x15\x04\x15" + whole(plain_size) + b"\x15" + whole(packed_size)
    return sizes + b"\x4c\x15" + whole(words) + b"\x15\0\0\0"


def statistics(nulls: int, bounds: tuple[bytes, bytes] | None) -> bytes:
    """Statistics of a column chunk: how many NULLs, and the least and greatest value."""
    if bounds is None:
        return b"\x36%b\0" % varint(nulls << 1)
    least, greatest = bounds
    sizes = varint(len(greatest)), varint(len(least))
    return b"\x36%b\x28%b%b\x18%b%b\0" % (varint(nulls << 1), sizes[0], greatest, sizes[1], least)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A column of a row group as it was written."""

    physical: int
    name: bytes
    codec: int
    encoding: int
    rows: int
    pages: int
    plain_size: int
    packed_size: int
    data_at: int
    words_at: int | None
    statistics: bytes | None

    def encoded(self) -> bytes:
        """A ColumnChunk with its ColumnMetaData."""
        words, compared = self.words_at is not None, self.statistics is not None
        made = b"%b\x16%b\x16%b\x16%b\x26%b" % (
            _chunk_head(self.physical, self.name, self.codec, self.encoding, words),
            varint(self.rows << 1),
            varint(self.plain_size << 1),
            varint(self.packed_size << 1),
            varint(self.data_at << 1),
        )
        if self.words_at is not None:
            made += b"\x26" + varint(self.words_at << 1)
        if self.statistics is not None:
            made += (b"\x1c" if words else b"\x3c") + self.statistics
        return made + _chunk_end(self.encoding, self.pages, words, compared)


@lru_cache(KNOWN_COLUMNS)
def _chunk_head(physical: int, name: bytes, codec: int, encoding: int, words: bool) -> bytes:
    """The beginning of a ColumnChunk: type, encodings (levels are RLE), path, codec."""
    used = [PLAIN, RLE, encoding] if words else [encoding, RLE]
    encodings = b"\x19" + _list(5, [whole(e) for e in used])
    return b"\x26\0\x1c\x15" + whole(physical) + encodings + b"\x19\x18" + _text(name) + b"\x15" + whole(codec)


@lru_cache(KNOWN_COLUMNS)
def _chunk_end(encoding: int, pages: int, words: bool, compared: bool) -> bytes:
    """The end of a ColumnChunk: its pages, by which a reader knows whether a dictionary has all of its values."""
    counts = [_page_count(_DATA_PAGE, encoding, pages)]
    if words:
        counts.insert(0, _page_count(_WORDS_PAGE, PLAIN, 1))
    since = 1 if compared else 2 if words else 4  # fields after the last one
    return bytes((since << 4 | 9,)) + _list(0xC, counts) + b"\0\0"


def _page_count(page: int, encoding: int, count: int) -> bytes:
    """PageEncodingStats."""
    return b"\x15" + whole(page) + b"\x15" + whole(encoding) + b"\x15" + whole(count) + b"\0"


def row_group(chunks: Sequence[Chunk], rows: int, at: int, ordinal: int) -> bytes:
    plain, packed = sum(c.plain_size for c in chunks), sum(c.packed_size for c in chunks)
    columns = b"\x19" + _list(0xC, [c.encoded() for c in chunks])
    sizes = b"\x16" + whole(plain) + b"\x16" + whole(rows) + b"\x26" + whole(at) + b"\x16" + whole(packed)
    return columns + sizes + (b"\x14" + whole(ordinal) if ordinal < 1 << 15 else b"") + b"\0"


def file_end(schema: bytes, columns: int, rows: int, groups: Sequence[bytes]) -> bytes:
    """FileMetaData, its size, and the magic. Columns are ordered by their types, so that bounds are believed."""
    made = b"".join(
        (
            b"\x15" + whole(_FILE_VERSION) + b"\x19",
            schema,
            b"\x16" + whole(rows) + b"\x19",
            _list(0xC, groups),
            b"\x28" + _text(CREATED_BY) + b"\x19",
            _list(0xC, [b"\x1c\0\0"] * columns),
            b"\0",
        )
    )
    return made + len(made).to_bytes(4, "little") + MAGIC
