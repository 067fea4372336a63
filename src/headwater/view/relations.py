"""SQL text in pieces: a refresh is one statement, so Spark parses and analyses it once.

`Sql` collects the pieces of one statement. A `Rel` is the name of a piece with its columns, in order. Equal pieces are
one: Spark then finds that their exchanges are the same and runs them once. A piece that is read once stands where it is
read, as a subquery; only those that are read several times become common table expressions, which cost Spark's analyser
three times as much. Nothing here knows Spark; the only question that text cannot answer, of which type a column is,
goes to the `types_of` that the caller gives.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sqlglot import exp

from headwater.model.schema import quoted

Types = Mapping[str, str]  # column -> DDL type as Spark spells it, lower case
_HOW = {
    "inner": "INNER JOIN",
    "left": "LEFT OUTER JOIN",
    "full": "FULL OUTER JOIN",
    "semi": "LEFT SEMI JOIN",
    "anti": "LEFT ANTI JOIN",
}
# Where a piece is read, and under which alias: never inside quotes, and not as the qualifier of a column.
_READ: Final = re.compile(r"(?<![\w`'.])(hw_r\d+)(?![\w`'.])(?: AS (\w+|`[^`]*`))?")
_COLUMN: Final = re.compile(r"`[^`]*`|\w+")


def text_of(expression: exp.Expr) -> str:
    return expression.sql("spark")


def literal(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


@dataclass(frozen=True, slots=True)
class Rel:
    """One piece; `small` marks rows that may be sent to every task."""

    name: str
    columns: tuple[str, ...]
    small: bool = False

    def few(self) -> Rel:
        return replace(self, small=True)


@dataclass(frozen=True, slots=True)
class Fetch:
    """The rows of an input at a version whose columns `match` have values that are among those of a statement."""

    input: str
    version: str
    columns: tuple[str, ...]
    match: tuple[str, ...]
    values: str


class Sql:
    """The pieces of one statement.

    `one_task` says that all rows are in one partition and shall stay there: nothing is sent anywhere.
    """

    def __init__(self, types_of: Callable[[str], Types], *, broadcast: bool = True, one_task: bool = False) -> None:
        self._types_of = types_of
        self._broadcast = broadcast and not one_task
        self.one_task = one_task
        self._names: dict[str, str] = {}  # text -> name
        self._selects: dict[str, tuple[Rel, Mapping[str, str]]] = {}  # name -> what it selects from what
        self._types: dict[str, Types] = {}
        self.fetches: dict[str, Fetch] = {}

    # -- pieces

    def add(self, text: str, columns: Iterable[str]) -> Rel:
        name = self._names.setdefault(text, f"hw_r{len(self._names)}")
        return Rel(name, tuple(columns))

    def given(self, name: str, columns: Iterable[str]) -> Rel:
        """A relation that the caller binds to this name."""
        return Rel(name, tuple(columns))

    def fetch(self, source: str, version: str, columns: Iterable[str], match: Iterable[str], values: Rel) -> Rel:
        """What the caller binds to the rows of a source that have these values (in the order of `match`)."""
        wanted = Fetch(source, version, tuple(columns), tuple(match), self.text(values))
        known = next((name for name, fetch in self.fetches.items() if fetch == wanted), None)
        name = known or f"{source}_f{len(self.fetches)}"
        self.fetches[name] = wanted
        return Rel(name, wanted.columns)

    def select(self, source: Rel, items: Mapping[str, str], *, hint: str = "") -> Rel:
        """Columns by name with their expressions."""
        chosen = ", ".join(f"{e} AS {quoted(name)}" if e != quoted(name) else e for name, e in items.items())
        rel = self.add(f"SELECT {hint}{chosen} FROM {source.name}", items)
        if not hint:
            self._selects[rel.name] = (source, items)
        return rel

    def keep(self, source: Rel, columns: Sequence[str]) -> Rel:
        if tuple(columns) == source.columns:
            return source
        of, items = self._selects.get(source.name, (source, {}))
        # What is left out must be a mere column: an expression may give more than one row.
        if items and all(_COLUMN.fullmatch(e) for name, e in items.items() if name not in columns):
            return self.select(of, {c: items[c] for c in columns})
        return self.select(source, {c: quoted(c) for c in columns})

    def extend(self, source: Rel, items: Mapping[str, str]) -> Rel:
        """All columns of the source, and more."""
        return self.select(source, {**{c: quoted(c) for c in source.columns}, **items}) if items else source

    def where(self, source: Rel, condition: str) -> Rel:
        return self.add(f"SELECT * FROM {source.name} WHERE {condition}", source.columns)

    def distinct(self, source: Rel) -> Rel:
        return self.add(f"SELECT DISTINCT * FROM {source.name}", source.columns)

    def group(self, source: Rel, keys: Sequence[str], aggregates: Mapping[str, str]) -> Rel:
        items = [*map(quoted, keys), *(f"{e} AS {quoted(name)}" for name, e in aggregates.items())]
        by = f" GROUP BY {', '.join(map(quoted, keys))}" if keys else ""
        return self.add(f"SELECT {', '.join(items)} FROM {source.name}{by}", (*keys, *aggregates))

    def join(self, left: Rel, right: Rel, condition: str | None, kind: str) -> Rel:
        """Joined rows; the columns of both sides differ in name. A small side is broadcast where Spark can do that."""
        hint = ""
        if self._broadcast and right.small and kind != "full":
            hint = "/*+ BROADCAST(b) */ "
        elif self._broadcast and left.small and kind == "inner":
            hint = "/*+ BROADCAST(a) */ "
        elif self.one_task and kind in ("inner", "full"):
            hint = "/*+ COALESCE(1) */ "  # Spark does not see that one partition joined with one is one
        columns = left.columns if kind in ("semi", "anti") else (*left.columns, *right.columns)
        on = f" ON {condition}" if condition is not None else " ON true"
        text = f"SELECT {hint}* FROM {left.name} AS a {_HOW[kind]} {right.name} AS b{on}"
        return self.add(text, columns)

    def union(self, parts: Sequence[Rel]) -> Rel:
        """All rows of the parts, with the columns of the first."""
        first = parts[0]
        if len(parts) == 1:
            return first
        names = ", ".join(map(quoted, first.columns))
        texts = {name: text for text, name in self._names.items()}
        selects = [
            texts[part.name]
            if part.name in self._selects and part.columns == first.columns
            else f"SELECT {names} FROM {part.name}"
            for part in parts
        ]
        text = " UNION ALL ".join(selects)
        if self.one_task:
            text = f"SELECT /*+ COALESCE(1) */ * FROM ({text})"
        return self.add(text, first.columns)

    def set_operation(self, left: Rel, right: Rel, operator: str) -> Rel:
        names = ", ".join(map(quoted, left.columns))
        return self.add(f"SELECT {names} FROM {left.name} {operator} SELECT {names} FROM {right.name}", left.columns)

    # -- the statement

    def text(self, rel: Rel) -> str:
        """The statement whose rows are those of `rel`."""
        texts = {name: text for text, name in self._names.items()}
        reads = {name: [m[1] for m in _READ.finditer(text)] for name, text in texts.items()}
        wanted, times = [rel.name], Counter([rel.name])
        for name in wanted:  # grows while it is read
            for read in reads.get(name, ()):
                times[read] += 1
                if times[read] == 1:
                    wanted.append(read)

        def nested(text: str) -> str:
            return _READ.sub(lambda m: m[0] if times[m[1]] > 1 else f"({nested(texts[m[1]])}) AS {m[2] or m[1]}", text)

        shared = ", ".join(f"{name} AS ({nested(texts[name])})" for name in texts if times[name] > 1)
        columns = ", ".join(map(quoted, rel.columns)) or "*"
        statement = nested(f"SELECT {columns} FROM {rel.name}")
        return f"WITH {shared} {statement}" if shared else statement

    def types(self, rel: Rel) -> Types:
        if rel.name not in self._types:
            self._types[rel.name] = self._types_of(self.text(rel))
        return self._types[rel.name]
