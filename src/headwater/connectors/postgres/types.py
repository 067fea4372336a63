"""Which Headwater type a Postgres column gets, and how its text is decoded.

`PgColumn` is what the catalogue says, `ColumnPlan` what `columns.decode_column` needs; `column_plan` is the rule
between them (docs/types-postgres.md is the same rule as a table). Nothing here talks to a server: `COLUMNS_QUERY` is
the statement whose rows `pg_columns` turns into `PgColumn`s, the catalogue runs it.

Values without loss, or an error that names the column. Three decisions follow from that:

- An infinite date or timestamp becomes the extreme value of its type (`INFINITY_*`), which no real value has: a finite
  value outside of the open interval between the two extremes is an error. The negative extreme is the type's minimum
  plus one, because numpy and pandas read the minimum of 64 bits as "no value".
- A numeric that DECIMAL(38) cannot hold for certain is a STRING; a constrained one that holds NaN is an error with the
  hint to use `numeric.mode='string'`.
- Postgres does not hold an array to its declared dimensions. The column is ARRAY<element>; a value with more than one
  dimension or with a lower bound other than 1 is an error with the hint to use `arrays='string'` (the exact text). A
  column that is declared with several (`int[][]`) is meant to hold such values: it is that text from the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Self

import pyarrow as pa

from headwater.errors import UsageError
from headwater.model.types import arrow_type

SESSION_SETTINGS: Final[Mapping[str, str]] = {
    "client_encoding": "UTF8",
    "DateStyle": "ISO",
    "TimeZone": "UTC",
    "IntervalStyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
}
"""What both the reading session and the walsender must have set: the decoders accept no other spelling."""

INFINITY_MICROS: Final = (1 << 63) - 1  # 294247-01-10 04:00:54.775807
MINUS_INFINITY_MICROS: Final = -INFINITY_MICROS
INFINITY_DAYS: Final = (1 << 31) - 1  # 5881580-07-11; Postgres ends with 5874897-12-31
MINUS_INFINITY_DAYS: Final = -INFINITY_DAYS

MAX_DECIMAL_PRECISION: Final = 38  # Spark's and Arrow's decimal128
_VARHDRSZ: Final = 4  # numeric's typmod is stored with this added


class Kind(StrEnum):
    """The decoders of `columns.py`."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    DECIMAL = "decimal"
    TEXT = "text"
    BYTES = "bytes"
    DATE = "date"
    TIMESTAMP = "timestamp"
    ARRAY = "array"


class Wire(StrEnum):
    """How a column's binary form is decoded. One that is TEXT_ONLY is read as text; with all of its table by libpq."""

    TEXT_ONLY = ""
    BOOL = "bool"
    INT = "int"
    OID = "oid"
    FLOAT = "float"
    DECIMAL = "decimal"
    NUMERIC = "numeric"
    """A numeric whose home is a STRING."""
    RAW = "raw"
    """Text and bytes as they are."""
    JSONB = "jsonb"
    UUID = "uuid"
    DATE = "date"
    TIMESTAMP = "timestamp"


@dataclass(frozen=True, slots=True)
class TypeOptions:
    """The table options that choose between two lossless homes of a type."""

    numeric_as_string: bool = False
    arrays_as_string: bool = False
    arrays_as_array: bool = False
    """Also those that are declared with several dimensions."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """From a table's options `numeric.mode` (decimal, string) and `arrays` (array, string)."""
        return cls(
            numeric_as_string=_choice(options, "numeric.mode", "decimal") == "string",
            arrays_as_string=_choice(options, "arrays", "array") == "string",
            arrays_as_array=options.get("arrays") == "array",
        )


def _choice(options: Mapping[str, str], name: str, default: str) -> str:
    value = options.get(name, default)
    if value not in (default, "string"):
        raise UsageError("OPTION_INVALID", f"option {name} cannot be {value!r}", hint=f"use '{default}' or 'string'")
    return value


DEFAULT_OPTIONS: Final = TypeOptions()


@dataclass(frozen=True, slots=True)
class PgColumn:
    """One column as the catalogue has it. `element` is set for arrays, `base` for domains; both have the same shape."""

    name: str
    attnum: int
    type_oid: int
    typmod: int = -1
    type_name: str = ""
    typtype: str = "b"
    element: PgColumn | None = None
    base: PgColumn | None = None
    not_null: bool = False
    generated: bool = False
    virtual: bool = False
    """Generated when read, never stored (since Postgres 18): no publication has it."""
    key_position: int | None = None
    collation_reproducible: bool = True
    delimiter: str = ","
    """What separates this type's values inside an array (`typdelim`): a comma for all built-in types but box."""
    dimensions: int = 0
    """So many were declared; `int[]` and `int[][]` are one type."""


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """How one column is decoded. Picklable: Spark tasks get it."""

    name: str
    ddl_type: str
    kind: Kind
    precision: int = 0
    scale: int = 0
    element: ColumnPlan | None = None
    delimiter: str = ","
    type_oid: int = 0
    key_position: int | None = None
    attnum: int = 0
    """The column's number in the source: one that was dropped and made again has another."""
    absent: bool = False
    """The source has no such column any more: it is NULL."""
    wire: Wire = Wire.TEXT_ONLY
    wire_oid: int = 0
    """The type that `wire` is of (a domain's base): bytes of another one must not be taken for it."""

    @property
    def arrow_type(self) -> pa.DataType:
        return arrow_type(self.ddl_type)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        element = data.get("element")
        known = {**data, "kind": Kind(data["kind"]), "wire": Wire(data.get("wire", Wire.TEXT_ONLY))}
        return cls(**{**known, "element": cls.from_dict(element) if element else None})


