"""Algebraic refresh: changes are aggregated with their sign and added to the accumulators of the groups they touch.

Nothing but the changes, the other sides of joins and the touched groups' rows is read. Only a group whose minimum or
maximum was removed is computed again from the inputs. `algebra.py` says which queries this holds for.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.errors import DefiniteError
from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, VIEW_KEY, quoted
from headwater.view import exact
from headwater.view.algebra import Accumulator, Algebra
from headwater.view.inputs import InputText
from headwater.view.lower import Relation
from headwater.view.plan import COUNT, ViewPlan
from headwater.view.relations import Rel, Sql, text_of
from headwater.view.touched import Evaluator
from headwater.view.tree import Filter, Join, Node, Project, Scan, UnionAll

_SIGN = "_hw_sign"
_REDO = "_hw_redo"  # the extreme of the group is gone: compute it again
_GONE = "_hw_gone"  # no rows are left in the group


@dataclass(frozen=True, slots=True)
class AlgebraicRefresh:
    """One view's accumulators over one evaluator."""

    evaluator: Evaluator
    plan: ViewPlan
    relation: Relation
    algebra: Algebra

    @property
    def sql(self) -> Sql:
        return self.evaluator.sql

    def initial(self) -> Rel:
        """All groups with their accumulators."""
        return self._finished(self._accumulated(self.evaluator.rows(self.algebra.aggregate.child)))

    def refresh(self, current: InputText) -> Rel:
        merged = self._merged(self._delta(), current)
        kept = self._finished(self.sql.where(merged, f"NOT {_REDO}") if self._extremes else merged, changes=True)
        if not self._extremes:
            return kept
        group = self.algebra.aggregate.group
        lost = self.sql.where(merged, _REDO)
        if group:
            redo = self.evaluator.by_columns(lost, group)
            again = self._accumulated(self.evaluator.rows(self.algebra.aggregate.child, "after", redo))
        else:
            # One group: no key restricts it, so its rows are only read if it must be computed again.
            one = self.sql.select(lost, {"_hw_one": "1"}).few()
            rows = self.sql.join(self.evaluator.rows(self.algebra.aggregate.child), one, None, "semi")
            again = self.sql.join(self._accumulated(rows), one, None, "semi")
        done = self.sql.extend(self._finished(again), {OP: f"CAST({OP_UPSERT} AS TINYINT)"})
        return self.sql.union([kept, done])

    @property
    def _extremes(self) -> list[Accumulator]:
        return [acc for acc in self.algebra.accumulators if acc.kind in ("min", "max")]

    # -- changes with their sign

    def _signed(self, node: Node) -> Rel | None:
        evaluator, sql = self.evaluator, self.sql
        if not evaluator.changed(node):
            return None
        match node:
            case Scan():
                return evaluator.marked_changes(node, {_SIGN: f"CASE WHEN {OP} = {OP_UPSERT} THEN 1 ELSE -1 END"})
            case Project():
                rel = self._signed(node.child)
                exprs = {name: text_of(e) for name, e in node.exprs.items()}
                return None if rel is None else sql.extend(rel, exprs)
            case Filter():
                rel = self._signed(node.child)
                return None if rel is None else sql.where(rel, text_of(node.condition))
            case Join():
                return self._signed_join(node)
            case UnionAll():
                parts = []
                for number, (branch, _) in enumerate(node.branches):
                    if (rel := self._signed(branch)) is not None:
                        parts.append(sql.select(rel, {**evaluator.outputs(node, number, rel), _SIGN: _SIGN}))
                return sql.union(parts)
        raise AssertionError(f"{type(node).__name__} is not linear")

    def _signed_join(self, node: Join) -> Rel:
        """d(A x B) = dA x B after + A before x dB."""
        evaluator, parts = self.evaluator, []
        if (left := self._signed(node.left)) is not None:
            others = evaluator.rows(node.right, "after", evaluator.partners(left, node, "right"))
            parts.append(evaluator.join(left.few(), others, node))
        if (right := self._signed(node.right)) is not None:
            others = evaluator.rows(node.left, "before", evaluator.partners(right, node, "left"))
            parts.append(evaluator.join(others, right.few(), node))
        return self.sql.union(parts)

    # -- accumulators

    def _accumulated(self, rows: Rel) -> Rel:
        """Group columns and hidden accumulators of rows."""
        columns = {COUNT: "count(*)"}
        for acc in self.algebra.accumulators:
            argument = _argument(acc)
            if acc.kind in ("sum", "avg"):
                columns[acc.value] = f"sum({argument})"
            elif acc.kind in ("min", "max"):
                columns[acc.value] = f"{acc.kind}({argument})"
            if acc.kind not in ("min", "max"):
                columns[acc.rows] = f"count({argument})"
        rel = self.sql.group(rows, self.algebra.aggregate.group, columns)
        self._check_types(rel)
        zeros = {acc.value: acc for acc in self.algebra.accumulators if acc.kind in ("sum", "avg")}
        items = {
            c: f"coalesce({quoted(c)}, CAST(0 AS {zeros[c].value_type}))" if c in zeros else quoted(c)
            for c in rel.columns
        }
        return self.sql.select(rel, items) if zeros else rel

    def _check_types(self, rel: Rel) -> None:
        found = self.sql.types(rel)
        for name, ddl in self.plan.hidden:
            kind = ddl.lower().replace(" ", "")
            if found[name] != kind and (kind == "bigint" or kind.startswith("decimal")):
                raise DefiniteError(
                    "VIEW_TYPE_UNEXPECTED",
                    f"the accumulator {name} is {found[name]} in Spark and {kind} in the stored plan",
                    hint="drop the view and create it again",
                )

    def _delta(self) -> Rel:
        signed = self._signed(self.algebra.aggregate.child)
        assert signed is not None, "refresh without a change"
        columns = {f"_hw_d{COUNT}": f"coalesce(sum({_SIGN}), 0)"}
        for acc in self.algebra.accumulators:
            argument = _argument(acc)
            added, removed = (f"CASE WHEN {_SIGN} {sign} 0 THEN {argument} END" for sign in "><")
            if acc.kind in ("sum", "avg"):
                columns[f"_hw_d{acc.value}"] = _difference(acc, f"sum({added})", f"sum({removed})")
            elif acc.kind in ("min", "max"):
                columns[f"_hw_d{acc.value}"] = f"{acc.kind}({added})"
                columns[f"_hw_r{acc.value}"] = f"{acc.kind}({removed})"
            if acc.kind not in ("min", "max"):
                present = f"CASE WHEN {argument} IS NOT NULL THEN {_SIGN} ELSE 0 END"
                columns[f"_hw_d{acc.rows}"] = f"coalesce(sum({present}), 0)"
        group = self.algebra.aggregate.group
        rel = self.sql.group(signed, group, columns)
        return self.sql.extend(rel, {VIEW_KEY: self.evaluator.canonical(rel, group)})

    def _merged(self, delta: Rel, current: InputText) -> Rel:
        """The touched groups with new accumulators, without those that came out as they were."""
        sql, names = self.sql, [name for name, _ in self.plan.hidden]
        if current.tiny:
            found = current.rows(sql, "after", [VIEW_KEY, *names])
        else:
            keys = sql.select(delta, {"_hw_touched": VIEW_KEY}).few()
            found = current.lookup(sql, "after", [VIEW_KEY, *names], keys)
        old = sql.select(found, {"_hw_key": VIEW_KEY, **{f"_hw_c{name}": quoted(name) for name in names}})
        same_key = f"{VIEW_KEY} = _hw_key"
        if sql.one_task and not self.algebra.aggregate.group:
            # Both are a constant, and Spark would join them by a broadcast, a job of its own; this it takes for a key.
            same_key = f"`_hw_d{COUNT}` % 1 = `_hw_c{COUNT}` % 1"
        joined = sql.join(delta, old, same_key, "left")
        new = {name: f"coalesce(`_hw_c{name}`, 0) + `_hw_d{name}`" for name in self._counts()}
        redo = ["false"]
        for acc in self.algebra.accumulators:
            if acc.kind in ("sum", "avg"):
                total = f"coalesce(`_hw_c{acc.value}`, CAST(0 AS {acc.value_type})) + `_hw_d{acc.value}`"
                new[acc.value] = f"CAST({total} AS {acc.value_type})"
            elif acc.kind in ("min", "max"):
                new[acc.value], lost = _extreme(acc)
                redo.append(lost)
        gone = f"{quoted(COUNT)} = 0" if self.algebra.aggregate.group else "false"
        added = sql.extend(joined, new)
        added = sql.extend(added, {_GONE: gone})
        added = sql.extend(added, {_REDO: f"({' OR '.join(redo)}) AND NOT {_GONE}"})
        same = [f"_hw_key IS NOT NULL AND NOT {_REDO}", *(f"{quoted(n)} <=> `_hw_c{n}`" for n in names)]
        return sql.where(added, f"NOT ({' AND '.join(same)}) AND NOT ({_GONE} AND _hw_key IS NULL)")

    def _counts(self) -> list[str]:
        return [COUNT, *(acc.rows for acc in self.algebra.accumulators if acc.kind not in ("min", "max"))]

    # -- from accumulators to the view's rows

    def _finished(self, rel: Rel, *, changes: bool = False) -> Rel:
        """The aggregate columns out of accumulators, the expressions above them, and the storage columns."""
        group = self.algebra.aggregate.group
        # NULL for a group that is gone: an expression such as sum(x) / count(*) must not fail on it.
        there = f"CASE WHEN NOT {_GONE} THEN {{}} END" if changes else "{}"
        rel = self.sql.extend(rel, {acc.column: there.format(_value(acc)) for acc in self.algebra.accumulators})
        for project in reversed(_projects(self.relation.node)):
            rel = self.sql.extend(rel, {name: text_of(e) for name, e in project.exprs.items()})
        outputs = {
            name: there.format(quoted(column))
            for name, (_, column) in zip(self.plan.columns, self.relation.outputs, strict=True)
        }
        outputs[VIEW_KEY] = self.evaluator.canonical(rel, group)
        outputs |= {name: there.format(quoted(name)) for name, _ in self.plan.hidden}
        if changes:
            outputs[OP] = f"CAST(CASE WHEN {_GONE} THEN {OP_DELETE} ELSE {OP_UPSERT} END AS TINYINT)"
        return self.sql.select(rel, outputs)


