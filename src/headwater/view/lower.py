"""From a qualified sqlglot query to the operator tree of `tree.py`.

What has no operator here (GROUPING SETS, LATERAL, recursive CTEs …) raises `Unsupported`: the view is then
recomputed as a whole from its SQL text. `scope.py` turns names and subqueries into columns; `checks.py` has refused
what no view may contain before this is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from sqlglot import exp

from headwater.model.schema import Schema
from headwater.view.exact import alike, plain_type
from headwater.view.functions import aggregate_units, is_generator, window_units
from headwater.view.scope import Cte, Scope, Unsupported, outer_joined
from headwater.view.tree import (
    Aggregate,
    Join,
    JoinKind,
    Limit,
    Node,
    OneRow,
    Project,
    Scan,
    SetKind,
    SetOp,
    UnionAll,
    Window,
    col,
    column_names,
    conjuncts,
    equi_pairs,
)

Outputs = tuple[tuple[str, str], ...]  # (visible name, internal column) in order
_GROUPING_EXTRAS = ("rollup", "cube", "grouping_sets", "totals", "all")
_UNSUPPORTED_CLAUSES = ("laterals", "windows", "sample", "pivots", "connect", "match", "cluster", "distribute", "sort")


@dataclass(frozen=True, slots=True)
class Relation:
    """A lowered query: the tree and the columns that it shows."""

    node: Node
    outputs: Outputs


@dataclass
class Lowering:
    """Lowers one query; holds the counter for internal names and what is known of the inputs."""

    schemas: Mapping[str, Schema]
    not_null: set[str] = field(default_factory=set)
    types: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # as `types`, and those of computed columns
    _numbers: count[int] = field(default_factory=count)

    def fresh(self, hint: str) -> str:
        return f"c{next(self._numbers)}_{hint}"

    # -- queries

    def query(self, query: exp.Expr, ctes: Mapping[str, Cte], outer: Scope | None = None) -> Relation:
        query = query.unnest()
        with_ = query.args.get("with_") or query.args.get("with")
        if with_ is not None:
            if with_.args.get("recursive"):
                raise Unsupported("a recursive CTE has no incremental form")
            for cte in with_.expressions:
                ctes = {**ctes, cte.alias: Cte(cte.this, tuple(cte.alias_column_names), ctes)}
        if isinstance(query, exp.SetOperation):
            return self._set_operation(query, ctes)
        if isinstance(query, exp.Select):
            return self.select(query, ctes, outer)
        raise Unsupported(f"{query.key.upper()} has no incremental form")

    def select(self, query: exp.Select, ctes: Mapping[str, Cte], outer: Scope | None = None) -> Relation:
        scope = self.from_where(query, ctes, outer)
        if scope.correlated:
            raise Unsupported("a correlated subquery of this form has no incremental form")
        self._group(query, scope)
        self._windows(query, scope)
        qualify = query.args.get("qualify")
        for part in conjuncts(qualify.this if qualify else None):
            scope.where(part)
        outputs = self._outputs(query, scope)
        distinct = query.args.get("distinct")
        if distinct is not None:
            if distinct.args.get("on") is not None:
                raise Unsupported("DISTINCT ON has no incremental form")
            scope.node = Aggregate(scope.node, tuple(dict.fromkeys(c for _, c in outputs)), {})
        scope.aliases = dict(outputs)
        return Relation(self._limited(query, scope), outputs)

    def from_where(self, query: exp.Select, ctes: Mapping[str, Cte], outer: Scope | None) -> Scope:
        """FROM, JOIN and WHERE; conjuncts with columns of the outer query end up in `scope.correlated`."""
        for clause in _UNSUPPORTED_CLAUSES:
            if query.args.get(clause):
                raise Unsupported(f"{clause.upper()} has no incremental form")
        scope = Scope(self, dict(ctes), outer)
        from_ = query.args.get("from_") or query.args.get("from")
        scope.node = OneRow() if from_ is None else self._source(from_.this, scope)
        for join in query.args.get("joins") or []:
            self._join(join, scope)
        where = query.args.get("where")
        for part in conjuncts(where.this if where else None):
            scope.where(part)
        return scope

    # -- FROM

    def _source(self, source: exp.Expr, scope: Scope) -> Node:
        if source.args.get("pivots") or source.args.get("sample") or source.args.get("joins"):
            raise Unsupported("PIVOT, TABLESAMPLE and nested joins have no incremental form")
        if isinstance(source, exp.Subquery):
            relation = self.query(source.this, scope.ctes)
            scope.sources[source.alias_or_name] = dict(relation.outputs)
            return relation.node
        if not isinstance(source, exp.Table) or not isinstance(source.this, exp.Identifier):
            raise Unsupported(f"{source.key.upper()} in FROM has no incremental form")
        bound = scope.ctes.get(source.name)
        if bound is not None:
            relation = self.query(bound.query, bound.ctes)
            names = bound.columns or tuple(name for name, _ in relation.outputs)
            scope.sources[source.alias_or_name] = dict(zip(names, (c for _, c in relation.outputs), strict=True))
            return relation.node
        return self._scan(source, scope)

    def _scan(self, source: exp.Table, scope: Scope) -> Node:
        schema = self.schemas[source.name]
        names = {self.fresh(column.name): column.name for column in schema.columns}
        internal = {stored: name for name, stored in names.items()}
        for column in schema.columns:
            self.types[internal[column.name]] = self.kinds[internal[column.name]] = column.type
            if not column.nullable or (column.name in schema.key and not schema.keyless):
                self.not_null.add(internal[column.name])
        scope.sources[source.alias_or_name] = {c.name.lower(): internal[c.name] for c in schema.visible}
        return Scan(source.name, names, tuple(internal[k] for k in schema.key))

    def _join(self, join: exp.Join, scope: Scope) -> None:
        if join.args.get("method") or join.args.get("using"):
            raise Unsupported("NATURAL JOIN has no incremental form")
        left, right = scope.node, self._source(join.this, scope)
        side, kind = (join.side or "").upper(), (join.kind or "").upper()
        on = join.args.get("on")
        condition = scope.plain(on) if on is not None else None
        if kind in ("SEMI", "ANTI"):
            scope.node = self.joined(left, right, "semi" if kind == "SEMI" else "anti", condition)
            scope.sources.pop(join.this.alias_or_name)
        elif side == "LEFT":
            scope.node = self.joined(left, right, "left", condition)
        elif side == "RIGHT":
            scope.node = self.joined(right, left, "left", condition)
        elif side == "FULL":
            scope.node = self.joined(left, right, "full", condition)
        elif kind in ("", "INNER", "CROSS"):
            scope.node = self.joined(left, right, "inner", condition)
        else:
            raise Unsupported(f"{join.method or kind or side} JOIN has no incremental form")

    def joined(self, left: Node, right: Node, kind: JoinKind, condition: exp.Expr | None) -> Join:
        pairs = equi_pairs(condition, left.columns, right.columns)
        same = tuple(alike(a, b, self.kinds) for a, b in pairs)
        if kind != "full":
            return Join(left, right, kind, condition, (), same)
        coalesced = tuple(self.fresh("key") for _ in pairs)
        if any(self.never_null(name, side) for side in (left, right) for name in side.key):
            return Join(left, right, kind, condition, coalesced, same)
        there = self.fresh("there")
        left = Project(left, {there: exp.Literal.number(1)})
        return Join(left, right, kind, condition, coalesced, same, (there,))

    def never_null(self, name: str, below: Node) -> bool:
        """Whether a column has a value in every row of an operator."""
        return name in self.not_null and not outer_joined(name, below)

    # -- GROUP BY, windows, SELECT list

    def _group(self, query: exp.Select, scope: Scope) -> None:
        group, having = query.args.get("group"), query.args.get("having")
        exprs = _late_expressions(query)
        units = [unit for e in [*exprs, *([having.this] if having else [])] for unit in aggregate_units(e)]
        if group is None and not units:
            if having is not None:
                raise Unsupported("HAVING without aggregates has no incremental form")
            return
        if group is not None and (
            any(group.args.get(name) for name in _GROUPING_EXTRAS) or group.find(exp.Rollup, exp.Cube, exp.GroupingSets)
        ):
            raise Unsupported("GROUPING SETS, ROLLUP, CUBE and GROUP BY ALL have no incremental form")
        keys = {}
        for expr in group.expressions if group is not None else []:
            resolved = scope.resolve(expr)
            keys[resolved.sql("spark")] = self.as_column(scope, resolved, "g")
        aggregates: dict[str, exp.Expr] = {}
        by_text: dict[str, str] = {}
        for unit in units:
            resolved = scope.resolve(unit)
            text = resolved.sql("spark")
            if text not in by_text:
                by_text[text] = self.fresh("a")
                aggregates[by_text[text]] = resolved
        scope.node = Aggregate(scope.node, tuple(dict.fromkeys(keys.values())), aggregates)
        scope.grouped(keys, by_text)
        for part in conjuncts(having.this if having else None):
            scope.where(part)

    def _windows(self, query: exp.Select, scope: Scope) -> None:
        found = {text: unit for e in _late_expressions(query) for text, unit in window_units(e)}
        if not found:
            return
        resolved: dict[str, exp.Expr] = {}
        for text, unit in found.items():
            window = scope.resolve(unit)
            window.set("partition_by", [col(self.as_column(scope, p, "p")) for p in window.args["partition_by"] or []])
            resolved[text] = window
        partitions = [[p.name for p in window.args["partition_by"]] for window in resolved.values()]
        shared = tuple(name for name in dict.fromkeys(partitions[0]) if all(name in p for p in partitions))
        names = {text: self.fresh("w") for text in resolved}
        scope.node = Window(scope.node, shared, {names[text]: window for text, window in resolved.items()})
        scope.windows = names

    def as_column(self, scope: Scope, expr: exp.Expr, hint: str) -> str:
        """The name of the column that holds the expression; adds it to the tree if there is none."""
        if isinstance(expr, exp.Column):
            return expr.name
        name = self.fresh(hint)
        self._note_kind(name, expr)
        generates = is_generator(expr)
        scope.node = Project(scope.node, {name: expr}, generates)
        return name

    def _note_kind(self, name: str, expr: exp.Expr) -> None:
        if (kind := plain_type(expr, self.kinds)) is not None:
            self.kinds[name] = kind

    def _outputs(self, query: exp.Select, scope: Scope) -> Outputs:
        outputs: list[tuple[str, str]] = []
        computed: dict[str, exp.Expr] = {}
        for expr in query.expressions:
            if isinstance(expr, exp.Aliases):
                raise Unsupported("a function that gives several columns has no incremental form")
            resolved = scope.resolve(expr.unalias())
            if isinstance(resolved, exp.Column):
                outputs.append((expr.alias_or_name, resolved.name))
                continue
            name = self.fresh("o")
            self._note_kind(name, resolved)
            computed[name] = resolved
            outputs.append((expr.alias_or_name, name))
        if computed:
            scope.node = Project(scope.node, computed, any(is_generator(e) for e in computed.values()))
        return tuple(outputs)

    def _limited(self, query: exp.Expr, scope: Scope) -> Node:
        limit, offset, order = query.args.get("limit"), query.args.get("offset"), query.args.get("order")
        if limit is None and offset is None:
            return scope.node
        if order is None or limit is None or isinstance(limit, exp.Fetch):
            raise Unsupported("OFFSET without LIMIT has no incremental form")
        keys = tuple(scope.resolve_order(e) for e in order.expressions)
        if any(not column_names(k) <= set(scope.node.columns) for k in keys):
            raise Unsupported("ORDER BY a column that is not selected has no incremental form here")
        return Limit(scope.node, keys, _number(limit), _number(offset) if offset is not None else 0)

    # -- UNION, INTERSECT, EXCEPT

    def _set_operation(self, query: exp.SetOperation, ctes: Mapping[str, Cte]) -> Relation:
        if query.args.get("by_name") or query.args.get("kind") or query.args.get("side"):
            raise Unsupported("set operations by name have no incremental form")
        sides = [self.query(query.left, ctes), self.query(query.right, ctes)]
        names = tuple(self.fresh("u") for _ in sides[0].outputs)
        if any(len(side.outputs) != len(names) for side in sides):
            raise Unsupported("the sides of a set operation have different numbers of columns")
        columns = [tuple(c for _, c in side.outputs) for side in sides]
        kinds = [{plain_type(col(c), self.kinds) for c in position} for position in zip(*columns, strict=True)]
        self.kinds |= {name: kind for name, (kind, *more) in zip(names, kinds, strict=True) if kind and not more}
        uniform = all(name in self.kinds for name in names)
        distinct = bool(query.args.get("distinct"))
        node: Node
        if isinstance(query, exp.Union):
            pairs = tuple((side.node, cols) for side, cols in zip(sides, columns, strict=True))
            node = UnionAll(pairs, names, (self.fresh("branch"), self.fresh("part"), self.fresh("key")), uniform)
            if distinct:
                node = Aggregate(node, names, {})
        else:
            kind: SetKind = "intersect" if isinstance(query, exp.Intersect) else "except"
            node = SetOp(kind, distinct, sides[0].node, columns[0], sides[1].node, columns[1], names, uniform)
        outputs = tuple(zip((name for name, _ in sides[0].outputs), names, strict=True))
        scope = Scope(self, dict(ctes), None)
        scope.node, scope.aliases = node, dict(outputs)
        return Relation(self._limited(query, scope), outputs)


def _late_expressions(query: exp.Select) -> list[exp.Expr]:
    """What is evaluated over groups, if there are any: the SELECT list, ORDER BY and QUALIFY."""
    order, qualify = query.args.get("order"), query.args.get("qualify")
    return [*query.expressions, *(order.expressions if order else []), *([qualify.this] if qualify else [])]


def _number(limit: exp.Expr) -> int:
    value = limit.expression
    if not isinstance(value, exp.Literal) or value.is_string:
        raise Unsupported("LIMIT and OFFSET other than a number have no incremental form")
    return int(value.name)
