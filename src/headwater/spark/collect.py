"""The result of a query, from the JVM to the engine's process: batch by batch, never all of it at once in Python.

`DataFrame.toArrow` holds everything before it returns. Here each batch goes to its taker as it comes; Spark sends those
of partitions as they are done, and says at the end in which order they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, MapType, StructType, VariantType


def comes_as_rows(frame: DataFrame) -> bool:
    """Whether `collect` is the better way: constants and tables of hw_catalog, which cost no Spark job so, and types
    that Arrow does not have.

    Collected as rows, instants pass through the local time zone, far dates do not fit into Python's, a FLOAT is a
    number of twice its digits, and a long array is made in one call.
    """
    if not _fits_arrow(frame.schema):
        return True
    kinds = frame.schema.simpleString()
    if any(kind in kinds for kind in ("timestamp", ":date", "<date", ":float", "<float", "array<", "map<")):
        return False
    java = getattr(frame, "_jdf", None)
    return java is not None and java.queryExecution().executedPlan().nodeName() == "LocalTableScan"


def _fits_arrow(kind: Any) -> bool:
    match kind:
        case VariantType():
            return False
        case ArrayType():
            return _fits_arrow(kind.elementType)
        case MapType():
            return _fits_arrow(kind.keyType) and _fits_arrow(kind.valueType)
        case StructType():
            return all(_fits_arrow(field.dataType) for field in kind.fields)
    return True


def collect_batches(frame: DataFrame, take: Callable[[pa.RecordBatch], None]) -> Sequence[int]:
    """Gives each batch to `take`; returns their numbers in the order of the rows."""
    if getattr(frame, "_jdf", None) is None:  # Spark Connect has its own way
        batches = frame.toArrow().to_batches()
        for batch in batches:
            take(batch)
        return range(len(batches))
    return _from_the_jvm(frame, take)


def _from_the_jvm(frame: DataFrame, take: Callable[[pa.RecordBatch], None]) -> Sequence[int]:
    from pyspark.errors.exceptions.captured import unwrap_spark_exception
    from pyspark.sql.pandas.serializers import ArrowCollectSerializer
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.util import _load_from_socket

    schema = to_arrow_schema(frame.schema)
    order: list[int] = []
    port, secret, server = frame._jdf.collectAsArrowToPython()
    try:
        for found in _load_from_socket((port, secret), ArrowCollectSerializer()):
            if isinstance(found, list):
                order = found
            else:
                take(_as(found, schema))
    finally:
        with unwrap_spark_exception():
            server.getResult()  # raises what went wrong over there
    return order


def _as(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if batch.schema.types == schema.types:
        return batch
    arrays = [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)
