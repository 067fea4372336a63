"""The column list of a captured table: all, by name, or with the types that the source has."""

from __future__ import annotations

from headwater.sql.parser import parse
from headwater.sql.statements import CreateTableFrom


def _columns(body: str) -> object:
    (statement,) = parse(f"CREATE TABLE t ({body}) FROM src TABLE 'public.t'")
    assert isinstance(statement, CreateTableFrom)
    return statement.columns


def test_star_takes_all_columns() -> None:
    assert _columns("*") is None


def test_names_without_types_take_those_of_the_source() -> None:
    assert _columns("id, `Mixed Case`, note") == (("id", None), ("Mixed Case", None), ("note", None))


def test_declared_types_are_kept_for_comparison() -> None:
    assert _columns("id BIGINT PRIMARY KEY, note STRING") == (("id", "BIGINT"), ("note", "STRING"))
