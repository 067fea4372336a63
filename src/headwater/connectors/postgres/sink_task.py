"""What a Spark task of the Postgres sink does: its Arrow batches as CSV, by COPY, into the staging table.

All rows of a task are one transaction. With dead letters on, a batch that the server refuses is halved until the
refused rows are found; they go to a Parquet file (`sink/dead_letters.py`), and the rest is copied.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.csv as arrow_csv

from headwater.sink.dead_letters import DeadLetters
from headwater.sink.encode import array_literal, flat, hex_text, json_text, plain_text

Connect = Callable[[], "psycopg.Connection[Any]"]


def copy_task(
    *,
    sink: str,
    connect: Connect,
    statement: str,
    columns: Sequence[str],
    arrays: frozenset[str],
    dead_letters: str | None,
) -> Callable[[Iterator[Any], Any], dict[str, Any]]:
    """The task for `run_tasks`. `arrays` are the columns that are arrays in the target, others of a list type are
    JSON.
    """
    names = list(columns)

    def task(batches: Iterator[Any], info: Any) -> dict[str, Any]:
        from headwater.connectors.postgres.sink import translate

        copy = _Copy(statement, arrays, int(info.attempt), DeadLetters(dead_letters, info))
        try:
            first = next((b for b in batches if b.num_rows), None)
            if first is not None:
                with connect() as connection:
                    copy.batch(connection, first.select(names))
                    for batch in batches:
                        copy.batch(connection, batch.select(names))
        except psycopg.Error as error:
            raise translate(error, sink) from None
        return {"rows": copy.rows, "bytes": copy.bytes, **copy.dead.save()}

    return task


@dataclass(slots=True)
class _Copy:
    """Copies batches and counts."""

    statement: str
    arrays: frozenset[str]
    attempt: int
    dead: DeadLetters
    rows: int = 0
    bytes: int = 0

    def batch(self, connection: psycopg.Connection[Any], batch: Any) -> None:
        if batch.num_rows == 0:
            return
        try:
            with connection.transaction():
                self._copy(connection, csv_text(batch, self.arrays, self.attempt))
            self.rows += batch.num_rows
        except (psycopg.DataError, psycopg.IntegrityError):
            if not self.dead.wanted:
                raise
            if batch.num_rows == 1:
                self.dead.add(batch)
                return
            half = batch.num_rows // 2
            self.batch(connection, batch.slice(0, half))
            self.batch(connection, batch.slice(half))

    def _copy(self, connection: psycopg.Connection[Any], text: Any) -> None:
        with connection.cursor() as cursor, cursor.copy(self.statement.encode()) as copy:
            copy.write(text)
        self.bytes += len(text)


def csv_text(batch: Any, arrays: frozenset[str], attempt: int) -> Any:
    """A batch as the CSV of COPY: NULL is an empty field, an empty string is `""`. Encoded column-wise."""
    columns = [_field(batch.column(i), name in arrays) for i, name in enumerate(batch.schema.names)]
    columns.append(pa.repeat(pa.scalar(attempt, pa.int64()), batch.num_rows))
    table = pa.table(columns, names=[str(i) for i in range(len(columns))])
    out = io.BytesIO()
    arrow_csv.write_csv(table, out, arrow_csv.WriteOptions(include_header=False, batch_size=16_384))
    return out.getbuffer()


def _field(array: Any, is_array: bool) -> Any:
    kind = array.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return hex_text(array, "\\x")
    if pa.types.is_nested(kind):
        if is_array and pa.types.is_list(kind):
            return array_literal(array)
        return _json_or_null(array)
    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind):
        return plain_text(array)
    return array


def _json_or_null(array: Any) -> Any:
    import pyarrow.compute as pc

    array = flat(array)
    return pc.if_else(array.is_valid(), json_text(array), None)
