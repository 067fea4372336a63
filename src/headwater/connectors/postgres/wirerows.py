"""The snapshot's faster formats to Arrow: messages of a SELECT, or of `COPY … TO STDOUT (FORMAT binary)`.

A row is its number of fields (16 bits), then each field's length (32 bits, -1 for NULL) and bytes. Before the first row
of a COPY stands a header, and a row of -1 fields ends it. Nothing is escaped, nothing has to be searched for.

All values of a COPY are binary; of a SELECT each column has the form that costs the server and us less (`forms`).

`rowscan.py` has the pass over the rows. Here: where each column lies in its arena, and Arrow columns made of it, in
the order in which rows came; `storage/placing.py` puts them into a segment's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from headwater.connectors.postgres import rowscan as scan
from headwater.connectors.postgres.columns import (
    INT_RANGE,
    MAX_COLUMN_BYTES,
    check_value,
    decode_binary_column,
    decode_column,
    read_only,
)
from headwater.connectors.postgres.copytext import malformed
from headwater.connectors.postgres.rowreader import Messages
from headwater.connectors.postgres.textscan import FINE, Bytes, Longs
from headwater.connectors.postgres.types import ColumnPlan, Kind, Wire
from headwater.errors import DefiniteError

_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
_FLAGS: Final = 4  # none of which a server sets; then the length of an extension of the header
_TRAILER: Final = b"\xff\xff"
_ALIGNED: Final = 64  # bytes, as Arrow has its buffers
_BLOCK_ROWS: Final = 2048  # read column by column: what is noted of them, and they, stay in a core's second cache
_BLOCK_BYTES: Final = 256 << 10  # of wide rows fewer
_LEAST_BLOCK: Final = 64

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
    Wire.DATE: scan.DATE,
    Wire.TIMESTAMP: scan.TIMESTAMP,
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
}
_SIZE: Final = {  # on the wire; others are of any length
    scan.EIGHT: 8,
    scan.FOUR: 4,
    scan.TWO: 2,
    scan.BOOL: 1,
    scan.TIMESTAMP: 8,
    scan.DATE: 4,
    scan.OID: 4,
    scan.BOOL_TEXT: 1,
}
_NO_BYTES: Final = np.empty(0, np.uint8)


def has_binary(plans: Sequence[ColumnPlan]) -> bool:
    """Whether every column has a binary decoder."""
    return all(plan.wire is not Wire.TEXT_ONLY for plan in plans)


def forms(plans: Sequence[ColumnPlan]) -> tuple[int, ...]:
    """In which form to ask for each column.

    Texts are the same bytes in both, and cheaper to make as text; so are numerics. Integers cost the server the same.
    Times, floats and uuids are expensive to print, and to parse.
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
            if rows_at > ends[0]:  # the rows behind it would be taken for a part of it
                raise malformed("the head of the copy is longer than its message")
            starts = starts.copy()
            starts[0] = rows_at
            if rows_at == ends[0]:
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


