"""The tables inside a query: which it reads, at which epoch; and the query with placeholders in their place.

`SELECT … FROM orders VERSION AS OF 123` becomes `SELECT … FROM <placeholder> AS orders`; the caller registers a
DataFrame under each placeholder. Names of CTEs are left alone, and so are the functions that `reach.py` allows. Nothing
else is: to Spark a name may be a path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Final

from sqlglot import exp

from headwater.errors import UsageError
from headwater.sql.reach import source_function

_numbers = itertools.count(1)
LONG_CHAIN: Final = 200  # conditions; Spark reads some thousands before its stack overflows


@dataclass(frozen=True, slots=True)
class TableRef:
    """One table of a query. `version` and `timestamp` are SQL text of a constant, `changes` the epoch range.

    `constants` has, by lower-case column name, the literals of which one must be equal to the column in every row of
    the table that can matter to the query: a reader may leave the other rows out.
    """

    placeholder: str
    name: str
    catalogue: bool = False
    version: str | None = None
    timestamp: str | None = None
    changes: tuple[int, int] | None = None
    constants: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)


def bind(query: exp.Expression) -> tuple[str, list[TableRef]]:
    """The query as Spark SQL over placeholders, and what each placeholder stands for."""
    tree = query.copy()
    refs: list[TableRef] = []
    for table in _external_tables(tree):
        ref = _reference(table)
        refs.append(ref)
        alias = table.args.get("alias") or exp.TableAlias(this=exp.to_identifier(ref.name, quoted=True))
        extra = {k: v for k in ("joins", "laterals", "pivots", "sample") if (v := table.args.get(k))}
        table.replace(exp.Table(this=exp.to_identifier(ref.placeholder), alias=alias, **extra))
    _group_long_chains(tree)
    return tree.sql(dialect="spark", comments=False), refs


def _group_long_chains(tree: exp.Expression) -> None:
    """`a AND b AND c AND d` as `(a AND b) AND (c AND d)`: Spark reads a chain of n by n calls inside each other."""
    chains = [n for n in tree.find_all(exp.And, exp.Or) if type(n.parent) is not type(n)]
    for chain in chains:
        parts = list(chain.flatten(unnest=False))
        if len(parts) > LONG_CHAIN:
            chain.replace(_grouped(type(chain), parts))


def _grouped(kind: type[exp.Expr], parts: list[exp.Expr]) -> exp.Expr:
    """In as few levels as possible: the parser looks through a whole parenthesis before it knows what it is."""

    def chained(some: list[exp.Expr]) -> exp.Expr:
        return reduce(lambda left, right: kind(this=left, expression=right), some)

    while len(parts) > LONG_CHAIN:
        groups = [parts[i : i + LONG_CHAIN] for i in range(0, len(parts), LONG_CHAIN)]
        parts = [exp.Paren(this=chained(group)) for group in groups]
    return chained(parts)


def table_names(query: exp.Expression) -> list[str]:
    """The names of the tables that a query reads, each once, in order."""
    return list(dict.fromkeys(_reference(t).name for t in _external_tables(query)))


def _external_tables(tree: exp.Expression) -> list[exp.Table]:
    """Those that are no CTE, wherever they stand: in a subquery of a function's argument, too."""
    return [table for table in tree.find_all(exp.Table) if _is_ours(table)]


def _is_ours(table: exp.Table) -> bool:
    if table.find_ancestor(exp.Hint) is not None:  # /*+ BROADCAST(t) */ names what FROM has
        return False
    if not isinstance(table.this, exp.Identifier):
        return source_function(table.this) == "table_changes"  # the others are Spark's
    return bool(table.db) or table.name.lower() not in _ctes_in_force(table)


def _ctes_in_force(table: exp.Table) -> Iterator[str]:
    """The names, in lower case, that WITH has given where the table stands.

    Inside WITH a name is known to those that come after it, and to itself if it is recursive.
    """
    below: exp.Expr = table
    for above in _ancestors(table):
        if isinstance(above, exp.With):
            names = [cte.alias.lower() for cte in above.expressions]
            own = next((i for i, cte in enumerate(above.expressions) if cte is below), 0)
            yield from names[: own + 1] if above.recursive else names[:own]
        elif (given := above.args.get("with_")) is not None and given is not below:
            yield from (cte.alias.lower() for cte in given.expressions)
        below = above


