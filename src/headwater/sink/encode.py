"""Arrow arrays to text, column-wise: JSON values, CSV for COPY, array literals. No Python code runs per row.

The values are spelt as in `--format json` (DESIGN.md section 10): integers as numbers, decimals as strings,
timestamps ISO 8601 in UTC with microseconds, binary base64 or hex, NaN and infinities as strings. Connectors choose
which spelling they need.
"""

from __future__ import annotations

import base64
import datetime as dt
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_HEX: Final = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
# Arrow's own formatting is right only for four-digit years.
_YEAR_1_US: Final = -62_135_596_800_000_000
_YEAR_10000_US: Final = 253_402_300_800_000_000
_DAY_US: Final = 86_400_000_000
_INT64_MAX: Final = (1 << 63) - 1
_INT32_MAX: Final = (1 << 31) - 1


def flat(array: Any) -> Any:
    """A chunked array as one contiguous array."""
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def hex_text(array: Any, prefix: str = "") -> Any:
    """Binary values as lower-case hexadecimal text."""
    array = flat(array).cast(pa.large_binary())
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    data = array.buffers()[2]
    raw = np.frombuffer(data, dtype=np.uint8)[offsets[0] : offsets[-1]] if data is not None else np.empty(0, np.uint8)
    out = np.empty(2 * len(raw), dtype=np.uint8)
    out[0::2], out[1::2] = _HEX[raw >> 4], _HEX[raw & 15]
    moved = np.ascontiguousarray((offsets - offsets[0]) * 2)
    texts = pa.Array.from_buffers(pa.large_string(), len(array), [None, pa.py_buffer(moved), pa.py_buffer(out)])
    joined = pc.binary_join_element_wise(pa.scalar(prefix, pa.large_string()), texts, pa.scalar("", pa.large_string()))
    return pc.if_else(array.is_valid(), joined, None).cast(pa.string())


def base64_text(array: Any) -> Any:
    """Binary values as base64 text. (The one spelling for which neither Arrow nor numpy has a column-wise form.)"""
    values = flat(array).to_pylist()
    return pa.array([None if v is None else base64.b64encode(v).decode() for v in values], pa.string())


def timestamp_text(array: Any, *, separator: str = "T", infinity: bool = True) -> Any:
    """Timestamps with microseconds; an instant ends in `Z`. The extreme values print as `infinity`."""
    array = flat(array)
    zone = "Z" if array.type.tz else ""
    micros = array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64())
    bounds = pc.min_max(micros).as_py()
    if bounds["min"] is not None and (bounds["min"] < _YEAR_1_US or bounds["max"] >= _YEAR_10000_US):
        texts = [_far_timestamp(v, separator, zone, infinity) for v in micros.to_pylist()]
        return pa.array(texts, pa.string())
    # A cast, not strftime: that takes ten times as long, and was most of what a sink's task did.
    texts = micros.cast(pa.timestamp("us")).cast(pa.string())
    if separator != " ":
        texts = pc.binary_replace_slice(texts, 10, 11, separator)
    return pc.binary_join_element_wise(texts, zone, "") if zone else texts


def _far_timestamp(micros: int | None, separator: str, zone: str, infinity: bool) -> str | None:
    if micros is None:
        return None
    if infinity and abs(micros) >= _INT64_MAX:  # sources give the smallest number plus one, docs/types-postgres.md
        return "infinity" if micros > 0 else "-infinity"
    days, rest = divmod(micros, _DAY_US)
    clock = (dt.datetime.min + dt.timedelta(microseconds=rest)).time().isoformat(timespec="microseconds")
    date, era = _civil(days)
    return f"{date}{separator}{clock}{zone}{era}"


def date_text(array: Any, *, infinity: bool = True) -> Any:
    """Dates as `YYYY-MM-DD`; the extreme values print as `infinity`."""
    days = flat(array).cast(pa.date32()).cast(pa.int32())
    bounds = pc.min_max(days).as_py()
    low, high = _YEAR_1_US // _DAY_US, _YEAR_10000_US // _DAY_US
    if bounds["min"] is not None and (bounds["min"] < low or bounds["max"] >= high):
        return pa.array([_far_date(v, infinity) for v in days.to_pylist()], pa.string())
    return days.cast(pa.date32()).cast(pa.string())


def _far_date(days: int | None, infinity: bool) -> str | None:
    if days is None:
        return None
    if infinity and abs(days) >= _INT32_MAX:
        return "infinity" if days > 0 else "-infinity"
    date, era = _civil(days)
    return f"{date}{era}"


def _civil(days: int) -> tuple[str, str]:
    """The proleptic Gregorian date of a day number since 1970, for years that `datetime` does not have."""
    cycles, rest = divmod(days + 719_468, 146_097)
    year_of_era = (rest - rest // 1460 + rest // 36_524 - rest // 146_096) // 365
    day_of_year = rest - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * shifted + 2) // 5 + 1
    month = shifted + 3 if shifted < 10 else shifted - 9
    year = year_of_era + cycles * 400 + (1 if month <= 2 else 0)
    if year > 0:
        return f"{year:04d}-{month:02d}-{day:02d}", ""
    return f"{1 - year:04d}-{month:02d}-{day:02d}", " BC"


