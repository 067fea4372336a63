"""User queries: Spark SQL over bound tables, results in the spelling of the interfaces, Spark's errors as ours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa
from py4j.protocol import Py4JNetworkError
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    AnsiIntervalType,
    ArrayType,
    CalendarIntervalType,
    MapType,
    StringType,
    StructField,
    StructType,
)
from sqlglot import exp

from headwater.errors import DefiniteError, HeadwaterError, TransientError, UsageError, disk_full
from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, ROW_ID, Column, Schema, quoted
from headwater.model.types import arrow_type
from headwater.spark.segment import dense_number
from headwater.sql.reading import too_deep
from headwater.storage.shared import NOT_SHARED

_TOO_DEEP: Final = ("FAILED_TO_PARSE_TOO_COMPLEX",)
_CONDITION: Final = re.compile(r"\[([A-Z][A-Z0-9_.]+)\]\s*(.*)")

_NULL: Final = re.compile(r"column \S+ must have a value")


@contextmanager
def explained(code: str = "QUERY_FAILED") -> Iterator[None]:
    """Turn Spark's exceptions into ours; never a row's value in the message."""
    try:
        yield
    except HeadwaterError:
        raise
    except Exception as error:
        raise translate(error, code) from error


def translate(error: BaseException, code: str = "QUERY_FAILED") -> HeadwaterError:
    text = str(error)
    match = _CONDITION.search(text)
    condition = match[1] if match else type(error).__name__
    if "No space left on device" in text or "No space left on device" in str(error.__cause__):
        return disk_full()
    if (ours := _OURS.search(text)) and ours[2] == NOT_SHARED:
        return TransientError(NOT_SHARED, ours[3], hint="mount the same directory at the same path on all hosts")
    if "spark.driver.maxResultSize" in text:
        return DefiniteError(
            "RESULT_TOO_LARGE",
            "the query has more rows than Spark's driver may collect",
            hint="use LIMIT, or read the table with Spark: spark.read.format('headwater')",
        )
    if condition == "PATH_NOT_FOUND":
        return _missing(text)
    if condition.startswith("FAILED_READ_FILE"):
        return _gone() if "FileNotFound" in text else _damaged(text)
    if isinstance(error, RecursionError) or "StackOverflowError" in text or condition in _TOO_DEEP:
        return too_deep()
    if isinstance(error, ParseException):
        return UsageError("SQL_SYNTAX", "the query cannot be read", detail=condition)
    if isinstance(error, AnalysisException):
        return UsageError("SQL_INVALID", _sentence(match), detail=condition, hint="check names and types")
    if "An exception was thrown from the Python worker" in text or condition.startswith(("PYTHON_EXC", "UDF_ERROR")):
        last = [
            line for line in text.splitlines() if re.match(r"^[\w.]+(Error|Exception|Interrupt|Exit)\b", line.strip())
        ]
        kind = last[-1].strip().split(":")[0] if last else condition
        if kind == "FileNotFoundError" and _SEGMENT.search(last[-1]):
            return _missing(last[-1])
        return DefiniteError(code, f"a Python function raised {kind}", detail=condition)
    if condition == "USER_RAISED_EXCEPTION" and (null := _NULL.search(text)):
        return UsageError("NOT_NULL", null[0])
    if isinstance(error, PySparkException) and match and "INTERNAL" not in condition:
        return DefiniteError(code, _RUNTIME.get(condition, "the query failed while it ran"), detail=condition)
    if "FileNotFoundException" in text or "does not exist" in text:
        return _gone()
    if isinstance(error, Py4JNetworkError | ConnectionRefusedError):
        return TransientError(
            "SPARK_LOST", "Spark's driver process has ended while it ran this", hint="see how the engine ended"
        )
    return TransientError("SPARK_FAILED", f"Spark failed: {condition}", hint="see the engine's log")


def _damaged(text: str) -> DefiniteError:
    found = _SEGMENT.search(text)
    return DefiniteError(
        "SEGMENT_DAMAGED",
        "a file of the data directory cannot be read",
        detail=found[0] if found else "",
        hint="put it back from a backup, then RECOVER; or DROP the table, with CASCADE, and CREATE it again",
    )


def _missing(text: str) -> DefiniteError:
    found = _SEGMENT.search(text)
    return DefiniteError(
        "SEGMENT_MISSING",
        "a file of the data directory is not there",
        detail=found[0] if found else "",
        hint="is the disk mounted? else put it back from a backup, then RECOVER; or DROP the table, with CASCADE, and "
        "CREATE it again",
    )


def _gone() -> TransientError:
    return TransientError("SEGMENT_GONE", "a file that the query needs is gone", hint="run it again")


# An error of ours, as Spark shows one that was raised in a worker.
_OURS: Final = re.compile(r"headwater\.errors\.(\w+): \[([A-Z_]+)\] ([^\n]*)")
_SEGMENT: Final = re.compile(r"tables/[\w./-]+\.parquet")
_RUNTIME: Final[dict[str, str]] = {
    "DIVIDE_BY_ZERO": "division by zero",
    "CAST_INVALID_INPUT": "a value cannot be cast to the wanted type",
    "CAST_OVERFLOW": "a value is too large for the wanted type",
    "ARITHMETIC_OVERFLOW": "a number is too large for its type",
    "NUMERIC_VALUE_OUT_OF_RANGE": "a number is out of range",
    "NOT_NULL_ASSERT_VIOLATION": "a NULL in a column that must have a value",
    "USER_RAISED_EXCEPTION": "the query raised an error",
}


def _sentence(match: re.Match[str] | None) -> str:
    if match is None:
        return "the query is not valid"
    first = match[2].split(". ")[0].split("\n")[0].split(" SQLSTATE")[0]
    return (first[:1].lower() + first[1:]).rstrip(".")[:300] or "the query is not valid"


def run_sql(spark: SparkSession, sql: str, tables: Mapping[str, DataFrame]) -> DataFrame:
    """The DataFrame of a query over the given tables; their temporary names are gone when it returns."""
    try:
        for name, frame in tables.items():
            frame.createOrReplaceTempView(name)
        with explained():
            return spark.sql(sql)
    finally:
        for name in tables:
            spark.catalog.dropTempView(name)


def with_plain_intervals(frame: DataFrame) -> DataFrame:
    """Intervals as Spark's text of them: one of months has no counterpart in Python, nor in Arrow."""
    if "interval" not in frame.schema.simpleString():
        return frame
    plain = _without_intervals(frame.schema)
    columns = [F.col(quoted(f"_c{i}")).cast(field.dataType).alias(field.name) for i, field in enumerate(plain.fields)]
    return frame.toDF(*[f"_c{i}" for i in range(len(plain.fields))]).select(*columns)


