"""The operators of a view's query: a small relational tree with what refresh needs to know about each operator.

Every column has an internal name that is unique in the tree, so joins never see two columns of one name, and operators
below an aggregate only ever *add* columns: what identifies a row is still there at the top. Expressions are sqlglot
expressions over internal columns. `lower.py` builds the tree, `spark/view.py` runs it.

Of each node N:
  part    columns that partition N: the rows of N whose part is in a set K depend only on what a restriction of the
          inputs to K gives; () means that N is one single partition
  key     columns that, if `unique`, identify a row of N
  inputs  names of the tables below it
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from sqlglot import exp

JoinKind = Literal["inner", "left", "full", "semi", "anti"]
SetKind = Literal["intersect", "except"]


class Node:
    """The base of all operators; `eq=False` everywhere: a node is itself, not its value."""

    columns: tuple[str, ...]
    part: tuple[str, ...]
    key: tuple[str, ...]
    unique: bool
    inputs: frozenset[str]


@dataclass(eq=False)
class Scan(Node):
    """One occurrence of an input; `names` maps internal to stored column names."""

    input: str
    names: dict[str, str]
    key: tuple[str, ...]

    def __post_init__(self) -> None:
        self.columns = tuple(self.names)
        self.part = self.key
        self.unique = True
        self.inputs = frozenset({self.input})


@dataclass(eq=False)
class OneRow(Node):
    """`SELECT 1` without FROM: one row without columns that never changes."""

    def __post_init__(self) -> None:
        self.columns = ()
        self.part = self.key = ()
        self.unique = True
        self.inputs = frozenset()


@dataclass(eq=False)
class Project(Node):
    """Adds computed columns; `generates` marks set-returning functions (one row becomes several)."""

    child: Node
    exprs: dict[str, exp.Expr]
    generates: bool = False

    def __post_init__(self) -> None:
        self.columns = (*self.child.columns, *self.exprs)
        self.part, self.key, self.inputs = self.child.part, self.child.key, self.child.inputs
        self.unique = self.child.unique and not self.generates


@dataclass(eq=False)
class Filter(Node):
    child: Node
    condition: exp.Expr

    def __post_init__(self) -> None:
        self.columns, self.part, self.key = self.child.columns, self.child.part, self.child.key
        self.unique, self.inputs = self.child.unique, self.child.inputs


@dataclass(eq=False)
class Join(Node):
    """A join; a right join is a left join with the sides swapped. `coalesced` are a full join's merged key columns.

    `there` is a column that is never NULL in the left side's rows, for a full join whose sides' keys may all be: it
    tells a row without a partner on the left from one without a partner on the right.

    `alike` says of each pair of `equi` whether both are surely of one type. If not, Spark casts one of them, and values
    that differ may be equal: '1' and '01' to the number 1.
    """

    left: Node
    right: Node
    kind: JoinKind
    condition: exp.Expr | None
    coalesced: tuple[str, ...] = ()
    alike: tuple[bool, ...] = ()
    there: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        left, right = self.left, self.right
        self.inputs = left.inputs | right.inputs
        if self.kind in ("semi", "anti"):
            self.columns, self.part, self.key, self.unique = left.columns, left.part, left.key, left.unique
            return
        self.columns = (*left.columns, *right.columns, *self.coalesced)
        self.key = (*left.key, *right.key, *self.there)
        self.unique = left.unique and right.unique
        if (
            self.kind == "left"
            and right.unique
            and {r.name for (_, r), same in self._compared if same and isinstance(r, exp.Column)} >= set(right.key)
        ):
            self.key = left.key  # a lookup: at most one match
            self.unique = left.unique
        self.part = {"inner": (*left.part, *right.part), "left": left.part, "full": self.coalesced}[self.kind]

    @cached_property
    def equi(self) -> tuple[tuple[exp.Expr, exp.Expr], ...]:
        """Pairs (expression over the left, over the right) that every match has equal."""
        return equi_pairs(self.condition, self.left.columns, self.right.columns)

    @property
    def _compared(self) -> list[tuple[tuple[exp.Expr, exp.Expr], bool]]:
        return list(zip(self.equi, self.alike, strict=True)) if self.alike else []


@dataclass(eq=False)
class Aggregate(Node):
    """GROUP BY; `group` are columns of the child; without any there is always exactly one row."""

    child: Node
    group: tuple[str, ...]
    aggregates: dict[str, exp.Expr]

    def __post_init__(self) -> None:
        self.columns = (*self.group, *self.aggregates)
        self.part = self.key = self.group
        self.unique = True
        self.inputs = self.child.inputs


@dataclass(eq=False)
class Window(Node):
    """Window functions as added columns; `by` are the partition columns that all of them share."""

    child: Node
    by: tuple[str, ...]
    functions: dict[str, exp.Expr]

    def __post_init__(self) -> None:
        self.columns = (*self.child.columns, *self.functions)
        self.part, self.key = self.by, self.child.key
        self.unique, self.inputs = self.child.unique, self.child.inputs


@dataclass(eq=False)
class UnionAll(Node):
    """Columns by position; `identity` are (branch number, canonical text of the branch's part, of its key).

    `uniform`: the columns of all branches are surely of the same types; otherwise Spark widens them.
    """

    branches: tuple[tuple[Node, tuple[str, ...]], ...]
    outputs: tuple[str, ...]
    identity: tuple[str, str, str]
    uniform: bool = False

    def __post_init__(self) -> None:
        branch, part, key = self.identity
        self.columns = (*self.outputs, branch, part, key)
        self.part, self.key = (branch, part), (branch, key)
        self.unique = all(node.unique for node, _ in self.branches)
        self.inputs = frozenset().union(*(node.inputs for node, _ in self.branches))


@dataclass(eq=False)
class SetOp(Node):
    """INTERSECT and EXCEPT, columns by position; NULLs compare as equal, as in a group key (`uniform`: as above)."""

    kind: SetKind
    distinct: bool
    left: Node
    left_columns: tuple[str, ...]
    right: Node
    right_columns: tuple[str, ...]
    outputs: tuple[str, ...]
    uniform: bool = False

    def __post_init__(self) -> None:
        self.columns = self.part = self.key = self.outputs
        self.unique = self.distinct
        self.inputs = self.left.inputs | self.right.inputs


@dataclass(eq=False)
class Limit(Node):
    """ORDER BY … LIMIT … OFFSET: the order is only right over all rows, so this is one partition."""

    child: Node
    order: tuple[exp.Expr, ...]
    limit: int
    offset: int

    def __post_init__(self) -> None:
        self.columns, self.key, self.unique = self.child.columns, self.child.key, self.child.unique
        self.part, self.inputs = (), self.child.inputs


def joins(node: Node) -> bool:
    """Whether there is a join in the tree: one changed row may then touch many."""
    match node:
        case Join():
            return True
        case Project() | Filter() | Aggregate() | Window() | Limit():
            return joins(node.child)
        case UnionAll():
            return any(joins(branch) for branch, _ in node.branches)
        case SetOp():
            return joins(node.left) or joins(node.right)
    return False


def conjuncts(condition: exp.Expr | None) -> list[exp.Expr]:
    """The parts of a condition that AND connects."""
    if condition is None:
        return []
    condition = condition.unnest()
    if isinstance(condition, exp.And):
        return [*conjuncts(condition.left), *conjuncts(condition.right)]
    return [condition]


def column_names(expr: exp.Expr) -> set[str]:
    """The internal columns that an expression reads."""
    return {column.name for column in expr.find_all(exp.Column)}


def col(name: str) -> exp.Column:
    return exp.Column(this=exp.Identifier(this=name, quoted=True))


def equi_pairs(
    condition: exp.Expr | None, left: tuple[str, ...], right: tuple[str, ...]
) -> tuple[tuple[exp.Expr, exp.Expr], ...]:
    """The conjuncts `l = r` (or `l <=> r`) of a join condition with one side each; in the order of the text."""
    lefts, rights, pairs = set(left), set(right), []
    for part in conjuncts(condition):
        if not isinstance(part, (exp.EQ, exp.NullSafeEQ)):
            continue
        one, two = column_names(part.left), column_names(part.right)
        if one and two and one <= lefts and two <= rights:
            pairs.append((part.left, part.right))
        elif one and two and one <= rights and two <= lefts:
            pairs.append((part.right, part.left))
    return tuple(pairs)


def substitute(expr: exp.Expr, mapping: dict[str, exp.Expr]) -> exp.Expr:
    """The expression with columns replaced by expressions."""

    def replace(node: exp.Expr) -> exp.Expr:
        if isinstance(node, exp.Column) and node.name in mapping:
            found = mapping[node.name].copy()
            return found if isinstance(found, (exp.Column, exp.Literal)) else exp.Paren(this=found)
        return node

    return expr.copy().transform(replace, copy=False)


def used_columns(root: Node, outputs: Collection[str]) -> set[str]:
    """The internal columns that anything in the tree reads, or that the query shows."""
    found = set(outputs)
    stack: list[Node] = [root]
    while stack:
        node = stack.pop()
        found |= {*node.part, *node.key}
        match node:
            case Project():
                found |= _names(node.exprs.values())
                stack.append(node.child)
            case Filter():
                found |= column_names(node.condition)
                stack.append(node.child)
            case Aggregate():
                found |= {*node.group, *_names(node.aggregates.values())}
                stack.append(node.child)
            case Window():
                found |= {*node.by, *_names(node.functions.values())}
                stack.append(node.child)
            case Limit():
                found |= _names(node.order)
                stack.append(node.child)
            case Join():
                found |= column_names(node.condition) if node.condition is not None else set()
                stack += [node.left, node.right]
            case SetOp():
                found |= {*node.left_columns, *node.right_columns}
                stack += [node.left, node.right]
            case UnionAll():
                found |= {name for _, columns in node.branches for name in columns}
                stack += [branch for branch, _ in node.branches]
    return found


def _names(exprs: Iterable[exp.Expr]) -> set[str]:
    return {name for e in exprs for name in column_names(e)}