def _ancestors(node: exp.Expr) -> Iterator[exp.Expr]:
    while node.parent is not None:
        node = node.parent
        yield node


def _reference(table: exp.Table) -> TableRef:
    placeholder = f"hw_bound_{next(_numbers)}"
    if not isinstance(table.this, exp.Identifier):
        return _function(table, placeholder)
    if table.db and table.db.lower() == "hw_catalog":
        if table.args.get("version") is not None:
            raise UsageError("UNSUPPORTED_STATEMENT", "tables of hw_catalog can be read only as they are now")
        return TableRef(placeholder, table.name, catalogue=True)
    if table.db:
        raise UsageError("UNKNOWN_TABLE", f"there is no schema {table.db}", hint="tables have plain names")
    constants = dict(_constants(table))
    version = timestamp = None
    moment = table.args.get("version")
    if moment is not None:
        if moment.expression is None:
            raise UsageError("SQL_SYNTAX", "VERSION AS OF takes an epoch, TIMESTAMP AS OF a moment")
        text = moment.expression.sql(dialect="spark")
        version, timestamp = (text, None) if moment.name.upper() == "VERSION" else (None, text)
    return TableRef(placeholder, table.name, version=version, timestamp=timestamp, constants=constants)


def _function(table: exp.Table, placeholder: str) -> TableRef:
    arguments = table.this.expressions
    try:
        return TableRef(placeholder, arguments[0].name, changes=(int(arguments[1].name), int(arguments[2].name)))
    except (IndexError, ValueError):
        raise UsageError("SQL_SYNTAX", "table_changes takes a table's name and two epochs") from None


def _constants(table: exp.Table) -> Iterator[tuple[str, tuple[int | str, ...]]]:
    """`column = literal` and `column IN (literals)` among the conditions of the SELECT that has the table in its FROM.

    A row of the result needs all of WHERE, whatever kind of join the table is in; so rows of the table that fail one
    of these can be left out before.
    """
    select = table.find_ancestor(exp.Select)
    where = select.args.get("where") if select else None
    if select is None or where is None or not _is_direct(table, select):
        return
    alone = not select.args.get("joins") and not select.args.get("laterals") and not table.args.get("joins")
    for part in where.this.flatten() if isinstance(where.this, exp.And) else [where.this]:
        column, values = _comparison(part.unnest())
        if column is None or column.find_ancestor(exp.Select) is not select:
            continue
        if column.table.lower() == table.alias_or_name.lower() if column.table else alone:
            yield column.name.lower(), values


def _is_direct(table: exp.Table, select: exp.Select) -> bool:
    """Whether the table stands in FROM or JOIN of the SELECT itself."""
    parent = table.parent
    return isinstance(parent, exp.From | exp.Join) and parent.parent is select


def _comparison(part: Any) -> tuple[exp.Column | None, tuple[int | str, ...]]:
    if isinstance(part, exp.EQ):
        sides = (part.left, part.right)
        for column, other in (sides, sides[::-1]):
            if isinstance(column, exp.Column) and (value := _literal(other)) is not None:
                return column, (value,)
    if isinstance(part, exp.In) and isinstance(part.this, exp.Column) and part.expressions:
        found = [_literal(e) for e in part.expressions]
        values = tuple(v for v in found if v is not None)
        if len(values) == len(found):
            return part.this, values
    return None, ()


def _literal(node: Any) -> int | str | None:
    """A plain string or whole number."""
    if isinstance(node, exp.Neg) and isinstance(node.this, exp.Literal) and node.this.is_int:
        return -int(node.this.this)
    if not isinstance(node, exp.Literal):
        return None
    if node.is_string:
        return str(node.this)
    return int(node.this) if node.is_int else None