def _without_intervals(kind: Any) -> Any:
    match kind:
        case AnsiIntervalType() | CalendarIntervalType():
            return StringType()
        case ArrayType():
            return ArrayType(_without_intervals(kind.elementType), kind.containsNull)
        case MapType():
            return MapType(_without_intervals(kind.keyType), _without_intervals(kind.valueType), kind.valueContainsNull)
        case StructType():
            return StructType([StructField(f.name, _without_intervals(f.dataType), f.nullable) for f in kind.fields])
    return kind


def rows_of_values(spark: SparkSession, query: exp.Expression, columns: Sequence[Column], schema: Schema) -> pa.Table:
    """Evaluate constants without a Spark job: rows with all of the table's columns and `_op`."""
    width = _width(query)
    if width is not None and width != len(columns):
        raise UsageError("COLUMN_COUNT", f"{width} values for {len(columns)} columns")
    text = query.sql(dialect="spark", comments=False)
    source = f"({text})" if not isinstance(query, exp.Values) else text
    outputs = []
    with explained():
        frame = spark.sql(f"SELECT * FROM {source}")
        if len(frame.columns) != len(columns):
            raise UsageError("COLUMN_COUNT", f"{len(frame.columns)} values for {len(columns)} columns")
        frame = frame.toDF(*[f"_c{i}" for i in range(len(columns))])  # two may have one name
        for i, column in enumerate(columns):
            outputs.append(_whole_number(F.col(f"_c{i}").cast(column.type), column.type).alias(column.name))
        chosen = frame.select(*outputs)
        if any("<" in c.type and re.search("DATE|TIMESTAMP", c.type, re.IGNORECASE) for c in columns):
            # Inside of arrays and structs they come as they are only through Arrow, at the price of a job.
            rows = chosen.toArrow()
            given = {c.name: rows.column(i).combine_chunks() for i, c in enumerate(columns)}
            return _as_table(given, rows.num_rows, schema)
        collected = chosen.collect()
    lists = {c.name: [_plain(row[i]) for row in collected] for i, c in enumerate(columns)}
    return _as_table(lists, len(collected), schema)


