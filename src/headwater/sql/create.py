"""CREATE SOURCE, TABLE, MATERIALIZED VIEW, SINK and FUNCTION, with columns and keys."""

from __future__ import annotations

import re
from typing import Final

import sqlglot
from sqlglot import exp

from headwater.errors import UsageError
from headwater.model.schema import Column, is_reserved, why_reserved
from headwater.sql import statements as s
from headwater.sql.cursor import Cursor, nesting
from headwater.sql.reading import parse_query

_LENGTHS: Final = re.compile(r"\b(?:VARCHAR|CHAR)\(\s*\d+\s*\)", re.IGNORECASE)


def create(c: Cursor, dialect: str) -> s.Statement:
    c.expect("CREATE")
    if c.take("OR", "REPLACE"):
        if not c.take("FUNCTION"):
            what = "OR REPLACE is only for functions"
            raise UsageError("UNSUPPORTED_STATEMENT", what, hint="DROP it first, then CREATE")
        return _create_function(c, replace=True)
    if c.take("SOURCE"):
        return _create_source(c)
    if c.take("SINK"):
        return _create_sink(c, dialect)
    if c.take("MATERIALIZED"):
        c.expect("VIEW")
        return _create_view(c, dialect)
    if c.take("MATERIALIZED VIEW"):
        return _create_view(c, dialect)
    if c.take("TABLE"):
        return _create_table(c, dialect)
    if c.take("FUNCTION"):
        return _create_function(c)
    raise c.error("CREATE needs SOURCE, TABLE, MATERIALIZED VIEW, FUNCTION or SINK")


def _if_not_exists(c: Cursor) -> bool:
    return c.take("IF", "NOT", "EXISTS")


def _create_source(c: Cursor) -> s.Statement:
    quiet = _if_not_exists(c)
    name = c.identifier()
    c.expect("WITH")
    options = c.options()
    c.end()
    return s.CreateSource(c.text, name, options, quiet)


def _create_function(c: Cursor, *, replace: bool = False) -> s.Statement:
    """`CREATE [OR REPLACE] FUNCTION name[(arguments)] RETURNS type LANGUAGE PYTHON AS 'file.py:function'`"""
    quiet = not replace and _if_not_exists(c)
    name = c.identifier()
    if c.peek() == "(":
        c.parenthesised()
    c.expect("RETURNS")
    start = c.at
    while not c.done and c.peek() != "LANGUAGE":
        c.next()
    if c.at == start or c.done:
        raise c.error("expected a type and LANGUAGE PYTHON")
    returns = c.text[c.tokens[start].start : c.tokens[c.at - 1].end + 1]
    c.expect("LANGUAGE", "PYTHON")
    c.expect("AS")
    target = c.string()
    c.end()
    return s.CreateFunction(c.text, name, returns, target, quiet, replace)


def _create_sink(c: Cursor, dialect: str) -> s.Statement:
    quiet = _if_not_exists(c)
    name = c.identifier()
    source, query = None, None
    if c.take("FROM"):
        source = c.identifier()
    else:
        c.expect("AS")
        query = parse_query(_text_before_with(c), dialect)
    options = c.options() if c.take("WITH") else {}
    if c.take("FORMAT"):
        options.setdefault("format", c.next().text.lower())
        if c.take("ENCODE"):
            options.setdefault("encode", c.next().text.lower())
    c.end()
    return s.CreateSink(c.text, name, source, query, options, quiet)


def _text_before_with(c: Cursor) -> str:
    """The text up to a top-level `WITH (` (a CTE's WITH is followed by a name), which the cursor is left at."""
    start, depth = c.at, 0
    while not c.done:
        if depth == 0 and c.peek() == "WITH" and c.peek(1) == "(":
            break
        depth += nesting(c.next())
    if c.at == start:
        raise c.error("expected a query")
    return c.text[c.tokens[start].start : c.tokens[c.at - 1].end + 1]


def _create_view(c: Cursor, dialect: str) -> s.Statement:
    quiet = _if_not_exists(c)
    name = c.identifier()
    options = c.options() if c.peek() == "WITH" and c.peek(1) == "(" and c.take("WITH") else {}
    c.expect("AS")
    query = parse_query(c.rest(), dialect)
    if not isinstance(query, exp.Query):
        raise UsageError("SQL_SYNTAX", "a view needs a SELECT after AS")
    return s.CreateView(c.text, name, query, options, quiet)


def _create_table(c: Cursor, dialect: str) -> s.Statement:
    quiet = _if_not_exists(c)
    name = c.identifier()
    if c.take("AS"):
        return s.CreateTable(c.text, name, (), (), {}, quiet, parse_query(c.rest(), dialect))
    star = c.peek() == "(" and c.peek(1) == "*" and c.peek(2) == ")"
    body = c.parenthesised()
    if c.take("FROM"):
        return _create_table_from(c, dialect, name, None if star else body, quiet)
    options = c.options() if c.take("WITH") else {}
    c.end()
    columns, key = _columns(body, dialect)
    return s.CreateTable(c.text, name, columns, key, options, quiet)


