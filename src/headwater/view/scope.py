"""Names and subqueries of one SELECT, turned into columns of the operator tree.

A scope belongs to one SELECT while `lower.py` works on it: it maps qualified names to internal columns, and turns
subqueries into joins: EXISTS and IN into semi and anti joins, scalar aggregates into left joins. The aggregate columns
of a correlated scalar subquery are joined raw and its expression is evaluated above the join, so that a group without
rows gives what the subquery would (count 0, `coalesce(sum(x), 0)` 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlglot import exp

from headwater.view.exact import alike
from headwater.view.functions import aggregate_units
from headwater.view.tree import (
    Aggregate,
    Filter,
    Join,
    JoinKind,
    Limit,
    Node,
    Project,
    Window,
    col,
    column_names,
    conjuncts,
)

if TYPE_CHECKING:
    from headwater.view.lower import Lowering

_EMPTY_IS_NULL = (exp.Sum, exp.Avg, exp.Min, exp.Max)


class Unsupported(Exception):
    """The query has no operator tree; the message is the reason that EXPLAIN shows."""


@dataclass(frozen=True, slots=True)
class Cte:
    """A common table expression: its column names, if given, and the CTEs that were visible where it was written."""

    query: exp.Expr
    columns: tuple[str, ...]
    ctes: Mapping[str, Cte]


class Scope:
    """What one SELECT knows: its tree so far, its sources, the outer query, its group keys and windows."""

    def __init__(self, lowering: Lowering, ctes: Mapping[str, Cte], outer: Scope | None) -> None:
        self.lowering = lowering
        self.ctes = ctes
        self.outer = outer
        self.node: Node
        self.sources: dict[str, dict[str, str]] = {}
        self.correlated: list[exp.Expr] = []
        self.aliases: dict[str, str] = {}
        self.windows: dict[str, str] = {}
        self._groups: dict[str, str] | None = None
        self._aggregates: dict[str, str] = {}

    def grouped(self, groups: dict[str, str], aggregates: dict[str, str]) -> None:
        """From here on expressions are over the groups: group expressions and aggregates by their resolved text."""
        self._groups, self._aggregates = groups, aggregates

    # -- names

    def _own(self, column: exp.Column) -> str | None:
        if column.table:
            return self.sources.get(column.table, {}).get(column.name.lower())
        found = [names[column.name.lower()] for names in self.sources.values() if column.name.lower() in names]
        if len(found) > 1:
            raise Unsupported("an ambiguous name has no incremental form")
        return found[0] if found else self.aliases.get(column.name)

    def lookup(self, column: exp.Column) -> str:
        scope: Scope | None = self
        while scope is not None:
            found = scope._own(column)
            if found is not None:
                return found
            scope = scope.outer
        raise Unsupported("a name that could not be resolved to a column of an input")

    # -- expressions

    def plain(self, expr: exp.Expr) -> exp.Expr:
        """An expression without subqueries (a join condition)."""
        if expr.find(exp.Query) is not None:
            raise Unsupported("a subquery in a join condition has no incremental form")
        return self._columns(expr)

    def _columns(self, expr: exp.Expr) -> exp.Expr:
        def replace(node: exp.Expr) -> exp.Expr:
            return col(self.lookup(node)) if isinstance(node, exp.Column) else node

        return expr.copy().transform(replace, copy=False)

    def resolve(self, expr: exp.Expr) -> exp.Expr:
        """An expression over internal columns; scalar subqueries become joins below it."""
        return expr.copy().transform(self._replace, copy=False)

    def _replace(self, node: exp.Expr) -> exp.Expr:
        if isinstance(node, exp.Window) and (name := self.windows.get(node.sql("spark"))):
            return col(name)
        if _tests_rows(node) or (isinstance(node, exp.In) and node.args.get("query") is not None):
            raise Unsupported("EXISTS or IN with a subquery below OR, CASE or a SELECT list has no incremental form")
        if isinstance(node, exp.Subquery):
            return self._scalar(node.unnest())
        if isinstance(node, exp.Query):
            raise Unsupported("a subquery at this place has no incremental form")
        if self._groups is not None and not isinstance(node, (exp.Literal, exp.Identifier)):
            found = self._grouped(node)
            if found is not None:
                return found
        if isinstance(node, exp.Column):
            if self._groups is not None and self._own(node) is not None:
                raise Unsupported("a column beside the group keys has no incremental form")
            return col(self.lookup(node))
        return node

    def _grouped(self, node: exp.Expr) -> exp.Expr | None:
        if node.find(exp.Query, exp.Window) is not None:
            return None
        text = self._columns(node).sql("spark")
        found = self._aggregates.get(text) or (self._groups or {}).get(text)
        return None if found is None else col(found)

    def resolve_order(self, ordered: exp.Expr) -> exp.Expr:
        def replace(node: exp.Expr) -> exp.Expr:
            if isinstance(node, exp.Column) and not node.table and node.name in self.aliases:
                return col(self.aliases[node.name])
            return self._replace(node)

        return ordered.copy().transform(replace, copy=False)

    # -- conditions

    def where(self, condition: exp.Expr) -> None:
        """One conjunct of WHERE or HAVING."""
        inner, negated = condition.unnest(), False
        while isinstance(inner, exp.Not):
            inner, negated = inner.this.unnest(), not negated
        if _tests_rows(inner):
            self._semi(inner.this, None, negated)
        elif isinstance(inner, exp.In) and inner.args.get("query") is not None:
            self._semi(inner.args["query"], inner.this, negated)
        else:
            resolved = self.resolve(condition)
            if column_names(resolved) <= set(self.node.columns):
                self.node = Filter(self.node, resolved)
            elif self._groups is None and self.outer is not None:
                self.correlated.append(resolved)
            else:
                raise Unsupported("a correlated condition of this form has no incremental form")

    def _semi(self, subquery: exp.Expr, tested: exp.Expr | None, negated: bool) -> None:
        query = subquery.unnest()
        value = self.resolve(tested) if tested is not None else None
        if isinstance(value, exp.Tuple):
            raise Unsupported("IN with several columns has no incremental form")
        node, output, conditions = self._subquery_rows(query)
        if value is not None:
            if output is None:
                raise Unsupported("IN with several columns has no incremental form")
            equal: exp.Expr = exp.EQ(this=value, expression=output)
            if negated and not (self._never_null(value, self.node) and self._never_null(output, node)):
                # NOT IN: a NULL on either side makes the test unknown, and unknown does not pass.
                equal = exp.Not(this=exp.Is(this=exp.Paren(this=equal), expression=exp.false()))
            conditions.append(equal)
        self._attach(node, "anti" if negated else "semi", conditions)

    def _subquery_rows(self, query: exp.Expr) -> tuple[Node, exp.Expr | None, list[exp.Expr]]:
        """The rows of an EXISTS or IN subquery, its only output, and its correlated conditions."""
        if isinstance(query, exp.Select) and _plain_rows(query):
            inner = self.lowering.from_where(query, self.ctes, self)
            output = inner.resolve(query.expressions[0].unalias()) if len(query.expressions) == 1 else None
            return inner.node, output, list(inner.correlated)
        relation = self.lowering.query(query, self.ctes)
        return relation.node, col(relation.outputs[0][1]) if len(relation.outputs) == 1 else None, []

    def _attach(self, node: Node, kind: JoinKind, conditions: list[exp.Expr]) -> None:
        condition = exp.and_(*conditions, copy=False) if conditions else None
        if condition is not None and not column_names(condition) <= {*self.node.columns, *node.columns}:
            raise Unsupported("a subquery that reaches over two levels has no incremental form")
        self.node = self.lowering.joined(self.node, node, kind, condition)

    def _never_null(self, expr: exp.Expr, below: Node) -> bool:
        return isinstance(expr, exp.Column) and self.lowering.never_null(expr.name, below)

    # -- scalar subqueries

    def _scalar(self, query: exp.Expr) -> exp.Expr:
        if not isinstance(query, exp.Select) or query.args.get("group") or len(query.expressions) != 1:
            raise Unsupported("a scalar subquery that may give several rows has no incremental form")
        value = query.expressions[0].unalias()
        units = aggregate_units(value)
        if not units or any(query.args.get(k) for k in ("having", "limit", "offset", "distinct", "with_", "with")):
            raise Unsupported("a scalar subquery other than one aggregate has no incremental form")
        inner = self.lowering.from_where(query, self.ctes, self)
        keys, pairs = self._correlation(inner)
        aggregates = {self.lowering.fresh("s"): inner.resolve(unit) for unit in units}
        if any(not column_names(e) <= set(inner.node.columns) for e in aggregates.values()):
            raise Unsupported("a correlated aggregate has no incremental form")
        if keys and any(not isinstance(unit, (*_EMPTY_IS_NULL, exp.Count)) for unit in units):
            raise Unsupported("this aggregate in a correlated subquery has no incremental form")
        columns = {unit.sql("spark"): name for unit, name in zip(units, aggregates, strict=True)}
        # Without a key there is always exactly one row, and a left join would only cost more.
        kind: JoinKind = "left" if keys else "inner"
        self._attach(Aggregate(inner.node, tuple(dict.fromkeys(keys)), aggregates), kind, pairs)

        def replace(node: exp.Expr) -> exp.Expr:
            name = columns.get(node.sql("spark")) if not isinstance(node, exp.Identifier) else None
            if name is None:
                if isinstance(node, exp.Column):
                    raise Unsupported("a scalar subquery with a column beside its aggregate has no incremental form")
                return node
            if isinstance(node, exp.Count):
                return exp.Coalesce(this=col(name), expressions=[exp.Literal.number(0)])
            return col(name)

        return exp.Paren(this=value.copy().transform(replace, copy=False))

    def _correlation(self, inner: Scope) -> tuple[list[str], list[exp.Expr]]:
        """Group columns of a correlated aggregate, and the join condition; every condition must be an equality."""
        keys: list[str] = []
        pairs: list[exp.Expr] = []
        own = set(inner.node.columns)
        for part in (p for c in inner.correlated for p in conjuncts(c)):
            if not isinstance(part, exp.EQ):
                raise Unsupported("a correlated aggregate whose condition is no equality has no incremental form")
            one, two = part.left, part.right
            if not column_names(one) <= own:
                one, two = two, one
            if not column_names(one) <= own or column_names(two) & own:
                raise Unsupported("a correlated aggregate of this form has no incremental form")
            if not alike(one, two, self.lowering.kinds):
                raise Unsupported("a correlated aggregate that may compare two types has no incremental form")
            keys.append(self.lowering.as_column(inner, one, "k"))
            pairs.append(exp.EQ(this=col(keys[-1]), expression=two))
        return keys, pairs


def _tests_rows(node: exp.Expr) -> bool:
    """EXISTS (SELECT …); `exists(array, x -> …)` is a function like any other."""
    return isinstance(node, exp.Exists) and node.args.get("expression") is None


def outer_joined(name: str, below: Node) -> bool:
    """Whether a column may be NULL because an outer join made it so."""
    stack: list[Node] = [below]
    while stack:
        node = stack.pop()
        if isinstance(node, Join):
            if node.kind == "full" or (node.kind == "left" and name in node.right.columns):
                return True
            stack += [node.left, node.right]
        elif isinstance(node, (Project, Filter, Window, Aggregate, Limit)):
            stack.append(node.child)
    return False


def _plain_rows(query: exp.Select) -> bool:
    """Whether a SELECT gives a row for each row of its FROM and WHERE, no less and no more."""
    clauses = ("group", "having", "limit", "offset", "distinct", "with_", "with", "qualify")
    return not any(query.args.get(k) for k in clauses) and not any(aggregate_units(e) for e in query.expressions)