def _whole_number(value: SparkColumn, ddl: str) -> SparkColumn:
    """A date or moment as the number that it is: Python's do not reach as far, and know a local time zone."""
    match ddl.upper():
        case "DATE":
            return F.unix_date(value)
        case "TIMESTAMP" | "TIMESTAMP_LTZ" | "TIMESTAMP_NTZ":  # the session's zone is UTC
            return F.unix_micros(value.cast("timestamp"))
    return value


def _width(query: exp.Expression) -> int | None:
    if isinstance(query, exp.Values) and query.expressions:
        first = query.expressions[0]
        widths = {len(e.expressions) if isinstance(e, exp.Tuple) else 1 for e in query.expressions}
        if len(widths) > 1:
            raise UsageError("COLUMN_COUNT", "the rows of VALUES differ in length")
        return len(first.expressions) if isinstance(first, exp.Tuple) else 1
    return None


def _as_table(given: Mapping[str, Any], count: int, schema: Schema) -> pa.Table:
    """Rows of the table; the columns that are given are lists of values, or Arrow's."""
    arrays, fields = [], []
    for column in schema.columns:
        kind = arrow_type(column.type)
        values = given.get(column.name, pa.nulls(count, kind))
        array = values.cast(kind) if isinstance(values, pa.Array) else pa.array(values, kind)
        if column.name != ROW_ID and not column.nullable and array.null_count:
            raise UsageError("NOT_NULL", f"column {column.name} must have a value")
        arrays.append(array)
        fields.append(pa.field(column.name, kind))
    arrays.append(pa.array([OP_UPSERT] * count, pa.int8()))
    fields.append(pa.field(OP, pa.int8()))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _plain(value: Any) -> Any:
    if isinstance(value, bytearray):
        return bytes(value)
    return value.asDict() if hasattr(value, "asDict") else value


def insert_frame(source: DataFrame, columns: Sequence[Column], schema: Schema, row_id: int) -> DataFrame:
    """A query's result as rows of a table: cast, missing columns NULL, row ids given."""
    if len(source.columns) != len(columns):
        raise UsageError("COLUMN_COUNT", f"{len(source.columns)} columns for {len(columns)}")
    named = source.toDF(*[f"_c{i}" for i in range(len(columns))])
    at = {c.name: f"_c{i}" for i, c in enumerate(columns)}
    outputs = []
    for column in schema.columns:
        if column.name == ROW_ID:
            outputs.append((F.lit(row_id) + dense_number()).alias(ROW_ID))
        elif column.name in at:
            outputs.append(F.col(at[column.name]).cast(column.type).alias(column.name))
        else:
            outputs.append(F.lit(None).cast(column.type).alias(column.name))
    return checked_columns(named.select(*outputs), schema)


def checked_columns(frame: DataFrame, schema: Schema, *, upserts: bool = False) -> DataFrame:
    """The table's columns (and `_op`); a NULL where a value must be fails the query."""
    outputs = []
    for column in schema.columns:
        value = F.col(quoted(column.name))
        if not column.nullable:
            message = F.lit(f"column {column.name} must have a value")
            value = F.coalesce(value, F.raise_error(message).cast(column.type))
        outputs.append(value.alias(column.name))
    return frame.select(*outputs, F.lit(OP_UPSERT).alias(OP)) if upserts else frame.select(*outputs)


def tombstones(selected: DataFrame, schema: Schema) -> DataFrame:
    """A delete of each selected row, by its key as it was (`_hw_old_…`)."""
    columns = [
        F.col(quoted(f"_hw_old_{c.name}")).alias(c.name)
        if c.name in schema.key
        else F.lit(None).cast(c.type).alias(c.name)
        for c in schema.columns
    ]
    return selected.select(*columns, F.lit(OP_DELETE).alias(OP))
