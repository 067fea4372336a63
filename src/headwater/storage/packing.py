"""How the columns of a segment are packed, chosen from a sample of their values; each file says for itself what it is.

- Few distinct values: a dictionary. Others are faster to write, and smaller, without one. Its numbers are compressed
  where some of them are much more frequent than others. Those of a column of a few long runs are next to nothing.
- Whole numbers, decimals that fit into one, and times near their neighbours, as keys and times of a sorted segment
  mostly are: their differences. Smaller than compressed numbers, and faster to write and to read; as fast to write as a
  dictionary, so whichever takes fewer bits.
- What else shrinks well is compressed, words in free order by the faster codec. A column that hardly shrinks costs
  more time, now and at each read, than its bytes do.
- Rows that are few bytes are written as they are, and not looked at.
- Texts that hardly repeat have no least and greatest value noted, unless they are the key: rows are in the order of a
  hash, so these would be near the ends of the alphabet in every row group, and finding them means comparing all texts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.schema import OP, SEQ, VNODE
from headwater.storage.footer import MOST_DIGITS, MOST_DIGITS_32

SAMPLE_ROWS: Final = 4096  # rows are in the order of a hash, so the first ones are a fair sample
SAMPLE_BYTES: Final = 16 << 20  # of wide rows a few tell as much
CODEC: Final = "zstd"
CODEC_LEVEL: Final = 1
FAST_CODEC: Final = "snappy"
NEARLY: Final = 1.5  # times the size, for half of the time to write and to read it
WORTH: Final = 0.4  # of its size: what shrinks less is not packed
DELTA_BINARY_PACKED: Final = "DELTA_BINARY_PACKED"
WORDS: Final = "RLE_DICTIONARY"
PLAIN: Final = "PLAIN"
REPEATED: Final = 4  # times that a value occurs, on average, for a dictionary to pay
RUN_ROWS: Final = 32  # of a run, on average, for which a number of rows is less than their bits
SMALL_BYTES: Final = 16 << 10  # of rows, about what the footer of a file and the blocks of a disk take anyway
_BLOCK: Final = 128  # differences share a base, and each quarter of a block one number of bits


def packing(rows: pa.Table, key: Collection[str] = ()) -> dict[str, Any]:
    """What `parquet.write_table`, or pyarrow's, is to be told about a table that ends with `_vnode`, `_op` and `_seq`.

    Both understand it: `column_encoding` and `use_dictionary` name columns, `compression` says one codec per column.
    """
    width = max(1, rows.nbytes // max(1, rows.num_rows))
    sample = rows.slice(0, max(1, min(SAMPLE_ROWS, SAMPLE_BYTES // width)))
    found = {n: _choice(n, sample.column(n)) for n in rows.column_names}
    repeating = [n for n, (way, _) in found.items() if way == WORDS]
    near = [n for n, (way, _) in found.items() if way == DELTA_BINARY_PACKED]
    packed: dict[str, Any] = {"use_dictionary": repeating, "store_decimal_as_integer": True}
    if near:
        packed["column_encoding"] = dict.fromkeys(near, DELTA_BINARY_PACKED)
    if any(pa.types.is_nested(field.type) for field in sample.schema):  # leaves have other names than columns
        return packed | {"compression": CODEC, "compression_level": CODEC_LEVEL}
    return packed | _noted(rows.schema, key, repeating) | _compression({n: codec for n, (_, codec) in found.items()})


def is_small(schema: pa.Schema, memory: int) -> bool:
    """Whether a file of rows of `memory` bytes is small however they are packed: to look at them would take longer than
    to write them."""
    return bool(memory <= SMALL_BYTES and not any(pa.types.is_nested(kind) for kind in schema.types))


def unpacked(schema: pa.Schema, key: Collection[str] = ()) -> dict[str, Any]:
    """What `packing` would say if no column were worth it; for rows that are few."""
    packed = {"use_dictionary": [], "store_decimal_as_integer": True}
    return packed | _noted(schema, key, ()) | _compression(dict.fromkeys(schema.names, "none"))


def _noted(schema: pa.Schema, key: Collection[str], repeating: Collection[str]) -> dict[str, Any]:
    names = [f.name for f in schema if f.name in repeating or f.name in key or not _is_text(f.type)]
    return {"write_statistics": names}


def _compression(codecs: dict[str, str]) -> dict[str, Any]:
    return {"compression": codecs, "compression_level": {n: CODEC_LEVEL for n, c in codecs.items() if c == CODEC}}


def _choice(name: str, sample: pa.ChunkedArray) -> tuple[str, str]:
    """How a column is encoded, and its codec."""
    if pa.types.is_dictionary(sample.type) or _is_in_runs(name, sample):
        return WORDS, CODEC if _is_text(sample.type) else "none"
    whole = _whole_numbers(sample)
    bits = float("inf") if whole is None else difference_bits(whole)
    counts = _counts(sample)
    if counts is not None and counts.size * REPEATED <= len(sample):
        # The numbers of a dictionary are compressed if they take more bits than they tell; its texts shrink anyway.
        word_bits = np.ceil(np.log2(max(2, counts.size)))
        uneven = _is_text(sample.type) or _told(counts) <= word_bits * WORTH
        if uneven or bits > word_bits:
            return WORDS, CODEC if uneven else "none"
        return DELTA_BINARY_PACKED, "none"
    if whole is not None and bits <= 8 * whole.itemsize * WORTH:
        return DELTA_BINARY_PACKED, "none"
    return PLAIN, _codec(sample)


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _counts(sample: pa.ChunkedArray) -> Any:
    """How often each value occurs, NULL included; None if they cannot be told apart."""
    kind = sample.type
    if pa.types.is_nested(kind) or pa.types.is_null(kind) or pa.types.is_boolean(kind):
        return None
    if pa.types.is_decimal64(kind) or pa.types.is_decimal32(kind):  # which Arrow does not count
        sample = sample.cast(pa.decimal128(kind.precision, kind.scale))
    return pc.value_counts(sample.combine_chunks()).field("counts").to_numpy()


def _told(counts: Any) -> float:
    """How many bits a value tells on average."""
    shares = counts / max(1, counts.sum())
    return float(-(shares * np.log2(shares)).sum())


def _whole_numbers(sample: pa.ChunkedArray) -> Any:
    """What is stored as whole numbers, in their width; None for other types."""
    kind = sample.type
    if pa.types.is_decimal(kind) and kind.precision <= MOST_DIGITS:
        return _unscaled(sample).astype(np.int64 if kind.precision > MOST_DIGITS_32 else np.int32)
    if not (pa.types.is_integer(kind) or pa.types.is_date32(kind) or pa.types.is_timestamp(kind)):
        return None
    stored = pa.int64() if kind.bit_width == 64 else pa.int32()
    return sample.drop_null().cast(stored, safe=False).to_numpy()


def _unscaled(sample: pa.ChunkedArray) -> Any:
    """The low words of decimals that fit into 64 bits."""
    values = sample.drop_null().cast(pa.decimal128(38, sample.type.scale)).combine_chunks()
    words = np.frombuffer(values.buffers()[1] or b"", np.int64)[2 * values.offset :]
    return words[: 2 * len(values) : 2]


def difference_bits(values: Any) -> float:
    """How many bits a difference takes on average."""
    steps = np.diff(values.astype(np.int64))
    whole = steps[: steps.size - steps.size % _BLOCK].reshape(-1, 4, _BLOCK // 4)
    if whole.size == 0:
        return 0.0
    above = (whole - whole.min(axis=(1, 2), keepdims=True)).view(np.uint64).max(axis=2)
    return float(np.ceil(np.log2(above.astype(np.float64) + 1)).mean())


def _is_in_runs(name: str, sample: pa.ChunkedArray) -> bool:
    """Whether one of the columns that a segment is ordered by, or that are mostly all the same, is a few long runs."""
    if name not in (VNODE, OP, SEQ) or sample.null_count:
        return False
    values = sample.to_numpy()
    return bool(np.count_nonzero(values[1:] != values[:-1]) * RUN_ROWS <= len(values))


def _codec(sample: pa.ChunkedArray) -> str:
    """The one that makes it small; the faster one where that is nearly as good, as for words in free order."""
    data = sample.take(np.arange(len(sample))).combine_chunks().buffers()[-1]  # a slice would bring all of its buffer
    if data is None or data.size == 0:
        return CODEC
    small = pa.Codec(CODEC, CODEC_LEVEL).compress(data).size
    if small > data.size * WORTH:
        return "none"
    fast = _is_text(sample.type) and pa.Codec(FAST_CODEC).compress(data).size <= small * NEARLY
    return FAST_CODEC if fast else CODEC
