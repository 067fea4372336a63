"""What commands do with the statements of a text: check them, apply a pipeline file, run them one by one.

Apart from `commands.py`, and imported late: the parser takes longer to load than most commands take.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from headwater.cli.client import Session
from headwater.cli.output import print_result
from headwater.errors import UsageError
from headwater.sql import statements as s
from headwater.sql.parser import parse, same_definition

READS: Final = (s.Query, s.Show, s.Describe, s.Explain)
CREATES: Final = (s.CreateSource, s.CreateTable, s.CreateTableFrom, s.CreateView, s.CreateSink)


def check_text(text: str) -> None:
    """UsageError for the first statement that cannot be read."""
    for _ in parse(text):
        pass


def apply_file(engine: Any, text: str) -> None:
    """Create what is new; a definition that differs is an error; other statements run once per data directory.

    Queries and waiting are for each run; `runtime/applied.py` has the others.
    """
    dialect, seen = "", Counter[str]()
    for statement in parse(text):
        if isinstance(statement, s.SetVariable):
            dialect = f"{statement.text};"
            continue
        name = getattr(statement, "name", None) if isinstance(statement, CREATES) else None
        existing = engine.core.registry.get(name) if name else None
        if existing is not None:
            if not same_definition(existing.definition, statement.text):
                raise UsageError(
                    "DEFINITION_DIFFERS",
                    f"{existing.kind} {existing.name} exists with another definition",
                    detail=f"stored: {existing.definition}",
                    hint=f"DROP {existing.kind.upper()} {existing.name}, or give the new one another name",
                )
            continue
        if isinstance(statement, READS):
            result = engine.execute(dialect + statement.text)[-1]
            print_result({"columns": result.columns, "rows": result.rows}, "table")
        elif isinstance(statement, s.Simple) and statement.verb in ("FLUSH", "WAIT"):
            engine.execute(statement.text)
        else:
            key = " ".join(statement.text.split())
            seen[key] += 1  # the same statement twice in a file is meant twice
            applied = engine.core.applied
            if not applied.has_run(statement.text, seen[key]):
                engine.call(applied.run(statement.text, seen[key], preamble=dialect))


def run_statements(engine: Session, text: str, form: str) -> None:
    """One by one: results of earlier statements are shown even if a later one fails."""
    dialect = ""
    for statement in parse(text):
        result = engine.run(dialect + statement.text)
        if isinstance(statement, s.SetVariable):
            dialect = f"{statement.text}; "
        elif result is not None:
            print_result(result, form)
