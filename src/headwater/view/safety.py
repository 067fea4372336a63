"""Which expressions may fail on a row: what must not be evaluated for rows that no version of the view ever had.

A refresh looks at supersets: after a join of old rows of one side with new rows of the other there are pairs that never
stood together. `10 / (a.x - b.y)` may fail on such a pair although a fresh query is fine. Everything that is not
plainly total counts as fallible; + - * do not: their overflow at 64 bits is the only way in which they fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from sqlglot import exp

from headwater.view.tree import Join, Node, conjuncts, joins

_TOTAL: Final = (
    exp.Column,
    exp.Identifier,
    exp.Literal,
    exp.Boolean,
    exp.Null,
    exp.Star,
    exp.Paren,
    exp.Tuple,
    exp.Alias,
    exp.And,
    exp.Or,
    exp.Not,
    exp.EQ,
    exp.NEQ,
    exp.GT,
    exp.GTE,
    exp.LT,
    exp.LTE,
    exp.NullSafeEQ,
    exp.NullSafeNEQ,
    exp.Is,
    exp.In,
    exp.Between,
    exp.Like,
    exp.ILike,
    exp.Case,
    exp.If,
    exp.Coalesce,
    exp.Add,
    exp.Sub,
    exp.Mul,
    exp.Neg,
    exp.Lower,
    exp.Upper,
    exp.Length,
    exp.Concat,
    exp.Substring,
    exp.Trim,
    exp.Year,
    exp.Month,
    exp.Extract,
    exp.Var,
    exp.Interval,
    exp.DataType,
    exp.DataTypeParam,
    exp.Count,
    exp.Sum,
    exp.Avg,
    exp.Min,
    exp.Max,
    exp.Distinct,
    exp.Filter,
    exp.Where,
)


_NO_TYPES: Final[Mapping[str, str]] = {}


def may_fail(expr: exp.Expr, types: Mapping[str, str] = _NO_TYPES) -> bool:
    """Whether some row could make the expression raise (ANSI arithmetic, a cast, a function of the user's).

    `types` are those of columns, as far as they are known.
    """
    return any(_fallible(node, types) for node in expr.walk())


def any_may_fail(exprs: Iterable[exp.Expr], types: Mapping[str, str] = _NO_TYPES) -> bool:
    return any(may_fail(e, types) for e in exprs)


def _fallible(node: exp.Expr, types: Mapping[str, str]) -> bool:
    if isinstance(node, exp.TsOrDsToDate):
        known = types.get(node.this.name, "") if isinstance(node.this, exp.Column) else ""
        return not known.upper().startswith(("DATE", "TIMESTAMP"))
    if isinstance(node, exp.Cast):
        # A literal is cast when the query is analysed; everything has a text. (CAST and TRY_CAST read alike here.)
        return not (isinstance(node.this, exp.Literal) or node.to.is_type("text"))
    return not isinstance(node, _TOTAL)


def total_conjuncts(node: Join, types: Mapping[str, str] = _NO_TYPES) -> list[exp.Expr]:
    """The parts of a join's condition that no pair of rows makes fail, whichever versions the two are of.

    An equality asks each side for itself: it may fail on rows of that side, but not because of the pair, unless the
    side is made of pairs too.
    """
    sides = {id(one.parent): ((node.left, one), (node.right, two)) for one, two in node.equi}
    return [part for part in conjuncts(node.condition) if not _fails_on_pairs(part, sides.get(id(part)), types)]


def _fails_on_pairs(part: exp.Expr, sides: tuple[tuple[Node, exp.Expr], ...] | None, types: Mapping[str, str]) -> bool:
    if sides is None:
        return may_fail(part, types)
    return any(joins(side) and may_fail(value, types) for side, value in sides)


def is_eager(expr: exp.Expr) -> bool:
    """Whether the expression may call a Python function: Spark calls it for every row, also in a branch not taken."""
    return expr.find(exp.Anonymous) is not None
