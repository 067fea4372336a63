"""What `CREATE TABLE … FROM` makes of the source's description: schema, column plans, options, all checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from headwater.config import suggestion
from headwater.connectors.postgres.catalogue import TableInfo, describe, split_name
from headwater.connectors.postgres.check import readable
from headwater.connectors.postgres.client import SCHEMA_CHANGES, PostgresConfig, connect
from headwater.connectors.postgres.slots import streamed_columns
from headwater.connectors.postgres.types import NUMERIC_OID, ColumnPlan, TypeOptions, column_plan
from headwater.errors import UsageError
from headwater.model.schema import Schema, is_reserved, why_reserved
from headwater.runtime.shape import TableShape, sent_columns, shape_of
from headwater.sql import statements as s

OPTIONS: Final[dict[str, str]] = {
    "snapshot": "bool",
    "backfill.parallelism": "number",
    "backfill.num_rows_per_split": "number",
    "backfill.rate_limit": "number",
    "backfill.order": "order",
    "snapshot.batch_size": "number",
    "numeric.mode": "type",
    "arrays": "type",
    "schema.change.behavior": "policy",
}
MAX_PARALLELISM: Final = 256
PHYSICAL: Final = "physical"  # as the rows lie in the table's files, and not by key
ORDERS: Final = ("key", PHYSICAL)
CHOICES: Final[dict[str, tuple[str, ...]]] = {"policy": tuple(SCHEMA_CHANGES), "order": ORDERS}
# A rate of 0 pauses; a parallelism of 0 is the single cursor (v1).
MAY_BE_ZERO: Final = frozenset({"backfill.rate_limit", "backfill.parallelism"})


@dataclass(frozen=True, slots=True)
class TableDefinition:
    """A table of the source as it will be captured."""

    info: TableInfo
    shape: TableShape
    snapshot: bool
    settings: dict[str, Any]
    type_options: dict[str, str]
    notice: str = ""

    @property
    def schema(self) -> Schema:
        return self.shape.schema


def describe_table(config: PostgresConfig, statement: s.CreateTableFrom) -> TableDefinition:
    """Ask the source and check the statement against it; UsageError says what does not fit."""
    settings, snapshot = _settings(statement.options)
    type_options = {k: v for k, v in statement.options.items() if OPTIONS.get(k) == "type"}
    schema_name, name = split_name(statement.external, config.schema)
    with connect(config) as conn:
        info = describe(conn, schema_name, name)
        streamed = streamed_columns(conn, config.publication, info)
        if snapshot:
            _check_readable(conn, config, info)
    sent, not_sent = sent_columns(info, streamed)
    wanted = _wanted(info, statement, sent)
    if not wanted:
        raise UsageError("SOURCE_NOT_A_TABLE", f"{info.qualified} has no columns")
    missing = [k for k in info.key if k not in wanted]
    if missing:
        raise UsageError("KEY_COLUMN_LEFT_OUT", f"the key column {missing[0]} must be among the columns")
    star = statement.columns is None
    shape = shape_of(info, plans_of(info, wanted, type_options), not_sent if star else (), star=star)
    _check_types(shape.plans, statement)
    _check_not_null(info, shape.plans, statement)
    _check_names(shape.schema)
    notice = f"left out, because the source does not send them: {', '.join(not_sent)}" if star and not_sent else ""
    return TableDefinition(info, shape, snapshot, settings, type_options, notice)


def _check_readable(conn: Any, config: PostgresConfig, info: TableInfo) -> None:
    for finding in readable(conn, config, info):
        if not finding.ok:
            raise UsageError("SOURCE_PERMISSION", finding.what, hint=f"run on the source: {finding.sql_to_fix}")


def _check_names(schema: Schema) -> None:
    """What a source may have and we cannot: our own names, names that differ in case alone, a key of arrays."""
    seen: dict[str, str] = {}
    for column in schema.visible:
        other = seen.setdefault(column.name.lower(), column.name)
        if other != column.name:
            raise UsageError(
                "DUPLICATE_COLUMN",
                f"columns {other} and {column.name} have the same name here: upper and lower case do not count",
                hint="list the columns with one of them only, or rename one on the source",
            )
        if is_reserved(column.name):
            raise UsageError(
                "RESERVED_NAME",
                why_reserved(column.name),
                hint="list the other columns, or rename it on the source",
            )
    for column in schema.key_columns:
        if column.type.upper().startswith("ARRAY"):
            raise UsageError(
                "KEY_TYPE",
                f"column {column.name} of type {column.type} cannot be part of a primary key",
                hint="WITH (arrays = 'string') captures arrays as their text",
            )


def plans_of(info: TableInfo, names: list[str], type_options: dict[str, str]) -> tuple[ColumnPlan, ...]:
    options = TypeOptions.of(type_options)
    return tuple(column_plan(info.column(n), options) for n in names)


def with_usable_order(info: TableInfo, plans: tuple[ColumnPlan, ...], settings: dict[str, Any]) -> TableInfo:
    """A key whose values we hold as text in another order than the source's cannot be cut into ranges; others are not
    if the user wants it so."""
    if settings.get("backfill_order") == PHYSICAL:
        return replace(info, ordered_key=False)
    by_name = {p.name: p for p in plans}
    for name in info.key:
        column = info.column(name)
        while column.base is not None:
            column = column.base
        if by_name[name].ddl_type == "STRING" and column.type_oid == NUMERIC_OID:
            return replace(info, ordered_key=False)
    return info


def _settings(options: dict[str, str]) -> tuple[dict[str, Any], bool]:
    settings: dict[str, Any] = {}
    for name, text in options.items():
        kind = OPTIONS.get(name)
        if kind is None:
            raise UsageError("UNKNOWN_OPTION", f"a captured table has no option {name}", hint=suggestion(name, OPTIONS))
        if kind == "number":
            least = 0 if name in MAY_BE_ZERO else 1
            if not text.isdecimal() or int(text) < least:
                what = f"option {name} takes a whole number from {least} on"
                raise UsageError("OPTION_VALUE", what, hint=f"{name}='{4 if 'parallelism' in name else 10_000}'")
            settings[name.replace(".", "_")] = int(text)
        if kind in CHOICES:
            if text not in CHOICES[kind]:
                raise UsageError(
                    "OPTION_VALUE", f"option {name} has no value {text}", hint=suggestion(text, CHOICES[kind])
                )
            settings[name.replace(".", "_")] = text
    if settings.get("backfill_order") == PHYSICAL and settings.get("backfill_parallelism") == 0:
        raise UsageError(
            "OPTION_VALUE",
            "a single cursor (backfill.parallelism='0') reads in the order of the key",
            hint="leave out backfill.order, or give backfill.parallelism='1'",
        )
    if settings.get("backfill_parallelism", 1) > MAX_PARALLELISM:
        raise UsageError("OPTION_VALUE", f"backfill.parallelism is at most {MAX_PARALLELISM}")
    snapshot = options.get("snapshot", "true").lower()
    if snapshot not in ("true", "false"):
        raise UsageError("OPTION_VALUE", "option snapshot takes 'true' or 'false'")
    return settings, snapshot == "true"


def _wanted(info: TableInfo, statement: s.CreateTableFrom, sent: list[str]) -> list[str]:
    if statement.columns is None:
        return sent
    present = [c.name for c in info.columns]
    lower = {n.lower(): n for n in present}
    names = []
    for name, _ in statement.columns:
        found = name if name in present else lower.get(name.lower())
        if found is None:
            raise UsageError(
                "UNKNOWN_COLUMN", f"table {info.qualified} has no column {name}", hint=suggestion(name, present)
            )
        if found not in sent:
            rest = ", ".join(n for n, _ in statement.columns if n != name)
            raise UsageError(
                "GENERATED_COLUMN",
                f"column {found} is generated or not published: the source does not send its changes",
                hint=f"list the columns without it: ({rest}), and compute it in a view",
            )
        names.append(found)
    if statement.key and tuple(k.lower() for k in statement.key) != tuple(k.lower() for k in info.key):
        key = f"the primary key of {info.qualified} is ({', '.join(info.key)})"
        raise UsageError(
            "KEY_DIFFERS",
            key if info.key else f"table {info.qualified} has no primary key",
            hint="leave PRIMARY KEY out, or name the same columns",
        )
    return names


def _check_types(plans: tuple[ColumnPlan, ...], statement: s.CreateTableFrom) -> None:
    """A declared type must be the one that the column has: values are never converted on the way."""
    for plan, (name, declared) in zip(plans, statement.columns or (), strict=False):
        if declared is not None and _plain(declared) != _plain(plan.ddl_type):
            raise UsageError(
                "COLUMN_TYPE_DIFFERS",
                f"column {name} is declared {declared}, but arrives as {plan.ddl_type}",
                hint=f"write {name} {plan.ddl_type}, and cast it in a view",
            )


def _check_not_null(info: TableInfo, plans: tuple[ColumnPlan, ...], statement: s.CreateTableFrom) -> None:
    """A captured table is what its source is: it cannot promise more."""
    kept = {c.name for c in info.columns if c.not_null} | set(info.key)
    for plan, (name, _) in zip(plans, statement.columns or (), strict=False):
        if name in statement.not_null and plan.name not in kept:
            raise UsageError(
                "COLUMN_TYPE_DIFFERS",
                f"column {name} is declared NOT NULL, but may be NULL in the source",
                hint=f"write {name} {plan.ddl_type}, or make it NOT NULL in the source",
            )


def _plain(ddl: str) -> str:
    text = "".join(ddl.upper().split())
    return {"INTEGER": "INT", "LONG": "BIGINT", "TIMESTAMP_LTZ": "TIMESTAMP"}.get(text, text)
