"""How wide rows are, as far as it decides the way that they take to Python.

Spark hands rows to Python in batches of n rows. It can bound a batch in bytes too, but then asks for its size at every
row, which takes longer than all the rest. So that is done only for rows that are, or may become, wide: by a
session of its own (`session.py`: `careful_session`), or by not going to Python at all (`segment.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Protocol

WIDE_ROW_BYTES: Final = 256  # of a row in a segment, compressed: ten or twenty times as much in memory
MANY_ROWS: Final = 1024  # of fewer rows the size is mostly the footer of their file
_GROWING: Final = re.compile(
    r"\b(repeat|space|lpad|rpad|sequence|array_repeat|array_agg|collect_list|collect_set|listagg|string_agg|"
    r"group_concat|replace|regexp_replace)\s*\(",
    re.IGNORECASE,
)


class Sized(Protocol):
    """A segment, as far as it matters here."""

    @property
    def rows(self) -> int: ...

    @property
    def bytes(self) -> int: ...


def is_wide(segments: Iterable[Sized]) -> bool:
    """Whether the rows of these segments are wide, on average."""
    rows = size = 0
    for segment in segments:
        rows += segment.rows
        size += segment.bytes
    return size > max(rows, MANY_ROWS) * WIDE_ROW_BYTES


def may_grow(query: str) -> bool:
    """Whether a query may make values that are much longer than those that it reads."""
    return _GROWING.search(query) is not None
