"""Spark SQL as Spark 4 reads it, for sqlglot: what is read here and written again means the same to Spark.

sqlglot's own dialect turns some calls into others, for the sake of other databases: `log10(1000)` would become
`log(10, 1000)`, which is 2.9999999999999996, and the format of `to_char` would be lost. Those are read as calls that
nothing is known of, and so are written as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar, Final

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.parsers.spark import SparkParser
from sqlglot.tokenizer_core import TokenType

# It logs whole statements, with the values in them; what is wrong with one is said to whoever has sent it.
logging.getLogger("sqlglot").setLevel(logging.CRITICAL)

# log10, log2: other bits. to_char: without its format. parse_json: left out. percentile_cont, percentile_disc: would be
# approximate, and in ascending order always.
_AS_WRITTEN: Final = ("LOG10", "LOG2", "TO_CHAR", "PARSE_JSON", "PERCENTILE_CONT", "PERCENTILE_DISC")


def _to_date(args: list[exp.Expr], dialect: Any) -> exp.Expr:
    """sqlglot leaves formats out that a cast would do for; but a cast takes more texts than they do."""
    written = exp.Anonymous(this="TO_DATE", expressions=[arg.copy() for arg in args])
    known: exp.Expr = SparkParser.FUNCTIONS["TO_DATE"](args, dialect)
    return known if known.sql("spark") == written.sql("spark") else written


def _listagg(parser: Any) -> exp.GroupConcat:
    """Without a delimiter there is none; sqlglot would write a comma."""
    found: exp.GroupConcat = parser._parse_string_agg()
    if found.args.get("separator") is None:
        found.set("separator", exp.Literal.string(""))
    return found


class SparkText(Spark):
    """In `'it''s'` two quotes are one, where sqlglot's own dialect would join two strings."""

    class Tokenizer(Spark.Tokenizer):
        STRING_ESCAPES: ClassVar[list[str]] = ["\\", "'", '"']

    class Parser(SparkParser):
        FUNCTIONS: ClassVar[dict[str, Callable[..., Any]]] = {
            **{name: make for name, make in SparkParser.FUNCTIONS.items() if name not in _AS_WRITTEN},
            "TO_DATE": _to_date,
        }
        FUNCTION_PARSERS: ClassVar[dict[str, Callable[..., Any]]] = {
            # percentile has a third argument, how often each value counts, which sqlglot leaves out.
            **{name: read for name, read in SparkParser.FUNCTION_PARSERS.items() if name != "PERCENTILE"},
            "LISTAGG": _listagg,
            "STRING_AGG": _listagg,
        }

        def _parse_types(self, *args: Any, **kwargs: Any) -> Any:
            """`struct(…)` is a call: read as a type first, each level would be read twice, 2^n times in all."""
            following = getattr(self._next, "token_type", None)
            if getattr(self._curr, "token_type", None) is TokenType.STRUCT and following is TokenType.L_PAREN:
                return None
            return super()._parse_types(*args, **kwargs)
