"""Text → statements. Statements that sqlglot knows are left to it; the others are read with `cursor.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final, cast

import sqlglot
from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ParseError, SqlglotError, TokenError
from sqlglot.tokenizer_core import TokenType

from headwater.config import suggestion
from headwater.errors import UsageError
from headwater.model.schema import Column
from headwater.model.types import arrow_type
from headwater.sql import statements as s
from headwater.sql.cursor import Cursor

DIALECTS: Final = ("spark", "postgres", "mysql", "risingwave")


class SparkText(Spark):
    """Spark SQL as Spark 4 reads it: in `'it''s'` two quotes are one. sqlglot's own dialect would join two strings."""

    class Tokenizer(Spark.Tokenizer):
        STRING_ESCAPES: ClassVar[list[str]] = ["\\", "'", '"']


def _reading(dialect: str) -> Any:
    return SparkText if dialect == "spark" else dialect


_EXPLAIN: Final = re.compile(r"\s*EXPLAIN\s+", re.IGNORECASE)
KINDS: Final = ("SOURCE", "TABLE", "SINK", "VIEW")


def parse(text: str, dialect: str = "spark") -> Iterator[s.Statement]:
    """The statements of a text, one by one: an error in a later one does not hide an earlier one.

    `SET dialect` holds for what follows it.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(
            "SQL_SYNTAX", "the text holds bytes or escapes that are no characters", hint="write it in UTF-8"
        )
    rest = text
    while rest:
        for piece, after in _pieces(rest, dialect):
            statement = _statement(piece, dialect)
            yield statement
            if isinstance(statement, s.SetVariable) and statement.name == "dialect":
                dialect, rest = _known_dialect(statement.value), after
                break
        else:
            return


def _known_dialect(name: str) -> str:
    if name.lower() not in DIALECTS:
        raise UsageError("UNKNOWN_DIALECT", f"there is no dialect {name}", hint=suggestion(name, DIALECTS))
    return name.lower()


def _pieces(text: str, dialect: str) -> Iterator[tuple[str, str]]:
    """The text of each statement, and of all that follows it."""
    try:
        tokens = sqlglot.tokenize(text, read=_reading(dialect))
    except TokenError as error:
        raise UsageError("SQL_SYNTAX", "the text cannot be read", detail=_first_line(error)) from error
    start = 0
    for i in range(len(tokens) + 1):
        if i == len(tokens) or tokens[i].token_type is TokenType.SEMICOLON:
            if i > start:
                yield text[tokens[start].start : tokens[i - 1].end + 1], text[tokens[i - 1].end + 1 :]
            start = i + 1


def same_definition(one: str, other: str) -> bool:
    """Whether two statements differ in nothing but spaces, comments and the case of plain words."""
    return _words(one) == _words(other)


def _words(text: str) -> list[str]:
    exact = (TokenType.STRING, TokenType.IDENTIFIER)  # 'text' and `quoted names`
    found = sqlglot.tokenize(text, read=SparkText)
    return [
        t.text if t.token_type in exact else t.text.lower() for t in found if t.token_type is not TokenType.SEMICOLON
    ]


def _statement(text: str, dialect: str) -> s.Statement:
    # sqlglot's tokenizer keeps what follows EXPLAIN as one piece of text: it is read as a statement of its own.
    if explain := _EXPLAIN.match(text):
        return s.Explain(text, _statement(text[explain.end() :], dialect))
    cursor = Cursor(text, list(sqlglot.tokenize(text, read=_reading(dialect))))
    word = cursor.peek()
    reader = _READERS.get(word)
    if reader is not None:
        return reader(cursor, dialect)
    return _query(text, dialect)


def _query(text: str, dialect: str) -> s.Statement:
    tree = parse_query(text, dialect)
    if isinstance(tree, exp.Describe):
        return s.Describe(text, tree.this.name)
    if not isinstance(tree, exp.Query | exp.Values | exp.Subquery):
        raise UsageError(
            "UNSUPPORTED_STATEMENT", f"{text.split()[0].upper()} is not a statement of Headwater", hint="docs/sql.md"
        )
    return s.Query(text, tree)


def parse_query(text: str, dialect: str) -> exp.Expression:
    try:
        tree = sqlglot.parse_one(text, read=_reading(dialect))
    except (ParseError, SqlglotError) as error:
        raise UsageError("SQL_SYNTAX", "the statement cannot be read", detail=_first_line(error)) from error
    return cast(exp.Expression, tree)


def _first_line(error: Exception) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()[0][:300]


# -- CREATE --------------------------------------------------------------------------------------------------------


def _create(c: Cursor, dialect: str) -> s.Statement:
    c.expect("CREATE")
    if c.take("OR", "REPLACE"):
        raise UsageError("UNSUPPORTED_STATEMENT", "OR REPLACE is not supported", hint="DROP it first, then CREATE")
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


def _create_function(c: Cursor) -> s.Statement:
    """`CREATE FUNCTION name[(arguments)] RETURNS type LANGUAGE PYTHON AS 'file.py:function'`"""
    quiet = _if_not_exists(c)
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
    return s.CreateFunction(c.text, name, returns, target, quiet)


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
        depth += {"(": 1, ")": -1}.get(c.next().text, 0)
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
    columns, key = _captured_columns(body, dialect)
    return s.CreateTableFrom(c.text, name, columns, key, source, external, options, quiet)


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
    return _checked(columns, key)


def _checked(columns: list[Column], key: list[str]) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    names = [c.name.lower() for c in columns]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise UsageError("DUPLICATE_COLUMN", f"column {twice} is named twice")
    by_name = {c.name.lower(): c.name for c in columns}
    for column in columns:
        if column.name.startswith("_"):
            raise UsageError("RESERVED_NAME", f"column {column.name}: names with a leading _ are Headwater's own")
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
    ddl = str(kind.sql(dialect="spark"))
    try:
        arrow_type(ddl)
    except ValueError:
        raise UsageError("UNKNOWN_TYPE", f"column {name} has the unknown type {ddl}", hint="docs/sql.md") from None
    return ddl


def _captured_columns(body: str, dialect: str) -> tuple[tuple[tuple[str, str | None], ...], tuple[str, ...]]:
    names = _bare_names(body, dialect)
    if names is not None:
        return tuple((name, None) for name in names), ()
    columns, key = _columns(body, dialect)
    return tuple((c.name, c.type) for c in columns), key


def _bare_names(body: str, dialect: str) -> list[str] | None:
    """`a, b, c` without types: they are the source's; None if there is more than names."""
    cursor = Cursor(body, list(sqlglot.tokenize(body, read=dialect)))
    names = [cursor.identifier()]
    while cursor.take(","):
        names.append(cursor.identifier())
    return names if cursor.done else None


