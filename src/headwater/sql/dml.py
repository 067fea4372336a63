"""INSERT, UPDATE and DELETE."""

from __future__ import annotations

from typing import Any, Final

from sqlglot import exp

from headwater.errors import UsageError
from headwater.sql import statements as s
from headwater.sql.cursor import Cursor
from headwater.sql.reading import parse_query


def insert(c: Cursor, dialect: str) -> s.Statement:
    tree = parse_query(c.text, dialect)
    if not isinstance(tree, exp.Insert):
        raise UsageError("UNSUPPORTED_STATEMENT", "only INSERT INTO … VALUES or SELECT is supported")
    _only(tree, "this", "expression")
    target, columns = tree.this, None
    if isinstance(target, exp.Schema):
        columns = tuple(e.name for e in target.expressions)
        target = target.this
    if tree.expression is None:
        raise UsageError("SQL_SYNTAX", "INSERT needs VALUES or a SELECT")
    return s.Insert(c.text, _target(target).name, columns, tree.expression)


def update(c: Cursor, dialect: str) -> s.Statement:
    tree = parse_query(c.text, dialect)
    if not isinstance(tree, exp.Update):
        raise UsageError("UNSUPPORTED_STATEMENT", "UPDATE takes SET and WHERE")
    _only(tree, "this", "expressions", "where")
    pairs = []
    for item in tree.expressions:
        if not isinstance(item, exp.EQ) or not isinstance(item.this, exp.Column):
            raise UsageError("SQL_SYNTAX", "SET takes column = expression")
        pairs.append((item.this.name, item.expression))
    target, where = _target(tree.this), tree.args.get("where")
    return s.Update(c.text, target.name, target.alias_or_name, tuple(pairs), where.this if where else None)


def delete(c: Cursor, dialect: str) -> s.Statement:
    tree = parse_query(c.text, dialect)
    if not isinstance(tree, exp.Delete) or not isinstance(tree.this, exp.Table):
        raise UsageError("SQL_SYNTAX", "DELETE FROM table WHERE condition")
    _only(tree, "this", "where")
    target, where = _target(tree.this), tree.args.get("where")
    return s.Delete(c.text, target.name, target.alias_or_name, where.this if where else None)


def _target(table: Any) -> exp.Table:
    """The table that a statement writes to: a plain name, perhaps with an alias."""
    if not isinstance(table, exp.Table) or not isinstance(table.this, exp.Identifier):
        raise UsageError("SQL_SYNTAX", "a statement writes to a table, by its name")
    if table.db:
        hint = (
            "the tables of hw_catalog are only read" if table.db.lower() == "hw_catalog" else "tables have plain names"
        )
        raise UsageError("UNKNOWN_TABLE", f"there is no table {table.db}.{table.name} to write to", hint=hint)
    _only(table, "this", "alias")
    return table


_CLAUSES: Final = {"conflict": "ON CONFLICT", "order": "ORDER BY", "source": "TABLE", "tables": "JOIN", "joins": "JOIN"}


def _only(tree: exp.Expression, *parts: str) -> None:
    """Refuses what a statement says beyond the parts that we carry out.

    A clause that is read and not obeyed changes other rows than were meant: LIMIT, USING, ON CONFLICT.
    """
    for name, value in tree.args.items():
        if value and name not in parts:
            clause = _CLAUSES.get(name) or name.rstrip("_").replace("_", " ").upper()
            raise UsageError(
                "UNSUPPORTED_STATEMENT",
                f"{clause} is not supported in this statement",
                hint="docs/sql.md has the grammar",
            )
