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
from headwater.sql.translation import POSTGRES, translated

DIALECTS: Final = ("spark", "postgres", "mysql", "risingwave")


def reading(dialect: str) -> Any:
    return SparkText if dialect == "spark" else dialect


def parse_query(text: str, dialect: str) -> exp.Expression:
    try:
        tree = sqlglot.parse_one(text, read=reading(dialect))
    except (ParseError, SqlglotError) as error:
        raise UsageError("SQL_SYNTAX", "the statement cannot be read", detail=first_line(error)) from error
    found = in_place(cast(exp.Expression, tree))
    if dialect != "spark":
        found = translated(found, dialect)
    return with_order(found, keeps_nulls=dialect in POSTGRES)


def first_line(error: Exception) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()[0][:300]
