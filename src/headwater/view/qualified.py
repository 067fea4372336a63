"""A view's query with every column's table written out, meaning what it means to Spark. `checks.py` has the refusals.

sqlglot does the most of it. Three things it does for databases in general, and not as Spark does them:

    USING    the column of several joins is the left side's in an inner or left join, the right side's in a right join,
             and whichever there is in a full one; sqlglot joins each further table with the first one's column
    semi     the right side of a semi join has no name for it outside of FROM
    fields   `struct(x AS Total)` names a field of the value, not a column: its case is part of the data

And the names of the inputs' columns are names, whatever characters they have: sqlglot would read them as SQL, so that
`${env:X}` became `env`, and `@v` another column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sqlglot import exp
from sqlglot.optimizer.qualify import qualify
from sqlglot.schema import MappingSchema

from headwater.view.tree import conjuncts

_WRITTEN: Final = "headwater_written"  # a COALESCE of the user's, unlike those that stand for a column of USING
_USING: Final = "headwater_using"
_AS_IT_IS: Final = "case_sensitive"  # what sqlglot itself knows


def qualified(query: exp.Query, schema: Mapping[str, object]) -> exp.Expr:
    """A copy of the query, qualified; sqlglot's errors for names that cannot be resolved."""
    tree = query.copy()
    _name_apart(tree, {str(c).lower() for columns in schema.values() if isinstance(columns, dict) for c in columns})
    for node in list(tree.walk()):
        match node:
            case exp.PropertyEQ() if isinstance(node.parent, exp.Struct):
                node.this.meta[_AS_IT_IS] = True
            case exp.ColumnDef() if isinstance(node.parent, exp.DataType):
                node.this.meta[_AS_IT_IS] = True
            case exp.Coalesce():
                node.meta[_WRITTEN] = True
            case exp.Join() if node.args.get("using") or node.method == "NATURAL":
                node.meta[_USING] = True
    found = qualify(tree, schema=_as_they_are(schema), dialect="spark")
    for select in found.find_all(exp.Select):
        _join_by_merged_columns(select)
    return found


def _as_they_are(schema: Mapping[str, object]) -> MappingSchema:
    """The inputs for sqlglot, with their names in lower case, as it makes those of the query."""
    tables: dict[str, object] = {
        table.lower(): {str(name).lower(): kind for name, kind in columns.items()}
        for table, columns in schema.items()
        if isinstance(columns, dict)
    }
    return MappingSchema(tables, dialect="spark", normalize=False)


def _name_apart(tree: exp.Query, columns: set[str]) -> None:
    """The right side of a semi join gets a name that no column has: `c.k` would be read as a field of a column c."""
    for number, join in enumerate(tree.find_all(exp.Join)):
        name = join.this.alias_or_name.lower()
        if join.kind not in ("SEMI", "ANTI") or name not in columns:
            continue
        join.this.set("alias", exp.TableAlias(this=exp.to_identifier(f"hw_semi_{number}")))
        on = join.args.get("on")
        for column in on.find_all(exp.Column) if on is not None else []:
            if column.table.lower() == name:
                column.set("table", exp.to_identifier(join.this.alias))


def _join_by_merged_columns(select: exp.Select) -> None:
    joins = [j for j in select.args.get("joins") or [] if j.meta.get(_USING) and j.args.get("on") is not None]
    merged: dict[str, exp.Expr] = {}
    conditions: list[tuple[exp.Join, exp.Expr]] = []
    for join in joins:
        parts = []
        for part in conjuncts(join.args["on"]):
            right = part.expression
            left = merged.get(right.name, part.this)
            parts.append(exp.EQ(this=left.copy(), expression=right.copy()))
            merged[right.name] = _merged(left, right, join.side)
        conditions.append((join, exp.and_(*parts)))
    for found in [c for c in select.find_all(exp.Coalesce) if _stands_for(c, select, merged)] if joins else []:
        found.replace(merged[found.this.name].copy())
    for join, condition in conditions:
        join.set("on", condition)


def _merged(left: exp.Expr, right: exp.Expr, side: str) -> exp.Expr:
    match side.upper():
        case "RIGHT":
            return right
        case "FULL":
            return exp.Coalesce(this=left.copy(), expressions=[right.copy()])
    return left


def _stands_for(found: exp.Coalesce, select: exp.Select, merged: Mapping[str, exp.Expr]) -> bool:
    """Whether sqlglot has put this COALESCE in the place of a column of USING."""
    values = [found.this, *found.expressions]
    names = {value.name for value in values if isinstance(value, exp.Column)}
    ours = not found.meta.get(_WRITTEN) and found.parent_select is select
    return ours and len(names) == 1 and names <= set(merged) and all(isinstance(v, exp.Column) for v in values)