def _argument(acc: Accumulator) -> str:
    return "1" if acc.argument is None else text_of(acc.argument)


def _difference(acc: Accumulator, added: str, removed: str) -> str:
    """What changes add to a sum. Of integers it may be twice as large as any sum: from 9e18 to -9e18."""
    kind = exact.number(acc.value_type)
    wide = "DECIMAL(20,0)" if kind is not None and kind[0] else acc.value_type
    total = " - ".join(f"coalesce(CAST({part} AS {wide}), CAST(0 AS {wide}))" for part in (added, removed))
    return total if wide != acc.value_type else f"CAST({total} AS {wide})"


def _projects(root: Node) -> list[Project]:
    """The projections above the aggregate, the topmost first."""
    found = []
    while isinstance(root, Project):
        found.append(root)
        root = root.child
    return found


def _value(acc: Accumulator) -> str:
    value, rows = quoted(acc.value), quoted(acc.rows)
    match acc.kind:
        case "count":
            return rows
        case "sum":
            return f"CASE WHEN {rows} > 0 THEN {value} END"
        case "avg":
            kind = exact.number(acc.value_type)
            assert kind is not None, "avg over an exact type"
            mean = f"CAST({value} AS DOUBLE) / {rows}" if kind[0] else _decimal_mean(value, rows, *kind[1:])
            return f"CASE WHEN {rows} > 0 THEN {mean} END"
        case "min" | "max":
            return value