def _create_table_from(c: Cursor, dialect: str, name: str, body: str | None, quiet: bool) -> s.Statement:
    source = c.identifier()
    c.expect("TABLE")
    external = c.string()
    options = c.options() if c.take("WITH") else {}
    c.end()
    if body is None:
        return s.CreateTableFrom(c.text, name, None, (), source, external, options, quiet)
    columns, key, not_null = _captured_columns(body, dialect)
    return s.CreateTableFrom(c.text, name, columns, key, source, external, options, quiet, not_null)


def _column_definitions(body: str, dialect: str) -> exp.Schema:
    tree = parse_query(f"CREATE TABLE x ({body})", dialect)
    schema = tree.this
    if not isinstance(tree, exp.Create) or not isinstance(schema, exp.Schema):
        raise UsageError("SQL_SYNTAX", "the column list cannot be read")
    return schema


def _columns(body: str, dialect: str) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    columns: list[Column] = []
    key: list[str] = []
    for item in _column_definitions(body, dialect).expressions:
        if isinstance(item, exp.ColumnDef):
            column, is_key = _column(item)
            columns.append(column)
            named = [column.name] if is_key else []
        elif isinstance(item, exp.PrimaryKey):
            named = [e.name for e in item.expressions]
        else:
            raise UsageError("UNSUPPORTED_COLUMN", f"{item.sql(dialect='spark')} is not supported in a column list")
        if key and named:
            raise UsageError("SQL_SYNTAX", "a table has one primary key", hint="PRIMARY KEY (a, b) names several")
        key = key or named
    return checked(columns, key)


def checked(columns: list[Column], key: list[str]) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    """The columns and the key of a table; UsageError for names that it cannot have and keys that cannot be one."""
    names = [c.name.lower() for c in columns]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise UsageError("DUPLICATE_COLUMN", f"column {twice} is named twice")
    by_name = {c.name.lower(): c.name for c in columns}
    if "" in by_name:
        raise UsageError("SQL_SYNTAX", "a column's name cannot be empty")
    for column in columns:
        if is_reserved(column.name):
            raise UsageError(
                "RESERVED_NAME", why_reserved(column.name), hint="give it another name; docs/sql.md has ours"
            )
    missing = [k for k in key if k.lower() not in by_name]
    if missing:
        raise UsageError("UNKNOWN_COLUMN", f"primary key column {missing[0]} is not among the columns")
    actual = tuple(by_name[k.lower()] for k in key)
    if len(set(actual)) < len(actual):
        raise UsageError("DUPLICATE_COLUMN", "the primary key names a column twice")
    columns = [Column(c.name, c.type, c.nullable and c.name not in actual) for c in columns]
    for name in actual:
        kind = next(c.type for c in columns if c.name == name)
        if kind.upper().startswith(("ARRAY", "MAP", "STRUCT")):
            raise UsageError("KEY_TYPE", f"column {name} of type {kind} cannot be part of a primary key")
    return tuple(columns), actual


def _column(item: exp.ColumnDef) -> tuple[Column, bool]:
    if item.kind is None:
        raise UsageError("SQL_SYNTAX", f"column {item.name} has no type")
    nullable, is_key = True, False
    for constraint in item.constraints:
        kind = constraint.kind
        if isinstance(kind, exp.PrimaryKeyColumnConstraint):
            is_key = True
        elif isinstance(kind, exp.NotNullColumnConstraint):
            nullable = bool(kind.args.get("allow_null"))
        elif not isinstance(kind, exp.CommentColumnConstraint):
            raise UsageError("UNSUPPORTED_COLUMN", f"column {item.name}: {constraint.sql()} is not supported")
    return Column(item.name, _type(item.name, item.kind), nullable), is_key


def _type(name: str, kind: exp.DataType) -> str:
    # Spark has lengths only for tables of its own catalogue: everywhere else a text is a STRING.
    ddl = _LENGTHS.sub("STRING", str(kind.sql(dialect="spark")))
    check_type(name, ddl)
    return ddl


def check_type(name: str, ddl: str) -> None:
    """Refuses a type that a table cannot store."""
    from headwater.model.types import arrow_type  # late: commands that only send statements on need no Arrow

    try:
        arrow_type(ddl)
    except ValueError:
        raise UsageError("UNKNOWN_TYPE", f"column {name} has the unknown type {ddl}", hint="docs/sql.md") from None


def _captured_columns(
    body: str, dialect: str
) -> tuple[tuple[tuple[str, str | None], ...], tuple[str, ...], tuple[str, ...]]:
    names = _bare_names(body, dialect)
    if names is not None:
        return tuple((name, None) for name in names), (), ()
    columns, key = _columns(body, dialect)
    return tuple((c.name, c.type) for c in columns), key, tuple(c.name for c in columns if not c.nullable)


def _bare_names(body: str, dialect: str) -> list[str] | None:
    """`a, b, c` without types: they are the source's; None if there is more than names."""
    cursor = Cursor(body, list(sqlglot.tokenize(body, read=dialect)))
    names = [cursor.identifier()]
    while cursor.take(","):
        names.append(cursor.identifier())
    return names if cursor.done else None
