"""A long INSERT … VALUES, cut between its rows: each slice is read by itself, as an INSERT of its own.

A list of a hundred thousand rows is a tree of a million nodes. To make it, and for Python's collector to go through it,
holds the interpreter for a second at a time, and with it everything else that the engine does. So a long text is
cut before it is read, by one pass over its quotes and parentheses; whatever that pass is not sure of is left whole.
`runtime/writes.py` puts the rows of the slices together before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

LONG_CHARS: Final = 256 << 10  # a shorter text is read in some 50 ms
SLICE_CHARS: Final = 64 << 10

_HEAD: Final = re.compile(
    r"\s*INSERT\s+INTO\s+(?:TABLE\s+)?(?:`(?:[^`]|``)+`|\w+)\s*(?:\([^()'\"]*\))?\s*VALUES\s*(?=\()", re.IGNORECASE
)
# Texts and names as a whole, then what decides where a row ends. Comments and raw texts (r'…') have rules of their own.
_SIGN: Final = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`|[()]|(?P<odd>--|/\*|\b[rR](?=['"])|['"`;])""", re.DOTALL
)
_BETWEEN: Final = re.compile(r"\s*,\s*")
_END: Final = re.compile(r"\s*(?:;|\Z)")


def sliced(text: str) -> tuple[list[str], str] | None:
    """The statement that a text of Spark's dialect begins with, as several of fewer rows, and what follows it.

    None: it is short, or no such statement, or not surely one, or a single row.
    """
    head = _HEAD.match(text) if len(text) > LONG_CHARS else None
    if head is None:
        return None
    slices, begin, end = [], head.end(), head.end()
    for row_begin, row_end in _rows(text, head.end()):
        if row_end - begin > SLICE_CHARS and end > begin:
            slices.append(head[0] + text[begin:end])
            begin = row_begin
        end = row_end
    close = _END.match(text, end)
    if close is None or not slices:
        return None
    return [*slices, head[0] + text[begin:end]], text[close.end() :]


def _rows(text: str, start: int) -> Iterator[tuple[int, int]]:
    """Where the rows begin and end, as far as there is one after the other, with commas between."""
    depth, begin, end = 0, start, start
    for sign in _SIGN.finditer(text, start):
        if depth == 0:
            begin = sign.start()
            if sign[0] != "(" or not (begin == start or _BETWEEN.fullmatch(text, end, begin)):
                return
        if sign["odd"]:
            return
        depth += {"(": 1, ")": -1}.get(sign[0], 0)
        if depth == 0:
            end = sign.end()
            yield begin, end