# -- DML -----------------------------------------------------------------------------------------------------------


def _insert(c: Cursor, dialect: str) -> s.Statement:
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


def _update(c: Cursor, dialect: str) -> s.Statement:
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


def _delete(c: Cursor, dialect: str) -> s.Statement:
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


# -- the rest ------------------------------------------------------------------------------------------------------


def _drop(c: Cursor, _dialect: str) -> s.Statement:
    c.expect("DROP")
    c.take("MATERIALIZED")
    kind = c.next().text.upper().removeprefix("MATERIALIZED ")
    if kind not in (*KINDS, "FUNCTION"):
        raise c.error("DROP needs SOURCE, TABLE, MATERIALIZED VIEW, FUNCTION or SINK")
    quiet = c.take("IF", "EXISTS")
    name = c.identifier()
    cascade = c.take("CASCADE")
    c.take("RESTRICT")
    c.end()
    return s.Drop(c.text, kind.lower(), name, quiet, cascade)


def _alter(c: Cursor, _dialect: str) -> s.Statement:
    c.expect("ALTER")
    if c.take("SYSTEM"):
        c.expect("SET")
        name = c.identifier().lower()
        if not c.take("="):
            c.expect("TO")
        value = c.value()
        c.end()
        return s.AlterSystem(c.text, name, value)
    c.take("MATERIALIZED")
    kind = c.next().text.upper().removeprefix("MATERIALIZED ")
    if kind not in KINDS:
        raise c.error("ALTER needs TABLE, MATERIALIZED VIEW, SINK, SOURCE or SYSTEM")
    name = c.identifier()
    c.expect("SET")
    setting = c.identifier().upper()
    if not c.take("="):
        c.expect("TO")
    value = c.value()
    c.end()
    return s.AlterJob(c.text, kind.lower(), name, setting, None if value.upper() == "DEFAULT" else value)


def _set(c: Cursor, _dialect: str) -> s.Statement:
    c.expect("SET")
    name = c.identifier().lower()
    if not c.take("="):
        c.expect("TO")
    value = c.value()
    c.end()
    return s.SetVariable(c.text, name, value)


def _simple(c: Cursor, _dialect: str) -> s.Statement:
    verb = c.next().text.upper()
    c.end()
    return s.Simple(c.text, verb)


def _maintain(c: Cursor, _dialect: str) -> s.Statement:
    verb = c.next().text.upper()
    name = c.identifier()
    epoch = 0
    if verb == "REWIND":
        c.expect("TO")
        text = c.value()
        if not text.isdigit():
            raise UsageError("SQL_SYNTAX", "REWIND takes an epoch", hint="REWIND sink TO 123")
        epoch = int(text)
    repair = verb == "VERIFY" and c.take("REPAIR")
    c.end()
    return s.Maintain(c.text, verb, name, epoch, bool(repair))


def _show(c: Cursor, _dialect: str) -> s.Statement:
    c.expect("SHOW")
    # sqlglot's tokenizer keeps what follows SHOW as one token, whose text is right and whose position is not.
    words = " ".join(token.text for token in c.tokens[c.at :])
    return s.Show(c.text, " ".join(words.upper().split()))


def _describe(c: Cursor, _dialect: str) -> s.Statement:
    c.next()
    c.take("TABLE")
    name = c.identifier()
    c.end()
    return s.Describe(c.text, name)


def _cancel(c: Cursor, _dialect: str) -> s.Statement:
    c.expect("CANCEL")
    if not c.take("JOBS"):
        c.expect("JOB")
    ids = []
    while True:
        text = c.value()
        if not text.isdigit():
            raise UsageError("SQL_SYNTAX", "CANCEL JOBS takes job ids", hint="SHOW JOBS lists them")
        ids.append(int(text))
        if not c.take(","):
            break
    c.end()
    return s.CancelJobs(c.text, tuple(ids))


_READERS: Final[dict[str, Callable[[Cursor, str], s.Statement]]] = {
    "CREATE": _create,
    "INSERT": _insert,
    "UPDATE": _update,
    "DELETE": _delete,
    "DROP": _drop,
    "ALTER": _alter,
    "SET": _set,
    "PAUSE": _simple,
    "RESUME": _simple,
    "FLUSH": _simple,
    "WAIT": _simple,
    "RECOVER": _simple,
    "RESYNC": _maintain,
    "VERIFY": _maintain,
    "REWIND": _maintain,
    "REPLAY": _maintain,
    "SHOW": _show,
    "DESCRIBE": _describe,
    "DESC": _describe,
    "CANCEL": _cancel,
}
