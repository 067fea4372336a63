"""`analyse(sql, inputs)`: which refresh strategy a view's query allows, the cheapest that is right.

    rowwise        filters and projections of one input, UNION ALL of such: only changed rows are looked at
    algebraic      counts, sums … over inner joins of inputs: changes are added to hidden accumulators
    affected_keys  anything that a key partitions: the touched partitions are recomputed and compared
    full           everything else: recompute and compare

`checks.py` refuses what no view may contain, `lower.py` makes the operator tree, `algebra.py` finds accumulators;
`spark/view.py` runs the outcome. Nothing here knows Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from sqlglot import exp

from headwater.model.schema import Schema
from headwater.view.algebra import Algebra, algebra
from headwater.view.checks import Query, read
from headwater.view.functions import only_whole
from headwater.view.lower import Lowering, Relation
from headwater.view.plan import PART, Strategy, ViewPlan, expected_jobs
from headwater.view.scope import Unsupported
from headwater.view.tree import (
    Aggregate,
    Filter,
    Join,
    Limit,
    Node,
    Project,
    Scan,
    SetOp,
    UnionAll,
    Window,
)

# Above this many operators the plan of affected keys costs more to make than most recomputations cost to run.
MAX_OPERATORS = 60
_CACHE_SIZE = 256  # analysed queries; each view is analysed again at every refresh


@dataclass(frozen=True, slots=True)
class Analysis:
    """The plan with what is needed to run it; made again from the SQL text, never stored."""

    plan: ViewPlan
    query: Query
    relation: Relation | None
    algebra: Algebra | None


def analyse(sql: str, inputs: Mapping[str, Schema]) -> ViewPlan:
    """The plan of a view; UsageError if the query cannot be a view."""
    return analysis(sql, inputs).plan


def analysis(sql: str, inputs: Mapping[str, Schema]) -> Analysis:
    return _analysis(sql, tuple(sorted(inputs.items(), key=lambda item: item[0])))


@lru_cache(maxsize=_CACHE_SIZE)
def _analysis(sql: str, inputs: tuple[tuple[str, Schema], ...]) -> Analysis:
    query = read(sql, dict(inputs))
    reasons: list[str] = []
    lowering = Lowering(dict(inputs))
    try:
        if whole := only_whole(query.tree):
            raise Unsupported(whole)
        relation = lowering.query(query.tree.copy(), {})
        if size(relation.node) > MAX_OPERATORS:
            raise Unsupported(f"the query has more than {MAX_OPERATORS} operators")
    except Unsupported as reason:
        plan = _plan(query, sql, Strategy.FULL, unique=False, reasons=(f"affected_keys: {reason}",))
        return Analysis(plan, query, None, None)
    why_not = rowwise_obstacle(relation.node)
    if why_not is None:
        keys = tuple(label(relation.node, name) for name in relation.node.key)
        return Analysis(_plan(query, sql, Strategy.ROWWISE, keys=keys), query, relation, None)
    reasons.append(f"rowwise: {why_not}")
    try:
        sums = algebra(relation.node, lowering.types)
        keys = tuple(label(relation.node, name) for name in sums.aggregate.group)
        plan = _plan(
            query,
            sql,
            Strategy.ALGEBRAIC,
            keys=keys,
            hidden=sums.hidden,
            reasons=tuple(reasons),
            operators=shuffling(relation.node),
        )
        return Analysis(plan, query, relation, sums)
    except Unsupported as reason:
        reasons.append(f"algebraic: {reason}")
    return Analysis(_keyed(query, sql, relation.node, reasons), query, relation, None)


def _keyed(query: Query, sql: str, root: Node, reasons: list[str]) -> ViewPlan:
    operators = shuffling(root)
    if not root.part:
        reasons.append(f"affected_keys: {whole_reason(root)}")
        return _plan(query, sql, Strategy.FULL, unique=root.unique, reasons=tuple(reasons), operators=operators)
    return _plan(
        query,
        sql,
        Strategy.AFFECTED_KEYS,
        keys=tuple(label(root, name) for name in root.part),
        hidden=() if by_key(root) else ((PART, "STRING"),),
        unique=root.unique,
        reasons=tuple(reasons),
        operators=operators,
    )


def _plan(
    query: Query,
    sql: str,
    strategy: Strategy,
    *,
    keys: tuple[str, ...] = (),
    hidden: tuple[tuple[str, str], ...] = (),
    unique: bool = True,
    reasons: tuple[str, ...] = (),
    operators: int = 0,
) -> ViewPlan:
    return ViewPlan(
        sql=sql,
        inputs=query.inputs,
        strategy=strategy,
        columns=query.columns,
        hidden=hidden,
        partition_keys=keys,
        unique=unique,
        reasons=reasons,
        spark_jobs=expected_jobs(strategy, operators),
    )


def by_key(root: Node) -> bool:
    """Whether a partition is exactly one row, so that `_key` is also the partition's text."""
    return root.unique and set(root.part) == set(root.key)


