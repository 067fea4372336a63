"""What commands do with the statements of a text: check them, apply a pipeline file, run them one by one.

Apart from `commands.py`, and imported late: the parser takes longer to load than most commands take.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from headwater.cli.client import Session
from headwater.cli.output import print_result
from headwater.errors import UsageError
from headwater.sql import statements as s
from headwater.sql.binding import table_names
from headwater.sql.parser import parse, same_definition

READS: Final = (s.Query, s.Show, s.Describe, s.Explain)
CREATES: Final = (s.CreateSource, s.CreateTable, s.CreateTableFrom, s.CreateView, s.CreateSink, s.CreateFunction)
SHOWN: Final = 80  # characters of a statement


def note(text: str) -> None:
    sys.stderr.write(f"note: {text}\n")


def check_text(text: str) -> None:
    """UsageError for the first statement that cannot be read."""
    for _ in parse(text):
        pass


def apply_file(engine: Any, text: str, say: Callable[[str], None] = note) -> None:
    """Create what is missing; a definition that differs is an error; other statements run once per data directory.

    Queries and waiting are for each run; `runtime/applied.py` has the others. What is skipped is said.
    """
    dialect = ""
    statements = [_Counted(statement, times) for statement, times in _counted(text)]
    there: list[str] = []
    for i, (statement, times) in enumerate(statements):
        if isinstance(statement, s.SetVariable):
            dialect = f"{statement.text};"
        elif isinstance(statement, CREATES):
            if _exists(engine, statement):
                there.append(statement.name)
            elif _dropped_by(engine, statement, statements[i + 1 :]):
                say(f"skipped, a later statement of the file has dropped it: {_shown(statement)}")
            else:
                engine.execute(dialect + statement.text)
        elif isinstance(statement, READS):
            result = engine.execute(dialect + statement.text)[-1]
            print_result({"columns": result.columns, "rows": result.rows}, "table")
        elif isinstance(statement, s.Simple) and statement.verb in ("FLUSH", "WAIT"):
            engine.execute(statement.text)
        elif engine.core.applied.has_run(statement.text, times):
            say(f"skipped, it has run on this data directory before: {_shown(statement)}")
        else:
            engine.call(engine.core.applied.run(statement.text, times, preamble=dialect))
    if there:
        say(f"there already: {', '.join(there)}")


class _Counted(NamedTuple):
    """A statement of a file, and how often its text has stood there by then: twice is meant twice."""

    statement: s.Statement
    times: int


def _counted(text: str) -> Iterator[tuple[s.Statement, int]]:
    seen = Counter[str]()
    for statement in parse(text):
        key = " ".join(statement.text.split())
        seen[key] += 1
        yield statement, seen[key]


def _exists(engine: Any, statement: Any) -> bool:
    """Whether the object is there as it is defined; UsageError if it is there with another definition."""
    if isinstance(statement, s.CreateFunction):
        found: bool = engine.core.functions.has(statement)
        return found
    existing = engine.core.registry.get(statement.name)
    if existing is not None and not same_definition(existing.definition, statement.text):
        raise UsageError(
            "DEFINITION_DIFFERS",
            f"{existing.kind} {existing.name} exists with another definition",
            detail=f"stored: {existing.definition}",
            hint=f"DROP {existing.kind.upper()} {existing.name}, or give the new one another name",
        )
    return existing is not None


def _dropped_by(engine: Any, statement: Any, later: list[_Counted]) -> bool:
    """Whether the file itself drops the object further on, or what it reads with CASCADE, and has done so."""
    names = {statement.name.lower()}
    query = getattr(statement, "query", None)
    inputs = {name.lower() for name in table_names(query)} if query is not None else set()
    inputs |= {str(name).lower() for name in [getattr(statement, "source", None)] if name}
    for other, times in later:
        if isinstance(other, s.Drop) and engine.core.applied.has_run(other.text, times):
            name = other.name.lower()
            if name in names or (other.cascade and name in inputs):
                return True
    return False


def _shown(statement: s.Statement) -> str:
    words = " ".join(statement.text.split())
    return words if len(words) <= SHOWN else words[: SHOWN - 2] + " …"


def run_statements(engine: Session, text: str, form: str) -> None:
    """One by one: results of earlier statements are shown even if a later one fails."""
    dialect = ""
    for statement in parse(text):
        result = engine.run(dialect + statement.text)
        if isinstance(statement, s.SetVariable):
            dialect = f"{statement.text}; "
        elif result is not None:
            print_result(result, form)
