"""JSON text in pieces of a bounded size, so that nobody who makes or sends it holds the interpreter for long.

Python's encoder is one call of C code: of a long list or text it keeps the interpreter's lock until its end, in
whichever thread it runs, and everything else stands. Each piece here is a call of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

# Encoded in about a millisecond; large enough that its way to the socket costs less than its making.
PIECE_CHARS: Final = 256 << 10
PIECE_ROWS: Final = 1000
SHORT_CHARS: Final = 4096  # of a text that is encoded together with its neighbours
RUN: Final = 1024  # elements of a list that are encoded together

# NaN is not JSON: whoever has the value spells it as text, and a slip must fail here, not in the reader.
_encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def encode(value: Any) -> str:
    """JSON text of a small value."""
    return _encode(value)


def row_pieces(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The rows of a JSON array, without its brackets; commas stand at the beginning of all pieces but the first."""
    at, count, comma = 0, 1, ""
    while at < len(rows):
        text = _encode(rows[at : at + count])
        yield comma + text[1:-1]
        at, comma = at + count, ","
        count = max(1, min(PIECE_ROWS, 4 * count, count * PIECE_CHARS // len(text)))


def value_pieces(value: Any) -> Iterator[str]:
    """JSON text of a value that may be large itself, in pieces that are mostly small: see `gathered`."""
    match value:
        case str() if len(value) > SHORT_CHARS:
            yield '"'
            for at in range(0, len(value), PIECE_CHARS):
                yield _encode(value[at : at + PIECE_CHARS])[1:-1]
            yield '"'
        case list():
            yield "["
            yield from _elements(value)
            yield "]"
        case dict():
            comma = "{"
            for name, inner in value.items():
                yield f"{comma}{_encode(name)}:"
                yield from value_pieces(inner)
                comma = ","
            yield "}" if value else "{}"
        case _:
            yield _encode(value)


def _elements(values: list[Any]) -> Iterator[str]:
    for at in range(0, len(values), RUN):
        part = values[at : at + RUN]
        if all(map(_is_small, part)):
            yield ("," if at else "") + _encode(part)[1:-1]
            continue
        for index, value in enumerate(part):
            if at or index:
                yield ","
            yield from value_pieces(value)


def _is_small(value: Any) -> bool:
    return not isinstance(value, list | dict) and not (isinstance(value, str) and len(value) > SHORT_CHARS)


def gathered(pieces: Iterable[str]) -> Iterator[str]:
    """The same text in fewer pieces."""
    held: list[str] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= PIECE_CHARS:
            yield "".join(held)
            held, size = [], 0
    if held:
        yield "".join(held)