_BY_OID: Final[dict[int, tuple[str, Kind]]] = {
    16: ("BOOLEAN", Kind.BOOL),
    17: ("BINARY", Kind.BYTES),
    20: ("BIGINT", Kind.INT),
    21: ("SMALLINT", Kind.INT),
    23: ("INT", Kind.INT),
    26: ("BIGINT", Kind.INT),  # oid is unsigned, 32 bit
    700: ("FLOAT", Kind.FLOAT),
    701: ("DOUBLE", Kind.FLOAT),
    1082: ("DATE", Kind.DATE),
    1114: ("TIMESTAMP_NTZ", Kind.TIMESTAMP),
    1184: ("TIMESTAMP", Kind.TIMESTAMP),
}
NUMERIC_OID: Final = 1700
_WIRE_BY_KIND: Final[dict[Kind, Wire]] = {
    Kind.BOOL: Wire.BOOL,
    Kind.INT: Wire.INT,
    Kind.FLOAT: Wire.FLOAT,
    Kind.DECIMAL: Wire.DECIMAL,
    Kind.BYTES: Wire.RAW,
    Kind.DATE: Wire.DATE,
    Kind.TIMESTAMP: Wire.TIMESTAMP,
}
_WIRE_BY_OID: Final[dict[int, Wire]] = {
    19: Wire.RAW,  # name
    25: Wire.RAW,  # text
    26: Wire.OID,
    114: Wire.RAW,  # json
    1042: Wire.RAW,  # char(n), blanks included as in its text
    1043: Wire.RAW,  # varchar
    NUMERIC_OID: Wire.NUMERIC,
    2950: Wire.UUID,
    3802: Wire.JSONB,
}


def _wire(col: PgColumn, kind: Kind) -> Wire:
    """The binary form of a type; TEXT_ONLY for those whose text only Postgres itself can print."""
    if kind is Kind.TEXT and col.typtype == "e":
        return Wire.RAW  # the label
    by_kind = _WIRE_BY_KIND.get(kind, Wire.TEXT_ONLY)
    return by_kind if kind is Kind.DECIMAL else _WIRE_BY_OID.get(col.type_oid, by_kind)


def column_plan(col: PgColumn, options: TypeOptions = DEFAULT_OPTIONS) -> ColumnPlan:
    """The plan of a column; every type has one."""
    return _plan(col, col, options)


def plan_columns(
    columns: Sequence[PgColumn],
    *,
    wanted: Sequence[str] | None = None,
    options: TypeOptions = DEFAULT_OPTIONS,
    generated_in_stream: bool = False,
) -> tuple[ColumnPlan, ...]:
    """The plans of a captured table: all columns, or the wanted ones in their order.

    `generated_in_stream` says that the publication has stored generated columns (`publish_generated_columns`, since
    Postgres 18). Without it a generated column would be right in the snapshot and missing in the stream: refused.
    """
    by_name = {col.name: col for col in columns}
    names = tuple(by_name) if wanted is None else tuple(wanted)
    for name in names:
        if name not in by_name:
            raise UsageError("COLUMN_NOT_FOUND", f"the source's table has no column {name}")
        if by_name[name].virtual or (by_name[name].generated and not generated_in_stream):
            raise UsageError(
                "GENERATED_COLUMN",
                f"column {name} is generated, and the source does not send its changes",
                hint="name the other columns in CREATE TABLE … (a, b, …) FROM, and compute it in a view",
            )
    for col in columns:
        if col.key_position is not None and col.name not in names:
            raise UsageError(
                "KEY_COLUMN_MISSING",
                f"column {col.name} is part of the primary key and must be captured",
                hint=f"add {col.name} to the columns of the table",
            )
    return tuple(column_plan(by_name[name], options) for name in names)


