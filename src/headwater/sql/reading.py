"""Reading SQL text with sqlglot: the dialects, and its errors in our words."""

from __future__ import annotations

import re
from typing import Any, Final, cast

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, SqlglotError

from headwater.errors import UsageError
from headwater.model.spark_text import SparkText
from headwater.sql.lateral_views import in_place
from headwater.sql.ordered_arrays import with_order
from headwater.sql.reach import check_reach
from headwater.sql.translation import POSTGRES, translated

DIALECTS: Final = ("spark", "postgres", "mysql", "risingwave")


def reading(dialect: str) -> Any:
    return SparkText if dialect == "spark" else dialect


def parse_query(text: str, dialect: str) -> exp.Expression:
    """The tree of a statement; UsageError for one that cannot be read, or that reaches for what no statement may."""
    tree = _tree(text, dialect)
    check_reach(tree)
    found = in_place(tree)
    if dialect != "spark":
        found = translated(found, dialect)
    return with_order(found, keeps_nulls=dialect in POSTGRES)


def _tree(text: str, dialect: str) -> exp.Expression:
    try:
        return cast(exp.Expression, sqlglot.parse_one(text, read=reading(dialect)))
    except (ParseError, SqlglotError) as error:
        raise UsageError("SQL_SYNTAX", "the statement cannot be read", detail=first_line(error)) from error


def too_deep() -> UsageError:
    """Of a statement that is nested deeper than whoever reads it can follow; long lists and chains are not deep."""
    return UsageError(
        "SQL_TOO_DEEP",
        "the statement is nested too deeply",
        hint="some 40 levels of parentheses, calls or subqueries are read; put parts of it into WITH, or into views",
    )


def first_line(error: Exception) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()[0][:300]
