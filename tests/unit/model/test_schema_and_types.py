from __future__ import annotations

import json

import pyarrow as pa
import pytest

from headwater.model.schema import RESERVED, ROW_ID, ROW_NO, Column, Schema, is_reserved, keyed, multiset
from headwater.model.types import arrow_type, is_integer, split_top_level
from headwater.model.vnode import vnodes
from headwater.view.plan import COUNT, PART


def test_a_schema_survives_json() -> None:
    schema = Schema((Column("a", "INT", nullable=False), Column("_h", "STRING", hidden=True)), ("a",))
    assert Schema.from_dict(json.loads(json.dumps(schema.as_dict()))) == schema


def test_a_schema_knows_its_columns() -> None:
    schema = Schema((Column("a", "INT"), Column("b", "STRING"), Column("_h", "STRING", hidden=True)), ("b", "a"))
    assert schema.names == ("a", "b", "_h")
    assert [c.name for c in schema.visible] == ["a", "b"]
    assert [c.name for c in schema.key_columns] == ["b", "a"]
    assert not schema.keyless
    with pytest.raises(KeyError):
        schema["c"]


def test_a_table_without_a_key_gets_a_hidden_row_id() -> None:
    schema = keyed([Column("a", "INT")], [])
    assert schema.keyless and schema[ROW_ID].hidden and [c.name for c in schema.visible] == ["a"]
    assert keyed([Column("a", "INT")], ["a"]).key == ("a",)


@pytest.mark.parametrize("key", [(), ("b",)])
def test_a_key_must_name_columns(key: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="key columns"):
        Schema((Column("a", "INT"),), key)


@pytest.mark.parametrize(
    ("ddl", "expected"),
    [
        ("int", pa.int32()),
        (" BIGINT ", pa.int64()),
        ("decimal(38,10)", pa.decimal128(38, 10)),
        ("DECIMAL( 20 , 0 )", pa.decimal128(20, 0)),
        ("numeric", pa.decimal128(10, 0)),
        ("decimal(5)", pa.decimal128(5, 0)),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestamp_ntz", pa.timestamp("us")),
        ("array<decimal(10,2)>", pa.list_(pa.field("element", pa.decimal128(10, 2)))),
        ("map<string,array<int>>", pa.map_(pa.string(), pa.list_(pa.field("element", pa.int32())))),
        (
            "STRUCT<Aa: INT, `b`: STRUCT<c: DECIMAL(3,1)>>",
            pa.struct([("Aa", pa.int32()), ("b", pa.struct([("c", pa.decimal128(3, 1))]))]),
        ),
        ("struct<a int, b string>", pa.struct([("a", pa.int32()), ("b", pa.string())])),
    ],
)
def test_ddl_types_have_their_arrow_type(ddl: str, expected: pa.DataType) -> None:
    assert arrow_type(ddl) == expected


@pytest.mark.parametrize("ddl", ["", "uuid", "array<>", "decimal(1,2,3)", "decimal(2,3)", "varchar(10)", "struct<a>"])
def test_an_unknown_type_is_refused(ddl: str) -> None:
    with pytest.raises(ValueError, match="unknown type"):
        arrow_type(ddl)


def test_commas_inside_brackets_do_not_split() -> None:
    assert split_top_level("a, map<b, c>, d(1,2)") == ["a", "map<b, c>", "d(1,2)"]


def test_integers_are_recognised() -> None:
    assert is_integer("bigint") and not is_integer("DECIMAL(3,0)")


def test_equal_rows_of_a_captured_table_without_a_key_share_a_vnode() -> None:
    schema = multiset([Column("a", "INT")])
    assert schema.multiset and not schema.keyless and [c.name for c in schema.visible] == ["a"]
    rows = pa.table({ROW_ID: ["x", "x", "y"], ROW_NO: [1, 2, 1]})
    found = vnodes(rows, schema.key, 256).to_pylist()
    assert found == vnodes(rows, (ROW_ID,), 256).to_pylist()
    assert found[0] == found[1] != found[2]


def test_a_schema_can_be_seen_with_the_columns_of_an_earlier_time() -> None:
    schema = Schema((Column("a", "INT"), Column("b", "STRING"), Column("_h", "STRING", hidden=True)), ("a",))
    assert [c.name for c in schema.restricted(["a", "gone"]).visible] == ["a"]
    assert schema.restricted(["a"]).names == schema.names
    assert schema.restricted(None) is schema


def test_only_names_that_stand_beside_a_table_s_columns_are_reserved() -> None:
    assert {PART, COUNT} <= RESERVED
    assert all(map(is_reserved, ("_op", "_OP", "_row_id", "_key", "_change_type", "_acc_0", "_acc_1_n", "_HW_x")))
    assert not any(map(is_reserved, ("_id", "_", "_epoch", "_order", "_metadata", "op", "_keys", "hw_x")))
