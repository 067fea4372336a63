"""Which aggregates can be kept up to date by adding and subtracting, and the hidden accumulators that this needs.

A group's row holds `_count` (the rows behind it) and per aggregate: `count(x)` its count; `sum(x)` and `avg(x)` the sum
and the count of what is not NULL; `min(x)` and `max(x)` the extreme (a group whose extreme was removed is recomputed).
`spark/view_algebra.py` does the adding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from sqlglot import exp

from headwater.view import exact
from headwater.view.plan import COUNT
from headwater.view.safety import any_may_fail, is_eager, may_fail, total_conjuncts
from headwater.view.scope import Unsupported
from headwater.view.tree import Aggregate, Filter, Join, Node, Project, Scan, UnionAll, conjuncts

Kind = Literal["count", "sum", "avg", "min", "max"]
# precision + scale of a decimal whose average can be rounded exactly within 38 digits (`algebraic.py` has the formula).
AVG_DIGITS: Final = 22


@dataclass(frozen=True, slots=True)
class Accumulator:
    """How one aggregate column is kept: `value` and `rows` are hidden columns (rows: not-NULL arguments)."""

    column: str
    kind: Kind
    argument: exp.Expr | None
    value: str
    value_type: str
    rows: str


@dataclass(frozen=True, slots=True)
class Algebra:
    """An aggregate view that is kept by accumulators: the aggregate and its accumulators, in order."""

    aggregate: Aggregate
    accumulators: tuple[Accumulator, ...]

    @property
    def hidden(self) -> tuple[tuple[str, str], ...]:
        columns = [(COUNT, "BIGINT")]
        for acc in self.accumulators:
            if acc.kind != "count":
                columns.append((acc.value, acc.value_type))
            if acc.kind not in ("min", "max"):
                columns.append((acc.rows, "BIGINT"))
        return tuple(columns)


def algebra(root: Node, types: Mapping[str, str]) -> Algebra:
    """The accumulators of a query, or `Unsupported` with the reason why it has none."""
    while isinstance(root, Project) and not root.generates:
        if any(is_eager(e) for e in root.exprs.values()):
            raise Unsupported("a function above the aggregate would be called for groups that are gone")
        root = root.child
    below = root
    while isinstance(below, (Filter, Project)):
        below = below.child
    if isinstance(root, Filter) and isinstance(below, Aggregate):
        raise Unsupported(
            "groups that HAVING drops would have to be stored (as by a view without it, and WHERE in a view on that)"
        )
    if not isinstance(root, Aggregate) or not root.aggregates:
        raise Unsupported("the query is not an aggregate of counts and sums")
    if not linear(root.child):
        raise Unsupported("below the aggregate is more than inner joins, filters and projections")
    if fallible_above_a_join(root, types):
        raise Unsupported("an expression over a join may fail on pairs of old and new rows that never stood together")
    known = dict(types)
    _derive(root.child, known)
    accumulators = tuple(
        _accumulator(i, column, expr, known) for i, (column, expr) in enumerate(root.aggregates.items())
    )
    return Algebra(root, accumulators)


def linear(node: Node) -> bool:
    """Whether the change of the output follows from a change of one input and the other inputs' rows."""
    match node:
        case Scan():
            return True
        case Project() | Filter():
            return linear(node.child)
        case Join(kind="inner"):
            return linear(node.left) and linear(node.right)
        case UnionAll():
            return all(linear(branch) for branch, _ in node.branches)
    return False


def fallible_above_a_join(root: Aggregate, types: Mapping[str, str]) -> bool:
    """A change of two sides at once is computed from pairs that no version had; they cancel out, unless they fail."""
    stack: list[tuple[Node, bool]] = [(root.child, any_may_fail(root.aggregates.values(), types))]
    while stack:
        node, fallible = stack.pop()
        match node:
            case Project():
                stack.append((node.child, fallible or any_may_fail(node.exprs.values(), types)))
            case Filter():
                stack.append((node.child, fallible or may_fail(node.condition, types)))
            case Join():
                if fallible or len(total_conjuncts(node, types)) < len(conjuncts(node.condition)):
                    return True
                stack += [(node.left, False), (node.right, False)]
            case UnionAll():
                stack += [(branch, fallible) for branch, _ in node.branches]
    return False


def _derive(node: Node, types: dict[str, str]) -> None:
    """Fill in the types of computed columns that are exact numbers."""
    if isinstance(node, Join):
        _derive(node.left, types)
        _derive(node.right, types)
    elif isinstance(node, (Project, Filter)):
        _derive(node.child, types)
        if isinstance(node, Project):
            for name, expr in node.exprs.items():
                kind = exact.exact_type(expr, types)
                if kind is not None:
                    types[name] = exact.name(kind)


def _accumulator(i: int, column: str, expr: exp.Expr, types: Mapping[str, str]) -> Accumulator:
    if isinstance(expr, exp.Filter):
        # agg(x) FILTER (WHERE c) is agg(CASE WHEN c THEN x END): NULL is what every aggregate leaves out.
        inner = expr.this.copy()
        inner.set("this", _filtered(inner, expr.expression.this))
        expr = inner
    value, rows = f"_acc_{i}", f"_acc_{i}_n"
    argument = expr.this
    if expr.find(exp.Distinct) is not None:
        raise Unsupported(f"{_label(expr)} of distinct values cannot be subtracted from")
    if isinstance(expr, exp.Count):
        if expr.expressions:
            raise Unsupported("count over several columns has no accumulator")
        star = argument is None or isinstance(argument, (exp.Star, exp.Literal))
        return Accumulator(column, "count", None if star else argument, value, "BIGINT", rows)
    if isinstance(expr, (exp.Sum, exp.Avg)):
        kind = exact.exact_type(argument, types)
        if kind is None:
            raise Unsupported(f"{_label(expr)} over a type that cannot be subtracted exactly")
        if isinstance(expr, exp.Avg) and not kind[0] and kind[1] + kind[2] > AVG_DIGITS:
            raise Unsupported("avg over decimals of that many digits has no room for exact rounding")
        if not exact.can_be_added(exact.sum_type(kind)):
            raise Unsupported(f"{_label(expr)} over decimals of that many digits has no room for exact addition")
        name: Kind = "sum" if isinstance(expr, exp.Sum) else "avg"
        return Accumulator(column, name, argument, value, exact.name(exact.sum_type(kind)), rows)
    if isinstance(expr, (exp.Min, exp.Max)) and not expr.expressions:
        ddl = types.get(argument.name) if isinstance(argument, exp.Column) else None
        kind = exact.exact_type(argument, types)
        ddl = ddl or (exact.name(kind) if kind is not None else None)
        if ddl is None or isinstance(argument, exp.Literal):
            raise Unsupported(f"{_label(expr)} over an expression whose type is not plain")
        return Accumulator(column, "min" if isinstance(expr, exp.Min) else "max", argument, value, ddl, rows)
    raise Unsupported(f"{_label(expr)} has no accumulator")


def _filtered(aggregate: exp.Expr, condition: exp.Expr) -> exp.Expr:
    argument = aggregate.this
    if argument is None or isinstance(argument, (exp.Star, exp.Distinct)):
        if isinstance(argument, exp.Distinct) or not isinstance(aggregate, exp.Count):
            raise Unsupported(f"{_label(aggregate)} of distinct values cannot be subtracted from")
        argument = exp.Literal.number(1)
    branch = exp.If(this=condition.copy(), true=argument.copy())
    return exp.Case(ifs=[branch])


def _label(expr: exp.Expr) -> str:
    return expr.sql("spark").split("(")[0].lower()
