"""Types of exact arithmetic, as Spark derives them: what an accumulator must be able to hold; and types of columns.

Only integers and decimals can be subtracted exactly. For everything that is not plainly one of them the answer is None,
and the view falls back to recomputing the touched groups: a type that is wrong here would lose digits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from sqlglot import exp

_DECIMAL: Final = re.compile(r"^(?:DECIMAL|NUMERIC|DEC)(?:\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))?$")
_INTEGERS: Final = {"TINYINT": 1, "BYTE": 1, "SMALLINT": 2, "SHORT": 2, "INT": 3, "INTEGER": 3, "BIGINT": 4, "LONG": 4}
_DIGITS: Final = {1: 3, 2: 5, 3: 10, 4: 20}  # decimal digits that Spark takes an integer type for
_INTEGER_NAMES: Final = {1: "TINYINT", 2: "SMALLINT", 3: "INT", 4: "BIGINT"}
_MAX_PRECISION: Final = 38
_KEPT_SCALE: Final = 6  # what Spark keeps at least of the scale where digits run out
_TEXTS: Final = (exp.Upper, exp.Lower, exp.Trim, exp.Substring, exp.Concat)

Number = tuple[int, int, int]  # (integer rank or 0, precision, scale)


def number(ddl: str) -> Number | None:
    """An exact numeric type, None for any other."""
    upper = ddl.strip().upper()
    if rank := _INTEGERS.get(upper):
        return rank, _DIGITS[rank], 0
    if match := _DECIMAL.match(upper):
        return 0, int(match[1] or 10), int(match[2] or 0)
    return None


def name(kind: Number) -> str:
    rank, precision, scale = kind
    return _INTEGER_NAMES[rank] if rank else f"DECIMAL({precision},{scale})"


def exact_type(expr: exp.Expr, types: Mapping[str, str]) -> Number | None:
    """The type of an expression of columns, number literals, + - * and CAST; None if it is not surely exact."""
    if isinstance(expr, exp.Paren):
        return exact_type(expr.this, types)
    if isinstance(expr, exp.Column):
        return number(types.get(expr.name, ""))
    if isinstance(expr, exp.Literal) and not expr.is_string:
        return _literal(expr.name)
    if isinstance(expr, exp.Neg):
        return exact_type(expr.this, types)
    if isinstance(expr, exp.Cast) and not isinstance(expr, exp.TryCast):
        return number(expr.to.sql("spark"))
    if isinstance(expr, (exp.Case, exp.If)):
        return _widest([exact_type(e, types) for e in _branches(expr)])
    if isinstance(expr, (exp.Add, exp.Sub, exp.Mul)):
        left, right = exact_type(expr.left, types), exact_type(expr.right, types)
        return None if left is None or right is None else _arithmetic(expr, left, right)
    return None


def _branches(expr: exp.Expr) -> list[exp.Expr]:
    """The values that a CASE or IF may have; a missing ELSE is NULL, which has every type."""
    if isinstance(expr, exp.If):
        found = [expr.args.get("true"), expr.args.get("false")]
    else:
        found = [*(branch.args["true"] for branch in expr.args["ifs"]), expr.args.get("default")]
    return [e for e in found if e is not None and not isinstance(e, exp.Null)]


def _widest(kinds: list[Number | None]) -> Number | None:
    known = [kind for kind in kinds if kind is not None]
    if not known or len(known) < len(kinds):
        return None
    if all(kind[0] for kind in known):
        rank = max(kind[0] for kind in known)
        return rank, _DIGITS[rank], 0
    sizes = [(_DIGITS[rank], 0) if rank else (precision, scale) for rank, precision, scale in known]
    scale = max(s for _, s in sizes)
    precision = max(p - s for p, s in sizes) + scale
    return (0, precision, scale) if precision <= _MAX_PRECISION else None


def _literal(text: str) -> Number | None:
    if text.isdigit():
        return (3, len(text), 0) if int(text) < 2**31 else None
    if re.fullmatch(r"\d*\.\d+", text):
        whole, _, fraction = text.partition(".")
        digits = whole.lstrip("0") + fraction
        return 0, max(len(digits), len(fraction), 1), len(fraction)
    return None


def _arithmetic(expr: exp.Expr, left: Number, right: Number) -> Number | None:
    if left[0] and right[0]:
        rank = max(left[0], right[0])
        return rank, _DIGITS[rank], 0
    (_, p1, s1), (_, p2, s2) = left, right
    if isinstance(expr, exp.Mul):
        precision, scale = p1 + p2 + 1, s1 + s2
    else:
        scale = max(s1, s2)
        precision = max(p1 - s1, p2 - s2) + scale + 1
    # Beyond 38 digits Spark shortens the scale; such a product is not exact any more.
    return (0, precision, scale) if precision <= _MAX_PRECISION else None


def sum_type(kind: Number) -> Number:
    """The type of `sum` over a number."""
    rank, precision, scale = kind
    return (4, 20, 0) if rank else (0, min(precision + 10, _MAX_PRECISION), scale)


def can_be_added(kind: Number) -> bool:
    """Whether + of two such numbers keeps all their digits: with none to spare, Spark shortens a scale beyond 6."""
    rank, precision, scale = kind
    return bool(rank) or precision < _MAX_PRECISION or scale <= _KEPT_SCALE


def plain_type(expr: exp.Expr, types: Mapping[str, str]) -> str | None:
    """The type of a column, of exact arithmetic or of a function that always gives a text; None if it is not sure."""
    if isinstance(expr, exp.Paren):
        return plain_type(expr.this, types)
    if isinstance(expr, exp.Column):
        kind = number(types.get(expr.name, ""))
        return name(kind) if kind is not None else types.get(expr.name, "").upper() or None
    if isinstance(expr, exp.Cast):
        kind = number(expr.to.sql("spark"))
        return name(kind) if kind is not None else expr.to.sql("spark").upper()
    if isinstance(expr, _TEXTS) or (isinstance(expr, exp.Literal) and expr.is_string):
        return "STRING"
    kind = exact_type(expr, types)
    return name(kind) if kind is not None else None


def alike(one: exp.Expr, two: exp.Expr, types: Mapping[str, str]) -> bool:
    """Whether two values are surely of one type, so that they are equal only if they are the same."""
    first, second = plain_type(one, types), plain_type(two, types)
    return first is not None and (first == second or {first, second} <= set(_INTEGER_NAMES.values()))
