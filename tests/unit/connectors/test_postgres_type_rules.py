"""The rule from a Postgres column to its type and decoder."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from headwater.connectors.postgres.types import (
    INFINITY_DAYS,
    INFINITY_MICROS,
    Kind,
    PgColumn,
    TypeOptions,
    column_plan,
    decimal_of,
    plan_columns,
)
from headwater.errors import UsageError


def numeric(precision: int, scale: int) -> int:
    """The typmod as Postgres 15 packs it."""
    return ((precision << 16) | (scale & 0x7FF)) + 4


@pytest.mark.parametrize(
    ("oid", "typmod", "ddl"),
    [
        (16, -1, "BOOLEAN"),
        (21, -1, "SMALLINT"),
        (23, -1, "INT"),
        (20, -1, "BIGINT"),
        (26, -1, "BIGINT"),
        (700, -1, "FLOAT"),
        (701, -1, "DOUBLE"),
        (1700, -1, "STRING"),
        (1700, numeric(38, 38), "DECIMAL(38,38)"),
        (1700, numeric(39, 0), "STRING"),
        (1700, numeric(2, 3), "STRING"),
        (1700, numeric(5, -2), "STRING"),
        (17, -1, "BINARY"),
        (1082, -1, "DATE"),
        (1114, -1, "TIMESTAMP_NTZ"),
        (1184, -1, "TIMESTAMP"),
        (2950, -1, "STRING"),
        (99999, -1, "STRING"),
    ],
)
def test_type_has_its_home(oid: int, typmod: int, ddl: str) -> None:
    assert column_plan(PgColumn("c", 1, oid, typmod)).ddl_type == ddl


def test_domain_is_its_base_type_and_keeps_its_own_oid_for_the_stream() -> None:
    base = PgColumn("c", 1, 1700, numeric(10, 2))
    middle = PgColumn("c", 1, 50001, typtype="d", base=base)
    plan = column_plan(PgColumn("c", 1, 50002, typtype="d", base=middle, key_position=0))
    assert (plan.ddl_type, plan.type_oid, plan.key_position) == ("DECIMAL(10,2)", 50002, 0)


def test_array_is_an_array_of_its_element_with_the_elements_delimiter() -> None:
    plan = column_plan(PgColumn("c", 1, 1020, element=PgColumn("c", 1, 603, delimiter=";")))
    assert (plan.ddl_type, plan.kind, plan.delimiter) == ("ARRAY<STRING>", Kind.ARRAY, ";")
    assert plan.arrow_type == pa.list_(pa.field("element", pa.string()))


def test_options_choose_the_text_of_numerics_and_arrays() -> None:
    column = PgColumn("c", 1, 1231, numeric(5, 1), element=PgColumn("c", 1, 1700, numeric(5, 1)))
    assert column_plan(column).ddl_type == "ARRAY<DECIMAL(5,1)>"
    assert column_plan(column, TypeOptions.of({"numeric.mode": "string"})).ddl_type == "ARRAY<STRING>"
    assert column_plan(column, TypeOptions.of({"arrays": "string"})).ddl_type == "STRING"
    with pytest.raises(UsageError) as caught:
        TypeOptions.of({"arrays": "json"})
    assert caught.value.code == "OPTION_INVALID" and "'array'" in caught.value.hint


def test_numeric_without_precision_has_no_decimal() -> None:
    assert decimal_of(-1) is None
    assert decimal_of(numeric(1, 0)) == (1, 0)


def test_plan_travels_to_a_spark_task() -> None:
    plan = column_plan(PgColumn("c", 1, 1007, element=PgColumn("c", 1, 23)))
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_infinity_is_not_the_value_that_numpy_reads_as_missing() -> None:
    assert INFINITY_MICROS == 2**63 - 1 and INFINITY_DAYS == 2**31 - 1
    minus = pa.array([-INFINITY_MICROS], pa.int64()).cast(pa.timestamp("us"))
    assert pa.array(minus.to_numpy(zero_copy_only=False)).null_count == 0


COLUMNS = (
    PgColumn("id", 1, 20, key_position=0),
    PgColumn("name", 2, 25),
    PgColumn("total", 3, 23, generated=True),
    PgColumn("shown", 4, 23, generated=True, virtual=True),
)


def test_wanted_columns_are_planned_in_their_order() -> None:
    assert [p.name for p in plan_columns(COLUMNS[:2])] == ["id", "name"]
    assert [p.name for p in plan_columns(COLUMNS, wanted=["name", "id"])] == ["name", "id"]
    assert [p.name for p in plan_columns(COLUMNS[:3], generated_in_stream=True)] == ["id", "name", "total"]


@pytest.mark.parametrize(
    ("wanted", "in_stream", "code", "name"),
    [
        (["id", "nobody"], True, "COLUMN_NOT_FOUND", "nobody"),
        (["name"], True, "KEY_COLUMN_MISSING", "id"),
        (["id", "total"], False, "GENERATED_COLUMN", "total"),
        (["id", "shown"], True, "GENERATED_COLUMN", "shown"),
        (None, False, "GENERATED_COLUMN", "total"),
    ],
)
def test_column_that_cannot_be_captured_is_named(
    wanted: list[str] | None, in_stream: bool, code: str, name: str
) -> None:
    with pytest.raises(UsageError, match=f"column {name}") as caught:
        plan_columns(COLUMNS, wanted=wanted, generated_in_stream=in_stream)
    assert caught.value.code == code
