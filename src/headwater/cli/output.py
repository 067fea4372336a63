"""The spelling of results on stdout: a table for people, CSV, or one JSON array a line. Everything else is stderr's."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

from headwater.cli.visible import visible

# Legal in JSON, and the end of a line for some readers (Python's splitlines); control characters are escaped anyway.
_ALSO_LINE_ENDS: Final = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}
_QUOTED_IN_CSV: Final = re.compile(r'[,"\r\n]')


def print_result(result: dict[str, Any], form: str) -> None:
    columns, rows = result["columns"], result["rows"]
    match form:
        case "json":
            text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
            sys.stdout.write(text.translate(_ALSO_LINE_ENDS) + "\n")
        case "csv":
            for line in (columns, *([row.get(c) for c in columns] for row in rows)):
                sys.stdout.write(_csv_line(line))
        case _:
            _print_table(columns, rows)
    sys.stdout.flush()


def _csv_line(values: Iterable[Any]) -> str:
    """As Postgres' COPY writes it: NULL is nothing, an empty text is `""`."""
    return ",".join("" if v is None else _csv_field(str(_cell(v))) for v in values) + "\n"


def _csv_field(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if not text or _QUOTED_IN_CSV.search(text) else text


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return value


def _shown(value: Any) -> str:
    return "NULL" if value is None else str(_cell(value))


def _lines(cells: list[str]) -> Iterator[list[str]]:
    """A row as lines of the table: a text of several lines stays in its column; what steers a terminal is spelt out."""
    parts = [[visible(part, keep="\t") for part in cell.splitlines()] or [""] for cell in cells]
    for i in range(max(map(len, parts), default=0)):
        yield [part[i] if i < len(part) else "" for part in parts]


def _print_table(columns: list[str], rows: list[dict[str, Any]]) -> None:
    lines = [line for row in rows for line in _lines([_shown(row.get(c)) for c in columns])]
    heads = [visible(c) for c in columns]
    widths = [max([len(c), *(len(line[i]) for line in lines)]) for i, c in enumerate(heads)]
    out = sys.stdout.write
    for line in (heads, ["-" * w for w in widths], *lines):
        out("  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)).rstrip() + "\n")
    out(f"({len(rows)} row{'' if len(rows) == 1 else 's'})\n")
