"""Text → statements. Statements that sqlglot knows are left to it; the others are read with `cursor.py`.

`create.py` and `dml.py` have the statements with a grammar of their own, the short ones are here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Final

import sqlglot
from sqlglot import exp
from sqlglot.errors import TokenError
from sqlglot.tokenizer_core import TokenType

from headwater.config import suggestion
from headwater.errors import HeadwaterError, UsageError
from headwater.model.spark_text import SparkText
from headwater.sql import statements as s
from headwater.sql.create import create
from headwater.sql.cursor import Cursor
from headwater.sql.dml import delete, insert, update
from headwater.sql.long_values import sliced
from headwater.sql.reading import DIALECTS, first_line, parse_query, reading, too_deep

_EXPLAIN: Final = re.compile(r"\s*EXPLAIN\s+", re.IGNORECASE)
# `\ud83d\ude00` is one character, either half alone is none: Spark would store a question mark.
_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")
_WHOLE: Final = re.compile(r"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
KINDS: Final = ("SOURCE", "TABLE", "SINK", "VIEW")


def parse(text: str, dialect: str = "spark") -> Iterator[s.Statement]:
    """The statements of a text, one by one: an error in a later one does not hide an earlier one.

    `SET dialect` holds for what follows it.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _no_characters()
    rest = text
    while dialect == "spark" and (found := sliced(rest)) is not None:
        yield _long_insert(rest[: len(rest) - len(found[1])], found[0])
        rest = found[1]
    while rest:
        for piece, after in _pieces(rest, dialect):
            statement = _read(piece, dialect)
            yield statement
            if isinstance(statement, s.SetVariable) and statement.name == "dialect":
                dialect, rest = _known_dialect(statement.value), after
                break
        else:
            return


def _long_insert(text: str, slices: list[str]) -> s.Statement:
    (first,) = parse(slices[0])
    assert isinstance(first, s.Insert)
    return dataclasses.replace(first, text=text.rstrip("; \n"), more=tuple(slices[1:]))


def _no_characters() -> UsageError:
    what = "the text holds bytes or escapes that are no characters"
    return UsageError("SQL_SYNTAX", what, hint="write it in UTF-8")


def _known_dialect(name: str) -> str:
    if name.lower() not in DIALECTS:
        raise UsageError("UNKNOWN_DIALECT", f"there is no dialect {name}", hint=suggestion(name, DIALECTS))
    return name.lower()


def _pieces(text: str, dialect: str) -> Iterator[tuple[str, str]]:
    """The text of each statement, and of all that follows it."""
    try:
        tokens = sqlglot.tokenize(text, read=reading(dialect))
    except TokenError as error:
        raise UsageError("SQL_SYNTAX", "the text cannot be read", detail=first_line(error)) from error
    for token in tokens if _HALF.search(text) else []:
        if token.token_type is TokenType.STRING and _HALF.search(_WHOLE.sub("", text[token.start : token.end + 1])):
            raise _no_characters()
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


def _read(text: str, dialect: str) -> s.Statement:
    try:
        return _statement(text, dialect)
    except HeadwaterError:
        raise
    except RecursionError as error:
        raise too_deep() from error
    except Exception as error:  # that a text is odd sqlglot sometimes finds out by an IndexError or an AttributeError
        raise UsageError("SQL_SYNTAX", "the statement cannot be read", hint="docs/sql.md has the grammar") from error


def _statement(text: str, dialect: str) -> s.Statement:
    # sqlglot's tokenizer keeps what follows EXPLAIN as one piece of text: it is read as a statement of its own.
    if explain := _EXPLAIN.match(text):
        return s.Explain(text, _statement(text[explain.end() :], dialect))
    cursor = Cursor(text, list(sqlglot.tokenize(text, read=reading(dialect))))
    word = cursor.peek()
    reader = _READERS.get(word)
    if reader is not None:
        return reader(cursor, dialect)
    return _query(text, dialect)


def _query(text: str, dialect: str) -> s.Statement:
    tree = parse_query(text, dialect)
    if not isinstance(tree, exp.Query | exp.Values | exp.Subquery):
        raise UsageError(
            "UNSUPPORTED_STATEMENT", f"{text.split()[0].upper()} is not a statement of Headwater", hint="docs/sql.md"
        )
    return s.Query(text, tree)


# -- short statements ----------------------------------------------------------------------------------------------


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
        setting = _value_or_default(c)
        c.end()
        return s.AlterSystem(c.text, name, setting)
    c.take("MATERIALIZED")
    kind = c.next().text.upper().removeprefix("MATERIALIZED ")
    if kind not in KINDS:
        raise c.error("ALTER needs TABLE, MATERIALIZED VIEW, SINK, SOURCE or SYSTEM")
    name = c.identifier()
    if c.peek() in ("ADD", "DROP", "RENAME", "ALTER", "CHANGE", "REPLACE"):
        raise UsageError(
            "UNSUPPORTED_STATEMENT",
            "what a table or view consists of is not changed by ALTER: views and sinks read it",
            hint=f"CREATE TABLE … AS SELECT … FROM {name}; a captured table follows its source",
        )
    c.expect("SET")
    setting = c.identifier().upper()
    if not c.take("="):
        c.expect("TO")
    value = _value_or_default(c)
    c.end()
    return s.AlterJob(c.text, kind.lower(), name, setting, value)


def _value_or_default(c: Cursor) -> str | None:
    value = c.value()
    return None if value.upper() == "DEFAULT" else value


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
    catalogue = c.take("HW_CATALOG", ".")
    name = c.identifier()
    c.end()
    return s.Describe(c.text, name, catalogue)


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
    "CREATE": create,
    "INSERT": insert,
    "UPDATE": update,
    "DELETE": delete,
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
