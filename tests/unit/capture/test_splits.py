"""Splits as data: bounds to splits, JSON, names."""

from __future__ import annotations

import pytest

from headwater.capture.splits import (
    DEFAULT_ROWS_PER_SPLIT,
    LEAST_ROWS_PER_SPLIT,
    WHOLE,
    Page,
    Split,
    bound_from_json,
    paced_rows,
    rows_per_split,
    splits_between,
)
from headwater.connectors.postgres.catalogue import split_name
from headwater.connectors.postgres.client import PostgresConfig, format_lsn, parse_lsn
from headwater.errors import UsageError


def test_no_bounds_give_one_split_of_everything() -> None:
    assert splits_between([]) == [Split(1, None, None)]


def test_repeated_bounds_make_no_empty_split() -> None:
    splits = splits_between([("1",), ("1",), ("2",)])
    assert [(s.left, s.right) for s in splits] == [(None, ("1",)), (("1",), ("2",)), (("2",), None)]


def test_bound_survives_its_json() -> None:
    bound = ("a'b\"c", "ü\n", "1")
    split = Split(1, bound, None)
    assert bound_from_json(split.left_json) == bound and split.right_json is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("t", ("public", "t")),
        ("s.t", ("s", "t")),
        ('"a.b"."C""d"', ("a.b", 'C"d')),
        ('s."T t"', ("s", "T t")),
    ],
)
def test_table_name_is_read_as_in_sql(text: str, name: tuple[str, str]) -> None:
    assert split_name(text, "public") == name


@pytest.mark.parametrize("text", ["", "a.b.c", '"a', "a."])
def test_text_that_is_no_table_name_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="INVALID_TABLE_NAME"):
        split_name(text, "public")


def test_position_text_is_exact_and_ordered() -> None:
    assert parse_lsn("16/B374D848") == 0x16_B374D848
    assert format_lsn(parse_lsn("1/0")) == "1/0"
    assert parse_lsn("1/0") > parse_lsn("0/FFFFFFFF")
    with pytest.raises(UsageError, match="INVALID_POSITION"):
        parse_lsn("nonsense")


OPTIONS = {"hostname": "h", "username": "u", "database.name": "d", "connector": "postgres-cdc"}


def test_unknown_option_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(UsageError, match="UNKNOWN_OPTION") as raised:
        PostgresConfig.from_options({**OPTIONS, "slot.nam": "x"})
    assert "slot.name" in raised.value.hint


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("port", "x"),
        ("port", "70000"),
        ("ssl.mode", "maybe"),
        ("publication.create.enable", "1"),
        ("slot.name", "Upper"),
        ("slot.name", "a'b"),
    ],
)
def test_invalid_value_of_an_option_is_refused_by_name(option: str, value: str) -> None:
    with pytest.raises(UsageError, match="INVALID_OPTION") as raised:
        PostgresConfig.from_options({**OPTIONS, option: value})
    assert option in str(raised.value)


def test_missing_option_is_named() -> None:
    with pytest.raises(UsageError, match=r"database\.name"):
        PostgresConfig.from_options({"hostname": "h", "username": "u"})


def test_password_is_a_reference_until_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PostgresConfig.from_options({**OPTIONS, "password": "${HW_TEST_PASSWORD}"})
    with pytest.raises(UsageError, match="SECRET_MISSING"):
        config.conninfo()
    monkeypatch.setenv("HW_TEST_PASSWORD", "geheim")
    assert config.conninfo()["password"] == "geheim"
    assert "geheim" not in repr(config) and "HW_TEST" not in repr(config)


def test_a_read_is_given_up_when_it_would_be_far_longer_than_the_pages_it_is_then_made_in() -> None:
    begun = Page(most=100_000)
    assert begun.too_long(1000, 1) and begun.too_long(4999, 1) and not begun.too_long(5000, 1)
    assert begun.too_long(10_000, 4)
    page = Page(most=2 * paced_rows(1000, 1), rows=paced_rows(1000, 1))
    assert not page.too_long(500, 1) and page.too_long(499, 1)
    assert not Page(most=2 * paced_rows(1, 4), rows=paced_rows(1, 4)).too_long(1, 4)
    assert not Page(most=100_000, least=50_000).too_long(1, 1)  # smaller pages would be too many
    assert not WHOLE.too_long(1, 1)


def test_splits_of_a_slow_copy_are_small_unless_somebody_wants_them_otherwise() -> None:
    assert rows_per_split(None, None, 4) == rows_per_split(None, 0, 4) == DEFAULT_ROWS_PER_SPLIT
    assert rows_per_split(None, 10_000, 4) == 12_500
    assert rows_per_split(None, 10_000_000, 4) == DEFAULT_ROWS_PER_SPLIT
    assert rows_per_split(None, 1, 4) == LEAST_ROWS_PER_SPLIT
    assert rows_per_split(7, 10_000, 4) == rows_per_split(7, None, 4) == 7
