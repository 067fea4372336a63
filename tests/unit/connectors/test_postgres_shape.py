"""The rules for a table whose shape changes, and what rows without a key are; without a server."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headwater.connectors.postgres.catalogue import TableInfo
from headwater.connectors.postgres.client import PostgresConfig
from headwater.connectors.postgres.rowhash import row_ids
from headwater.connectors.postgres.shape import Relation, RelationColumn, ShapeChange, bind, compare
from headwater.connectors.postgres.types import ColumnPlan, Kind, PgColumn, Wire, column_plan
from headwater.errors import DefiniteError, SourceError, UsageError
from headwater.runtime.shape import TableShape, evolved, shape_of

ID = PgColumn("id", 1, 23, type_name="integer", key_position=0)
A = PgColumn("a", 2, 23, type_name="integer")
B = PgColumn("b", 3, 1043, 14, type_name="character varying(10)")
NEW = PgColumn("c", 4, 25, type_name="text")


def info(*columns: PgColumn, key: tuple[str, ...] = ("id",)) -> TableInfo:
    return TableInfo(
        schema="public", name="t", oid=5, schema_oid=1, relkind="r", columns=columns, key=key, replica_identity="d",
        identity_columns=key, rows=1, pages=1, largest_pages=1, size_bytes=1, ordered_key=True,
        row_security=False, owner="me",
    )  # fmt: skip


def shape(*columns: PgColumn, star: bool = True) -> TableShape:
    return shape_of(info(*columns), [column_plan(c) for c in columns], (), star=star)


BEFORE = shape(ID, A, B)


def after(
    *columns: PgColumn, policy: str = "lenient", used: bool = False, before: TableShape = BEFORE
) -> list[tuple[str, str, bool]]:
    """(name, type, absent) of every column that the table gets."""
    streamed = {c.name for c in columns if not c.generated}
    found = evolved(before, info(*columns), policy=policy, options={}, used=used, streamed=streamed)
    assert [c.name for c in found.schema.columns] == [p.name for p in found.plans]
    assert TableShape.from_dict(found.as_dict()) == found
    return [(p.name, p.ddl_type, p.absent) for p in found.plans]


OLD = [("id", "INT", False), ("a", "INT", False), ("b", "STRING", False)]


@pytest.mark.parametrize("policy", ["evolve", "lenient", "exception", "ignore"])
def test_a_table_that_has_not_changed_keeps_its_shape(policy: str) -> None:
    found = evolved(BEFORE, info(ID, A, B), policy=policy, options={}, used=True, streamed={"id", "a", "b"})
    assert found == BEFORE
    listed = shape(ID, A, star=False)
    assert evolved(listed, info(ID, A, B), policy=policy, options={}, used=True, streamed={"id", "a", "b"}) == listed


@pytest.mark.parametrize(
    ("policy", "extra"), [("evolve", [("c", "STRING", False)]), ("lenient", [("c", "STRING", False)]), ("ignore", [])]
)
def test_a_new_column_is_taken_or_left_by_policy(policy: str, extra: list[tuple[str, str, bool]]) -> None:
    assert after(ID, A, B, NEW, policy=policy) == OLD + extra
    assert after(ID, A, B, NEW, policy=policy, before=shape(ID, A, B, star=False)) == OLD  # a list is a list
    assert after(ID, A, B, replace(NEW, generated=True), policy=policy) == OLD  # not in the stream
    assert after(ID, A, B, replace(NEW, name="_op"), policy=policy) == OLD  # a name of our own


@pytest.mark.parametrize(
    ("policy", "used", "stays"),
    [("evolve", False, False), ("evolve", True, True), ("lenient", False, True), ("ignore", False, True)],
)
def test_a_dropped_column_goes_only_if_nobody_can_miss_it(policy: str, used: bool, stays: bool) -> None:
    absent = [("b", "STRING", True)] if stays else []
    assert after(ID, A, policy=policy, used=used) == OLD[:2] + absent


def test_a_column_that_comes_back_is_taken_again_and_is_another_one() -> None:
    without = evolved(BEFORE, info(ID, A), policy="lenient", options={}, used=True, streamed={"id", "a"})
    assert after(ID, A, replace(B, attnum=9), before=without) == OLD
    again = evolved(BEFORE, info(ID, A, replace(B, attnum=9)), policy="lenient", options={}, used=True,
                    streamed={"id", "a", "b"})  # fmt: skip
    assert again != BEFORE  # so that it is copied again


BIG = replace(A, type_oid=20, type_name="bigint")


REAL = replace(A, type_oid=700, type_name="real")
DOUBLE = replace(A, type_oid=701, type_name="double precision")


def numeric(precision: int, scale: int) -> PgColumn:
    return replace(A, type_oid=1700, typmod=(precision << 16 | scale) + 4)


def test_a_wider_type_is_taken_over_where_nobody_has_the_old_one_and_else_followed_under_that() -> None:
    for policy, used, kind in (
        ("evolve", False, "BIGINT"),
        ("lenient", False, "BIGINT"),
        ("evolve", True, "INT"),
        ("lenient", True, "INT"),
        ("ignore", False, "INT"),
    ):
        assert after(ID, BIG, B, policy=policy, used=used)[1] == ("a", kind, False)
    assert after(replace(ID, type_oid=20), A, B, policy="evolve") == OLD  # a key of another type has another place
    for used, kind in ((False, "DECIMAL(24,6)"), (True, "DECIMAL(20,6)")):
        assert after(ID, numeric(24, 6), B, before=shape(ID, numeric(20, 6), B), used=used)[1] == ("a", kind, False)
    assert after(ID, numeric(18, 6), B, before=shape(ID, numeric(20, 6), B))[1] == ("a", "DECIMAL(20,6)", False)


def test_a_column_that_is_followed_under_its_old_type_is_so_again_and_widens_later() -> None:
    kept = evolved(BEFORE, info(ID, BIG, B), policy="lenient", options={}, used=True, streamed={"id", "a", "b"})
    assert kept.plans[1].wire is Wire.TEXT_ONLY and kept.plans[1].type_oid == 20
    assert after(ID, BIG, B, before=kept, used=True) == OLD
    assert after(ID, BIG, B, before=kept)[1] == ("a", "BIGINT", False)


def test_a_type_that_would_change_values_stops_the_table() -> None:
    for before, now, used in (
        (BIG, A, False),  # narrower
        (REAL, DOUBLE, True),  # digits would be lost
        (numeric(20, 6), numeric(24, 8), True),
        (numeric(20, 6), numeric(40, 6), True),
        (A, replace(A, type_oid=26, type_name="oid"), True),  # a negative one has another text
    ):
        with pytest.raises(SourceError, match="is not as it was captured"):
            after(ID, now, B, before=shape(ID, before, B), used=used)
    assert after(ID, DOUBLE, B, before=shape(ID, REAL, B))[1] == ("a", "DOUBLE", False)
    assert after(ID, A, replace(B, type_oid=25, typmod=-1), policy="ignore") == OLD  # the same type here


def test_a_new_column_that_differs_in_case_alone_stops_the_table() -> None:
    with pytest.raises(SourceError) as caught:
        after(ID, A, B, replace(NEW, name="A"))
    assert "column A differs from a" in caught.value.message
    with pytest.raises(SourceError):
        after(ID, replace(A, name="A"), B)  # renamed: the old one stays, all NULL
    assert after(ID, replace(A, name="A"), B, policy="evolve")[-1] == ("A", "INT", False)


def test_another_key_stops_the_table() -> None:
    with pytest.raises(SourceError) as caught:
        evolved(BEFORE, info(ID, A, B, key=("a",)), policy="evolve", options={}, used=False, streamed={"id", "a", "b"})
    assert "its key is (a), and was (id)" in caught.value.message


def relation(*columns: tuple[str, int, int]) -> Relation:
    return Relation(5, "public", "t", "d", tuple(RelationColumn(n, t, m, n == "id") for n, t, m in columns))


def test_a_shape_in_the_stream_is_held_against_the_captured_columns() -> None:
    plans = BEFORE.plans
    assert not compare(relation(("id", 23, -1), ("a", 23, -1), ("b", 1043, 14)), plans, ())
    changed = relation(("id", 23, -1), ("a", 25, -1), ("c", 25, -1), ("g", 23, -1))
    assert compare(changed, plans, ("g",)) == ShapeChange(("c",), ("b",), ("a",))
    assert compare(changed, plans, None) == ShapeChange((), ("b",), ("a",))
    amount = ColumnPlan("n", "DECIMAL(10,2)", Kind.DECIMAL, 10, 2, type_oid=1700)
    assert not compare(relation(("n", 1700, (10 << 16 | 2) + 4)), [amount], None)
    assert compare(relation(("n", 1700, (12 << 16 | 3) + 4)), [amount], None).retyped == ("n",)


@pytest.mark.parametrize(
    ("plan", "now", "widened"),
    [
        (ColumnPlan("n", "DECIMAL(10,2)", Kind.DECIMAL, 10, 2, type_oid=1700), (1700, (12 << 16 | 2) + 4), True),
        (ColumnPlan("n", "DECIMAL(10,2)", Kind.DECIMAL, 10, 2, type_oid=1700), (1700, (9 << 16 | 2) + 4), False),
        (ColumnPlan("n", "INT", Kind.INT, type_oid=23), (20, -1), True),
        (ColumnPlan("n", "INT", Kind.INT, type_oid=20), (20, -1), True),  # followed under its old type since then
        (ColumnPlan("n", "STRING", Kind.TEXT, type_oid=1043), (25, -1), False),
        (ColumnPlan("n", "STRING", Kind.TEXT, type_oid=1043), (1043, 104), False),
    ],
)
def test_a_wider_column_of_the_stream_is_followed_on(plan: ColumnPlan, now: tuple[int, int], widened: bool) -> None:
    change = compare(relation(("n", *now)), [plan], None)
    assert not change and bool(change.widened) is widened
    assert bind(relation(("n", *now)), [plan], changing=False, tolerant=False).tolist() == [0]


def test_binding_is_tolerant_of_missing_columns_but_never_of_a_key_or_another_type() -> None:
    plans = BEFORE.plans
    assert bind(relation(("c", 25, -1), ("id", 23, -1)), plans, changing=True, tolerant=True).tolist() == [-1, 0]
    for columns, tolerant in (
        ([("id", 23, -1)], False),
        ([("a", 23, -1), ("b", 1043, 14)], True),
        ([("id", 23, -1), ("a", 25, -1), ("b", 1043, 14)], True),
    ):
        with pytest.raises(DefiniteError) as caught:
            bind(relation(*columns), plans, changing=False, tolerant=tolerant)
        assert caught.value.code == "SOURCE_SCHEMA_CHANGED"


@pytest.mark.parametrize("key", [("id", "a"), ()])
@pytest.mark.parametrize("changing", [True, False])
def test_a_stream_with_a_wider_key_or_none_stops_the_table(key: tuple[str, ...], changing: bool) -> None:
    """Its rows may have the same `id`, and we have place for one of them."""

    def seen(identity: str) -> Relation:
        named = [("id", 23, -1), ("a", 23, -1), ("b", 1043, 14)]
        return Relation(5, "public", "t", identity, tuple(RelationColumn(n, t, m, n in key) for n, t, m in named))

    with pytest.raises(DefiniteError) as caught:
        bind(seen("d"), BEFORE.plans, changing=changing, tolerant=True)
    assert caught.value.code == "SOURCE_KEY_CHANGED"
    # An index as identity may have more columns than the key, and may be gone while the key is there.
    if key or not changing:
        assert bind(seen("i"), BEFORE.plans, changing=changing, tolerant=True).tolist() == [0, 1, 2]


def ids(*rows: tuple[str | None, ...]) -> list[str]:
    data = "".join(v or "" for row in rows for v in row).encode() + b" "
    flat = [[-1 if v is None else len(v.encode()) for v in row] for row in rows]
    lengths = np.array(flat, np.int64)
    starts = np.concatenate([[0], np.cumsum(np.maximum(lengths, 0).ravel())[:-1]]).reshape(lengths.shape)
    return list(row_ids(np.frombuffer(data, np.uint8), list(starts.T), list(lengths.T), len(rows)).to_pylist())


def test_equal_rows_have_equal_ids_and_others_have_not() -> None:
    rows: list[tuple[str | None, ...]] = [
        ("a", "b"), ("ab", ""), ("", "ab"), (None, "ab"), ("ab", None), (None, None), ("", ""),
        ("x" * 16, "y"), ("x" * 17, "y"), ("x" * 16, "xy"), ("\0", ""), ("", "\0"), ("ä", "b"),
    ]  # fmt: skip
    found = ids(*rows, *rows)
    assert found[: len(rows)] == found[len(rows) :]
    assert len(set(found)) == len(rows)
    assert all(len(i) == 32 for i in found)


def test_the_policy_is_an_option_of_the_source_too() -> None:
    options = {"hostname": "h", "username": "u", "database.name": "d"}
    assert PostgresConfig.from_options(options).schema_change == "lenient"
    assert PostgresConfig.from_options({**options, "schema.change.behavior": "ignore"}).schema_change == "ignore"
    with pytest.raises(UsageError) as caught:
        PostgresConfig.from_options({**options, "schema.change.behavior": "evolv"})
    assert "evolve" in caught.value.hint


def test_columns_in_another_order_than_their_numbers_are_others() -> None:
    def relation(*columns: PgColumn) -> Relation:
        return Relation(
            5, "public", "t", "d", tuple(RelationColumn(c.name, c.type_oid, c.typmod, c is ID) for c in columns)
        )

    x, y = PgColumn("x", 2, 23), PgColumn("y", 3, 23)
    plans = [column_plan(c) for c in (y, ID, x)]  # the order of a list is not the source's
    assert not compare(relation(ID, x, y), plans, ())
    swapped = compare(relation(ID, y, x), plans, ())
    assert len(swapped.moved) == 1 and "is another one than before" in str(swapped)
    bind(relation(ID, y, x), plans, changing=True, tolerant=True)
    with pytest.raises(DefiniteError, match="SOURCE_SCHEMA_CHANGED"):  # rows that are known by all of their content
        bind(relation(ID, y, x), plans, changing=True, tolerant=False)
    a = PgColumn("a", 3, 23)
    plans = [column_plan(c) for c in (replace(a, attnum=1), replace(ID, attnum=2), replace(x, attnum=3))]
    made_again = compare(relation(ID, x, a), plans, ())
    assert made_again.moved == ("a",)  # and not all those that have another place by it
