"""Parsing a view's query, and what no view may contain: unknown names, what no refresh could reproduce, clashes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import sqlglot
from sqlglot import exp
from sqlglot.errors import OptimizeError, ParseError, SqlglotError
from sqlglot.optimizer.scope import traverse_scope

from headwater.errors import UsageError
from headwater.model.schema import Schema, is_reserved, why_reserved
from headwater.model.spark_text import SparkText
from headwater.view.functions import (
    MOMENT_FUNCTIONS,
    MOMENTS,
    NON_DETERMINISTIC,
    SORTING,
    WINDOW_ORDERED,
    WRAPPERS,
    function_name,
    is_aggregate,
)
from headwater.view.qualified import qualified


@dataclass(frozen=True, slots=True)
class Query:
    """A parsed and qualified query: every column has its table, stars are expanded."""

    tree: exp.Query
    inputs: tuple[str, ...]
    columns: tuple[str, ...]


def read(sql: str, inputs: Mapping[str, Schema]) -> Query:
    """Parse, refuse what no view may contain, qualify."""
    written = _parse(sql)
    tables = _tables(written, inputs)
    temporal = {c.name.lower() for name in tables for c in inputs[name].visible if _is_temporal(c.type)}
    for node in written.walk():
        _refuse_non_deterministic(node)
        _refuse_moment(node, temporal)
    _refuse_limit_without_order(written)
    _write_out_windows(written)
    schema: dict[str, object] = {name: {c.name: c.type for c in inputs[name].visible} for name in tables}
    names = _written_names(written)
    try:
        tree = qualified(written, schema)
        if not isinstance(tree, exp.Query):
            raise UsageError("VIEW_NOT_A_QUERY", "a materialized view needs a query")
        _tables(tree, inputs)  # qualifying made their names lower case, quoted ones too
    except OptimizeError as error:
        raise UsageError(
            "VIEW_UNKNOWN_COLUMN",
            "the query names a column that its inputs do not have",
            detail=_first_line(error),
            hint="list the columns with SHOW COLUMNS, and qualify a name that several inputs have",
        ) from None
    except SqlglotError as error:
        raise UsageError("VIEW_NOT_UNDERSTOOD", "the query could not be analysed", detail=_first_line(error)) from None
    _refuse_stars_of_structs(tree)
    columns = _output_names(tree, names, _spellings(written, [inputs[name] for name in tables]))
    _refuse_names(columns)
    return Query(tree, tables, columns)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].replace("\x1b[4m", "").replace("\x1b[0m", "")


def _parse(sql: str) -> exp.Query:
    try:
        parsed = sqlglot.parse_one(sql, read=SparkText)
    except ParseError as error:
        hint = "write `window(…)` in a sub-select and group by its alias" if "window" in sql.lower() else ""
        raise UsageError(
            "VIEW_NOT_UNDERSTOOD", "the query could not be parsed", detail=_first_line(error), hint=hint
        ) from None
    parsed = parsed.unnest()
    for found in list(parsed.find_all(exp.Any)):
        if not isinstance(found.parent, exp.Binary):  # `LIKE ANY (…)` is another thing
            found.replace(exp.LogicalOr(this=found.this.unnest()))
    if not isinstance(parsed, exp.Query):
        raise UsageError("VIEW_NOT_A_QUERY", "a materialized view needs a query", hint="CREATE … AS SELECT …")
    return parsed


def _tables(query: exp.Query, inputs: Mapping[str, Schema]) -> tuple[str, ...]:
    """The inputs that the query reads, in the order of the text; their names are spelt as in `inputs` from here on."""
    by_lower = {name.lower(): name for name in inputs}
    found: dict[str, None] = {}
    try:
        scopes = traverse_scope(query)
    except SqlglotError as error:
        raise UsageError("VIEW_NOT_UNDERSTOOD", "the query could not be analysed", detail=_first_line(error)) from None
    for scope in scopes:
        for source in scope.sources.values():
            if not isinstance(source, exp.Table) or not isinstance(source.this, exp.Identifier):
                continue
            name = by_lower.get(source.name.lower())
            if name is None or source.db:
                raise UsageError(
                    "VIEW_UNKNOWN_TABLE",
                    f"there is no table or view {source.sql('spark')}",
                    hint="SHOW TABLES lists them",
                )
            if source.args.get("version") is not None:
                raise UsageError(
                    "VIEW_OF_THE_PAST",
                    f"a materialized view follows {name} and cannot read it at a fixed epoch",
                    hint="CREATE TABLE … AS SELECT … VERSION AS OF keeps rows of the past",
                )
            if source.name != name and not source.alias:
                source.set("alias", exp.TableAlias(this=exp.to_identifier(source.name)))
            source.set("this", exp.Identifier(this=name, quoted=True))
            found[name] = None
    return tuple(found)


def _ancestors(node: exp.Expr) -> Iterator[exp.Expr]:
    while node.parent is not None:
        node = node.parent
        yield node


def _refuse_non_deterministic(node: exp.Expr) -> None:
    if isinstance(node, exp.TableSample):
        name, reason = "TABLESAMPLE", "its rows differ from run to run"
    elif isinstance(node, (exp.Func, exp.Anonymous)):
        name = function_name(node) or ""
        reason = NON_DETERMINISTIC.get(name, "")
        if name == "unix_timestamp" and not list(node.iter_expressions()):
            reason = NON_DETERMINISTIC["now"]
    else:
        return
    parents = [p for p in _ancestors(node) if not isinstance(p, WRAPPERS)]
    if _states_its_order(node):
        return
    if name in WINDOW_ORDERED and any(isinstance(p, exp.Window) for p in parents[:2]):
        return  # ordered by the window
    if is_aggregate(node) and any(function_name(p) in SORTING for p in parents[:1]):
        return  # sorted afterwards, or the order does not matter
    if reason:
        raise UsageError(
            "NON_DETERMINISTIC",
            f"{name} cannot be used in a materialized view: {reason}",
            hint=_hint(name),
        )


def _states_its_order(node: exp.Expr) -> bool:
    """Whether an aggregate has WITHIN GROUP (listagg's is read as an order of its argument) or says `mode(x, true)`."""
    ordered = isinstance(node.this, exp.Order) or isinstance(node.parent, exp.WithinGroup)
    return ordered or (isinstance(node, exp.Mode) and bool(node.args.get("deterministic")))


def _is_temporal(kind: str) -> bool:
    return kind.upper().startswith(("DATE", "TIMESTAMP"))


def _refuse_moment(node: exp.Expr, temporal: set[str]) -> None:
    """`timestamp 'now'`, `to_date('today')`, `at > 'yesterday'`: the text is cast when the query is planned."""
    if not isinstance(node, exp.Literal) or not node.is_string or node.name.strip().lower() not in MOMENTS:
        return
    parent = node.parent
    if isinstance(parent, exp.Cast):
        cast = _is_temporal(parent.to.sql("spark"))
    elif isinstance(parent, (exp.Binary, exp.Between, exp.In)):
        cast = any(isinstance(c, exp.Column) and c.name.lower() in temporal for c in parent.iter_expressions())
    else:
        cast = isinstance(parent, exp.TimeStrToTime) or (
            parent is not None and function_name(parent) in MOMENT_FUNCTIONS
        )
    if cast:
        raise UsageError(
            "NON_DETERMINISTIC",
            f"the time '{node.name}' cannot be used in a materialized view: {NON_DETERMINISTIC['now']}",
            hint=_hint("now"),
        )


def _hint(name: str) -> str:
    if name in WINDOW_ORDERED:
        return "use min_by or max_by"
    if name in ("collect_list", "array_agg", "collect_set"):
        return f"write sort_array({name}(…))"
    if name in ("listagg", "string_agg"):
        return f"write {name}(…) WITHIN GROUP (ORDER BY …)"
    if name == "mode":
        return "write mode(…, true)"
    return "store the value in a column when the row is written"


def _refuse_limit_without_order(query: exp.Query) -> None:
    for node in query.find_all(exp.Query):
        cut = node.args.get("limit") or node.args.get("offset")
        # LIMIT in EXISTS changes nothing about whether there is a row, unless it is 0.
        if cut is not None and node.args.get("order") is None and not isinstance(node.parent, exp.Exists):
            raise UsageError(
                "VIEW_LIMIT_WITHOUT_ORDER",
                "LIMIT without ORDER BY does not say which rows are meant",
                hint="add ORDER BY with a total order",
            )


def _refuse_stars_of_structs(query: exp.Query) -> None:
    """A table's star is written out by now; how many columns `struct.*` gives, and of what names, is not known here."""
    for select in query.find_all(exp.Select):
        for found in (e for e in select.expressions if isinstance(e, exp.Dot) and e.is_star):
            raise UsageError(
                "VIEW_NOT_UNDERSTOOD",
                f"a view names the fields that it takes of a struct: {found.sql('spark')} does not",
                hint="write struct.field AS field for each",
            )


def _write_out_windows(query: exp.Query) -> None:
    """`OVER w … WINDOW w AS (…)` with the definition in the place of the name, as the operator tree has it."""
    for select in list(query.find_all(exp.Select)):
        named = {window.name.lower(): window for window in select.args.get("windows") or []}
        for window in list(select.find_all(exp.Window)) if named else []:
            found = named.get(window.alias.lower()) if window.parent_select is select else None
            if found is None or found is window or window.args.get("partition_by") or window.args.get("order"):
                continue
            parts = {part: found.args.get(part) for part in ("partition_by", "order", "spec")}
            written = exp.Window(this=window.this, over="OVER", **parts)
            window.replace(written.copy())
        if named and not any(w.alias for w in select.find_all(exp.Window)):
            select.set("windows", None)


def _leftmost(query: exp.Expr) -> exp.Expr:
    query = query.unnest()
    while isinstance(query, exp.SetOperation):
        query = query.left.unnest()
    return query


def _written_names(query: exp.Query) -> list[str] | None:
    """Output names as they were written (qualifying makes them lower case); None if a star is among them."""
    expressions = _leftmost(query).expressions
    if any(isinstance(e, (exp.Star, exp.Column)) and e.is_star for e in expressions):
        return None
    names: list[str] = []
    for e in expressions:
        if isinstance(e, exp.Aliases):  # one function that gives several columns
            names += [alias.name for alias in e.aliases]
        else:
            names.append(e.alias_or_name if isinstance(e, (exp.Alias, exp.Column, exp.Dot)) else "")
    return names


def _spellings(written: exp.Query, inputs: list[Schema]) -> dict[str, str]:
    """How the columns that a star stands for are spelt, by their names in lower case, as qualifying makes them."""
    columns = [c.name for schema in inputs for c in schema.visible]
    aliases = [e.alias for e in written.find_all(exp.Alias)]
    return {name.lower(): name for name in [*reversed(columns), *aliases]}


def _output_names(tree: exp.Query, written: list[str] | None, spellings: Mapping[str, str]) -> tuple[str, ...]:
    expressions = [
        part for e in _leftmost(tree).expressions for part in (e.aliases if isinstance(e, exp.Aliases) else [e])
    ]
    names = []
    for i, expr in enumerate(expressions):
        name = expr.alias_or_name
        if written is not None and len(written) == len(expressions) and written[i]:
            name = written[i]
        elif name in spellings:
            name = spellings[name]
        elif name.startswith("_col_") or not name.isidentifier():
            name = _default_name(expr.unalias(), i)
        names.append(name)
    return tuple(names)


def _default_name(expr: exp.Expr, position: int) -> str:
    """The name of an expression without an alias: its function, as in Postgres, else its position."""
    if isinstance(expr, exp.Window):
        expr = expr.this
    name = function_name(expr)
    return name if name and name.isidentifier() else f"column{position + 1}"


def _refuse_names(columns: tuple[str, ...]) -> None:
    seen: set[str] = set()
    for name in columns:
        if is_reserved(name):
            raise UsageError(
                "VIEW_COLUMN_RESERVED",
                why_reserved(name),
                hint=f"rename it: … AS {name.lstrip('_') or 'column1'}",
            )
        if name.lower() in seen:
            raise UsageError(
                "VIEW_DUPLICATE_COLUMN",
                f"the query has two columns named {name}",
                hint="give one of them another name with AS",
            )
        seen.add(name.lower())