def children(node: Node) -> tuple[Node, ...]:
    match node:
        case Project() | Filter() | Aggregate() | Window() | Limit():
            return (node.child,)
        case Join() | SetOp():
            return (node.left, node.right)
        case UnionAll():
            return tuple(branch for branch, _ in node.branches)
    return ()


def size(node: Node) -> int:
    return 1 + sum(size(child) for child in children(node))


def shuffling(node: Node) -> int:
    """Joins, and groupings below the topmost operator: each costs shuffles or broadcasts of its own."""
    while isinstance(node, (Project, Filter)):
        node = node.child
    below = sum(_shuffling(child) for child in children(node))
    return below + (1 if isinstance(node, Join) else 0)


def _shuffling(node: Node) -> int:
    own = 1 if isinstance(node, (Join, Aggregate, Window, SetOp)) else 0
    return own + sum(_shuffling(child) for child in children(node))


def rowwise_obstacle(node: Node) -> str | None:
    """Why changed rows alone do not tell the change of the view; None if they do."""
    match node:
        case Scan():
            return None
        case Project() if node.generates:
            return "a function gives several rows for one"
        case Project() | Filter():
            return rowwise_obstacle(node.child)
        case UnionAll():
            found = [rowwise_obstacle(branch) for branch, _ in node.branches]
            return next((reason for reason in found if reason), None)
        case Aggregate():
            return "the query groups rows" if node.aggregates else "DISTINCT needs to know the other rows"
        case Join():
            return "a join needs to know the other side"
        case Window():
            return "a window function needs to know the other rows of its partition"
        case SetOp():
            return f"{node.kind.upper()} needs to know the other side"
        case Limit():
            return "LIMIT needs to know all rows"
    return "the query has no input"


def whole_reason(node: Node) -> str:
    """Why a query is one single partition."""
    match node:
        case Project() | Filter():
            return whole_reason(node.child)
        case Aggregate():
            return "an aggregate without GROUP BY is one single partition"
        case Window():
            return "the window functions share no PARTITION BY key"
        case Limit():
            return "ORDER BY … LIMIT needs all rows"
        case Join(kind="full"):
            return "a full join without an equality has no key"
        case Join():
            return whole_reason(node.left)
    return "the query has no key"


def label(node: Node, name: str) -> str:
    """What a user calls an internal column: the input's column, or the expression."""
    match node:
        case Scan():
            return f"{node.input}.{node.names[name]}" if name in node.names else name
        case Project() if name in node.exprs:
            return _readable(node, node.exprs[name])
        case Aggregate() if name in node.aggregates:
            return _readable(node, node.aggregates[name])
        case Window() if name in node.functions:
            return _readable(node, node.functions[name])
        case UnionAll() if name in node.identity:
            return "branch" if name == node.identity[0] else "key of the branch"
        case UnionAll() if name in node.outputs:
            branch, columns = node.branches[0]
            return label(branch, columns[node.outputs.index(name)])
        case SetOp() if name in node.outputs:
            return label(node.left, node.left_columns[node.outputs.index(name)])
        case Join() if name in node.coalesced:
            return label_expr(node, node.equi[node.coalesced.index(name)][0])
    for child in children(node):
        if name in child.columns:
            return label(child, name)
    return name


def label_expr(node: Node, expr: exp.Expr) -> str:
    return _readable(node, expr)


def _readable(node: Node, expr: exp.Expr) -> str:
    def replace(part: exp.Expr) -> exp.Expr:
        if isinstance(part, exp.Column):
            for child in children(node):
                if part.name in child.columns:
                    return exp.Var(this=label(child, part.name))
        return part

    return expr.copy().transform(replace, copy=False).sql("spark")
