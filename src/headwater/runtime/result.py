"""The rows of a query on their way to whoever asked: Arrow batches in memory, or in a file when they are many.

A result is complete before anything of it is sent, so that an error is an answer and not half of one. It is kept as
Arrow, which takes a fraction of Python's objects, and turned into rows or text piece by piece while it is read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.ipc

from headwater.runtime.spelling import json_column
from headwater.server.pieces import PIECE_CHARS, PIECE_ROWS, row_pieces, value_pieces

# Of one result. Eight queries run at a time, so all of them together stay far below the heap of a small engine.
IN_MEMORY_BYTES: Final = 32 << 20


class CollectedRows:
    """Batches as they come (`take`), then in the order of the result (`finish`), then read as often as one likes."""

    def __init__(self, names: Sequence[str], directory: Path | None = None) -> None:
        self._names = list(names)
        self._directory = directory
        self._held: list[pa.RecordBatch | tuple[int, int]] = []  # a batch, or where in the file it is
        self._order: list[int] = []
        self._bytes = 0
        self._file: IO[bytes] | None = None
        self._schema: Any = None

    def take(self, batch: pa.RecordBatch) -> None:
        self._schema = batch.schema
        self._bytes += batch.nbytes
        self._held.append(batch if self._bytes <= IN_MEMORY_BYTES else self._write(batch))

    def _write(self, batch: pa.RecordBatch) -> tuple[int, int]:
        if self._file is None:  # it has no name: it ends with us, however that is
            self._file = tempfile.TemporaryFile(dir=self._directory, prefix=".result-")  # noqa: SIM115
        text = batch.serialize()
        at = self._file.tell()
        self._file.write(text)
        return at, text.size

    def finish(self, order: Sequence[int]) -> None:
        self._order = list(order)

    def close(self) -> None:
        self._held, self._order = [], []
        if self._file is not None:
            self._file.close()

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for number in self._order:
            held = self._held[number]
            if isinstance(held, tuple):
                assert self._file is not None
                self._file.seek(held[0])
                held = pa.ipc.read_record_batch(pa.py_buffer(self._file.read(held[1])), self._schema)
            yield from _slices(held)

    def _rows_of(self, batch: pa.RecordBatch) -> list[dict[str, Any]]:
        columns = [json_column(column) for column in batch.columns]
        return [dict(zip(self._names, values, strict=True)) for values in zip(*columns, strict=True)]

    def rows(self) -> list[dict[str, Any]]:
        return [row for batch in self._batches() for row in self._rows_of(batch)]

    def pieces(self) -> Iterator[str]:
        """The rows of a JSON array, without its brackets."""
        comma = ""
        for batch in self._batches():
            rows = self._rows_of(batch)
            yield comma
            if batch.nbytes > PIECE_CHARS:  # a single row that is this large
                yield from value_pieces(rows[0])
            else:
                yield from row_pieces(rows)
            comma = ","


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Parts of a batch that are small, or a single row."""
    if batch.num_rows == 0:
        return
    if batch.num_rows == 1 or (batch.num_rows <= PIECE_ROWS and batch.nbytes <= PIECE_CHARS):
        yield batch
        return
    share = max(1, min(PIECE_ROWS, batch.num_rows * PIECE_CHARS // max(1, batch.nbytes), batch.num_rows // 2))
    for at in range(0, batch.num_rows, share):
        yield from _slices(batch.slice(at, share))


@dataclass(frozen=True, slots=True)
class Result:
    """The rows of a query, values spelt as `--format json` does; `epoch` is what was read."""

    columns: list[str]
    found: list[dict[str, Any]] | CollectedRows
    epoch: int

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All of them as objects of Python: for a caller who wants that."""
        return self.found if isinstance(self.found, list) else self.found.rows()
