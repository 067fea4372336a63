"""The statements that a user can say, as values. `parser.py` makes them, `runtime/commands.py` runs them."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlglot import exp

from headwater.model.schema import Column


@dataclass(frozen=True, slots=True)
class Statement:
    """The base; `text` is the statement as written, without the semicolon."""

    text: str


@dataclass(frozen=True, slots=True)
class CreateSource(Statement):
    name: str
    options: dict[str, str]
    if_not_exists: bool = False


@dataclass(frozen=True, slots=True)
class CreateTable(Statement):
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict)
    if_not_exists: bool = False
    query: exp.Expression | None = None


@dataclass(frozen=True, slots=True)
class CreateTableFrom(Statement):
    """A captured table. `columns` is None for `(*)`, else (name, declared type or None) pairs."""

    name: str
    columns: tuple[tuple[str, str | None], ...] | None
    key: tuple[str, ...]
    source: str
    external: str
    options: dict[str, str] = field(default_factory=dict)
    if_not_exists: bool = False
    not_null: tuple[str, ...] = ()
    """Those of `columns` that are declared so."""


@dataclass(frozen=True, slots=True)
class CreateView(Statement):
    name: str
    query: exp.Expression
    options: dict[str, str] = field(default_factory=dict)
    if_not_exists: bool = False


@dataclass(frozen=True, slots=True)
class CreateFunction(Statement):
    """A Python function; `target` is `file.py:name` or `module:name`."""

    name: str
    returns: str
    target: str
    if_not_exists: bool = False
    or_replace: bool = False


@dataclass(frozen=True, slots=True)
class CreateSink(Statement):
    """Exactly one of `source` (a table or view) and `query` is given."""

    name: str
    source: str | None
    query: exp.Expression | None
    options: dict[str, str] = field(default_factory=dict)
    if_not_exists: bool = False


@dataclass(frozen=True, slots=True)
class Insert(Statement):
    """`more`: the rest of a long list of rows, as texts of INSERT statements of their own (`long_values.py`)."""

    table: str
    columns: tuple[str, ...] | None
    query: exp.Expression
    more: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Update(Statement):
    table: str
    alias: str
    assignments: tuple[tuple[str, exp.Expression], ...]
    where: exp.Expression | None


@dataclass(frozen=True, slots=True)
class Delete(Statement):
    table: str
    alias: str
    where: exp.Expression | None


@dataclass(frozen=True, slots=True)
class Drop(Statement):
    kind: str
    name: str
    if_exists: bool = False
    cascade: bool = False


@dataclass(frozen=True, slots=True)
class AlterJob(Statement):
    """`ALTER TABLE t SET PROPERTY = value`; value None means default."""

    kind: str
    name: str
    property: str
    value: str | None


@dataclass(frozen=True, slots=True)
class AlterSystem(Statement):
    """`ALTER SYSTEM SET name = value`; value None means default."""

    name: str
    value: str | None


@dataclass(frozen=True, slots=True)
class SetVariable(Statement):
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Simple(Statement):
    """PAUSE, RESUME, FLUSH, WAIT, RECOVER."""

    verb: str


@dataclass(frozen=True, slots=True)
class Maintain(Statement):
    """`RESYNC table`, `VERIFY table [REPAIR]`, `REWIND sink TO epoch`, `REPLAY sink`: what the commands send."""

    verb: str
    name: str
    epoch: int = 0
    repair: bool = False


@dataclass(frozen=True, slots=True)
class Show(Statement):
    what: str


@dataclass(frozen=True, slots=True)
class Describe(Statement):
    """Of a table or view, or with `catalogue` of a table of hw_catalog."""

    name: str
    catalogue: bool = False


@dataclass(frozen=True, slots=True)
class CancelJobs(Statement):
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Explain(Statement):
    inner: Statement


@dataclass(frozen=True, slots=True)
class Query(Statement):
    query: exp.Expression
