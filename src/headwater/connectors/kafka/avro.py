"""Avro for the Kafka sink: schemas from columns, and rows encoded column by column (no Python per row).

    framing            bytes before the body                         when
    single object      C3 01 | CRC-64-AVRO of the schema, 8 bytes LE without a registry (Avro's own standard)
    Confluent          00 | schema id, 4 bytes BE                     with `schema.registry.url` (`registry.py`)

A column is `["null", T]`, a key column that is never NULL plain `T`. TINYINT, SMALLINT and INT are `int`, DATE
`int/date`, TIMESTAMP `long/timestamp-micros` (an instant), TIMESTAMP_NTZ `long/local-timestamp-micros`, DECIMAL
`bytes/decimal` of 16 bytes (longer than needed is legal: two's complement, sign extended), a map with text keys a map,
with other keys an array of records `{key, value}`.

Each column becomes an Arrow array of its encoded bytes; joining the arrays element by element gives the rows.
`fastavro` only computes fingerprints here; in the tests it is the independent reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.errors import UsageError
from headwater.model.schema import Column
from headwater.model.types import arrow_type
from headwater.sink.encode import flat

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EMPTY: Final = pa.scalar(b"", pa.large_binary())
_END: Final = pa.scalar(b"\x00", pa.large_binary())  # also: branch 0 of a union, the null
_PRESENT: Final = pa.scalar(b"\x02", pa.large_binary())  # branch 1 of a union
_DECIMAL_BYTES: Final = 16


def schema_json(name: str, columns: Sequence[Column], strict: Sequence[str] = ()) -> str:
    """The record schema of some columns; those in `strict` are never NULL."""
    fields = []
    for column in columns:
        kind = _type(arrow_type(column.type), f"{_word(name)}_{_word(column.name)}")
        if not _NAME.fullmatch(column.name):
            raise UsageError(
                "SINK_OPTION_INVALID",
                f"format avro cannot name column {column.name}",
                hint="rename it in the sink's query (AS SELECT … AS name), or use format='json'",
            )
        if column.name in strict or kind == "null":
            fields.append({"name": column.name, "type": kind})
        else:
            fields.append({"name": column.name, "type": ["null", kind], "default": None})
    return json.dumps({"type": "record", "name": _word(name), "fields": fields}, separators=(",", ":"))


def single_object_prefix(schema: str) -> bytes:
    """The marker and the schema's fingerprint."""
    from fastavro.schema import fingerprint, to_parsing_canonical_form

    text = fingerprint(to_parsing_canonical_form(json.loads(schema)), "CRC-64-AVRO")
    return b"\xc3\x01" + bytes.fromhex(text)


def confluent_prefix(schema_id: int) -> bytes:
    return b"\x00" + schema_id.to_bytes(4, "big")


def encode_rows(batch: Any, names: Sequence[str], strict: Sequence[str], prefix: bytes) -> Any:
    """Each row of a batch as one framed record: an array of large binary."""
    head = pa.scalar(prefix, pa.large_binary())
    columns = [_encoded(batch.column(n), nullable=n not in strict) for n in names]
    if not columns:
        return pa.array([prefix] * batch.num_rows, pa.large_binary())
    return _joined(head, *columns)


def _word(text: str) -> str:
    word = re.sub(r"[^A-Za-z0-9_]", "_", text)
    return word if _NAME.fullmatch(word) else f"_{word}"


_PLAIN: Final[dict[pa.DataType, Any]] = {
    pa.bool_(): "boolean",
    pa.int8(): "int",
    pa.int16(): "int",
    pa.int32(): "int",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "bytes",
    pa.null(): "null",
    pa.date32(): {"type": "int", "logicalType": "date"},
    pa.timestamp("us"): {"type": "long", "logicalType": "local-timestamp-micros"},
    pa.timestamp("us", tz="UTC"): {"type": "long", "logicalType": "timestamp-micros"},
}


def _type(kind: pa.DataType, path: str) -> Any:
    if kind in _PLAIN:
        return _PLAIN[kind]
    if pa.types.is_decimal(kind):
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    if pa.types.is_map(kind):
        value = _optional(kind.item_type, f"{path}_value")
        if pa.types.is_string(kind.key_type):
            return {"type": "map", "values": value}
        fields = [{"name": "key", "type": _type(kind.key_type, f"{path}_key")}, {"name": "value", "type": value}]
        return {"type": "array", "items": {"type": "record", "name": f"{path}_entry", "fields": fields}}
    if pa.types.is_list(kind):
        return {"type": "array", "items": _optional(kind.value_type, f"{path}_item")}
    fields = [
        {"name": _word(f.name), "type": _optional(f.type, f"{path}_{_word(f.name)}")}
        for f in (kind.field(i) for i in range(kind.num_fields))
    ]
    return {"type": "record", "name": path, "fields": fields}


def _optional(kind: pa.DataType, path: str) -> Any:
    inner = _type(kind, path)
    return inner if inner == "null" else ["null", inner]


