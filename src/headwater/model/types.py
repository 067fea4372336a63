"""Spark DDL type names and their Arrow types: a small parser, so that no Spark is needed to write a segment."""

from __future__ import annotations

import re
from typing import Final

import pyarrow as pa

_SIMPLE: Final[dict[str, pa.DataType]] = {
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "BYTE": pa.int8(),
    "SMALLINT": pa.int16(),
    "SHORT": pa.int16(),
    "INT": pa.int32(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "LONG": pa.int64(),
    "FLOAT": pa.float32(),
    "REAL": pa.float32(),
    "DOUBLE": pa.float64(),
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "TIMESTAMP_LTZ": pa.timestamp("us", tz="UTC"),
    "TIMESTAMP_NTZ": pa.timestamp("us"),
    "VOID": pa.null(),
}
_DECIMAL: Final = re.compile(r"^(?:DECIMAL|NUMERIC|DEC)(?:\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))?$")


def arrow_type(ddl: str) -> pa.DataType:
    """The Arrow type of a Spark DDL type such as `ARRAY<DECIMAL(10,2)>`; ValueError for an unknown one."""
    text = ddl.strip()
    upper = text.upper()
    if upper in _SIMPLE:
        return _SIMPLE[upper]
    if match := _DECIMAL.match(upper):
        precision, scale = int(match[1] or 10), int(match[2] or 0)
        if scale > precision:  # Arrow has such numbers, Spark does not
            raise ValueError(f"unknown type {ddl}")
        return pa.decimal128(precision, scale)
    if upper.startswith("ARRAY<") and upper.endswith(">"):
        return pa.list_(pa.field("element", arrow_type(text[6:-1])))
    if upper.startswith("MAP<") and upper.endswith(">"):
        key, value = split_top_level(text[4:-1])
        return pa.map_(arrow_type(key), arrow_type(value))
    if upper.startswith("STRUCT<") and upper.endswith(">"):
        return pa.struct([_struct_field(part) for part in split_top_level(text[7:-1])])
    raise ValueError(f"unknown type {ddl}")


def _struct_field(text: str) -> pa.Field:
    name, _, kind = text.strip().partition(":")
    if not kind:
        name, _, kind = text.strip().partition(" ")
    return pa.field(name.strip().strip("`"), arrow_type(kind))


def split_top_level(text: str) -> list[str]:
    """Split at commas that are not inside `<…>` or `(…)`."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "<(":
            depth += 1
        elif char in ">)":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return parts


def is_integer(ddl: str) -> bool:
    return ddl.upper() in {"TINYINT", "BYTE", "SMALLINT", "SHORT", "INT", "INTEGER", "BIGINT", "LONG"}
