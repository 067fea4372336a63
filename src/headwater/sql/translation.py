"""What sqlglot's translation to Spark SQL would change the meaning of: mended in the tree, or refused.

Whoever pastes a query of Postgres or MySQL wants its values. sqlglot writes `log(x)` of Postgres (base 10) as Spark's
(base e), and `DATE_SUB(t, INTERVAL 2 HOUR)` of MySQL as two days. Each rule here is such a case; `whole_numbers.py` has
one that needs the columns' types.
"""

from __future__ import annotations

from typing import Final, cast

from sqlglot import exp

from headwater.errors import UsageError

POSTGRES: Final = ("postgres", "risingwave")
_BASES: Final = {"10": "LOG10", "2": "LOG2"}


def translated(tree: exp.Expression, dialect: str) -> exp.Expression:
    """The tree of a statement of another dialect, so that its Spark SQL means the same."""

    def rule(node: exp.Expr) -> exp.Expr:
        match node:
            case exp.Log():
                return _log(node, dialect)
            case exp.PercentileCont() | exp.PercentileDisc():
                return exp.Anonymous(this=node.sql_name(), expressions=[node.this.copy()])
            case exp.DateAdd() | exp.DateSub() if dialect == "mysql":
                return _moved(node)
            case exp.Trunc() if node.args.get("decimals") is not None:
                return _truncated(node)
            case exp.Extract() if dialect in POSTGRES:
                return _part(node)
            case exp.RegexpReplace() if dialect in POSTGRES:
                return _replaced(node)
        return node

    return cast(exp.Expression, tree.transform(rule, copy=False))


def _log(node: exp.Log, dialect: str) -> exp.Expr:
    if node.expression is None and dialect in POSTGRES:
        return exp.Anonymous(this="LOG10", expressions=[node.this])
    if node.expression is not None and (name := _BASES.get(node.this.name)) and isinstance(node.this, exp.Literal):
        return exp.Anonymous(this=name, expressions=[node.expression])  # log(10, 1000) is not quite 3
    return node


def _moved(node: exp.DateAdd | exp.DateSub) -> exp.Expr:
    """DATE_ADD and DATE_SUB of MySQL keep the time of day, and know hours; Spark's know days alone."""
    span = node.expression
    if not isinstance(span, exp.Interval):
        span = exp.Interval(this=span.copy(), unit=node.args.get("unit") or exp.var("DAY"))
    kind = exp.Add if isinstance(node, exp.DateAdd) else exp.Sub
    return exp.Paren(this=kind(this=node.this.copy(), expression=span.copy()))


def _truncated(node: exp.Trunc) -> exp.Expr:
    value, digits = node.this, node.args["decimals"]
    down, up = (exp.Anonymous(this=name, expressions=[value.copy(), digits.copy()]) for name in ("FLOOR", "CEIL"))
    negative = exp.LT(this=value.copy(), expression=exp.Literal.number(0))
    return exp.Case(ifs=[exp.If(this=negative, true=up)], default=down)


def _part(node: exp.Extract) -> exp.Expr:
    """Sunday is 0 in Postgres and 1 in Spark."""
    match node.this.name.upper():
        case "DOW" | "DAYOFWEEK":
            part = exp.Extract(this=exp.var("DAYOFWEEK"), expression=node.expression.copy())
            return exp.Paren(this=exp.Sub(this=part, expression=exp.Literal.number(1)))
        case "ISODOW" | "DAYOFWEEKISO":
            return exp.Extract(this=exp.var("DOW_ISO"), expression=node.expression.copy())
        case "EPOCH":
            micros = exp.Anonymous(this="UNIX_MICROS", expressions=[exp.cast(node.expression.copy(), "TIMESTAMP")])
            seconds = exp.Div(this=micros, expression=exp.Literal.number("1000000.0"))
            return exp.cast(seconds, "DECIMAL(20, 6)")
    return node


def _replaced(node: exp.RegexpReplace) -> exp.Expr:
    flags = node.args.get("modifiers")
    if flags is None or flags.name != "g":
        raise UsageError(
            "SQL_UNTRANSLATABLE",
            "regexp_replace of the first match alone, or with other flags, has no counterpart in Spark",
            hint="write regexp_replace(text, pattern, replacement, 'g'), or the query in Spark SQL",
        )
    return node
