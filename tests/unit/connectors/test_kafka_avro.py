"""The column-wise Avro encoder against fastavro, which reads and writes row by row and knows nothing of ours."""

from __future__ import annotations

import datetime as dt
import io
import json
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.connectors.kafka import avro
from headwater.errors import UsageError
from headwater.model.schema import Column
from headwater.model.types import arrow_type

numbers = {"TINYINT": 7, "SMALLINT": 15, "INT": 31, "BIGINT": 63}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{ddl: st.integers(-(1 << bits), (1 << bits) - 1) for ddl, bits in numbers.items()},
    "BOOLEAN": st.booleans(),
    "DOUBLE": st.floats(allow_nan=False),
    "FLOAT": st.floats(allow_nan=False, width=32),
    "STRING": texts,
    "BINARY": st.binary(max_size=12),
    "DATE": st.dates(),
    "TIMESTAMP": st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1), timezones=st.just(dt.UTC)),
    "DECIMAL(38,6)": st.decimals(-(10**31), 10**31, places=6),
    "ARRAY<STRING>": st.lists(st.none() | texts, max_size=4),
    "ARRAY<ARRAY<INT>>": st.lists(st.none() | st.lists(st.none() | st.integers(0, 99), max_size=3), max_size=3),
    "MAP<STRING,BIGINT>": st.dictionaries(texts, st.none() | st.integers(-5, 5), max_size=3),
    "STRUCT<a: INT, b: STRING>": st.fixed_dictionaries({"a": st.none() | st.integers(0, 9), "b": st.none() | texts}),
}


def read(message: bytes, schema: str, prefix: bytes) -> Any:
    assert message.startswith(prefix)
    body = io.BytesIO(message[len(prefix) :])
    found = fastavro.schemaless_reader(body, fastavro.parse_schema(json.loads(schema)), None)
    assert body.read() == b"", "bytes are left over"
    return found


@pytest.mark.parametrize("ddl", VALUES)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_fastavro_reads_what_we_encode(ddl: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.none() | VALUES[ddl], max_size=6))
    columns = [Column("id", "BIGINT", nullable=False), Column("v", ddl)]
    schema = avro.schema_json("topic-1", columns, ["id"])
    ids = pa.array(range(len(values)), pa.int64())
    batch = pa.RecordBatch.from_arrays([ids, pa.array(values, arrow_type(ddl))], names=["id", "v"])
    cut = data.draw(st.integers(0, len(values)))
    for part in (batch, batch.slice(cut)):
        encoded = avro.encode_rows(part, ["id", "v"], ["id"], b"\xc3\x01")
        found = [read(m, schema, b"\xc3\x01") for m in encoded.to_pylist()]
        wanted = part.column("v").to_pylist()
        if ddl.startswith("MAP"):
            wanted = [None if w is None else dict(w) for w in wanted]
        assert [f["v"] for f in found] == wanted
        assert [f["id"] for f in found] == part.column("id").to_pylist()


def test_single_object_encoding_is_avros_own() -> None:
    schema = avro.schema_json("t", [Column("a", "INT")])
    batch = pa.RecordBatch.from_pydict({"a": pa.array([7], pa.int32())})
    [message] = avro.encode_rows(batch, ["a"], [], avro.single_object_prefix(schema)).to_pylist()
    # From the specification: C3 01, then the CRC-64-AVRO fingerprint of the canonical form, little endian.
    canonical = fastavro.schema.to_parsing_canonical_form(json.loads(schema)).encode()
    assert message[:2] == b"\xc3\x01"
    assert message[2:10] == crc64(canonical).to_bytes(8, "little")
    assert message[10:] == b"\x02\x0e"


def crc64(data: bytes) -> int:
    """The fingerprint as the specification defines it."""
    empty = 0xC15D213AA4D7A795
    table = []
    for i in range(256):
        fp = i
        for _ in range(8):
            fp = (fp >> 1) ^ (empty & -(fp & 1))
        table.append(fp)
    fp = empty
    for byte in data:
        fp = (fp >> 8) ^ table[(fp ^ byte) & 0xFF]
    return fp


def test_a_map_with_other_keys_is_an_array_of_pairs() -> None:
    schema = avro.schema_json("t", [Column("m", "MAP<INT,STRING>")])
    batch = pa.RecordBatch.from_arrays([pa.array([[(1, "a")], None], arrow_type("MAP<INT,STRING>"))], names=["m"])
    found = [read(m, schema, b"") for m in avro.encode_rows(batch, ["m"], [], b"").to_pylist()]
    assert found == [{"m": [{"key": 1, "value": "a"}]}, {"m": None}]


def test_decimals_keep_their_sign_and_scale() -> None:
    schema = avro.schema_json("t", [Column("d", "DECIMAL(10,2)")])
    values = [Decimal("-0.01"), Decimal("99999999.99"), Decimal("0.00")]
    batch = pa.RecordBatch.from_arrays([pa.array(values, pa.decimal128(10, 2))], names=["d"])
    assert [read(m, schema, b"")["d"] for m in avro.encode_rows(batch, ["d"], [], b"").to_pylist()] == values


def test_a_column_that_avro_cannot_name_is_refused_with_a_hint() -> None:
    with pytest.raises(UsageError, match="cannot name column") as caught:
        avro.schema_json("t", [Column("a b", "INT")])
    assert "AS SELECT" in caught.value.hint
