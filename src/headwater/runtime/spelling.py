"""Values as the interfaces spell them: `--format json`, POST /sql and the page say the same of every type.

Works on a few thousand values at a time: Arrow turns a column into Python's values in one call, which holds the
interpreter until its end.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa

from headwater.sink.encode import date_text, flat, timestamp_text

AT_ONCE: Final = 4096  # values: about a millisecond


def unique_names(names: Iterable[str]) -> list[str]:
    """Two columns of one name would be one in a JSON object: `x`, `x_2`."""
    names = list(names)
    taken, result = set(names), list[str]()
    for name in names:
        if name in result:
            name = next(n for i in itertools.count(2) if (n := f"{name}_{i}") not in taken)
            taken.add(name)
        result.append(name)
    return result


def json_column(array: Any) -> list[Any]:
    """The values of an Arrow column, spelt as `json_value` does; the extreme moments print as `infinity`."""
    array = flat(array)
    kind = array.type
    if pa.types.is_timestamp(kind):
        return list(_values(timestamp_text(array)))
    if pa.types.is_date(kind):
        return list(_values(date_text(array)))
    if pa.types.is_float32(kind):  # with as many digits as it has
        return [json_value(None if text is None else float(text)) for text in _values(array.cast(pa.string()))]
    if pa.types.is_map(kind):
        keys, items = [_json_key(k) for k in json_column(array.keys)], json_column(array.items)
        return _cut(array, [dict(zip(keys[a:b], items[a:b], strict=True)) for a, b in _bounds(array)])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        values = json_column(array.values)
        return _cut(array, [values[a:b] for a, b in _bounds(array)])
    if pa.types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        parts = [json_column(part) for part in array.flatten()]
        return _cut(array, [dict(zip(names, row, strict=True)) for row in zip(*parts, strict=True)])
    if pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_boolean(kind):  # as they are
        return list(_values(array))
    return [json_value(v) for v in _values(array)]


def _values(array: Any) -> Iterator[Any]:
    for at in range(0, len(array), AT_ONCE):
        part = array.slice(at, AT_ONCE)
        try:
            yield from part.to_pylist()
        except UnicodeDecodeError:  # a text that Spark made of bytes need not be one
            plain = part.cast(pa.large_binary() if pa.types.is_large_string(part.type) else pa.binary())
            yield from (None if v is None else v.decode("utf-8", "replace") for v in plain.to_pylist())


def _bounds(array: Any) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(_values(array.offsets))


def _cut(array: Any, values: list[Any]) -> list[Any]:
    """The values, with NULL where the array has it."""
    return [v if valid else None for v, valid in zip(values, _values(array.is_valid()), strict=True)]


def json_value(value: Any) -> Any:
    """Integers exact, decimals strings, timestamps ISO 8601 in UTC with microseconds, binary base64, NaN strings."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
        case decimal.Decimal():
            return format(value, "f")
        case dt.datetime():
            return _timestamp(value)
        case dt.date():
            return value.isoformat()
        case bytes() | bytearray() | memoryview():
            return base64.b64encode(bytes(value)).decode()
        case dict():
            return {_json_key(json_value(k)): json_value(v) for k, v in value.items()}
        case _ if hasattr(value, "asDict"):
            return {k: json_value(v) for k, v in value.asDict().items()}
        case list() | tuple():
            return [json_value(v) for v in value]
    return str(value)


def _json_key(value: Any) -> str:
    """A map's key as the name in an object: a text as it is, others as the text of their JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _timestamp(value: dt.datetime) -> str:
    if value.tzinfo is not None:
        value = value.astimezone(dt.UTC)
        return value.strftime("%Y-%m-%dT%H:%M:%S.%f") + "Z"
    return value.strftime("%Y-%m-%dT%H:%M:%S.%f")
