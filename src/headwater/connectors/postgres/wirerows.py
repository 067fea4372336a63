"""The snapshot's faster formats to Arrow: messages of a SELECT, or of `COPY … TO STDOUT (FORMAT binary)`.

A row is its number of fields (16 bits), then each field's length (32 bits, -1 for NULL) and bytes. Before the first row
of a COPY stands a header, and a row of -1 fields ends it. Nothing is escaped, nothing has to be searched for.

All values of a COPY are binary; of a SELECT each column has the form that costs the server and us less (`forms`).

`rowscan.py` has the pass over the rows. Here: where each column lies in its arena, and Arrow columns made of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.connectors.postgres import rowscan as scan
from headwater.connectors.postgres.columns import (
    INT_RANGE,
    MAX_COLUMN_BYTES,
    check_value,
    decode_binary_column,
    decode_column,
    read_only,
    valid_texts,
)
from headwater.connectors.postgres.rowreader import Messages
from headwater.connectors.postgres.textscan import FINE, Bytes, Longs
from headwater.connectors.postgres.types import ColumnPlan, Kind, Wire
from headwater.errors import DefiniteError

_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
_FLAGS: Final = 4  # none of which a server sets; then the length of an extension of the header
_TRAILER: Final = b"\xff\xff"
_ALIGNED: Final = 64  # bytes, as Arrow has its buffers
_SCRATCH_BYTES: Final = 384 << 10  # half of what a core's second cache has, mostly
_LEAST_BLOCK: Final = 64  # rows that are read before they are placed, also of very wide ones

TEXT_FORM: Final = 0
BINARY_FORM: Final = 1
_ALWAYS_BINARY: Final = frozenset({Wire.FLOAT, Wire.DATE, Wire.TIMESTAMP, Wire.UUID, Wire.OID})
_MOST_BINARY: Final = 7
"""The server makes each binary value in a kilobyte of its own, out of 8 KiB that it keeps for a row's values: where
there are more, it allocates and frees memory with every row, a tenth to a quarter of all that a row costs it."""

_KINDS: Final[dict[Wire, int]] = {
    Wire.BOOL: scan.BOOL,
    Wire.OID: scan.OID,
    Wire.DECIMAL: scan.DECIMAL,
    Wire.RAW: scan.TEXT,
    Wire.DATE: scan.DATE,
    Wire.TIMESTAMP: scan.TIMESTAMP,
    Wire.NUMERIC: scan.FIELD,
    Wire.JSONB: scan.FIELD,
    Wire.UUID: scan.FIELD,
}
_NUMBERS: Final = {
    "SMALLINT": scan.TWO,
    "INT": scan.FOUR,
    "BIGINT": scan.EIGHT,
    "FLOAT": scan.FOUR,
    "DOUBLE": scan.EIGHT,
}
_TEXTS: Final = {
    "SMALLINT": scan.TWO_TEXT,
    "INT": scan.FOUR_TEXT,
    "BIGINT": scan.EIGHT_TEXT,
    "BOOLEAN": scan.BOOL_TEXT,
    "STRING": scan.TEXT,
}
_UNIT: Final = {  # of others 8 bytes
    scan.TWO: 2,
    scan.FOUR: 4,
    scan.DATE: 4,
    scan.TEXT: 4,
    scan.BOOL: 1,
    scan.TWO_TEXT: 2,
    scan.FOUR_TEXT: 4,
    scan.BOOL_TEXT: 1,
}
_BOOLS: Final = (scan.BOOL, scan.BOOL_TEXT)
_SLOTS: Final = {scan.TEXT: 1, scan.FIELD: 2}  # rows of `fields` that a column has
_DECIMALS: Final = (scan.DECIMAL, scan.DECIMAL_TEXT)


def has_binary(plans: Sequence[ColumnPlan]) -> bool:
    """Whether every column has a binary decoder."""
    return all(plan.wire is not Wire.TEXT_ONLY for plan in plans)


def forms(plans: Sequence[ColumnPlan]) -> tuple[int, ...]:
    """In which form to ask for each column.

    Texts are the same bytes in both, and cheaper to make as text; so are numerics. Integers cost the server the same.
    Times, floats and uuids are dear to print, and to parse.
    """
    binary = [i for i, p in enumerate(plans) if p.wire in _ALWAYS_BINARY or p.kind is Kind.BYTES]
    ints = [i for i, p in enumerate(plans) if p.wire is Wire.INT]
    chosen = {*binary, *ints[: max(0, _MOST_BINARY - len(binary))]}
    return tuple(BINARY_FORM if i in chosen else TEXT_FORM for i in range(len(plans)))


@dataclass(frozen=True, slots=True)
class WireRows:
    """Rows as they came: `data[starts[i]:ends[i]]` is one. `forms` are those of its fields; None: all are binary."""

    data: Bytes
    starts: Longs
    ends: Longs
    forms: tuple[int, ...] | None = None

    @classmethod
    def of(cls, messages: Messages, forms: tuple[int, ...] | None = None) -> WireRows:
        """Without header and trailer, which are messages of their own or stand before a row."""
        data, starts, ends = messages.data, messages.starts, messages.ends
        if forms is not None:
            return cls(data, starts, ends, forms)
        if starts.size and (rows_at := _after_header(data, int(starts[0]))) != starts[0]:
            starts = starts.copy()
            starts[0] = rows_at
            if rows_at >= ends[0]:
                starts, ends = starts[1:], ends[1:]
        if starts.size and data[starts[-1] : ends[-1]].tobytes() == _TRAILER:
            starts, ends = starts[:-1], ends[:-1]
        return cls(data, starts, ends)

    @property
    def num_rows(self) -> int:
        return int(self.starts.size)

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


def _after_header(data: Bytes, at: int) -> int:
    """Where the rows begin; no row has as many fields as the signature would mean."""
    fixed = len(_SIGNATURE) + _FLAGS
    if data[at : at + len(_SIGNATURE)].tobytes() != _SIGNATURE or data.size < at + fixed + 4:
        return at
    return at + fixed + 4 + int.from_bytes(data[at + fixed : at + fixed + 4].tobytes(), "big")


def decode_rows(
    rows: WireRows,
    plans: Sequence[ColumnPlan],
    *,
    only: Collection[str] | None = None,
    places: Longs | None = None,
) -> pa.RecordBatch:
    """The columns of the statement, or `only` some; row i goes to `places[i]`, or stays in its place."""
    batch = decode_compact(rows, plans, only=only, places=places)
    wanted = [p for p in plans if only is None or p.name in only]
    arrays = [c.cast(p.arrow_type) for c, p in zip(batch.columns, wanted, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def decode_compact(
    rows: WireRows,
    plans: Sequence[ColumnPlan],
    *,
    only: Collection[str] | None = None,
    places: Longs | None = None,
    words: Collection[str] = (),
) -> pa.RecordBatch:
    """The same, in types that take less: decimals of 64 bits, and dictionaries of texts that are known to repeat
    (`words`), as far as they do."""
    if rows.nbytes > MAX_COLUMN_BYTES:
        raise DefiniteError("BATCH_TOO_LARGE", "more than 2 GiB of rows in one piece", hint="decode smaller pieces")
    wanted = [i for i, plan in enumerate(plans) if only is None or plan.name in only]
    arena = _Arena(plans, rows.forms or (BINARY_FORM,) * len(plans), wanted, rows.num_rows)
    arena.fill(rows, np.arange(rows.num_rows) if places is None else places)
    columns = [arena.column(i, as_words=plans[i].name in words) for i in wanted]
    return pa.RecordBatch.from_arrays(columns, names=[plans[i].name for i in wanted])


class _Arena:
    """The memory of all columns of a batch, and what `rowscan.py` is told about it."""

    def __init__(self, plans: Sequence[ColumnPlan], forms: Sequence[int], wanted: Sequence[int], rows: int) -> None:
        self.plans, self.forms, self.wanted, self.rows = plans, forms, wanted, rows
        count = len(plans)
        self.kinds = np.full(count, scan.SKIPPED, np.int64)
        self.scratch, self.bases, self.slots, self.nulls = np.zeros((4, count), np.int64)
        self.limits = np.array([_limits(p) for p in plans], np.int64).reshape(count, 2)
        self.valid = np.full((count, -(-rows // 8)), 255, np.uint8)
        kinds = {i: _kind(plans[i], forms[i]) for i in wanted}
        row_bytes = sum(self._bytes(i, kind, 1) for i, kind in kinds.items())
        self.block = max(_LEAST_BLOCK, min(rows, _SCRATCH_BYTES // max(1, row_bytes)))
        size = slots = 0
        for i, kind in kinds.items():
            self.kinds[i], self.scratch[i], self.slots[i] = kind, size // _UNIT.get(kind, 8), slots
            size += _aligned(self.block if kind in _BOOLS else self._bytes(i, kind, self.block))
            slots += _SLOTS.get(kind, 0)
        for i, kind in kinds.items():
            self.bases[i] = size // _UNIT.get(kind, 8)
            size += _aligned(self._bytes(i, kind, rows))
        self.memory = np.empty(size, np.uint8)
        self.fields = np.empty((slots, rows), np.int64)
        for i in wanted:
            if self.kinds[i] in _BOOLS:  # the pass only sets bits
                self._part(i, np.uint8, self.valid.shape[1])[:] = 0

    def _bytes(self, i: int, kind: int, rows: int) -> int:
        """What a column takes in the arena."""
        if kind in _DECIMALS:
            return (8 if self.plans[i].precision <= scan.NARROW_DIGITS else 16) * rows
        match kind:
            case scan.FIELD:
                return 0
            case scan.BOOL | scan.BOOL_TEXT:
                return -(-rows // 8)
            case scan.TEXT:
                return 4 * (rows + 1)
        return _UNIT.get(kind, 8) * rows

    def _part(self, i: int, dtype: Any, size: int) -> NDArray[Any]:
        part: NDArray[Any] = self.memory.view(dtype)[self.bases[i] :][:size]
        return part

    def fill(self, rows: WireRows, places: Longs) -> None:
        memory = self.memory
        self.data, self.places = read_only(rows.data), places
        columns = scan.Columns(
            kinds=self.kinds,
            scratch=self.scratch,
            bases=self.bases,
            limits=self.limits,
            slots=self.slots,
            arena=memory,
            arena2=memory.view(np.int16),
            arena4=memory.view(np.int32),
            arena8=memory.view(np.int64),
            valid=self.valid,
            nulls=self.nulls,
            fields=self.fields,
        )
        last = max(self.wanted, default=-1)
        column, fault = scan.place_rows(self.data, rows.starts, rows.ends, places, columns, last, self.block)
        if column == scan.ROW_MALFORMED:
            raise DefiniteError(
                "COPY_MALFORMED",
                f"a row of the copy does not have {len(self.plans)} fields",
                hint="the table's columns changed while it was being read; the read has to be repeated",
            )
        if fault != FINE:
            check_value(self.plans[column], (0, fault))

    def column(self, i: int, *, as_words: bool = False) -> pa.Array:
        plan, kind = self.plans[i], self.kinds[i]
        if kind == scan.FIELD:
            decode = decode_column if self.forms[i] == TEXT_FORM else decode_binary_column
            starts, lengths = self.fields[self.slots[i] :][:2]
            return decode(plan, self.data, starts, lengths)
        valid = pa.py_buffer(self.valid[i]) if self.nulls[i] else None
        if kind == scan.TEXT:
            # Bytes too are listed as repeating, and have no text that a dictionary's decoder could read.
            words = self._words(i, valid) if as_words and plan.kind is Kind.TEXT else None
            return self._texts(i, valid) if words is None else words
        unit = _UNIT.get(int(kind), 8)
        values = pa.py_buffer(self.memory[self.bases[i] * unit :][: self._bytes(i, int(kind), self.rows)])
        stored = plan.arrow_type
        if kind in _DECIMALS and plan.precision <= scan.NARROW_DIGITS:
            stored = pa.decimal64(plan.precision, plan.scale)
        return pa.Array.from_buffers(stored, self.rows, [valid, values], int(self.nulls[i]))

    def _words(self, i: int, valid: pa.Buffer | None) -> pa.Array | None:
        """As a dictionary of its different texts; None where there are too many."""
        numbers, words = np.empty(self.rows, np.int32), np.empty((scan.MOST_WORDS, 2), np.int64)
        lengths = self._part(i, np.int32, self.rows + 1)[1:]
        count = scan.place_words(self.data, self.fields[self.slots[i]], self.places, lengths, numbers, words)
        if count < 0:
            return None
        starts, sizes = np.ascontiguousarray(words[:count].T)
        dictionary = decode_column(self.plans[i], self.data, starts, sizes)
        indices = pa.Array.from_buffers(pa.int32(), self.rows, [valid, pa.py_buffer(numbers)], int(self.nulls[i]))
        return pa.DictionaryArray.from_arrays(indices, dictionary)

    def _texts(self, i: int, valid: pa.Buffer | None) -> pa.Array:
        plan = self.plans[i]
        offsets = self._part(i, np.int32, self.rows + 1)
        offsets[0] = 0
        np.cumsum(offsets, dtype=np.int32, out=offsets)
        out = np.empty(int(offsets[-1]), np.uint8)
        scan.place_texts(self.data, self.fields[self.slots[i]], self.places, offsets, out)
        as_text = plan.kind is not Kind.BYTES
        array = pa.Array.from_buffers(
            pa.string() if as_text else pa.binary(),
            self.rows,
            [valid, pa.py_buffer(offsets), pa.py_buffer(out)],
            int(self.nulls[i]),
        )
        return valid_texts(plan, array) if as_text else array


def _kind(plan: ColumnPlan, form: int) -> int:
    if form == TEXT_FORM:
        return scan.DECIMAL_TEXT if plan.kind is Kind.DECIMAL else _TEXTS.get(plan.ddl_type, scan.FIELD)
    return _NUMBERS[plan.ddl_type] if plan.wire in (Wire.INT, Wire.FLOAT) else _KINDS[plan.wire]


def _limits(plan: ColumnPlan) -> tuple[int, int]:
    if plan.ddl_type in INT_RANGE:
        least, greatest, _ = INT_RANGE[plan.ddl_type]
        return least, greatest
    return plan.precision, plan.scale


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
