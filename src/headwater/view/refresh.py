"""The text of a view's rows, and of its change out of the changes of its inputs: one SQL statement each.

The strategy comes from `analyse.py`; `spark/view.py` binds the inputs and runs the text.

What a refresh gives: visible columns, `_key`, the plan's hidden columns, `_op` (1: the whole row, 2: `_key` alone), one
row per `_key`, nothing for rows that came out as they were. One exception, for cost: a rowwise refresh does not look at
the stored view, so it says "delete" for every changed row that does not pass the filter, also if it never was in the
view, and "upsert" for every one that does. In an upsert log both are harmless.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlglot import exp
from sqlglot.optimizer.scope import traverse_scope

from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, VIEW_KEY, quoted
from headwater.view.algebraic import AlgebraicRefresh
from headwater.view.analyse import Analysis, by_key
from headwater.view.inputs import InputText
from headwater.view.keys import difference, occurrence_key
from headwater.view.lower import Relation
from headwater.view.plan import PART, Strategy, ViewPlan
from headwater.view.relations import Rel, Sql, text_of
from headwater.view.safety import is_eager
from headwater.view.touched import Evaluator
from headwater.view.tree import Filter, Node, Project, Scan, UnionAll, joins, used_columns

_PASS = "_hw_pass"


@dataclass(frozen=True, slots=True)
class Refresh:
    """One view over its inputs; `plan` is the stored one, `found` what the analysis of its text gives today."""

    sql: Sql
    plan: ViewPlan
    found: Analysis
    inputs: Mapping[str, InputText]

    def initial(self) -> Rel:
        """All rows of the view over its inputs after the epoch: visible columns, `_key`, hidden columns."""
        relation = self.found.relation
        if self.plan.strategy is Strategy.ALGEBRAIC and self.found.algebra is not None and relation is not None:
            return AlgebraicRefresh(self._evaluator(relation), self.plan, relation, self.found.algebra).initial()
        if relation is None:
            keyed = occurrence_key(self.sql, self.query(), "''", self.plan.columns)
            return self.sql.keep(keyed, self.storage)
        evaluator = self._evaluator(relation)
        return self._finished(evaluator.rows(relation.node), relation, evaluator)

    def changes(self, current: InputText) -> Rel:
        """The change of the view whose stored rows are `current`; at least one input has changed."""
        relation = self.found.relation
        if relation is None or self.plan.strategy is Strategy.FULL or self._keyed_otherwise(relation.node):
            stored = current.rows(self.sql, "after", self.storage)
            return difference(self.sql, self.initial(), stored, self.storage)
        evaluator = self._evaluator(relation)
        match self.plan.strategy:
            case Strategy.ROWWISE:
                return self._rowwise(evaluator, relation)
            case Strategy.ALGEBRAIC:
                assert self.found.algebra is not None
                return AlgebraicRefresh(evaluator, self.plan, relation, self.found.algebra).refresh(current)
            case Strategy.AFFECTED_KEYS:
                return self._affected_keys(evaluator, relation, current)

    def _keyed_otherwise(self, root: Node) -> bool:
        """Whether an earlier build took other columns for the key of this view: all its rows are compared then."""
        stored = any(name == PART for name, _ in self.plan.hidden)
        return self.plan.strategy is Strategy.AFFECTED_KEYS and stored == by_key(root)

    @property
    def storage(self) -> list[str]:
        return [*self.plan.columns, VIEW_KEY, *(name for name, _ in self.plan.hidden)]

    def _evaluator(self, relation: Relation) -> Evaluator:
        return Evaluator(self.sql, self.inputs, used_columns(relation.node, [c for _, c in relation.outputs]))

    # -- the query as it was written

    def query(self) -> Rel:
        """The view's query over its inputs' visible columns."""
        tree = self.found.query.tree.copy()
        names = {}
        for name in self.found.query.inputs:
            found = self.inputs[name]
            visible = [c.name for c in found.schema.visible]
            key = [k for k in found.schema.key if k not in visible]
            rows = found.rows(self.sql, "after", [*visible, *key])
            names[name] = self.sql.select(rows, {c: quoted(c) for c in visible}).name
        # LATERAL's scope has the tables of the outer one too: each must be renamed once.
        sources = {id(source): source for scope in traverse_scope(tree) for source in scope.sources.values()}
        for source in sources.values():
            if isinstance(source, exp.Table) and isinstance(source.this, exp.Identifier):
                source.set("this", exp.to_identifier(names[source.name]))
        named = self.sql.add(f"SELECT * FROM ({tree.sql('spark')}) AS q({_list(self.plan.columns)})", self.plan.columns)
        return self.sql.keep(named, self.plan.columns)

    # -- rowwise

    def _rowwise(self, evaluator: Evaluator, relation: Relation) -> Rel:
        if _eager(relation.node):
            return self._rowwise_apart(evaluator, relation)
        rel = self._flagged(evaluator, relation.node)
        outputs = {
            name: f"CASE WHEN {_PASS} THEN {quoted(column)} END"
            for name, (_, column) in zip(self.plan.columns, relation.outputs, strict=True)
        }
        outputs[VIEW_KEY] = evaluator.canonical(rel, relation.node.key)
        outputs[OP] = f"CAST(CASE WHEN {_PASS} THEN {OP_UPSERT} ELSE {OP_DELETE} END AS TINYINT)"
        return self.sql.select(rel, outputs)

    def _flagged(self, evaluator: Evaluator, node: Node) -> Rel:
        """Changed rows with whether they are in the view; nothing is evaluated for a row that is not."""
        match node:
            case Scan():
                return evaluator.flagged_changes(node, {_PASS: f"{OP} = {OP_UPSERT}"})
            case Filter():
                rel = self._flagged(evaluator, node.child)
                verdict = f"CASE WHEN {_PASS} THEN coalesce({text_of(node.condition)}, false) ELSE false END"
                return self.sql.select(rel, {c: verdict if c == _PASS else quoted(c) for c in rel.columns})
            case Project():
                rel = self._flagged(evaluator, node.child)
                exprs = {name: f"CASE WHEN {_PASS} THEN {text_of(e)} END" for name, e in node.exprs.items()}
                return self.sql.extend(rel, exprs)
            case UnionAll():
                parts = []
                for number, (branch, _) in enumerate(node.branches):
                    if evaluator.changed(branch):
                        rel = self._flagged(evaluator, branch)
                        items = evaluator.outputs(node, number, rel)
                        name, part, key = node.identity
                        items |= {name: str(number), part: evaluator.canonical(rel, branch.part)}
                        items |= {key: evaluator.canonical(rel, branch.key), _PASS: _PASS}
                        parts.append(self.sql.select(rel, items))
                return self.sql.union(parts)
        raise AssertionError(f"{type(node).__name__} is not rowwise")

    def _rowwise_apart(self, evaluator: Evaluator, relation: Relation) -> Rel:
        """With Python functions: new rows go through the operators; the changed keys that do not come out are deletes.

        A CASE does not keep Spark from calling a Python function, so rows that are gone must not be there at all.
        """
        rel = self._new_rows(evaluator, relation.node)
        pairs = list(zip(self.plan.columns, (column for _, column in relation.outputs), strict=True))
        outputs = {name: quoted(column) for name, column in pairs}
        key = evaluator.canonical(rel, relation.node.key)
        upserts = self.sql.select(rel, {**outputs, VIEW_KEY: key, OP: f"CAST({OP_UPSERT} AS TINYINT)"})
        there = self.sql.select(upserts, {"_hw_there": VIEW_KEY}).few()
        changed = self._changed_keys(evaluator, relation.node)
        changed = self.sql.select(changed, {VIEW_KEY: evaluator.canonical(changed, relation.node.key)})
        gone = self.sql.join(changed, there, f"{VIEW_KEY} = _hw_there", "anti")
        kinds = self.sql.types(upserts)
        nulls = {name: f"CAST(NULL AS {kinds[name]})" for name, _ in pairs}
        deletes = self.sql.select(gone, {**nulls, VIEW_KEY: VIEW_KEY, OP: f"CAST({OP_DELETE} AS TINYINT)"})
        return self.sql.union([upserts, deletes])

    def _new_rows(self, evaluator: Evaluator, node: Node) -> Rel:
        match node:
            case Scan():
                changes = evaluator.flagged_changes(node, {_PASS: f"{OP} = {OP_UPSERT}"})
                return self.sql.where(changes, _PASS)
            case Filter():
                return self.sql.where(self._new_rows(evaluator, node.child), text_of(node.condition))
            case Project():
                exprs = {name: text_of(e) for name, e in node.exprs.items()}
                return self.sql.extend(self._new_rows(evaluator, node.child), exprs)
            case UnionAll():
                parts = [
                    evaluator.branch(node, number, self._new_rows(evaluator, branch))
                    for number, (branch, _) in enumerate(node.branches)
                    if evaluator.changed(branch)
                ]
                return self.sql.union(parts)
        raise AssertionError(f"{type(node).__name__} is not rowwise")

    def _changed_keys(self, evaluator: Evaluator, node: Node) -> Rel:
        """The key columns of all changed rows, whatever becomes of them."""
        match node:
            case Scan():
                return self.sql.keep(evaluator.flagged_changes(node, {}), node.key)
            case Filter() | Project():
                return self._changed_keys(evaluator, node.child)
            case UnionAll():
                parts = []
                name, _, key = node.identity
                for number, (branch, _) in enumerate(node.branches):
                    if evaluator.changed(branch):
                        rel = self._changed_keys(evaluator, branch)
                        parts.append(
                            self.sql.select(rel, {name: str(number), key: evaluator.canonical(rel, branch.key)})
                        )
                return self.sql.union(parts)
        raise AssertionError(f"{type(node).__name__} is not rowwise")

    # -- affected keys

    def _finished(self, rel: Rel, relation: Relation, evaluator: Evaluator) -> Rel:
        """Storage columns out of the columns of the tree."""
        root = relation.node
        part = evaluator.canonical(rel, root.part)
        outputs = {name: quoted(column) for name, (_, column) in zip(self.plan.columns, relation.outputs, strict=True)}
        if root.unique:
            hidden = {PART: part} if any(name == PART for name, _ in self.plan.hidden) else {}
            key = evaluator.canonical(rel, root.key)
            return self.sql.keep(self.sql.select(rel, {**outputs, VIEW_KEY: key, **hidden}), self.storage)
        keyed = occurrence_key(self.sql, self.sql.select(rel, {**outputs, PART: part}), PART, self.plan.columns)
        return self.sql.keep(keyed, self.storage)

    def _affected_keys(self, evaluator: Evaluator, relation: Relation, current: InputText) -> Rel:
        root = relation.node
        keys = evaluator.touched_keys(root, root.part)
        assert keys is not None, "refresh without a change"
        restriction = evaluator.by_columns(keys, root.part, distinct=joins(root))
        new = self._finished(evaluator.rows(root, "after", restriction), relation, evaluator)
        touched = restriction.keys
        order = list(touched.columns)
        if by_key(root):
            # The key lists the same columns, in its own order.
            order = [touched.columns[root.part.index(name)] for name in root.key]
        texts = self.sql.select(touched, {"_hw_touched": evaluator.canonical(touched, order)}).few()
        if by_key(root):
            old = current.lookup(self.sql, "after", self.storage, texts)
        else:
            old = current.matching(self.sql, "after", self.storage, [PART], texts)
        return difference(self.sql, new, old, self.storage)


def _eager(node: Node) -> bool:
    match node:
        case Filter():
            return is_eager(node.condition) or _eager(node.child)
        case Project():
            return any(is_eager(e) for e in node.exprs.values()) or _eager(node.child)
        case UnionAll():
            return any(_eager(branch) for branch, _ in node.branches)
    return False


def _list(columns: tuple[str, ...]) -> str:
    return ", ".join(map(quoted, columns))
