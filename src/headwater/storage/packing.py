"""How the columns of a segment are packed, chosen from a sample of their values; each file says for itself what it is.

- Few distinct values: a dictionary. Others are twice as fast to write, and smaller, without one. Its numbers are
  compressed where some of them are much more frequent than others.
- Whole numbers, decimals that fit into one, and times near their neighbours, as keys and times of a sorted segment
  mostly are: their differences. Smaller than compressed numbers, and faster to write and to read.
- What else shrinks well is compressed, words in free order by the faster codec. A column that hardly shrinks costs
  more time, now and at each read, than its bytes do. One of a few long runs is nothing when compressed, and sooner
  than by a dictionary.
- Texts that hardly repeat have no least and greatest value noted, unless they are the key: rows are in the order of a
  hash, so these would be near the ends of the alphabet in every row group, and finding them means comparing all texts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.schema import OP, SEQ, VNODE

SAMPLE_ROWS: Final = 4096  # rows are in the order of a hash, so the first ones are a fair sample
SAMPLE_BYTES: Final = 16 << 20  # of wide rows a few tell as much
CODEC: Final = "zstd"
CODEC_LEVEL: Final = 1
FAST_CODEC: Final = "snappy"
NEARLY: Final = 1.5  # times the size, for half of the time to write and to read it
WORTH: Final = 0.4  # of its size: what shrinks less is not packed
DIFFERENCES: Final = "DELTA_BINARY_PACKED"
MOST_DIGITS: Final = 18  # of a decimal that is stored as an integer of 64 bits; of 32 bits with half as many
_BLOCK: Final = 128  # differences share a base, and each quarter of a block one number of bits


def packing(rows: pa.Table, key: Collection[str] = ()) -> dict[str, Any]:
    """What `pyarrow.parquet.write_table` is to be told about a table that ends with `_vnode`, `_op` and `_seq`."""
    width = max(1, rows.nbytes // max(1, rows.num_rows))
    sample = rows.slice(0, max(1, min(SAMPLE_ROWS, SAMPLE_BYTES // width)))
    runs = [n for n in rows.column_names if _is_in_runs(n, sample.column(n))]
    repeating = [n for n in rows.column_names if n not in runs and (n in (OP, SEQ) or _repeats(sample.column(n)))]
    near = [n for n in rows.column_names if n not in (*runs, *repeating) and _are_near(sample.column(n))]
    packed: dict[str, Any] = {"use_dictionary": repeating, "store_decimal_as_integer": True}
    if near:
        packed["column_encoding"] = dict.fromkeys(near, DIFFERENCES)
    if any(pa.types.is_nested(field.type) for field in sample.schema):  # leaves have other names than columns
        return packed | {"compression": CODEC, "compression_level": CODEC_LEVEL}
    compared = [n for n in rows.column_names if n in repeating or n in key or not _is_text(rows.column(n).type)]
    return packed | {"write_statistics": compared} | _compression(sample, runs, repeating, near)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _repeats(sample: pa.ChunkedArray) -> bool:
    kind = sample.type
    countable = not (pa.types.is_nested(kind) or pa.types.is_null(kind) or pa.types.is_boolean(kind))
    return bool(countable and pc.count_distinct(sample, "all").as_py() * 4 <= len(sample))


def _are_near(sample: pa.ChunkedArray) -> bool:
    kind = sample.type
    if pa.types.is_decimal(kind):
        return kind.precision <= MOST_DIGITS and _worth(_unscaled(sample), wide=kind.precision > MOST_DIGITS // 2)
    if not (pa.types.is_integer(kind) or pa.types.is_date32(kind) or pa.types.is_timestamp(kind)):
        return False
    wide = kind.bit_width == 64
    return _worth(sample.drop_null().cast(pa.int64() if wide else pa.int32(), safe=False).to_numpy(), wide=wide)


def _unscaled(sample: pa.ChunkedArray) -> Any:
    """The low words of decimals that fit into 64 bits."""
    values = sample.drop_null().cast(pa.decimal128(38, sample.type.scale)).combine_chunks()
    words = np.frombuffer(values.buffers()[1] or b"", np.int64)[2 * values.offset :]
    return words[: 2 * len(values) : 2]


def _worth(values: Any, *, wide: bool) -> bool:
    return difference_bits(values) <= (64 if wide else 32) * WORTH


def difference_bits(values: Any) -> float:
    """How many bits a difference takes on average."""
    steps = np.diff(values.astype(np.int64))
    whole = steps[: steps.size - steps.size % _BLOCK].reshape(-1, 4, _BLOCK // 4)
    if whole.size == 0:
        return 0.0
    above = (whole - whole.min(axis=(1, 2), keepdims=True)).view(np.uint64).max(axis=2)
    return float(np.ceil(np.log2(above.astype(np.float64) + 1)).mean())


def _compression(
    sample: pa.Table, runs: Sequence[str], repeating: Sequence[str], near: Sequence[str]
) -> dict[str, Any]:
    codecs = dict.fromkeys(sample.column_names, "none") | dict.fromkeys(runs, CODEC)
    for name in sample.column_names:
        if name in repeating:
            codecs[name] = CODEC if _is_uneven(sample.column(name)) else "none"
        elif name not in (*runs, *near):
            codecs[name] = _codec(sample.column(name))
    return {"compression": codecs, "compression_level": {n: CODEC_LEVEL for n, c in codecs.items() if c == CODEC}}


def _is_uneven(sample: pa.ChunkedArray) -> bool:
    """Whether the numbers of a dictionary take more bits than they tell; its texts shrink by themselves."""
    if _is_text(sample.type):
        return True
    if pa.types.is_decimal64(sample.type):  # which Arrow does not count
        sample = sample.cast(pa.decimal128(sample.type.precision, sample.type.scale))
    counts = pc.value_counts(sample.combine_chunks()).field("counts").to_numpy()
    bits = np.ceil(np.log2(max(2, counts.size)))
    shares = counts / max(1, counts.sum())
    return bool(-(shares * np.log2(shares)).sum() <= bits * WORTH)


def _is_in_runs(name: str, sample: pa.ChunkedArray) -> bool:
    return name == VNODE or (name in (OP, SEQ) and len(pc.unique(sample)) <= 1)


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