def decimal_text(array: Any) -> Any:
    """Decimals in plain digits, never with an exponent."""
    array = flat(array)
    texts = array.cast(pa.string())
    has_exponent = pc.match_substring(texts, "E")
    if not pc.any(has_exponent).as_py():
        return texts
    return pa.array([None if v is None else f"{v:f}" for v in array.to_pylist()], pa.string())


def plain_text(array: Any) -> Any:
    """Any scalar type as unquoted text (the payload of a CSV field or of a JSON string)."""
    array = flat(array)
    kind = array.type
    if pa.types.is_timestamp(kind):
        return timestamp_text(array)
    if pa.types.is_date(kind):
        return date_text(array)
    if pa.types.is_decimal(kind):
        return decimal_text(array)
    if pa.types.is_null(kind):
        return pa.nulls(len(array), pa.string())
    return array.cast(pa.string())


def json_text(array: Any) -> Any:
    """Each value as JSON text; a null becomes the text `null`."""
    array = flat(array)
    return pc.fill_null(_json(array), "null")


def json_rows(batch: Any, names: list[str] | None = None) -> Any:
    """Each row of a batch as one JSON object."""
    names = names or list(batch.schema.names)
    return _json_object([batch.column(n) for n in names], names, batch.num_rows)


def _json(array: Any) -> Any:
    kind = array.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return array.cast(pa.string())
    if pa.types.is_floating(kind):
        finite = pc.is_finite(array)
        return pc.if_else(finite, array.cast(pa.string()), _quoted(_odd_float(array)))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _quoted(_escaped(array.cast(pa.string())))
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _quoted(base64_text(array))
    if pa.types.is_map(kind):
        return _json_map(array)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _bracketed(array, json_text(array.flatten()), "[", "]")
    if pa.types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        objects = _json_object(array.flatten(), names, len(array))
        return pc.if_else(array.is_valid(), objects, None)
    return _quoted(plain_text(array))


def _odd_float(array: Any) -> Any:
    negative = pc.less(array, 0)
    return pc.if_else(pc.is_nan(array), "NaN", pc.if_else(negative, "-Infinity", "Infinity"))


def _escaped(texts: Any) -> Any:
    # Looked for once: most columns have nothing to escape.
    if not pc.any(pc.match_substring_regex(texts, r'["\\\x00-\x1f]')).as_py():
        return texts
    for plain, quoted in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        texts = pc.replace_substring(texts, plain, quoted)
    # Looked for once: the other control characters hardly ever occur.
    if pc.any(pc.match_substring_regex(texts, r"[\x00-\x1f]")).as_py():
        for code in range(32):
            texts = pc.replace_substring(texts, chr(code), f"\\u{code:04x}")
    return texts


def _quoted(texts: Any) -> Any:
    return pc.binary_join_element_wise('"', texts, '"', "")


def _json_object(columns: list[Any], names: list[str], rows: int) -> Any:
    if not columns:
        return pa.array(["{}"] * rows, pa.string())
    parts: list[Any] = []
    for i, (name, column) in enumerate(zip(names, columns, strict=True)):
        label = _escaped(pa.array([name])).to_pylist()[0]
        parts += [f'{"{" if i == 0 else ","}"{label}":', json_text(column)]
    return pc.binary_join_element_wise(*parts, "}", "")


def _json_map(array: Any) -> Any:
    keys, items = array.keys, array.items
    texts = plain_text(keys) if not pa.types.is_string(keys.type) else keys
    entries = pc.binary_join_element_wise(_quoted(_escaped(texts)), json_text(items), ":")
    lists = pa.ListArray.from_arrays(array.offsets, entries)
    joined = pc.binary_join_element_wise("{", pc.binary_join(lists, ","), "}", "")
    return pc.if_else(array.is_valid(), joined, None)


def _bracketed(array: Any, items: Any, opening: str, closing: str) -> Any:
    """Texts of a list's flattened items, joined per list."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(array) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items)
    joined = pc.binary_join_element_wise(opening, pc.binary_join(lists, ","), closing, "")
    return pc.if_else(array.is_valid(), joined, None)


def array_literal(array: Any) -> Any:
    """Lists as SQL array literals: `{1,NULL,"a\\"b"}`, nested ones too."""
    array = flat(array)
    items = array.flatten()
    if pa.types.is_list(items.type):
        texts = array_literal(items)
    elif pa.types.is_binary(items.type):
        texts = _quoted(pc.replace_substring(hex_text(items, "\\x"), "\\", "\\\\"))
    else:
        quoted = pc.replace_substring(pc.replace_substring(plain_text(items), "\\", "\\\\"), '"', '\\"')
        texts = _quoted(quoted)
    return _bracketed(array, pc.fill_null(texts, "NULL"), "{", "}")
