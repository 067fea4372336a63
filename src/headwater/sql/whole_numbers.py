"""`/` of two integers gives an integer in Postgres, and a fraction in Spark: such a division becomes Spark's `DIV`.

For queries that were read in the dialect of Postgres or RisingWave; sqlglot marks their divisions (`typed`). Which
columns are integers is known once the tables are, so this is done when a statement runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from sqlglot import exp
from sqlglot.optimizer.scope import Scope, traverse_scope

_WHOLE: Final = frozenset({"TINYINT", "SMALLINT", "INT", "INTEGER", "BIGINT", "SHORT", "BYTE", "LONG"})
_LARGE: Final = frozenset({"BIGINT", "LONG"})  # their sum is NUMERIC in Postgres
_SAME: Final = (exp.Paren, exp.Neg, exp.Abs, exp.Min, exp.Max)  # as whole as what they are of
_PAIRS: Final = (exp.Add, exp.Sub, exp.Mul, exp.Mod, exp.IntDiv)
_ALWAYS: Final = (exp.Count, exp.Length, exp.RowNumber, exp.Rank, exp.DenseRank)
Types = Mapping[str, str]  # of a table: the type of each column, by its name in lower case


def divide_whole_numbers(query: exp.Expression, types_of: Callable[[str], Types | None]) -> None:
    """Change the divisions of integers in a query; `types_of` a table, None if there is none of that name."""
    if not isinstance(query, exp.Query) or not any(d.args.get("typed") for d in query.find_all(exp.Div)):
        return
    found = []
    for scope in traverse_scope(query):
        known = _Columns(scope, types_of)
        found += [d for d in scope.find_all(exp.Div) if d.args.get("typed") and known.is_whole(d)]
    for division in sorted(found, key=lambda d: -d.depth):
        division.replace(exp.IntDiv(this=division.this, expression=division.expression))


class _Columns:
    """What the columns of one SELECT are."""

    def __init__(self, scope: Scope, types_of: Callable[[str], Types | None]) -> None:
        self.scope = scope
        self.types_of = types_of

    def is_whole(self, node: exp.Expr | None) -> bool:
        return self.kind(node) in _WHOLE

    def kind(self, node: exp.Expr | None) -> str:
        """The type of an expression if it is an integer, else something else."""
        match node:
            case exp.Literal():
                return "INT" if node.is_int else ""
            case exp.Column():
                return self._column(node)
            case exp.Cast():
                return node.to.sql("spark").upper()
            case exp.Alias() | exp.Window() | exp.Filter():
                return self.kind(node.this)
            case exp.Sum():
                return "" if self.kind(node.this) in _LARGE or not self.is_whole(node.this) else "BIGINT"
            case exp.Case():
                parts = [branch.args["true"] for branch in node.args["ifs"]]
                return self._all([*parts, *([node.args["default"]] if node.args.get("default") else [])])
            case exp.Coalesce() | exp.Greatest() | exp.Least():
                return self._all([node.this, *node.expressions])
            case exp.Div() if node.args.get("typed"):
                return self._all([node.this, node.expression])
        if isinstance(node, _SAME):
            return self.kind(node.this)
        if isinstance(node, _PAIRS):
            return self._all([node.this, node.expression])
        return "BIGINT" if isinstance(node, _ALWAYS) else ""

    def _all(self, nodes: list[exp.Expr]) -> str:
        kinds = [self.kind(node) for node in nodes]
        if not all(kind in _WHOLE for kind in kinds):
            return ""
        return next((kind for kind in kinds if kind in _LARGE), "INT")

    def _column(self, column: exp.Column) -> str:
        scope: Scope | None = self.scope
        while scope is not None:
            names = [column.table] if column.table else list(scope.sources)
            kinds = [kind for name in names if (kind := self._of_source(scope.sources.get(name), column.name.lower()))]
            if kinds:
                return kinds[0] if len(kinds) == 1 else ""
            scope = scope.parent  # of a correlated subquery
        return ""

    def _of_source(self, source: exp.Expr | Scope | None, name: str) -> str:
        if isinstance(source, exp.Table):
            return (self.types_of(source.name) or {}).get(name, "")
        if not isinstance(source, Scope) or not isinstance(source.expression, exp.Query):
            return ""
        inner = _Columns(source, self.types_of)
        for select in source.expression.selects:
            if select.alias_or_name.lower() == name:
                return inner.kind(select)
            if select.is_star:
                return next((k for s in source.sources.values() if (k := inner._of_source(s, name))), "")
        return ""