def _plan(col: PgColumn, kind_of: PgColumn, options: TypeOptions) -> ColumnPlan:
    """The plan of `col` by the type of `kind_of` (the base type, where `col` is a domain)."""
    if kind_of.base is not None:
        return _plan(col, kind_of.base, options)

    def plan(ddl: str, kind: Kind, **more: Any) -> ColumnPlan:
        return ColumnPlan(
            col.name,
            ddl,
            kind,
            type_oid=col.type_oid,
            key_position=col.key_position,
            attnum=col.attnum,
            wire=_wire(kind_of, kind),
            wire_oid=kind_of.type_oid,
            **more,
        )

    if kind_of.element is not None:
        if options.arrays_as_string or (kind_of.dimensions > 1 and not options.arrays_as_array):
            return plan("STRING", Kind.TEXT)
        element = column_plan(kind_of.element, options)
        return plan(f"ARRAY<{element.ddl_type}>", Kind.ARRAY, element=element, delimiter=kind_of.element.delimiter)
    if kind_of.type_oid == NUMERIC_OID:
        decimal = None if options.numeric_as_string else decimal_of(kind_of.typmod)
        if decimal is not None:
            precision, scale = decimal
            return plan(f"DECIMAL({precision},{scale})", Kind.DECIMAL, precision=precision, scale=scale)
    ddl, kind = _BY_OID.get(kind_of.type_oid, ("STRING", Kind.TEXT))
    return plan(ddl, kind)


def decimal_of(typmod: int) -> tuple[int, int] | None:
    """Precision and scale of a numeric's typmod, or None where DECIMAL cannot hold all of its values."""
    if typmod < _VARHDRSZ:
        return None
    packed = typmod - _VARHDRSZ
    precision = (packed >> 16) & 0xFFFF
    scale = ((packed & 0x7FF) ^ 1024) - 1024  # 11 bits with sign since Postgres 15
    if precision > MAX_DECIMAL_PRECISION or not 0 <= scale <= precision:
        return None
    return precision, scale


COLUMNS_QUERY: Final = """
WITH RECURSIVE cols AS (
    SELECT a.attname::text AS name, a.attnum::int AS attnum, a.atttypid AS type_oid, a.atttypmod AS typmod,
           a.attnotnull AS not_null, a.attgenerated <> '' AS generated, a.attgenerated = 'v' AS virtual,
           a.attcollation AS collation, a.attndims::int AS dimensions,
           -- the key ends before the columns that its index only includes
           array_position((i.indkey::int2[])[0:i.indnkeyatts - 1], a.attnum) - 1 AS key_position
      FROM pg_attribute a
      LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND i.indisprimary
     WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped
), step AS (
    SELECT c.attnum, 0 AS depth, '' AS via, c.type_oid, c.typmod, c.dimensions FROM cols c
    UNION ALL
    SELECT s.attnum, s.depth + 1, CASE WHEN t.typtype = 'd' THEN 'd' ELSE 'a' END,
           CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.typelem END,
           CASE WHEN t.typtype = 'd' THEN t.typtypmod ELSE s.typmod END,
           CASE WHEN t.typtype = 'd' THEN t.typndims ELSE 0 END
      FROM step s JOIN pg_type t ON t.oid = s.type_oid
     WHERE t.typtype = 'd' OR t.typoutput = 'array_out'::regproc
)
SELECT c.name, c.attnum, c.not_null, c.generated, c.virtual, c.key_position,
       c.collation = 0 OR coalesce(co.collcollate IN ('C', 'POSIX') OR co.collprovider = 'b'
           OR (co.collprovider = 'd' AND (SELECT coalesce(to_jsonb(d) ->> 'datlocprovider', 'c') = 'b'
                   OR (d.datcollate IN ('C', 'POSIX') AND coalesce(to_jsonb(d) ->> 'datlocprovider', 'c') = 'c')
              FROM pg_database d WHERE d.datname = current_database())), false) AS collation_reproducible,
       s.depth, s.via, s.type_oid, s.typmod, format_type(s.type_oid, s.typmod) AS type_name,
       t.typtype::text AS typtype, t.typdelim::text AS delimiter, s.dimensions
  FROM cols c
  JOIN step s USING (attnum)
  JOIN pg_type t ON t.oid = s.type_oid
  LEFT JOIN pg_collation co ON co.oid = c.collation
 ORDER BY c.attnum, s.depth
"""
"""Parameter: the table's name as `regclass` takes it. One row per column and step of its type: the column's own type
(depth 0), then what it is a domain over (`via` d) or an array of (`via` a), and so on down."""


def pg_columns(rows: Iterable[Mapping[str, Any]]) -> tuple[PgColumn, ...]:
    """The columns that `COLUMNS_QUERY` describes, in order."""
    by_column: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_column.setdefault(row["attnum"], []).append(row)
    return tuple(_column(steps) for steps in by_column.values())


def _column(steps: Sequence[Mapping[str, Any]]) -> PgColumn:
    row, below = steps[0], steps[1:]
    inner = _column(below) if below else None
    via = below[0]["via"] if below else ""
    return PgColumn(
        name=row["name"],
        attnum=row["attnum"],
        type_oid=int(row["type_oid"]),
        typmod=row["typmod"],
        type_name=row["type_name"],
        typtype=row["typtype"],
        element=inner if via == "a" else None,
        base=inner if via == "d" else None,
        not_null=row["not_null"],
        generated=row["generated"],
        virtual=row["virtual"],
        key_position=row["key_position"],
        collation_reproducible=row["collation_reproducible"],
        delimiter=row["delimiter"],
        dimensions=row["dimensions"],
    )