class RowDecoder:
    """Decodes pieces of one statement's rows; decimals that fit into 64 bits are `decimal64`, which takes less."""

    def __init__(self, plans: Sequence[ColumnPlan], forms: Sequence[int] | None) -> None:
        self.plans, self.names = plans, [p.name for p in plans]
        self.forms = (BINARY_FORM,) * len(plans) if forms is None else forms
        kinds = [_kind(p, f) for p, f in zip(plans, self.forms, strict=True)]
        self.kinds = np.array(kinds, np.int64)
        self.sizes = np.array([_SIZE.get(k, scan.ANY_LENGTH) for k in kinds], np.int64)
        self.limits = np.array([_limits(p) for p in plans], np.int64).reshape(len(plans), 2)
        self.stored = [_stored(p, k) for p, k in zip(plans, kinds, strict=True)]
        fields = [2 if k == scan.FIELD else 0 for k in kinds]
        self.slots = np.array([sum(fields[:i]) for i in range(len(fields))], np.int64)
        self.fields = sum(fields)

    def decode(self, rows: WireRows) -> pa.RecordBatch:
        if rows.nbytes > MAX_COLUMN_BYTES:
            raise DefiniteError("BATCH_TOO_LARGE", "more than 2 GiB of rows in one piece", hint="decode smaller pieces")
        arena = _Arena(self, rows.num_rows)
        self._fill(arena, rows)
        return pa.RecordBatch.from_arrays([arena.column(i) for i in range(len(self.plans))], names=self.names)

    def _fill(self, arena: _Arena, rows: WireRows) -> None:
        arena.data = read_only(rows.data)
        width = max(1, rows.nbytes // max(1, rows.num_rows))
        block = max(_LEAST_BLOCK, min(_BLOCK_ROWS, _BLOCK_BYTES // width))
        column, fault = scan.read_rows(arena.data, rows.starts, rows.ends, arena.described(), block)
        if column == scan.ROW_MALFORMED:
            raise malformed(f"a row of the copy does not have {len(self.plans)} fields")
        if fault != FINE:
            check_value(self.plans[column], (0, fault))


class _Arena:
    """The memory of all columns of a batch, and what `rowscan.py` is told about it."""

    def __init__(self, decoder: RowDecoder, rows: int) -> None:
        self.decoder, self.rows = decoder, rows
        self.data = _NO_BYTES
        count = len(decoder.plans)
        self.bases, self.nulls = np.zeros((2, count), np.int64)
        self.valid = np.full((count, -(-rows // 8)), 255, np.uint8)
        self.fields = np.empty((decoder.fields, rows), np.int64)
        sizes = [-(-rows * bits // 8) for _, bits in decoder.stored]
        starts = list(itertools.accumulate(map(_aligned, sizes), initial=0))
        self.memory = np.empty(starts[-1], np.uint8)
        self.parts = [self.memory[at : at + size] for at, size in zip(starts, sizes, strict=False)]
        for i, (_, bits) in enumerate(decoder.stored):
            self.bases[i] = starts[i] // min(8, max(1, bits // 8))
            if bits == 1:  # the pass only sets bits
                self.parts[i][:] = 0

    def described(self) -> scan.Columns:
        memory, decoder = self.memory, self.decoder
        return scan.Columns(
            kinds=decoder.kinds,
            sizes=decoder.sizes,
            bases=self.bases,
            limits=decoder.limits,
            slots=decoder.slots,
            arena=memory,
            arena2=memory.view(np.int16),
            arena4=memory.view(np.int32),
            arena8=memory.view(np.int64),
            valid=self.valid,
            nulls=self.nulls,
            fields=self.fields,
        )

    def column(self, i: int) -> pa.Array:
        decoder = self.decoder
        kind, bits = decoder.stored[i]
        if bits == 0:
            decode = decode_column if decoder.forms[i] == TEXT_FORM else decode_binary_column
            starts, lengths = self.fields[decoder.slots[i] :][:2]
            return decode(decoder.plans[i], self.data, starts, lengths)
        nulls = int(self.nulls[i])
        valid = pa.py_buffer(self.valid[i]) if nulls else None
        return pa.Array.from_buffers(kind, self.rows, [valid, pa.py_buffer(self.parts[i])], nulls)


def _stored(plan: ColumnPlan, kind: int) -> tuple[pa.DataType, int]:
    """The type of a column in the arena, and how many bits a value takes there; 0: `columns.py` makes it."""
    if kind == scan.FIELD:
        return plan.arrow_type, 0
    if kind in (scan.DECIMAL, scan.DECIMAL_TEXT) and plan.precision <= scan.NARROW_DIGITS:
        return pa.decimal64(plan.precision, plan.scale), 64
    return plan.arrow_type, plan.arrow_type.bit_width


def _kind(plan: ColumnPlan, form: int) -> int:
    if form == TEXT_FORM:
        return scan.DECIMAL_TEXT if plan.kind is Kind.DECIMAL else _TEXTS.get(plan.ddl_type, scan.FIELD)
    return _NUMBERS[plan.ddl_type] if plan.wire in (Wire.INT, Wire.FLOAT) else _KINDS.get(plan.wire, scan.FIELD)


def _limits(plan: ColumnPlan) -> tuple[int, int]:
    if plan.ddl_type in INT_RANGE:
        least, greatest, _ = INT_RANGE[plan.ddl_type]
        return least, greatest
    return plan.precision, plan.scale


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
