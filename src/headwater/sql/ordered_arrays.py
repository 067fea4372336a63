"""`array_agg(x ORDER BY y)`: Spark has no such thing, and sqlglot would write it without the order.

It becomes an array of (value, keys) that is sorted as the keys say, and of which the values are taken. Rows that are
equal in all keys come in any order, as in the databases that have it.
"""

from __future__ import annotations

from typing import Final, cast

import sqlglot
from sqlglot import exp

from headwater.errors import UsageError
from headwater.model.spark_text import SparkText

_VALUE: Final = "_value"


def with_order(tree: exp.Expression, *, keeps_nulls: bool) -> exp.Expression:
    """The tree without orders inside array_agg. `keeps_nulls`: NULLs are elements, as in Postgres; Spark drops them."""

    def rule(node: exp.Expr) -> exp.Expr:
        call = node.this if isinstance(node, exp.Filter) else node
        if not isinstance(call, exp.ArrayAgg) or not isinstance(call.this, exp.Order):
            return node
        if isinstance(node.parent, exp.Window):
            raise _refusal("array_agg(… ORDER BY …) OVER has no counterpart in Spark", "put the order into OVER (…)")
        return _sorted(call.this, node.expression if isinstance(node, exp.Filter) else None, keeps_nulls)

    return cast(exp.Expression, tree.transform(rule, copy=False))


def _sorted(order: exp.Order, where: exp.Expr | None, keeps_nulls: bool) -> exp.Expr:
    value, distinct = order.this, isinstance(order.this, exp.Distinct)
    if distinct:
        value = order.this.expressions[0]
        if any(key.this != value for key in order.expressions):
            raise _refusal("array_agg(DISTINCT x ORDER BY …) is ordered by x alone", "ORDER BY x")
    keys = [f"`_key{i}`" for i in range(len(order.expressions))]
    fields = [f"{_text(value)} AS {_VALUE}"]
    fields += [f"{_text(k.this)} AS {name}" for k, name in zip(order.expressions, keys, strict=True)]
    element = f"STRUCT({', '.join(fields)})"
    if not keeps_nulls:  # collect_list leaves out elements that are NULL
        element = f"IF({_text(value)} IS NULL, NULL, {element})"
    collected = f"COLLECT_LIST({'DISTINCT ' if distinct else ''}{element})"
    if where is not None:
        collected += f" FILTER({_text(where)})"
    compare = "0"
    for key, name in reversed(list(zip(order.expressions, keys, strict=True))):
        compare = _comparison(name, bool(key.args.get("desc")), bool(key.args.get("nulls_first")), compare)
    text = f"TRANSFORM(ARRAY_SORT({collected}, (_l, _r) -> {compare}), _e -> _e.{_VALUE})"
    return sqlglot.parse_one(text, read=SparkText)


def _comparison(name: str, descending: bool, nulls_first: bool, otherwise: str) -> str:
    left, right = f"_l.{name}", f"_r.{name}"
    before, after = (1, -1) if descending else (-1, 1)
    null, other = (-1, 1) if nulls_first else (1, -1)
    return (
        f"CASE WHEN {left} <=> {right} THEN {otherwise} WHEN {left} IS NULL THEN {null} "
        f"WHEN {right} IS NULL THEN {other} WHEN {left} < {right} THEN {before} ELSE {after} END"
    )


def _refusal(message: str, hint: str) -> UsageError:
    return UsageError("SQL_UNTRANSLATABLE", message, hint=hint)


def _text(node: exp.Expr) -> str:
    return str(node.sql(dialect="spark"))
