"""Reading SQL text with sqlglot: the dialects, and its errors in our words."""

from __future__ import annotations

import re
from typing import Any, Final, cast

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, SqlglotError

from headwater.errors import UsageError
from headwater.model.spark_text import SparkText
from headwater.sql.translation import translated

DIALECTS: Final = ("spark", "postgres", "mysql", "risingwave")


def reading(dialect: str) -> Any:
    return SparkText if dialect == "spark" else dialect


def parse_query(text: str, dialect: str) -> exp.Expression:
    try:
        tree = sqlglot.parse_one(text, read=reading(dialect))
    except (ParseError, SqlglotError) as error:
        raise UsageError("SQL_SYNTAX", "the statement cannot be read", detail=first_line(error)) from error
    found = cast(exp.Expression, tree)
    return found if dialect == "spark" else translated(found, dialect)


def first_line(error: Exception) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()[0][:300]
