"""What a change of its inputs touches in a view: supersets of the rows, and of the keys, that may differ afterwards.

Of each operator N, as SQL text (`relations.py`), beside its rows (`rows.py`):
  touched(N)                a superset of the rows that are in only one of the two versions
  touched_keys(N, columns)  the values of some columns in them, without making the rows where the keys alone will do
  everything(N)             a superset of the rows of both versions

Supersets are harmless: a key that is recomputed without need compares as unchanged. An input that did not change
contributes no term.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from sqlglot import exp

from headwater.model.schema import OP, OP_DELETE, quoted
from headwater.view.relations import Rel, text_of
from headwater.view.rows import Restriction, Rows, operands
from headwater.view.safety import any_may_fail, may_fail, total_conjuncts
from headwater.view.tree import (
    Aggregate,
    Filter,
    Join,
    Node,
    Project,
    Scan,
    SetOp,
    UnionAll,
    Window,
    column_names,
    joins,
)


class Evaluator(Rows):
    """Writes the relations of one refresh."""

    def touched(self, node: Node) -> Rel | None:
        """A superset of the rows that differ between the two versions; None if no input changed."""
        if not self.changed(node):
            return None
        if _needs_true_rows(node):
            return self._recomputed(node)
        match node:
            case Scan():
                return self._scan(node, self._changes_with_old(node))
            case Project():
                df = self.touched(node.child)
                return None if df is None else self._with(df, node.exprs)
            case Filter():
                df = self.touched(node.child)
                return None if df is None else self.sql.where(df, text_of(node.condition))
            case Join(kind="inner"):
                return self._inner_touched(node)
            case Join(kind="left"):
                return self._left_touched(node)
            case Join(kind="semi") | Join(kind="anti"):
                return self._semi_touched(node)
            case UnionAll():
                parts = [
                    self.branch(node, number, df)
                    for number, (branch, _) in enumerate(node.branches)
                    if (df := self.touched(branch)) is not None
                ]
                return self.sql.union(parts)
        return self._recomputed(node)

    def _recomputed(self, node: Node) -> Rel:
        """Rows of the touched partitions in both versions, for operators whose rows depend on other rows."""
        keys = self.touched_keys(node, node.part) if node.part else None
        restriction = self.by_columns(keys, node.part, distinct=joins(node)) if keys is not None else None
        both = self.sql.union([self.rows(node, "before", restriction), self.rows(node, "after", restriction)])
        if not isinstance(node, Aggregate):
            return both
        # A group has one row in each version: two equal ones mean that it did not change.
        counted = self.sql.group(both, both.columns, {"_hw_n": "count(*)"})
        return self.sql.keep(self.sql.where(counted, "_hw_n = 1"), both.columns)

    def _inner_touched(self, node: Join) -> Rel:
        parts = []
        if (left := self.touched(node.left)) is not None:
            parts.append(self._pairs(left.few(), self._beside(left, node, "right"), node, "inner"))
        if (right := self.touched(node.right)) is not None:
            parts.append(self._pairs(self._beside(right, node, "left"), right.few(), node, "inner"))
        return self.sql.union(parts)

    def _beside(
        self, rel: Rel, node: Join, side: Literal["left", "right"], needed: Collection[str] | None = None
    ) -> Rel:
        """`everything` of one side of a join, as far as it can match some rows of the other side."""
        return self.everything(node.left if side == "left" else node.right, needed, self.partners(rel, node, side))

    def _left_touched(self, node: Join) -> Rel:
        """Matches, and every left row of theirs without a match: it may have none in one of the versions."""
        parts = []
        if (left := self.touched(node.left)) is not None:
            matches = self._pairs(left.few(), self._beside(left, node, "right"), node, "inner")
            parts += [matches, self._unmatched(left, matches, node)]
        if (right := self.touched(node.right)) is not None:
            matches = self._pairs(self._beside(right, node, "left"), right.few(), node, "inner")
            parts += [matches, self._unmatched(matches, matches, node)]
        return self.sql.union(parts)

    def _unmatched(self, df: Rel, like: Rel, node: Join) -> Rel:
        kinds = self.sql.types(like)
        left = {c: quoted(c) for c in like.columns if c in node.left.columns}
        nulls = {c: f"CAST(NULL AS {kinds[c]})" for c in like.columns if c not in left}
        return self.sql.select(df, {**left, **nulls})

    def _semi_touched(self, node: Join) -> Rel:
        parts = []
        if (left := self.touched(node.left)) is not None:
            parts.append(left)
        if (right := self.touched(node.right)) is not None:
            parts.append(self._pairs(self._beside(right, node, "left"), right.few(), node, "semi"))
        return self.sql.union(parts)

    def everything(self, node: Node, needed: Collection[str] | None = None, within: Restriction | None = None) -> Rel:
        """A superset of the rows of both versions; of the columns at least those needed (None: all).

        `within`: only rows of these keys are wanted.
        """
        match node:
            case Join(kind="left" | "semi" | "anti") if needed is not None and set(needed) <= set(node.left.columns):
                return self.everything(node.left, needed, within)
        if not self.changed(node):
            return self.rows(node, "after", within)
        match node:
            case Scan():
                old = self.sql.where(self._changes_with_old(node), f"{OP} = {OP_DELETE}")
                return self.sql.union([self.rows(node, "after", within), self._scan(node, old)])
            case Project() if not _needs_true_rows(node) and (within is None or not node.generates):
                below = within.mapped(node.exprs) if within is not None else None
                return self._with(self.everything(node.child, within=below), node.exprs)
            case Filter() if not _needs_true_rows(node):
                return self.sql.where(self.everything(node.child, within=within), text_of(node.condition))
            case Join(kind="inner"):
                return self._everything_joined(node, within)
        touched, rows = self.touched(node), self.rows(node, "after", within)
        return rows if touched is None else self.sql.union([rows, touched])

    def _everything_joined(self, node: Join, within: Restriction | None) -> Rel:
        left, right = self._sides(node, within)
        if left is None and right is not None:
            right_rel = self.everything(node.right, within=right)
            return self._pairs(self._beside(right_rel, node, "left"), right_rel, node, "inner")
        left_rel = self.everything(node.left, within=left)
        if right is None and left is not None:
            return self._pairs(left_rel, self._beside(left_rel, node, "right"), node, "inner")
        return self._pairs(left_rel, self.everything(node.right, within=right), node, "inner")

    def touched_keys(self, node: Node, columns: Sequence[str]) -> Rel | None:
        """The values of some columns in touched rows, without making the rows where the keys alone will do."""
        if not self.changed(node):
            return None
        wanted = set(columns)
        match node:
            case Aggregate() if wanted <= set(node.group):
                return self.touched_keys(node.child, columns)
            case Window() if wanted <= set(node.by):
                return self.touched_keys(node.child, columns)
            case Filter() if not _keeps_rows(node.child) or _needs_true_rows(node):
                return self.touched_keys(node.child, columns)
            case Project() if wanted <= set(node.child.columns):
                return self.touched_keys(node.child, columns)
            case Join(kind="left") | Join(kind="semi") | Join(kind="anti") if wanted <= set(node.left.columns):
                return self._left_keys(node, columns)
            case Join(kind="full") if wanted <= set(node.coalesced):
                return self._full_join_keys(node, columns)
            case Join(kind="inner") if (found := self._known_keys(node, columns)) is not None:
                return found
            case SetOp():
                parts = []
                for number, (side, _) in enumerate(operands(node)):
                    if (df := self.touched(side)) is not None:
                        values = self.outputs(node, number, df)
                        parts.append(self.sql.select(df, {c: values[c] for c in columns}))
                return self.sql.union(parts)
        df = self.touched(node)
        return None if df is None else self.sql.keep(df, columns)

    def _known_keys(self, node: Join, columns: Sequence[str]) -> Rel | None:
        """Where one side alone changed, and its rows say what the other side's columns would be: no need to join."""
        for side, other, pairs in (
            (node.left, node.right, [(a, b) for a, b in node.equi]),
            (node.right, node.left, [(b, a) for a, b in node.equi]),
        ):
            if self.changed(other):
                continue
            known: dict[str, str] = {c: quoted(c) for c in side.columns}
            for (own, theirs), same in zip(pairs, node.alike, strict=False):
                if same and isinstance(own, exp.Column) and isinstance(theirs, exp.Column):
                    known[theirs.name] = text_of(own)
            rel = self.touched(side) if set(columns) <= set(known) else None
            if rel is not None:
                return self.sql.select(rel, {c: known[c] for c in columns})
        return None

    def _left_keys(self, node: Join, columns: Sequence[str]) -> Rel:
        """Keys of the left side: of its own changes, and of the partners of the right side's changes."""
        parts = []
        if (left := self.touched_keys(node.left, columns)) is not None:
            parts.append(left)
        if (right := self.touched(node.right)) is not None:
            condition = column_names(node.condition) if node.condition is not None else set()
            needed = {*columns, *(condition & set(node.left.columns))}
            partners = self._pairs(self._beside(right, node, "left", needed), right.few(), node, "semi")
            parts.append(self.sql.keep(partners, columns))
        return self.sql.union(parts)

    def _full_join_keys(self, node: Join, columns: Sequence[str]) -> Rel:
        kinds = {} if all(node.alike) else self.sql.types(self.rows(node))
        parts = []
        for side, position in ((node.left, 0), (node.right, 1)):
            if (df := self.touched(side)) is not None:
                texts = {c: text_of(pair[position]) for c, pair in zip(node.coalesced, node.equi, strict=True)}
                parts.append(
                    self.sql.select(df, {c: f"CAST({texts[c]} AS {kinds[c]})" if kinds else texts[c] for c in columns})
                )
        return self.sql.union(parts)

    def _pairs(self, left: Rel, right: Rel, node: Join, kind: str) -> Rel:
        """Rows of either version that may match: a superset, for what may fail is not asked of pairs that never met."""
        condition = " AND ".join(text_of(exp.paren(part)) for part in total_conjuncts(node))
        return self.sql.join(left, right, condition or None, kind)

    def marked_changes(self, node: Scan, marks: Mapping[str, str]) -> Rel:
        """The changes of an input, old and new rows, with further columns made of `_op`."""
        names = {name: quoted(stored) for name, stored in self._stored(node).items()}
        return self.sql.select(self._changes_with_old(node), {**names, **marks})

    def flagged_changes(self, node: Scan, marks: Mapping[str, str]) -> Rel:
        """The net changes of an input with further columns made of `_op`."""
        names = self._stored(node)
        changes = self.inputs[node.input].changes(self.sql, list(names.values()))
        return self.sql.select(changes, {**{name: quoted(stored) for name, stored in names.items()}, **marks})

    def _changes_with_old(self, node: Scan) -> Rel:
        return self.inputs[node.input].changes_with_old(self.sql, list(self._stored(node).values()))


def _keeps_rows(node: Node) -> bool:
    """Whether the touched rows of a node are had without recomputing partitions, so that a filter on them is cheap."""
    match node:
        case Scan() | UnionAll():
            return True
        case Project() | Filter():
            return _keeps_rows(node.child)
        case Join():
            return node.kind != "full" and _keeps_rows(node.left)
    return False


def _needs_true_rows(node: Node) -> bool:
    """Whether an operator may fail on pairs of rows that only a superset has: old ones joined with new ones."""
    match node:
        case Project():
            return joins(node.child) and any_may_fail(node.exprs.values())
        case Filter():
            return joins(node.child) and may_fail(node.condition)
    return False