def _encoded(array: Any, *, nullable: bool = True) -> Any:
    """Each value as its Avro bytes; with `nullable` as the union with null."""
    array = flat(array)
    if pa.types.is_null(array.type):
        return pa.array([b""] * len(array), pa.large_binary())
    body = _body(array)
    if not nullable:
        return body
    if array.null_count == 0:
        return _joined(_PRESENT, body)
    return pc.if_else(array.is_valid(), _joined(_PRESENT, body), _END)


def _body(array: Any) -> Any:
    """The bytes of each value; of a null something that `_encoded` replaces."""
    kind = array.type
    if pa.types.is_boolean(kind):
        return _fixed(pc.fill_null(array, False).cast(pa.uint8()).to_numpy(zero_copy_only=False))
    if pa.types.is_floating(kind):
        return _fixed(pc.fill_null(array, 0.0).to_numpy(zero_copy_only=False))
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        data = pc.fill_null(array.cast(pa.large_binary()), b"")
        return _joined(_varints(pc.binary_length(data).to_numpy(zero_copy_only=False)), data)
    if pa.types.is_decimal(kind):
        return _decimals(array)
    if pa.types.is_map(kind):
        ends = array.offsets.to_numpy()
        first, count = int(ends[0]), int(ends[-1] - ends[0])  # a slice's children are those of the whole
        keys = _encoded(array.keys.slice(first, count), nullable=False)
        return _blocks(np.diff(ends), _joined(keys, _encoded(array.items.slice(first, count))))
    if pa.types.is_list(kind):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        return _blocks(lengths, _encoded(array.flatten()))
    if pa.types.is_struct(kind):
        return _joined(*[_encoded(part) for part in array.flatten()])
    if pa.types.is_date(kind):
        array = array.cast(pa.int32())
    elif pa.types.is_timestamp(kind):
        array = array.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
    return _varints(pc.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.int64))


def _joined(*parts: Any) -> Any:
    return pc.binary_join_element_wise(*parts, _EMPTY)


def _varints(values: np.ndarray[Any, Any]) -> Any:
    """Zigzag numbers of 7 bits a byte, lowest first."""
    signed = values.astype(np.int64)
    zigzag = ((signed << 1) ^ (signed >> 63)).view(np.uint64)
    lengths = np.ones(len(zigzag), dtype=np.int64)
    for k in range(1, 10):
        lengths += zigzag >= np.uint64(1 << (7 * k))
    offsets = np.zeros(len(zigzag) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    out = np.empty(int(offsets[-1]), dtype=np.uint8)
    for k in range(int(lengths.max(initial=0))):
        longer = lengths > k
        low = ((zigzag[longer] >> np.uint64(7 * k)) & np.uint64(0x7F)).astype(np.uint8)
        out[offsets[:-1][longer] + k] = low | ((lengths[longer] > k + 1).astype(np.uint8) << 7)
    return _binary(offsets, out)


def _fixed(values: np.ndarray[Any, Any]) -> Any:
    """Numbers of fixed width, little endian."""
    raw = np.ascontiguousarray(values).view(np.uint8)
    return _binary(np.arange(len(values) + 1, dtype=np.int64) * values.dtype.itemsize, raw)


def _decimals(array: Any) -> Any:
    buffer = array.buffers()[1]
    start = array.offset * _DECIMAL_BYTES
    raw = np.frombuffer(buffer, dtype=np.uint8)[start : start + len(array) * _DECIMAL_BYTES]
    out = np.empty((len(array), _DECIMAL_BYTES + 1), dtype=np.uint8)
    out[:, 0] = _DECIMAL_BYTES << 1  # the length as a zigzag number
    out[:, 1:] = raw.reshape(-1, _DECIMAL_BYTES)[:, ::-1]
    return _binary(np.arange(len(array) + 1, dtype=np.int64) * (_DECIMAL_BYTES + 1), out.reshape(-1))


def _blocks(lengths: np.ndarray[Any, Any], items: Any) -> Any:
    """Lists of encoded items, that many each, as one block each: the count, the items, the end."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # The bytes of neighbouring items are neighbours already: only the offsets change.
    inner = np.frombuffer(items.buffers()[1], dtype=np.int64)[items.offset : items.offset + len(items) + 1]
    data = items.buffers()[2]
    bodies = _binary(inner[offsets], np.frombuffer(data, dtype=np.uint8) if data is not None else np.empty(0, np.uint8))
    block = _joined(_varints(lengths), bodies, _END)
    return pc.if_else(pa.array(lengths > 0), block, _END)


def _binary(offsets: np.ndarray[Any, Any], data: np.ndarray[Any, Any]) -> Any:
    starts = np.ascontiguousarray(offsets, dtype=np.int64)
    return pa.Array.from_buffers(
        pa.large_binary(), len(starts) - 1, [None, pa.py_buffer(starts), pa.py_buffer(np.ascontiguousarray(data))]
    )
