"""Writes the rows of a view's operator tree as SQL text (`relations.py`): at an epoch, restricted to wanted keys.

rows(N, version, restriction) are the rows of operator N before or after the epoch, only those whose keys are wanted. A
restriction is pushed down to the scans where that is right, and applied on the spot where it is not. Only columns that
the query uses are read. `touched.py` says what a change touches; `refresh.py` puts both together to a refresh.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from sqlglot import exp

from headwater.model.schema import quoted
from headwater.view.inputs import InputText, Version
from headwater.view.keys import canonical
from headwater.view.relations import Rel, Sql, text_of
from headwater.view.safety import total_conjuncts
from headwater.view.tree import (
    Aggregate,
    Filter,
    Join,
    Limit,
    Node,
    OneRow,
    Project,
    Scan,
    SetOp,
    UnionAll,
    Window,
    col,
    column_names,
    substitute,
)


@dataclass(frozen=True, slots=True)
class Restriction:
    """Only rows whose expressions have values that are among the keys (NULL is a value)."""

    exprs: tuple[exp.Expr, ...]
    keys: Rel  # one column per expression, in order, with names of their own

    def apply(self, sql: Sql, rel: Rel) -> Rel:
        names = self.keys.columns
        terms = (f"({text_of(e)}) <=> {quoted(n)}" for e, n in zip(self.exprs, names, strict=True))
        return sql.join(rel, self.keys, " AND ".join(terms), "semi")

    def mapped(self, mapping: Mapping[str, exp.Expr]) -> Restriction:
        return Restriction(tuple(substitute(e, dict(mapping)) for e in self.exprs), self.keys)

    def only(self, sql: Sql, wanted: Mapping[int, exp.Expr]) -> Restriction:
        """The keys at some positions, with other expressions for them."""
        names = [self.keys.columns[i] for i in wanted]
        keys = sql.keep(self.keys, names)
        return Restriction(tuple(wanted.values()), keys.few() if self.keys.small else keys)

    def reads_only(self, columns: Sequence[str]) -> bool:
        available = set(columns)
        return all(column_names(e) <= available for e in self.exprs)


class Rows:
    """See the head of this module."""

    def __init__(self, sql: Sql, inputs: Mapping[str, InputText], used: Collection[str]) -> None:
        self.sql = sql
        self.inputs = inputs
        self._used = frozenset(used)
        self._fetching = any(found.fetched for found in inputs.values())
        self._numbers = count()
        self._types: dict[str, str] = {}
        self._widened: dict[Node, Mapping[str, str]] = {}

    # -- small things

    def changed(self, node: Node) -> bool:
        return any(self.inputs[name].changed for name in node.inputs)

    def restriction(
        self, rel: Rel, values: Sequence[exp.Expr], targets: Sequence[exp.Expr], *, distinct: bool = True
    ) -> Restriction:
        """Restrict `targets` to the values that the expressions `values` have in `rel`.

        Making the keys distinct is a shuffle, which is not worth it for plain changes, nor where they are looked up.
        """
        number = next(self._numbers)
        distinct = distinct and not self._fetching
        keys = self.sql.select(rel, {f"_hw_k{number}_{i}": text_of(v) for i, v in enumerate(values)})
        return Restriction(tuple(targets), (self.sql.distinct(keys) if distinct else keys).few())

    def by_columns(self, rel: Rel, columns: Sequence[str], *, distinct: bool = True) -> Restriction:
        exprs = [col(name) for name in columns]
        return self.restriction(rel, exprs, exprs, distinct=distinct)

    def _stored(self, node: Scan) -> dict[str, str]:
        """The wanted columns of an input: internal name, stored name."""
        return {name: stored for name, stored in node.names.items() if name in self._used or name in node.key}

    def _scan(self, node: Scan, rel: Rel) -> Rel:
        return self.sql.select(rel, {name: quoted(stored) for name, stored in self._stored(node).items()})

    def canonical(self, rel: Rel, columns: Sequence[str]) -> str:
        """The canonical text of internal columns. A name has one type in the whole tree: it is asked for once."""
        self._note_types(rel, columns)
        return canonical(self._types, columns)

    def _note_types(self, rel: Rel, columns: Sequence[str]) -> None:
        if any(c not in self._types for c in columns):
            found = self.sql.types(rel)
            self._types |= {c: found[c] for c in rel.columns}

    def outputs(self, node: UnionAll | SetOp, number: int, rel: Rel) -> dict[str, str]:
        """The columns that one side of a set operation adds, in the types of all sides together.

        Which of them are there depends on what has changed; the text of a key must not: 1.50 and 1.5000 are one.
        """
        columns = operands(node)[number][1]
        names = dict(zip(node.outputs, columns, strict=True))
        if node.uniform:
            return {o: quoted(c) for o, c in names.items()}
        kinds = self._wide(node)
        self._note_types(rel, columns)
        return {
            o: quoted(c) if self._types[c] == kinds[o] else f"CAST({quoted(c)} AS {kinds[o]})" for o, c in names.items()
        }

    def _wide(self, node: UnionAll | SetOp) -> Mapping[str, str]:
        if node not in self._widened:
            parts = [
                self.sql.select(self.rows(side), {o: quoted(c) for o, c in zip(node.outputs, columns, strict=True)})
                for side, columns in operands(node)
            ]
            self._widened[node] = self.sql.types(self.sql.union(parts))
        return self._widened[node]

    # -- rows

    def rows(self, node: Node, version: Version = "after", restriction: Restriction | None = None) -> Rel:
        if version == "before" and not self.changed(node):
            version = "after"
        if restriction is not None and not restriction.exprs:
            restriction = None
        match node:
            case Scan():
                return self._scan_rows(node, version, restriction)
            case OneRow():
                name = f"_hw_one{next(self._numbers)}"
                return self.sql.add(f"SELECT 1 AS {name}", (name,))
            case Project():
                return self._project_rows(node, version, restriction)
            case Filter():
                return self.sql.where(self.rows(node.child, version, restriction), text_of(node.condition))
            case Join():
                return self._join_rows(node, version, restriction)
            case Aggregate():
                below, above = self._split(restriction, node.group)
                rel = aggregate(self.sql, node, self.rows(node.child, version, below))
                return rel if above is None else above.apply(self.sql, rel)
            case Window():
                below, above = self._split(restriction, node.by)
                rel = self._with(self.rows(node.child, version, below), node.functions)
                return rel if above is None else above.apply(self.sql, rel)
            case UnionAll():
                return self._union_rows(node, version, restriction)
            case SetOp():
                return self._set_rows(node, version, restriction)
            case Limit():
                rel = self._limit(node, self.rows(node.child, version))
                return rel if restriction is None else restriction.apply(self.sql, rel)
        raise AssertionError(f"no rows for {type(node).__name__}")

    def _scan_rows(self, node: Scan, version: Version, restriction: Restriction | None) -> Rel:
        found = self.inputs[node.input]
        columns = list(self._stored(node).values())
        if restriction is None:
            return self._scan(node, found.rows(self.sql, version, columns))
        if found.fetched and not found.tiny:
            return self._fetched(node, version, restriction)
        names = [e.name if isinstance(e, exp.Column) else None for e in restriction.exprs]
        if sorted(map(str, names)) == sorted(node.key):
            keys = [restriction.keys.columns[names.index(k)] for k in node.key]
            few = self.sql.keep(restriction.keys, keys)
            few = few.few() if restriction.keys.small else few
            return self._scan(node, found.lookup(self.sql, version, columns, few))
        return restriction.apply(self.sql, self._scan(node, found.rows(self.sql, version, columns)))

    def _fetched(self, node: Scan, version: Version, restriction: Restriction) -> Rel:
        """By the values of mere columns; what the restriction says of expressions is applied to what they give."""
        found = self.inputs[node.input]
        at: dict[str, int] = {}
        for i, expr in enumerate(restriction.exprs):
            if isinstance(expr, exp.Column):
                at.setdefault(node.names[expr.name], i)
        columns = list(self._stored(node).values())
        if not at:
            return restriction.apply(self.sql, self._scan(node, found.rows(self.sql, version, columns)))
        keys = self.sql.keep(restriction.keys, [restriction.keys.columns[i] for i in at.values()])
        rel = self._scan(node, found.matching(self.sql, version, columns, list(at), keys))
        return rel if len(at) == len(restriction.exprs) else restriction.apply(self.sql, rel)

    def partners(self, rel: Rel, node: Join, side: Literal["left", "right"]) -> Restriction | None:
        """What of one side of a join can match the rows of the other one; None where all of it is read anyhow."""
        total = {id(part) for part in total_conjuncts(node)}  # others are not asked of rows that may never have been
        pairs = [(a, b) for a, b in node.equi if id(a.parent) in total]
        if not self._fetching or not pairs:
            return None
        lefts, rights = [a for a, _ in pairs], [b for _, b in pairs]
        return self.restriction(rel, rights, lefts) if side == "left" else self.restriction(rel, lefts, rights)

    def _split(
        self, restriction: Restriction | None, columns: tuple[str, ...]
    ) -> tuple[Restriction | None, Restriction | None]:
        """(what may be pushed below an operator that these columns partition, what must be applied above it)."""
        if restriction is None or restriction.reads_only(columns):
            return restriction, None
        inside = {i: e for i, e in enumerate(restriction.exprs) if column_names(e) and column_names(e) <= set(columns)}
        return (restriction.only(self.sql, inside) if inside else None), restriction

    def _with(self, df: Rel, exprs: Mapping[str, exp.Expr]) -> Rel:
        return self.sql.extend(df, {name: text_of(e) for name, e in exprs.items()})

    def _project_rows(self, node: Project, version: Version, restriction: Restriction | None) -> Rel:
        if restriction is None or not node.generates or restriction.reads_only(node.child.columns):
            below = restriction.mapped(node.exprs) if restriction is not None else None
            return self._with(self.rows(node.child, version, below), node.exprs)
        return restriction.apply(self.sql, self._with(self.rows(node.child, version), node.exprs))

    def _limit(self, node: Limit, df: Rel) -> Rel:
        order = ", ".join(_ordered(key) for key in node.order)
        offset = f" OFFSET {node.offset}" if node.offset else ""
        return self.sql.add(f"SELECT * FROM {df.name} ORDER BY {order} LIMIT {node.limit}{offset}", df.columns)

    def branch(self, node: UnionAll, number: int, df: Rel) -> Rel:
        branch, _ = node.branches[number]
        name, part, key = node.identity
        values = self.outputs(node, number, df)
        identity = {
            name: str(number),
            part: self.canonical(df, branch.part),
            key: self.canonical(df, branch.key),
        }
        return self.sql.select(df, {**values, **identity})

    def _union_rows(self, node: UnionAll, version: Version, restriction: Restriction | None) -> Rel:
        parts = []
        for number, (branch, columns) in enumerate(node.branches):
            below = None
            if restriction is not None and restriction.reads_only(node.outputs):
                below = restriction.mapped(dict(zip(node.outputs, map(col, columns), strict=True)))
            df = self.branch(node, number, self.rows(branch, version, below))
            # Spark itself pushes a semi join on the branch's text down to the scan.
            parts.append(df if restriction is None or below is not None else restriction.apply(self.sql, df))
        return self.sql.union(parts)

    def _set_rows(self, node: SetOp, version: Version, restriction: Restriction | None) -> Rel:
        sides = []
        for number, (side, columns) in enumerate(operands(node)):
            mapping: dict[str, exp.Expr] = dict(zip(node.outputs, map(col, columns), strict=True))
            below = restriction.mapped(mapping) if restriction is not None else None
            df = self.rows(side, version, below)
            sides.append(self.sql.select(df, self.outputs(node, number, df)))
        left, right = sides
        return self.sql.set_operation(left, right, f"{node.kind.upper()} {'DISTINCT' if node.distinct else 'ALL'}")

    # -- rows of joins

    def _join_rows(self, node: Join, version: Version, restriction: Restriction | None) -> Rel:
        if node.kind == "full":
            return self._full_join_rows(node, version, restriction)
        left, right = self._sides(node, restriction)
        if left is None and right is not None and self._fetching:
            right_df = self.rows(node.right, version, right)
            left_df = self.rows(node.left, version, self.partners(right_df, node, "left"))
        else:
            left_df = self.rows(node.left, version, left)
            if node.kind != "inner" and left is not None and node.equi:
                # The right side only matters where the restricted left side has partners.
                right = self.restriction(left_df, [a for a, _ in node.equi], [b for _, b in node.equi])
            elif right is None and left is not None:
                right = self.partners(left_df, node, "right")
            right_df = self.rows(node.right, version, right)
        df = self.join(left_df, right_df, node)
        if restriction is not None and (left is None or len(left.exprs) < len(restriction.exprs)):
            df = restriction.apply(self.sql, df)
        return df

    def _sides(self, node: Join, restriction: Restriction | None) -> tuple[Restriction | None, Restriction | None]:
        """What of a restriction concerns each side; equal join keys carry it over."""
        if restriction is None:
            return None, None
        twins = {a.sql("spark"): b for a, b in node.equi}
        lefts: dict[int, exp.Expr] = {}
        rights: dict[int, exp.Expr] = {}
        for i, expr in enumerate(restriction.exprs):
            names = column_names(expr)
            if names <= set(node.left.columns):
                lefts[i] = expr
                if expr.sql("spark") in twins:
                    rights[i] = twins[expr.sql("spark")]
            elif names <= set(node.right.columns) and node.kind == "inner":
                rights[i] = expr
        left, right = (restriction.only(self.sql, part) if part else None for part in (lefts, rights))
        return left, right

    def _full_join_rows(self, node: Join, version: Version, restriction: Restriction | None) -> Rel:
        below, above = self._split(restriction, node.coalesced)
        left = right = None
        if below is not None:
            left = below.mapped({c: a for c, (a, _) in zip(node.coalesced, node.equi, strict=True)})
            right = below.mapped({c: b for c, (_, b) in zip(node.coalesced, node.equi, strict=True)})
        df = self.join(self.rows(node.left, version, left), self.rows(node.right, version, right), node)
        return df if above is None else above.apply(self.sql, df)

    def join(self, left: Rel, right: Rel, node: Join) -> Rel:
        """The two sides joined as the node says."""
        condition = text_of(node.condition) if node.condition is not None else None
        rel = self.sql.join(left, right, condition, node.kind)
        if node.kind == "full" and node.coalesced:
            pairs = zip(node.coalesced, node.equi, strict=True)
            rel = self.sql.extend(rel, {name: f"coalesce({text_of(a)}, {text_of(b)})" for name, (a, b) in pairs})
        return rel


def operands(node: UnionAll | SetOp) -> tuple[tuple[Node, tuple[str, ...]], ...]:
    if isinstance(node, UnionAll):
        return node.branches
    return (node.left, node.left_columns), (node.right, node.right_columns)


def aggregate(sql: Sql, node: Aggregate, rel: Rel) -> Rel:
    if not node.aggregates:
        return sql.distinct(sql.select(rel, {c: quoted(c) for c in node.group}))
    return sql.group(rel, node.group, {name: text_of(e) for name, e in node.aggregates.items()})


def _ordered(key: exp.Expr) -> str:
    descending = bool(key.args.get("desc"))
    nulls_first = key.args.get("nulls_first")
    first = nulls_first if nulls_first is not None else not descending
    value = text_of(key.this if isinstance(key, exp.Ordered) else key)
    return f"{value} {'DESC' if descending else 'ASC'} NULLS {'FIRST' if first else 'LAST'}"