def _decimal_mean(value: str, rows: str, precision: int, scale: int) -> str:
    """sum / count as Spark's avg gives it: DECIMAL(p+4, s+4), rounded half up once, from the exact quotient.

    A division of decimals would round at a scale of its own first. So: with m = 2n and x = 2|S|·10^4 + n (S the sum
    without its point), the rounded quotient is (x - x mod m) / m, which divides without remainder.
    """
    digits = precision - 10 + 4  # the sum of DECIMAL(p, s) has p + 10 digits
    twice = f"CAST(2 * {rows} AS DECIMAL(20,0))"
    factor = f"CAST(2{'0' * (scale + 4)} AS DECIMAL({scale + 5},0))"
    x = f"(CAST(abs({value}) * {factor} AS DECIMAL(38,0)) + CAST({rows} AS DECIMAL(20,0)))"
    quotient = f"CAST(({x} - {x} % {twice}) / {twice} AS DECIMAL({digits},0))"
    unit = f"CAST('0.{'0' * (scale + 3)}1' AS DECIMAL({scale + 4},{scale + 4}))"
    mean = f"CAST({quotient} * {unit} AS DECIMAL({digits},{scale + 4}))"
    return f"CASE WHEN {value} < 0 THEN -{mean} ELSE {mean} END"


def _extreme(acc: Accumulator) -> tuple[str, str]:
    """(the new extreme, whether it must be computed again: it was removed and nothing added reaches it)."""
    old, added, removed = f"`_hw_c{acc.value}`", f"`_hw_d{acc.value}`", f"`_hw_r{acc.value}`"
    function, sign = ("least", "<=") if acc.kind == "min" else ("greatest", ">=")
    lost = f"(coalesce({removed} {sign} {old}, false) AND NOT coalesce({added} {sign} {old}, false))"
    return f"{function}({old}, {added})", lost
